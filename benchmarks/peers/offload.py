"""A whole step of 512 tokens with state on disk: tonnage beside DeepSpeed's ZeRO-3 with NVMe.

    python -m benchmarks.peers.offload [--on-disk all|optimizer] [--rounds 5] [--steps 3] [--directory DIR]
                                       [--output FILE]

Both train a pythia-160m shape with the same random weights in bf16, on the same 512 tokens a step in one row, with
clipping, and with the same on the same disk: the optimizer's state alone (``offload_optimizer`` on ``nvme``), or
gradients and parameters too (``offload_param`` besides). They take turns of ``--steps`` steps. A turn ends when
everything is on its way to the disk that a step sends there: updates in the background are waited for. tonnage runs
twice more: with half of its optimizer state in memory, which still needs far less of it than DeepSpeed does, and with
int8 moments.

Needs the environment of ``environment.py``. ``--tune`` tries other settings of DeepSpeed's I/O first and says how long
a step takes with each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
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
from benchmarks.peers.inputs import write_model, write_our_run, write_rows, write_steps

from tonnage.host.threads import usable_cores

RESIDENT_BYTES = 800_000_000
"""Half of the state of 162 M parameters."""
LENGTH, LR, BETAS, EPS, CLIP = 512, 1e-4, (0.9, 0.95), 1e-8, 1.0
BEST = {"block_size": 8 << 20, "queue_depth": 16, "intra_op_parallelism": 2, "pipeline": True}
"""The fastest of ``TRIED`` for DeepSpeed here."""
TRIED: list[dict[str, Any]] = [
    {**BEST, "block_size": 1 << 20, "intra_op_parallelism": 1, "pipeline": False},
    {**BEST, "block_size": 1 << 20},
    {**BEST, "intra_op_parallelism": 1},
    {**BEST, "pipeline": False},
    BEST,
]


def deepspeed_config(folder: Path, tuned: dict[str, Any], parameters_on_disk: bool) -> dict[str, Any]:
    """DeepSpeed's configuration for ZeRO-3 with everything on disk."""
    tuned = dict(tuned)
    pipeline = tuned.pop("pipeline")
    zero: dict[str, Any] = {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": False,
            "buffer_count": 20 if pipeline else 6,  # with fewer, the pipelined swapper runs out of them and asserts
            "pipeline_read": pipeline,
            "pipeline_write": pipeline,
        },
        "sub_group_size": 40_000_000,  # the default of 1e9 holds all state in memory at once
    }
    if parameters_on_disk:
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": str(folder),
            "pin_memory": False,
            "buffer_count": 8,
            "buffer_size": 50_000_000,
            "max_in_cpu": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        "aio": {"single_submit": False, "overlap_events": True, **tuned},
        "steps_per_print": 1_000_000,
    }


def peer(folder: Path, name: str, num_steps: int, model: Path, tuned: dict[str, Any], parameters: bool) -> Contestant:
    """DeepSpeed as a contestant."""
    swap = folder / f"swap-{name}".replace(" ", "-")
    swap.mkdir()
    spec = {
        "model": str(model),
        "steps": str(folder / "steps.json"),
        "documents": 1,
        "rates": [LR] * num_steps,
        "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS},
        "deepspeed": deepspeed_config(swap, tuned, parameters),
    }
    path = folder / f"{swap.name}.json"
    path.write_text(json.dumps(spec))
    command = peers_command("benchmarks.peers.deepspeed_worker", str(path))
    return Contestant(name, command, folder / f"{swap.name}.log", threads=usable_cores())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--shape", default="pythia-160m")
    parser.add_argument("--on-disk", choices=("all", "optimizer"), default="all")
    parser.add_argument("--directory", type=Path, help="on the disk to be used")
    parser.add_argument("--tune", action="store_true", help="only try settings of DeepSpeed")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    everything = arguments.on_disk == "all"
    rest = "disk" if everything else "device"
    num_steps = 2 + arguments.rounds * arguments.steps  # one to warm up, and one that is never taken
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        folder = Path(made)
        model = write_model(folder / "model", arguments.shape)
        config: dict[str, Any] = {
            "model": str(model),
            "data": {
                "train": str(write_rows(folder / "rows.jsonl", num_steps + 4, least_bytes=LENGTH)),
                "max_length": LENGTH,
                "train_on": "all",
                "over_length": "truncate",
                "max_loss": 1,
                "cache": str(folder / "cache"),
                "pack": False,
            },
            "batch": {"sequences": 1},
            "steps": num_steps,
            "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": 0.0, "clip": CLIP}
            | {"schedule": "constant", "warmup": 0},
            "memory": {
                "optimizer_tier": "disk",
                "gradient_tier": rest,
                "parameter_tier": rest,
                "recompute": "none",
                "moments": "fp32",
                "micro_batch": 1,
            },
        }
        decision = write_our_run(folder / "ours", config)
        others: dict[str, dict[str, Any]] = {
            "half in memory": {"optimizer_resident": RESIDENT_BYTES},
            "int8 moments": {"moments": "int8"},
        }
        for name, memory in others.items():
            write_our_run(folder / f"ours, {name}", {**config, "memory": {**config["memory"], **memory}})
        steps = write_steps(folder / "steps.json", decision, num_steps)
        assert all(len(document["ids"]) == LENGTH for step in steps for document in step)
        if arguments.tune:
            for number, tuned in enumerate(TRIED):
                print(json.dumps(tuned))
                one = peer(folder, f"DeepSpeed {number}", num_steps, model, tuned, everything)
                compete([one], rounds=1, steps=arguments.steps)
            return
        ours = [
            Contestant(
                run.name.replace("ours", "tonnage"),
                our_command("benchmarks.peers.ours", str(run)),
                run.with_suffix(".log"),
                threads=usable_cores(),
            )
            for run in (folder / "ours", *(folder / f"ours, {name}" for name in others))
        ]
        theirs = peer(folder, "DeepSpeed ZeRO-3 NVMe", num_steps, model, BEST, everything)
        busy = compete([*ours, theirs], arguments.rounds, arguments.steps)
    shares = {
        one.name: sorted(mine / other for mine, other in zip(one.seconds, theirs.seconds, strict=True)) for one in ours
    }
    result = {
        "benchmark": "peers/offload",
        "machine": machine(),
        "share_of_cpu_that_others_had": busy,
        "shape": arguments.shape,
        "on_disk": arguments.on_disk,
        "tokens_per_step": LENGTH,
        "contestants": {one.name: one.result() for one in (*ours, theirs)},
        "largest_relative_difference_of_losses": {
            one.name: largest_difference(one.losses, theirs.losses) for one in ours
        },
        "share_of_their_time_median": {name: statistics.median(share) for name, share in shares.items()},
        "share_of_their_time": {name: [round(one, 3) for one in share] for name, share in shares.items()},
        "limit": 0.4,
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
