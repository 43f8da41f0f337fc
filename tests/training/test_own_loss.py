"""Losses of one's own: values and gradients of autograd on full logits; what is no sum is refused with its row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from tiny import llama_config, neox_config
from tonnage.errors import UserError
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.rundir.records import LossNote
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel
from tonnage.training.own_loss import OwnLoss, Tried, check_sum, loss_of, note_of

SCORES = torch.tensor([0.5, -2.0, 1.5])
LENGTHS = (9, 14, 7)


def cross_entropy(logprobs: Tensor, weights: Tensor) -> Tensor:
    return -(logprobs * weights).sum()


def clipped(logprobs: Tensor, weights: Tensor, score: Tensor) -> Tensor:
    """Neither linear in the log-probabilities nor of one sign."""
    ratio = torch.exp(logprobs + 3.0)
    return -(weights * torch.minimum(ratio * score, ratio.clamp(0.2, 3.0) * score)).sum()


def batch_of(vocabulary: int) -> MicroBatch:
    """Three documents in a row; of each, all targets but the first three count, by weights of their own."""
    chance = torch.Generator().manual_seed(3)
    ids = torch.randint(vocabulary, (1, sum(LENGTHS)), generator=chance)
    starts = [sum(LENGTHS[:number]) for number in range(3)]
    positions = torch.cat(
        [torch.arange(start + 3, start + length - 1) for start, length in zip(starts, LENGTHS, strict=True)]
    )
    counts = torch.tensor([length - 4 for length in LENGTHS])
    return MicroBatch(
        ids,
        LENGTHS,
        positions,
        ids[0, positions + 1],
        torch.rand(len(positions), generator=chance) + 0.1,
        (0, 1, 2),
        starts=(0, 0, 0),
        columns={"score": SCORES.repeat_interleave(counts)},
    )


def on_full_logits(model: Any, batch: MicroBatch, loss: OwnLoss) -> Tensor:
    """The same loss by autograd, each document alone in transformers' own model."""
    logits = torch.cat([model(input_ids=part).logits[0] for part in batch.input_ids.split(LENGTHS, dim=1)])
    found = F.log_softmax(logits[batch.positions].float(), dim=-1)
    logprobs = found.gather(1, batch.targets[:, None]).squeeze(1)
    return loss.function(logprobs, batch.weights, **{name: batch.columns[name] for name in loss.columns})


@pytest.mark.parametrize("config", [llama_config(initializer_range=0.3), neox_config(initializer_range=0.3)])
@pytest.mark.parametrize("filled_up", [False, True])
def test_values_and_gradients_are_those_of_autograd_on_full_logits(config: Any, filled_up: bool) -> None:
    loss = OwnLoss.of(clipped, ["other", "score"])
    assert loss.columns == ("score",)
    batch = batch_of(config.vocab_size)
    torch.manual_seed(0)
    model = build_on_meta(config, torch.float32)
    ours = LossModel(model, dissect(model))
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, seed=0)
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    theirs.load_state_dict(model.state_dict())
    ours.own = loss
    got = ours(batch.rounded(16) if filled_up else batch, 4.0)
    want = on_full_logits(theirs, batch, loss) / 4.0
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ours(batch, 4.0), want, rtol=2e-6, atol=1e-6)
    (got * 3.0).backward()
    (want * 3.0).backward()
    named = dict(theirs.named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert float((parameter.grad - named[name].grad).norm() / named[name].grad.norm()) < 2e-5, name


def test_cross_entropy_as_a_loss_of_ones_own_is_ours() -> None:
    model = build_on_meta(llama_config(initializer_range=0.3), torch.float32)
    ours = LossModel(model, dissect(model))
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, seed=0)
    batch = batch_of(258)
    ours(batch, 4.0).backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    plain = float(ours(batch, 4.0).detach())
    model.zero_grad(set_to_none=True)
    ours.own = OwnLoss.of(cross_entropy, ["score"])
    found = ours(batch, 4.0)
    assert abs(float(found.detach()) - plain) < 1e-6
    found.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=0, atol=0)
    assert float(ours(MicroBatch.blank(), 4.0).detach()) == 0


ROWS = [
    Tried(f"rows.jsonl:{number + 1}", torch.ones(length), {"score": SCORES[number].expand(length)})
    for number, length in enumerate(LENGTHS)
]


@pytest.mark.parametrize("loss", [cross_entropy, clipped, lambda logprobs, weights, **more: -logprobs.sum()])
def test_sums_are_taken(loss: Callable[..., Tensor]) -> None:
    assert check_sum(OwnLoss.of(loss, ["score"]), ROWS)
    assert check_sum(OwnLoss.of(loss, ["score"]), ROWS[:1])


def test_what_says_nothing_of_the_first_rows_is_not_settled() -> None:
    assert not check_sum(OwnLoss.of(lambda logprobs, weights: (0 * logprobs).mean(), []), ROWS)


@pytest.mark.parametrize(
    ("loss", "row", "said"),
    [
        (lambda logprobs, weights: -logprobs.mean(), 2, "gives .* for 2 rows together, up to this one, and "),
        (lambda logprobs, weights: -(logprobs * weights).sum() / weights.sum(), 2, "a sum: f\\(a and b\\)"),
        (lambda logprobs, weights, score: -(logprobs * (score - score.mean())).sum(), 2, "give a .sum\\(\\), no"),
        (lambda logprobs, weights: -logprobs, 1, r"gives a tensor of shape \(9,\), torch.float32"),
        (lambda logprobs, weights: -logprobs.sum(0, keepdim=True), 1, r"of shape \(1,\)"),
        (lambda logprobs, weights: -float(logprobs.detach().sum()), 1, "a sum: a scalar tensor"),
        (lambda logprobs, weights: logprobs.sum() * math.nan, 1, "the loss is nan"),
        (lambda logprobs, weights, score: (logprobs * torch.log(score)).sum(), 2, "the loss is nan"),
        (lambda logprobs, weights: (logprobs - logprobs.detach()).abs().sqrt().sum(), 1, "its gradient is"),
        (lambda logprobs, weights: weights.sum(), 1, "does not depend on logprobs"),
        (lambda logprobs, weights: logprobs.detach().sum(), 1, "does not depend on logprobs"),
    ],
)
def test_what_is_no_sum_is_refused_with_the_row(loss: Callable[..., Tensor], row: int, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        check_sum(OwnLoss.of(loss, ["score"]), ROWS)
    assert f"rows.jsonl:{row}" in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("mean", "loss is a str"),
        (lambda logprobs: logprobs.sum(), "a function of log-probabilities, weights"),
        (lambda logprobs, weights, reward: logprobs.sum(), "takes reward, and the rows carry score"),
        (lambda logprobs, weights, reward, /: logprobs.sum(), "takes reward"),
    ],
)
def test_functions_of_other_arguments_are_refused(loss: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        OwnLoss.of(loss, ["score"])
    assert OwnLoss.of(lambda logprobs, weights, reward=1: logprobs.sum(), ["score"]).columns == ()


def test_workers_find_what_stands_in_a_module_and_nothing_else() -> None:
    note = note_of(F.softmax)
    assert (note.module, note.name) == ("torch.nn.functional", "softmax")
    assert loss_of(note, "loss.json") is F.softmax
    with pytest.raises(UserError, match=r"another source of torch\.nn\.functional\.softmax"):
        loss_of(LossNote(note.module, note.name, "0" * 32, note.folder), "loss.json")
    with pytest.raises(UserError, match=r"no_module\.f cannot be imported"):
        loss_of(LossNote("no_module", "f", "", ""), "loss.json")
    with pytest.raises(UserError, match="which workers cannot import"):
        note_of(lambda logprobs, weights: logprobs.sum())
