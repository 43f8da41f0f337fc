"""Prompts in rows: who answers which, who has whose place, and where the next token is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.model.cached import Store
from tonnage.rundir.samples import Prompt
from tonnage.training.answers import Asking, Share, asking_batch
from tonnage.training.batch import Deal

END = 99


def asking(lengths: list[int], room: int, row_tokens: int, **more: Any) -> Asking:
    prompts = tuple(Prompt("", list(range(1, length + 1)), room) for length in lengths)
    return Asking(prompts, frozenset([END]), row_tokens, str, **more)


def test_every_prompt_is_answered_once_and_places_are_taken_again_at_once() -> None:
    lengths = [5, 40, 7, 7, 60, 12, 1, 3, 3, 3, 8, 2, 9]
    asked = asking(lengths, room=10, row_tokens=140, most_together=4)
    answers: list[list[int]] = [[] for _ in lengths]
    shares = [Share.of(asked, answers, rank, 2) for rank in range(2)]
    begun: list[int] = []
    kept: list[dict[int, int]] = [{}, {}]  # what a store would have in each slot
    while sum(share.admit() for share in shares):
        for share, slots in zip(shares, kept, strict=True):
            assert [slots[place] for place in range(share.begun)] == share.places[: share.begun]
            begun += share.places[share.begun :]
            slots |= dict(enumerate(share.places))
            assert len(share.places) <= share.slots <= 4
            assert len(share.places) == share.slots or not share.waiting or share.begun < len(share.places)
            assert len(share.places) == 1 or share.slots * share.tokens <= 140
            assert all(lengths[number] + 10 <= share.tokens for number in share.places)
            ends = [END if len(answers[number]) == number % 5 else 50 for number in share.places]
            for source, to in share.take(ends):
                slots[to] = slots[source]
    assert sorted(begun) == list(range(len(lengths)))
    assert [len(one) for one in answers] == [number % 5 for number in range(len(lengths))]


@pytest.mark.parametrize("round_to", [1, 8])
@pytest.mark.parametrize("padded_tokens", [0, 100])
def test_the_token_after_each_document_is_asked_for(padded_tokens: int, round_to: int) -> None:
    asked = asking([3, 5, 1], room=4, row_tokens=100)
    answers: list[list[int]] = [[], [], []]
    share = Share.of(asked, answers, 0, 1)
    deal = Deal(1, 1, 0, 1, round_to=round_to, padded_tokens=padded_tokens)
    store = None if padded_tokens else Store(share.slots, share.tokens)
    assert share.admit()
    assert share.places == [1, 0, 2]
    for expected in ([5, 3, 1], [21, 22, 23]):
        batch, order = asking_batch(share, deal, store)
        assert batch.asks
        last = batch.input_ids.flatten()[batch.positions][:3].tolist()
        assert last == [expected[place] for place in order]
        assert batch.is_padded == bool(padded_tokens)
        assert batch.num_tokens % round_to == 0 or padded_tokens
        share.take([21, 22, 23])
        share.admit()
    if not padded_tokens:
        assert batch.cached is not None
        assert batch.cached.before == (5, 3, 1)
    share.places.clear()
    blank, _ = asking_batch(share, deal, store)
    assert (blank.num_tokens, blank.positions.tolist(), blank.is_padded) == (
        2 if padded_tokens else round_to,
        [0],
        bool(padded_tokens),
    )
