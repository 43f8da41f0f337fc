"""Hostile inputs from the command line: one try again, or all of them with a dated result.

python -m tests.hostile --group models --seed 123
python -m tests.hostile --tries 12000 --commands 300 --output benchmarks/results/hostile.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def main() -> int:
    """Returns 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("--group", help="of the one try")
    parser.add_argument("--seed", type=int, default=0, help="of the one try, or of the first of many")
    parser.add_argument("--as-command", action="store_true", help="the one try as a command of its own")
    parser.add_argument("--keep", type=Path, help="where the directory of the one try stays")
    parser.add_argument("--tries", type=int, default=0)
    parser.add_argument("--only", help="group of all tries")
    parser.add_argument("--commands", type=int, default=0, help="tries as commands of their own")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--minutes", type=float, help="after which no more is begun; what was tried then is the result")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    set_up()
    from hostile import driver

    folder = Path(tempfile.mkdtemp(prefix="hostile-stock-"))
    began = time.monotonic()
    try:
        stock = driver.imported(folder)
        print(f"imported, and made what tries begin with, in {time.monotonic() - began:.0f} s", file=sys.stderr)
        if asked.group:
            outcome = driver.attempt(asked.group, asked.seed, stock, as_command=asked.as_command, keep=asked.keep)
            print(f"{outcome.words}\nexit status {outcome.status}, {outcome.seconds:.1f} s\n{outcome.said}")
            print(f"wrong: {outcome.wrong}" if outcome.wrong else "right")
            return int(bool(outcome.wrong))
        return _all(asked, stock)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def set_up() -> None:
    """The environment that tries need, before anything is imported."""
    os.environ.update(
        OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_HUB_DISABLE_PROGRESS_BARS="1"
    )
    if str(TESTS) not in sys.path:
        sys.path.insert(0, str(TESTS))
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def _all(asked: argparse.Namespace, stock: object) -> int:
    from hostile import driver

    began, done, ended_as_commands, slowest = time.monotonic(), 0, 0, 0.0
    wrong: list[driver.Outcome] = []
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    until = began + asked.minutes * 60 if asked.minutes else float("inf")
    for number, as_command in ((asked.commands, True), (asked.tries, False)):
        todo = driver.seeds(number, asked.seed)
        if asked.only:
            todo = [(asked.only, seed) for _, seed in todo]
        for outcome in driver.attempts(todo, stock, processes=asked.processes, as_command=as_command):  # type: ignore[arg-type]
            done += 1
            ended_as_commands += as_command
            counts[f"{outcome.group}{' as commands' * as_command}"] += 1
            kinds[f"status {outcome.status}"] += 1
            slowest = max(slowest, outcome.seconds)
            if outcome.wrong:
                wrong.append(outcome)
                print(
                    f"\n{outcome.command}\n  {outcome.words[:300]}\n  wrong: {outcome.wrong}\n{outcome.said[-1500:]}",
                    flush=True,
                )
            if done % 100 == 0:
                took = time.monotonic() - began
                print(f"{done:,} tries, {len(wrong)} wrong, {took:.0f} s", file=sys.stderr, flush=True)
            if time.monotonic() > until:
                break
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=TESTS).stdout
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": head.strip(),
        "asked": {"tries": asked.tries, "commands": asked.commands},
        "tries": done - ended_as_commands,
        "commands": ended_as_commands,
        "first_seed": asked.seed,
        "wrong": [{"command": one.command, "wrong": one.wrong} for one in wrong],
        "by_group": dict(sorted(counts.items())),
        "by_exit_status": dict(sorted(kinds.items())),
        "slowest_processor_seconds": round(slowest, 2),
        "wall_seconds": round(time.monotonic() - began),
    }
    print(json.dumps(result, indent=2))
    if asked.output is not None:
        asked.output.write_text(json.dumps(result, indent=2) + "\n")
    return int(bool(wrong) or done < asked.tries + asked.commands)


if __name__ == "__main__":
    sys.exit(main())
