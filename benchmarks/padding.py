"""How much of what padded rows compute is padding, and how fast they are beside packed ones.

    python benchmarks/padding.py MODEL --data FILE [FILE ...] [--speed] [--output FILE]

MODEL is a model directory with a tokenizer. For each file of rows, and for made documents with log-normal lengths
(median 300, 99th percentile 6,000), documents are packed as training packs them, and those of steps of about 8,192
tokens are cut into padded forwards on 1 and 2 workers. ``--speed`` trains a few steps of the model packed (prefixes
shared on neither side) and padded, in turns, and prints tokens a second of each.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

STEP_TOKENS, MAX_LENGTH, STEPS, TURNS = 8192, 2048, 4, 3
FORCED = """
import sys
import tonnage.training.isolation as isolation
asked = isolation.isolation_of
def padded(*given, **named):
    found = asked(*given, **named)
    return isolation.Isolation("padded", found.attention, False, "asked for", found.asked_on)
isolation.isolation_of = padded
import tonnage.training.building as building
building.isolation_of = padded
"""


def share(lengths: list[np.ndarray], workers: int, most: int) -> dict[str, float]:
    """Padding of steps that take packs, each an array of lengths of documents, in turn."""
    from tonnage.data.packs.padding import forwards

    mean = sum(int(one.sum()) for one in lengths) / len(lengths)
    packs = max(workers, round(STEP_TOKENS / mean))
    computed = real = cut = steps = 0
    for start in range(0, len(lengths) - packs + 1, packs):
        step = lengths[start : start + packs]
        steps += 1
        for worker in range(workers):
            mine = np.concatenate(step[worker::workers])
            for one in forwards(mine, most):
                computed += int(mine[one].max()) * len(one)
                real += int(mine[one].sum())
                cut += 1
    return {"padding": 1 - real / computed, "forwards": cut / steps / workers, "tokens": real / steps}


def packed(lengths: np.ndarray, most: int) -> list[np.ndarray]:
    """Documents in packs, first fit in order."""
    packs: list[list[int]] = [[]]
    for length in lengths.tolist():
        if sum(packs[-1]) + length > most:
            packs.append([])
        packs[-1].append(length)
    return [np.array(pack) for pack in packs]


def log_normal() -> np.ndarray:
    """Lengths with a median of 300 and a 99th percentile of 6,000."""
    draws = np.random.default_rng(0).standard_normal(20000)
    drawn: np.ndarray = np.clip(np.exp(np.log(300) + np.log(20) / 2.3263 * draws), 2, 8192).astype(np.int64)
    return drawn


def prepared(model: str, file: str) -> list[np.ndarray]:
    """Lengths of documents in the packs of a file's rows, in the order of training."""
    from tonnage.config import Data, Source
    from tonnage.data import pack_at, prepare
    from tonnage.data.progress import silent
    from tonnage.model.files import find_model, read_tokenizer

    tokenizer = read_tokenizer(find_model(model))
    options = Data(train=(Source(path=file),), max_length=MAX_LENGTH, template="plain")
    train = prepare(options, tokenizer, progress=silent).train
    return [train.lengths(pack_at(at, train.num_packs, 0)) for at in range(train.num_packs)]


def speed(model: str, file: str, folder: Path) -> dict[str, Any]:
    """Tokens a second of the last steps of runs that alternate."""
    config = {
        "model": model,
        "data": {"train": file, "max_length": 1024, "template": "plain", "share_prefixes": False},
        "batch": {"tokens": 2048},
        "steps": STEPS,
        "optimizer": {"warmup": 0},
        "export": False,
        "checkpoint": {"every": 0},
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps({key: value for key, value in config.items() if key != "export"}))
    found: dict[str, list[float]] = {"packed": [], "padded": []}
    for turn in range(TURNS):
        for name, before in (("packed", ""), ("padded", FORCED)):
            run = folder / f"{name}{turn}"
            code = f"{before}\nfrom tonnage.cli.main import main\nmain()"
            done = subprocess.run(
                [sys.executable, "-c", code, "train", str(path), f"output={run}"], capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(done.stdout + done.stderr)
            planned = json.loads((run / "plan.json").read_text())["choice"]["layout"]["arrangement"]
            assert planned == name, f"rows that are {planned}, not {name}"
            records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            steps = [one for one in records if "loss" in one][1:]
            found[name].append(sum(one["tokens"] for one in steps) / sum(one["step_seconds"] for one in steps))
            shutil.rmtree(run, ignore_errors=True)
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"tokens_per_second": found, "ratio": medians["padded"] / medians["packed"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--data", nargs="+", default=[])
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    from tonnage.host.processor import processor

    made = {"log-normal lengths": (packed(log_normal(), 8192), 8192)}
    made |= {Path(file).name: (prepared(asked.model, file), MAX_LENGTH * 4) for file in asked.data}
    result: dict[str, Any] = {"date": datetime.date.today().isoformat(), "processor": processor(), "padding": {}}
    for name, (lengths, most) in made.items():
        for workers in (1, 2):
            found = share(lengths, workers, most)
            result["padding"][f"{name}, {workers} worker(s)"] = found
            print(f"{name:28} {workers} worker(s): {found['padding']:.1%} padding, {found['forwards']:.1f} forwards")
    if asked.speed:
        with tempfile.TemporaryDirectory() as folder:
            result["speed"] = speed(asked.model, asked.data[0], Path(folder))
        print(f"padded, of packed tokens/s: {result['speed']['ratio']:.2f}")
    if asked.output:
        asked.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
