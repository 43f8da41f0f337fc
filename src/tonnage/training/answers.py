"""What the model answers while it is trained, or to an evaluation: greedily, with the forward passes of one.

Weights stay where they are: sharded, divided, on disk. Prompts, and then the tokens of their answers, go through the
same pipeline as packs do, and what comes out is the likeliest next token of each instead of a loss. Of documents that
may lie in one row, keys and values are kept (``model.cached``), so that a new token costs the pass of a token: nothing
but our attention connects the tokens of such a model, so nothing else is to be kept. Of others nothing is, and each
new token costs a pass over its row.

Prompts are dealt to the ranks as packs are, and each rank answers its share by itself, the longest first: as soon as an
answer ends, the next prompt has its place. After each pass one small sum tells every rank the new tokens of all, so
that all know when all are done, and the first stage of a pipeline what the last has found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice

import numpy as np
import torch

from tonnage.data.packs.features import ImageFeatures, StoredRows
from tonnage.model.cached import Cached, Store
from tonnage.parallel.world import World
from tonnage.rundir.samples import Prompt
from tonnage.training.batch import Deal, MicroBatch, PackedDocument
from tonnage.training.pipeline import Pipeline

MOST_TOGETHER = 32
"""Prompts in a forward pass of a rank: each has the logits of a whole vocabulary."""


@dataclass(frozen=True)
class Asking:
    """What is asked at every evaluation."""

    prompts: tuple[Prompt, ...]
    stop_tokens: frozenset[int]
    row_tokens: int
    """Tokens of a forward pass, and that are kept of a rank's documents, unless a prompt alone has more."""
    decode: Callable[[Sequence[int]], str]
    most_together: int = MOST_TOGETHER
    """Prompts of a rank that are answered at the same time."""
    ends: Callable[[Sequence[int]], bool] | None = None
    """Whether the tokens of an answer so far are all of it, where a stop token is not all that ends one."""
    images: Mapping[int, ImageFeatures] = field(default_factory=dict)
    """By the number of a prompt, of those that have any."""


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
    ranks, rank = world.data_size, world.data_rank  # those that divide rows of packs have prompts of their own
    shares = [Share.of(asking, answers, number, ranks) for number in range(ranks)]
    mine = shares[rank]
    store = None if deal.padded_tokens else Store(mine.slots, mine.tokens)
    while sum(share.admit() for share in shares):  # all of them are asked
        if store is not None and (store.slots, store.tokens) != (mine.slots, mine.tokens):
            store.resize(mine.slots, mine.tokens)
        batch, order = asking_batch(mine, deal, store)
        tokens = [[0.0] * len(share.places) for share in shares]
        for turn in pipeline.passes([batch], 1.0, backward=False):
            for likeliest in turn.run():
                for place, token in zip(order, likeliest.tolist(), strict=False):
                    tokens[rank][place] = float(token)
        of_all = iter(world.sum(*world.once(*chain.from_iterable(tokens))))
        for share in shares:
            moves = share.take([int(next(of_all)) for _ in share.places])
            if share is mine and store is not None:
                for source, to in moves:
                    store.move(source, to)
        waiting = sum(len(share.places) + len(share.waiting) for share in shares)
        progress(len(asking.prompts) - waiting, len(asking.prompts))
    return answers


@dataclass
class Share:
    """The prompts of a rank: those that are being answered, by their places, and those that wait. Every rank keeps
    account of all shares, and finds the same."""

    asking: Asking
    answers: list[list[int]]
    """Of all prompts, so far."""
    waiting: deque[int]
    """Numbers of prompts, those with the longest documents first."""
    slots: int
    """Places that there are."""
    tokens: int
    """That the longest document may get to have."""
    places: list[int] = field(default_factory=list)
    """Numbers of the prompts that are being answered."""
    begun: int = 0
    """How many of them, the first, have been in a pass."""

    @staticmethod
    def of(asking: Asking, answers: list[list[int]], rank: int, num_ranks: int) -> Share:
        """A rank's, before its first pass."""
        numbers = sorted(range(rank, len(asking.prompts), num_ranks), key=lambda number: -_length(asking, number))
        share = Share(asking, answers, deque(numbers), 0, 0)
        share.fit()
        return share

    def admit(self) -> bool:
        """Give free places to prompts that wait, as far as a pass has room for their tokens; whether any prompt is
        being answered."""
        self.begun = len(self.places)
        if not self.waiting:
            return bool(self.places)
        self.fit()
        row = len(self.places)
        while self.waiting and len(self.places) < self.slots:
            row += len(self.asking.prompts[self.waiting[0]].ids)
            if row > self.asking.row_tokens and self.places:
                break
            self.places.append(self.waiting.popleft())
        return True

    def take(self, tokens: Sequence[int]) -> list[tuple[int, int]]:
        """The next token of every prompt that is being answered. Returns which places others have now, (from, to), in
        the order in which they move."""
        asking, moves = self.asking, list[tuple[int, int]]()
        for number, token in zip(self.places, tokens, strict=True):
            if token not in asking.stop_tokens:
                self.answers[number].append(token)
        ended = [
            place
            for place, (number, token) in enumerate(zip(self.places, tokens, strict=True))
            if token in asking.stop_tokens
            or len(self.answers[number]) == asking.prompts[number].room
            or (asking.ends is not None and asking.ends(self.answers[number]))
        ]
        for place in reversed(ended):  # from behind: who moves has not ended
            last = self.places.pop()
            if place < len(self.places):
                moves.append((len(self.places), place))
                self.places[place] = last
        return moves

    def fit(self) -> None:
        """As many places as documents of the longest that is to come have room; that changes by halves."""
        running = [*self.places, *islice(self.waiting, 1)]
        longest = max((_length(self.asking, number) for number in running), default=1)
        if self.tokens and longest > self.tokens // 2:
            return
        self.tokens = longest
        fits = self.asking.row_tokens // longest
        wanted = len(self.places) + len(self.waiting)
        self.slots = max(1, len(self.places), min(self.asking.most_together, fits, wanted))


def _length(asking: Asking, number: int) -> int:
    """Tokens of a prompt and the longest answer to it."""
    return len(asking.prompts[number].ids) + asking.prompts[number].room


def asking_batch(share: Share, deal: Deal, store: Store | None) -> tuple[MicroBatch, list[int]]:
    """What asks for the next token of every prompt that is being answered, and the order of their places in it. Without
    prompts, one that asks in vain."""
    if not share.places:
        is_padded = bool(deal.padded_tokens)
        blank = MicroBatch.blank(is_padded=True) if is_padded else MicroBatch.blank().rounded(deal.round_to)
        return replace(blank, positions=torch.zeros(1, dtype=torch.int64), asks=True), []
    prompts, answers = share.asking.prompts, share.answers
    if store is None:
        rows = [np.array([*prompts[number].ids, *answers[number]], np.int32) for number in share.places]
        order = sorted(range(len(rows)), key=lambda place: -len(rows[place]))
        documents = [_document(share, share.places[place], rows[place]) for place in order]
        batch = MicroBatch.padded(documents, deal.round_to)
        ends = np.arange(len(rows)) * batch.input_ids.shape[1] + np.array(batch.lengths) - 1
        return replace(batch, positions=torch.from_numpy(ends), asks=True), order
    going, beginning = share.places[: share.begun], share.places[share.begun :]
    tokens = [*([answers[number][-1]] for number in going), *(prompts[number].ids for number in beginning)]
    lengths = tuple(map(len, tokens))
    before = tuple(len(prompts[number].ids) + len(answers[number]) - 1 for number in going)
    ids = torch.tensor([list(chain.from_iterable(tokens))])
    last, none = torch.tensor(lengths).cumsum(0) - 1, torch.zeros(len(lengths))
    cached = Cached(store, before, len(beginning))
    batch = MicroBatch(ids, lengths, last, torch.zeros_like(last), none, asks=True, cached=cached)
    if not share.asking.images.keys().isdisjoint(share.places):
        batch = _with_images(batch, share)
    return batch.rounded(deal.round_to), list(range(len(lengths)))


def _document(share: Share, number: int, tokens: np.ndarray) -> PackedDocument:
    """A prompt with its answer so far, in a row of its own."""
    images = share.asking.images.get(number)
    features = None if images is None else images.of_tokens(len(tokens))
    return PackedDocument(tokens, np.zeros(len(tokens), np.float32), -1, -1, features=features)


def _with_images(batch: MicroBatch, share: Share) -> MicroBatch:
    """A row of documents that go on or begin, with the features of those that begin, and the positions of all tokens
    where any document has some of three dimensions."""
    images, prompts, at = share.asking.images, share.asking.prompts, share.begun
    looked, positions = list[tuple[ImageFeatures, int]](), list[np.ndarray]()
    for place, number in enumerate(share.places):
        own, length = images.get(number), len(prompts[number].ids)
        of_prompt = np.arange(length)[:, None].repeat(3, 1)
        if own is not None and own.positions is not None:
            of_prompt = own.positions
        if place < share.begun:  # here is the last token of its answer
            positions.append(of_prompt.max(keepdims=True).repeat(3, 1) + len(share.answers[number]))
            continue
        positions.append(of_prompt)
        if own is not None:
            looked.append((own, at))
        at += length
    if looked:
        places = np.concatenate([own.places + first for own, first in looked])
        rows = tuple(own.rows for own, _ in looked if isinstance(own.rows, StoredRows))
        batch = replace(batch, features=rows, feature_places=torch.from_numpy(places))
    if all(own.positions is None for own in images.values()):
        return batch
    in_space = torch.from_numpy(np.concatenate(positions).astype(np.int64))
    return replace(batch, token_positions=in_space.T.unsqueeze(1))
