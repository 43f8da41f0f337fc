"""Where a rank computes: as the plan says, and not as the machine happens to be."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import torch.distributed as dist

from tonnage.errors import UserError
from tonnage.parallel import world
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
    with join_world(device_type="cpu") as joined:
        assert (joined.device.type, joined.backend) == ("cpu", "gloo")


def test_texts_of_ranks_come_whole() -> None:
    with join_world(device_type="cpu") as joined:
        assert joined.gather("ж" * 5000) == ["ж" * 5000]


@pytest.mark.parametrize(("capability", "refused"), [((7, 0), True), ((7, 5), False), ((12, 1), False)])
def test_a_gpu_that_torch_was_not_built_for_is_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_90a", "sm_120", "compute_120"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100")
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: (_ for _ in ()).throw(KeyError("began")))
    expected = (
        (UserError, "Tesla V100, of compute capability 7.0.*for 7.5 and newer") if refused else (KeyError, "began")
    )
    with pytest.raises(expected[0], match=expected[1]), join_world(device_type="cuda"):
        pytest.fail("joined")


@pytest.mark.parametrize(("kind", "size", "left"), [("cuda", 2, 0), ("cuda", 1, 1), ("cpu", 1, 1)])
def test_a_worker_that_fails_on_a_gpu_does_not_wait_for_the_others(
    kind: Literal["cpu", "cuda"], size: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends a group when all have come to the end of it; the others wait in a collective for this one."""
    calls = list[str]()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(world, "_check_built_for", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: calls.append(backend))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: calls.append("left"))
    monkeypatch.setattr(world, "device_mesh", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="failed"), join_world(device_type=kind):
        raise RuntimeError("failed")
    assert calls == [{"cuda": "nccl", "cpu": "gloo"}[kind], *["left"] * left]
