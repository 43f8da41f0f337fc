"""TRL's SFTTrainer and transformers' Trainer beside tonnage on one GPU, on the same rows:

    python -m benchmarks.gpu.beside "8B LoRA, full rows" --folder FOLDER --output FILE

As ``benchmarks.peers.training`` and ``adapters`` on a CPU: the same weights, the same documents between two updates,
losses compared, bf16 over fp32 masters, or LoRA of rank 32 over bf16. A GPU does not hold all of them at once, so one
takes its steps after the other. Weights are drawn where they lie, by the name of each alike for everybody. Full rows
are one document of 4,096 tokens each, so nobody pads; short documents have 64 to 1,024. The peers are as fast as they
can be made here: nothing recomputed, as many documents at a time as fit, Liger's kernels if these are installed; and
padding-free on FlashAttention if that is, else sorted by length on torch's own attention. What is told of memory is the
peak of torch's allocator; ours trains once more with half as many documents at a time as theirs. Without a GPU a small
shape is trained in fp32.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from benchmarks.peers.adapters import ALPHA, RANK
from benchmarks.peers.contest import Contestant, compete, our_command
from benchmarks.peers.inputs import write_additions, write_our_run, write_steps
from benchmarks.peers.training import BETAS, CLIP, EPS, LR, beside, our_config

from tonnage.host.threads import usable_cores
from tonnage.prove.conduct import ALLOCATORS
from tonnage.prove.material import MOST_DRAWN, SHAPES, bare_shape
from tonnage.prove.record import write

WARM_UP, TURNS, STEPS = 2, 2, 3
"""Steps that do not count, turns, and steps of a turn."""
NUM_STEPS = WARM_UP + TURNS * STEPS + 1
"""With one that is never taken: runs end by themselves."""
OURS = ("tonnage", "tonnage, few at a time")
"""As the planner has it, and with half as many documents at a time as peers."""
BROKE_OFF = 2
"""The status where somebody did not come to the end."""
TRAINERS = {"TRL": "SFTTrainer", "Trainer": "Trainer"}


@dataclass(frozen=True)
class Rows:
    """Documents of a step."""

    documents: int
    least: int
    """Tokens of the shortest, and of the longest."""
    most: int


@dataclass(frozen=True)
class Contest:
    """What is trained, how, and how much of it peers compute at a time."""

    shape: str
    rows: Rows
    at_a_time: int
    """Documents of a micro-batch of theirs."""
    adapter: bool = False


FULL, SHORT = Rows(4, 4096, 4096), Rows(32, 64, 1024)
CONTESTS: Mapping[str, Contest] = {
    "1B, full rows": Contest("1B", FULL, 4),
    "8B LoRA, full rows": Contest("8B", FULL, 2, adapter=True),
    "1B, short documents": Contest("1B", SHORT, 16),
    "8B LoRA, short documents": Contest("8B", SHORT, 8, adapter=True),
    "small": Contest("small", Rows(8, 16, 128), 4),
    "small LoRA": Contest("small", Rows(8, 16, 128), 4, adapter=True),
}
"""The small ones need no GPU."""


def write_rows(path: Path, rows: Rows, vocabulary: int) -> Path:
    """Documents of drawn tokens, all of them supervised, for all steps."""
    draw = random.Random(0)
    with path.open("w") as out:
        for _ in range(rows.documents * NUM_STEPS):
            size = draw.randint(rows.least, rows.most)
            tokens = [draw.randrange(min(vocabulary, MOST_DRAWN)) for _ in range(size)]
            out.write(json.dumps({"input_ids": tokens, "loss_mask": [1] * size}) + "\n")
    return path


def config_of(contest: Contest, folder: Path) -> dict[str, Any]:
    """Our run; the planner chooses what is not said."""
    sizes, rows = SHAPES[contest.shape], contest.rows
    model, file = bare_shape(folder / "model", **sizes), write_rows(folder / "rows.jsonl", rows, sizes["vocab_size"])
    config = our_config(Path(model), file, folder / "cache", rows.documents, NUM_STEPS)
    config["data"] |= {"max_length": rows.most, "template": "plain"}
    on_gpu = torch.cuda.is_available()
    config |= {"init": "random", "precision": "bf16" if on_gpu else "fp32", "launch": {"workers": 1}}
    config |= {"compile": "on" if on_gpu else "off"}
    if contest.adapter:
        config["adapter"] = {"rank": RANK, "alpha": ALPHA}
    return config


def spec_of(contest: Contest, folder: Path, trainer: str) -> dict[str, Any]:
    """What ``trainer_worker`` is told, for its fastest steps on this machine."""
    on_gpu = torch.cuda.is_available()
    is_flat = on_gpu and find_spec("flash_attn") is not None
    arguments: dict[str, Any] = {"bf16": on_gpu, "use_liger_kernel": on_gpu and find_spec("liger_kernel") is not None}
    if trainer == "SFTTrainer":
        arguments |= {"max_length": None, "padding_free": is_flat}
    return {
        "class": trainer,
        "model": str(folder / "model"),
        "steps": str(folder / "steps.json"),
        "documents": contest.at_a_time,
        "device": "cuda" if on_gpu else "cpu",
        "drawn": "bfloat16" if on_gpu else "float32",
        "attention": "flash_attention_2" if is_flat else "sdpa",
        "arguments": arguments,
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "clip": CLIP,
        **({"collator": "flat"} if is_flat and trainer == "Trainer" else {}),
        **({"adapter": additions(folder)} if contest.adapter else {}),
        **({"dtype": "bfloat16"} if contest.adapter and on_gpu else {}),
    }


def additions(folder: Path) -> dict[str, Any]:
    """LoRA for ``trainer_worker``, beginning as ours does."""
    start = folder / "start.safetensors"
    if not start.exists():
        write_additions(start, folder / "model", RANK)
    return {"rank": RANK, "alpha": ALPHA, "start": str(start)}


def commands(contest: Contest, folder: Path) -> dict[str, list[str]]:
    """Of all contestants, ours first, by their names; writes what they read."""
    config = config_of(contest, folder)
    write_steps(folder / "steps.json", write_our_run(folder / "run", config), NUM_STEPS)
    write_our_run(folder / "few", config | {"memory": {"micro_batch": max(1, contest.at_a_time // 2)}})
    by_name = {
        name: our_command("benchmarks.gpu.drawn", "benchmarks.peers.ours", str(folder / run))
        for name, run in zip(OURS, ("run", "few"), strict=True)
    }
    for name, trainer in TRAINERS.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(spec_of(contest, folder, trainer)))
        command = our_command("benchmarks.peers.trainer_worker", str(path))
        by_name[f"{name} + peft" if contest.adapter else name] = command
    return by_name


def held(contest: Contest, folder: Path, output: Path) -> dict[str, Any]:
    """Ours, then theirs; what is known is written after each."""
    result: dict[str, Any] = {"contestants": {}}
    ours: list[Contestant] = []
    for name, command in commands(contest, folder).items():
        one = Contestant(name, command, folder / f"{name}.log", threads=usable_cores(), environment=ALLOCATORS)
        try:
            compete([one], TURNS, STEPS, WARM_UP)
            result["contestants"][name] = figures(one, ours)
        except SystemExit as ended:
            result["contestants"][name] = {"ended": str(ended)}
        else:
            if name in OURS:
                ours.append(one)
        write(output, result)
    return result


def figures(one: Contestant, ours: list[Contestant]) -> dict[str, Any]:
    """Those of a contestant, a peer's beside ours that came to their end; under the stand-in no speed and no loss."""
    if "STAND_IN_DEVICES" in os.environ:
        return {"peak_bytes": one.peak_bytes, **one.facts}
    return one.result() | {"tokens": one.tokens} | {"beside": {other.name: beside(other, one) for other in ours}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contest", choices=CONTESTS)
    parser.add_argument("--folder", type=Path, required=True, help="for models, rows and logs")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    result = held(CONTESTS[arguments.contest], arguments.folder, arguments.output)
    return BROKE_OFF if any("ended" in one for one in result["contestants"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
