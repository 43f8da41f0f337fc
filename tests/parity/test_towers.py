"""A tower that looks at images while the model is trained, and learns with it: the numbers of plain transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from plain import metrics
from ready import run_of
from torch import nn

from forked import train
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint

pytest.importorskip("PIL")
from test_images import Make, check_steps, documents_of, images_of, logits_of, make, plain_model, steps_of

__all__ = ["make"]
STEPS = 5
SEEN: dict[str, Any] = {"data": {"image_features": "computed"}}
TWO_WORKERS: dict[str, Any] = {"workers": 2, "memory": {"micro_batch": 1}}


def in_plain_transformers(
    decision: Decision, trains: Callable[[str], bool], change: Callable[[Any], Any] = lambda model: model
) -> tuple[list[dict[str, float]], Any]:
    """Loss and gradient norm of every step with the parameters of the whole model trained that ``trains`` names, one
    row at a time, and the model. A parameter that rows of some steps do not reach has a gradient of zeros there."""
    model = change(plain_model(decision.config.model))
    processor = transformers.AutoProcessor.from_pretrained(decision.config.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(name))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    settings = decision.config.optimizer
    optimizer = torch.optim.AdamW(trained, lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0)
    records, reached = [], set[int]()
    for step in range(STEPS):
        optimizer.zero_grad()
        documents, total = documents_of(decision, step), 0.0
        number = sum(int(supervised[1:].sum()) for _, supervised, _ in documents)
        for ids, supervised, document in documents:
            logits, targets = logits_of(model, processor, ids, images_of(decision, document)), supervised[1:]
            loss = F.cross_entropy(logits[:-1][targets], ids[1:][targets], reduction="sum") / number
            if loss.requires_grad:
                loss.backward()
            total += loss.item()
        reached |= {id(parameter) for parameter in trained if parameter.grad is not None}
        for parameter in trained:
            if parameter.grad is None and id(parameter) in reached:
                parameter.grad = torch.zeros_like(parameter)
        norm = nn.utils.clip_grad_norm_(trained, settings.clip)
        optimizer.step()
        records.append({"loss": total, "grad_norm": norm.item()})
    return records, model


def is_text(name: str) -> bool:
    return any(part in name for part in ("language_model", "text_model", "lm_head"))


def is_projector(name: str) -> bool:
    return any(part in name for part in ("multi_modal_projector", "visual.merger", "connector"))


def every(_: str) -> bool:
    return True


PROJECTORS = {"llava": "*multi_modal_projector*", "qwen2_5_vl": "visual.merger*", "idefics3": "*connector*"}
PARTS: dict[str, tuple[Callable[[str], Sequence[str]], Callable[[str], bool]]] = {
    "projector": (lambda family: [PROJECTORS[family]], is_projector),
    "tower": (lambda _: ["tower.*"], lambda name: not is_text(name)),
    "all": (lambda _: ["*", "tower.*"], every),
}


def check_export(decision: Decision, model: Any, folder: Path) -> None:
    """What is exported is the trained model, tower and all, to plain transformers."""
    export_checkpoint(run_of(decision), folder)
    exported = plain_model(folder)
    processor = transformers.AutoProcessor.from_pretrained(folder)
    theirs = model.state_dict()
    for name, value in exported.state_dict().items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=2e-5, msg=name)
    for ids, _, document in documents_of(decision, 0):
        images = images_of(decision, document)
        with torch.no_grad():
            ours, expected = (logits_of(one, processor, ids, images) for one in (exported, model))
        assert float((ours - expected).abs().max()) < 1e-4 * float(expected.abs().max())


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_what_is_computed_in_every_step_is_what_is_cached(make: Make, family: str) -> None:
    """To the bit, as rows are looked at one by one in either way."""
    runs = [make(family, data={"image_features": way}, seed=3) for way in ("computed", "cached")]
    for decision, sees in zip(runs, (True, False), strict=True):
        assert decision.plan.data.sees is sees
        assert (decision.plan.data.features_path is None) is sees
        train((1, [run_of(decision)]))
    first, second = (steps_of(run_of(decision)) for decision in runs)
    for ours, theirs in zip(first, second, strict=True):
        assert (ours["loss"], ours["grad_norm"]) == (theirs["loss"], theirs["grad_norm"])


@pytest.mark.parametrize("family", PROJECTORS)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", ["1 worker", "zero 0", "zero 3"])
def test_towers_learn_as_in_plain_transformers(
    make: Make, tmp_path: Path, family: str, part: str, layout: str
) -> None:
    patterns, trains = PARTS[part]
    keys = TWO_WORKERS if layout != "1 worker" else {}
    memory = {"memory": {"micro_batch": 1, "zero": int(layout[-1])}} if layout != "1 worker" else {}
    decision = make(family, steps=STEPS, train=list(patterns(family)), **keys | memory)
    assert decision.plan.data.sees
    train((decision.plan.workers, [run_of(decision)]))
    expected, model = in_plain_transformers(decision, trains)
    check_steps(run_of(decision), expected)
    check_export(decision, model, tmp_path / "export")
