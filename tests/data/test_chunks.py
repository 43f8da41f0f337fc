"""Rows are taken through in chunks that fit into the memory, whatever the rows hold."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.data.building.builder import CHUNK_CHARACTERS, CHUNK_ROWS, _chunks

HALF = CHUNK_CHARACTERS // 2
DEEP: list[Any] = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "most_rows"),
    [
        ("x" * HALF, 2),
        ({"bytes": b"x" * HALF, "path": None}, 2),
        ([{"role": "user", "content": "x" * HALF}], 2),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x" * HALF}}]}], 2),
        ([1] * (HALF // 8), 2),
        (["x"] * 3, CHUNK_ROWS),
        (DEEP, CHUNK_ROWS),
        (None, CHUNK_ROWS),
    ],
    ids=["text", "image", "messages", "image in a message", "tokens", "words", "deep", "nothing"],
)
def test_chunks_hold_about_a_megabyte(value: Any, most_rows: int) -> None:
    chunks = list(_chunks((number, {"value": value}) for number in range(CHUNK_ROWS + 1)))
    assert {len(chunk) for chunk in chunks[:-1]} == {most_rows}
    assert sum(map(len, chunks)) == CHUNK_ROWS + 1
