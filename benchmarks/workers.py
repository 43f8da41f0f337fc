"""Two workers of one thread beside one worker of two: what it costs to divide a step among processes of a machine.

    python -m benchmarks.workers [--shape llama-135m] [--tokens 8192] [--stages 0 3] [--rounds 4] [--output FILE]

All weights in bf16, and the same packs of 1,024 tokens in every step, once for each ZeRO stage. Contestants take
three steps in turn, behind one that does not count; how far their losses are apart is in the result. The one worker
sends nothing: its speed is what dividing can reach. What is sent is the same however many tokens a step has.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks.peers.contest import Contestant, compete, largest_difference, machine, our_command, write_result
from benchmarks.peers.inputs import SHAPES, write_model, write_our_run, write_rows
from benchmarks.peers.training import our_config

from tonnage.host.threads import usable_cores

WORKERS = 2
PACK = 1024
"""Tokens of a pack, which documents fill: workers have equally much to do."""
TURN, SETTLING = 3, 1
"""Steps that count, and those before them, in which memory comes anew that was given up for others' turns: no run that
goes on has such."""


def contestant(folder: Path, model: Path, tokens: int, steps: int, workers: int, stage: int) -> Contestant:
    """A run of so many workers that share the cores, written down."""
    name = f"{workers} workers, ZeRO {stage}" if workers > 1 else "1 worker"
    run = folder / f"run-{workers}-{stage}"
    config = our_config(model, folder / "rows.jsonl", folder / "cache", 1, steps)
    config["data"]["pack"], config["batch"] = True, {"tokens": tokens}
    memory = {"zero": stage, "micro_batch": 2, "recompute": "none", "moments": "fp32"}
    write_our_run(run, {**config, "memory": memory, "launch": {"workers": workers}})
    threads = max(1, usable_cores() // workers)
    command = our_command("benchmarks.peers.ours", str(run))
    return Contestant(name, command, folder / f"{run.name}.log", ranks=workers, threads=threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-135m")
    parser.add_argument("--tokens", type=int, default=8192, help=f"of a step, in packs of {PACK}")
    parser.add_argument("--stages", nargs="+", type=int, choices=range(4), default=[0, 3])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    steps, tokens = 2 + (SETTLING + TURN) * arguments.rounds, arguments.tokens
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        model = write_model(folder / "model", arguments.shape, None)
        write_rows(folder / "rows.jsonl", 2000)
        alone = contestant(folder, model, tokens, steps, 1, 0)
        divided = [contestant(folder, model, tokens, steps, WORKERS, stage) for stage in arguments.stages]
        others = compete([alone, *divided], arguments.rounds, TURN, settling=SETTLING)
    results = {one.name: one.result() for one in (alone, *divided)}
    for one in divided:
        shares = [mine / theirs for mine, theirs in zip(one.rates, alone.rates, strict=True)]
        results[one.name] |= {
            "share_of_one_workers_speed_median": statistics.median(shares),
            "share_of_one_workers_speed": [round(share, 3) for share in shares],
            "largest_relative_difference_of_losses": largest_difference(one.losses, alone.losses),
        }
    write_result(
        arguments.output,
        {
            "benchmark": "workers",
            "machine": machine(),
            "share_of_cpu_that_others_had": others,
            "shape": arguments.shape,
            "packs_per_step": tokens // PACK,
            "contestants": results,
        },
    )


if __name__ == "__main__":
    main()
