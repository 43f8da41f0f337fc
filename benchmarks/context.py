"""What workers that divide the tokens of a row save in memory, and cost in time (``parallel.context``).

    python -m benchmarks.context memory [--lengths 8192 16384 32768] [--workers 1 2 4] [--precision bf16]
                                       [--output FILE]
    python -m benchmarks.context speed [--length 8192] [--turns 3] [--precision bf16] [--output FILE]

The model has the shape of pythia-70m with grouped queries, random weights; every row is one document that fills its
pack. ``memory``: the kernel's high-water mark of the worst worker while it trained, less that of a model that weighs
nothing, against the plan's largest instant, and bytes for a token from the shortest to the longest document. ``speed``:
seconds of a step of one worker with two threads and of two workers with one thread each, in turns, so that what else
goes on in the machine is shared; the ratio is of medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan_truth import given_back, measure_nothing, measured
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

SHAPE: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 6,
    "vocab_size": 50304,
}
MEMORY: dict[str, Any] = {
    "micro_batch": 1,
    "zero": 3,
    "recompute": "full",
    "moments": "fp32",
    "optimizer_tier": "device",
    "gradient_tier": "device",
    "parameter_tier": "device",
}


def write_inputs(folder: Path, length: int, documents: int) -> None:
    """The model, and documents of so many tokens."""
    shape = SHAPE | {"max_position_embeddings": length, "architectures": ["LlamaForCausalLM"]}
    LlamaConfig(**shape).save_pretrained(folder / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    fast.save_pretrained(folder / "model")
    at_random = random.Random(1)
    rows = ({"text": "".join(at_random.choices("abcdefgh", k=length - 1))} for _ in range(documents))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained(
    folder: Path, length: int, workers: int, *, threads: int, steps: int, precision: str, nothing: int = 0
) -> dict[str, Any]:
    """Plan and train documents of a length on so many workers, which divide each."""
    config: dict[str, Any] = {
        "model": str(folder / "model"),
        "init": "random",
        "precision": precision,
        "data": {"train": str(folder / "rows.jsonl"), "max_length": length, "cache": str(folder / "cache")},
        "batch": {"sequences": 1},
        "steps": steps,
        "memory": MEMORY,
        "launch": {"workers": workers, "threads": threads},
        "parallel": {"context": workers},
        "checkpoint": {"every": 0},
        "track": [],
        "output": str(folder / f"run-{length}-{workers}-{time.monotonic_ns()}"),
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    decision = decide(str(folder / "config.yaml"), [])
    assert decision.plan.data.num_packs >= steps
    plan = given_back(decision)
    run = RunDirectory(config["output"])
    write_run(run, replace(decision, plan=plan))
    run_workers(run, plan.workers, plan.threads_per_worker)
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    known = measured([*records, *records], nothing)
    planned = plan.choice.peak_bytes - nothing
    return {
        "length": length,
        "workers": workers,
        "threads": plan.threads_per_worker,
        "planned_bytes": round(planned),
        "measured_bytes": known["measured_bytes"],
        "error": planned / known["measured_bytes"] - 1,
        "instant": plan.choice.peak.name,
        "peaks": known["peaks"],
        "planned_seconds": plan.choice.seconds.total,
        "seconds": [record["step_seconds"] for record in records if "loss" in record],
        "losses": [record["loss"] for record in records if "loss" in record],
    }


def memory(lengths: list[int], numbers: list[int], precision: str) -> dict[str, Any]:
    """Peaks of all lengths on all numbers of workers."""
    nothing = {workers: measure_nothing(workers, 2) for workers in numbers}
    rows = []
    for length in lengths:
        with tempfile.TemporaryDirectory() as made:
            write_inputs(Path(made), length, 2)
            for workers in numbers:
                row = trained(
                    Path(made), length, workers, threads=1, steps=1, precision=precision, nothing=nothing[workers]
                )
                rows.append(row)
                told = (
                    f"{row['planned_bytes'] / 1e6:>8.0f} {row['measured_bytes'] / 1e6:>8.0f} MB {row['error']:>+7.1%}"
                )
                print(f"{length:>7} tokens on {workers}: {told}  {row['instant']}", flush=True)
    of_workers = {workers: [row for row in rows if row["workers"] == workers] for workers in numbers}
    slopes = {
        str(workers): (some[-1]["measured_bytes"] - some[0]["measured_bytes"]) / (lengths[-1] - lengths[0])
        for workers, some in of_workers.items()
        if len(lengths) > 1
    }
    return {"interpreter_bytes": nothing, "bytes_per_token": slopes, "rows": rows}


def speed(length: int, turns: int, precision: str) -> dict[str, Any]:
    """Seconds of steps of one worker and of two, in turns."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    with tempfile.TemporaryDirectory() as made:
        write_inputs(Path(made), length, 4)
        for _ in range(turns):
            for workers in seconds:
                row = trained(Path(made), length, workers, threads=2 // workers, steps=3, precision=precision)
                seconds[workers] += row["seconds"][1:]
                print(f"{workers} workers: {', '.join(f'{one:.2f}' for one in row['seconds'])} s", flush=True)
    one, two = (statistics.median(of_steps) for of_steps in seconds.values())
    return {"length": length, "seconds": seconds, "speed_of_two": one / two}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "speed"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.what == "memory":
        found = memory(options.lengths, options.workers, options.precision)
    else:
        found = speed(options.length, options.turns, options.precision)
    told = {"what": options.what, "precision": options.precision, "date": time.strftime("%Y-%m-%d")}
    result = {"benchmark": "context", **told, **found}
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}, indent=1))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
