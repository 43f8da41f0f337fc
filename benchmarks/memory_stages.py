"""Host memory of every ZeRO stage, measured in the running processes, beside the formulas.

    python benchmarks/memory_stages.py [--layers 24] [--json benchmarks/results/memory_stages.json]

Each rank of a bf16 run with the shape of pythia-410m reads its own resident, anonymous memory around the moments at
which a category appears or goes: parameters when they get memory, optimizer state when it is made, gathered parameters
and gradients when they are given up after the backward pass. Formulas, per rank, for P parameters over N ranks:

    master       4 P / N   (the fp32 shard; ZeRO 0: 4 P)
    moments      8 P / N   (two fp32 numbers;  ZeRO 0: 8 P)
    gradients    4 P / N   (fp32, reduced; ZeRO 0: 4 P; ZeRO 1 while it sums micro-batches: 4 P)
    gathered     2 P       (bf16, from forward to backward; ZeRO 3: only what no block holds, embedding and head)

ZeRO 0 on four ranks would take 18 P each, 29 GB in all, so it runs on two.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

CATEGORIES = ("master", "moments", "gathered", "gradients")
TOKENS = 8
SETTINGS = ((0, 1), (1, 1), (1, 2), (2, 1), (3, 1))
"""ZeRO stage, micro-batches."""


def measure(folder: str) -> None:
    """One rank: every setting that its world can hold; bytes by category into ``FOLDER/RANK.json``."""
    import torch
    from torch.distributed.fsdp import FSDPModule

    from tonnage.model.anatomy import dissect
    from tonnage.model.build import allocate, build_on_meta
    from tonnage.model.files import find_model, read_model_config
    from tonnage.optim.optimizer import ShardedOptimizer
    from tonnage.parallel.parallelize import Precision, Transforms, before_micro_batch, parallelize
    from tonnage.parallel.world import device_mesh, join_world
    from tonnage.training.batch import MicroBatch
    from tonnage.training.loss import LossModel

    found = []
    with join_world() as world:
        precision = Precision.of("bf16", world.size)
        config = read_model_config(find_model(f"{folder}/model", random_weights=True))
        ids = torch.arange(TOKENS).unsqueeze(0)
        batch = MicroBatch(ids, (TOKENS,), torch.arange(TOKENS - 1), ids[0, 1:], torch.ones(TOKENS - 1))
        for zero, micro_batches in SETTINGS:
            if (zero == 0) != (world.size == 2):
                continue
            bytes_of: dict[str, int] = {}
            before = anonymous_bytes()
            model = build_on_meta(config, precision.storage)
            anatomy = dissect(model)
            root = LossModel(model, anatomy)
            mesh = device_mesh(world.device, world.size, world.size if zero == 0 else 1)
            parallelize(root, anatomy.blocks, mesh, precision, Transforms(zero=zero))
            allocate(model, world.device)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(0.01)
            bytes_of["master"] = anonymous_bytes() - before
            before = anonymous_bytes()
            optimizer = ShardedOptimizer(dict(model.named_parameters()), betas=(0.9, 0.95), eps=1e-8, decay=0.0)
            bytes_of["moments"] = anonymous_bytes() - before
            settled = anonymous_bytes()
            before_micro_batch(root, zero=zero, last=micro_batches == 1)
            loss = root(batch, float(TOKENS))
            before = anonymous_bytes()
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # the backward pass gathers again
            bytes_of["gathered"] = before - anonymous_bytes()
            loss.backward()
            del loss
            if micro_batches == 1:
                before = anonymous_bytes()
                optimizer.gradients.clear()
                bytes_of["gradients"] = before - anonymous_bytes()
            else:  # between two micro-batches: gathered parameters have stayed, and gradients wait for more
                bytes_of["gradients"] = anonymous_bytes() - settled - bytes_of["gathered"]
                before_micro_batch(root, zero=zero, last=True)
                root(batch, float(TOKENS)).backward()
                optimizer.gradients.clear()
            num_root = sum(p.numel() for p in model.parameters()) - sum(
                p.numel() for block in anatomy.blocks for p in block.parameters()
            )
            found.append({"zero": zero, "micro_batches": micro_batches, "root": num_root, "bytes": bytes_of})
            del model, root, anatomy, optimizer, module, parameter  # a module leads to all of the model
        Path(folder, f"{world.size}-{world.rank}.json").write_text(json.dumps(found))


def anonymous_bytes() -> int:
    """Resident memory of this process that is not a file's, after giving back what the heap has free."""
    import ctypes
    import gc

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel does not tell anonymous memory")


def formula(case: dict[str, Any], parameters: int, ranks: int) -> dict[str, float]:
    """Bytes by category that one rank should hold."""
    zero, summed = case["zero"], case["micro_batches"] > 1
    part = parameters if zero == 0 else parameters / ranks
    return {
        "master": 4 * part,
        "moments": 8 * part,
        "gathered": 2 * (case["root"] if zero == 3 else parameters),
        "gradients": 4 * (parameters if zero == 1 and summed else part),
    }


def main() -> None:
    """Measure, print, write down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "memory_stages.json")
    arguments = parser.parse_args()

    import torch
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, GPTNeoXConfig, PreTrainedTokenizerFast

    from tonnage.launch.local import run_workers
    from tonnage.rundir.directory import RunDirectory

    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=1024,
        intermediate_size=4096,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        architectures=["GPTNeoXForCausalLM"],
    )
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(f"{folder}/model")
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE())).save_pretrained(f"{folder}/model")
        for ranks in (2, 4):
            command = [sys.executable, __file__, "--measure", folder]
            run_workers(RunDirectory(f"{folder}/run"), ranks, 1, command=command)
            cases = [json.loads(Path(folder, f"{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
            for of_rank in zip(*cases, strict=True):
                wanted = formula(of_rank[0], parameters, ranks)
                for category in CATEGORIES:
                    measured = [case["bytes"][category] for case in of_rank]
                    furthest = max(measured, key=lambda found: abs(found - wanted[category]))
                    rows.append(
                        {
                            "zero": of_rank[0]["zero"],
                            "ranks": ranks,
                            "micro_batches": of_rank[0]["micro_batches"],
                            "category": category,
                            "formula_bytes": round(wanted[category]),
                            "measured_bytes": measured,
                            "worst_error": furthest / wanted[category] - 1,
                        }
                    )
    print(f"{parameters:,} parameters, bf16; GB per rank")
    print(
        f"{'ZeRO':>4} {'ranks':>5} {'micro-batches':>13}  {'category':<10} {'formula':>8} {'measured':>9} {'error':>7}"
    )
    for row in rows:
        worst = max(row["measured_bytes"], key=lambda found: abs(found - row["formula_bytes"]))
        print(
            f"{row['zero']:>4} {row['ranks']:>5} {row['micro_batches']:>13}  {row['category']:<10} "
            f"{row['formula_bytes'] / 1e9:>8.3f} {worst / 1e9:>9.3f} {row['worst_error']:>+7.1%}"
        )
    print(f"largest error {max(abs(row['worst_error']) for row in rows):.1%}")
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps({"parameters": parameters, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2])
    else:
        main()
