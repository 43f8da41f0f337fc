"""Text that would command a shell, a terminal, rich or sbatch if somebody let it; and what tells that somebody did."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CANARY = "canary"
"""A file that is there if a name was carried out."""
SHELL = (
    f"$(touch {CANARY})",
    f"`touch {CANARY}`",
    f"a; touch {CANARY} #",
    f"a' ; touch {CANARY} ; '",
    f'a" ; touch {CANARY} ; "',
    f"a && touch {CANARY}",
    f"a|touch {CANARY}",
    *("two  words ", "-rf", "--help", "*", "?", "[a]", "{a,b}", "~", "~root", "!!", "$HOME", "${HOME}", "$(HOME)"),
    *("$$(HOME)", "$", "$é", "a\\", "\\n", "a#b", "# c", "%j", "100%%", "%", "=", ":", "a:b", "é"),
)
LINES = (
    "a\nb",
    f"a\ntouch {CANARY}\n",
    "a\rb",
    "a\x0bb",
    "a\x0cb",
    "a\x85b",
    "a\u2028b",
    "a\u2029b",
    "a\x1b[31mb",
    "a\x07",
)
"""With line breaks and control characters."""
TERMINAL = (
    *("\x1b[31mred", "\x1b]0;title\x07", "\x1b[2J\x1b[H", "a\rb", "a\x08b", "a\x9bb", "a\x7fb", "a\x00b"),
    *("\u202edetrever", "\u2066a\u2069", "a\udc80b"),
)
MARKUP = ("[/INST]", "[bold]", "[red]a[/red]", "[link=http://x]a[/link]", "[/]", "[a", "a]", ":skull:", "[@click=x]a")
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What must not reach a terminal."""
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
"""What a console of ours writes itself where it has colours and stands still."""


def commands_in(text: str) -> list[str]:
    """What of a printed text would command the terminal, colours aside."""
    return UNSEEN.findall(COLOURS.sub("", text))


def shellcheck(script: str) -> str:
    """What shellcheck complains of; skips the test where it is not installed.

    That nothing expands in single quotes (SC2016), not even a backslash at their end (SC1003), is what they are for.
    """
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck here (the Debian package has it)")
    command = ["shellcheck", "--shell=bash", "--severity=style", "--exclude=SC2016,SC1003", "--format=gcc", "-"]
    return subprocess.run(command, input=script, capture_output=True, text=True, check=False).stdout


def recorder(path: Path, body: str = "") -> None:
    """A program that notes the words it was called with in ``NAME.words``, each ended by a zero byte."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {shlex.quote(f"{path}.words")}\n{body}\n')
    path.chmod(0o755)


def recorded(path: Path) -> list[str]:
    """The words with which a ``recorder`` was called last."""
    return Path(f"{path}.words").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]


@contextmanager
def inside(directory: Path) -> Iterator[None]:
    """Work in a directory."""
    before = Path.cwd()
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(before)
