"""Do moments of fewer bytes train as well? The last evaluation loss with bf16 and int8 moments beside fp32's.

    python benchmarks/moments_quality.py --data gsm8k_train.json --tokenizer DIR [--seeds 0 1 2]
                                         [--moments fp32 bf16 int8] [--steps 100] [--directory DIR] [--output FILE]

A pythia-70m shape with random weights learns the given rows in packs of 1,024 tokens, 8,192 tokens a step, bf16,
learning rate 1e-3, as ``tonnage train`` does; 2% of the rows are held out. Weights, split and order are drawn by the
seed, so that runs of one seed differ in nothing but how their moments rest. What is done already is not done again:
results go to the file as they come.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GPTNeoXConfig


def run(folder: Path, options: argparse.Namespace, seed: int, moments: str) -> dict[str, Any]:
    """One whole run; its evaluation losses and its last training loss."""
    run_directory = folder / f"{moments}-{seed}"
    config = {
        "model": str(folder / "model"),
        "init": "random",
        "data": {"train": str(options.data.resolve()), "validation": 0.02, "max_length": 1024},
        "batch": {"tokens": 8192},
        "steps": options.steps,
        "optimizer": {"lr": 1e-3},
        "memory": {"moments": moments, "micro_batch": 2, "recompute": "none"},
        "launch": {"workers": 1, "timeout": 100000},
        "track": [],
        "output": str(run_directory),
        "seed": seed,
    }
    path = folder / f"{moments}-{seed}.yaml"
    path.write_text(json.dumps(config))
    subprocess.run([str(Path(sys.executable).with_name("tonnage")), "train", str(path)], check=True)
    records = [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record]
    return {
        "seed": seed,
        "moments": moments,
        "steps": len(losses),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "eval_loss": [record["eval_loss"] for record in records if "eval_loss" in record][-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--moments", nargs="*", default=["fp32", "int8", "bf16"])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "moments_quality.json")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(options.output.read_text())["runs"] if options.output.exists() else []
    for seed in options.seeds:
        for moments in options.moments:
            if any((row["seed"], row["moments"], row["steps"]) == (seed, moments, options.steps) for row in rows):
                continue
            with tempfile.TemporaryDirectory(dir=options.directory) as made:
                folder = Path(made)
                tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
                tokenizer.save_pretrained(folder / "model")
                GPTNeoXConfig(
                    vocab_size=50304,
                    hidden_size=512,
                    intermediate_size=2048,
                    num_hidden_layers=6,
                    num_attention_heads=8,
                    max_position_embeddings=2048,
                    eos_token_id=tokenizer.eos_token_id,
                    bos_token_id=tokenizer.eos_token_id,
                    architectures=["GPTNeoXForCausalLM"],
                ).save_pretrained(folder / "model")
                rows.append(run(folder, options, seed, moments))
            exact = {row["seed"]: row["eval_loss"] for row in rows if row["moments"] == "fp32"}
            for row in rows:
                if row["seed"] in exact:
                    row["eval_loss_of_fp32"] = round(row["eval_loss"] / exact[row["seed"]], 6)
            options.output.write_text(json.dumps({"benchmark": "moments_quality", "runs": rows}, indent=2) + "\n")
            print(json.dumps(rows[-1]), flush=True)


if __name__ == "__main__":
    main()
