"""``tonnage verify``: is a checkpoint, an export or a whole run byte for byte what was written?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.display.bar import progress_bar
from tonnage.display.terminal import say, terminal
from tonnage.errors import Problem, UserError, user_error
from tonnage.files.paths import word


def verify(
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint, an export, or a run with both.", parser=word)
    ],
) -> None:
    """Recompute the hash of every file of a checkpoint, an export or a run."""
    from tonnage.checkpoint.save import complete_checkpoints, interrupted_saves
    from tonnage.checkpoint.verify import listed_files
    from tonnage.checkpoint.verify import verify as check
    from tonnage.rundir.directory import CHECKPOINT, RunDirectory

    console = terminal()
    run = RunDirectory(directory)
    places = [Path(directory)]
    if run.is_run():
        for path in interrupted_saves(run.checkpoints):
            say(console, f"{path} was interrupted: it is not a checkpoint, and nothing reads it")
        for path in sorted(run.checkpoints.glob("*")):
            if not CHECKPOINT.fullmatch(path.name) and not path.name.startswith("aside-"):
                say(console, f"{path} is not called as a checkpoint is (step-00000500): nothing reads it")
        places = [*complete_checkpoints(run.checkpoints), *([run.export] if run.export.exists() else [])]
        if not places:
            raise user_error("a run with no complete checkpoint and no export", "either", where=directory)
    problems: list[Problem] = []
    for place in places:
        try:
            with progress_bar(console) as progress:
                listed = check(place, lambda done, total: progress("verify", done, total))
        except UserError as error:
            listed = list(error.problems)
        if listed:
            problems += listed
            say(console, f"{place}: ", ("damaged", "red"))
            continue
        files = listed_files(place)
        size = f"{len(files)} files, {sum(file.num_bytes for file in files) / 1e9:.2f} GB"
        say(console, f"{place}: {size}, as they were written")
    if problems:
        raise UserError(*problems)
