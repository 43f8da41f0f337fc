"""Losses of pairs: values and gradients of plain transformers on each answer alone, with the prompt once and twice."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import llama_config, load, neox_config
from tonnage.config import Objective
from tonnage.data import Pack
from tonnage.data.packs.prefixes import Prefix
from tonnage.data.tokens.encoder import NO_FORK, Document, paired
from tonnage.forms.conversation import RowError
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta
from tonnage.training.batch import MicroBatch, documents_of
from tonnage.training.loss import LossModel
from tonnage.training.preferences import FIGURES, Answers, PairLoss, orpo

OBJECTIVES = [
    Objective(kind="dpo"),
    Objective(kind="dpo", beta=0.3, label_smoothing=0.2),
    Objective(kind="dpo", beta=2.0, per_token=True, supervised=0.7),
    Objective(kind="hinge", beta=0.5),
    Objective(kind="ipo", beta=0.05, supervised=0.2),
    Objective(kind="orpo", beta=0.4),
    Objective(kind="simpo", margin=0.6),
]
PROMPTS, ANSWERS = (9, 14, 5), ((4, 7), (6, 3), (2, 8))
WEIGHTS = (1.0, 1.0, 2.0)
REFERENCES = np.array([[-20.0, -33.0], [-31.0, -12.0], [-9.0, -41.0]])
SYSTEM = 3
"""Tokens that all prompts begin with."""


def pairs_of(vocabulary: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Of every pair the prompt and both answers, int64."""
    chance = torch.Generator().manual_seed(3)
    system = torch.randint(vocabulary, (SYSTEM,), generator=chance)
    made = []
    for length, answers in zip(PROMPTS, ANSWERS, strict=True):
        prompt = torch.cat([system, torch.randint(vocabulary, (length - SYSTEM,), generator=chance)])
        chosen, rejected = (torch.randint(vocabulary, (size,), generator=chance) for size in answers)
        made.append((prompt, chosen, rejected))
    return made


def as_document(pair: tuple[Tensor, Tensor, Tensor], weight: float = 1.0) -> Document:
    prompt, *answers = pair
    chosen, rejected = (
        Document(
            torch.cat([prompt, answer]).numpy().astype(np.int32),
            [(len(prompt), len(prompt) + len(answer), weight)],
        )
        for answer in answers
    )
    return paired(chosen, rejected)


def pack_of(documents: list[Document]) -> Pack:
    number = len(documents)
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
        np.arange(number),
        np.zeros(number, dtype=np.int16),
        np.zeros(number, dtype=np.int32),
        forks=np.array([document.fork for document in documents]),
        reference=REFERENCES[:number],
    )


def batches() -> dict[str, MicroBatch]:
    """The same pairs as rows of every kind."""
    pack = pack_of([as_document(pair, weight) for pair, weight in zip(pairs_of(258), WEIGHTS, strict=True)])
    prefixes = (Prefix(SYSTEM, -1),)
    return {
        "prompts and system once": MicroBatch.of([pack], prefixes),
        "prompts once": MicroBatch.of([pack]),
        "apart": MicroBatch.of([pack], shares=False),
        "filled up": MicroBatch.of([pack], prefixes).rounded(16),
        "padded": MicroBatch.padded(list(documents_of(pack)), 16),
    }


def in_plain_torch(model: Any, objective: Objective) -> tuple[Tensor, dict[str, float]]:
    """Sum of the losses of all pairs by their weights, each answer alone in transformers' own model; mean figures."""
    total, figures = torch.zeros((), dtype=torch.float64), dict.fromkeys([*FIGURES, "reward_margin"], 0.0)
    beta, swapped = objective.beta, objective.label_smoothing
    for pair, weight, references in zip(pairs_of(258), WEIGHTS, REFERENCES.tolist(), strict=True):
        prompt, *answers = pair
        sums, means, ratios = [], [], []
        for answer, reference in zip(answers, references, strict=True):
            ids = torch.cat([prompt, answer])
            logits = model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()
            sums.append(-F.cross_entropy(logits, answer, reduction="sum").double())
            means.append(sums[-1] / len(answer))
            ratios.append((sums[-1] - reference) / (len(answer) if objective.per_token else 1))
        if objective.kind in ("dpo", "hinge", "ipo"):
            rewards = [beta * ratio for ratio in ratios]
        else:
            rewards = [beta * mean for mean in means]
        margin = rewards[0] - rewards[1]
        if objective.kind == "dpo":
            p = torch.sigmoid(margin)
            loss = -(1 - swapped) * p.log() - swapped * (1 - p).log()
        elif objective.kind == "hinge":
            loss = torch.clamp(1 - margin, min=0)
        elif objective.kind == "ipo":
            each = [(s - r) / len(a) for s, r, a in zip(sums, references, answers, strict=True)]
            loss = (each[0] - each[1] - 0.5 / beta).square()
        elif objective.kind == "orpo":
            odds = [mean.exp() / (1 - mean.exp()) for mean in means]
            ratio = odds[0] / odds[1]
            loss = -means[0] - beta * (ratio / (1 + ratio)).log()
        else:
            loss = -torch.sigmoid(margin - objective.margin).log()
        total = total + weight * (loss - objective.supervised * means[0])
        each_figure = (*rewards, margin > 0, *sums, margin)
        for name, value in zip(figures, each_figure, strict=True):
            figures[name] += weight / sum(WEIGHTS) * float(torch.as_tensor(value).detach())
    return total, figures


@pytest.fixture(scope="module", params=["llama", "neox"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LossModel, Any]:
    config = {"llama": llama_config, "neox": neox_config}[request.param](initializer_range=0.3)
    folder: Path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    model = build_on_meta(config, torch.float32)
    ours = LossModel(model, dissect(model))
    allocate(model, torch.device("cpu"))
    load(model, folder)
    return ours, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: f"{objective.kind}-{objective.beta:g}")
@pytest.mark.parametrize("layout", ["prompts and system once", "prompts once", "apart", "filled up", "padded"])
def test_losses_and_gradients_are_those_of_answers_alone(
    models: tuple[LossModel, Any], objective: Objective, layout: str
) -> None:
    ours, theirs = models
    batch = batches()[layout]
    assert batch.weight == sum(WEIGHTS)
    ours.own = pair_loss = PairLoss(objective)
    for model in (ours, theirs):
        model.zero_grad(set_to_none=True)
    got = ours(batch, 4.0)
    expected, figures = in_plain_torch(theirs, objective)
    torch.testing.assert_close(got.double(), expected / 4.0, rtol=1e-5, atol=1e-6)
    (got * 3.0).backward()
    (expected / 4.0 * 3.0).backward()
    named = dict(theirs.named_parameters())
    for name, parameter in ours.model.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad - named[name].grad).norm() / named[name].grad.norm()) < 5e-5, name
    found = pair_loss.figures(pair_loss.tally(torch.device("cpu")).tolist())
    assert found.keys() == figures.keys()
    for name, value in figures.items():
        assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
    pair_loss.clear()
    assert pair_loss.figures(pair_loss.tally(torch.device("cpu")).tolist()) == {}
    with torch.no_grad():
        torch.testing.assert_close(ours(batch, 4.0).double(), expected / 4.0, rtol=1e-5, atol=1e-6)
    assert float(ours(MicroBatch.blank(), 4.0).detach()) == 0


def test_a_prompt_is_in_a_row_once() -> None:
    rows = batches()
    prompts, answers = sum(PROMPTS), sum(map(sum, ANSWERS))
    assert rows["prompts and system once"].num_tokens == prompts - 2 * SYSTEM + answers
    assert rows["prompts once"].num_tokens == prompts + answers
    assert rows["apart"].num_tokens == 2 * prompts + answers
    for batch in rows.values():
        assert batch.documents in ((0, 0, 1, 1, 2, 2),)
        assert batch.targets_of == tuple(size for sizes in ANSWERS for size in sizes)
        assert batch.reference is not None
        assert batch.reference.tolist() == REFERENCES.flatten().tolist()


def test_where_a_pair_parts() -> None:
    prompt, chosen, rejected = torch.arange(5), torch.tensor([7, 8, 9]), torch.tensor([7, 8, 6, 5])
    document = as_document((prompt, chosen, rejected))
    assert document.fork == (5, 8)  # at the first token that is trained, although answers begin alike
    assert document.tokens.tolist() == [0, 1, 2, 3, 4, 7, 8, 9, 7, 8, 6, 5]
    assert document.spans == [(5, 8, 1.0), (8, 12, 1.0)]
    assert copy.copy(document).supervised == 7
    assert Document(document.tokens, []).fork is NO_FORK


def test_what_is_no_pair_is_refused() -> None:
    prompt, answer = torch.arange(5), torch.tensor([7, 8])
    with pytest.raises(RowError, match="both answers have the same tokens"):
        as_document((prompt, answer, answer.clone()))
    one = Document(np.array([1, 2, 3], np.int32), [(1, 3, 1.0)])
    other = Document(np.array([4, 2, 5], np.int32), [(1, 3, 1.0)])
    with pytest.raises(RowError, match="no token before them in common"):
        paired(one, other)


def test_certain_answers_have_finite_odds() -> None:
    logprobs = torch.tensor([[0.0, -1.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    answers = Answers(logprobs, torch.ones(2, 2, dtype=torch.float64), torch.zeros(2, 2, dtype=torch.float64))
    losses = orpo(answers, Objective(kind="orpo"))
    (gradient,) = torch.autograd.grad(losses.sum(), logprobs)
    assert losses.isfinite().all()
    assert gradient.isfinite().all()
