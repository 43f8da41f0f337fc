"""The plain loop that every layout is held against, and what runs left behind.

It uses transformers and torch only: padded batches, the model's own forward, torch's AdamW and clipping. It shares
the packs (which documents make a step) with the runs, and nothing else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM

from tonnage.checkpoint.save import checkpoint_path
from tonnage.config.schema import Optimizer
from tonnage.data import PackedDataset, pack_at
from tonnage.decide.decision import Decision
from tonnage.rundir.directory import RunDirectory


def plain_optimizers(model: Any, settings: Optimizer) -> list[torch.optim.Optimizer]:
    """AdamW whose matrices alone decay."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=settings.eps)]


def plain_loop(
    decision: Decision,
    change: Callable[[Any], Any] = lambda model: model,
    optimizers_of: Callable[[Any, Optimizer], list[torch.optim.Optimizer]] = plain_optimizers,
    along: RunDirectory | None = None,
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Loss, gradient norm and learning rate of every step, and the final weights by name, of the parameters that are
    trained after the model was given to ``change``.

    After each update the weights become those that the run ``along`` saved then, if there is one; ``apart`` is how far
    they were from these, as a share of the step that the run made: the most of any parameter.
    """
    config = decision.config
    lr_peak, clip = config.optimizer.lr, config.optimizer.clip
    steps, packs_per_step, warmup = decision.plan.num_steps, config.packs_per_step, int(config.optimizer.warmup)
    model = change(AutoModelForCausalLM.from_pretrained(decision.config.model, dtype=torch.float32))
    optimizers = optimizers_of(model, config.optimizer)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    data = decision.prepared.train
    records = []
    for step in range(steps):
        positions = range(step * packs_per_step, (step + 1) * packs_per_step)
        documents = [d for p in positions for d in split_documents(data, pack_at(p, data.num_packs, config.seed))]
        longest = max(len(ids) for ids, _ in documents)
        input_ids = torch.zeros(len(documents), longest, dtype=torch.int64)
        attention, labels = torch.zeros_like(input_ids), torch.full_like(input_ids, -100)
        for row, (ids, supervised) in enumerate(documents):
            input_ids[row, : len(ids)] = ids
            attention[row, : len(ids)] = 1
            labels[row, : len(ids)] = torch.where(supervised, ids, -100)
        logits = model(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="mean")
        model.zero_grad()
        loss.backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        if step < warmup:
            lr = lr_peak * (step + 1) / (warmup + 1)
        else:
            lr = lr_peak * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) / 2
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * (lr / lr_peak)
        for optimizer in optimizers:
            optimizer.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
        if along is not None:
            saved = final_weights(along, step + 1)
            records[-1]["apart"] = max(_go_to(p, before[name], saved[name]) for name, p in model.named_parameters())
    return records, {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@torch.no_grad()
def _go_to(weight: Tensor, before: Tensor, after: Tensor) -> float:
    """Let a weight be another one; how far it was from that, as a share of how far that is from the one before."""
    apart = float((weight - after).norm() / (after - before).norm())
    weight.copy_(after)
    return apart


def split_documents(data: PackedDataset, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pack = data.pack(index)
    lengths = pack.lengths.tolist()
    ids = torch.from_numpy(pack.input_ids.astype("int64")).split(lengths)
    supervised = torch.from_numpy(pack.weights.astype("float32") > 0).split(lengths)
    return list(zip(ids, supervised, strict=True))


def metrics(run: RunDirectory) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [record for record in records if "loss" in record]


def final_weights(run: RunDirectory, step: int | None = None) -> dict[str, Tensor]:
    """The weights of a run's only checkpoint, or that of ``step``, put together from its shards."""
    (checkpoint,) = [checkpoint_path(run.checkpoints, step)] if step is not None else run.checkpoints.iterdir()
    parts: dict[str, list[tuple[list[int], Tensor]]] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as source:
            offsets = json.loads(source.metadata()["DCP_SHARDING_INFO"])
            for key in source.keys():  # noqa: SIM118
                if key.startswith("model."):
                    at = offsets[key]["saved_offsets"]
                    parts.setdefault(key.removeprefix("model."), []).append((at, source.get_tensor(key)))
    return {name: put_together(found) for name, found in parts.items()}


def put_together(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """A whole tensor of parts and where they begin in it; what no part covers is NaN."""
    ends = [[start + size for start, size in zip(at, part.shape, strict=True)] for at, part in parts]
    whole = torch.full([max(sizes) for sizes in zip(*ends, strict=True)], float("nan"))
    for (at, part), end in zip(parts, ends, strict=True):
        region = tuple(slice(*sides) for sides in zip(at, end, strict=True))
        assert whole[region].isnan().all(), "a part that is stored twice"
        whole[region] = part
    return whole
