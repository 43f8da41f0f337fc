"""The limit on locked memory: read, raised, and lowered for a trial."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import torch

from tonnage.doctor import compute
from tonnage.errors import UserError
from tonnage.host import lockable, locked

KEY = resource.RLIMIT_MEMLOCK


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What this process seems to have, soft and hard."""
    now = [1 << 16, 8 << 20]
    monkeypatch.setattr(resource, "getrlimit", lambda key: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda key, limits: now.__setitem__(slice(None), limits))
    return now


def test_a_limit_is_raised_as_far_as_it_may_be(limit: list[int]) -> None:
    assert lockable.lockable_bytes() == 8 << 20
    assert lockable.limit_in_words() == "8.39 MB"
    with lockable.limited_to(1 << 20):
        assert limit == [1 << 16, 8 << 20]
    lockable.raise_limit()
    assert limit == [8 << 20, 8 << 20]
    with lockable.limited_to(1 << 20):
        assert limit == [1 << 20, 8 << 20]
    assert limit == [8 << 20, 8 << 20]
    limit[:] = [resource.RLIM_INFINITY] * 2
    assert (lockable.lockable_bytes(), lockable.limit_in_words()) == (None, "no limit")


def test_the_system_s_own_limit_is_read_and_raised() -> None:
    """In a process of its own, whose soft limit is lower than its hard one."""
    code = (
        "import resource as r\n"
        "from tonnage.host.lockable import lockable_bytes, raise_limit\n"
        "hard = r.getrlimit(r.RLIMIT_MEMLOCK)[1]\n"
        "most = 1 << 20 if hard == r.RLIM_INFINITY else min(hard, 1 << 20)\n"
        "r.setrlimit(r.RLIMIT_MEMLOCK, (4096, most))\n"
        "raise_limit()\n"
        "assert r.getrlimit(r.RLIMIT_MEMLOCK) == (most, most)\n"
        "assert lockable_bytes() == most\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("most", [1 << 16, 8 << 20, 1 << 40])
@pytest.mark.parametrize("keeps_to_it", [True, False])
def test_a_driver_is_tried_with_more_than_the_limit(
    limit: list[int], monkeypatch: pytest.MonkeyPatch, keeps_to_it: bool, most: int
) -> None:
    limit[:] = [min(most, 1 << 16), most]

    def lock(memory: torch.Tensor) -> int:
        return 2 if keeps_to_it and memory.nbytes > limit[0] else 0

    monkeypatch.setattr(compute, "lock", lock)
    assert compute.counts_locked() is keeps_to_it
    assert limit == [most, most]
    monkeypatch.setattr(compute, "lock", lambda memory: 2)  # nothing can be locked, whatever the limit
    assert compute.counts_locked() is False


def test_what_cannot_be_locked_is_refused_with_the_limit(limit: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locked, "lock", lambda memory: 2)
    with pytest.raises(UserError, match=r"CUDA error 2(.|\n)*here ulimit -l has 8\.39 MB"):
        locked.locked_for("memory.optimizer_tier", 4096, torch.device("cuda"), "memory.optimizer_tier=device")
    assert limit == [8 << 20, 8 << 20]
