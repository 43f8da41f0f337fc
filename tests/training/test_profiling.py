"""Profiling: every operation has the cause that a reader of the model's code would give it, and none counts twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tonnage.training.head import Head
from tonnage.training.profiling import (
    ATTENTION,
    BETWEEN,
    CAUSES,
    ELEMENTWISE,
    HEAD,
    PRODUCTS,
    UPDATE,
    sum_up,
)


def test_operations_are_told_apart_forward_and_backward() -> None:
    inputs, weight = torch.randn(64, 32, requires_grad=True), torch.randn(96, 32, requires_grad=True)
    vocabulary = torch.randn(50, 32, requires_grad=True)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    profiler.start()
    with torch.profiler.record_function("tonnage: forward"):
        heads = F.linear(inputs, weight).view(1, 64, 3, 32).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        hidden = F.layer_norm(attended[0, 0] * 2.0, (32,))
        targets, weights = torch.arange(50), torch.ones(50)
        loss = Head(vocabulary).loss(hidden[:50], targets, weights)
    with torch.profiler.record_function("tonnage: backward"):
        loss.backward()
    with torch.profiler.record_function("tonnage: update"), torch.no_grad():
        weight.add_(torch.mm(weight, weight.t()) @ weight)
    profiler.stop()
    events = profiler.events()
    took = sum(one.cpu_time_total for one in events if one.name.startswith("tonnage: ")) / 1e6
    causes, operations = sum_up(events, on_device=False)
    names = {cause: {one["name"] for one in operations if one["cause"] == cause} for cause in CAUSES}
    assert "aten::mm" in names[PRODUCTS]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu_backward" in names[ATTENTION]
    assert {"aten::native_layer_norm", "aten::mul"} <= names[ELEMENTWISE]
    assert {"aten::mm", "aten::logsumexp"} <= names[HEAD]  # its products are its own
    assert "aten::mm" in names[UPDATE]
    assert {"forward", "backward"} <= names[BETWEEN]
    calls = {one["cause"]: one["calls"] for one in operations if one["name"] == "aten::mm"}
    assert calls[PRODUCTS] == 3  # forward, and two in backward
    assert calls[HEAD] == 3
    assert calls[UPDATE] == 2
    assert sum(causes.values()) == pytest.approx(took, rel=0.02)


def test_kernels_of_a_device_count_once() -> None:
    """As torch tells a trace of CUDA: an operation with the time of its kernels, and each kernel by itself."""

    def event(name: str, parent: Any, seconds: float, kind: str) -> Any:
        times = {"self_cpu_time_total": 0.0, "self_device_time_total": 1e6 * seconds}
        return SimpleNamespace(name=name, cpu_parent=parent, device_type=SimpleNamespace(name=kind), **times)

    forward = event("tonnage: forward", None, 0.0, "CPU")
    events = [
        forward,
        event("aten::mm", forward, 2.0, "CPU"),
        event("ampere_bf16_gemm", None, 2.0, "CUDA"),
        event("aten::add", forward, 0.5, "CPU"),
        event("vectorized_elementwise_kernel", None, 0.5, "CUDA"),
    ]
    causes, operations = sum_up(events, on_device=True)
    assert sum(causes.values()) == 2.5
    assert causes[PRODUCTS] == 2.0
    assert {one["name"] for one in operations if one["seconds"]} == {"aten::mm", "aten::add"}
