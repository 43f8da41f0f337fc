"""Wheels for a machine that reaches no registry: tonnage's own, and what such a machine often lacks.

A machine with a GPU that others have set up has torch and transformers, and what these bring. The kit holds tonnage and
the packages that its proof imports besides, but for numba and pyarrow: either alone is larger than the kit may be. What
makes it larger than 50 MB is left out, the largest first, and named.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import refusals, user_error

MOST_BYTES = 50_000_000
PYTHON = "3.12"
BROUGHT = ("pydantic>=2.10", "rich>=14.0", "typer>=0.20", "xxhash>=3.5", "jinja2>=3.1", "pyyaml>=6.0")
"""With what they need in turn; ``datasets`` reads hubs and Parquet files, of which the proof has none."""
THERE = (
    *("torch", "transformers", "numba", "llvmlite", "pyarrow", "numpy"),
    *("safetensors", "tokenizers", "huggingface_hub", "setuptools", "triton"),
)
"""Taken to be there; none is brought."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
HOW = """\
tonnage's proof for a machine without registries
================================================

There must be Python {python}, torch 2.11 or newer for CUDA, transformers 5.17 or
newer, numba 0.62 or newer, and pyarrow{left_out}.

    python3 -m pip install --no-index --no-deps --target site *.whl
    PYTHONPATH=site python3 -m tonnage.prove

It says first what is still missing. Results are in tonnage-prove/: prove.json and prove.html. A call that was broken
off goes on where it was; `--only NAME` repeats a piece. With several GPUs: `--gpus 8`.
"""


@dataclass(frozen=True)
class Kit:
    folder: Path
    wheels: tuple[str, ...]
    left_out: tuple[str, ...]
    num_bytes: int


def write_kit(folder: Path) -> Kit:
    """Collect wheels for ``PYTHON`` on Linux and x86-64 into a folder, which is new or empty.

    Raises:
        UserError: the folder holds something, or pip could not get or build a wheel.
    """
    with refusals("the kit could not be written", folder):
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            observed = "a folder that holds something"
            raise user_error(observed, "a new or empty one for the kit", "name another", str(folder))
    source = Path(__file__).resolve().parents[3]
    if not (source / "pyproject.toml").is_file():
        needed = "a checkout of tonnage, of which a wheel can be built"
        raise user_error("tonnage as an installed package", needed, "call it from a checkout", "--prove-kit")
    _pip("wheel", "--no-deps", "--quiet", "--wheel-dir", str(folder), str(source))
    own = {path.name for path in folder.glob("*.whl")}
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    options = ("--quiet", "--only-binary=:all:", "--python-version", PYTHON, *platforms, "-d", str(folder))
    _pip("download", *options, *BROUGHT)
    brought, left_out = choose({path.name: path.stat().st_size for path in folder.glob("*.whl")}, own)
    for path in folder.glob("*.whl"):
        if path.name not in brought:
            path.unlink()
    names = [name for name in left_out if not _is_there(name)]
    words = f", and, as the kit has no room for them: {', '.join(names)}" if names else ""
    (folder / "HOW.txt").write_text(HOW.format(python=PYTHON, left_out=words), encoding="utf-8")
    size = sum(path.stat().st_size for path in folder.iterdir())
    return Kit(folder, tuple(sorted(brought)), tuple(names), size)


def choose(sizes: dict[str, int], own: set[str]) -> tuple[set[str], list[str]]:
    """The wheels that a kit keeps, and the packages that it leaves out; ``own`` stay."""
    kept = {name for name in sizes if name in own or not _is_there(name)}
    left_out = [_package(name) for name in sizes if name not in kept]
    for name in sorted(kept - own, key=lambda name: -sizes[name]):
        if sum(sizes[wheel] for wheel in kept) <= MOST_BYTES:
            break
        kept.remove(name)
        left_out.append(_package(name))
    return kept, sorted(left_out)


def _package(wheel: str) -> str:
    return wheel.partition("-")[0].lower()


def _is_there(wheel: str) -> bool:
    return _package(wheel) in THERE


def _pip(*words: str) -> None:
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True, check=False).returncode:
        observed = "a Python without pip" + (", but uv" if shutil.which("uv") else "")
        raise user_error(observed, "pip, which gets wheels", "python -m ensurepip", "--prove-kit")
    done = subprocess.run([*pip, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no word"]
        last = next((line for line in lines if line.startswith("ERROR")), lines[-1])
        raise user_error(f"pip {words[0]}: {last}", "wheels from a registry", "look at pip's own words", "--prove-kit")
