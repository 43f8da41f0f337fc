"""The folder that a page is over: its runs, and which paths are inside of it.

A run is named by its path below the folder. Links are followed as long as what they lead to is inside; what leads out
is refused, be it a run, a file of a run that a stranger has written, or a path that somebody asks for.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from tonnage.errors import user_error
from tonnage.rundir.directory import RunDirectory

DEEPEST = 6
"""Levels below the folder at which runs are looked for."""
MOST_FOLDERS = 20_000
"""That are looked into."""
MOST_CONFIGS, CONFIG_BYTES = 200, 8192
LOOK_SECONDS, MOST_SECONDS = 6.0, 60.0
"""Between two looks for new runs: the longer the more folders there are."""
SHARE = 1 / 500
"""Of its time that is spent on looking, unless ``MOST_SECONDS`` asks for more."""
PASSED_OVER = frozenset({"node_modules", "__pycache__", "site-packages", "checkpoints", "export"})


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self._next_look = 0.0
        self._names: list[str] = []

    def inside(self, name: str) -> Path:
        """A path below the folder, which need not be there.

        Raises:
            UserError: it is outside, or no path at all.
        """
        try:  # '..' is taken away before links are followed
            path = Path(os.path.abspath(self.path / name))  # noqa: PTH100
            resolved = path.resolve()
            with suppress(FileNotFoundError, NotADirectoryError):
                resolved.stat()
        except (OSError, ValueError, RuntimeError) as error:
            raise user_error(f"{name[:100]!r} is no path", f"a path below {self.path}") from error
        if not (path.is_relative_to(self.path) and resolved.is_relative_to(self.path)):
            change = "start the page over a folder that holds it: tonnage page FOLDER"
            raise user_error(f"{name[:100]!r} is not below {self.path}", "a path below the folder", change)
        return path

    def run(self, name: str) -> RunDirectory:
        """The run of a name.

        Raises:
            UserError: there is none, a file of it lies outside the folder, or is something else than a file: whoever
                read a pipe would wait for a writer.
        """
        path = self.inside(name)
        run = RunDirectory(path)
        if not run.is_run():
            raise user_error(f"no run {name[:100]!r}", "a run below the folder", "name a directory that tonnage wrote")
        for entry in _entries(path):
            if entry.is_symlink():
                self.inside(os.path.relpath(entry.path, self.path))
            if not (entry.is_file() or entry.is_dir()) and Path(entry.path).exists():
                raise user_error("no file and no directory", "a file that tonnage wrote", "remove it", entry.path)
        return run

    def runs(self) -> list[str]:
        """The names of all runs, as they were found at most ``LOOK_SECONDS`` ago."""
        began = time.monotonic()
        if began >= self._next_look:
            self._names = sorted(self._walked())
            taken = time.monotonic() - began
            self._next_look = began + min(max(LOOK_SECONDS, taken / SHARE), MOST_SECONDS)
        return self._names

    def configs(self) -> Iterator[str]:
        """Names of configs: YAML files of the folder and of the folders in it, of which no run is made."""
        for pattern in ("*.yaml", "*.yml", "*/*.yaml", "*/*.yml"):
            for path in sorted(self.path.glob(pattern))[:MOST_CONFIGS]:
                is_own = path.name == "config.yaml" and (path.parent / "plan.json").exists()
                start = _read(path, lambda size: (0, CONFIG_BYTES))
                if not is_own and re.search(rb"^model\s*:", start, re.MULTILINE):
                    yield os.path.relpath(path, self.path)

    def _walked(self) -> Iterator[str]:
        runs_before, waiting, num_folders = set(self._names), [("", 0)], 0
        while waiting and num_folders < MOST_FOLDERS:
            name, level = waiting.pop()
            path = f"{self.path}/{name}"
            num_folders += 1
            if name in runs_before and os.path.exists(f"{path}/plan.json"):  # noqa: PTH110  # as before: no need to list it
                yield name
                continue
            try:
                with os.scandir(path) as entries:
                    below = {entry.name: entry for entry in entries if not entry.name.startswith(".")}
            except OSError:
                continue
            if ("config.yaml" in below and "plan.json" in below) or "metrics.jsonl" in below:
                yield name or "."
            elif level < DEEPEST:
                waiting += [
                    (f"{name}/{other}" if name else other, level + 1)
                    for other, entry in below.items()
                    if other not in PASSED_OVER and self._is_folder(entry)
                ]

    def _is_folder(self, entry: os.DirEntry[str]) -> bool:
        try:
            if not entry.is_symlink():
                return entry.is_dir()
            target = Path(entry.path).resolve()
            return entry.is_dir() and target.is_relative_to(self.path) and not self.path.is_relative_to(target)
        except (OSError, RuntimeError):
            return False


def _entries(run: Path) -> Iterator[os.DirEntry[str]]:
    """The files of a run that anybody reads: its own, and those of its workers, tokenizer, trackers and plans."""
    for folder in (run, *(run / name for name in ("workers", "tokenizer", "trackers", "plans", "checkpoints"))):
        try:
            with os.scandir(folder) as entries:
                yield from entries
        except OSError:
            continue


def read_end(path: Path, num_bytes: int) -> bytes:
    """The last bytes of a regular file; nothing where there is none."""
    return _read(path, lambda size: (max(0, size - num_bytes), num_bytes))


def _read(path: Path, part: Callable[[int], tuple[int, int]]) -> bytes:
    """A part of a regular file, whose place and size follow from the file's. Never waits, as opening a pipe would."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError):
        return b""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return b""
        start, num_bytes = part(status.st_size)
        return os.pread(descriptor, num_bytes, start)
    except OSError:
        return b""
    finally:
        os.close(descriptor)
