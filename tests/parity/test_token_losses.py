"""Losses in which tokens count by what the model makes of them: the numbers of a plain loop, in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain import final_weights, metrics, split_documents
from ready import ready, run_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.decide.decision import Decision
from tonnage.training.head import Head
from tonnage.training.token_losses import entropies, probabilities

STEPS, SEQUENCES = 4, 4
Make = Callable[..., Decision]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes runs of one tiny model."""
    folder, number = tmp_path_factory.mktemp("token-losses"), count()
    write_rows(folder / "rows.jsonl", alpaca_rows(60))
    write_model(folder / "model", llama_config(initializer_range=0.2))

    def made(objective: dict[str, Any], workers: int = 1, **keys: Any) -> Decision:
        text = {
            "model": str(folder / "model"),
            "data": {
                "train": str(folder / "rows.jsonl"),
                "max_length": 96,
                "template": "plain",
                "over_length": "drop",
                "max_loss": 1.0,
                "cache": str(folder / "cache"),
            }
            | keys.pop("data", {}),
            "objective": objective,
            "batch": {"sequences": SEQUENCES},
            "steps": STEPS,
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
            "precision": "fp32",
            "compile": "off",
            "memory": {"micro_batch": SEQUENCES // workers} | keys.pop("memory", {}),
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": STEPS, "keep": 99},
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        return ready(folder, text | keys)

    return made


def factors(logits: Tensor, targets: Tensor, objective: dict[str, Any]) -> Tensor:
    """By full logits, in fp64."""
    logits = logits.detach().double()
    if objective["kind"] == "dft":
        right: Tensor = logits.softmax(1).gather(1, targets[:, None])
        return right[:, 0].float()
    likeliest = torch.distributions.Categorical(logits=logits.sort(1, descending=True).values[:, :20])
    entropy: Tensor = likeliest.entropy()
    return ((entropy / 3.0) ** float(objective.get("power", 1.0))).float()


def in_plain_torch(decision: Decision, objective: dict[str, Any]) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Loss and gradient norm of every step, and the final weights, with full logits of a model of transformers."""
    config, data = decision.config, decision.prepared.train
    settings = config.optimizer
    model: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    records = []
    for step in range(STEPS):
        total, number = torch.zeros(()), 0
        for at in range(step * SEQUENCES, (step + 1) * SEQUENCES):
            for ids, supervised in split_documents(data, data.pack_at(at, config.seed)):
                logits = model(input_ids=ids[None]).logits[0, :-1][supervised[1:]]
                targets = ids[1:][supervised[1:]]
                losses = F.cross_entropy(logits, targets, reduction="none")
                total = total + (losses * factors(logits, targets, objective)).sum()
                number += len(targets)
        optimizer.zero_grad()
        (total / number).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        records.append({"loss": total.item() / number, "grad_norm": norm.item()})
    return records, {name: parameter.detach() for name, parameter in model.named_parameters()}


OBJECTIVES = [{"kind": "dft"}, {"kind": "eaft"}, {"kind": "eaft", "power": 2.5}]
LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batches of one": {"memory": {"micro_batch": 1}},
    "2 workers, zero 3": {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}},
    "pipeline 2": {"workers": 2, "parallel": {"pipeline": 2}, "memory": {"micro_batch": 1}},
    "tensor 2": {"workers": 2, "parallel": {"tensor": 2}, "memory": {"micro_batch": 2}},
    "context 2": {"workers": 2, "parallel": {"context": 2}, "memory": {"micro_batch": 1}},
    "context 2, zero 3": {"workers": 4, "parallel": {"context": 2}, "memory": {"micro_batch": 1, "zero": 3}},
}
"""Ways to train that change no number."""


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["dft", "eaft", "eaft 2.5"])
def test_every_step_is_that_of_a_plain_loop(make: Make, objective: dict[str, Any]) -> None:
    check(make(objective), objective)


@pytest.mark.matrix
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("objective", OBJECTIVES[:2], ids=["dft", "eaft"])
def test_every_layout_gives_the_same_steps(make: Make, objective: dict[str, Any], layout: str) -> None:
    check(make(objective, **copy.deepcopy(LAYOUTS[layout])), objective)


def check(decision: Decision, objective: dict[str, Any]) -> None:
    train((decision.plan.workers, [run_of(decision)]))
    expected, weights = in_plain_torch(decision, objective)
    steps = [record for record in metrics(run_of(decision)) if "grad_norm" in record]
    assert len(steps) == STEPS
    for step, record in zip(steps, expected, strict=True):
        for figure, value in record.items():
            assert step[figure] == pytest.approx(value, rel=1e-5, abs=1e-6), (step["step"], figure)
    for name, trained in final_weights(run_of(decision), STEPS).items():
        assert float((trained - weights[name]).norm() / weights[name].norm()) < 1e-5, name


@pytest.mark.parametrize("vocabulary", [53, 12])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_factors_are_those_of_full_logits(vocabulary: int, softcap: float | None) -> None:
    """In chunks, with logits that are capped, and with fewer tokens than are looked at."""
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(37, 16), torch.randn(vocabulary, 16), torch.randint(vocabulary, (37,))
    head = Head(weight, softcap=softcap, chunk_tokens=8)
    logits = hidden @ weight.t()
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(probabilities(head, hidden, targets), factors(logits, targets, {"kind": "dft"}))
    expected = factors(logits, targets, {"kind": "eaft", "power": 2.0})
    torch.testing.assert_close(entropies(head, hidden, targets, power=2.0), expected)
