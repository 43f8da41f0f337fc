"""A worker that loads a model and writes down by how much its memory rose: ``loading.py HOW MODEL OUT``.

HOW is ``plain`` (``from_pretrained``, every rank for itself) or the precision of our own loading: ``bf16`` as for
inference (2 bytes a parameter), ``master`` as for training on several ranks (its fp32 master).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

from tonnage.kernels.regions import local_part
from tonnage.model.files import find_model, read_model_config
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.world import join_world
from tonnage.training.building import Blueprint, assemble_model

STORAGE = {"bf16": torch.bfloat16, "master": torch.float32}


def status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(field)


def main(how: str, path: str, out: str) -> None:
    with join_world() as world:
        world.sum(1.0)
        before = status("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        if how == "plain":
            from transformers import AutoModelForCausalLM

            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        else:
            files = find_model(path)
            precision = Precision(torch.bfloat16, STORAGE[how])
            model = assemble_model(Blueprint(files, read_model_config(files), world, precision)).model
        total = sum(local_part(parameter.data).sum(dtype=torch.float32).item() for parameter in model.parameters())
        risen = status("VmHWM") - before
        Path(f"{out}.{world.rank}").write_text(json.dumps({"risen": risen, "sum": total}))
        world.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])
