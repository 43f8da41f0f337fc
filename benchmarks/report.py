"""How long the report of a long run takes to make, how large it is, and how long Chromium takes to open it.

    python benchmarks/report.py [--steps 100000] [--times 3] [--output benchmarks/results/report.json]

A run of a tiny model is decided as any other, and what its steps measured is made up: a noisy loss that falls, ten
evaluations. The report is made by ``tonnage report`` in a process of its own, imports included; its CPU seconds are
told as well, as others may use the machine. Chromium (the distribution's package) opens it from the disk without a
window; what counts is the time from asking for the page until its first frame is drawn with all curves. Medians count.
Prints and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"


def cpu_seconds() -> float:
    """Of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=3)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    sys.path[0] = str(TESTS)  # where ``report`` is not this file
    from report.browser import Browser, chromium
    from report.recorded import decided, record

    with tempfile.TemporaryDirectory() as folder:
        run = decided(Path(folder), steps=asked.steps)
        record(run, asked.steps)
        command = [sys.executable, "-m", "tonnage", "report", str(run.path)]
        made, computed = [], []
        for _ in range(asked.times):
            began, used = time.perf_counter(), cpu_seconds()
            subprocess.run(command, check=True, capture_output=True)
            made.append(time.perf_counter() - began)
            computed.append(cpu_seconds() - used)
        opened = []
        if chromium() is not None:
            with Browser() as browser:
                browser.resize(1200, 900)
                for _ in range(asked.times):
                    opened.append(browser.open(run.report))
                assert browser.console == []
        found = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": platform.processor() or platform.machine(),
            "steps": asked.steps,
            "metrics_bytes": run.metrics.stat().st_size,
            "report_bytes": run.report.stat().st_size,
            "make_seconds": statistics.median(made),
            "make_seconds_each": made,
            "make_cpu_seconds": statistics.median(computed),
            "open_seconds": statistics.median(opened) if opened else None,
            "open_seconds_each": opened,
        }
    text = json.dumps(found, indent=2)
    print(text)
    if asked.output is not None:
        asked.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
