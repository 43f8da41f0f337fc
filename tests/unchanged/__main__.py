"""Write down what must stay the same while code is rewritten, and compare.

python -m tests.unchanged plans --output before.json
python -m tests.unchanged runs --output before.json
python -m tests.unchanged compare before.json after.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any


def main() -> int:
    """Returns 1 where two records differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.unchanged", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plans = commands.add_parser("plans", help="plans over a grid of configs and machines, and refusals")
    plans.add_argument("--every", type=int, default=1, metavar="N", help="take each Nth case alone")
    runs = commands.add_parser("runs", help="40 short runs: losses, norms, digests of exports")
    for command in (plans, runs):
        command.add_argument("--output", type=Path, required=True)
    compare = commands.add_parser("compare", help="two records")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "compare":
        return _compare(arguments.before, arguments.after)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    results = _plans(arguments.every) if arguments.command == "plans" else _runs()
    arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _plans(every: int) -> dict[str, Any]:
    from unchanged.plans import record

    return record(every)


def _runs() -> dict[str, Any]:
    from unchanged.runs import record

    with tempfile.TemporaryDirectory() as folder:
        return record(Path(folder), lambda line: print(line[:200], file=sys.stderr))


def _compare(before: Path, after: Path) -> int:
    first, second = json.loads(before.read_text()), json.loads(after.read_text())
    different = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    for name in different:
        print(f"{name}\n  before {first.get(name)}\n  after  {second.get(name)}")
    print(f"{len(first)} before, {len(second)} after, {len(different)} different")
    return int(bool(different))


if __name__ == "__main__":
    raise SystemExit(main())
