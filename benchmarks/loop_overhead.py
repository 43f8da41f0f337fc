"""Our step against a minimal hand-written loop, over the same packs and with the same loss.

    python benchmarks/loop_overhead.py [--steps 15] [--output benchmarks/results/loop_overhead.json]

Both train a random pythia-160m shape in bf16 on synthetic packs of 1,024 tokens, 8,192 tokens a step, in one
process, taking steps in turn. The hand-written loop is what an expert would write in an afternoon: packed
attention, the vocabulary projection at supervised positions only, fused AdamW on the bf16 weights, clipping. Ours
is ``tonnage.train.loop.train`` as every run uses it, metrics file and all, with an exact fp32 master besides.

Prints the ratio of median step times, pair by pair, and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import GPTNeoXConfig, PreTrainedModel

from tonnage.data import Pack
from tonnage.launch.threads import usable_cores
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.optim.adamw import AdamW
from tonnage.optim.kernels import use_threads
from tonnage.optim.schedule import Schedule
from tonnage.parallel.world import join_world
from tonnage.rundir import PositionFile, RunDirectory
from tonnage.train.assemble import Job, accumulate_in_fp32
from tonnage.train.batch import Deal, MicroBatch
from tonnage.train.loop import Habits, train
from tonnage.train.loss import LossModel
from tonnage.train.metrics import Recorder

LENGTH, PACKS_PER_STEP, MICRO_BATCH, LR = 1024, 8, 4, 1e-4


class SyntheticPacks:
    """Packs of documents of 60 to 250 tokens, the latter 45% of each supervised, as instruction data has them."""

    num_packs = 64

    def __init__(self, vocab_size: int) -> None:
        chance = np.random.default_rng(0)
        self._packs = [self._make(chance, vocab_size) for _ in range(self.num_packs)]

    def _make(self, chance: np.random.Generator, vocab_size: int) -> Pack:
        lengths: list[int] = []
        while (room := LENGTH - sum(lengths)) > 0:
            lengths.append(min(room, int(chance.integers(60, 250))))
        weights = np.concatenate([(np.arange(n) > 0.55 * n).astype(np.float32) for n in lengths])
        ids = chance.integers(0, vocab_size, LENGTH).astype(np.int32)
        return Pack(ids, weights, np.array(lengths, np.int32), np.arange(len(lengths)))

    def pack(self, index: int) -> Pack:
        return self._packs[index]


def build(config: GPTNeoXConfig) -> tuple[PreTrainedModel, LossModel]:
    model = build_on_meta(config, torch.bfloat16)
    anatomy = dissect(model)
    loss_model = LossModel(model, anatomy)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    return model, loss_model


def hand_written_step(
    model: LossModel, optimizer: torch.optim.Optimizer, packs: SyntheticPacks, step: int
) -> tuple[int, float]:
    """Tokens and seconds of one step of the plain loop."""
    began = time.perf_counter()
    positions = range(step * PACKS_PER_STEP, (step + 1) * PACKS_PER_STEP)
    chosen = [packs.pack(position % packs.num_packs) for position in positions]
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
    return sum(batch.num_tokens for batch in batches), time.perf_counter() - began


class OurSteps:
    """``train`` in a thread of its own, let forward one step at a time."""

    def __init__(self, model: LossModel, whole: PreTrainedModel, packs: Any, folder: Path, num_steps: int) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._metrics = folder / "metrics.jsonl"
        self._thread = threading.Thread(target=self._run, args=(model, whole, packs, folder, num_steps), daemon=True)
        self._thread.start()
        self._done.acquire()

    def _run(self, model: LossModel, whole: PreTrainedModel, packs: Any, folder: Path, num_steps: int) -> None:
        use_threads(usable_cores())
        run = RunDirectory(folder)
        accumulate_in_fp32(model)
        named = dict(whole.named_parameters())
        optimizer = AdamW(named, betas=(0.9, 0.95), eps=1e-8, decay=0.0)
        with join_world() as world:
            job = Job(
                world=world,
                model=whole,
                loss_model=model,
                optimizer=optimizer,
                schedule=Schedule(LR, num_steps, shape="constant"),
                zero=3,
                clip=1.0,
                train_data=packs,
                validation_data=None,
                deal=Deal(PACKS_PER_STEP, MICRO_BATCH, 0, 1),
                num_packs=(num_steps + 1) * PACKS_PER_STEP,
                seed=0,
            )
            train(
                job,
                Habits(0, 0, folder / "checkpoints", 1),
                Recorder(run, rank=0, tensorboard=False),
                PositionFile(run.worker_position(0)),
                self._between_steps,
            )

    def _between_steps(self) -> bool:
        self._done.release()
        self._go.acquire()
        return False

    def step(self) -> tuple[int, float]:
        """Tokens and seconds of one step."""
        began = time.perf_counter()
        self._go.release()
        self._done.acquire()
        seconds = time.perf_counter() - began
        return json.loads(self._metrics.read_text().splitlines()[-1])["tokens"], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    use_threads(usable_cores())
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=arguments.layers,
        num_attention_heads=12,
    )
    packs = SyntheticPacks(config.vocab_size)
    _, plain = build(config)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        whole, model = build(config)
        ours = OurSteps(model, whole, packs, Path(folder), arguments.steps + 2)
        pairs = []
        for step in range(arguments.steps + 1):
            theirs = hand_written_step(plain, optimizer, packs, step)
            mine = ours.step()
            if step:  # the first pair warms up
                pairs.append((theirs[0] / theirs[1], mine[0] / mine[1]))
                print(f"step {step}: hand-written {pairs[-1][0]:.0f} tokens/s, tonnage {pairs[-1][1]:.0f}", flush=True)
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
