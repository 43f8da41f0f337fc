"""Gradients in host memory: the bits of those beside the parameters, whenever they leave and come back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tape import Tape, put_on_tapes
from tonnage.errors import UserError
from tonnage.kernels.moments import Codec
from tonnage.offload.residency import OPTIMIZER, Residency
from tonnage.optim import gradients
from tonnage.optim.gradients import LEAVING, GradientsOnHost
from tonnage.optim.on_host import StateOnHost
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import TrainedParameter
from tonnage.training.nonfinite import _bad_gradient

CPU = torch.device("cpu")
WIDTH, NUM_LAYERS = 16, 6
PROMPT = list(product([False, True], [False, True]))


def taped(trained: Sequence[TrainedParameter], *, prompt: tuple[bool, bool]) -> GradientsOnHost:
    with patch.object(gradients, "Stream", Tape):
        host = GradientsOnHost(trained, device=CPU)
    put_on_tapes(host.ring, prompt)
    return host


def small_state(trained: Sequence[TrainedParameter], codec: Codec) -> StateOnHost:
    with patch.dict(OPTIMIZER, host=Residency(4, 2048)):
        return StateOnHost(trained, codec, device=CPU)


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(NUM_LAYERS)))
    for parameter in layers.parameters():
        parameter.grad_dtype = torch.float32
    return layers


def make(layers: nn.Module, on: Any, **options: Any) -> ShardedOptimizer:
    named = dict(layers.named_parameters())
    return ShardedOptimizer(named, betas=(0.9, 0.95), eps=1e-8, decay=0.1, gradients=on, **options)


def train(layers: nn.Sequential, adamw: ShardedOptimizer, num_steps: int = 5) -> list[float]:
    """Steps of several micro-batches, the second of which is skipped; not every layer has a gradient in each."""
    torch.manual_seed(1)
    norms = []
    for step in range(num_steps):
        adamw.finish()
        for number in range(3):
            used = layers[: NUM_LAYERS - (step == 2 and number == 1)]
            used(torch.randn(4, WIDTH).to(next(layers.parameters()))).float().square().sum().backward()
        norms.append(float(adamw.gradients.squared_norm()))
        if step != 1:
            adamw.step(1e-2, 0.5)
        adamw.gradients.clear(keep=True)
    adamw.finish()
    return norms


def assert_same(first: nn.Sequential, second: nn.Sequential) -> None:
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_on_host", [False, True])
@pytest.mark.parametrize("prompt", [None, *PROMPT])
def test_steps_equal_those_with_gradients_beside_the_parameters(
    dtype: torch.dtype, state_on_host: bool, prompt: tuple[bool, bool] | None
) -> None:
    here, there = model(dtype), model(dtype)
    more: dict[str, Any] = {}
    if state_on_host:
        turns = {name: int(name.split(".")[0]) for name, _ in there.named_parameters()}
        more = {"tier": small_state, "turns": turns}
    on: Any = partial(GradientsOnHost, device=CPU) if prompt is None else partial(taped, prompt=prompt)
    adamw = make(there, on, **more)
    assert train(here, make(here, gradients.GradientsInMemory)) == train(there, adamw)
    assert_same(here, there)
    assert isinstance(adamw.gradients, GradientsOnHost)
    assert not any(parameter.grad is not None for parameter in there.parameters())
    assert not adamw.gradients.ring.leaving
    assert not adamw.gradients.ring.here


@pytest.mark.parametrize("missing", ["outward.join", "inward.join", "inward.wait"])
def test_a_lane_that_waits_for_nothing_would_be_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the test above: where one stream does not wait, some schedule gives other bits."""

    def same(prompt: tuple[bool, bool]) -> bool:
        here, there = model(torch.float32), model(torch.float32)
        adamw = make(there, partial(taped, prompt=prompt))
        stream, what = missing.split(".")
        assert isinstance(adamw.gradients, GradientsOnHost)
        monkeypatch.setattr(getattr(adamw.gradients.ring, stream), what, lambda mark: None)
        train(here, make(here, gradients.GradientsInMemory), 3)
        train(there, adamw, 3)
        return all(map(torch.equal, here.parameters(), there.parameters()))

    assert not all(map(same, PROMPT))


def test_few_are_there_while_others_are_computed() -> None:
    layers = model(torch.float32)
    adamw = make(layers, partial(GradientsOnHost, device=CPU))
    host, most = adamw.gradients, 0
    assert isinstance(host, GradientsOnHost)

    def count(parameter: Tensor) -> None:
        nonlocal most
        assert parameter.grad is None
        most = max(most, len(host.ring.leaving))

    for parameter in layers.parameters():
        parameter.register_post_accumulate_grad_hook(count)
    layers(torch.randn(4, WIDTH)).square().sum().backward()
    assert most == LEAVING
    whole = sum(parameter.numel() for parameter in layers.parameters()) * 4
    assert host.copied_bytes == whole
    adamw.step(1e-2)
    assert host.copied_bytes == 2 * whole


@pytest.mark.parametrize("on", [gradients.GradientsInMemory, partial(GradientsOnHost, device=CPU)])
def test_gradients_that_were_looked_at_are_not_held(on: Any) -> None:
    """To find one that is not finite, after which the step is skipped."""
    layers = model(torch.float32)
    adamw = make(layers, on)
    job: Any = SimpleNamespace(optimizer=adamw)
    layers(torch.randn(4, WIDTH)).square().sum().backward()
    assert _bad_gradient(job) == ""
    adamw.gradients.clear()
    layers(torch.full((4, WIDTH), 1e30)).square().sum().backward()
    assert _bad_gradient(job) == "0.weight"
    adamw.gradients.clear()
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    for _ in range(2):  # micro-batches
        layers(torch.randn(4, WIDTH)).square().sum().backward()
    adamw.step(1e-3)
    for parameter, old in zip(layers.parameters(), before, strict=True):
        assert parameter.isfinite().all()
        assert not torch.equal(parameter, old)


def test_the_gradient_of_an_empty_shard_is_not_kept() -> None:
    """It is a view of what all of a block's were reduced in."""
    empty = nn.Parameter(torch.zeros(0, WIDTH))
    adamw = make(nn.ParameterDict({"empty": empty}), partial(GradientsOnHost, device=CPU))
    (empty.sum() * 2).backward()
    assert empty.grad is None
    assert adamw.gradients.names() == []


def test_memory_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.host.locked.lock", lambda memory: 2)
    with pytest.raises(UserError, match=r"memory.gradient_tier: CUDA error 2 when"):
        make(model(torch.float32), partial(GradientsOnHost, device=torch.device("cuda")))
