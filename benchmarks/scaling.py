"""What our own work costs at 1, 10 and 100 times its size: none of it may grow faster than n log n.

    python benchmarks/scaling.py [--output benchmarks/results/scaling.json]

* preparation: rows of instructions read, rendered, masked, tokenised (bytes) and packed, from 400 to 40,000 rows;
* packing: best fit over lengths alone, from 20,000 to 2,000,000 documents;
* loader: seconds to open the prepared data and build the micro-batches of 20 steps, whatever the number of rows;
* planner: a plan with everything left open, for 1, 10 and 100 workers, and 8 to 800 packs a step;
* checkpoint: a save of 100 to 10,000 tensors of 16 numbers, and reading it back: headers, hashes, names.

Each figure is the least of three runs. ``exponent`` is that of the power law through the first and the last size: 1 is
linear, n log n over a factor of 100 comes out at 1.1 to 1.25, 2 would be quadratic.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tonnage.checkpoint.resume import restore
from tonnage.checkpoint.save import Cursor, Saver, checkpoint_path
from tonnage.config import Config, Data, Source
from tonnage.data import PackedDataset, Workforce, prepare
from tonnage.data.packs.packing import best_fit
from tonnage.parallel.world import join_world
from tonnage.planning.machine import parse_hardware
from tonnage.planning.plan import DataProfile
from tonnage.planning.planner import make_plan
from tonnage.planning.scales import Scales
from tonnage.training.batch import Deal, training_steps
from tonnage.training.weigh import Conditions, weigh

FACTORS = (1, 10, 100)
REPEATS = 3


def least(work: Callable[[int], object]) -> float:
    """Seconds of the fastest of some runs; each is told its number."""
    times = []
    for number in range(REPEATS):
        began = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - began)
    return min(times)


def tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: n for n, letter in enumerate(["<|endoftext|>", *letters])}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|endoftext|>")


def write_rows(path: Path, number: int) -> None:
    draw = random.Random(0)
    words = ["weigh", "lift", "carry", "rest", "ton", "crane", "rope", "hook", "mast", "keel"]
    with path.open("w") as out:
        for _ in range(number):
            asked, told = (" ".join(draw.choices(words, k=draw.randint(4, 30))) for _ in range(2))
            out.write(json.dumps({"instruction": asked, "output": told}) + "\n")


def data_costs(folder: Path, factor: int) -> dict[str, float]:
    """Preparation of rows, and the loader over them."""
    rows = folder / f"rows-{factor}.jsonl"
    write_rows(rows, 400 * factor)
    options = Data(train=(Source(path=str(rows)),), max_length=1024)
    made = tokenizer()
    paths: list[Path] = []

    def work(number: int) -> None:
        prepared = prepare(options, made, cache=folder / f"cache-{factor}-{number}", workforce=Workforce(processes=1))
        paths.append(prepared.train.path)

    preparation = least(work)

    def load(number: int) -> None:
        data = PackedDataset.open(paths[number])
        for step in training_steps(data, Deal(8, 4, 0, 1), seed=0, num_packs=8 * 20):
            assert step.tokens

    return {"preparation": preparation, "loader": least(load)}


def packing_cost(factor: int) -> float:
    """Best fit over lengths as instructions have them."""
    chance = np.random.default_rng(0)
    lengths = np.minimum(2048, chance.lognormal(5.0, 0.8, 20_000 * factor).astype(np.int64) + 2)
    order = chance.permutation(len(lengths))
    return least(lambda number: best_fit(lengths, 2048, order))


def planner_cost(factor: int) -> float:
    """A plan with all left open."""
    shape = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    profile = weigh(shape, None, Conditions(document_tokens=128, device_type="cuda"))
    machine = parse_hardware(f"{max(1, factor // 10)}x{min(10, factor)}xA100-80GB")
    packs = 8 * factor
    data = DataProfile("", None, packs * 100, packs * 100 * 1000, packs * 100 * 500, 1024, 250.0)
    config = Config.model_validate(
        {
            "model": "m",
            "data": {"train": "rows.jsonl", "max_length": 1024},
            "batch": {"sequences": packs},
            "launch": {"workers": factor},
        }
    )
    return least(lambda number: make_plan(config, Scales(profile, data, machine), threads_per_worker=1))


def checkpoint_costs(folder: Path, factor: int) -> dict[str, float]:
    """Save and restore of many tensors with nothing in them."""
    names = [f"model.layers.{number}.weight" for number in range(100 * factor)]
    with join_world() as world:
        model = {name: torch.randn(4, 4) for name in names}
        saver = Saver(folder / f"checkpoints-{factor}", REPEATS, world)
        save = least(lambda number: saver.save(Cursor(step=number), model, {}, {}, wait=True))
        path = checkpoint_path(folder / f"checkpoints-{factor}", 0)
        return {"checkpoint save": save, "checkpoint restore": least(lambda number: restore(path, model, {}, world))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as made:
        for factor in FACTORS:
            found = data_costs(Path(made), factor)
            found |= {"packing": packing_cost(factor), "planner": planner_cost(factor)}
            found |= checkpoint_costs(Path(made), factor)
            for name, figure in found.items():
                seconds.setdefault(name, []).append(figure)
    exponents = {name: math.log(taken[-1] / taken[0]) / math.log(FACTORS[-1]) for name, taken in seconds.items()}
    for name, taken in seconds.items():
        print(f"{name:<20} {'  '.join(f'{one:>9.4f} s' for one in taken)}   n^{exponents[name]:.2f}")
    result: dict[str, Any] = {
        "benchmark": "scaling",
        "date": time.strftime("%Y-%m-%d"),
        "factors": FACTORS,
        "seconds": seconds,
        "exponents": exponents,
    }
    if arguments.output:
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
