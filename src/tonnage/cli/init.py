"""``tonnage init``: a config for a model and rows, each line with its reason."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from tonnage.display.bar import progress_bar
from tonnage.display.terminal import say, terminal
from tonnage.errors import UserError, user_error
from tonnage.files.paths import word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.decide.first_look import Purpose

Answer = TypeVar("Answer")
HERE = "here"
UNITS = {"h": 1.0, "hour": 1.0, "hours": 1.0, "min": 1 / 60, "minutes": 1 / 60, "d": 24.0, "day": 24.0, "days": 24.0}
"""Of an answer to how long a run may take -> hours."""


def init(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="The model to begin with: hub id or directory.", parser=word)
    ],
    rows: Annotated[
        str, typer.Argument(metavar="ROWS", help="Rows to train on: file, directory or hub id.", parser=word)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the config that are settled.")
    ] = None,
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="CONFIG", help="Write the config to this new file.", parser=word)
    ] = "config.yaml",
    purpose: Annotated[
        Literal["chat", "task", "text"] | None,
        typer.Option("--for", help="What the model is for: answers in conversations, one task, or text that goes on."),
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="How long the run may take: 2h, 90min; a number alone is hours."),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(metavar="HARDWARE", help="Where it will run, as 2x8xA100-80GB or RTX4090:128GB; default: here."),
    ] = None,
) -> None:
    """Look at MODEL and ROWS, and write a config that trains the one on the other, each line with its reason.

    At a terminal it asks what the model is for, where it will run and how long it may take, unless options say so.
    """
    from tonnage.cli.data_report import show_account
    from tonnage.cli.new_file import check_new, write_new
    from tonnage.cli.plan import show_plan
    from tonnage.decide.first_look import Wanted, look
    from tonnage.decide.proposal import USES, propose
    from tonnage.planning.words import run_time

    console = terminal()
    check_new(Path(output))
    limit = None if time is None else hours_of(time)
    wishes = Wanted(model, rows, tuple(overrides or ()))
    with progress_bar(console) as progress:
        looked = look(wishes, progress)
    asks = console.is_terminal and sys.stdin.isatty()
    if asks and purpose is None:
        uses = ", ".join(f"{name} ({what})" for name, what in USES.items())
        purpose = ask(console, f"What is it for? {uses}", looked.purpose, purpose_of)
    if asks and hardware is None:
        hardware = ask(console, "Where will it run? here, or hardware as 8xH100 or RTX4090:128GB", HERE, hardware_of)
    with progress_bar(console) as progress:
        proposal = propose(looked, purpose=purpose, hours=limit, hardware=hardware, progress=progress)
    if asks and limit is None and not wishes.says("epochs") and not wishes.says("steps"):
        plan = proposal.plan
        takes = run_time(plan.choice.seconds.total * plan.num_steps)
        as_it_is = f"{proposal.config.epochs:g} epochs, {takes}"
        limit = ask(
            console,
            "How long may it take? 2h, 90min",
            as_it_is,
            lambda typed: None if typed == as_it_is else hours_of(typed),
        )
        if limit is not None:
            proposal = propose(looked, purpose=purpose, hours=limit, hardware=hardware)
    write_new(Path(output), proposal.text)
    show_account(proposal.prepared.account, console)
    show_plan(proposal.plan, console)
    say(console, "Config: ", (output, "bold"), f"    Next:  tonnage train {shlex.quote(output)}")


def ask(console: Console, question: str, default: str, read: Callable[[str], Answer]) -> Answer:
    """The answer to a question; Enter and the end of the input take the ``default``. Asks until ``read`` takes it."""
    from tonnage.cli.main import show_error

    while True:
        try:
            line = console.input(f"{question} [{default}]: ", markup=False).strip()
        except EOFError:
            console.print()
            line = ""
        try:
            return read(line or default)
        except UserError as error:
            show_error(error, console)


def purpose_of(answer: str) -> Purpose:
    """What a model is for, in the word for it or the beginning of that. Raises ``UserError``."""
    from tonnage.decide.proposal import USES

    purposes = [purpose for purpose in USES if purpose.startswith(answer.lower())]
    if len(purposes) != 1:
        raise user_error(f"{answer!r}", f"one of {', '.join(USES)}")
    return purposes[0]


def hardware_of(answer: str) -> str | None:
    """Hardware as it was typed; None is this machine. Raises ``UserError``."""
    from tonnage.planning.machine import parse_hardware

    if answer.lower() == HERE:
        return None
    parse_hardware(answer)
    return answer


def hours_of(answer: str) -> float:
    """A time in hours, typed as ``2h``, ``90min`` or a number of hours. Raises ``UserError``."""
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,6})?)\s*([a-z]*)", answer.strip().lower())
    unit = UNITS.get(match[2] or "h") if match else None
    if match is None or unit is None or float(match[1]) == 0:
        raise user_error(f"a time of {answer[:40]!r}", "hours, or minutes", "write 2h or 90min", "--time")
    return float(match[1]) * unit
