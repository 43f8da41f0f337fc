"""The forms as documentation: ``python -m tonnage.forms.document docs/data.md`` writes the two tables of that page.

A test compares the page with what this makes of it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import dropwhile
from pathlib import Path

from tonnage.forms.formats import FORMATS, PRESETS

FORMS_HEAD = "| format | fields |\n|---|---|\n"
PRESETS_HEAD = "| format | is | with the columns |\n|---|---|---|\n"


def render(page: str) -> str:
    """The page with its tables as the forms are now."""
    return _with_table(_with_table(page, FORMS_HEAD, _forms()), PRESETS_HEAD, _presets())


def _with_table(page: str, head: str, rows: Iterable[str]) -> str:
    before, head, after = page.partition(head)
    rest = after.splitlines(keepends=True)
    return "".join([before, head, *rows, *dropwhile(lambda line: line.startswith("|"), rest)])


def _forms() -> Iterator[str]:
    for name, format in FORMATS.items():
        may = f"; also {_words(format.may)}" if format.may else ""
        yield f"| `{name}` | {_words(format.must)}{format.about}{may} |\n"


def _presets() -> Iterator[str]:
    for name, (format, columns) in PRESETS.items():
        yield f"| `{name}` | `{format}` | {_words(f'{ours}: {theirs}' for ours, theirs in columns.items())} |\n"


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(render(path.read_text(encoding="utf-8")), encoding="utf-8")
