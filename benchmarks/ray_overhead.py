"""What training through Ray costs: tokens per second of the same run, through Ray on this machine and as local workers.

    python benchmarks/ray_overhead.py [--pairs 3] [--steps 25] [--workers 2]
                                      [--output benchmarks/results/ray_overhead.json]

Workers of one thread train a random Llama of 21M parameters in fp32 on random text, in turn locally and through
Ray, with a checkpoint on the way. A run's speed is the tokens of a step over the median of its steps after the first
three; the ratio is that of the medians over runs. Start-up, which Ray makes longer, is shown beside it. With as many
workers as there are cores, Ray's own processes take their time from them; with fewer they have a core of their own.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tonnage.config import RayLaunch
from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.launch import local, ray
from tonnage.launch.watch import to_their_end
from tonnage.rundir.directory import RunDirectory

WARM_UP = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, arguments.steps, arguments.workers)
        runs: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
        for pair in range(arguments.pairs):
            for kind in runs if pair % 2 == 0 else reversed(list(runs)):
                runs[kind].append(measure(folder, config, kind, f"{kind}-{pair}"))
                print(kind, runs[kind][-1], flush=True)
    speeds = {kind: statistics.median(run["tokens_per_second"] for run in found) for kind, found in runs.items()}
    ratio = speeds["ray"] / speeds["local"]
    print(f"ray {speeds['ray']:.1f} tokens/s, local {speeds['local']:.1f}: {ratio:.4f} of it")
    if arguments.output:
        result = {
            "machine": platform.processor() or platform.machine(),
            "workers": arguments.workers,
            "ratio": ratio,
            "medians": speeds,
            "runs": runs,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def write_config(folder: Path, steps: int, workers: int) -> Path:
    """A model without weights, rows of random text, a config."""
    shape = LlamaConfig(
        vocab_size=258,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=6,
        num_attention_heads=8,
        max_position_embeddings=512,
        bos_token_id=256,
        eos_token_id=256,
    )
    shape.save_pretrained(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|pad|>"])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>").save_pretrained(
        folder / "model"
    )
    chance = random.Random(0)
    rows = ({"text": "".join(chance.choices("abcdefgh ", k=chance.randint(100, 400)))} for _ in range(400))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "model": str(folder / "model"),
        "init": "random",
        "data": {"train": str(folder / "rows.jsonl"), "max_length": 512, "cache": str(folder / "cache")},
        "batch": {"sequences": 8},
        "steps": steps,
        "precision": "fp32",
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"every": steps // 2},
        "track": [],
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def measure(folder: Path, config: Path, kind: str, name: str) -> dict[str, float]:
    """One run: its speed, and its seconds before the first step."""
    decision = decide(str(config), [f"output={folder / name}", f"launch.with={kind}"])
    run, launch = RunDirectory(folder / name), decision.launch
    write_run(run, decision)
    began = time.time()
    if isinstance(launch, RayLaunch):
        to_their_end(ray.started(launch, run))
    else:
        local.run_workers(run, decision.plan.workers, decision.plan.threads_per_worker)
    ended = time.time()
    steps = [record for record in run.read_metrics() if "loss" in record]
    seconds = statistics.median(record["step_seconds"] for record in steps[WARM_UP:])
    tokens = statistics.median(record["tokens"] for record in steps[WARM_UP:])
    training = sum(record["step_seconds"] for record in steps)
    return {"tokens_per_second": tokens / seconds, "step_seconds": seconds, "other_seconds": ended - began - training}


if __name__ == "__main__":
    main()
