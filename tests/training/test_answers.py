"""Prompts in rows: who answers which, and where the next token is asked for."""

from __future__ import annotations

import numpy as np
import pytest

from tonnage.rundir.samples import Prompt
from tonnage.training.answers import MOST_TOGETHER, Asking, asking_batch, turns
from tonnage.training.batch import Deal


def asking(lengths: list[int], room: int, row_tokens: int) -> Asking:
    prompts = tuple(Prompt("", list(range(length)), room) for length in lengths)
    return Asking(prompts, frozenset(), row_tokens, str)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_prompt_has_one_turn_and_rows_have_room_for_answers(num_ranks: int) -> None:
    asked = asking([5, 40, 7, 7, 300, 12, 1], room=10, row_tokens=100)
    found = turns(asked, num_ranks)
    assert all(len(turn) == num_ranks for turn in found)
    assert sorted(number for turn in found for share in turn for number in share) == list(range(7))
    for turn in found:
        for share in turn:
            assert len(share) == 1 or sum(len(asked.prompts[one].ids) + 10 for one in share) <= 100
    many = turns(asking([1] * (2 * MOST_TOGETHER + 1), room=1, row_tokens=10**6), 1)
    assert [len(share) for (share,) in many] == [MOST_TOGETHER, MOST_TOGETHER, 1]


@pytest.mark.parametrize("round_to", [1, 8])
@pytest.mark.parametrize("padded_tokens", [0, 100])
def test_the_token_after_each_row_is_asked_for(padded_tokens: int, round_to: int) -> None:
    rows = [np.array([1, 2, 3]), np.array([4, 5, 6, 7, 8]), np.array([9])]
    deal = Deal(1, 1, 0, 1, round_to=round_to, padded_tokens=padded_tokens)
    batch, order = asking_batch(rows, deal)
    assert batch.asks
    last = batch.input_ids.flatten()[batch.positions][: len(rows)].tolist()
    assert last == [int(rows[place][-1]) for place in order]
    assert batch.is_padded == bool(padded_tokens)
    assert batch.num_tokens % round_to == 0 or padded_tokens
    blank, _ = asking_batch([], deal)
    assert (blank.num_tokens, blank.positions.tolist(), blank.is_padded) == (1, [0], bool(padded_tokens))
