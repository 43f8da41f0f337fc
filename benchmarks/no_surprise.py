"""Is a plan that fits safe, and one that does not a real danger? Runs inside memory cgroups, cut to size.

    python -m benchmarks.no_surprise [--fitting 40] [--over 20] [--seed 1] [--steps 2] [--output FILE]

Configurations are drawn at random (as in ``plan_truth.py``, larger). The fitting ones run in a memory cgroup of which
their plan takes 97%; the others were forced, in one that their plan exceeds by 5 to 25%. The workers are in the cgroup,
the launcher is not. A run counts as killed if the kernel says that it killed a process of the group for want of memory.
Needs the right to make a cgroup (root; version 1 or 2).

A cgroup does not count pages of files that something else has read as well, libraries above all: a worker may take a
few hundred MB more before it is killed than what is planned for the interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_truth
from benchmarks.memory_cap import capped, counted
from rich.console import Console

from tonnage.cli.decide import decide
from tonnage.cli.train import write_run
from tonnage.errors import UserError
from tonnage.launch.local import run_workers
from tonnage.rundir import RunDirectory

SIZES = {"small": (512, 8, 8), "medium": (768, 12, 12), "large": (1024, 16, 16)}
"""Hidden size, heads, blocks."""


def children() -> list[int]:
    """Processes started by any thread of this one."""
    found: list[int] = []
    for path in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found += map(int, (path / "children").read_text().split())
    return found


@contextlib.contextmanager
def moving_children(group: Path) -> Iterator[None]:
    """New processes of this one enter the group, within milliseconds of their start."""
    done, there = threading.Event(), set(children())

    def move() -> None:
        while not done.is_set():
            for pid in set(children()) - there:
                with contextlib.suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))
                there.add(pid)
            time.sleep(0.002)

    mover = threading.Thread(target=move)
    mover.start()
    try:
        yield
    finally:
        done.set()
        mover.join()


def attempt(setting: dict[str, Any], steps: int, share: float) -> dict[str, Any]:
    """Run a setting in a cgroup of which its plan takes ``share``."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = str(plan_truth.write_inputs(folder, setting, steps))
        decision = decide(config, [], Console(stderr=True, quiet=True))
        layout = replace(decision.plan.layout, returns_memory=True)
        plan = replace(decision.plan, choice=replace(decision.plan.choice, layout=layout))
        run = RunDirectory(folder / "run")
        write_run(run, replace(decision, plan=plan))
        planned = plan.choice.peak_bytes * plan.workers
        error = ""
        with capped(round(planned / share)) as group:
            try:
                with moving_children(group):
                    run_workers(run, plan.workers, plan.threads_per_worker)
            except UserError as failure:
                error = str(failure).splitlines()[0]
            found = counted(group)
    return {
        **setting,
        "planned_bytes": round(planned),
        "cap_bytes": round(planned / share),
        "killed": found.get("killed_by_the_kernel", 0) > 0,
        "peak_with_page_cache": found.get("peak_with_page_cache"),
        "error": error,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fitting", type=int, default=40)
    parser.add_argument("--over", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    plan_truth.SIZES.update(SIZES)
    at_random = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    for number, setting in enumerate(plan_truth.draw(options.seed, options.fitting + options.over)):
        fits = number < options.fitting
        share = 0.97 if fits else at_random.uniform(1.05, 1.25)
        row = {"fits": fits, "share": round(share, 3), **attempt(setting, options.steps, share)}
        rows.append(row)
        print(
            f"{'fits' if fits else 'over'} {share:.2f} of {row['cap_bytes'] / 1e9:.2f} GB: "
            f"{'killed' if row['killed'] else 'lived'} {row['error']} "
            f"{' '.join(str(value) for value in (*list(setting.values())[:-1], *setting['memory'].values()))}",
            flush=True,
        )
        result = {
            "benchmark": "no_surprise",
            "date": time.strftime("%Y-%m-%d"),
            "cores": os.cpu_count(),
            "seed": options.seed,
            "fitting": sum(row["fits"] for row in rows),
            "fitting_killed": sum(row["fits"] and row["killed"] for row in rows),
            "fitting_failed_otherwise": sum(row["fits"] and bool(row["error"]) and not row["killed"] for row in rows),
            "over": sum(not row["fits"] for row in rows),
            "over_killed": sum(not row["fits"] and row["killed"] for row in rows),
            "rows": rows,
        }
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))


if __name__ == "__main__":
    main()
