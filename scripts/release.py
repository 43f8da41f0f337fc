"""The wheel and the source archive of a release, and the proof that they work where nothing of this checkout is seen.

    python scripts/release.py build [--to dist]
    python scripts/release.py prove [3.11 3.12 3.13] [--folder FOLDER] [--output benchmarks/results/wheel.json]

``build`` makes the source archive, of that the wheel, and compares both with the files that git knows: nothing may be
missing (kernels, templates, tables, the page's style and script, ``py.typed``), and nothing else be there.

``prove`` builds them and, for each Python, puts the wheel into a fresh environment and works in an empty folder: every
module is imported, a run is planned, trained, asked, exported, verified and shown, and with ``--demo`` the whole of
``tonnage demo`` follows. Every extra is resolved, and those that are small are installed and used. Then ``uv tool
install`` and ``pipx install`` put the command elsewhere, which is asked for its version. Pythons are versions that uv
finds, or programs.

uv is installed by pip where it is not on the path. torch is of the version in ``constraints.txt``: its build for CUDA,
as PyPI has no other for Linux (4 GB for each Python, once; ``UV_FIND_LINKS`` may name a folder with another build).
What is written is dated, for each Python; results for others are left as they are. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oldest import find_uv

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
USED = ("serve", "tensorboard")
"""Extras that are installed, and whose modules are imported."""
LEFT_OUT = ("dev",)
"""Those for who works on tonnage itself."""

MODULES = """
import importlib, json, pkgutil, sys
from importlib.resources import files
import tonnage
assert "site-packages" in tonnage.__file__, tonnage.__file__
assert files("tonnage").joinpath("py.typed").is_file()
missing = {}
for module in pkgutil.walk_packages(tonnage.__path__, "tonnage."):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        missing[module.name] = error.name
print(json.dumps({"modules": len([name for name in sys.modules if name.startswith("tonnage")]), "missing": missing}))
"""
"""Imports everything, and says of which modules a package is missing."""

FOLDER = """
from pathlib import Path
from tonnage.demo.folder import write_folder
print(write_folder(Path("runs/demo")).config)
"""
SHORT = ("steps=20", "data.max_length=128", "evaluate.prompts=1")
COMMANDS = (
    ["--version"],
    ["--help"],
    ["plan", "runs/demo/config.yaml"],
    ["inspect", "runs/demo/config.yaml", "--rows", "1"],
    ["train", "runs/demo/config.yaml", *SHORT],
    ["generate", "runs/demo/run", "--prompt", "Sort these numbers: 9 4 7", "--max-new-tokens", "4"],
    ["eval", "runs/demo/run", "--data", "runs/demo/held-out.jsonl"],
    ["export", "runs/demo/run", "exported"],
    ["verify", "runs/demo/run"],
    ["report", "runs/demo/run"],
    ["import", "ds_config.json"],
)
"""What is typed in a folder with the demo's files."""


def build(uv: str, to: Path) -> list[Path]:
    """The source archive and the wheel in ``to``, compared with what git knows."""
    to.mkdir(parents=True, exist_ok=True)
    subprocess.run([uv, "build", "--quiet", "--out-dir", str(to), str(ROOT)], check=True)
    archives = [max(to.glob(pattern), key=lambda path: path.stat().st_mtime) for pattern in ("*.tar.gz", "*.whl")]
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for archive in archives:
        for problem in differences(archive, set(listed.splitlines())):
            raise SystemExit(f"error: {archive.name}: {problem}")
    return archives


def differences(archive: Path, known: set[str]) -> list[str]:
    """What an archive lacks of the files of ``src`` that git knows, and what it has besides."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        packed, besides = {f"src/{name}" for name in names}, {"LICENSE"} - _licences(archive)
    else:
        with tarfile.open(archive) as source:
            names = [name.partition("/")[2] for name in source.getnames() if not source.getmember(name).isdir()]
        packed = {name for name in names if name.startswith("src/") and ".egg-info/" not in name}
        besides = {"LICENSE", "README.md", "pyproject.toml"} - set(names)
    problems = [f"lacks {name}" for name in sorted(known - packed) + sorted(besides)]
    return problems + [f"has {name}, which git does not know" for name in sorted(packed - known)]


def _licences(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return {Path(name).name for name in archive.namelist() if ".dist-info/licenses/" in name}


class Proof:
    """One Python: commands in an empty folder, timed, of which the first that fails ends it."""

    def __init__(self, uv: str, python: str, wheel: Path, folder: Path) -> None:
        self.uv, self.python, self.wheel, self.folder = uv, python, wheel, folder
        self.place, self.work = folder / "environment", folder / "work"
        self.seconds: dict[str, float] = {}
        self.work.mkdir(parents=True)
        self.bounds = ["--constraint", str(ROOT / "constraints.txt")]
        hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
        own = {"TONNAGE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden} | own

    def run(self, name: str, command: list[str], **variables: str) -> str:
        """What a command prints."""
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=self.work, env=self.environment | variables, capture_output=True, text=True, check=False
        )
        self.seconds[name] = round(time.monotonic() - began, 1)
        print(f"{self.python}: {name}: {self.seconds[name]} s", flush=True)
        if done.returncode:
            raise SystemExit(f"error: {' '.join(command)} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def install(self) -> None:
        """The wheel alone, in a fresh environment."""
        self.run("environment", [self.uv, "venv", "--quiet", "--clear", "--python", self.python, str(self.place)])
        self.pip("install", *self.bounds, str(self.wheel))

    def pip(self, name: str, *words: str) -> None:
        """Install packages."""
        python = str(self.place / "bin" / "python")
        self.run(name, [self.uv, "pip", "install", "--python", python, *words])

    def script(self, name: str, code: str) -> str:
        """What a script prints, in Python's isolated mode."""
        return self.run(name, [str(self.place / "bin" / "python"), "-I", "-c", code])

    def commands(self, *, demo: bool) -> None:
        """``COMMANDS``, as they would be typed, and the demo."""
        self.script("folder", FOLDER)
        (self.work / "ds_config.json").write_text('{"train_batch_size": 64, "bf16": {"enabled": true}}')
        for words in [*COMMANDS, *([["demo"]] if demo else [])]:
            self.run(f"tonnage {words[0]}", [str(self.place / "bin" / "tonnage"), *words])

    def extras(self, names: list[str]) -> None:
        """All can be resolved with this Python, by versions of their own (``constraints.txt`` knows the extras of
        ``dev`` alone); the small ones are used."""
        torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
        for name in names:
            self.pip(f"{name} resolved", "--dry-run", torch, f"{self.wheel}[{name}]")
        self.pip("extras", *self.bounds, f"{self.wheel}[{','.join(USED)}]")
        self.script("extras used", "import starlette, uvicorn, tensorboard, tonnage.serving.app")

    def tools(self) -> None:
        """The command alone, put on the path by uv and by pipx."""
        for name, command, where in (
            ("uv tool", [self.uv, "tool"], {"UV_TOOL_DIR": "tools", "UV_TOOL_BIN_DIR": "bin"}),
            ("pipx", [self.uv, "tool", "run", "pipx"], {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin-pipx"}),
        ):
            variables = {key: str(self.folder / value) for key, value in where.items()}
            bounds = self.bounds if name == "uv tool" else ["--pip-args", " ".join(self.bounds)]
            python = str(self.place / "bin" / "python")
            program = Path(python).resolve()  # pipx makes its environment of the Python that this one is of
            self.run(
                f"{name} install",
                [*command, "install", "--python", str(program), *bounds, str(self.wheel)],
                **variables,
            )
            (bin_folder,) = (value for key, value in variables.items() if "BIN" in key)
            self.run(f"{name}: tonnage", [f"{bin_folder}/tonnage", "--version"])
            self.run(f"{name} uninstall", [*command, "uninstall", "tonnage"], **variables)


def proved(uv: str, python: str, archives: list[Path], folder: Path, *, demo: bool) -> dict[str, Any]:
    """The result for a Python, for the record."""
    source, wheel = archives
    proof = Proof(uv, python, wheel, folder)
    proof.install()
    imported = json.loads(proof.script("import", MODULES))
    proof.commands(demo=demo)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    proof.extras([name for name in extras if name not in LEFT_OUT])
    versions = proof.script("versions", "import platform, torch; print(platform.python_version(), torch.__version__)")
    proof.tools()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": head.strip(),
        "python": versions.split()[0],
        "torch": versions.split()[1],
        "archives": {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in (source, wheel)},
        "modules": imported["modules"],
        "modules that need an extra": imported["missing"],
        "seconds": proof.seconds,
    }


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def prove(uv: str, options: argparse.Namespace, folder: Path) -> None:
    """For each Python, written as soon as it is there."""
    archives = build(uv, folder / "dist")
    for python in options.pythons:
        place = folder / re.sub(r"\W+", "-", python).strip("-")
        result = proved(uv, python, archives, place, demo=options.demo)
        if options.output is not None:
            before: Mapping[str, Any] = json.loads(options.output.read_text()) if options.output.exists() else {}
            results = {**before, result["python"].rpartition(".")[0]: result}
            options.output.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")


def main() -> None:
    """Build, or prove."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parsers = parser.add_subparsers(dest="command", required=True)
    building = parsers.add_parser("build")
    building.add_argument("--to", type=Path, default=ROOT / "dist")
    proving = parsers.add_parser("prove")
    proving.add_argument("pythons", nargs="*", default=PYTHONS, help="versions or programs")
    proving.add_argument("--demo", action="store_true", help="carry out `tonnage demo` whole, too: minutes")
    proving.add_argument("--folder", type=Path, help="where the environments are made, and kept")
    proving.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tonnage-release-") as temporary:
        uv = find_uv(Path(temporary))
        if options.command == "build":
            print(*build(uv, options.to), sep="\n")
        else:
            prove(uv, options, (options.folder or Path(temporary)).resolve())


if __name__ == "__main__":
    sys.exit(main())
