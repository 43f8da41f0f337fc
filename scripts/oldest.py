"""Do the fast tests pass with the oldest versions that are supported? They are run in fresh environments with these.

    python scripts/oldest.py [3.11 3.13] [--folder FOLDER] [--output benchmarks/results/oldest.json]

Of everything that ``pyproject.toml`` names, with the extra ``dev``, an environment has the very version of the lower
bound, and what that needs in turn is as new as it can be. Where bounds do not go together, or one cannot be installed,
uv says why, and the bound is wrong. The other extras are resolved in the same way, and not installed: only slow tests
use them.

uv finds the Pythons; it is installed by pip where it is not on the path. torch is its build for CUDA, as PyPI has no
other for Linux: 8 GB, which uv downloads once and keeps in its cache. The environments are in ``FOLDER``, or else are
removed in the end. What is written is dated, for each Python; results for others are left as they are.

Standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
import xml.etree.ElementTree as ET
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.13")
INSTALLED = "dev"
"""The extra that fast tests need."""
OTHERS = ("wandb", "mlflow", "trackio", "eval", "pictures")
"""Those that only slow ones need."""
TESTS = ["-m", "not slow", "--numprocesses", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
"""As ``make test`` runs them; what they leave for the next run is not mixed with what that leaves."""


def lower_bounds(extra: str) -> dict[str, str]:
    """Those of ``pyproject.toml`` by package, with those of an extra and of the extras in it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"][extra]]
    bounds = {}
    for requirement in wanted:  # of which there are more meanwhile
        found = re.fullmatch(r"([\w.-]+)(?:\[([\w,]+)\])?(?:>=([\w.]+))?", requirement)
        if found is None:
            raise SystemExit(f"pyproject.toml: {requirement} is no name with a lower bound, or none")
        name, extras, least = found.groups()
        if name == project["name"]:
            wanted += [each for one in extras.split(",") for each in project["optional-dependencies"][one]]
        elif least:
            bounds[name.lower()] = least
    return bounds


def write_pins(path: Path, extra: str) -> None:
    """Lower bounds as the only versions there are."""
    path.write_text("".join(f"{name}=={least}\n" for name, least in lower_bounds(extra).items()))


def make(uv: str, asked: str, place: Path) -> Path:
    """The environment's Python, which is made anew."""
    subprocess.run([uv, "venv", "--quiet", "--clear", "--python", asked, str(place)], check=True)
    python, pins = place / "bin" / "python", place / "pins.txt"
    how = ["--quiet", "--python", str(python), "--constraint", str(pins)]
    for extra in OTHERS:
        write_pins(pins, extra)
        command = [uv, "pip", "compile", *how, "--extra", extra, str(ROOT / "pyproject.toml")]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    write_pins(pins, INSTALLED)
    subprocess.run([uv, "pip", "install", *how, "--editable", f"{ROOT}[{INSTALLED}]"], check=True)
    return python


def packages(uv: str, python: Path) -> dict[str, str]:
    """What is installed, but for tonnage itself."""
    command = [uv, "pip", "list", "--quiet", "--exclude-editable", "--format", "json", "--python", str(python)]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {package["name"].lower(): package["version"] for package in listed}


def run_tests(python: Path, report: Path) -> dict[str, Any]:
    """What became of them."""
    command = [str(python), "-m", "pytest", *TESTS, "-p", "no:cacheprovider", "--junitxml", str(report)]
    environment = os.environ | {"PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}"}
    began = time.monotonic()
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = round(time.monotonic() - began)
    if not report.exists():
        raise SystemExit(f"pytest ended with status {status}, and without a report")
    passed, failed, skipped = 0, list[str](), Counter[str]()
    for case in ET.parse(report).iter("testcase"):
        why = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif why is not None:
            skipped[why.get("message", "")] += 1
        else:
            passed += 1
    return {
        "counts": {"passed": passed, "failed": len(failed), "skipped": skipped.total()},
        "seconds": seconds,
        "status": status,
        "failed": failed,
        "skipped": dict(sorted(skipped.items())),
    }


def tried(uv: str, asked: str, folder: Path) -> dict[str, Any]:
    """The result for a Python, for the record."""
    place = folder / Path(asked).name
    python = make(uv, asked, place)
    said = subprocess.run([str(python), "--version"], capture_output=True, text=True, check=True).stdout
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout
    installed, bounds = packages(uv, python), lower_bounds(INSTALLED)
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": head.strip(),
        "python": said.split()[1],
        **run_tests(python, place / "tests.xml"),
        "lowest": {name: version for name, version in installed.items() if name in bounds},
        "others": {name: version for name, version in installed.items() if name not in bounds},
    }


def find_uv(folder: Path) -> str:
    """The program, installed into the folder where it is not on the path."""
    if found := shutil.which("uv"):
        return found
    venv.create(folder / "uv", with_pip=True)
    pip = str(folder / "uv" / "bin" / "pip")
    subprocess.run([pip, "install", "--quiet", "--disable-pip-version-check", "uv"], check=True)
    return str(folder / "uv" / "bin" / "uv")


def main() -> int:
    """Returns 1 where a test failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", default=PYTHONS, help="versions or programs; 3.11 and 3.13 without any")
    parser.add_argument("--folder", type=Path, help="where the environments are made, and kept")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    status = 0
    with tempfile.TemporaryDirectory(prefix="tonnage-oldest-") as temporary:
        folder = (asked.folder or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        uv = find_uv(folder)
        for python in asked.pythons:
            found = tried(uv, python, folder)
            status |= found["status"] != 0
            print(json.dumps({key: found[key] for key in ("date", "python", "counts", "seconds", "lowest")}, indent=2))
            if asked.output is not None:
                before = json.loads(asked.output.read_text()) if asked.output.exists() else {}
                results = before | {found["python"].rpartition(".")[0]: found}
                asked.output.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
