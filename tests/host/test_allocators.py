"""What torch is told about memory, and what the user has told it already."""

import os

import pytest

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
    choose_allocators()
    assert tuple(map(os.environ.get, NAMES)) == told
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
