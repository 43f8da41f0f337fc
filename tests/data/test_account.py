"""The account's algebra: it adds up, says so when it does not, and survives being written down."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tonnage.data.account import Account, Flow, Lengths, PackAccount, SourceAccount, total

FLOW = Flow(read=100, repeated=20, train=90, validation=10, cut=5, duplicate=5, left_out=10)
SOURCE = SourceAccount(
    "a",
    rows_read=10,
    rows_train=5,
    rows_validation=1,
    rows_dropped=1,
    rows_bad=1,
    rows_duplicate_dropped=1,
    rows_left_out=1,
    tokens=FLOW,
    supervised=FLOW,
    bad_kinds={"wrong_type": 1},
    lengths=Lengths.of(np.array([1, 9, 300])),
)
PACKS = PackAccount(packs=2, tokens=180, supervised=180, documents=10, max_length=100)
ACCOUNT = Account((SOURCE, replace(SOURCE, name="b")), PACKS, replace(PACKS, tokens=20, supervised=20))


def test_adds_up() -> None:
    ACCOUNT.check()
    assert total(ACCOUNT.sources).rows_read == 20
    assert total(ACCOUNT.sources).tokens == FLOW + FLOW
    assert total(ACCOUNT.sources).bad_kinds == {"wrong_type": 2}
    assert PACKS.fill == 0.9


@pytest.mark.parametrize(
    "source",
    [
        replace(SOURCE, rows_read=11),
        replace(SOURCE, rows_dropped=0),
        replace(SOURCE, tokens=replace(FLOW, cut=4)),
        replace(SOURCE, supervised=replace(FLOW, read=99)),
        replace(SOURCE, tokens=replace(FLOW, cut=-5, train=100)),
        replace(SOURCE, bad_kinds={}),
    ],
)
def test_one_row_or_token_astray_is_found(source: SourceAccount) -> None:
    with pytest.raises(AssertionError, match="a:"):
        source.check()


def test_packs_must_hold_what_the_sources_say() -> None:
    with pytest.raises(AssertionError, match="packs"):
        replace(ACCOUNT, train=replace(PACKS, tokens=179)).check()


def test_comes_back_from_json() -> None:
    assert Account.from_json(json.loads(json.dumps(ACCOUNT.to_json()))) == ACCOUNT


def test_histogram_holds_every_length() -> None:
    lengths = np.arange(1, 5000)
    found = Lengths.of(lengths)
    assert sum(found.counts.values()) == len(lengths)
    assert found.longest == 4999
    assert found.percentiles["p50"] == 2500
    assert all(edge <= 4999 for edge in found.counts)
