"""Columns of documents: read once, however many packs ask for them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tonnage.data.packs.dataset import PackedDataset, write_packs
from tonnage.data.tokens.documents import Documents, DocumentWriter, PartTotals, part_file
from tonnage.data.tokens.encoder import Document

PER_PACK = 3


@pytest.fixture
def packed(tmp_path: Path) -> PackedDataset:
    """Twenty packs of three documents, some of them with images."""
    number, folder = 20 * PER_PACK, tmp_path / "documents" / "key"
    folder.mkdir(parents=True)
    with DocumentWriter(folder / part_file(0), images=True) as writer:
        for row in range(number):
            writer.add(row, Document(np.arange(9, dtype=np.int32), [(1, 5, 1.0)], image_tokens=row % 4))
    totals = PartTotals(rows=number, documents=number, with_images=1).to_json()
    part = {"source": 0, "files": ["rows"], "row_base": 0, "totals": totals}
    (folder / "documents.json").write_text(json.dumps({"parts": [part]}))
    arrays: dict[str, np.ndarray] = {
        "offsets": np.arange(0, number + 1, PER_PACK, dtype=np.int64),
        "documents": np.arange(number)[::-1],
        "starts": np.zeros(number, dtype=np.int32),
        "lengths": np.full(number, 9, dtype=np.int32),
        "prefixes": np.full(number, -1, dtype=np.int16),
    }
    totals = {"num_packs": 20, "num_documents": number, "num_tokens": 9 * number, "supervised_tokens": 4 * number}
    totals |= {"max_length": 9 * PER_PACK, "images": True, "common_prefixes": []}
    path = tmp_path / "packs" / "key" / "train"
    write_packs(path, "../../../documents/key", arrays, totals)
    return PackedDataset.open(path)


def test_a_column_is_read_once(packed: PackedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[int]()
    batches = Documents._batches

    def counted(self: Documents) -> Iterator[Any]:
        reads.append(1)
        return batches(self)

    monkeypatch.setattr(Documents, "_batches", counted)
    by_hand = [int(packed.image_tokens(pack).sum()) for pack in range(packed.num_packs)]
    assert sum(reads) == 1
    assert [int(packed.supervised(pack).sum()) for pack in range(packed.num_packs)] == [4 * PER_PACK] * 20
    assert sum(reads) == 2
    order = packed.first_packs(50, seed=3)
    most, mean = packed.image_tokens_of_rows(order, packs_per_step=4, workers=2, micro_batch=2)
    rows: dict[tuple[int, int, int], int] = {}
    for position, pack in enumerate(order.tolist()):
        step, within = divmod(position, 4)
        turn, worker = divmod(within, 2)
        rows[step, worker, turn // 2] = rows.get((step, worker, turn // 2), 0) + by_hand[pack]
    assert most == max(rows.values())
    assert mean == pytest.approx(sum(rows.values()) / len(rows))
    assert sum(reads) == 3, "that of shared tokens, and no other once more"
