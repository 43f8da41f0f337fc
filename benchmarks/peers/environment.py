"""Make the environment with the peers: ``benchmarks/.peers/venv``, apart from that of tonnage.

    python benchmarks/peers/environment.py [--again]

torch and transformers are of the versions in ``constraints.txt``, so both sides compute with the same products; the
peers themselves are pinned in ``requirements.txt`` beside this file. DeepSpeed compiles its operators for CPU and disk
when they are first used, which takes a C++ compiler, ninja and the headers of libaio: on Debian or Ubuntu

    apt-get install g++ libaio-dev

Standard library only.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / ".peers" / "venv"


def main() -> None:
    if "--again" in sys.argv:
        shutil.rmtree(FOLDER, ignore_errors=True)
    if (FOLDER / "ready").exists():
        print(f"{FOLDER} is ready")
        return
    if shutil.which("g++") is None or not Path("/usr/include/libaio.h").exists():
        raise SystemExit("DeepSpeed needs a C++ compiler and the headers of libaio: apt-get install g++ libaio-dev")
    venv.create(FOLDER, with_pip=True, clear=True)
    pip = [str(FOLDER / "bin" / "pip"), "install", "--disable-pip-version-check", "--quiet"]
    constraints = ["--constraint", str(HERE.parent.parent / "constraints.txt")]
    subprocess.run([*pip, *constraints, "torch", "setuptools", "wheel", "ninja"], check=True)
    # DeepSpeed's set-up imports torch, so it is built in this environment and not in one of pip's own.
    subprocess.run([*pip, *constraints, "--no-build-isolation", "-r", str(HERE / "requirements.txt")], check=True)
    (FOLDER / "ready").touch()
    print(f"{FOLDER} is ready")


if __name__ == "__main__":
    main()
