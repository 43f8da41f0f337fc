"""Export of a model saved by several ranks: peak memory of the exporting process, its speed, and whether every bit is
there.

    python benchmarks/export.py [--size 1b] [--ranks 4] [--shard-size 500MB] [--directory DIR]
                                [--output benchmarks/results/export.json]

The checkpoint has fp32 masters of random values, in the files that ``--ranks`` ranks write. It is exported to bf16 by a
process of its own, whose high-water mark is the kernel's; the limit is two output files and 300 MB. The exported
weights, as plain transformers loads them, are then compared with the masters. Speed is compared with a plain copy on
the same disk: every byte that an export reads (masters, then its own output to verify it) and writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedTokenizerFast

SHAPES: dict[str, dict[str, Any]] = {
    "160m": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12},
    "410m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 8},
}

EXPORT = """
import json, sys, time
from pathlib import Path
import torch
from transformers import AutoConfig
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start, export
from tonnage.training.memory import take_peak
folder, shard_bytes = Path(sys.argv[1]), int(sys.argv[2])
began = time.perf_counter()
form = ExportForm(AutoConfig.from_pretrained(folder / "model"), folder / "model", [0], torch.bfloat16)
export(folder / "step-00000001", folder / "out", form, Start(folder / "model"), shard_bytes=shard_bytes)
print(json.dumps([time.perf_counter() - began, take_peak().host]))
"""


def masters(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The same values for a name every time."""
    generator = torch.Generator().manual_seed(sum(name.encode()) * 7919 + len(name))
    return torch.randn(shape, generator=generator) * 0.02


def write_checkpoint(folder: Path, shapes: dict[str, tuple[int, ...]], ranks: int) -> int:
    """A file of each rank, with its rows of every tensor; all bytes."""
    from tonnage.checkpoint.save import checkpoint_path, shard_name
    from tonnage.checkpoint.shards import TensorPart, write_file

    checkpoint = checkpoint_path(folder, 1)
    checkpoint.mkdir(parents=True)
    for rank in range(ranks):
        parts = []
        for name, shape in shapes.items():
            rows = -(-shape[0] // ranks)
            mine = masters(name, shape)[rows * rank : rows * (rank + 1)].clone()
            if len(mine):
                parts.append(TensorPart(f"model.{name}", (rows * rank, *[0] * (len(shape) - 1)), mine))
        write_file(checkpoint / shard_name(rank), parts)
    return sum(file.stat().st_size for file in checkpoint.iterdir())


def forget(folder: Path) -> None:
    """Have the files of a folder on disk and out of the page cache."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def copy_seconds(folder: Path) -> float:
    """Read the checkpoint once, write half as much, and read that again: what an export to bf16 moves."""
    forget(folder)
    began = time.perf_counter()
    chunk = memoryview(bytearray(16 << 20))
    with (folder / "copied").open("wb", buffering=0) as out:
        for file in (folder / "step-00000001").iterdir():
            with file.open("rb", buffering=0) as source:
                while count := source.readinto(chunk):
                    out.write(chunk[: count // 2])
        os.fsync(out.fileno())
    with (folder / "copied").open("rb", buffering=0) as source:
        while source.readinto(chunk):
            pass
    (folder / "copied").unlink()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--shard-size", default="500MB")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    from tokenizers import Tokenizer, models

    from tonnage.checkpoint.export import parse_size

    limit = parse_size(options.shard_size)
    config = GPTNeoXConfig(vocab_size=50304, architectures=["GPTNeoXForCausalLM"], **SHAPES[options.size])
    with torch.device("meta"):
        twin = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in twin.named_parameters()}
    with tempfile.TemporaryDirectory(dir=options.directory) as made:
        folder = Path(made)
        config.save_pretrained(folder / "model")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(folder / "model")
        checkpoint_bytes = write_checkpoint(folder, shapes, options.ranks)
        plain = copy_seconds(folder)
        forget(folder)
        command = [sys.executable, "-c", EXPORT, made, str(limit)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        seconds, peak = json.loads(output.splitlines()[-1])
        files = [file.stat().st_size for file in (folder / "out").glob("*.safetensors")]
        shutil.rmtree(folder / "step-00000001")
        exported = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.bfloat16).state_dict()
        different = [
            name for name, shape in shapes.items() if not torch.equal(exported[name], high(masters(name, shape)))
        ]
    result = {
        "benchmark": "export",
        "model": f"pythia-{options.size}, {sum(p.numel() for p in twin.parameters()):,} parameters",
        "ranks": options.ranks,
        "checkpoint_bytes": checkpoint_bytes,
        "output_files": len(files),
        "output_bytes": sum(files),
        "peak_bytes": peak,
        "limit_bytes": 2 * limit + 300_000_000,
        "export_seconds": round(seconds, 2),
        "plain_copy_seconds": round(plain, 2),
        "output_bytes_per_second": round(sum(files) / seconds),
        "tensors_that_differ": different,
    }
    print(json.dumps(result, indent=2))
    if options.output:
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def high(master: torch.Tensor) -> torch.Tensor:
    """The bf16 weight that a master was trained with: rounded to nearest, as sharded masters are gathered."""
    return master.bfloat16()


if __name__ == "__main__":
    main()
