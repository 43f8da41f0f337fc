"""What is asked of torch and cuBLAS where the same bits are wanted, and of whom nothing is."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tonnage.parallel.deterministic import FILLS, WORKSPACE, compute_the_same


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(WORKSPACE, raising=False)
    fills = getattr(torch.utils.deterministic, FILLS)
    yield
    torch.use_deterministic_algorithms(False)
    setattr(torch.utils.deterministic, FILLS, fills)


def asked(kind: str) -> tuple[bool, str | None]:
    compute_the_same(torch.device(kind))
    return torch.are_deterministic_algorithms_enabled(), os.environ.get(WORKSPACE)


def test_a_gpu_is_asked_and_a_cpu_is_not() -> None:
    assert asked("cpu") == (False, None)
    assert asked("cuda") == (True, ":4096:8")
    assert not getattr(torch.utils.deterministic, FILLS)


@pytest.mark.parametrize(("said", "found"), [(":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")])
def test_workspaces_of_fixed_sizes_are_kept(said: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, said)
    assert asked("cuda") == (True, found)
