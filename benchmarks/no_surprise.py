"""Is a plan that fits safe, and one that does not a real danger? Runs inside memory cgroups, cut to size.

    python -m benchmarks.no_surprise [--fitting 40] [--over 20] [--seed 1] [--steps 2] [--adapters] [--output FILE]

Configurations are drawn at random (as in ``plan_truth.py``, larger). The fitting ones run in a memory cgroup of which
their plan takes 97%; the others were forced, in one that their plan exceeds by 5 to 25%. The workers are in the cgroup,
the launcher is not. A run counts as killed if the kernel says that it killed a process of the group for want of memory.
With ``--adapters`` each trains one, which is drawn too. Two that fit, one that does not, and so on; what the output
file has already is not run again. Needs the right to make a cgroup (root; version 1 or 2).

A plan counts all that a worker has resident. A cgroup does not count pages of libraries that somebody outside it has
read before, as this benchmark has: what a worker maps of them is measured first, and taken from every cap.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_truth
from benchmarks.memory_cap import capped, counted

from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.errors import TonnageError
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

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
def looking_at_children(look: Callable[[int], None], seconds: float) -> Iterator[None]:
    """``look`` at every process that this one starts meanwhile, again and again; one that has ended is passed over."""
    done, there = threading.Event(), set(children())

    def watch() -> None:
        while not done.wait(seconds):
            for pid in set(children()) - there:
                with contextlib.suppress(OSError):
                    look(pid)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def move(pid: int, group: Path) -> None:
    """Let a process enter the group; that it is there already does no harm."""
    (group / "cgroup.procs").write_text(str(pid))


def file_bytes(pid: int) -> int:
    """Resident bytes of files that a process maps."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return 1024 * int(fields.get("RssFile", "0 kB").split()[0])


def attempt(setting: dict[str, Any], steps: int, share: float, libraries: int) -> dict[str, Any]:
    """Run a setting in a cgroup of which its plan takes ``share``, ``libraries`` bytes a worker counted elsewhere."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        config = str(plan_truth.write_inputs(folder, setting, steps))
        decision = decide(config, [])
        plan = plan_truth.given_back(decision)
        run = RunDirectory(folder / "run")
        write_run(run, replace(decision, plan=plan))
        planned = plan.choice.peak_bytes * plan.workers
        cap = round(planned / share)
        error = ""
        with capped(cap - libraries * plan.workers) as group:
            try:
                with looking_at_children(lambda pid: move(pid, group), 0.002):
                    run_workers(run, plan.workers, plan.threads_per_worker)
            except TonnageError as failure:
                error = str(failure).splitlines()[0]
            found = counted(group)
    return {
        **setting,
        "planned_bytes": round(planned),
        "cap_bytes": cap,
        "libraries_bytes": libraries * plan.workers,
        "killed": found.get("killed_by_the_kernel", 0) > 0,
        "peak_with_page_cache": found.get("peak_with_page_cache"),
        "error": error,
    }


def summary(rows: list[dict[str, Any]], seed: int, steps: int) -> dict[str, Any]:
    """What became of those that fit, and of the others."""
    return {
        "benchmark": "no_surprise",
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "seed": seed,
        "steps": steps,
        "fitting": sum(row["fits"] for row in rows),
        "fitting_killed": sum(row["fits"] and row["killed"] for row in rows),
        "fitting_failed_otherwise": sum(row["fits"] and bool(row["error"]) and not row["killed"] for row in rows),
        "over": sum(not row["fits"] for row in rows),
        "over_killed": sum(not row["fits"] and row["killed"] for row in rows),
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fitting", type=int, default=40)
    parser.add_argument("--over", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    plan_truth.SIZES.update(SIZES)
    at_random = random.Random(options.seed)
    rows: list[dict[str, Any]] = []
    if options.output and options.output.exists():
        earlier = json.loads(options.output.read_text())
        if (earlier["seed"], earlier["steps"]) != (options.seed, options.steps):
            sys.exit(f"{options.output} has seed {earlier['seed']} and {earlier['steps']} steps")
        rows = earlier["rows"]
    mapped = [0]
    with looking_at_children(lambda pid: mapped.append(file_bytes(pid)), 0.1):
        plan_truth.measure_nothing(1, options.steps)
    libraries = max(mapped)
    print(f"{libraries / 1e6:.0f} MB of libraries are counted outside of a worker's cgroup")
    left = {True: options.fitting, False: options.over}
    drawn = plan_truth.draw(options.seed, options.fitting + options.over, adapters=options.adapters)
    for number, setting in enumerate(drawn):
        fits = left[True] > 0 and (number % 3 < 2 or not left[False])
        left[fits] -= 1
        share = 0.97 if fits else at_random.uniform(1.05, 1.25)
        if number < len(rows):
            continue
        row = {"fits": fits, "share": round(share, 3), **attempt(setting, options.steps, share, libraries)}
        rows.append(row)
        print(
            f"{'fits' if fits else 'over'} {share:.2f} of {row['cap_bytes'] / 1e9:.2f} GB: "
            f"{'killed' if row['killed'] else 'lived'} {row['error']} "
            f"{' '.join(str(value) for value in (*list(setting.values())[:6], *setting['memory'].values()))} "
            f"{' '.join(str(value) for value in setting.get('adapter', {}).values())}",
            flush=True,
        )
        if options.output:
            result = summary(rows, options.seed, options.steps)
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    result = summary(rows, options.seed, options.steps)
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))


if __name__ == "__main__":
    main()
