"""Train every model family of transformers for two steps, and write what became of each.

python -m tests.sweep --output benchmarks/results/models.json --page docs/models.md
python -m tests.sweep llama qwen3_5_text
python -m tests.sweep --layouts --output benchmarks/results/models_layouts.json llama qwen3_5_text
python -m tests.sweep --exact --output benchmarks/results/models_exact.json

With --exact nothing is trained: gradients, in every way to recompute, whole and of an adapter, are judged against plain
transformers in fp64 (``exact``). Run again with the same --output, it goes on with the families that are not in there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent.parent
SECONDS = 300.0
"""For a family."""
EXACT_SECONDS = 1200.0
"""For a family's gradients in every way."""


def main() -> int:
    """Returns 1 where anything is different, or ended in a traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("names", nargs="*", help="of families; all of transformers' causal mapping without any")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--layouts", action="store_true", help="in several layouts, stopped, resumed and exported")
    parser.add_argument("--exact", action="store_true", help="gradients, against plain transformers in fp64")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which --exact begins no other family"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--page", type=Path, help="the table of the documentation")
    asked = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    sys.path.insert(0, str(TESTS))
    import torch
    import transformers

    from sweep import families, trial

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    names = asked.names or list(families.NAMES)
    began = time.monotonic()
    if asked.exact:
        return _exactness(names, asked.processes, asked.seconds, asked.output)
    work = partial(trial.attempt, layouts=asked.layouts)
    outcomes = sorted(_all(names, asked.processes, work, SECONDS), key=lambda outcome: outcome.name)
    counts = Counter(outcome.kind for outcome in outcomes)
    print(dict(counts), f"{time.monotonic() - began:.0f} s")
    date = datetime.now(UTC).date().isoformat()
    result = {
        "date": date,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "layouts": list(trial.LAYOUTS) if asked.layouts else [],
        "counts": dict(counts),
        "families": [asdict(outcome) for outcome in outcomes],
    }
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")
    if asked.page:
        from sweep.page import page

        asked.page.write_text(page(outcomes, date, torch.__version__, transformers.__version__))
    return int(any(outcome.kind in trial.BAD for outcome in outcomes))


def _exactness(names: list[str], processes: int, seconds: float, output: Path | None) -> int:
    """Judge those of ``names`` that ``output`` does not have yet; returns 1 where any is not exact."""
    import torch
    import transformers

    from sweep.exact import RECOMPUTES, SEEDS, judge
    from tonnage.training.isolation import FLOOR, TIMES

    before = json.loads(output.read_text())["families"] if output and output.exists() else []
    done = {family["name"]: family for family in before}
    left = [name for name in names if name not in done]
    for outcome in _all(left, processes, judge, EXACT_SECONDS, seconds):
        done[outcome.name] = asdict(outcome)
        if not output:
            continue
        counts = Counter(family["kind"] for family in done.values())
        result = {
            "date": datetime.now(UTC).date().isoformat(),
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
            "judged": f"off by no more than {TIMES:g} times plain fp32, or {FLOOR:g}, from fp64",
            "recompute": list(RECOMPUTES),
            "seeds": list(SEEDS),
            "counts": dict(counts),
            "not_reached": sorted(set(names) - done.keys()),
        }
        families = ",\n".join(json.dumps(done[name]) for name in sorted(done))
        output.write_text(f'{json.dumps(result, indent=1)[:-2]},\n "families": [\n{families}\n]\n}}\n')
    counts = Counter(family["kind"] for family in done.values())
    print(dict(counts))
    return int(bool(counts.keys() & {"different", "traceback", "too slow"}))


def _all(
    names: list[str],
    processes: int,
    work: Callable[[str, Path], Any],
    limit: float,
    begins_for: float = float("inf"),
) -> Iterator[Any]:
    """What ``work`` finds of each within ``limit`` seconds, as it ends, in a process of its own, forked from this one;
    none begins after ``begins_for`` seconds."""
    from sweep.trial import Outcome

    context = multiprocessing.get_context("fork")
    began, waiting = time.monotonic(), list(reversed(names))
    running: dict[Connection, tuple[str, ForkProcess, float]] = {}
    while waiting or running:
        if time.monotonic() - began > begins_for:
            waiting.clear()
        while waiting and len(running) < processes:
            name = waiting.pop()
            here, there = context.Pipe()
            process = context.Process(target=_one, args=(name, there, work))
            process.start()
            there.close()
            running[here] = name, process, time.monotonic()
        ready = wait(list(running), timeout=1.0)
        for end, (name, process, since) in list(running.items()):
            seconds = time.monotonic() - since
            if end not in ready and seconds < limit:
                continue
            outcome: Any = Outcome(name, "too slow", f"more than {limit:.0f} s")
            if end in ready:
                try:
                    outcome = end.recv()
                except EOFError:
                    outcome = Outcome(name, "traceback", "the process died")
            else:
                process.kill()
            process.join()
            del running[end]
            line = _exact_line(outcome) if hasattr(outcome, "runs") else _line(outcome)
            print(f"{outcome.name:28} {outcome.kind:14} {seconds:4.0f} s  {line}", flush=True)
            yield outcome


def _line(outcome: Any) -> str:
    numbers = f"loss {outcome.loss:.1e} norm {outcome.norm:.1e} leak {outcome.leak:.1e}"
    return f"{numbers}  {outcome.note[:200]}"


def _exact_line(outcome: Any) -> str:
    """The largest difference of a gradient as multiples of that of plain fp32."""
    from tonnage.training.isolation import FLOOR

    times = [
        off.gradient / max(runs["plain fp32"].gradient, FLOOR / 8)
        for runs in getattr(outcome, "runs", {}).values()
        for off in runs.values()
    ]
    return f"{max(times, default=0.0):.1f} times  {outcome.note[:200]}"


def _one(name: str, end: Connection, work: Callable[[str, Path], Any]) -> None:
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        end.send(work(name, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
