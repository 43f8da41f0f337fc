"""DeepSpeed as a contestant; runs in the peers' environment.

    python -m benchmarks.peers.deepspeed_worker SPEC.json

``SPEC`` names the model, the steps (``inputs.write_steps``), documents in a micro-batch, and DeepSpeed's own config.
The loop is the one of its documentation: ``engine(...)``, ``engine.backward``, ``engine.step``. The loss is summed over
the supervised tokens of a micro-batch and divided by those of the whole step, as its users do who want it exact.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import torch
import torch.distributed as dist
from benchmarks.peers.protocol import Seat
from transformers import AutoModelForCausalLM


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    seat, rank, ranks = Seat(), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.bfloat16, attn_implementation="sdpa")
    model.config.use_cache = False
    model.eval()  # as ours: no dropout
    optimizer_class = deepspeed.ops.adam.DeepSpeedCPUAdam
    groups = [
        {"params": [one for one in model.parameters() if one.dim() >= 2]},
        {"params": [one for one in model.parameters() if one.dim() < 2]},
    ]
    optimizer = optimizer_class(groups, weight_decay=0.0, adamw_mode=True, **spec["optimizer"])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=spec["deepspeed"])
    rates, steps = spec["rates"], json.loads(Path(spec["steps"]).read_text())
    seat.ready(deepspeed=deepspeed.__version__, torch=torch.__version__, config=spec["deepspeed"])
    step = 0
    while turn := seat.turn():
        losses, tokens = [], []
        for _ in range(turn):
            documents = steps[step]
            for group in optimizer.param_groups:
                group["lr"] = rates[step]
            losses.append(take_step(engine, documents, spec["documents"], rank, ranks))
            tokens.append(sum(len(document["ids"]) for document in documents))
            step += 1
        seat.done(losses, tokens)


def take_step(engine: Any, documents: list[dict[str, list[int]]], size: int, rank: int, ranks: int) -> float:
    """One step; its loss over all ranks. The documents are dealt to the ranks sorted by length, so that little is
    padded and all have nearly equal work."""
    ordered = sorted(documents, key=lambda document: -len(document["ids"]))
    supervised = sum(sum(document["supervised"][1:]) for document in documents)
    mine = ordered[rank::ranks]
    total = torch.zeros(())
    for start in range(0, len(mine), size):
        chosen = mine[start : start + size]
        longest = max(len(document["ids"]) for document in chosen)
        ids = torch.zeros(len(chosen), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        labels = torch.full_like(ids, -100)
        for row, document in enumerate(chosen):
            length = len(document["ids"])
            ids[row, :length] = torch.tensor(document["ids"])
            mask[row, :length] = 1
            wanted = torch.tensor(document["supervised"], dtype=torch.bool)
            labels[row, :length][wanted] = ids[row, :length][wanted]
        # An even row of full documents needs no mask; without one attention is causal in one kernel.
        even = {} if bool(mask.all()) else {"attention_mask": mask}
        # Gradients are averaged over ranks and micro-batches, so each loss is multiplied by their number.
        loss = engine(input_ids=ids, labels=labels, num_items_in_batch=supervised, **even).loss
        engine.backward(loss * ranks * engine.gradient_accumulation_steps())
        engine.step()
        total += loss.detach().float()
    if ranks > 1:
        dist.all_reduce(total)
    return float(total)


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)
