"""The heap is trimmed when the process outgrows its first step, or what was planned, and not for what came to stay."""

from __future__ import annotations

import sys

import pytest

from tonnage.training import memory
from tonnage.training.memory import HeapLimit


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is resident")
def test_what_came_to_stay_is_not_trimmed_for(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[int] = []
    monkeypatch.setattr(memory, "_malloc_trim", lambda: trims.append)
    limit = HeapLimit()
    limit.after_step()
    resident = memory._resident_bytes()
    assert resident is not None
    grown = bytearray(resident)  # touched, so resident
    limit.after_step(besides=len(grown))
    assert trims == []
    limit.after_step()
    assert trims == [0]


def test_what_was_planned_is_not_trimmed_for_and_what_was_not_is_between_micro_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With sizes as if the system told them: what a process that has done much takes, it may have had before."""
    trims: list[int] = []
    resident = 500_000_000
    monkeypatch.setattr(memory, "_malloc_trim", lambda: trims.append)
    monkeypatch.setattr(memory, "_resident_bytes", lambda: resident)
    limit, unplanned = HeapLimit(planned=80e6), HeapLimit()
    resident += 60_000_000
    limit.after_passes()
    limit.after_step()
    assert trims == []
    resident += 60_000_000
    limit.after_passes()
    assert trims == [0]
    limit.after_passes()  # it gained nothing by it, and does not try again
    assert trims == [0]
    unplanned.after_passes()  # it knows nothing yet
    assert trims == [0]
