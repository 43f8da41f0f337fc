"""Is a trained model better after tuning, and as good as TRL makes it? All weights and LoRA, several seeds.

    python -m benchmarks.trained MODEL [--peer PYTHON] [--seeds 0 1 2] [--steps 30] [--output FILE]

``MODEL`` is a directory with a trained chat model of any size that this machine trains. It learns the small tasks of
``tonnage demo`` (reverse a word, sort numbers, what day comes next), asked and answered in its own chat template, from
rows that both sides are given as tokens: the same ones, as many of them a step, in an order of each seed. Before and
after, it is asked 25 questions of each of eight families of tasks whose words are in no row.

``PYTHON`` is that of an environment with TRL (``benchmarks/peers/environment.py`` makes one); without it only ours are
trained. TRL has fp32 weights and bf16 products, tonnage bf16 weights with fp32 masters; both are written in bf16 and
evaluated by ``tonnage eval``. Of both sides the means over the seeds are compared, with the standard error of their
difference. Prints a table; JSON goes to ``--output``.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import machine, write_result

DOCUMENTS = 32
"""Of a step."""
EACH = 25
"""Questions of a family."""
WAYS: dict[str, dict[str, Any]] = {
    "all weights": {"lr": 1e-4},
    "LoRA": {"lr": 1e-3, "adapter": {"rank": 16, "alpha": 32.0}},
}
LONGEST = 256


def write_rows(folder: Path, model: str, number: int) -> tuple[Path, Path]:
    """Rows of tokens to learn from, and questions; the same ones whoever asks."""
    from transformers import AutoTokenizer

    from tonnage.demo.tasks import held_out_examples, training_examples

    tokenizer = AutoTokenizer.from_pretrained(model)
    rows, asked = folder / "rows.jsonl", folder / "asked.jsonl"
    with rows.open("w") as file:
        for one in random.Random(0).sample(list(training_examples(0)), number):
            said = [{"role": "user", "content": one.instruction}]
            before: Any = tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False)
            whole = before + tokenizer(one.answer, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            mask = [0] * len(before) + [1] * (len(whole) - len(before))
            file.write(json.dumps({"input_ids": whole, "loss_mask": mask}) + "\n")
    with asked.open("w") as file:
        for one in held_out_examples(EACH, 0):
            file.write(json.dumps({"instruction": one.instruction, "output": one.answer}) + "\n")
    return rows, asked


def ours(model: str, rows: Path, folder: Path, seed: int, steps: int, way: dict[str, Any]) -> Path:
    """Tune with tonnage; the model that comes of it."""
    import tonnage

    run = tonnage.train(
        model,
        {"train": str(rows), "pack": False, "max_length": LONGEST},
        output=str(folder / "run"),
        steps=steps,
        seed=seed,
        precision="bf16",
        batch={"sequences": DOCUMENTS},
        optimizer={"lr": way["lr"], "weight_decay": 0.0, "warmup": 0.1, "warmup_from": "zero"},
        checkpoint={"every": 0},
        **({"adapter": way["adapter"]} if "adapter" in way else {}),
    )
    if "adapter" not in way:
        return run.export
    merged = folder / "merged"
    subprocess.run([sys.executable, "-m", "tonnage", "export", str(run.path), str(merged), "--merge"], check=True)
    return merged


def theirs(
    peer: str, model: str, rows: Path, folder: Path, seed: int, steps: int, way: dict[str, Any]
) -> tuple[Path, dict[str, str]]:
    """Tune with TRL; the model that comes of it, and versions."""
    folder.mkdir(parents=True)
    out = folder / "model"
    spec = {"model": model, "rows": str(rows), "out": str(out), "seed": seed, "steps": steps, "documents": DOCUMENTS}
    (folder / "spec.json").write_text(json.dumps({**spec, **way}))
    root = str(Path(__file__).resolve().parents[1])
    command = [peer, "-m", "benchmarks.peers.trained_worker", str(folder / "spec.json")]
    subprocess.run(command, check=True, cwd=root, stdout=subprocess.DEVNULL)
    return out, json.loads((folder / "versions.json").read_text())


def evaluated(model: Path | str, asked: Path) -> dict[str, Any]:
    """Loss, and the part of the answers that are right with its 95% interval."""
    options = ["--exact-match", "1000", "--max-new-tokens", "24", "--precision", "bf16", "--json"]
    command = [sys.executable, "-m", "tonnage", "eval", str(model), "--data", str(asked), *options]
    said = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return {
        "loss": said["loss"],
        "exact_match": said["exact_match"],
        "interval": said["evaluation"]["scores"]["exact_match"],
    }


def apart(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Means over the seeds, their difference, and its standard error."""
    error = (statistics.variance(ours) / len(ours) + statistics.variance(theirs) / len(theirs)) ** 0.5
    means = statistics.mean(ours), statistics.mean(theirs)
    told = {"tonnage": means[0], "TRL": means[1], "difference": means[0] - means[1], "standard_error": error}
    return told | {"standard_errors_apart": abs(told["difference"]) / error if error else 0.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="the Python of an environment with TRL")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        rows, questions = write_rows(folder, asked.model, asked.steps * DOCUMENTS)
        result: dict[str, Any] = {
            "benchmark": "trained",
            "machine": machine(),
            "model": Path(asked.model).name,
            "steps": asked.steps,
            "documents_a_step": DOCUMENTS,
            "tokens": sum(len(json.loads(line)["input_ids"]) for line in rows.read_text().splitlines()),
            "seeds": asked.seeds,
            "before": evaluated(asked.model, questions),
            "after": {},
        }
        print(f"before: {told(result['before'])}", flush=True)
        for name, way in WAYS.items():
            found: dict[str, list[dict[str, Any]]] = {"tonnage": [], **({"TRL": []} if asked.peer else {})}
            for seed in asked.seeds:
                for side in found:
                    place, began = folder / f"{side}-{name}-{seed}".replace(" ", "-"), time.perf_counter()
                    if side == "tonnage":
                        model = ours(asked.model, rows, place, seed, asked.steps, way)
                    else:
                        model, versions = theirs(asked.peer, asked.model, rows, place, seed, asked.steps, way)
                    one = {**evaluated(model, questions), "seconds": round(time.perf_counter() - began)}
                    found[side].append(one)
                    print(f"{name}, seed {seed}, {side}: {told(one)}, {one['seconds']} s", flush=True)
                    shutil.rmtree(place)
            after: dict[str, Any] = {**found}
            if asked.peer and len(asked.seeds) > 1:
                for figure in ("loss", "exact_match"):
                    pair = [[one[figure] for one in found[side]] for side in ("tonnage", "TRL")]
                    after[f"{figure}, compared"] = compared = apart(pair[0], pair[1])
                    print(f"{name}, {figure}: {json.dumps(compared)}", flush=True)
            result["after"][name] = after
    write_result(asked.output, {**result, "peer": versions})


def told(one: dict[str, Any]) -> str:
    """Figures in words."""
    low, high = one["interval"][1:]
    return f"loss {one['loss']:.4f}, right {one['exact_match']:.1%} ({low:.1%} to {high:.1%})"


if __name__ == "__main__":
    main()
