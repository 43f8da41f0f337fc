"""Trainings that were begun by a click, each with the config that the page wrote for it.

A training that is refused, or ended, before there is a run leaves nothing behind: its config is removed, and the name
is free again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tonnage.errors import user_error
from tonnage.files.writing import write_whole
from tonnage.page.commands import Command, Commands
from tonnage.rundir.directory import RunDirectory


@dataclass(frozen=True)
class Start:
    command: Command
    config: Path
    text: str
    """Of the config, as it was written."""
    run: RunDirectory

    def remove_config(self) -> None:
        """Remove the config, unless somebody has written another in its place."""
        with suppress(OSError):
            if self.config.read_bytes() == self.text.encode():
                self.config.unlink()


class Starts:
    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._begun: list[Start] = []

    def start(self, config: Path, text: str, run: Path, word: str) -> Command:
        """Write a config whose output is ``run``, and train it; ``word`` is its path as the command is given it.

        Raises:
            UserError: there is a config of that name, or too many commands are at work.
        """
        self.remove_refused()
        try:
            write_whole(config, text, new=True)
        except FileExistsError:
            raise user_error(f"{config} is there", "a name that is free", "choose another name") from None
        try:
            command = self._commands.start(["train", word])
        except Exception:
            config.unlink(missing_ok=True)
            raise
        self._begun.append(Start(command, config, text, RunDirectory(run)))
        return command

    def remove_refused(self) -> None:
        """Remove the configs of trainings that have failed before there was a run."""
        ended = [start for start in self._begun if start.command.status is not None]
        self._begun = [start for start in self._begun if start not in ended]
        for start in ended:
            if start.command.status and not start.run.is_run():
                start.remove_config()
