"""What torch is told about memory, and what the user has told it already."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tonnage.host import allocators
from tonnage.host.allocators import choose_allocators

NAMES = ("THP_MEM_ALLOC_ENABLE", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({}, ("1", "expandable_segments:True", None)),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, ("1", "backend:cudaMallocAsync", None)),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, ("1", None, "max_split_size_mb:64")),
        ({"THP_MEM_ALLOC_ENABLE": "0"}, ("0", "expandable_segments:True", None)),
    ],
)
def test_what_the_user_said_stays(
    said: dict[str, str], told: tuple[str | None, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(allocators, "DRIVER", Path("/nowhere"))
    monkeypatch.setattr(allocators, "BALLOON", Path("/nowhere"))
    choose_allocators()
    assert tuple(map(os.environ.get, NAMES)) == told
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("bits", "told"), [("011001" + "0" * 122, "0"), ("011000" + "0" * 122, "1"), ("", "1")])
def test_no_huge_pages_where_the_host_takes_back_what_is_free(
    bits: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "virtio0").mkdir()
    (tmp_path / "virtio0" / "features").write_text(bits + "\n")
    monkeypatch.setattr(allocators, "BALLOON", tmp_path)
    monkeypatch.delenv(allocators.HUGE_PAGES, raising=False)
    choose_allocators()
    assert os.environ.get(allocators.HUGE_PAGES) == told
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def missing(name: str) -> Any:
    raise OSError(f"{name}: cannot open shared object file")


def answering(status: int) -> Callable[[str], Any]:
    return lambda name: SimpleNamespace(nvmlInit_v2=lambda: status, nvmlShutdown=lambda: 0)


@pytest.mark.parametrize(
    ("driver", "library", "told"),
    [
        (True, answering(0), "expandable_segments:True"),
        (True, answering(18), None),  # a driver of another version
        (True, missing, None),
        (False, missing, "expandable_segments:True"),
    ],
)
def test_segments_grow_where_torch_can_ask_what_it_asks_before(
    driver: bool, library: Callable[[str], Any], told: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or it fails as it takes the first memory: in a container that has the driver's part for computing alone."""
    file = tmp_path / "nvidiactl"
    if driver:
        file.touch()
    monkeypatch.setattr(allocators, "DRIVER", file)
    monkeypatch.setattr(allocators, "CDLL", library)
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    choose_allocators()
    assert os.environ.get("PYTORCH_ALLOC_CONF") == told
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
