"""Packs are dealt to ranks so that every pack is trained once and every rank runs as many forward passes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tonnage.data import Pack, pack_at
from tonnage.data.packs.padding import in_chunks
from tonnage.data.packs.prefixes import Prefix
from tonnage.kernels.dropout import token_keys
from tonnage.model.attention import Shared
from tonnage.training.batch import (
    Deal,
    MicroBatch,
    PackedDocument,
    documents_of,
    draw_of,
    evaluation_steps,
    training_steps,
)


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
    none = np.full(len(lengths), -1, np.int16)
    return Pack(ids, weights, np.array(lengths, np.int32), np.arange(len(lengths)) + first, none, none * 0)


def begun(*documents: tuple[list[int], int]) -> Pack:
    """Documents of these tokens, each of which is supervised from the third on, and their prefixes."""
    tokens = [np.array(ids, np.int32) for ids, _ in documents]
    weights = [(np.arange(len(ids)) >= 2).astype(np.float32) * ids for ids in tokens]
    return Pack(
        np.concatenate(tokens),
        np.concatenate(weights),
        np.array([len(ids) for ids in tokens], np.int32),
        np.arange(len(tokens)) + 50,
        np.array([prefix for _, prefix in documents], np.int16),
        np.zeros(len(tokens), np.int32),
    )


def test_a_micro_batch_is_its_documents_side_by_side() -> None:
    batch = MicroBatch.of([pack([3, 1], 10), pack([2], 50)])
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 50, 51]]
    assert batch.lengths == (3, 1, 2)
    assert batch.positions.tolist() == [0, 1, 4]
    assert batch.targets.tolist() == [11, 12, 51]
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert batch.documents == (10, 11, 50)
    assert batch.num_tokens == 6


def test_what_documents_begin_with_is_there_once() -> None:
    prefixes = (Prefix(2, -1), Prefix(4, 0), Prefix(3, -1))
    header, passage, other = [1, 2], [1, 2, 3, 4], [7, 8, 9]
    one = begun(([*passage, 10], 1), ([*header, 11], 0), ([5, 6], -1), ([*other, 12], 2))
    two = begun(([*passage, 13, 14], 1), ([*header, 15], 0))
    batch = MicroBatch.of([one, two], prefixes)
    # header | passage | its two | the two that go on from the header | alone | other, which only one has
    assert batch.input_ids.tolist() == [[1, 2, *(3, 4), 10, *(13, 14), 11, 15, *(5, 6), *(7, 8, 9, 12)]]
    assert batch.lengths == (2, 2, 1, 2, 1, 1, 2, 4)
    assert set(batch.shared) == {Shared(0, 5), Shared(1, 2)}
    assert batch.documents == (50, 50, 51, 51, 52, 53)
    assert batch.owners == [range(4), range(2), *(range(n, n + 1) for n in range(6))]
    # Every target comes from the same place as in its document: from the last of its own before, or of a prefix.
    by_target = list(zip(batch.positions.tolist(), batch.targets.tolist(), strict=True))
    assert by_target == [
        *((1, 3), (2, 4), (3, 10)),
        *((1, 3), (2, 4), (3, 13), (5, 14)),
        *((1, 11), (1, 15), (12, 9), (13, 12)),
    ]
    assert batch.weights.tolist() == batch.targets.tolist()
    plain = MicroBatch.of([one, two])
    assert plain.shared == ()
    assert plain.lengths == (5, 3, 2, 4, 6, 3)
    assert sorted(plain.targets.tolist()) == sorted(batch.targets.tolist())
    assert batch.rounded(8).shared == batch.shared


def test_prefixes_that_go_on_in_one_way_only_are_one_part() -> None:
    prefixes = (Prefix(2, -1), Prefix(4, 0))
    batch = MicroBatch.of([begun(([1, 2, 3, 4, 10], 1), ([1, 2, 3, 4, 11], 1))], prefixes)
    assert batch.lengths == (4, 1, 1)
    assert batch.shared == (Shared(0, 2),)


def test_rounded_sizes_change_no_number_of_a_step() -> None:
    batch = MicroBatch.of([pack([3, 1], 10), pack([2], 50)]).rounded(4)
    assert batch.input_ids.tolist() == [[10, 11, 12, 13, 50, 51, 0, 0]]
    assert batch.lengths == (3, 1, 2, 2)
    assert batch.weights.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert len(batch.positions) == len(batch.targets) == 4
    assert batch.documents == (10, 11, 50)
    assert batch.rounded(4).lengths == batch.lengths

    class Data:
        num_packs, common_prefixes = 3, ()

        def pack(self, index: int) -> Pack:
            return pack([5 + index, 2], 100)

        def lengths(self, index: int) -> np.ndarray:
            return self.pack(index).lengths

    plain, rounded = (
        [
            (step.tokens, step.supervised_tokens, step.weight, step.next_position)
            for step in evaluation_steps(Data(), Deal(2, 1, 0, 1, round_to=to))  # type: ignore[arg-type]
        ]
        for to in (1, 16)
    )
    assert plain == rounded
    assert plain[0][0] == 7 + 8


def by_token(batch: MicroBatch) -> dict[tuple[int, int], int]:
    """The keys of a micro-batch's tokens, by their documents and positions in these."""
    keys, begin, found = batch.keys(), 0, dict[tuple[int, int], int]()
    assert keys is not None
    assert len(keys) == batch.num_tokens
    for document, length, start in zip(batch.documents, batch.lengths, batch.starts, strict=False):
        found |= {(document, start + at): int(keys[begin + at]) for at in range(length)}
        begin += batch.input_ids.shape[1] if batch.is_padded else length
    return found


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("padded", [0, 30])
def test_keys_of_tokens_are_the_same_in_every_layout(world_size: int, padded: int) -> None:
    found: dict[tuple[int, int, int], int] = {}
    for rank in range(world_size):
        deal = Deal(4, 1 + rank, rank, world_size, 8, padded_tokens=padded)
        for step in training_steps(Several(), deal, seed=3, num_packs=8):  # type: ignore[arg-type]
            for batch in step.micro_batches:
                found |= {(step.number, *token): key for token, key in by_token(batch).items()}
    assert len(found) > 2 * 4 * 4
    assert len(set(found.values())) == len(found)
    for (number, document, position), key in found.items():
        assert int(token_keys(draw_of(3, number), np.array([document]), np.array([position]))) == key
    assert all(one.keys() is None for step in evaluation_steps(Several(), deal) for one in step.micro_batches)  # type: ignore[arg-type]


def test_the_pieces_of_a_document_have_keys_of_their_own() -> None:
    whole = pack([9], 40)
    pieces = replace(pack([4, 5], 40), documents=np.array([40, 40]), starts=np.array([0, 4], np.int32))
    found = [by_token(replace(MicroBatch.of([one]), draw=7)) for one in (whole, pieces)]
    assert found[0] == found[1]
    rows = [PackedDocument(np.zeros(n, int), np.zeros(n), 40, -1, start) for n, start in ((5, 4), (4, 0))]
    assert by_token(replace(MicroBatch.padded(rows, 8), draw=7)) == found[0]


def test_a_blank_supervises_nothing() -> None:
    blank = MicroBatch.blank()
    assert blank.num_tokens == 1
    assert len(blank.targets) == len(blank.positions) == 0
    assert blank.weights.dtype == torch.float32


class Several:
    """Packs of documents of varied length, all of whose tokens but the first are supervised."""

    num_packs, common_prefixes = 6, ()

    def pack(self, index: int) -> Pack:
        return pack([1 + (7 * index + 3 * at) % 11 for at in range(4)], 100 * index)

    def lengths(self, index: int) -> np.ndarray:
        return self.pack(index).lengths

    def row_lengths(self, index: int, chunk: int = 1) -> np.ndarray:
        return in_chunks(self.lengths(index), chunk)

    def pack_at(self, position: int, seed: int) -> int:
        return pack_at(position, self.num_packs, seed)

    def dealt(self, order: np.ndarray, **_: object) -> np.ndarray:
        return order


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("round_to", [1, 8])
def test_padded_rows_are_the_same_step(world_size: int, round_to: int) -> None:
    """The documents of a step, its tokens and its weight; every rank has as many forwards, of limited size."""
    for number in range(2):
        found = []
        for padded in (0, 30):
            dealt = [Deal(4, 1, rank, world_size, round_to, padded_tokens=padded) for rank in range(world_size)]
            found.append([list(evaluation_steps(Several(), deal))[number] for deal in dealt])  # type: ignore[arg-type]
        packed, rows = found
        for one, other in zip(packed, rows, strict=True):
            assert (one.tokens, one.weight, one.next_position) == (other.tokens, other.weight, other.next_position)
            documents = [sorted(d for batch in step.micro_batches for d in batch.documents) for step in (one, other)]
            assert documents[0] == documents[1]
            for batch in other.micro_batches:
                assert batch.is_padded
                assert batch.num_tokens <= 30 + round_to * len(batch.lengths)
                flat = batch.input_ids.flatten()
                assert torch.equal(flat[batch.positions + 1], batch.targets), "a target is the next token of its row"
                width = batch.input_ids.shape[1]
                assert torch.equal(batch.positions // width, (batch.positions + 1) // width)
        assert len({len(step.micro_batches) for step in rows}) == 1


def test_a_blank_of_padded_rows_is_padded() -> None:
    assert MicroBatch.blank(is_padded=True).is_padded


def carrying(one: Pack) -> Pack:
    return replace(one, carried={"score": one.documents * 0.5})


def test_every_target_has_the_numbers_of_its_document() -> None:
    """In one row, in rows of their own, filled up, and where documents share what they begin with."""
    first, second = begun(([5, 6, 7, 8, 9], 1), ([5, 6, 7, 1, 2, 3], 1)), pack([7, 4], 100)
    second = replace(second, documents=np.array([90, 91]))
    prefixes = [Prefix(2, -1), Prefix(3, 0)]
    scores: dict[int, set[float]] = {}
    for batch in (
        MicroBatch.of([carrying(first), carrying(second)]),
        MicroBatch.of([carrying(first), carrying(second)], prefixes),
        MicroBatch.padded(
            sorted(
                [one for part in (first, second) for one in documents_of(carrying(part))],
                key=lambda one: -len(one.tokens),
            )
        ),
    ):
        for target, weight, score in zip(batch.targets, batch.weights, batch.columns["score"], strict=True):
            scores.setdefault(int(target) * 1000 + int(weight), set()).add(float(score))
        filled = batch.rounded(16)
        assert len(filled.columns["score"]) == len(filled.targets)
        assert filled.columns["score"].dtype == torch.float32
    # The targets tell documents apart: 7, 8, 9 are of the first, 1, 2, 3 of the second but for the 7 of both.
    assert {next(iter(of)) for key, of in scores.items() if key // 1000 in (8, 9)} == {25.0}
    assert {next(iter(of)) for key, of in scores.items() if key // 1000 in (1, 2, 3)} == {25.5}
    assert scores[7007] == {25.0, 25.5}
    assert {next(iter(of)) for key, of in scores.items() if 100 < key // 1000 < 107} == {45.0}
    assert {next(iter(of)) for key, of in scores.items() if key // 1000 > 107} == {45.5}
    assert all(len(of) == 1 for key, of in scores.items() if key != 7007)
    assert MicroBatch.of([first]).columns == {}
