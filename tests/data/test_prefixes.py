"""What documents begin with alike is found by definition, and rows that have it once are as long as was said."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conftest import write_rows
from tonnage.config import Data, Source
from tonnage.data import first_packs, pack_at
from tonnage.data.packs.dataset import PackedDataset
from tonnage.data.packs.prefixes import LEAST, MOST, RARE, Prefix, chain, find_prefixes, within
from tonnage.data.prepare import prepare
from tonnage.data.tokens.documents import Lists
from tonnage.training.batch import Deal, MicroBatch, training_steps


def common(documents: Sequence[np.ndarray]) -> int:
    """Tokens that all begin with, each going on after them; by definition."""
    most = min(map(len, documents)) - 1
    return next((at for at in range(most) if len({int(document[at]) for document in documents}) > 1), most)


@st.composite
def rows_of_documents(draw: st.DrawFn) -> list[np.ndarray]:
    """Documents made of a few blocks of tokens, so that many begin alike, to different depths."""
    blocks = [np.arange(size) + 100 * number for number, size in enumerate((3, 9, 14, 17, 30))]
    made = []
    for _ in range(draw(st.integers(1, 9))):
        chosen = draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=4))
        made.append(np.concatenate([blocks[number] for number in chosen]).astype(np.int32))
    return made


@settings(deadline=None)
@given(batches=st.lists(rows_of_documents(), min_size=1, max_size=4))
def test_prefixes_are_what_all_have_in_common_that_go_on_alike(batches: list[list[np.ndarray]]) -> None:
    prefixes, which = find_prefixes(Lists(np.cumsum([0, *map(len, batch)]), np.concatenate(batch)) for batch in batches)
    documents = [document for batch in batches for document in batch]
    found = {}
    for number, one in enumerate(prefixes):
        members = [at for at in range(len(documents)) if number in chain(prefixes, which[at])]
        found[tuple(members)] = one.length

    expected = {}  # by definition, from the whole to its parts
    waiting = [(list(range(len(documents))), 0)]
    while waiting:
        members, begin = waiting.pop()
        by_next: dict[bytes, list[int]] = {}
        for at in members:
            if len(documents[at]) > begin + LEAST:
                by_next.setdefault(documents[at][begin : begin + LEAST].tobytes(), []).append(at)
        for those in by_next.values():
            if len(those) > 1:
                expected[tuple(those)] = common([documents[at] for at in those])
                waiting.append((those, expected[tuple(those)]))
    assert found == expected


def test_a_prefix_goes_on_in_others() -> None:
    header, passage = np.arange(20), np.arange(20, 120)
    ends = [np.array([1000 + number]) for number in range(6)]
    parts = [[header, passage], [header], [header], [header, passage], [header], []]
    documents = [np.concatenate([*part, end]) for part, end in zip(parts, ends, strict=True)]
    prefixes, which = find_prefixes([Lists(np.cumsum([0, *map(len, documents)]), np.concatenate(documents))])
    assert prefixes == (Prefix(20, -1), Prefix(120, 0))
    assert which.tolist() == [1, 0, 0, 1, 0, -1]
    assert chain(prefixes, 1) == (0, 1)
    cut = within(prefixes, which, np.array([121, 21, 20, 120, 19, 1]))
    assert cut.tolist() == [1, 0, -1, 0, -1, -1], "each goes on after it"


def test_what_few_begin_with_is_not_looked_for() -> None:
    documents = [np.arange(40) + 1000 * (number if number > 1 else 0) for number in range(3 * RARE)]
    documents = [document.astype(np.int32) for document in documents]
    tokens = Lists(np.cumsum([0, *map(len, documents)]), np.concatenate(documents))
    assert find_prefixes([tokens])[0] == (), "two of so many are hardly ever in one row"
    many = [np.concatenate([np.arange(40) + 100 * kind, [10_000 + kind]]) for kind in range(90) for _ in range(2)]
    tokens = Lists(np.cumsum([0, *map(len, many)]), np.concatenate(many))
    assert len(find_prefixes([tokens])[0]) == MOST


def test_without_documents_there_is_nothing_to_share() -> None:
    prefixes, which = find_prefixes([])
    assert prefixes == ()
    assert len(which) == 0


@pytest.mark.parametrize(("num_packs", "seed"), [(1, 0), (7, 3), (64, 5), (1000, -1)])
def test_the_order_of_many_is_that_of_each(num_packs: int, seed: int) -> None:
    count = 2 * num_packs + 3
    each = [pack_at(position, num_packs, seed) for position in range(count)]
    assert first_packs(count, num_packs, seed).tolist() == each


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> PackedDataset:
    """Instructions under one header, half of them about one of two passages, one of them split."""
    folder = tmp_path_factory.mktemp("prefixes")
    passages = ["the first passage " * 6, "another text, about other things " * 5, "", ""]
    rows = [
        {"instruction": f"{passages[n % 4]} question {n} {'more ' * (n % 7)}", "output": f"it is {n}"}
        for n in range(90)
    ]
    rows[5]["output"] = "long " * 250
    options = Data(
        train=(Source(path=str(write_rows(folder / "rows.json", rows))),), max_length=400, over_length="split"
    )
    return prepare(options, tokenizer, cache=folder / "cache").train


@settings(deadline=None, max_examples=25)
@given(packs_per_step=st.integers(1, 12), workers=st.integers(1, 3), micro_batch=st.integers(1, 5), share=st.booleans())
def test_rows_are_as_long_as_was_said_beforehand(
    prepared: PackedDataset, packs_per_step: int, workers: int, micro_batch: int, share: bool
) -> None:
    seed, num_packs = 3, 2 * prepared.num_packs + 1
    how: dict[str, Any] = {"packs_per_step": packs_per_step, "workers": workers, "share_prefixes": share}
    order, costs = first_packs(num_packs, prepared.num_packs, seed), (0.3, 1e-4)
    dealt = prepared.dealt(order, costs=costs, **how)
    assert all(
        sorted(order[start : start + packs_per_step]) == sorted(dealt[start : start + packs_per_step])
        for start in range(0, num_packs, packs_per_step)
    ), "a step has the packs that it had"
    order = dealt
    most, most_supervised, mean, whole = prepared.row_sizes(order, micro_batch=micro_batch, **how)
    batches: list[MicroBatch] = []
    for rank in range(workers):
        deal = Deal(packs_per_step, micro_batch, rank, workers, share_prefixes=share, costs=costs)
        for step in training_steps(prepared, deal, seed=seed, num_packs=num_packs):
            batches += [batch for batch in step.micro_batches if batch.documents]
    tokens = [batch.num_tokens for batch in batches]
    assert max(tokens) == most
    assert float(np.mean(tokens)) == pytest.approx(mean)
    assert whole * len(tokens) == pytest.approx(sum(prepared.pack(n).lengths.sum() for n in order))
    assert (mean < whole) == (share and any(batch.shared for batch in batches))
    supervised = max(int(batch.weights.count_nonzero()) for batch in batches)
    assert supervised <= most_supervised <= supervised + 400  # all of a split document's may lie in one piece


def test_prefixes_of_prepared_data_spare_a_good_part_of_them(prepared: PackedDataset) -> None:
    assert any(one.parent >= 0 for one in prepared.common_prefixes), "a passage goes on from the header"
    whole, shared = (
        prepared.row_sizes(
            np.arange(prepared.num_packs), packs_per_step=2, workers=1, micro_batch=2, share_prefixes=share
        )[2]
        for share in (False, True)
    )
    assert shared < 0.6 * whole
