"""What ``make`` installs goes with every Python that tonnage supports."""

from __future__ import annotations

import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]


def test_pinned_packages_go_with_the_oldest_python() -> None:
    """A package that asks for 3.11.5 cannot be installed on Debian 12, whose Python is 3.11.2."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    lines = [line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pythons = dict[str, str]()
    for name in (line.partition("==")[0] for line in lines if line):
        with suppress(PackageNotFoundError):
            pythons[name] = metadata(name)["Requires-Python"] or ""
    assert len(pythons) > 20
    assert not {name: asked for name, asked in pythons.items() if not SpecifierSet(asked).contains(oldest)}
