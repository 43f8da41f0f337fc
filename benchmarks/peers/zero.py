"""ZeRO on two workers of one machine: tonnage beside DeepSpeed at the same stage.

    python -m benchmarks.peers.zero [--stages 2 3] [--shape pythia-160m] [--rounds 4] [--output FILE]

The same random weights, the same documents in every step (about 4,096 tokens, sorted by length and dealt to the two
workers), bf16 with fp32 masters, clipping. Each worker has half of the cores. The two contestants of a stage take one
step in turn. DeepSpeed runs with its own compiled AdamW and its shared-memory collectives where it can build them.
Needs the environment of ``environment.py``.
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
from benchmarks.peers.inputs import SHAPES, write_model, write_our_run, write_rows, write_steps
from benchmarks.peers.training import BETAS, CLIP, EPS, LR, our_config

from tonnage.host.threads import usable_cores

WORKERS, STEP_TOKENS = 2, 4096
DOCUMENTS = 8
"""Of a micro-batch of one worker."""


def deepspeed_config(stage: int, micro_batches: int) -> dict[str, Any]:
    """DeepSpeed's configuration; sizes of buckets tried from 5e6 to 5e8."""
    return {
        "train_micro_batch_size_per_gpu": DOCUMENTS,
        "gradient_accumulation_steps": micro_batches,
        "bf16": {"enabled": True},
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": 200_000_000,
            "allgather_bucket_size": 200_000_000,
        },
        "steps_per_print": 1_000_000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", type=int, choices=(2, 3), default=(2, 3))
    parser.add_argument("--shape", choices=SHAPES, default="pythia-160m")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--tokens", type=int, default=STEP_TOKENS, help="of a step, about")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    num_steps, threads = 2 + arguments.rounds, max(1, usable_cores() // WORKERS)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        folder = Path(made)
        model = write_model(folder / "model", arguments.shape, arguments.tokenizer)
        rows = arguments.data or write_rows(folder / "rows.jsonl", 2000)
        first = write_our_run(folder / "first", our_config(model, rows, folder / "cache", 8, num_steps))
        mean = first.plan.data.num_tokens / first.plan.data.num_packs
        micro_batches = max(1, round(arguments.tokens / mean / DOCUMENTS / WORKERS))
        sequences = micro_batches * DOCUMENTS * WORKERS
        config = our_config(model, rows, folder / "cache", sequences, num_steps)
        pairs = []
        for stage in arguments.stages:
            memory = {"zero": stage, "micro_batch": DOCUMENTS, "recompute": "none", "moments": "fp32"}
            decision = write_our_run(
                folder / f"ours-{stage}",
                {**config, "memory": memory, "launch": {"workers": WORKERS}},
            )
            ours = Contestant(
                f"tonnage, ZeRO {stage}",
                our_command("benchmarks.peers.ours", str(folder / f"ours-{stage}")),
                folder / f"ours-{stage}.log",
                ranks=WORKERS,
                threads=threads,
            )
            spec = {
                "model": str(model),
                "steps": str(folder / "steps.json"),
                "documents": DOCUMENTS,
                "rates": [LR] * num_steps,
                "optimizer": {"lr": LR, "betas": BETAS, "eps": EPS},
                "deepspeed": deepspeed_config(stage, micro_batches),
            }
            (folder / f"spec-{stage}.json").write_text(json.dumps(spec))
            theirs = Contestant(
                f"DeepSpeed, ZeRO {stage}",
                peers_command("benchmarks.peers.deepspeed_worker", str(folder / f"spec-{stage}.json")),
                folder / f"theirs-{stage}.log",
                ranks=WORKERS,
                threads=threads,
            )
            pairs.append((ours, theirs))
        write_steps(folder / "steps.json", decision, num_steps)
        others = max(compete(list(pair), arguments.rounds, 1) for pair in pairs)
    results = {one.name: one.result() for pair in pairs for one in pair}
    for ours, theirs in pairs:
        ratios = sorted(mine / other for mine, other in zip(ours.rates, theirs.rates, strict=True))
        results[theirs.name] |= {
            "compared_with": ours.name,
            "largest_relative_difference_of_losses": largest_difference(ours.losses, theirs.losses),
            "times_faster_median": statistics.median(ratios),
            "times_faster": [round(ratio, 2) for ratio in ratios],
            "share_of_their_memory": ours.peak_bytes / theirs.peak_bytes,
            "share_of_their_cpu_seconds": sum(ours.cpu_seconds) / sum(theirs.cpu_seconds),
        }
    result = {
        "benchmark": "peers/zero",
        "machine": machine(),
        "share_of_cpu_that_others_had": others,
        "shape": arguments.shape,
        "data": arguments.data.name if arguments.data else "made by the benchmark",
        "workers": WORKERS,
        "documents_per_step": sequences,
        "contestants": results,
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
