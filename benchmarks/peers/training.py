"""Tokens a second of instruction tuning on this machine: tonnage beside TRL's SFTTrainer and transformers' Trainer.

    python -m benchmarks.peers.training [--shape pythia-160m] [--data FILE [--tokenizer FILE]] [--tokens 8192]
                                        [--rounds 4] [--only NAME ...] [--output FILE]

One set of random weights, one file of instructions (made here if none is given), one order: between two updates all
contestants see the same documents, about 8,192 tokens of them, and mask the same. They take one step in turn, each in
processes of its own. Tokens are those of documents; padding does not count. All keep fp32 masters and fp32 moments, and
compute in bf16, but for peers told to be "fp32". The losses of all steps are compared: a row counts only if they agree
(``AGREE``).

Peers run in the best configuration found, which ``benchmarks/peers/README.md`` writes down; a second row of TRL is its
default. Needs the environment of ``environment.py``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import (
    Contestant,
    compete,
    largest_difference,
    machine,
    our_command,
    peers_command,
    write_result,
)
from benchmarks.peers.inputs import SHAPES, write_model, write_our_run, write_rows, write_steps

from tonnage.host.threads import usable_cores

LR, BETAS, EPS, CLIP = 1e-4, (0.9, 0.95), 1e-8, 1.0
STEP_TOKENS = 8192
AGREE = 0.005
"""Largest relative difference of losses at any step. bf16 products differ in their order of sums."""

PEERS: dict[str, dict[str, Any]] = {
    "TRL SFTTrainer": {"class": "SFTTrainer", "documents": 8},
    "TRL SFTTrainer, defaults": {
        "class": "SFTTrainer",
        "documents": 8,
        "arguments": {"gradient_checkpointing": True, "train_sampling_strategy": "sequential"},
    },
    "transformers Trainer": {"class": "Trainer", "documents": 8},
    "TRL SFTTrainer, fp32": {"class": "SFTTrainer", "documents": 8, "arguments": {"bf16": False}},
    "transformers Trainer, fp32": {"class": "Trainer", "documents": 8, "arguments": {"bf16": False}},
    "transformers Trainer, fp32, in DDP": {
        "class": "Trainer",
        "documents": 8,
        "ddp": True,
        "arguments": {"bf16": False},
    },
    "TRL SFTTrainer, fp32, in DDP": {"class": "SFTTrainer", "documents": 8, "ddp": True, "arguments": {"bf16": False}},
    "transformers Trainer, flat": {"class": "Trainer", "documents": 8, "collator": "flat"},
    "transformers Trainer, experts in a loop": {"class": "Trainer", "documents": 8, "experts": "eager"},
    "transformers Trainer, experts in a loop, fp32": {
        "class": "Trainer",
        "documents": 8,
        "experts": "eager",
        "arguments": {"bf16": False},
    },
    "transformers Trainer, bf16 weights": {"class": "Trainer", "documents": 8, "dtype": "bfloat16"},
}
"""What ``trainer_worker`` is told of each. The last keeps no fp32 masters: it is told, and compared with nothing."""
OURS: dict[str, dict[str, Any]] = {
    "tonnage": {},
    "tonnage, every document whole": {"data": {"share_prefixes": False}},
    "tonnage, 8 documents at a time": {"memory": {"micro_batch": 8}},
    "tonnage, fp32": {"precision": "fp32"},
    "tonnage, int8 moments": {"memory": {"moments": "int8"}},
}
"""Settings; the planner chooses the rest, as it would for anybody."""
DEFAULT = ("tonnage", "TRL SFTTrainer", "transformers Trainer")


def our_config(model: Path, rows: Path, cache: Path, sequences: int, steps: int) -> dict[str, Any]:
    """The run that decides what the steps are."""
    return {
        "model": str(model),
        "data": {"train": str(rows), "max_length": 1024, "over_length": "drop", "cache": str(cache), "pack": False},
        "batch": {"sequences": sequences},
        "steps": steps,
        "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "clip": CLIP}
        | {"schedule": "constant", "warmup": 0},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What a contest is about."""
    parser.add_argument("--shape", choices=SHAPES, default="pythia-160m")
    parser.add_argument("--data", type=Path, help="instructions, in any form that tonnage reads")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json; bytes if none is given")
    parser.add_argument("--tokens", type=int, default=STEP_TOKENS, help="of a step, about")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)


class Field:
    """Where a contest is held: a model, rows, and the steps that they are cut into."""

    def __init__(self, folder: Path, said: argparse.Namespace) -> None:
        self.folder = folder
        self.num_steps = 2 + said.rounds  # one to warm up, and one that is never taken: runs end by themselves
        self.model = write_model(folder / "model", said.shape, said.tokenizer)
        self.rows = said.data or write_rows(folder / "rows.jsonl", 3000)
        first = write_our_run(folder / "first", self.config(8))
        mean = first.plan.data.num_tokens / first.plan.data.num_packs
        self.sequences = 8 * max(1, round(said.tokens / mean / 8))
        write_steps(folder / "steps.json", write_our_run(folder / "order", self.config(self.sequences)), self.num_steps)
        self._numbers = count()

    def config(self, sequences: int) -> dict[str, Any]:
        """Of a run on these rows."""
        return our_config(self.model, self.rows, self.folder / "cache", sequences, self.num_steps)

    def ours(self, name: str, settings: dict[str, Any]) -> Contestant:
        """tonnage with settings of a config; those that are a section are added to it."""
        config, run = self.config(self.sequences), self.folder / f"run-{next(self._numbers)}"
        for key, value in settings.items():
            config[key] = config.get(key, {}) | value if isinstance(value, dict) else value
        write_our_run(run, config)
        return self._contestant(name, our_command("benchmarks.peers.ours", str(run)))

    def peer(self, name: str, told: dict[str, Any], command: Callable[..., list[str]] = peers_command) -> Contestant:
        """A trainer; ``trainer_worker`` says what may be told."""
        path = self.folder / f"spec-{next(self._numbers)}.json"
        spec = {"model": str(self.model), "steps": str(self.folder / "steps.json"), "lr": LR, "betas": BETAS}
        path.write_text(json.dumps(spec | {"eps": EPS, "clip": CLIP} | told))
        return self._contestant(name, command("benchmarks.peers.trainer_worker", str(path)))

    def _contestant(self, name: str, command: list[str]) -> Contestant:
        return Contestant(name, command, self.folder / f"log-{next(self._numbers)}", threads=usable_cores())


def beside(ours: Contestant, one: Contestant) -> dict[str, Any]:
    """What a peer's figures are beside ours."""
    ratios = sorted(mine / other for mine, other in zip(ours.rates, one.rates, strict=True))
    difference = largest_difference(ours.losses, one.losses)
    return {
        "largest_relative_difference_of_losses": difference,
        "losses_agree": difference < AGREE,
        "times_faster_median": statistics.median(ratios),
        "times_faster": [round(ratio, 2) for ratio in ratios],
        "share_of_their_memory": ours.peak_bytes / one.peak_bytes,
        "share_of_their_cpu_seconds": sum(ours.cpu_seconds) / sum(one.cpu_seconds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", nargs="*", choices=[*OURS, *PEERS], default=DEFAULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        field = Field(Path(made), arguments)
        contestants = [
            field.ours(name, OURS[name]) if name in OURS else field.peer(name, PEERS[name]) for name in arguments.only
        ]
        others = compete(contestants, arguments.rounds, 1)
    results = {one.name: one.result() for one in contestants}
    ours = contestants[0]
    for one in contestants[1:]:
        results[one.name] |= beside(ours, one)
    result = {
        "benchmark": "peers/training",
        "machine": machine(),
        "share_of_cpu_that_others_had": others,
        "shape": arguments.shape,
        "data": arguments.data.name if arguments.data else "made by the benchmark",
        "documents_per_step": field.sequences,
        "tokens_per_step_mean": sum(ours.tokens) / len(ours.tokens),
        "compared_with": ours.name,
        "contestants": results,
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
