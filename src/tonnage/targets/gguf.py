"""GGUF by llama.cpp's own converter, wherever that is; never by a writer of ours, which would be wrong next month."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tonnage.errors import user_error

SCRIPT = "convert_hf_to_gguf.py"
COMMANDS = (SCRIPT, "convert-hf-to-gguf")
"""Under which it is found on the PATH: as llama.cpp itself installs it, and as packages do."""
TYPES = {"bf16": "bf16", "fp16": "f16", "fp32": "f32"}
"""Our names of types -> the converter's."""
INSTALL = (
    "git clone --depth 1 https://github.com/ggml-org/llama.cpp && pip install -r llama.cpp/requirements.txt && "
    "tonnage export {run} {directory} --for {target} --converter llama.cpp"
)


def find_converter(converter: str | None, *, run: str, directory: str, target: str) -> list[str]:
    """The command that converts: of a script or a clone of llama.cpp that was ``given``, or of the PATH.

    Raises:
        UserError: there is none; says what to install and what to run then.
    """
    change = INSTALL.format(run=run, directory=directory, target=target)
    if converter is not None:
        path = Path(converter).expanduser()
        path = path / SCRIPT if path.is_dir() else path
        if path.is_file():
            return [sys.executable, str(path.absolute())]
        raise user_error(
            where="--converter", found=f"no {path}", needed=f"llama.cpp's {SCRIPT}, or its folder", change=change
        )
    for name in COMMANDS:
        if (program := shutil.which(name)) is not None:
            return (
                [sys.executable, program] if program.endswith(".py") and not os.access(program, os.X_OK) else [program]
            )
    raise user_error(
        where=f"--for {target}",
        found=f"no converter of llama.cpp: neither {' nor '.join(COMMANDS)} is on the PATH",
        needed="llama.cpp's own converter, for nothing else writes GGUF that all its versions read",
        change=change,
    )


def convert(converter: list[str], directory: Path, name: str, dtype: str, shard_bytes: int | None) -> list[Path]:
    """Convert the model in ``directory`` to ``name`` beside it, in files of ``shard_bytes`` at most; returns the files.

    Raises:
        UserError: the converter refuses the model; says its last words.
    """
    command = [*converter, str(directory), "--outfile", str(directory / name), "--outtype", TYPES[dtype]]
    if shard_bytes is not None:
        command += ["--split-max-size", f"{max(1, shard_bytes // 10**6)}M"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, check=False)
    written = sorted(directory.glob(f"{Path(name).stem}*.gguf"))
    if done.returncode == 0 and written:
        return written
    for path in written:
        path.unlink()
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line or "error" in line), lines[-1] if lines else "")
    raise user_error(
        where=" ".join(converter),
        found=f"llama.cpp's converter ended with status {done.returncode} ({reason[:300] or 'it said nothing'})",
        needed="a model and a tokenizer that llama.cpp knows",
        change="bring llama.cpp up to date, or export --for vllm or transformers, which read any model",
    )
