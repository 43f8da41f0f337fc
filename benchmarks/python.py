"""What Python costs before it does anything: ``import tonnage``, and ``tonnage.plan`` beside ``tonnage plan``.

    python benchmarks/python.py [--repeats 5] [--output FILE]

``import tonnage`` is asked for processor time and for what it has loaded. A plan is that of a config whose rows are
prepared, each time in a process of its own, until its first line is printed; the two ways alternate. The end of the
process is told as well: a command skips Python's last look for garbage, which is not a library's to skip. Ends with
status 1 where ``import tonnage`` takes 0.1 s of the processor or loads torch, or where the plan of ``tonnage.plan`` is
there 0.3 s later than that of the command.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS.parent / "tests")]

MOST_CPU_SECONDS = 0.1
MOST_SECONDS_MORE = 0.3
IMPORT = """
import sys, time
began = time.process_time()
import tonnage
print(time.process_time() - began, "torch" in sys.modules)
"""
PLAN = "import sys, tonnage; print(tonnage.plan(sys.argv[1]).num_steps, flush=True)"


def seconds_of(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """How long a command takes, start of Python included: to its first line, and to its end."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True)
        assert process.stdout is not None
        first = process.stdout.readline()
        answered = time.monotonic()
        process.communicate()
        if process.returncode != 0 or not first:
            said.seek(0)
            raise SystemExit(said.read())
    return answered - began, time.monotonic() - began


def imported(environment: dict[str, str]) -> tuple[float, bool]:
    """Processor seconds of ``import tonnage`` in a fresh process, and whether torch was loaded."""
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment, capture_output=True, text=True, check=True)
    taken, loaded = done.stdout.split()
    return float(taken), loaded == "True"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    from tiny import write_config
    from tonnage.host.processor import processor

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = str(write_config(folder, 400, steps=3))
        environment = os.environ | {
            "PYTHONPATH": str(BENCHMARKS.parent / "src"),
            "TONNAGE_CACHE": str(folder / "home"),
            "COLUMNS": "120",
        }
        ways = {
            "tonnage.plan(...)": [sys.executable, "-c", PLAN, config],
            "tonnage plan": [sys.executable, "-m", "tonnage", "plan", config],
        }
        imports = [imported(environment) for _ in range(asked.repeats)]
        took: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(asked.repeats + 1):  # the first time rows are prepared and the model is weighed
            for way, command in ways.items():
                seconds = seconds_of(command, environment)
                if number:
                    took[way].append(seconds)
    cpu, loads_torch = statistics.median(one for one, _ in imports), any(loads for _, loads in imports)
    medians = {way: statistics.median(one for one, _ in all_) for way, all_ in took.items()}
    ends = {way: statistics.median(one for _, one in all_) for way, all_ in took.items()}
    more = medians["tonnage.plan(...)"] - medians["tonnage plan"]
    result: dict[str, Any] = {
        "benchmark": "python",
        "date": datetime.date.today().isoformat(),
        "processor": " ".join(processor()[0].split()),
        "cores": os.cpu_count(),
        "repeats": asked.repeats,
        "import_cpu_seconds": cpu,
        "import_loads_torch": loads_torch,
        "plan_seconds": medians,
        "plan_seconds_more": more,
        "end_seconds": ends,
    }
    print(json.dumps(result, indent=1))
    if asked.output is not None:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(cpu >= MOST_CPU_SECONDS or loads_torch or more >= MOST_SECONDS_MORE)


if __name__ == "__main__":
    main()
