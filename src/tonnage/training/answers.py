"""What the model answers while it is trained: greedily, with the forward passes of an evaluation.

Weights stay where they are: sharded, divided, on disk. Rows of prompts and what was answered so far go through the same
pipeline as packs do, and what comes out is the likeliest next token of each instead of a loss. Nothing is kept of a
token's keys and values, so each new token costs a forward pass over its row; in return there is nothing here that
depends on an architecture, a layout or a tier.

Prompts are dealt to the ranks as packs are. After each pass one small sum tells every rank the new token of every
prompt: so all know when all are done, and the first stage of a pipeline what the last has found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

import numpy as np
import torch

from tonnage.parallel.world import World
from tonnage.rundir.samples import Prompt
from tonnage.training.batch import Deal, Document, MicroBatch
from tonnage.training.pipeline import Pipeline

MOST_TOGETHER = 32
"""Prompts in a forward pass of a rank: each has the logits of a whole vocabulary."""


@dataclass(frozen=True)
class Asking:
    """What is asked at every evaluation."""

    prompts: tuple[Prompt, ...]
    stop_tokens: frozenset[int]
    row_tokens: int
    """Tokens of a forward pass, unless a prompt alone has more."""
    decode: Callable[[Sequence[int]], str]


@torch.no_grad()
def answer(
    pipeline: Pipeline,
    asking: Asking,
    deal: Deal,
    world: World,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[list[int]]:
    """Tokens of the answer to each prompt, without the one that ends it; the same lists on every rank.

    ``progress`` is told prompts done and prompts in all.
    """
    answers: list[list[int]] = [[] for _ in asking.prompts]
    done = 0
    for turn in turns(asking, deal.world_size):
        open_ones = sorted(number for share in turn for number in share)
        done += len(open_ones)
        while open_ones:
            mine = [number for number in open_ones if number in turn[deal.rank]]
            rows = [np.array([*asking.prompts[number].ids, *answers[number]], np.int32) for number in mine]
            batch, order = asking_batch(rows, deal)
            found = dict.fromkeys(open_ones, 0.0)
            for one in pipeline.passes([batch], 1.0, backward=False):
                for tokens in one.run():
                    for place, token in zip(order, tokens.tolist(), strict=False):
                        found[mine[place]] = float(token)
            told = world.sum(*world.once(*found.values()))
            for number, token in zip(list(open_ones), map(int, told), strict=True):
                if token not in asking.stop_tokens:
                    answers[number].append(token)
                if token in asking.stop_tokens or len(answers[number]) == asking.prompts[number].room:
                    open_ones.remove(number)
            progress(done - len(open_ones), len(asking.prompts))
    return answers


def turns(asking: Asking, num_ranks: int) -> list[list[list[int]]]:
    """Which prompts are answered together, by rank: the same number of turns for all, in which a rank may have none."""
    shares = [list(_together(range(rank, len(asking.prompts), num_ranks), asking)) for rank in range(num_ranks)]
    return [list(turn) for turn in zip_longest(*shares, fillvalue=[])]


def _together(numbers: Sequence[int], asking: Asking) -> Iterator[list[int]]:
    """Prompts in turns that fit into a row with their answers; as if each were as long as the longest, as where each
    has a row of its own."""
    lengths = {number: len(asking.prompts[number].ids) + asking.prompts[number].room for number in numbers}
    turn: list[int] = []
    for number in sorted(numbers, key=lambda number: lengths[number]):
        if turn and (len(turn) == MOST_TOGETHER or (len(turn) + 1) * lengths[number] > asking.row_tokens):
            yield turn
            turn = []
        turn.append(number)
    if turn:
        yield turn


def asking_batch(rows: Sequence[np.ndarray], deal: Deal) -> tuple[MicroBatch, list[int]]:
    """Rows of tokens as a micro-batch that asks for the token after the last of each, and the order in which they
    stand there. Without rows, one that asks in vain."""
    is_padded = bool(deal.padded_tokens)
    order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
    if not rows:
        blank = MicroBatch.blank(is_padded=is_padded)
        return replace(blank, positions=torch.zeros(1, dtype=torch.int64), asks=True), order
    documents = [Document(rows[place], np.zeros(len(rows[place]), np.float32), -1, -1) for place in order]
    lengths = [len(one.tokens) for one in documents]
    if is_padded:
        batch = MicroBatch.padded(documents, deal.round_to)
        last = np.arange(len(rows)) * batch.input_ids.shape[1] + np.array(lengths) - 1
        return replace(batch, positions=torch.from_numpy(last), asks=True), order
    ids = torch.from_numpy(np.concatenate([one.tokens for one in documents]).astype(np.int64))
    last, none = torch.from_numpy(np.cumsum(lengths) - 1), torch.zeros(len(rows))
    batch = MicroBatch(ids.unsqueeze(0), tuple(lengths), last, torch.zeros_like(last), none, asks=True)
    return batch.rounded(deal.round_to), order
