"""Parts shared out among processes, or done here when there is little to do.

A few megabytes are tokenised in this process: starting others, each of which imports its libraries, would take longer.
From ``SMALL_BYTES`` on, worker processes take one part after another from a list, or the nodes of a Ray cluster do
(``ray_parts``). Parts do not depend on how many processes there are, and neither does anything made from them.
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
from typing import IO

from tonnage.config import RayLaunch
from tonnage.data.builder import PartBuilder
from tonnage.data.documents import PartTotals, part_file
from tonnage.data.formats import Form
from tonnage.data.recipe import Recipe
from tonnage.data.rows import Part
from tonnage.errors import Problem, TonnageError, UserError

SMALL_BYTES = 24 << 20
MAX_PROCESSES = 16


def num_processes(total_bytes: int, num_parts: int) -> int:
    """How many processes are worth starting; 0 is none beside this one."""
    if total_bytes < SMALL_BYTES or num_parts < 2:
        return 0
    return min(len(os.sched_getaffinity(0)), num_parts, MAX_PROCESSES)


def build_parts(
    parts: Sequence[Part],
    forms: Sequence[Form],
    recipe: Recipe,
    directory: Path,
    processes: int,
    advance: Callable[[int], None],
) -> list[PartTotals]:
    """Build every part into ``directory``; totals in the order of the parts.

    ``forms``: one per source. ``advance`` is called with numbers of rows, from this thread or others.
    Raises ``TonnageError`` when a worker process dies.
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
    return _shared(parts, forms, recipe, directory, processes, advance)


def _shared(
    parts: Sequence[Part],
    forms: Sequence[Form],
    recipe: Recipe,
    directory: Path,
    processes: int,
    advance: Callable[[int], None],
) -> list[PartTotals]:
    totals: list[PartTotals | None] = [None] * len(parts)
    waiting = iter(range(len(parts)))
    lock = threading.Lock()
    errors: list[str] = []
    refusals: list[OSError] = []
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}

    def take() -> int | None:
        with lock:
            return None if errors or refusals else next(waiting, None)

    def serve(worker: subprocess.Popen[str], complaints: IO[str]) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            worker.stdin.write(recipe.to_json() + "\n")
            while (number := take()) is not None:
                worker.stdin.write(json.dumps(_task(number, parts[number], forms, directory)) + "\n")
                worker.stdin.flush()
                for line in worker.stdout:
                    answer = json.loads(line)
                    if "rows" in answer:
                        advance(answer["rows"])
                        continue
                    if "refused" in answer:
                        refusals.append(OSError(*answer["refused"]))
                        return
                    totals[number] = PartTotals.from_json(answer["totals"])
                    break
                else:
                    raise BrokenPipeError
            worker.stdin.close()
            worker.wait()
        except (OSError, ValueError):
            worker.kill()
            status = worker.wait()
            complaints.seek(0)
            with lock:
                errors.append(f"exit status {status}\n{complaints.read()[-4000:]}".rstrip())

    with ExitStack() as stack:
        workers = []
        threads = []
        for _ in range(processes):
            complaints = stack.enter_context(tempfile.TemporaryFile("w+"))
            worker = _start("tonnage.data.worker", complaints, environment)
            workers.append(worker)
            threads.append(threading.Thread(target=serve, args=(worker, complaints), daemon=True))
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for worker in workers:
                if worker.poll() is None:
                    worker.kill()
                worker.wait()
                for pipe in (worker.stdin, worker.stdout):
                    if pipe is not None:
                        with suppress(OSError):
                            pipe.close()
    if refusals:
        raise refusals[0]
    if errors:
        raise TonnageError(f"a process that tokenises died: {errors[0]}")
    return [found for found in totals if found is not None]


def build_parts_on_ray(
    parts: Sequence[Part],
    forms: Sequence[Form],
    recipe: Recipe,
    directory: Path,
    cluster: RayLaunch,
    advance: Callable[[int], None],
) -> list[PartTotals]:
    """As ``build_parts``, by the nodes of a cluster; ``directory`` must be the same place on all of them.

    Raises ``UserError`` where the cluster does not answer or does not see a file, ``TonnageError`` when it fails.
    """
    job = {
        "address": cluster.address,
        "runtime_env": dict(cluster.runtime_env),
        "recipe": recipe.to_json(),
        "directory": str(directory),
        "tasks": [_task(number, part, forms, directory) for number, part in enumerate(parts)],
    }
    totals: list[PartTotals | None] = [None] * len(parts)
    with tempfile.TemporaryFile("w+") as complaints:
        worker = _start("tonnage.data.ray_parts", complaints, os.environ)
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            with suppress(BrokenPipeError):
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.close()
            for line in worker.stdout:
                answer = json.loads(line)
                if "problem" in answer:
                    raise UserError(Problem(**answer["problem"]))
                totals[answer["number"]] = PartTotals.from_json(answer["totals"])
                advance(answer["rows"])
            worker.wait()
        finally:
            worker.kill()
            worker.wait()
        done = [found for found in totals if found is not None]
        if len(done) < len(parts):
            complaints.seek(0)
            said = complaints.read()[-4000:].rstrip()
            raise TonnageError(f"Ray prepared {len(done)} of {len(parts)} parts of the data and ended:\n{said}")
    return done


def _start(module: str, complaints: IO[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=complaints,
        text=True,
        env=environment,
        start_new_session=True,
    )


def _task(number: int, part: Part, forms: Sequence[Form], directory: Path) -> dict[str, object]:
    form = forms[part.source]
    return {
        "number": number,
        "part": asdict(part),
        "form": asdict(form),
        "out": str(directory / part_file(number)),
    }
