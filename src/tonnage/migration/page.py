"""The tables as documentation: ``python -m tonnage.migration.page docs/importing.md`` writes them into the page.

What an import is, people have written there; from the tables are what stands below the comment that names this file,
and the config that the example's command becomes. A test compares both, so the page and the account of an import are
one text.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tonnage.migration.command import read_command
from tonnage.migration.convert import convert
from tonnage.migration.keys import ARGUMENTS, LLAMA_FACTORY, SWIFT, TABLES, DocumentedKey
from tonnage.migration.programs import DECIDED, PROGRAMS, Program, in_numbers
from tonnage.migration.reading import Files

COMMAND = "A command such as\n\n```\n"
CONFIG = "becomes\n\n```yaml\n"
BELOW = "<!-- What follows, and the config above, `python -m tonnage.migration.page docs/importing.md` writes. -->\n"


def render(page: str) -> str:
    """The page with what the tables say now: the config of the example, and a table for each kind of configuration."""
    written = page.partition(BELOW)[0]
    command = written.partition(COMMAND)[2].partition("```")[0]
    before, _, rest = written.partition(CONFIG)
    after = rest.partition("```")[2]
    parts = [f"{before}{CONFIG}{_config_of(command)}```{after}{BELOW}", _defaults()]
    for table in TABLES:
        title = table.title[0].upper() + table.title[1:]
        parts.append(f"## {title}\n")
        takes_all = table in (LLAMA_FACTORY, SWIFT)
        if takes_all:
            parts.append("Besides, all arguments of transformers above that are not told otherwise here.\n")
        parts.append("| key | becomes | |\n|---|---|---|")
        parts += [_row(key) for key in table.keys if not takes_all or key not in ARGUMENTS.keys]
        parts.append("")
    return "\n".join(parts).rstrip() + "\n"


def _config_of(text: str) -> str:
    command = read_command(text, "train.sh")
    settings = tuple(replace(setting, number=number) for number, setting in enumerate(command.settings))
    return convert(Files(settings, ("train.sh",), (command.launcher,))).text


def _defaults() -> str:
    """What each program does where its files are silent, and which versions were read."""
    programs = [program for program in PROGRAMS if program.defaults]
    lines = ["## Versions and defaults\n"]
    lines += [f"{'; '.join(f'{program.name} {program.versions}' for program in PROGRAMS)}.\n"]
    lines += ["What holds where a file is silent (-: our own default, or it must be said):\n"]
    lines += [f"| | {' | '.join(program.name for program in programs)} |", f"|---|{'---|' * len(programs)}"]
    for decided, words in DECIDED.items():
        cells = [_cell(program, decided) for program in programs]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _cell(program: Program, decided: str) -> str:
    """What a program does of itself, and where it learns from preferences, if that is otherwise."""
    usual, cells = program.defaults.get(decided), []
    if usual is not None:
        cells.append(_default(usual))
    for method, defaults in program.of_methods.items():
        if decided in defaults:
            cells.append(f"{method}: {_default(defaults[decided])}")
    return "; ".join(cells) or "-"


def _default(default: tuple[str, Any]) -> str:
    """The value, with the name that the program has for it, if it has one."""
    name, value = default
    words = {True: "yes", False: "no", None: name}
    shown = words.get(value, value) if isinstance(value, bool | None) else in_numbers(value)
    return f"{shown} (`{name}`)" if name.replace("_", "").isalnum() else str(shown)


def _row(key: DocumentedKey) -> str:
    becomes = ", ".join(f"`{name}`" for name in key.to) if key.verdict == "mapped" else key.verdict
    return f"| `{key.name}` | {becomes or 'another file'} | {key.reason} |"


if __name__ == "__main__":
    place = Path(sys.argv[1])
    place.write_text(render(place.read_text()))
