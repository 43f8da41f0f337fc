"""Parts shared out among processes, or done here when there is little to do.

A few megabytes are tokenised in this process: starting others, each of which imports its libraries, would take longer.
From ``SMALL_BYTES`` on, processes (``worker``) take one part after another from a list, or one process takes all of
them to a Ray cluster. Parts do not depend on who builds them, and neither does anything made from them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from tonnage.config import RayLaunch
from tonnage.data.building.builder import PartBuilder
from tonnage.data.building.recipe import Recipe
from tonnage.data.reading.rows import Part
from tonnage.data.tokens.documents import PartTotals, part_file
from tonnage.errors import Problem, TonnageError, UserError
from tonnage.forms.formats import Form
from tonnage.host.threads import available_cpus

SMALL_BYTES = 24 << 20
MAX_PROCESSES = 16


def num_processes(total_bytes: int, num_parts: int) -> int:
    """How many processes are worth starting besides this one."""
    if total_bytes < SMALL_BYTES or num_parts < 2:
        return 0
    return min(len(available_cpus()), num_parts, MAX_PROCESSES)


def build_parts(
    parts: Sequence[Part],
    forms: Sequence[Form],
    recipe: Recipe,
    directory: Path,
    processes: int,
    advance: Callable[[int], None],
    cluster: RayLaunch | None = None,
) -> list[PartTotals]:
    """Build every part into ``directory``; totals in the order of the parts.

    ``forms``: one per source. ``processes``: how many to start; with 0, this process builds. With a ``cluster``, any
    other number leaves the work to its nodes, and ``directory`` must be the same place on all of them. ``advance`` is
    called with numbers of rows, from this thread or others.

    Raises ``TonnageError`` when a process dies, ``UserError`` where the cluster does not answer or a node does not see
    a file.
    """
    if processes == 0:
        builder = PartBuilder(recipe, overlap=True)
        try:
            return [
                builder.build(part, forms[part.source], directory / part_file(number), advance)
                for number, part in enumerate(parts)
            ]
        finally:
            builder.close()
    tasks = [
        {
            "number": number,
            "part": asdict(part),
            "form": asdict(forms[part.source]),
            "out": str(directory / part_file(number)),
        }
        for number, part in enumerate(parts)
    ]
    job: dict[str, Any] = {"recipe": recipe.to_json(), "cluster": None}
    if cluster is None:
        return _Shared(job, [[task] for task in tasks], advance).build(processes, "a process that tokenises")
    job["cluster"] = {"address": cluster.address, "runtime_env": dict(cluster.runtime_env)}
    return _Shared(job, [tasks], advance).build(1, "the process that prepares on Ray")


class _Shared:
    """Batches of tasks in a list. A process that has done one takes the next."""

    def __init__(
        self, job: Mapping[str, Any], batches: Sequence[Sequence[Mapping[str, Any]]], advance: Callable[[int], None]
    ) -> None:
        self._job, self._advance = json.dumps(job), advance
        self._waiting = iter(batches)
        self._lock = threading.Lock()
        self._totals: list[PartTotals | None] = [None] * sum(map(len, batches))
        self._errors: list[Exception] = []

    def build(self, processes: int, who: str) -> list[PartTotals]:
        """The totals of all tasks. Raises the error that stopped a process; its message names the process ``who``."""
        with ExitStack() as stack:
            threads = []
            for _ in range(processes):
                complaints = stack.enter_context(tempfile.TemporaryFile("w+"))
                worker = _start(complaints)
                stack.callback(_end, worker)
                threads.append(threading.Thread(target=self._serve, args=(worker, complaints, who), daemon=True))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if self._errors:
            raise next((error for error in self._errors if isinstance(error, OSError)), self._errors[0])
        return [totals for totals in self._totals if totals is not None]

    def _take(self) -> Sequence[Mapping[str, Any]] | None:
        with self._lock:
            return None if self._errors else next(self._waiting, None)

    def _serve(self, worker: subprocess.Popen[str], complaints: IO[str], who: str) -> None:
        """Feed one process until nothing is left, or something went wrong."""
        assert worker.stdin is not None
        try:
            worker.stdin.write(self._job + "\n")
            while (batch := self._take()) is not None:
                worker.stdin.write(json.dumps(batch) + "\n")
                worker.stdin.flush()
                if (refusal := self._hear(worker, len(batch))) is not None:
                    self._errors.append(refusal)
                    return
            worker.stdin.close()
            worker.wait()
        except (OSError, ValueError):
            worker.kill()
            status = worker.wait()
            complaints.seek(0)
            reason = f"exit status {status}\n{complaints.read()[-4000:]}".rstrip()
            self._errors.append(TonnageError(f"{who} died: {reason}"))

    def _hear(self, worker: subprocess.Popen[str], tasks: int) -> Exception | None:
        """Read a process's answers until it has done ``tasks``, or says why it has stopped, which is returned. Raises
        ``ValueError`` if it ends before that."""
        assert worker.stdout is not None
        while tasks:
            answer = json.loads(worker.stdout.readline())
            if "problem" in answer:
                return UserError(Problem(**answer["problem"]))
            if "refused" in answer:
                return OSError(*answer["refused"])
            if "rows" in answer:
                self._advance(answer["rows"])
            else:
                self._totals[answer["number"]] = PartTotals.from_json(answer["totals"])
                tasks -= 1
        return None


def _start(complaints: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tonnage.data.building.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _end(worker: subprocess.Popen[str]) -> None:
    if worker.poll() is None:
        worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
