"""Where a rank computes: as the plan says, and not as the machine happens to be."""

from __future__ import annotations

import pytest
import torch

from tonnage.errors import UserError
from tonnage.parallel.world import join_world


@pytest.mark.parametrize(("seen", "number"), [(0, 0), (2, 2), (2, 5)])
def test_a_plan_for_gpus_is_not_carried_out_without(seen: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setenv("LOCAL_RANK", str(number))
    with pytest.raises(UserError, match=f"{seen} GPUs on .*worker {number}"), join_world(device_type="cuda"):
        pytest.fail("joined")


def test_a_plan_for_cpus_stays_there_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with join_world(device_type="cpu") as world:
        assert (world.device.type, world.backend) == ("cpu", "gloo")
