"""Probes of a device: that they count what they claim, and that their clocks are right."""

from __future__ import annotations

import math
import mmap
import resource
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tonnage.doctor import compute

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", compute.DTYPES.values(), ids=compute.DTYPES)
def test_a_layer_has_the_operations_that_are_counted(dtype: torch.dtype) -> None:
    run = compute._layer(torch.randn(128, 32).to(dtype).requires_grad_(), tokens=24)
    with FlopCounterMode(display=False) as counter:
        gradients: Any = run()
    assert counter.get_total_flops() == 24 * 24 * 32**2
    assert [tuple(gradient.shape) for gradient in gradients] == [(24, 32), (128, 32)]
    assert {gradient.dtype for gradient in gradients} == {dtype}


def test_medians_of_rounds() -> None:
    order: list[str] = []

    def run(name: str, seconds: float) -> None:
        order.append(name)
        time.sleep(0.3 if len(order) in (1, 5) else seconds)  # the first, unseen, and one slow one

    found = compute.seconds_of({"a": lambda: run("a", 0.02), "b": lambda: run("b", 0.06)}, CPU, 0.0)
    assert order == ["a", "b"] * (1 + compute.LEAST_RUNS)
    assert 0.02 <= found["a"] < 0.3  # the slow one is no median
    assert 0.06 <= found["b"] < 0.3


def test_in_haste_the_fastest_of_few_counts() -> None:
    times = iter((0.0, 0.06, 0.02))  # unseen, disturbed, alone
    found = compute.seconds_of({"a": lambda: time.sleep(next(times))}, CPU, 0.0, in_haste=True)
    assert 0.02 <= found["a"] < 0.06


def test_rates_follow_from_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute, "seconds_of", lambda runs, *_, **__: dict.fromkeys(runs, 0.25))
    monkeypatch.setattr(compute, "HIDDEN", {"cpu": 32})
    monkeypatch.setattr(compute, "TOKENS", {"cpu": (4, 16)})
    flops = 24 * 16 * 32**2 / 0.25
    assert compute.product_flops(CPU, 0.0, 20.0) == {"fp32": flops, "bf16": flops, "fp16": flops}
    assert compute.memory_rate(CPU, 4096, 0.0) == 2 * 4096 / 0.25
    assert compute.fresh_rate(4096, 0.0) == 4096 / 0.25
    monkeypatch.setattr(compute, "seconds_of", lambda *_, **__: {"new": 0.75, "there": 0.25})
    assert compute.made_rate(2, 0.0) == 2**20 / 0.5 / 2
    monkeypatch.setattr(compute, "seconds_of", lambda runs, *_, **__: dict.fromkeys(runs, 0.25))
    assert compute.made_rate(1, 0.0) == 2**20 / 0.0025  # no less than a hundredth
    numbers = math.prod(compute.TRAFFIC_SHAPE)
    traffic = compute.traffic_rates(CPU, 0.0)
    assert traffic == {"fp32": 16 * 4 * numbers / 0.25, "bf16": 8 * 4 * numbers / 0.25, "fp16": 8 * 4 * numbers / 0.25}
    assert compute.update_rates(CPU, 3000, 0.0) == {"fp32": 12000.0, "bf16": 12000.0, "int8": 12000.0}


def test_a_type_that_is_very_slow_is_measured_on_little(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def seconds_of(runs: dict[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        asked.append(list(runs))
        return {name: 1e-3 if name != "fp16" else 30.0 for name in runs}

    monkeypatch.setattr(compute, "seconds_of", seconds_of)
    monkeypatch.setattr(compute, "HIDDEN", {"cpu": 32})
    rates = compute.product_flops(CPU, 0.0, 20.0)
    assert asked == [["fp32", "bf16", "fp16"], ["fp32", "bf16"], ["fp32", "bf16"]]
    first, *_, last = compute.TOKENS["cpu"]
    assert rates["fp16"] == 24 * first * 32**2 / 30.0
    assert rates["fp32"] == 24 * last * 32**2 / 1e-3


def test_every_page_of_fresh_memory_comes_from_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def faults_of(runs: dict[str, Any], *_: Any, **__: Any) -> dict[str, float]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        (run,) = runs.values()
        run()
        run()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        return {"write": 1.0}

    faults: list[int] = []
    monkeypatch.setattr(compute, "seconds_of", faults_of)
    compute.fresh_rate(400 * mmap.PAGESIZE, 0.0)  # too few for a page of 2 MB
    assert 800 <= faults[0] < 900


@pytest.mark.parametrize("dtype", compute.DTYPES.values())
def test_what_is_no_product_moves_what_is_counted(dtype: torch.dtype) -> None:
    """Tensors of the full size that each operation reads and makes, forward and backward."""
    run = compute._elementwise(dtype, CPU, 8, 64)
    moved = 0

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal moved
            result = function(*args, **(kwargs or {}))
            parts = [*args, *(result if isinstance(result, tuple) else (result,))]
            moved += sum(isinstance(one, torch.Tensor) and one.numel() == 8 * 64 for one in parts)
            return result

    with Counting():  # type: ignore[no-untyped-call]
        run()
    assert moved == 16


def test_updates_really_update() -> None:
    weight, gradient = torch.ones(4, 100, dtype=torch.bfloat16), torch.full((4, 100), 0.5, dtype=torch.bfloat16)
    run = compute._update(weight, gradient, "fp32")
    (parameter,) = [cell.cell_contents for cell in run.__closure__ or ()]
    run()
    run()
    assert parameter.num_steps == 2
    assert parameter.state_bytes == 4 * 100 * (2 + 8)
