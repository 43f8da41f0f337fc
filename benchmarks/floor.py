"""How far a step is from its floor, and why: ``tonnage profile`` of two shapes at 8,192 tokens a step.

    python -m benchmarks.floor [--shapes pythia-160m llama-135m] [--data FILE --tokenizer FILE] [--steps 3]
                               [--set KEY=VALUE ...] [--output FILE]

The floor is what the matrix products that the model needs (attention included, the head only where a token is
supervised, nothing recomputed) take at the rate of one large product measured in the same process. The part of the step
that the floor makes up is the model FLOPs utilisation; the rest is told by cause.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.peers.contest import machine, write_result
from benchmarks.peers.inputs import SHAPES, write_model, write_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["pythia-160m", "llama-135m"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other keys of the config")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    shapes = {}
    for shape in arguments.shapes:
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            config = {
                "model": str(write_model(folder / "model", shape, arguments.tokenizer)),
                "data": {
                    "train": str(arguments.data or write_rows(folder / "rows.jsonl", 3000)),
                    "max_length": 1024,
                    "cache": str(folder / "cache"),
                },
                "batch": {"tokens": 8192},
                "steps": 2 * arguments.steps + 1,
                "track": [],
                "output": str(folder / "run"),
            }
            (folder / "config.yaml").write_text(json.dumps(config))
            command = [sys.executable, "-m", "tonnage", "profile", str(folder / "config.yaml"), *arguments.set]
            done = subprocess.run(
                [*command, "--steps", str(arguments.steps), "--json"], stdout=subprocess.PIPE, text=True, check=True
            )
        figures = json.loads(done.stdout)
        figures["operations"] = figures["operations"][:12]
        share = figures["floor_seconds"] / figures["step_seconds"]
        shapes[shape] = {"floor_share_of_step": share, **figures}
        print(f"{shape}: {figures['tokens'] / figures['step_seconds']:.0f} tokens/s, {share:.0%} of the floor")
    result = {
        "benchmark": "floor",
        "machine": machine(),
        "data": arguments.data.name if arguments.data else "made by the benchmark",
        "settings": arguments.set,
        "shapes": shapes,
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
