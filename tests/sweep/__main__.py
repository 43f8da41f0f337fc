"""Train every model family of transformers for two steps, and write what became of each.

python -m tests.sweep --output benchmarks/results/models.json --page docs/models.md
python -m tests.sweep llama qwen3_5_text
python -m tests.sweep --layouts --output benchmarks/results/models_layouts.json llama qwen3_5_text
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
from dataclasses import asdict
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sweep.trial import Outcome

TESTS = Path(__file__).resolve().parent.parent
SECONDS = 300.0
"""For a family."""


def main() -> int:
    """Returns 1 where anything is different, or ended in a traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("names", nargs="*", help="of families; all of transformers' causal mapping without any")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--layouts", action="store_true", help="in several layouts, stopped, resumed and exported")
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
    outcomes = _all(names, asked.processes, layouts=asked.layouts)
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


def _all(names: list[str], processes: int, *, layouts: bool) -> list[Outcome]:
    """Each in a process of its own, forked from this one."""
    from sweep.trial import Outcome

    context = multiprocessing.get_context("fork")
    waiting, found = list(reversed(names)), list[Outcome]()
    running: dict[Connection, tuple[str, ForkProcess, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop()
            here, there = context.Pipe()
            process = context.Process(target=_one, args=(name, there, layouts))
            process.start()
            there.close()
            running[here] = name, process, time.monotonic()
        ready = wait(list(running), timeout=1.0)
        for end, (name, process, since) in list(running.items()):
            seconds = time.monotonic() - since
            if end not in ready and seconds < SECONDS:
                continue
            outcome = Outcome(name, "too slow", f"more than {SECONDS:.0f} s to plan and train two steps")
            if end in ready:
                try:
                    outcome = end.recv()
                except EOFError:
                    outcome = Outcome(name, "traceback", "the process died")
            else:
                process.kill()
            process.join()
            del running[end]
            found.append(outcome)
            print(
                f"{outcome.name:28} {outcome.kind:14} loss {outcome.loss:.1e} norm {outcome.norm:.1e} leak "
                f"{outcome.leak:.1e} {seconds:4.0f} s  {outcome.note[:200]}",
                flush=True,
            )
    return sorted(found, key=lambda outcome: outcome.name)


def _one(name: str, end: Connection, layouts: bool) -> None:
    from sweep.trial import attempt

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        end.send(attempt(name, Path(folder), layouts=layouts))


if __name__ == "__main__":
    sys.exit(main())
