"""From ``tonnage train`` on rows that are prepared to its first step: seconds, and seconds of the processor.

    python benchmarks/start.py [--against CHECKOUT/src] [--trl PYTHON] [--repeats 5] [--output FILE]

A small Llama with random weights learns 400 instructions. A run is over for us when the record of its first step is
there; then everything that it started is asked for the processor time that it has used, and killed. ``--against`` does
the same with another version, ``--trl`` with TRL's SFTTrainer under a Python that has it. Beside them, the limit of
whoever trains a model of transformers: a Python that imports torch, FSDP2 and the model's class, and does nothing. Runs
alternate.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
sys.path[:0] = [str(BENCHMARKS.parent / "tests")]

IMPORTS = """
import gc, sys
gc.disable()
import torch.distributed.fsdp
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
open(sys.argv[1], "w").write("{}\\n")
"""
TRL = """
import json, sys
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import SFTConfig, SFTTrainer

class First(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        open(sys.argv[3], "w").write("{}\\n")

rows = [json.loads(line) for line in open(sys.argv[2])]
rows = Dataset.from_list([{"prompt": row["instruction"], "completion": row["output"]} for row in rows])
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
config = SFTConfig(sys.argv[4], max_steps=3, per_device_train_batch_size=4, max_length=128, report_to=[], use_cpu=True,
                   bf16=True, save_strategy="no")
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
SFTTrainer(model, config, train_dataset=rows, processing_class=tokenizer, callbacks=[First()]).train()
"""


def descendants(of: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.name))
    found, waiting = [of], [of]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


def processor_seconds(pids: list[int]) -> float:
    """Of these and of what they have waited for."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def to_first_step(command: list[str], first: Path, environment: dict[str, str]) -> tuple[float, float]:
    """Seconds until a line stands in ``first``, and of the processor until then."""
    began = time.monotonic()
    environment = os.environ | environment | {"PYTHONDONTWRITEBYTECODE": ""}  # installed code is compiled already
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment, process_group=0)
        while not (first.exists() and first.stat().st_size):
            if process.poll() is not None and not first.exists():
                said.seek(0)
                raise SystemExit(said.read().decode()[-4000:])
            time.sleep(0.005)
        seconds = time.monotonic() - began
        there = descendants(process.pid)
        used = processor_seconds(there)
        for pid in there:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()
        return seconds, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src of another checkout")
    parser.add_argument("--trl", help="a Python that has TRL")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    from tiny import write_config
    from tonnage.host.processor import processor

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings: dict[str, Any] = {"steps": 3, "launch": {"workers": 1, "threads": 1}}
        config = write_config(folder, 400, **settings)
        script = folder / "trl_first_step.py"
        script.write_text(TRL)

        def ours(source: Path, cache: str, module: str) -> Callable[[], tuple[float, float]]:
            def run() -> tuple[float, float]:
                shutil.rmtree(folder / "run", ignore_errors=True)
                words = ["train", str(config), f"output={folder / 'run'}", "track=[]", f"data.cache={folder / cache}"]
                command = [sys.executable, "-m", module, *words]
                environment = {"PYTHONPATH": str(source), "TONNAGE_CACHE": str(folder / f"{cache}-home")}
                return to_first_step(command, folder / "run" / "metrics.jsonl", environment)

            return run

        first = folder / "first"

        def imports() -> tuple[float, float]:
            first.unlink(missing_ok=True)
            return to_first_step([sys.executable, "-c", IMPORTS, str(first)], first, {})

        def trl() -> tuple[float, float]:
            first.unlink(missing_ok=True)
            command = [asked.trl, str(script), str(folder / "model"), str(folder / "rows.jsonl"), str(first)]
            return to_first_step([*command, str(folder / "trl")], first, {})

        contestants: dict[str, Callable[[], tuple[float, float]]] = {
            "tonnage": ours(BENCHMARKS.parent / "src", "now", "tonnage"),
            "imports alone": imports,
        }
        if asked.against is not None:
            contestants["tonnage, other version"] = ours(asked.against.resolve(), "other", "tonnage.cli.main")
        if asked.trl is not None:
            contestants["TRL SFTTrainer"] = trl
        took: dict[str, list[tuple[float, float]]] = {who: [] for who in contestants}
        for number in range(asked.repeats + 1):  # the first time everything is prepared, measured and compiled
            for who, run in contestants.items():
                one = run()
                if number:
                    took[who].append(one)
        print(
            f"{' '.join(processor()[0].split())}, {os.cpu_count()} cores; to the first step, median of {asked.repeats}"
        )
        medians = {
            who: {
                "seconds": statistics.median(one[0] for one in all_),
                "cpu": statistics.median(one[1] for one in all_),
            }
            for who, all_ in took.items()
        }
        for who, found in medians.items():
            ratio = found["seconds"] / medians["tonnage"]["seconds"], found["cpu"] / medians["tonnage"]["cpu"]
            print(
                f"{who:<24}{found['seconds']:6.2f} s, CPU {found['cpu']:6.2f} s   {ratio[0]:.2f} and {ratio[1]:.2f} x"
            )
        result = {
            "benchmark": "start",
            "date": datetime.date.today().isoformat(),
            "processor": processor()[0],
            "cores": os.cpu_count(),
            "repeats": asked.repeats,
            "medians": medians,
        }
        if asked.output is not None:
            asked.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
