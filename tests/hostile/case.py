"""One try: what is carried out, on what, and what must not come of it.

A try is a pure function of a group and a seed. Its directory:

    work/       where commands run, and where its files are
    home/ tmp/ cache/
    outside/    a secret that no command has reason to read, and that none may change
    bin/        programs that are found first
    said/       what the commands print
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hostile.forking import LINES, SECONDS, Ended, forked, watched, yes_file
from hostile.stock import Stock, carry_out
from hostile.strings import CANARY, UNSEEN, commands_in

SECRET = "pomegranate-7351"
FOLDERS = ("work", "home", "tmp", "cache", "outside", "bin", "said")
LONGEST = 30_000
"""Letters of what is printed of an error."""
TRACEBACK = "Traceback (most recent call last)"
TONNAGE = (
    "import sys; sys.argv[0] = 'tonnage'; from runpy import run_module; run_module('tonnage', run_name='__main__')"
)

Check = Callable[[Sequence[Ended]], str]


@dataclass(frozen=True)
class Case:
    """What a group makes of a seed."""

    commands: Sequence[Sequence[str]]
    """Words of command lines, carried out until one fails. ``work RUN`` is a worker of a run that was written."""
    broken: str = ""
    """What is wrong with the input: to succeed is a failure then, unless what is printed says one of ``named``."""
    named: Sequence[str] = ()
    sound: bool = False
    """Whether the input is right, and to be refused is a failure."""
    terminal: bool = False
    """Whether the commands print to a terminal."""
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    """Done in the child before a command: a bound, a closed stream."""
    check: Check | None = None
    """Another look at what came of it: returns what is wrong."""
    statuses: Sequence[int] = (0, 2)
    """Ways to end that are right."""
    may_leave: bool = False
    """Whether files may stay in ``tmp``."""


Maker = Callable[[random.Random, Path, Stock], Case]


def chance_of(group: str, seed: int) -> random.Random:
    """Whatever a try needs of chance."""
    return random.Random(f"{group}:{seed}")


def prepare(folder: Path, stock: Stock) -> None:
    """Make the directory of a try."""
    for name in FOLDERS:
        (folder / name).mkdir(parents=True)
    shutil.copytree(stock.cache, folder / "cache", dirs_exist_ok=True)
    (folder / "outside" / "secret.txt").write_text(SECRET)


def run_forked(case: Case, folder: Path, *, says_yes: bool) -> list[Ended]:
    """Carry the commands out in children of this process."""

    def child(words: Sequence[str]) -> Callable[[], int]:
        def work() -> int:
            os.environ.update(_environment(case, folder))
            os.chdir(folder / "work")
            if case.before is not None:
                case.before()
            return carry_out(list(words))

        return work

    ended: list[Ended] = []
    for words in case.commands:
        lines = lines_for(words)
        ended.append(forked(child(words), folder / "said", says_yes=says_yes, terminal=case.terminal, lines=lines))
        if ended[-1].status or ended[-1].wrong:
            break
    return ended


def run_as_commands(case: Case, folder: Path, *, says_yes: bool) -> list[Ended]:
    """Carry them out as a user does: new processes, with the console script's own function."""
    ended: list[Ended] = []
    for words in _as_typed(case.commands):
        yes = yes_file(folder / "said", lines_for(words)) if says_yes else None

        def begin(given: Path | None = yes) -> None:
            os.close(0)
            if given is not None:
                os.open(given, os.O_RDONLY)
            if case.before is not None:
                case.before()

        with (folder / "said" / "out").open("w") as out, (folder / "said" / "err").open("w") as err:
            try:
                process = subprocess.Popen(
                    [sys.executable, "-c", TONNAGE, *words],
                    stdout=out,
                    stderr=err,
                    cwd=folder / "work",
                    env={**os.environ, **_environment(case, folder)},
                    start_new_session=True,
                    preexec_fn=begin,
                )
            except PermissionError:  # whom ``before`` makes of us may not even start Python here
                ended.append(Ended(2, "", "error: not started", 0.0))
                break
        ended.append(watched(process.pid, folder / "said", seconds=STARTS + SECONDS))
        process.returncode = ended[-1].status  # it was waited for
        if ended[-1].status or ended[-1].wrong:
            break
    return ended


def lines_for(words: Sequence[str]) -> int:
    """How often somebody says "y": a chat answers each time."""
    return 4 if words[0] == "chat" else LINES


STARTS = 15.0
"""Processor time of a command and its worker to import everything, which children of one process do not spend."""


def _as_typed(commands: Sequence[Sequence[str]]) -> list[list[str]]:
    """``train --prepare`` and ``work`` are the two halves of ``train``."""
    works = any(words[0] == "work" for words in commands)
    whole = [[word for word in words if not (works and word == "--prepare")] for words in commands]
    return [words for words in whole if words[0] != "work"]


def _environment(case: Case, folder: Path) -> dict[str, str]:
    places = {"HOME": "home", "TMPDIR": "tmp", "TONNAGE_CACHE": "cache"}
    found = {name: str(folder / place) for name, place in places.items()}
    return found | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", **case.environment}


def judge(case: Case, ended: Sequence[Ended], folder: Path) -> str:
    """What is wrong with how a try ended; empty if nothing is."""
    last = ended[-1]
    said = "\n".join(one.out + one.err for one in ended)
    if last.wrong:
        return last.wrong
    if last.status < 0:
        return f"ended by signal {-last.status}"
    if any(TRACEBACK in one.err for one in ended):
        return "a traceback"
    if last.status not in case.statuses:
        return f"exit status {last.status}"
    if last.status == 2 and not last.err.strip() and 1 in _open_streams(case):
        return "refused without a word"
    if len(last.err) > LONGEST:
        return f"{len(last.err):,} letters of errors"
    if any(UNSEEN.search(_without_progress(one.err)) for one in ended) and not case.terminal:
        return "control characters in what is said"
    if case.terminal and any(commands_in(_without_progress(one.out + one.err)) for one in ended):
        return "control characters on the terminal"
    if SECRET in said:
        return "a file outside was read"
    if found := _strays(folder, case):
        return found
    if case.broken and last.status == 0 and not any(name.lower() in said.lower() for name in case.named):
        return f"success, although {case.broken}"
    if case.sound and last.status:
        return "refused, although the input is right"
    return case.check(ended) if case.check is not None else ""


def _open_streams(case: Case) -> tuple[int, ...]:
    return () if case.before is not None else (1, 2)


_PROGRESS = re.compile(r"\x1b\[(?:\?25[lh]|[0-9]*[AKJG]|2K)|\r")
"""How rich draws a line anew on a terminal of its own accord."""


def _without_progress(text: str) -> str:
    return _PROGRESS.sub("", text)


def _strays(folder: Path, case: Case) -> str:
    """Files that are where none should be."""
    if any(folder.rglob(CANARY)):
        return "something of the input was carried out"
    if sorted(path.name for path in folder.iterdir()) != sorted(FOLDERS):
        return f"files beside: {sorted(path.name for path in folder.iterdir())}"
    outside = folder / "outside"
    if [path.name for path in outside.iterdir()] != ["secret.txt"] or (outside / "secret.txt").read_text() != SECRET:
        return "something outside was changed"
    left = [path.name for path in (folder / "tmp").iterdir() if not path.name.startswith("torchinductor")]
    if left and not case.may_leave:
        return f"left in the directory for temporary files: {left[:5]}"
    return ""
