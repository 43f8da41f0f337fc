"""Whether a model that only answers has room on a GPU, and what is said where its blocks cannot rest elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tonnage.parallel.host_blocks import has_no_room

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


class Special(nn.Parameter):
    """As those of other libraries' quantization."""


@pytest.mark.parametrize(
    ("free", "reserved", "allocated", "expected"),
    [
        (1000, 0, 0, False),
        (443, 0, 0, True),  # of 400 bytes
        (445, 0, 0, False),
        (100, 400, 50, False),  # torch holds what nobody uses
        (100, 400, 150, True),
    ],
)
def test_weights_have_a_part_of_what_is_free(
    free: int, reserved: int, allocated: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: allocated)
    model = nn.Linear(10, 10, bias=False)
    assert has_no_room(model, CUDA) == expected
    assert not has_no_room(model, CPU)
    with torch.device("meta"):
        assert has_no_room(nn.Linear(10, 10, bias=False), CUDA) == expected
    model.weight = Special(torch.zeros(10, 10))
    assert not has_no_room(model, CUDA)
