"""Write down what tonnage does, to be compared with what it does after a change that should change nothing.

python -m tests.unchanged plans --output before.json
python -m tests.unchanged plans --output after.json --compare before.json
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib import import_module
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
KINDS = ("plans", "runs")
"""Each a module beside this one, whose ``record`` returns what it saw by the names of cases."""


def main() -> int:
    """Returns 1 where something is different."""
    parser = argparse.ArgumentParser(prog="python -m tests.unchanged", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--compare", type=Path, help="an earlier output")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="take each Nth case alone")
    asked = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    seen = json.loads(json.dumps(import_module(f"unchanged.{asked.kind}").record(asked.every)))
    asked.output.write_text(json.dumps(seen, indent=1, sort_keys=True) + "\n")
    print(f"{len(seen)} cases")
    if asked.compare is None:
        return 0
    before = json.loads(asked.compare.read_text())
    different = [name for name in sorted({*before, *seen}) if before.get(name) != seen.get(name)]
    for name in different:
        print(f"DIFFERENT {name}")
    print(f"{len(different)} different")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
