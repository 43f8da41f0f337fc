"""What is asked of torch and cuBLAS where the same bits are wanted, and of whom nothing is."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tonnage.model import flash
from tonnage.parallel.deterministic import FILLS, WORKSPACE, compute_the_same
from tonnage.training import assemble
from tonnage.training.setting import WorkerSetting


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


@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_asks_if_its_config_does(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = list[torch.device]()
    config, layout = SimpleNamespace(deterministic=wanted), SimpleNamespace(kernels_off=())
    world = SimpleNamespace(device=torch.device("cuda", 0))
    monkeypatch.setattr(assemble, "check_tiers", lambda *_: None)
    monkeypatch.setattr(assemble, "compute_the_same", devices.append)
    asked = dict[str, Any]()

    def goes_on(*_: Any, **named: Any) -> None:
        asked.update(named)
        raise KeyError("goes on")

    monkeypatch.setattr(flash, "choose", goes_on)
    plan, phases = SimpleNamespace(layout=layout), None
    setting: Any = WorkerSetting(config, plan, world, print, phases)  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="goes on"):
        assemble.assemble(setting)
    assert devices == [world.device] * wanted
    assert asked == {"newer": not wanted}


@pytest.mark.parametrize(("said", "found"), [(":16:8", ":16:8"), (":4096:2:16:8", ":4096:8")])
def test_workspaces_of_fixed_sizes_are_kept(said: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKSPACE, said)
    assert asked("cuda") == (True, found)
