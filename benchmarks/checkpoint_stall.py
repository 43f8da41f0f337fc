"""What checkpoints cost a run: how long training stands still for one, and what steps lose while one is written.

    python benchmarks/checkpoint_stall.py [--size 410m] [--steps 80] [--every 10] [--tokens 512] [--directory DIR]
                                          [--output benchmarks/results/checkpoint_stall.json]

Trains a pythia shape with random weights in the real loop on one worker, with a checkpoint every ``--every`` steps, of
which every other one is left out: so the steps after a save, and those after none, see the same machine. Prints how
long each save blocked and how long it took to be whole, and the ratio of the median step times, whose limit is 1.03.
The first block of each kind warms up and is left out. ``--directory`` says which disk is written to.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPTNeoXConfig

from tonnage.checkpoint.save import Saver
from tonnage.data import Pack
from tonnage.host.threads import usable_cores
from tonnage.kernels.threads import use_threads
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.schedule import Schedule
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training import loop
from tonnage.training.batch import Deal
from tonnage.training.job import Job
from tonnage.training.loss import LossModel
from tonnage.training.memory import Phases, set_up_heap
from tonnage.training.metrics import Recorder
from tonnage.training.pipeline import Pipeline

LIMIT = 1.03
SHAPES: dict[str, dict[str, Any]] = {
    "70m": {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 8},
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "410m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
}


class OnePack:
    """The same pack every time: every step costs the same."""

    num_packs, common_prefixes = 1, ()

    def __init__(self, num_tokens: int) -> None:
        ids = np.random.default_rng(0).integers(0, 50000, num_tokens).astype(np.int32)
        weights = (np.arange(num_tokens) % 128 > 70).astype(np.float32)
        count = num_tokens // 128
        none = np.full(count, -1)
        self._pack = Pack(ids, weights, np.full(count, 128, np.int32), np.arange(count), none, none * 0)

    def pack_at(self, position: int, seed: int) -> int:
        """The one there is."""
        return 0

    def pack(self, index: int) -> Pack:
        return self._pack


class EveryOther(Saver):
    """Leaves out every second checkpoint."""

    turn = 0

    def save(self, *arguments: Any, **keywords: Any) -> None:
        self.turn += 1
        if self.turn % 2:
            super().save(*arguments, **keywords)


def train(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The records of a run that stops before its last checkpoint."""
    use_threads(usable_cores())
    set_up_heap(returns=False)
    model = build_on_meta(GPTNeoXConfig(vocab_size=50304, **SHAPES[options.size]), torch.bfloat16)
    anatomy = dissect(model)
    loss_model = LossModel(model, anatomy)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    optimizer = ShardedOptimizer(dict(model.named_parameters()), betas=(0.9, 0.95), eps=1e-8, decay=0.0)
    packs: Any = OnePack(options.tokens)
    vars(loop)["Saver"] = EveryOther
    with join_world() as world:
        run = RunDirectory(folder)
        recorder = Recorder(run, rank=0)
        job = Job(
            world=world,
            pipeline=Pipeline({0: loss_model}, world, model.dtype),
            parameters=dict(model.named_parameters()),
            optimizer=optimizer,
            schedule=Schedule(1e-5, options.steps, shape="constant"),
            clip=1.0,
            train_data=packs,
            validation_data=None,
            deal=Deal(1, 1, 0, 1),
            num_packs=options.steps + 1,
            seed=0,
        )
        asked = 0

        def stop() -> bool:
            nonlocal asked
            asked += 1
            return asked > int(options.steps)

        between_steps = loop.BetweenSteps(0, options.every, run.checkpoints, keep=1)
        loop.train(job, between_steps, recorder, Phases(PositionFile(run.worker_position(0))), stop)
        recorder.close()
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="410m")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        records = train(options, Path(folder))
    saves = [record for record in records if "save_seconds" in record]
    seconds = {record["step"]: record["step_seconds"] for record in records if "loss" in record}
    blocks = [(step - 1) // options.every for step in seconds]  # 0 warms up; 1 is after a save, 2 after none, ...
    after_save = [s for s, block in zip(seconds.values(), blocks, strict=True) if block > 2 and block % 2]
    after_none = [s for s, block in zip(seconds.values(), blocks, strict=True) if block > 1 and block % 2 == 0]
    result = {
        "benchmark": "checkpoint_stall",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {usable_cores()} cores",
        "torch": torch.__version__,
        "model": f"pythia-{options.size}",
        "checkpoint_bytes": saves[0]["checkpoint_bytes"],
        "blocked_seconds": [round(save["blocked_seconds"], 3) for save in saves],
        "save_seconds": [round(save["save_seconds"], 2) for save in saves],
        "step_seconds_after_a_save": statistics.median(after_save),
        "step_seconds_after_none": statistics.median(after_none),
        "ratio": statistics.median(after_save) / statistics.median(after_none),
        "limit": LIMIT,
        "ratio_of_means": statistics.mean(after_save) / statistics.mean(after_none),
        "all_step_seconds": [round(value, 3) for value in seconds.values()],
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
