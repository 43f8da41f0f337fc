"""Environments with CUDA builds of torch, in which the stand-in works.

The oldest versions that are supported, and those of ``constraints.txt``. Packages of the same version exist with and
without CUDA: ``===`` asks for the one whose version is exactly that, which on PyPI is the CUDA build. Standard library
only.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
FOLDER = Path(os.environ.get("STAND_IN_ENVIRONMENTS", HERE / ".environments"))
"""Where environments are, one for each version of torch; 5 GB each."""
VERSIONS = {"2.11.0": ["transformers==5.17.0"], "2.13.0": ["transformers"]}
"""Versions of torch, and what comes with each."""
HEADERS = "nvidia-cuda-crt==13.0.*"
"""That part of CUDA's headers which torch does not bring along."""
PEERS = ("trl", "peft", "liger-kernel")
"""What is measured beside ours (``benchmarks/gpu``)."""


def make(version: str) -> None:
    """Make the environment for a version of torch, unless it is there.

    Raises ``CalledProcessError`` where a package cannot be had.
    """
    folder = FOLDER / version
    if (folder / "ready").exists():
        print(f"{folder} is ready")
        return
    venv.create(folder, with_pip=True, clear=True)
    pip = str(folder / "bin" / "pip")
    with tempfile.TemporaryDirectory() as temporary:
        pins = Path(temporary) / "pins.txt"
        pins.write_text(_pins(version))
        wanted = [f"torch==={version}", *VERSIONS[version], HEADERS, *PEERS, "tensorboard", f"{ROOT}[torchao]"]
        quiet = ["--quiet", "--disable-pip-version-check"]
        subprocess.run([pip, "install", *quiet, "--constraint", str(pins), *wanted], check=True)
        subprocess.run([pip, "uninstall", *quiet, "--yes", "tonnage"], check=True)  # it is walked as it lies here
    (folder / "ready").touch()
    print(f"{folder} is ready")


def _pins(version: str) -> str:
    """What ``constraints.txt`` says, where that has this version of torch; nothing else is pinned by it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    if f"torch=={version}" not in lines:
        return ""
    return "\n".join(line.replace("torch==", "torch===") if line.startswith("torch==") else line for line in lines)
