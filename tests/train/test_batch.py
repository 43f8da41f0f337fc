"""Packs are dealt to ranks so that every pack is trained once and every rank runs as many forward passes."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.data import Pack
from tonnage.train.batch import Deal, MicroBatch, evaluation_steps


@given(
    start=st.integers(0, 1000),
    count=st.integers(1, 50),
    world_size=st.integers(1, 9),
    micro_batch=st.integers(1, 8),
)
def test_every_position_is_dealt_once_and_ranks_stay_in_step(
    start: int, count: int, world_size: int, micro_batch: int
) -> None:
    positions = range(start, start + count)
    shares = [Deal(count, micro_batch, rank, world_size).share(positions) for rank in range(world_size)]
    dealt = sorted(position for share in shares for part in share for position in part)
    assert dealt == list(positions)
    assert len({len(share) for share in shares}) == 1
    assert max(len(part) for share in shares for part in share) <= micro_batch
    assert len(shares[0]) == math.ceil(math.ceil(count / world_size) / micro_batch)


def pack(lengths: list[int], first: int) -> Pack:
    total = sum(lengths)
    weights = np.ones(total, np.float32)
    weights[np.cumsum([0, *lengths[:-1]])] = 0
    ids = np.arange(first, first + total, dtype=np.int32)
    return Pack(ids, weights, np.array(lengths, np.int32), np.arange(len(lengths)) + first)


def test_a_micro_batch_is_its_documents_side_by_side() -> None:
    batch = MicroBatch.of([pack([3, 1], 10), pack([2], 50)])
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 50, 51]]
    assert batch.lengths == (3, 1, 2)
    assert batch.positions.tolist() == [0, 1, 4]
    assert batch.targets.tolist() == [11, 12, 51]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert batch.documents == (10, 11, 50)
    assert batch.num_tokens == 6


def test_rounded_sizes_change_no_number_of_a_step() -> None:
    batch = MicroBatch.of([pack([3, 1], 10), pack([2], 50)]).rounded(4)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 50, 51, 0, 0]]
    assert batch.lengths == (3, 1, 2, 2)
    assert batch.weights.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert len(batch.positions) == len(batch.targets) == 4
    assert batch.documents == (10, 11, 50)
    assert batch.rounded(4).lengths == batch.lengths

    class Data:
        num_packs = 3

        def pack(self, index: int) -> Pack:
            return pack([5 + index, 2], 100)

    plain, rounded = (
        [
            (step.tokens, step.supervised_tokens, step.weight, step.next_position)
            for step in evaluation_steps(Data(), Deal(2, 1, 0, 1, round_to=to))  # type: ignore[arg-type]
        ]
        for to in (1, 16)
    )
    assert plain == rounded
    assert plain[0][0] == 7 + 8


def test_a_blank_supervises_nothing() -> None:
    blank = MicroBatch.blank()
    assert blank.num_tokens == 1
    assert len(blank.targets) == len(blank.positions) == 0
    assert blank.weights.dtype == torch.float32
