"""Our step against a minimal hand-written loop, over the same packs and with the same loss.

    python benchmarks/loop_overhead.py [--steps 15] [--output benchmarks/results/loop_overhead.json]

Both train a random pythia-160m shape in bf16 on synthetic packs of 1,024 tokens, 8,192 tokens a step, taking steps
in turn, each in a process of its own. The hand-written loop is what an expert would write in an afternoon: packed
attention, the vocabulary projection at supervised positions only, fused AdamW on the bf16 weights, clipping. Ours
is ``tonnage.training.loop.train`` as every run uses it, metrics file and all, with an exact fp32 master besides.

Prints the ratio of median step times, pair by pair, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPTNeoXConfig, PreTrainedModel

from tonnage.data import Pack, pack_at
from tonnage.host.threads import usable_cores
from tonnage.kernels.threads import use_threads
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.schedule import Schedule
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.batch import Deal, MicroBatch
from tonnage.training.job import Job
from tonnage.training.loop import BetweenSteps, train
from tonnage.training.loss import LossModel
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.pipeline import Pipeline
from tonnage.training.resting import accumulate_in_fp32

LENGTH, PACKS_PER_STEP, MICRO_BATCH, LR, VOCAB_SIZE = 1024, 8, 4, 1e-4, 50304


class SyntheticPacks:
    """Packs of documents of 60 to 250 tokens, the latter 45% of each supervised, as instruction data has them."""

    num_packs, common_prefixes = 64, ()

    def __init__(self, vocab_size: int) -> None:
        chance = np.random.default_rng(0)
        self._packs = [self._make(chance, vocab_size) for _ in range(self.num_packs)]

    def _make(self, chance: np.random.Generator, vocab_size: int) -> Pack:
        lengths: list[int] = []
        while (room := LENGTH - sum(lengths)) > 0:
            lengths.append(min(room, int(chance.integers(60, 250))))
        weights = np.concatenate([(np.arange(n) > 0.55 * n).astype(np.float32) for n in lengths])
        ids = chance.integers(0, vocab_size, LENGTH).astype(np.int32)
        none = np.full(len(lengths), -1)
        return Pack(ids, weights, np.array(lengths, np.int32), np.arange(len(lengths)), none, none * 0)

    def pack_at(self, position: int, seed: int) -> int:
        """The pack trained at a position."""
        return pack_at(position, self.num_packs, seed)

    def pack(self, index: int) -> Pack:
        return self._packs[index]


def build(config: GPTNeoXConfig) -> tuple[PreTrainedModel, LossModel]:
    model = build_on_meta(config, torch.bfloat16)
    anatomy = dissect(model)
    loss_model = LossModel(model, anatomy)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    return model, loss_model


def run_hand_written(pipe: Connection, layers: int, num_steps: int) -> None:
    """The plain loop, in a process of its own."""
    use_threads(usable_cores())
    _, model = build(shape(layers))
    packs = SyntheticPacks(VOCAB_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step in range(num_steps):
        pipe.recv()
        positions = range(step * PACKS_PER_STEP, (step + 1) * PACKS_PER_STEP)
        chosen = [packs.pack(packs.pack_at(position, 0)) for position in positions]
        batches = [MicroBatch.of(chosen[i : i + MICRO_BATCH]) for i in range(0, PACKS_PER_STEP, MICRO_BATCH)]
        supervised = float(sum(batch.weights.sum() for batch in batches))
        loss = 0.0
        for batch in batches:
            part = model(batch, supervised)
            part.backward()
            loss += part.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        pipe.send((sum(batch.num_tokens for batch in batches), loss))


def run_ours(pipe: Connection, layers: int, num_steps: int) -> None:
    """``train``, let forward one step at a time by its own question whether it should stop."""
    use_threads(usable_cores())
    whole, model = build(shape(layers))
    accumulate_in_fp32(whole.parameters())
    optimizer = ShardedOptimizer(dict(whole.named_parameters()), betas=(0.9, 0.95), eps=1e-8, decay=0.0)
    packs: Any = SyntheticPacks(VOCAB_SIZE)
    with tempfile.TemporaryDirectory() as folder, join_world() as world:
        run = RunDirectory(folder)
        job = Job(
            world=world,
            pipeline=Pipeline({0: model}, world, torch.bfloat16),
            parameters=dict(whole.named_parameters()),
            optimizer=optimizer,
            schedule=Schedule(LR, num_steps, shape="constant"),
            clip=1.0,
            train_data=packs,
            validation_data=None,
            deal=Deal(PACKS_PER_STEP, MICRO_BATCH, 0, 1),
            num_packs=num_steps * PACKS_PER_STEP,
            seed=0,
        )
        recorder = Recorder(run, rank=0)
        stepped = 0

        def between_steps() -> bool:
            nonlocal stepped
            if stepped:
                last = json.loads(run.metrics.read_text().splitlines()[-1])
                pipe.send((last["tokens"], last["loss"]))
            stepped += 1
            pipe.recv()
            return stepped == num_steps

        train(
            job,
            BetweenSteps(0, 0, Path(folder) / "checkpoints", 1),
            recorder,
            Phases(PositionFile(run.worker_position(0))),
            between_steps,
        )


class Contestant:
    """A loop in a process of its own, which takes a step when asked."""

    def __init__(self, target: Callable[[Connection, int, int], None], layers: int, num_steps: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(theirs, layers, num_steps), daemon=True)
        self._process.start()

    def step(self) -> tuple[float, float]:
        """Tokens a second and loss of one step, timed from outside."""
        began = time.perf_counter()
        self._pipe.send("step")
        tokens, loss = self._pipe.recv()
        return tokens / (time.perf_counter() - began), loss


def shape(layers: int) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    num_steps = arguments.steps + 2
    theirs = Contestant(run_hand_written, arguments.layers, num_steps)
    ours = Contestant(run_ours, arguments.layers, num_steps)
    pairs = []
    for step in range(arguments.steps + 1):
        (plain_rate, plain_loss), (our_rate, our_loss) = theirs.step(), ours.step()
        print(
            f"step {step}: hand-written {plain_rate:.0f} tokens/s (loss {plain_loss:.4f}), "
            f"tonnage {our_rate:.0f} (loss {our_loss:.4f})",
            flush=True,
        )
        if step:  # the first pair warms up
            pairs.append((plain_rate, our_rate))
    ratios = sorted(mine / theirs for theirs, mine in pairs)
    result = {
        "benchmark": "loop_overhead",
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{platform.machine()}, {usable_cores()} cores",
        "torch": torch.__version__,
        "layers": arguments.layers,
        "steps": len(pairs),
        "hand_written_tokens_per_second": statistics.median(theirs for theirs, _ in pairs),
        "tonnage_tokens_per_second": statistics.median(mine for _, mine in pairs),
        "ratio_median": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }
    print(json.dumps(result, indent=2))
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
