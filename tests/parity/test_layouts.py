"""The same losses and gradient norms on 1, 2 and 4 workers, in any micro-batch, as a plain loop over padded batches.

The reference below uses transformers and torch only: padded batches, the model's own loss-free forward, torch's
AdamW and clipping. It shares the packs (which documents make a step) with the runs, and nothing else.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from transformers import AutoModelForCausalLM

from tiny import alpaca_rows, llama_config, neox_config, write_model, write_rows
from tonnage.cli.decide import Decision, decide
from tonnage.cli.train import write_run
from tonnage.data import PackedDataset, pack_at
from tonnage.launch.local import run_workers
from tonnage.rundir import RunDirectory

STEPS, PACKS_PER_STEP, MAX_LENGTH = 20, 8, 128
LR, DECAY, CLIP, WARMUP = 3e-3, 0.1, 0.5, 3
FAMILIES = {"neox": neox_config, "llama": llama_config}
MICRO_BATCHES = (1, 2, 4)


@pytest.fixture(scope="module")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Decision]:
    """(family, workers, micro-batch) -> what was decided for that run."""
    folder = tmp_path_factory.mktemp("layouts")
    rows = write_rows(folder / "rows.jsonl", alpaca_rows(300))
    made = {}
    for family, config in FAMILIES.items():
        model = write_model(folder / family, config())
        for workers in (1, 2, 4):
            for micro_batch in MICRO_BATCHES:
                text = {
                    "model": str(model),
                    "data": {
                        "train": str(rows),
                        "max_length": MAX_LENGTH,
                        "template": "plain",
                        "cache": str(folder / "cache"),
                    },
                    "batch": {"sequences": PACKS_PER_STEP},
                    "steps": STEPS,
                    "optimizer": {"lr": LR, "weight_decay": DECAY, "clip": CLIP, "warmup": WARMUP},
                    "precision": "fp32",
                    "memory": {"micro_batch": micro_batch},
                    "launch": {"workers": workers, "threads": 1},
                    "track": [],
                    "output": str(folder / f"{family}-{workers}-{micro_batch}"),
                    "seed": 7,
                }
                path = folder / "config.yaml"
                path.write_text(json.dumps(text))
                decision = decide(str(path), [], Console(quiet=True))
                write_run(RunDirectory(decision.config.output), decision)
                made[family, workers, micro_batch] = decision
    return made


@pytest.fixture(scope="module")
def references(decisions: dict[tuple[str, int, int], Decision]) -> dict[str, list[dict[str, float]]]:
    """family -> loss and gradient norm of every step, by the plain loop."""
    return {family: plain_loop(decisions[family, 1, 1]) for family in FAMILIES}


def plain_loop(decision: Decision) -> list[dict[str, float]]:
    model = AutoModelForCausalLM.from_pretrained(decision.config.model, dtype=torch.float32)
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    data = decision.prepared.train
    records = []
    for step in range(STEPS):
        positions = range(step * PACKS_PER_STEP, (step + 1) * PACKS_PER_STEP)
        documents = [d for p in positions for d in split_documents(data, pack_at(p, data.num_packs, 7))]
        longest = max(len(ids) for ids, _ in documents)
        input_ids = torch.zeros(len(documents), longest, dtype=torch.int64)
        attention, labels = torch.zeros_like(input_ids), torch.full_like(input_ids, -100)
        for row, (ids, supervised) in enumerate(documents):
            input_ids[row, : len(ids)] = ids
            attention[row, : len(ids)] = 1
            labels[row, : len(ids)] = torch.where(supervised, ids, -100)
        logits = model(input_ids=input_ids, attention_mask=attention, use_cache=False).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        if step < WARMUP:
            lr = LR * (step + 1) / (WARMUP + 1)
        else:
            lr = LR * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) / 2
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        records.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": lr})
    return records


def split_documents(data: PackedDataset, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    pack = data.pack(index)
    lengths = pack.lengths.tolist()
    ids = torch.from_numpy(pack.input_ids.astype("int64")).split(lengths)
    supervised = torch.from_numpy(pack.weights.astype("float32") > 0).split(lengths)
    return list(zip(ids, supervised, strict=True))


def metrics(run: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_every_layout_equals_the_plain_loop(
    workers: int,
    decisions: dict[tuple[str, int, int], Decision],
    references: dict[str, list[dict[str, float]]],
) -> None:
    layouts = [key for key in decisions if key[1] == workers]
    runs = {key: RunDirectory(decisions[key].config.output) for key in layouts}
    worker = Path(__file__).with_name("train_runs.py")
    command = [sys.executable, str(worker), *(str(run.path) for run in runs.values())]
    run_workers(runs[layouts[0]], workers, 1, command=command)
    for key, run in runs.items():
        got, want = metrics(run), references[key[0]]
        assert len(got) == STEPS
        for ours, plain in zip(got, want, strict=True):
            where = f"{key}, step {ours['step']}"
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
            assert ours["lr"] == pytest.approx(plain["lr"], rel=1e-12), where
        assert want[-1]["loss"] < want[0]["loss"] - 1.0
        assert any(plain["grad_norm"] > CLIP for plain in want)
