"""What ``make oldest`` installs: the lower bounds of ``pyproject.toml``, of every extra."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPT = runpy.run_path(str(ROOT / "scripts" / "oldest.py"))


def test_every_extra_is_asked_for_with_its_lower_bounds() -> None:
    bounds = {extra: SCRIPT["lower_bounds"](extra) for extra in (SCRIPT["INSTALLED"], *SCRIPT["OTHERS"])}
    for extra, wanted in {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}.items():
        for requirement in wanted:
            name, _, least = requirement.partition(">=")
            asked = [one.get(name.partition("[")[0].lower()) for one in bounds.values()]
            assert least in asked if least else not any(asked), (extra, requirement)
