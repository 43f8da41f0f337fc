"""The loss of answers that are each good or bad: values and gradients of plain transformers on each answer alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import llama_config, load
from tonnage.config import Objective
from tonnage.data import Pack
from tonnage.data.building.mates import LABEL, mated
from tonnage.data.tokens.encoder import Document
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.training.batch import MicroBatch, documents_of
from tonnage.training.kto import KtoLoss
from tonnage.training.loss import LossModel

PROMPTS, ANSWERS = (9, 14, 5, 7), (4, 6, 2, 3)
LABELS, WEIGHTS = (1.0, 0.0, 1.0, 0.0), (1.0, 1.0, 2.0, 0.5)
REFERENCES = np.array([[-20.0, -33.0], [-31.0, -14.0], [-9.0, -41.0], [-18.0, -22.0]])
OBJECTIVES = [
    Objective(kind="kto"),
    Objective(kind="kto", beta=0.3, desirable=1.3, undesirable=0.4),
]


def rows_of(vocabulary: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every row the prompt, its answer and its mate's, int64."""
    chance = torch.Generator().manual_seed(3)
    prompts, answers = (
        [torch.randint(vocabulary, (length,), generator=chance) for length in lengths] for lengths in (PROMPTS, ANSWERS)
    )
    return list(zip(prompts, answers, answers[1:] + answers[-2:-1], strict=True))


def plain(prompt: Tensor, answer: Tensor, label: float, weight: float) -> Document:
    tokens = torch.cat([prompt, answer]).numpy().astype(np.int32)
    return Document(tokens, [(len(prompt), len(tokens), weight)], carried=(label,))


def pack_of(numbers: list[int]) -> Pack:
    rows = rows_of(258)
    documents = [
        mated(plain(*rows[at][:2], LABELS[at], WEIGHTS[at]), plain(rows[at][0], rows[at][2], 0.0, 1.0))
        for at in numbers
    ]
    weights = []
    for document in documents:
        of_document = np.zeros(len(document.tokens), dtype=np.float32)
        for start, stop, weight in document.spans:
            of_document[start:stop] = weight
        weights.append(of_document)
    return Pack(
        np.concatenate([document.tokens for document in documents]),
        np.concatenate(weights),
        np.array([len(document.tokens) for document in documents], dtype=np.int32),
        np.array(numbers),
        np.full(len(numbers), -1, dtype=np.int16),
        np.zeros(len(numbers), dtype=np.int32),
        carried={LABEL: np.array([document.carried[0] for document in documents])},
        forks=np.array([document.fork for document in documents]),
        reference=REFERENCES[numbers],
    )


def steps() -> dict[str, list[MicroBatch]]:
    """The same rows as micro-batches of every kind."""
    everything = pack_of([0, 1, 2, 3])
    return {
        "prompts once": [MicroBatch.of([everything])],
        "apart": [MicroBatch.of([everything], shares=False)],
        "padded": [MicroBatch.padded(list(documents_of(everything)), 16)],
        "two": [MicroBatch.of([pack_of([3, 0])]).rounded(16), MicroBatch.of([pack_of([1]), pack_of([2])])],
        "with a blank": [MicroBatch.of([everything]), MicroBatch.blank()],
    }


def in_plain_torch(model: Any, objective: Objective) -> tuple[Tensor, dict[str, float]]:
    """Sum of the losses of all rows by their weights, each answer alone in transformers' own model; mean figures."""
    own, others = list[Tensor](), list[Tensor]()
    for (prompt, *answers), references in zip(rows_of(258), REFERENCES.tolist(), strict=True):
        for answer, reference, ratios in zip(answers, references, (own, others), strict=True):
            logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1].float()
            ratios.append(-F.cross_entropy(logits, answer, reduction="sum").double() - reference)
    level = max(0.0, sum(w * float(r.detach()) for w, r in zip(WEIGHTS, others, strict=True)) / sum(WEIGHTS))
    total, figures = torch.zeros((), dtype=torch.float64), {"kl": level}
    for name, label in (("chosen", 1.0), ("rejected", 0.0)):
        rows = [at for at in range(len(LABELS)) if LABELS[at] == label]
        weight = sum(WEIGHTS[at] for at in rows)
        figures[f"reward_{name}"] = sum(WEIGHTS[at] * objective.beta * float(own[at].detach()) for at in rows) / weight
        logprobs = [WEIGHTS[at] * (float(own[at].detach()) + REFERENCES[at, 0]) for at in rows]
        figures[f"logprob_{name}"] = sum(logprobs) / weight
    for weight, label, ratio in zip(WEIGHTS, LABELS, own, strict=True):
        if label:
            loss = objective.desirable * (1 - torch.sigmoid(objective.beta * (ratio - level)))
        else:
            loss = objective.undesirable * (1 - torch.sigmoid(objective.beta * (level - ratio)))
        total = total + weight * loss
    return total, figures | {"reward_margin": figures["reward_chosen"] - figures["reward_rejected"]}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[LossModel, Any]:
    config = llama_config(initializer_range=0.3)
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = build_on_meta(config, torch.float32)
    ours = LossModel(model, dissect(model))
    allocate(model, torch.device("cpu"))
    load(model, folder)
    return ours, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


ALONE: Any = SimpleNamespace(
    device=torch.device("cpu"), speaks=True, total=lambda values: values, once=lambda *v: v, sum=lambda *v: v
)
"""A world of one."""


def pipeline_of(model: LossModel) -> Any:
    """Forward passes alone."""

    def passes(batches: list[MicroBatch], denominator: float, *, backward: bool) -> Any:
        assert not backward
        return (SimpleNamespace(run=lambda batch=batch: [model(batch, denominator)]) for batch in batches)

    return SimpleNamespace(passes=passes)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=["plain", "weighted"])
@pytest.mark.parametrize("layout", ["prompts once", "apart", "padded", "two", "with a blank"])
def test_losses_and_gradients_are_those_of_answers_alone(
    models: tuple[LossModel, Any], objective: Objective, layout: str
) -> None:
    ours, theirs = models
    batches = steps()[layout]
    assert sum(batch.weight for batch in batches) == sum(WEIGHTS)
    ours.own = loss = KtoLoss(objective)
    for model in (ours, theirs):
        model.zero_grad(set_to_none=True)
    expected, figures = in_plain_torch(theirs, objective)
    assert figures["kl"] > 0
    loss.set_level(pipeline_of(ours), batches, ALONE)
    values = [ours(batch, 4.0) for batch in batches]
    torch.testing.assert_close(sum(values).double(), expected / 4.0, rtol=1e-5, atol=1e-6)
    for value in values:
        value.backward()
    (expected / 4.0).backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad - named[name].grad).norm() / named[name].grad.norm()) < 5e-5, name
    assert loss.figures(loss.tally(ALONE.device).tolist()) == pytest.approx(figures, rel=1e-5, abs=1e-5)
    loss.clear()
    assert loss.figures(loss.tally(ALONE.device).tolist()) == {}


def test_an_evaluation_has_one_level(models: tuple[LossModel, Any]) -> None:
    """That of all rows, found from the log-probabilities of one pass."""
    ours, theirs = models
    ours.own = loss = KtoLoss(OBJECTIVES[1])
    expected, figures = in_plain_torch(theirs, OBJECTIVES[1])
    with torch.no_grad():
        for batch in steps()["two"]:
            ours(batch, 1.0)
    rows, evaluated = loss.evaluated(ALONE)
    assert rows == len(LABELS)
    values = {name: figure.value for name, figure in evaluated.items()}
    wanted = {f"eval_{name}": figures[name] for name in ("reward_chosen", "reward_rejected", "reward_margin")}
    wanted["eval_loss"] = float(expected.detach()) / sum(WEIGHTS)
    assert values == pytest.approx(wanted, rel=1e-5)
    for figure in evaluated.values():
        assert figure.low < figure.value < figure.high


def test_rows_of_one_kind_have_no_margin() -> None:
    loss = KtoLoss(OBJECTIVES[0])
    figures = loss.figures([2.0, 1.0, -8.0, 0.0, 0.0, 0.0, 0.5])
    assert figures == {"reward_chosen": 0.5, "logprob_chosen": -4.0, "kl": 0.25}
