"""Is the plan right? Planned bytes and seconds against those of real runs, over a random grid.

    python benchmarks/plan_truth.py [--runs 60] [--seed 0] [--steps 3] [--output benchmarks/results/plan_truth.json]
                                    [--measured FILE] [--adapters] [--families]

Two families, sizes, sequence lengths, micro-batches, ZeRO stages, numbers of workers, recompute, moments and tiers are
drawn by ``--seed``. Each is decided and trained as ``tonnage train`` does, on random weights and synthetic
conversations. Bytes: the kernel's high-water mark of the worst worker while it trained, less that of a run in the same
way of a model that weighs nothing (the interpreter and its libraries at work), against the plan's largest instant.
Seconds: the median of all steps after the first. ``tonnage doctor`` should have measured the machine, or rates are
assumed. With ``--adapters`` each trains an adapter, which is drawn too, over weights in bf16 files, and loading them
counts among the instants. With ``--families`` the models are a mixture of experts, and two hybrids whose documents are
padded: a gated delta rule, and short convolutions, each beside attention. ``--measured`` names the output of an earlier
run of the same seed: what it measured is taken from it, and only planned anew; rows of it that are null, or that it
lacks, are measured.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from tonnage.data import PackedDataset
from tonnage.decide.decision import Decision, decide
from tonnage.decide.rows import rows_of
from tonnage.decide.written import write_run
from tonnage.doctor.cache import describe_here, load_machine
from tonnage.launch.local import run_workers
from tonnage.planning.plan import Plan
from tonnage.planning.scales import Scales
from tonnage.planning.search import Search, candidates
from tonnage.rundir.directory import RunDirectory

SIZES = {"nothing": (16, 2, 1), "small": (512, 8, 6), "medium": (768, 12, 12), "large": (1024, 16, 16)}
"""Hidden size, heads, blocks: pythia-70m, pythia-160m and two thirds of pythia-410m."""
PHASES = ("load", "first forward", "forward", "backward", "update")
"""Of a run, whose peaks are planned; random weights are not loaded."""
VOCABULARIES = (8192, 32000, 50304)
DENSE, OTHERS = ("gpt_neox", "llama"), ("qwen3_moe", "qwen3_5", "lfm2")


def draw(
    seed: int, number: int, *, adapters: bool = False, families: Sequence[str] = DENSE
) -> Iterator[dict[str, Any]]:
    """Random settings; with ``adapters``, all train one."""
    at_random, of_adapters = random.Random(seed), random.Random(f"adapters {seed}")
    while number:
        workers = at_random.choice([1, 1, 2])
        setting: dict[str, Any] = {
            "family": at_random.choice(families),
            "size": at_random.choice(list(SIZES)[1:]),
            "vocabulary": at_random.choice(VOCABULARIES),
            "max_length": at_random.choice([256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096]),
            "workers": workers,
            "micro_batches": at_random.choice([1, 2]),
            "memory": {
                "micro_batch": at_random.choice([1, 2, 4]),
                "zero": at_random.choice([0, 1, 2, 3]) if workers > 1 else 3,
                "recompute": at_random.choice(["none", "selective", "full"]),
                "moments": at_random.choice(["fp32", "bf16", "int8"]),
                "optimizer_tier": at_random.choice(["device", "device", "disk"]),
                "gradient_tier": at_random.choice(["device", "device", "disk"]),
                "parameter_tier": at_random.choice(["device", "device", "disk"]),
            },
        }
        memory = setting["memory"]
        if memory["parameter_tier"] == "disk" and memory["zero"] != 3:
            continue
        if setting["max_length"] * memory["micro_batch"] * workers * setting["micro_batches"] > 4096:
            continue
        number -= 1
        if adapters:
            setting["adapter"] = {
                "rank": of_adapters.choice([4, 16, 32, 64]),
                "quantize": of_adapters.choice(["none", "nf4", "nf4-double", "int8"]),
                "also": of_adapters.choice([[], [], ["norms"], ["embeddings"]]),
                "dropout": of_adapters.choice([0, 0, 0.1]),
            }
        yield setting


def write_inputs(folder: Path, setting: dict[str, Any], steps: int) -> Path:
    """Model, rows and config of a setting."""
    hidden, heads, blocks = SIZES[setting["size"]]
    shape: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": blocks}
    shape |= {"vocab_size": setting["vocabulary"], "max_position_embeddings": 4096}
    config: PreTrainedConfig
    if setting["family"] == "llama":
        config = LlamaConfig(
            **shape,
            num_key_value_heads=heads // 2,
            intermediate_size=8 * hidden // 3,
            architectures=["LlamaForCausalLM"],
        )
    elif setting["family"] == "gpt_neox":
        config = GPTNeoXConfig(**shape, intermediate_size=4 * hidden, architectures=["GPTNeoXForCausalLM"])
    elif setting["family"] == "qwen3_moe":
        experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
        config = Qwen3MoeConfig(
            **shape, **experts, num_key_value_heads=heads // 2, architectures=["Qwen3MoeForCausalLM"]
        )
    elif setting["family"] == "qwen3_5":
        sizes: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "head_dim": 64}
        sizes |= {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "num_key_value_heads": heads // 2}
        config = Qwen3_5TextConfig(
            **shape | {"num_hidden_layers": 2 * blocks},
            **sizes,
            intermediate_size=8 * hidden // 3,
            architectures=["Qwen3_5ForCausalLM"],
        )
    else:
        config = Lfm2Config(
            **shape | {"num_hidden_layers": 2 * blocks},
            num_key_value_heads=heads // 2,
            intermediate_size=8 * hidden // 3,
            layer_types=["conv", "full_attention"] * blocks,
            architectures=["Lfm2ForCausalLM"],
        )
    config.save_pretrained(folder / "model")
    if "adapter" in setting:  # what is frozen is read
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    fast.save_pretrained(folder / "model")
    parallel = setting.get("parallel", {})
    length, together = setting["max_length"], parallel.get("tensor", 1) * parallel.get("pipeline", 1)
    packs = setting["workers"] // together * setting["memory"].get("micro_batch", 1) * setting["micro_batches"]
    packs = setting.get("packs", packs)
    at_random, written = random.Random(1), 0
    with (folder / "rows.jsonl").open("w") as out:
        while written < (packs * steps + 4) * length:
            asked, told = (at_random.randint(10, length // 4) for _ in range(2))
            row = {"prompt": "x" * asked, "completion": "".join(at_random.choices("abcdefgh", k=told))}
            out.write(json.dumps(row) + "\n")
            written += asked + told
    run = {
        "model": str(folder / "model"),
        **({"adapter": setting["adapter"]} if "adapter" in setting else {"init": "random"}),
        "data": {"train": str(folder / "rows.jsonl"), "max_length": length, "cache": str(folder / "cache")},
        "batch": {"sequences": packs},
        "steps": steps,
        "memory": setting["memory"],
        "launch": {"workers": setting["workers"]},
        "parallel": parallel,
        "track": [],
        "output": str(folder / "run"),
    }
    (folder / "config.yaml").write_text(json.dumps(run))
    return folder / "config.yaml"


def measure_nothing(workers: int, steps: int) -> int:
    """Bytes that a worker takes to train a model that weighs nothing."""
    memory = {"micro_batch": 1, "zero": 3, "recompute": "none", "moments": "fp32"}
    memory |= {"optimizer_tier": "device", "gradient_tier": "device", "parameter_tier": "device"}
    setting = {"family": "llama", "size": "nothing", "vocabulary": 512, "max_length": 64, "workers": workers}
    return int(measure(setting | {"micro_batches": 1, "memory": memory}, steps, 0)["measured_bytes"])


def given_back(decision: Decision) -> Plan:
    """The plan, with a heap that keeps nothing, since what one keeps differs from run to run."""
    plan, config = decision.plan, decision.config
    machine = load_machine(config.output) or describe_here(config.output)
    layout = replace(plan.layout, returns_memory=True)
    rows = rows_of(PackedDataset.open(Path(plan.data.train_path)), [], config.seed)
    scales = Scales(plan.model, plan.data, machine, rows=rows, tiled=lambda *_: plan.model)  # weighed as planned
    ways = candidates(Search(config, scales))
    return replace(plan, choice=next(way for way in ways if way.layout == layout))


def measure(setting: dict[str, Any], steps: int, nothing: int, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """Plan and train a setting, unless its row is ``known``; ``nothing`` is what a model that weighs nothing takes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        decision = decide(str(write_inputs(folder, setting, steps)), [])
        plan = given_back(decision)
        if known is None:
            run = RunDirectory(folder / "run")
            write_run(run, replace(decision, plan=plan))
            run_workers(run, plan.workers, plan.threads_per_worker)
            known = measured([json.loads(line) for line in run.metrics.read_text().splitlines()], nothing)
    return {
        **setting,
        "planned_bytes": round(plan.choice.peak_bytes - nothing),
        "measured_bytes": known["measured_bytes"],
        "error": (plan.choice.peak_bytes - nothing) / known["measured_bytes"] - 1,
        "instant": plan.choice.peak.name,
        "instants": {one.name: round(one.total) for one in plan.choice.instants},
        "bytes": {name: round(size) for name, size in plan.choice.peak.bytes.items()},
        "peaks": known["peaks"],
        "planned_seconds": plan.choice.seconds.total,
        "seconds": known["seconds"],
    }


def measured(records: list[dict[str, Any]], nothing: int) -> dict[str, Any]:
    """Peaks of the phases of a run, and the largest of those that train, less ``nothing``; seconds of a step."""
    taken = {
        phase["phase"]: phase["host"]
        for record in records
        if "memory_phases" in record
        for phase in record["memory_phases"]
    }
    peaks = {phase: max(host) - nothing for phase, host in taken.items()}
    seconds = [record["step_seconds"] for record in records if "loss" in record][1:]
    trained = {name: size for name, size in peaks.items() if name in PHASES}
    return {"measured_bytes": max(trained.values()), "peaks": peaks, "seconds": statistics.median(seconds)}


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Errors over the grid."""
    absolute = sorted(abs(row["error"]) for row in rows)
    times = [abs(row["planned_seconds"] / row["seconds"] - 1) for row in rows]
    return {
        "runs": len(rows),
        "median_absolute_error": statistics.median(absolute),
        "p95_absolute_error": absolute[min(len(absolute) - 1, int(0.95 * len(absolute)))],
        "lowest_error": min(row["error"] for row in rows),
        "highest_error": max(row["error"] for row in rows),
        "mean_absolute_error_of_seconds": statistics.mean(times),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measured", type=Path)
    parser.add_argument("--adapters", action="store_true")
    parser.add_argument("--families", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    began = time.perf_counter()
    earlier = json.loads(options.measured.read_text()) if options.measured else {"rows": []}
    if earlier["rows"] and (earlier["seed"], earlier["steps"]) != (options.seed, options.steps):
        sys.exit(f"{options.measured} has seed {earlier['seed']} and {earlier['steps']} steps")
    if earlier["rows"]:
        nothing = {int(workers): size for workers, size in earlier["interpreter_bytes"].items()}
    else:
        nothing = {workers: measure_nothing(workers, options.steps) for workers in (1, 2)}
    print(f"a model that weighs nothing: {', '.join(f'{n / 1e6:.0f} MB on {w} worker(s)' for w, n in nothing.items())}")
    families = OTHERS if options.families else DENSE
    drawn = draw(options.seed, options.runs, adapters=options.adapters, families=families)
    for setting, known in zip_longest(drawn, earlier["rows"][: options.runs]):
        row = measure(setting, options.steps, nothing[setting["workers"]], known)
        rows.append(row)
        told = [setting[key] for key in ("family", "size", "vocabulary", "max_length", "workers", "micro_batches")]
        told += [*setting["memory"].values(), *setting.get("adapter", {}).values()]
        print(
            f"{row['planned_bytes'] / 1e6:>8.0f} {row['measured_bytes'] / 1e6:>8.0f} MB {row['error']:>+7.1%}  "
            f"{row['planned_seconds']:>7.2f} {row['seconds']:>7.2f} s  {row['instant']:<28} "
            f"{' '.join(map(str, told))}",
            flush=True,
        )
        result = {
            "benchmark": "plan_truth",
            "seed": options.seed,
            "steps": options.steps,
            "date": time.strftime("%Y-%m-%d"),
            **summary(rows),
            "interpreter_bytes": nothing,
            "rows": rows,
        }
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(summary(rows), indent=1), f"{time.perf_counter() - began:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
