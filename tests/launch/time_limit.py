"""A run that is longer than its job's time limit, on a real Slurm: ``python tests/launch/time_limit.py``.

Slurm signals the workers before the limit, they save, the job goes back into the queue and on from there, as often as
it takes. Prints how often, and compares every step with an uninterrupted local run; exit status 1 where they differ.
Takes minutes; needs root, slurm-wlm and munge.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))

from launch import slurm_cluster
from launch.test_slurm_cluster import numbers
from tiny import alpaca_rows, llama_config, write_model, write_rows

CONFIG = {
    "model": "model",
    "data": {"train": "rows.jsonl", "max_length": 128, "template": "plain", "cache": "cache"},
    "batch": {"sequences": 8},
    "checkpoint": {"every": 100},
    "launch": {"workers": 2, "threads": 1},
    "track": [],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1500, help="enough for more than two minutes")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as name, slurm_cluster.Cluster(Path(name) / "slurm") as cluster:
        folder = Path(name)
        write_model(folder / "model", llama_config(num_hidden_layers=1))
        write_rows(folder / "rows.jsonl", alpaca_rows(300))
        (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG | {"steps": steps}))
        for words in (
            ["output=slurm", "launch.with=slurm", "launch.time=2", "launch.save_seconds=20"],
            ["output=local"],
        ):
            began = time.monotonic()
            command = [sys.executable, "-m", "tonnage.cli.main", "train", "config.yaml", *words]
            result = subprocess.run(
                command, cwd=folder, env=cluster.environment, capture_output=True, text=True, check=False
            )
            print(f"{words[0]}: exit status {result.returncode} after {time.monotonic() - began:.0f} s", flush=True)
            if result.returncode:
                print(result.stdout[-3000:], result.stderr[-3000:])
                return 1
        log = (folder / "slurm" / "log.txt").read_text()
        print(f"stopped {log.count('stopped as asked')} times, went on {log.count('going on from')} times")
        same = numbers(folder / "slurm") == numbers(folder / "local")
        print(f"{len(numbers(folder / 'slurm'))} steps, {'equal to the bit' if same else 'DIFFERENT'}")
        print((folder / "slurm" / "workers" / "job.log").read_text())
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
