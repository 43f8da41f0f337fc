"""The chunked vocabulary loss against torch's own cross-entropy on full logits."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tonnage.kernels.softmax import softmax_loss
from tonnage.training.head import Head, LogitsMemory
from tonnage.training.vocabulary import Soft


def reference(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    weights: Tensor,
    scale: float,
    softcap: float | None,
) -> Tensor:
    logits = F.linear(hidden, weight, bias).float() * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("scale", "softcap"), [(1.0, None), (0.25, None), (1.0, 2.0), (3.0, 1.5)])
@pytest.mark.parametrize("chunk_tokens", [1000, 37, 8, 1])
def test_equals_cross_entropy(with_bias: bool, scale: float, softcap: float | None, chunk_tokens: int) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16), torch.randn(53, 16)
    bias = torch.randn(53) if with_bias else None
    targets, weights = torch.randint(53, (37,)), torch.rand(37)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    others = [t.detach().clone().requires_grad_() for t in leaves]

    head = Head(leaves[1], leaves[2] if with_bias else None, scale, softcap, chunk_tokens)
    got = head.loss(leaves[0], targets, weights)
    want = reference(others[0], others[1], others[2] if with_bias else None, targets, weights, scale, softcap)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=1e-6)
    # A factor behind the loss must reach the gradients too.
    (got * 3.0).backward()
    (want * 3.0).backward()
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        assert float((leaf.grad - other.grad).norm() / other.grad.norm()) < 1e-6


def test_bf16_is_as_good_as_full_logits_in_bf16() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), torch.randn(500, 64) * 0.1
    targets, weights = torch.randint(500, (300,)), torch.full((300,), 1 / 300)
    exact = [t.clone().requires_grad_() for t in (hidden, weight)]
    reference(exact[0], exact[1], None, targets, weights, 1.0, None).backward()

    def error(chunk_tokens: int | None) -> list[float]:
        low = [t.bfloat16().requires_grad_() for t in (hidden, weight)]
        if chunk_tokens is not None:
            Head(low[1], chunk_tokens=chunk_tokens).loss(low[0], targets, weights).backward()
        else:
            reference(low[0], low[1], None, targets, weights, 1.0, None).backward()
        return [
            float((a.grad.float() - b.grad).norm() / b.grad.norm())
            for a, b in zip(low, exact, strict=True)
            if a.grad is not None and b.grad is not None
        ]

    plain = error(None)
    for ours, theirs in zip(error(chunk_tokens=300), plain, strict=True):
        assert ours < 1.01 * theirs
    # Each of the five chunks rounds its product to bf16 before they are summed in fp32.
    for ours, theirs in zip(error(chunk_tokens=64), plain, strict=True):
        assert ours < 1.25 * theirs


def test_nothing_supervised_is_zero_with_zero_gradients() -> None:
    hidden, weight = torch.zeros(0, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    loss = Head(weight).loss(hidden, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None
    assert weight.grad.abs().sum() == 0.0


def test_without_gradients_none_are_computed() -> None:
    hidden, weight = torch.randn(5, 8), torch.randn(11, 8, requires_grad=True)
    targets = torch.randint(11, (5,))
    with torch.no_grad(), FlopCounterMode(display=False) as products:
        loss = Head(weight).loss(hidden, targets, torch.ones(5))
    assert products.get_total_flops() == 2 * 5 * 8 * 11
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.t(), targets, reduction="sum"))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_bf16_rows_on_the_cpu_are_those_of_fp32_rounded_once(scale: float) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(11, 5003) * 20).bfloat16()
    targets, weights = torch.randint(5003, (11,)), torch.rand(11)
    targets[0], targets[1] = logits[0].argmax(), logits[1].argmin()
    exact = logits.double().requires_grad_()
    expected = F.cross_entropy(exact * scale, targets, reduction="none") * weights
    expected.sum().backward()
    assert exact.grad is not None
    given = logits.clone()
    losses = softmax_loss(given, targets, weights, scale, wants_gradient=False)
    assert torch.equal(given, logits)  # untouched
    torch.testing.assert_close(losses.double(), expected, rtol=2e-6, atol=1e-6)
    assert torch.equal(softmax_loss(given, targets, weights, scale, wants_gradient=True), losses)
    # One rounding to 8 bits of an fp32 number that is right to a few units.
    torch.testing.assert_close(given.double(), exact.grad, rtol=2**-8 * 1.001, atol=1e-30)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_in_bf16_logits_is_not_hidden(bad: float) -> None:
    logits = torch.zeros(2, 100, dtype=torch.bfloat16)
    logits[1, 7] = bad
    losses = softmax_loss(logits, torch.tensor([3, 3]), torch.ones(2), 1.0, wants_gradient=True)
    assert losses.isfinite().tolist() == [True, False]
    assert not logits[1].isfinite().all()


def test_a_chunk_grows_by_the_sum_that_it_saves() -> None:
    """Where logits become their own gradient: one chunk needs no sum of gradients in fp32."""
    weight = torch.zeros(500, 64, dtype=torch.bfloat16)
    assert Head(weight.clone().requires_grad_()).most_loss_tokens(None) == 1024 + 4 * 64 // 2
    assert Head(weight.clone().requires_grad_(), softcap=30.0).most_loss_tokens(None) == 1024
    assert Head(weight.float().requires_grad_()).most_loss_tokens(None) == 1024
    assert Head(weight).most_loss_tokens(None) == 1024, "of a frozen head there is none"


@pytest.mark.parametrize("chunk_tokens", [1000, 16])
def test_memory_that_stays_changes_nothing(chunk_tokens: int) -> None:
    torch.manual_seed(0)
    memory, weight = LogitsMemory(), torch.randn(500, 64).bfloat16()
    taken = []

    def results(tokens: int, memory: LogitsMemory | None) -> list[Tensor]:
        torch.manual_seed(tokens)
        hidden, head = torch.randn(tokens, 64).bfloat16().requires_grad_(), weight.clone().requires_grad_()
        targets, weights = torch.randint(500, (tokens,)), torch.rand(tokens)
        loss = Head(head, chunk_tokens=chunk_tokens, memory=memory).loss(hidden, targets, weights)
        loss.backward()
        return [loss, *(leaf.grad for leaf in (hidden, head) if leaf.grad is not None)]

    for tokens in (40, 33, 0, 7, 40):
        for ours, plain in zip(results(tokens, memory), results(tokens, None), strict=True):
            assert torch.equal(ours, plain)
        taken.append(memory.take(1, weight))
        memory.give_back(taken[-1])
    assert len({one.data_ptr() for one in taken}) == 1, "once the largest was there"


def test_a_loss_before_the_backward_pass_of_another_has_logits_of_its_own() -> None:
    torch.manual_seed(0)
    memory, weight = LogitsMemory(), torch.randn(500, 64).bfloat16().requires_grad_()

    def loss(hidden: Tensor, memory: LogitsMemory | None) -> Tensor:
        return Head(weight, memory=memory).loss(hidden, torch.arange(9), torch.ones(9))

    given = [torch.randn(9, 64).bfloat16() for _ in range(2)]
    losses = [loss(one, memory) for one in given]
    found: list[Tensor] = []
    for one in (*losses, *(loss(one, None) for one in given)):
        found += torch.autograd.grad(one, weight)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])
    assert not torch.equal(found[0], found[1])


@pytest.mark.parametrize(("share", "temperature"), [(0.0, 1.0), (0.3, 1.0), (0.0, 2.5), (0.4, 2.0), (1.0, 3.0)])
@pytest.mark.parametrize(("scale", "softcap", "with_bias"), [(1.0, None, False), (0.5, 2.0, True)])
@pytest.mark.parametrize(("number", "chunk_tokens"), [(53, 1000), (6, 16), (1, 37)])
def test_soft_targets_are_those_of_torch(
    share: float,
    temperature: float,
    scale: float,
    softcap: float | None,
    with_bias: bool,
    number: int,
    chunk_tokens: int,
) -> None:
    """``F.kl_div`` of full logits; with all tokens that is the divergence of the whole distributions."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16), torch.randn(53, 16)
    bias = torch.randn(53) if with_bias else None
    targets, weights = torch.randint(53, (37,)), torch.rand(37)
    top = (torch.randn(37, 53) * 3).log_softmax(1).topk(number)
    soft = Soft(top.indices, (top.values / temperature).log_softmax(1), share, temperature)
    leaves = [t.clone().requires_grad_() for t in (hidden, weight, bias) if t is not None]
    others = [t.detach().clone().requires_grad_() for t in leaves]

    head = Head(leaves[1], leaves[2] if with_bias else None, scale, softcap, chunk_tokens)
    got = head.loss(leaves[0], targets, weights, soft)
    logits = F.linear(others[0], others[1], others[2] if with_bias else None) * scale
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    student = F.log_softmax(logits / temperature, 1).gather(1, top.indices)
    teacher = F.softmax(top.values / temperature, 1)
    each = F.kl_div(student, teacher, reduction="none").sum(1)
    want = (1 - share) * temperature**2 * (each * weights).sum()
    want = want + share * (F.cross_entropy(logits, targets, reduction="none") * weights).sum()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)
    (got * 3.0).backward()
    (want * 3.0).backward()
    for leaf, other in zip(leaves, others, strict=True):
        assert leaf.grad is not None
        assert other.grad is not None
        assert float((leaf.grad - other.grad).norm() / other.grad.norm()) < 2e-6
    torch.testing.assert_close(head.divergences(hidden, soft), each.detach(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(head.loss(hidden, targets, weights, soft).detach(), want.detach(), rtol=2e-6, atol=2e-6)


def test_the_likeliest_tokens_are_those_of_full_logits() -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(37, 16), torch.randn(53, 16)
    logprobs, tokens = Head(weight, None, 0.5, 2.0, 16).top(hidden, 7, 50)
    full = (2.0 * torch.tanh(hidden @ weight.t() * 0.5 / 2.0)).log_softmax(1)
    expected = full[:, :50].topk(7)
    assert torch.equal(tokens.long(), expected.indices)
    torch.testing.assert_close(logprobs, expected.values, rtol=2e-6, atol=2e-6)
