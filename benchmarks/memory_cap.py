"""A whole run of ``tonnage train`` inside a memory cgroup: it completes, or the kernel kills it.

    python benchmarks/memory_cap.py --size 1b --gib 3 [--steps 3] [--tokens 2048] [--stored] [--set KEY=VALUE ...]
                                    [--directory DIR] [--output FILE]

A pythia (or dolly) shape with random weights is trained in bf16 on synthetic conversations, everything on disk unless
``--set`` says otherwise: weights, gradients, optimizer state; recompute is full. Everything counts: the launcher, the
worker, its libraries, the final checkpoint and the export. The page cache counts as well, and is given back by the
kernel when the cap is reached. Needs the right to make a cgroup (root; version 1 or 2). ``--stored`` writes random
weights to files first, outside of the cap, and trains on those, as an adapter's frozen base is streamed from its own
files; with ``--gib 0`` there is no cap, for losses to compare with.

Prints seconds per step beside a floor: the products of the step, recomputed ones included, over the measured rate of
one large product; and the seconds of each step in which training waited for the disk.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPTNeoXConfig, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast

from tonnage.model.build import on_meta

SHAPES: dict[str, dict[str, Any]] = {
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 8},
    "2.8b": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32},
    "llama-7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
}
FILE_BYTES = 2 << 30
CGROUPS = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def capped(num_bytes: int) -> Iterator[Path]:
    """A cgroup whose processes may hold ``num_bytes`` together, without swap."""
    old = (CGROUPS / "memory" / "memory.limit_in_bytes").exists()
    group = (CGROUPS / "memory" if old else CGROUPS) / f"cap-{os.getpid()}"
    group.mkdir()
    try:
        (group / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(num_bytes))
        yield group
    finally:
        time.sleep(0.5)
        with contextlib.suppress(OSError):
            group.rmdir()


def counted(group: Path) -> dict[str, int]:
    """What the kernel says of a group at its end."""
    found = {}
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (group / name).exists():
            found["peak_with_page_cache"] = int((group / name).read_text())
    for name in ("memory.oom_control", "memory.events"):
        if (group / name).exists():
            lines = dict(line.split() for line in (group / name).read_text().splitlines())
            found["killed_by_the_kernel"] = int(lines.get("oom_kill", 0))
    return found


def write_inputs(folder: Path, size: str, rows: int, *, stored: bool) -> None:
    shape: dict[str, Any] = {"max_position_embeddings": 2048, **SHAPES[size]}
    config: PreTrainedConfig = GPTNeoXConfig(vocab_size=50304, architectures=["GPTNeoXForCausalLM"], **shape)
    if size.startswith("llama"):
        config = LlamaConfig(vocab_size=32000, architectures=["LlamaForCausalLM"], **shape)
    config.save_pretrained(folder / "model")
    if stored:
        write_weights(folder / "model", config)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: n for n, letter in enumerate(["<|endoftext|>", *letters])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    fast.save_pretrained(folder / "model")
    draw = random.Random(0)
    words = ["weigh", "lift", "carry", "rest", "ton", "crane", "rope", "hook", "mast", "keel"]
    with (folder / "rows.jsonl").open("w") as out:
        for _ in range(rows):
            asked, told = (" ".join(draw.choices(words, k=k)) for k in (20, 40))
            out.write(json.dumps({"instruction": asked, "output": told}) + "\n")


def write_weights(directory: Path, config: PreTrainedConfig) -> None:
    """Random bf16 weights in several files; a block's worth is in memory at a time, and a file."""
    torch.manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    index: dict[str, str] = {}
    number = 0

    def flush() -> None:
        nonlocal number, tensors
        number += 1
        name = f"model-{number:05d}.safetensors"
        save_file(tensors, directory / name, {"format": "pt"})
        index.update(dict.fromkeys(tensors, name))
        tensors = {}

    for name, parameter in on_meta(config, torch.bfloat16).named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        value = torch.empty(parameter.shape, dtype=torch.bfloat16)
        tensors[name] = value.fill_(1.0) if is_norm else value.normal_(std=0.02)
        if sum(one.nbytes for one in tensors.values()) > FILE_BYTES:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def matmul_rate() -> float:
    """FLOP/s of a product of the shape of a block's, as this processor computes it best."""
    from tonnage.kernels.products import product

    left, right = torch.randn(2048, 2048).bfloat16(), torch.randn(2048, 8192).bfloat16()
    product(left, right)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        product(left, right)
        times.append(time.perf_counter() - began)
    return 2 * 2048 * 2048 * 8192 / statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--gib", type=float, required=True)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(dir=options.directory) as made,
        capped(int((options.gib or 1024) * 2**30)) as group,
    ):
        folder = Path(made)
        rows = 40 + options.steps * options.tokens // 200
        write_inputs(folder, options.size, rows, stored=options.stored)
        length = min(2048, options.tokens)
        config = {
            "model": str(folder / "model"),
            "init": "pretrained" if options.stored else "random",
            "data": {"train": str(folder / "rows.jsonl"), "max_length": length, "cache": str(folder / "cache")},
            "batch": {"tokens": options.tokens},
            "steps": options.steps,
            "memory": {
                "optimizer_tier": "disk",
                "gradient_tier": "disk",
                "parameter_tier": "disk",
                "recompute": "full",
                "moments": "fp32",
                "micro_batch": 1,
            },
            "track": [],
            "output": str(folder / "run"),
        }
        (folder / "config.yaml").write_text(json.dumps(config))
        command = [str(Path(sys.executable).with_name("tonnage")), "train", str(folder / "config.yaml"), *options.set]

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        began = time.perf_counter()
        status = subprocess.run(command, preexec_fn=enter, check=False).returncode
        seconds = time.perf_counter() - began
        records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        steps = [record for record in records if "loss" in record]
        plan = json.loads((folder / "run" / "plan.json").read_text())
        found = counted(group)
    result = {
        "benchmark": "memory_cap",
        "model": f"{options.size}, {plan['model']['num_parameters']:,} parameters",
        "cap_bytes": int(options.gib * 2**30),
        "settings": options.set,
        "status": status,
        **found,
        "steps": len(steps),
        "losses": [step["loss"] for step in steps],
        "worker_peak_bytes": max((step["memory"]["host_peak"] for step in steps), default=None),
        "step_seconds": [round(step["step_seconds"], 2) for step in steps],
        "waited_seconds": [round(step["disk"]["waited_seconds"], 2) for step in steps if "disk" in step],
        "read_bytes": [step["disk"].get("read_bytes") for step in steps if "disk" in step],
        "written_bytes": [step["disk"].get("written_bytes") for step in steps if "disk" in step],
        # full recompute runs the forward pass of the blocks twice
        "compute_floor_seconds": round(plan["flops_per_step"] * 4 / 3 / matmul_rate(), 2),
        "whole_run_seconds": round(seconds, 1),
    }
    print(json.dumps(result, indent=2))
    if options.output:
        earlier = json.loads(options.output.read_text()) if options.output.exists() else []
        options.output.write_text(json.dumps([*earlier, result], indent=2) + "\n")
    sys.exit(status)


if __name__ == "__main__":
    main()
