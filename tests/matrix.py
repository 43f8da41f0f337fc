"""Run the tests that are too many for CI, each with all its combinations, and write what became of them.

python -m tests.matrix --output benchmarks/results/matrix.json
python -m tests.matrix tests/parity

They are those marked ``matrix``. Of every one a slice of fixed combinations runs in CI, as ``slow`` or with the rest.
Results of paths are written beside those that the file has of others, each with its date and commit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Outcomes:
    """A plugin that notes how tests end, and how many seconds the parts of each took."""

    ended: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.when == "call" or not report.passed:
            self.ended[report.nodeid] = report.outcome if report.when == "call" or report.skipped else "error"


def main() -> int:
    """Returns pytest's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.matrix", description=__doc__)
    parser.add_argument("paths", nargs="*", help="of tests; all of them without any")
    parser.add_argument("--processes", default="2")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    outcomes, began = Outcomes(), time.monotonic()
    spread = ["--numprocesses", asked.processes, "--dist", "loadfile", "--no-loadscope-reorder"]
    status = int(pytest.main(["-m", "matrix", *spread, *asked.paths], plugins=[outcomes]))
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT).stdout
    made = {"date": datetime.now(UTC).date().isoformat(), "commit": head.strip()}
    tests = {
        name: {"outcome": outcome, "seconds": round(outcomes.seconds[name], 1), **made}
        for name, outcome in outcomes.ended.items()
    }
    facts = made | {
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "wall_seconds": round(time.monotonic() - began),
        "processor_seconds": round(sum(one.ru_utime + one.ru_stime for one in used)),
    }
    print(json.dumps(facts | {"counts": Counter(outcomes.ended.values())}, indent=2))
    if asked.output is not None:
        before = json.loads(asked.output.read_text()) if asked.paths and asked.output.exists() else {"tests": {}}
        tests = dict(sorted((before["tests"] | tests).items()))
        counts = Counter(test["outcome"] for test in tests.values())
        for name in ("wall_seconds", "processor_seconds"):
            facts[name] += before.get(name, 0)
        asked.output.write_text(json.dumps(facts | {"counts": counts, "tests": tests}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
