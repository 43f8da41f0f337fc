"""Preference tuning on this machine: tonnage beside TRL's DPOTrainer, the same pairs in every step.

    python -m benchmarks.peers.preferences [--shape llama-135m] [--pairs 8] [--rounds 3] [--only NAME ...]
                                           [--output FILE]

Prompts of 200 to 400 tokens, answers of about 100. Tokens a second are those of prompts, counted once, and of both
answers. Both keep fp32 masters and moments and compute in bf16. TRL in three ways: as it comes (the reference beside
it, and gradient checkpointing), without checkpointing, and with the reference's log-probabilities computed before,
which no step is charged for. Ours have them computed before, too. Where a processor computes faster in fp32, the rows
"fp32" are the ones to look at: both in fp32, as in bf16 a first update of 1e-5 moves hardly a weight.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import Contestant, compete, machine, our_command, write_result
from benchmarks.peers.inputs import SHAPES, write_model, write_our_run
from benchmarks.peers.training import beside

from tonnage.data import PackedDataset
from tonnage.decide.decision import Decision
from tonnage.host.threads import usable_cores

LR, BETA2 = 1e-5, 0.999
LORA = {"rank": 32, "alpha": 64}
OURS: dict[str, dict[str, Any]] = {
    "tonnage": {},
    "tonnage, fp32": {"precision": "fp32"},
    "tonnage, LoRA": {"adapter": LORA},
}
PEERS: dict[str, dict[str, Any]] = {
    "TRL, defaults": {},
    "TRL, no checkpointing": {"arguments": {"gradient_checkpointing": False}},
    "TRL, reference before": {
        "arguments": {"gradient_checkpointing": False, "precompute_ref_log_probs": True},
    },
    "TRL, reference before, fp32": {
        "arguments": {"gradient_checkpointing": False, "precompute_ref_log_probs": True, "bf16": False},
    },
    "TRL + peft": {"adapter": LORA, "dtype": "bfloat16", "arguments": {"gradient_checkpointing": False}},
}


def write_pairs(path: Path, number: int) -> None:
    """Rows of which a byte is a token."""
    chance = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz "

    def text(length: int) -> str:
        return "".join(chance.choices(letters, k=length)).strip() + "."

    with path.open("w") as rows:
        for _ in range(number):
            row = {"prompt": text(chance.randint(200, 400))}
            row |= {name: text(chance.randint(80, 120)) for name in ("chosen", "rejected")}
            rows.write(json.dumps(row) + "\n")


def steps_of(decision: Decision, num_steps: int) -> list[list[dict[str, list[int]]]]:
    """The pairs of the first steps of a run, in its order, as TRL's collator takes them."""
    data, number = PackedDataset.open(decision.plan.data.train_path), decision.plan.packs_per_step
    steps = []
    for step in range(num_steps):
        pairs = []
        for position in range(step * number, (step + 1) * number):
            pack = data.pack(data.pack_at(position, decision.config.seed))
            assert pack.forks is not None
            ids, (shared, second) = pack.input_ids.tolist(), pack.forks[0].tolist()
            pairs.append({"prompt_ids": ids[:shared], "chosen_ids": ids[shared:second], "rejected_ids": ids[second:]})
        steps.append(pairs)
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-135m")
    parser.add_argument("--pairs", type=int, default=8, help="of a step")
    parser.add_argument("--together", type=int, default=4, help="pairs of a micro-batch of TRL's")
    parser.add_argument("--rounds", type=int, default=3)
    everything = [*OURS, *PEERS]
    default = [name for name in everything if "fp32" not in name]
    parser.add_argument("--only", nargs="*", choices=everything, default=default)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        contestants, mean = _contestants(Path(made), arguments)
        others = compete(contestants, arguments.rounds, 1)
    results = {contestant.name: contestant.result() for contestant in contestants}
    by_name = {contestant.name: contestant for contestant in contestants}
    for name in PEERS:
        ours = "tonnage, LoRA" if "adapter" in PEERS[name] else "tonnage, fp32" if "fp32" in name else "tonnage"
        if name in by_name and ours in by_name:
            results[name] |= {"compared_with": ours} | beside(by_name[ours], by_name[name])
    result = {
        "benchmark": "peers/preferences",
        "machine": machine(),
        "share_of_cpu_that_others_had": others,
        "shape": arguments.shape,
        "data": "pairs of answers, made by the benchmark",
        "units": "pairs",
        "documents_per_step": arguments.pairs,
        "tokens_per_step_mean": mean,
        "contestants": results,
    }
    write_result(arguments.output, result)


def _contestants(folder: Path, arguments: argparse.Namespace) -> tuple[list[Contestant], float]:
    model, rows, num_steps = write_model(folder / "model", arguments.shape), folder / "rows.jsonl", 2 + arguments.rounds
    write_pairs(rows, num_steps * arguments.pairs)
    config = {
        "model": str(model),
        "data": {"train": str(rows), "max_length": 1024, "pack": False, "cache": str(folder / "cache")},
        "objective": "dpo",
        "batch": {"sequences": arguments.pairs},
        "steps": num_steps,
        "optimizer": {"lr": LR, "betas": (0.9, BETA2), "schedule": "constant", "warmup": 0},
    }
    decision = write_our_run(folder / "order", config)
    steps = steps_of(decision, num_steps)
    (folder / "steps.json").write_text(json.dumps(steps))
    contestants = []
    for number, name in enumerate(arguments.only):
        if name in OURS:
            write_our_run(folder / f"run-{number}", config | OURS[name])
            command = our_command("benchmarks.peers.ours", str(folder / f"run-{number}"))
        else:
            spec = {"model": str(model), "steps": str(folder / "steps.json"), "lr": LR, "beta2": BETA2}
            (folder / f"spec-{number}.json").write_text(json.dumps(spec | {"pairs": arguments.together} | PEERS[name]))
            command = our_command("benchmarks.peers.dpo_worker", str(folder / f"spec-{number}.json"))
        contestants.append(Contestant(name, command, folder / f"log-{number}", threads=usable_cores()))
    return contestants, decision.plan.data.num_tokens / decision.plan.data.num_packs * arguments.pairs


if __name__ == "__main__":
    main()
