"""Programs that tests, benchmarks and docs hold as texts import what there is: nothing else sees it before they run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
IMPORT = re.compile(r"from (tonnage[\w.]*) import (?:\(([^)]*)\)|([^\n;\"#\\]+))")
NEEDS_TRITON = ("adamw_triton", "quantized_triton", "softmax_triton")


def test_what_texts_import_is_there() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    files += [file for folder in ("tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    lacking, number = [], 0
    for file in files:
        if ".peers" in file.parts:
            continue
        for module, several, listed in IMPORT.findall(file.read_text(encoding="utf-8")):
            listed = re.sub("#.*", "", several) if several else listed
            for name in re.findall(r"(\w+)(?: as \w+)?", listed):
                if name in NEEDS_TRITON or name == "as":
                    continue
                number += 1
                if not hasattr(importlib.import_module(module), name):
                    try:
                        importlib.import_module(f"{module}.{name}")
                    except ImportError:
                        lacking.append(f"{file.relative_to(ROOT)}: {module}.{name}")
    assert number > 1000
    assert not lacking
