"""Tries one after another, in processes that were forked when everything was imported.

imported()     import all there is, and warm what is made once
attempt()      one try, by group and seed: what is wrong with it, if anything
attempts()     many, by several processes; yields what became of each
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hostile import stock as stocks
from hostile.case import chance_of, judge, prepare, run_as_commands, run_forked
from hostile.forking import adopt_orphans
from hostile.groups import GROUPS, SHARES
from hostile.stock import Stock


@dataclass(frozen=True)
class Outcome:
    """What became of a try."""

    group: str
    seed: int
    as_command: bool
    status: int
    seconds: float
    wrong: str = ""
    words: str = ""
    said: str = ""

    @property
    def command(self) -> str:
        """How to see it again."""
        return f"python -m tests.hostile --group {self.group} --seed {self.seed}{' --as-command' * self.as_command}"


def imported(folder: Path) -> Stock:
    """Import all modules, make the stock in ``folder``, and carry some commands out, so that children need not."""
    import tonnage
    from pretended import pretend_measured

    adopt_orphans()
    for module in pkgutil.walk_packages(tonnage.__path__, "tonnage."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    os.environ["TONNAGE_CACHE"] = str(Stock(folder).cache)
    pretend_measured()
    stock = stocks.make(folder)
    config = str(folder / "llama.yaml")
    for words in (["--help"], ["plan", config, f"output={folder}/x"], ["inspect", config], ["verify", str(stock.run)]):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            stocks.carry_out(words)
    gc.collect()
    gc.freeze()
    return stock


def attempt(group: str, seed: int, stock: Stock, *, as_command: bool = False, keep: Path | None = None) -> Outcome:
    """One try; ``keep``: where its directory shall be, which is removed otherwise."""
    folder = keep or Path(tempfile.mkdtemp(prefix="hostile-"))
    try:
        prepare(folder, stock)
        here = Path.cwd()
        try:
            case = GROUPS[group](chance_of(group, seed), folder, stock)
        finally:
            os.chdir(here)
        run = run_as_commands if as_command else run_forked
        ended = run(case, folder, says_yes=bool(seed % 2))
        wrong = judge(case, ended, folder)
        words = " ; ".join(" ".join(one) for one in case.commands)
        said = "\n".join(f"{one.out[-3000:]}\n{one.err[-6000:]}" for one in ended[-1:])
        spent = sum(one.seconds for one in ended)
        return Outcome(group, seed, as_command, ended[-1].status, spent, wrong, words, said if wrong or keep else "")
    except Exception:
        return Outcome(group, seed, as_command, -1, 0.0, "the try itself failed", said=traceback.format_exc())
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def seeds(tries: int, first: int = 0) -> list[tuple[str, int]]:
    """Groups and seeds of so many tries."""
    turns = [group for group in GROUPS for _ in range(SHARES.get(group, 1))]
    return [(turns[number % len(turns)], first + number) for number in range(tries)]


def attempts(
    asked: Sequence[tuple[str, int]], stock: Stock, *, processes: int = 2, as_command: bool = False
) -> Iterator[Outcome]:
    """Many tries by several processes, forked from this one; in any order."""
    reads, writes = os.pipe()
    workers = []
    for number in range(processes):
        if not (worker := os.fork()):
            os.close(reads)
            _serve(asked[number::processes], stock, as_command, writes)
        workers.append(worker)
    os.close(writes)
    try:
        with os.fdopen(reads) as lines:
            for line in lines:
                yield Outcome(**json.loads(line))
    finally:
        for worker in workers:
            with contextlib.suppress(OSError):
                os.kill(worker, signal.SIGTERM)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker, 0)


def _serve(asked: Sequence[tuple[str, int]], stock: Stock, as_command: bool, writes: int) -> None:
    status = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        adopt_orphans()
        for group, seed in asked:
            outcome = attempt(group, seed, stock, as_command=as_command)
            line = (json.dumps(asdict(outcome)) + "\n").encode()
            while line:
                line = line[os.write(writes, line) :]
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
