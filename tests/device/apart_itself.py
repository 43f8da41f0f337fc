"""A worker without others that computes on the device ``apart``, rightly and wrongly."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from device import apart
from device import apart_order as order


def numbers(device: str) -> list[Tensor]:
    """Forward and backward, views, indices, types and what is changed in place."""
    draw = torch.Generator().manual_seed(0)
    rows, weight = (torch.randn(4, 6, generator=draw).to(device).requires_grad_() for _ in range(2))
    output = F.softmax(rows @ weight.t(), -1)
    output.square().sum().backward()
    changed = output.detach().clone()
    changed[:, 1:3] *= 2
    changed.view(-1)[::3].add_(torch.arange(6, device=device))
    half = changed.bfloat16()
    picked = changed[torch.tensor([3, 1])], changed.nonzero(), changed.split(2, dim=1)[1], half.view(torch.int16)
    assert rows.grad is not None
    assert weight.grad is not None
    return [one.detach().cpu() for one in (output, rows.grad, weight.grad, changed, half, *picked)]


def mixed() -> list[str]:
    """Which operations refuse a tensor of the CPU."""
    here, there = torch.ones(3), torch.ones(3, device=apart.NAME)
    operations: dict[str, Callable[[], Tensor]] = {"own": lambda: here + there, "cat": lambda: torch.cat([here, there])}
    return [name for name, operation in operations.items() if "same device" in failure(RuntimeError, operation)]


def failure(kind: type[Exception], operation: Callable[[], Any]) -> str:
    """What an operation fails with."""
    try:
        operation()
    except kind as error:
        return str(error)
    return ""


def raced() -> list[str]:
    """Which of three operations that wait for too little are found."""
    beside, numbers = order.Stream(), [torch.zeros(8, device=apart.NAME)]

    def write() -> None:
        with order.stream(beside):
            numbers[0].add_(1)

    def free() -> None:
        numbers.clear()
        torch.ones(2, device=apart.NAME)

    found = ["write"] if failure(order.Race, write) else []
    beside.wait_stream(order.current_stream())
    write()
    return [*found, *(one.__name__ for one in (read_of(numbers), free) if failure(order.Race, one))]


def read_of(numbers: list[Tensor]) -> Callable[[], Any]:
    def read() -> Tensor:
        return numbers[0].sum()

    return read


def waited() -> float:
    number, beside = torch.zeros(8, device=apart.NAME), order.Stream()
    beside.wait_stream(order.current_stream())
    with order.stream(beside):
        number.add_(1)
    order.current_stream().wait_stream(beside)
    return number.sum().item()


def main(told: list[str]) -> None:
    apart.register()
    same = all(one.equal(other) for one, other in zip(numbers(apart.NAME), numbers("cpu"), strict=True))
    found = {"same": same, "mixed": mixed(), "waited": waited()}
    gc.collect()
    print(json.dumps(found | {"left": apart.allocated.now, "raced": raced()}))
