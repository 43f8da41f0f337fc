"""Bytes and seconds of runs on rows with images, planned and measured: families, ways to see, and what is trained.

    python -m benchmarks.images_memory [--steps 3] [--only 2,5] [--output benchmarks/results/images_memory.json]

Models of a hundred million parameters or so, of text and vision tower about half each, on random weights; rows are
of images that are drawn. Each run is decided and trained as ``tonnage train`` does, and measured as in
``plan_truth.py``: the kernel's high-water mark of the worst worker while it trained, less that of a model that weighs
nothing on as many workers, against the plan's largest instant. Of features that are cached the pass before training is
measured too, against what the plan says of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import plan_truth

from tonnage.decide.decision import decide
from tonnage.decide.written import write_run
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]
import visions  # noqa: E402

TEXT: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
}
TEXT |= {"num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096, "initializer_range": 0.02}
VISION = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8}
SIDE = 336
LORA = {"rank": 16, "targets": ["all-linear", "*vision_tower*"]}
RUNS: list[tuple[str, int, dict[str, Any]]] = [
    ("llava", 1, {"data": {"image_features": "cached"}}),
    ("llava", 1, {"data": {"image_features": "computed"}}),
    ("llava", 1, {"train": ["*multi_modal_projector*"]}),
    ("llava", 1, {"train": ["*", "tower.*"], "precision": "fp32", "batch": {"sequences": 2}}),
    ("llava", 1, {"adapter": LORA}),
    ("qwen2_5_vl", 1, {"train": ["*", "tower.*"], "memory": {"recompute": "full"}}),
    ("qwen2_5_vl", 1, {"adapter": {"rank": 16, "targets": ["all-linear", "visual.blocks.*"]}, "precision": "fp32"}),
    ("mistral3", 2, {"train": ["tower.*"], "memory": {"zero": 3}}),
    ("llava", 2, {"train": ["*", "tower.*"], "memory": {"zero": 0}, "batch": {"sequences": 4}}),
    ("qwen2_5_vl", 2, {"train": ["*", "tower.*"], "memory": {"zero": 3}, "precision": "fp32"}),
]
"""Family, workers and keys."""


def larger(family: str) -> tuple[Any, Any]:
    """Config and processor of a family, of the sizes above."""
    text, vision, square = dict(visions.TEXT), dict(visions.VISION), dict(visions.SQUARE)
    try:
        visions.TEXT.update(TEXT)
        visions.VISION.update(VISION, image_size=SIDE)
        visions.SQUARE.update(height=SIDE, width=SIDE)
        config, processor = visions.FAMILIES[family]()
    finally:
        for own, before in ((visions.TEXT, text), (visions.VISION, vision), (visions.SQUARE, square)):
            own.clear()
            own.update(before)
    images, sizes = processor.image_processor, dict[str, Any]()
    match family:
        case "llava":
            sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
        case "mistral3":
            config.vision_config.image_size, config.vision_config.head_dim = SIDE, 64
            config.text_config.head_dim = 64
            sizes = {"size": {"longest_edge": SIDE}}
        case "qwen2_5_vl":
            seen = config.vision_config
            seen.hidden_size, seen.intermediate_size, seen.depth, seen.num_heads = 512, 2048, 12, 8
            seen.out_hidden_size, seen.window_size, seen.fullatt_block_indexes = TEXT["hidden_size"], 112, [3, 7, 11]
            config.text_config.rope_parameters = {
                "rope_type": "default",
                "mrope_section": [16, 8, 8],
                "rope_theta": 10000.0,
            }
            sizes = {"size": {"shortest_edge": 28 * 28, "longest_edge": SIDE * SIDE}}
    processor.image_processor = type(images).from_dict(images.to_dict() | sizes)
    return config, processor


def write_inputs(folder: Path, family: str, workers: int, keys: dict[str, Any], steps: int) -> Path:
    """Model, rows and config of a run."""
    visions.write_vision(folder / "model", family, make=lambda: larger(family))
    with (folder / "rows.jsonl").open("w") as out:
        for number in range(4 * workers * (steps + 2)):
            (folder / f"{number}.png").write_bytes(visions.draw_image(number, (420 + 7 * (number % 9), 380)))
            words = "abcdefgh " * (10 + number % 40)
            messages = [{"role": "user", "content": "<image>\nWhat?"}, {"role": "assistant", "content": words}]
            out.write(json.dumps({"messages": messages, "images": [f"{number}.png"]}) + "\n")
    memory = {"micro_batch": 1, "recompute": "none", "moments": "fp32"} | keys.get("memory", {})
    memory |= {f"{state}_tier": "device" for state in ("optimizer", "gradient", "parameter")}
    data = {"train": str(folder / "rows.jsonl"), "max_length": 2048, "cache": str(folder / "cache")}
    run = {
        "model": str(folder / "model"),
        "batch": {"sequences": workers},
        "steps": steps,
        "launch": {"workers": workers},
        "output": str(folder / "run"),
        **keys,
        "data": data | keys.get("data", {}),
        "memory": memory,
    }
    (folder / "config.yaml").write_text(json.dumps(run))
    return folder / "config.yaml"


def measure(family: str, workers: int, keys: dict[str, Any], steps: int, nothing: int) -> dict[str, Any]:
    """Plan and train a run; ``nothing`` is what a model that weighs nothing takes."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        decision = decide(str(write_inputs(folder, family, workers, keys, steps)), [])
        choice = decision.plan.choice
        plan = replace(decision.plan, choice=replace(choice, layout=replace(choice.layout, returns_memory=True)))
        run = RunDirectory(folder / "run")
        write_run(run, replace(decision, plan=plan))
        run_workers(run, plan.workers, plan.threads_per_worker)
        known = plan_truth.measured([json.loads(line) for line in run.metrics.read_text().splitlines()], nothing)
        planned = plan.choice.peak_bytes - nothing
        return {
            "family": family,
            "workers": workers,
            "keys": keys,
            "planned_bytes": round(planned),
            "measured_bytes": known["measured_bytes"],
            "error": planned / known["measured_bytes"] - 1,
            "instant": plan.choice.peak.name,
            "instants": {one.name: round(one.total) for one in plan.choice.instants},
            "bytes": {name: round(size) for name, size in plan.choice.peak.bytes.items()},
            "peaks": known["peaks"],
            "said": plan.reasons.get("images", ""),
            "planned_seconds": plan.choice.seconds.total,
            "seconds": known["seconds"],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", help="numbers of runs, from 1, with commas between")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    some = {int(number) for number in options.only.split(",")} if options.only else set(range(1, len(RUNS) + 1))
    runs = [run for number, run in enumerate(RUNS, start=1) if number in some]
    numbers = sorted({workers for _, workers, _ in runs})
    nothing = {workers: plan_truth.measure_nothing(workers, options.steps) for workers in numbers}
    rows = []
    for family, workers, keys in runs:
        row = measure(family, workers, keys, options.steps, nothing[workers])
        rows.append(row)
        print(
            f"{row['planned_bytes'] / 1e6:>8.0f} {row['measured_bytes'] / 1e6:>8.0f} MB {row['error']:>+7.1%}  "
            f"{row['planned_seconds']:>7.2f} {row['seconds']:>7.2f} s  {row['instant']:<28} "
            f"{family}, {workers} worker(s) {json.dumps(keys)}",
            flush=True,
        )
        if features := row["peaks"].get("features"):
            print(f"         {features / 1e6:>8.0f} MB before training: {row['said']}", flush=True)
    errors = [abs(row["error"]) for row in rows]
    summary = {"median_absolute_error": statistics.median(errors), "worst": max(errors)}
    print(json.dumps(summary))
    if options.output:
        result = {"benchmark": "images_memory", "date": time.strftime("%Y-%m-%d"), **summary}
        options.output.write_text(json.dumps(result | {"interpreter_bytes": nothing, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
