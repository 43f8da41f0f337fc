"""From packs to micro-batches: which packs make a step, which rank takes which, and their tensors.

A step consists of the ``packs_per_step`` packs at the global positions after those of the step before, whatever the
number of ranks. They are dealt to the ranks in turn, those of training in an order in which all ranks have about
equally much to compute (``order.balanced``), and each rank takes its share in micro-batches. Ranks must run the same
number of forward passes, or their collectives would not meet; where the packs do not divide evenly, a rank fills up
with a blank: one token, nothing supervised, a loss of exactly zero.

Where dropout is, a token's mask is drawn from the step, its document and its position in that: ``MicroBatch.keys``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat, starmap

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.data import HeldPacks, Pack, PackedDataset
from tonnage.data.packs.features import ImageFeatures, RowImages, StoredRows, images_of
from tonnage.data.packs.padding import forwards
from tonnage.data.packs.pictures import Pictures
from tonnage.data.packs.prefixes import Prefix, chain
from tonnage.data.tokens.encoder import NO_FORK
from tonnage.kernels.dropout import number_of, token_keys
from tonnage.kernels.products import sizes_matter
from tonnage.model.attention import Shared
from tonnage.model.cached import Cached
from tonnage.model.context import Context
from tonnage.training.opening import Opening, Placed


@dataclass(frozen=True)
class MicroBatch:
    """One forward-backward: documents side by side in one row, or each in a row of its own, padded at the right."""

    input_ids: Tensor
    """int64 (1, tokens), or (documents, tokens of the longest)"""
    lengths: tuple[int, ...]
    """Tokens of each part of the row: a document, what several have in common, or what one of these goes on with."""
    positions: Tensor
    """int64 (supervised,): positions, row after row, from which a supervised token is predicted."""
    targets: Tensor
    """int64 (supervised,): those tokens."""
    weights: Tensor
    """fp32 (supervised,): their weights."""
    documents: tuple[int, ...] = ()
    """Index of each document in the dataset; parts beyond them are no data."""
    shared: tuple[Shared, ...] = ()
    """Which parts several documents begin with, or go on with; none if each part is a document."""
    is_padded: bool = False
    """Whether each document has a row of its own."""
    starts: tuple[int, ...] = ()
    """Of each of ``documents`` the first token that is here; 0 unless it was split."""
    asks: bool = False
    """Whether the likeliest tokens after ``positions`` are asked for, and no loss."""
    judges: bool = False
    """Whether the loss of every target is asked for, and whether it is the likeliest token."""
    cached: Cached | None = None
    """Where keys and values of the tokens before those that are here are kept, if any are."""
    targets_of: tuple[int, ...] = ()
    """How many of ``targets`` each of ``documents`` has, in their order; those beyond them are no data."""
    draw: int | None = None
    """What the masks of a step's dropout depend on besides tokens (``kernels.dropout``); None drops nothing."""
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    """Numbers that go with the document of each target, by name: fp32 (supervised,)."""
    ends: tuple[int, ...] = ()
    """Of each of ``documents`` the position of its last token."""
    prompts: tuple[int, ...] = ()
    """Where each two of ``documents`` are the answers of a pair, the preferred one first: the tokens of each that both
    go on from."""
    reference: Tensor | None = None
    """fp64 (documents,): log-probabilities of answers under the reference, if there is one."""
    teacher_tokens: Tensor | None = None
    """int32 (supervised, k): a teacher's likeliest tokens in the place of every target, if there is one."""
    teacher_logprobs: Tensor | None = None
    """fp32 (supervised, k): their log-probabilities."""
    features: tuple[StoredRows, ...] = ()
    """(image tokens, width) each: what stands in place of the embeddings of tokens, where these are images', and what
    is added behind blocks there. They are read when they are needed, so that the micro-batches of a step do not all
    hold theirs."""
    feature_places: Tensor | None = None
    """int64 (image tokens,): positions of those tokens, row after row, if there are any."""
    opening: Opening | None = None
    """The images themselves, where the tower is to look at them (``training.sight``)."""
    token_positions: Tensor | None = None
    """int64 (3, rows, tokens), where tokens have positions of three dimensions."""
    images: Tensor | None = None
    """int64 (rows, tokens), where tokens of an image see those after them: which image of its document a token is of,
    -1 of none."""
    look_ahead: str = ""
    """In which layers they do (``planning.plan.DataProfile``)."""
    top: tuple[int, int] | None = None
    """So many likeliest tokens, of so many first ones of the vocabulary, with their log-probabilities, if these are
    asked for in the place of every target, and no loss."""
    context: Context | None = None
    """The ranks that divide its row, if any do: what is told of tokens is told of this rank's, ``lengths`` and what is
    told of documents of the whole row. They divide targets evenly, whoever has the tokens before them."""
    moves: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    """Where ranks divide it: to each of them, how many hidden states at ``positions`` go, in order, and from each how
    many come, whose ``targets`` are here."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row, or in all rows, padding included."""
        return self.input_ids.numel()

    @property
    def wants_loss(self) -> bool:
        """Whether nothing else is asked for."""
        return not self.asks and not self.judges and self.top is None

    def feature_rows(self) -> Tensor:
        """The features of all images, (image tokens, width), read now."""
        rows = torch.from_numpy(np.concatenate([stored.read() for stored in self.features]))
        return rows.view(torch.bfloat16) if rows.dtype == torch.uint16 else rows

    @property
    def weight(self) -> float:
        """What its loss is divided by: the sum of the weights of its targets, or of its pairs."""
        weights = self.answer_weights()[::2] if self.prompts else self.weights
        return float(weights.double().sum())

    def answer_weights(self) -> Tensor:
        """The weight of every answer in its pair's loss, fp32 (documents,): that of its targets, which all have one."""
        return self.of_documents(self.weights)

    def of_documents(self, numbers: Tensor) -> Tensor:
        """Those of ``documents``, (documents,), from numbers of their targets, which all have one: of ``columns``."""
        firsts = [0, *accumulate(self.targets_of)][:-1]
        return numbers[torch.tensor(firsts, dtype=torch.int64)]

    @property
    def owners(self) -> list[range]:
        """Of every part, the places in ``documents`` of those that it is a part of."""
        going_on = {one.part: one.parts for one in self.shared}
        before = [0, *accumulate(part not in going_on for part in range(len(self.lengths)))]
        return [range(before[part], before[part + 1 + going_on.get(part, 0)]) for part in range(len(self.lengths))]

    def keys(self) -> Tensor | None:
        """Of the tokens, int64 (tokens,), row after row; padding goes on with its document, and what fills up a row is
        no document's. None where nothing is drawn."""
        if self.draw is None:
            return None
        assert not self.shared, "a token of several documents has several masks"
        more = len(self.lengths) - len(self.documents)
        documents, starts = (*self.documents, *(-1,) * more), (*self.starts, *(0,) * more)
        lengths = [self.input_ids.shape[1]] * len(self.lengths) if self.is_padded else self.lengths
        positions = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)]
        keys = token_keys(self.draw, np.repeat(documents, lengths), np.concatenate(positions))
        return keys if self.context is None else keys[self.context.slice_of(len(keys))]

    @property
    def own_lengths(self) -> tuple[int, ...]:
        """Tokens of each part that are here."""
        if self.context is None:
            return self.lengths
        own = self.context.slice_of(sum(self.lengths))
        ends = np.clip([0, *accumulate(self.lengths)], own.start, own.stop)
        return tuple(np.diff(ends).tolist())

    @staticmethod
    def of(packs: Sequence[Pack], prefixes: Sequence[Prefix] = (), *, shares: bool = True) -> MicroBatch:
        """The documents of ``packs`` as one row; of ``prefixes``, what several of them begin with is there once, and
        so is the prompt of two answers, where the row ``shares``."""
        documents = [document for pack in packs for document in documents_of(pack)]
        row = _Row(documents if shares else list(_answers(documents)), prefixes)
        row.place(range(len(row.documents)), np.zeros(0, dtype=np.int64))
        ids = torch.from_numpy(np.concatenate(row.parts).astype(np.int64)).unsqueeze(0)
        batch = _supervised(ids, tuple(map(len, row.parts)), row.order, row.supervised)
        if any(document.features is not None for document in documents):
            assert not row.shared, "documents that begin with the same tokens may have other images"
            batch = _with_features(
                batch, [(document, 0, start) for document, start in zip(row.order, row.firsts, strict=True)]
            )
        return replace(batch, shared=tuple(row.shared))

    @staticmethod
    def padded(documents: Sequence[PackedDocument], round_to: int = 1) -> MicroBatch:
        """Documents in rows of their own, and both answers of a pair; padding is token 0."""
        documents = list(_answers(documents))
        longest, multiple = max(len(document.tokens) for document in documents), max(1, round_to // len(documents))
        width = -(-longest // multiple) * multiple
        ids = np.zeros((len(documents), width), dtype=np.int64)
        supervised: list[Supervised] = []
        for row, document in enumerate(documents):
            ids[row, : len(document.tokens)] = document.tokens
            places = document.weights.nonzero()[0]
            last = row * width + len(document.tokens) - 1
            supervised.append((row * width + places - 1, document.tokens[places], document.weights[places], last))
        lengths = tuple(len(document.tokens) for document in documents)
        batch = _supervised(torch.from_numpy(ids), lengths, documents, supervised)
        if any(document.features is not None for document in documents):
            batch = _with_features(batch, [(document, row, 0) for row, document in enumerate(documents)])
        return replace(batch, is_padded=True)

    def rounded(self, to: int) -> MicroBatch:
        """The same with multiples of ``to`` tokens and supervised positions: a last document that is no data fills up
        the row, and positions that weigh nothing are supervised besides."""
        more, few = -self.num_tokens % to, -len(self.targets) % to
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, more)),
            lengths=(*self.lengths, more) if more else self.lengths,
            positions=self.positions if self.context else F.pad(self.positions, (0, few)),
            targets=F.pad(self.targets, (0, few)),
            weights=F.pad(self.weights, (0, few)),
            columns={name: F.pad(column, (0, few)) for name, column in self.columns.items()},
            teacher_tokens=None if self.teacher_tokens is None else F.pad(self.teacher_tokens, (0, 0, 0, few)),
            teacher_logprobs=None if self.teacher_logprobs is None else F.pad(self.teacher_logprobs, (0, 0, 0, few)),
            token_positions=None if self.token_positions is None else F.pad(self.token_positions, (0, more)),
            images=None if self.images is None else F.pad(self.images, (0, more), value=-1),
        )

    def divided(self, context: Context, round_to: int = 1) -> MicroBatch:
        """What one of the ranks that divide the row has of it: as many tokens as each other, a multiple of
        ``round_to``, and as many targets, but for one."""
        lies_whole = self.is_padded or self.shared or self.prompts or self.features or self.opening
        assert not lies_whole, "a plan divides rows of plain documents"
        whole = self.rounded(round_to * context.size)
        own, ranks, number = context.slice_of(whole.num_tokens), context.size, len(self.targets)
        firsts = torch.tensor([number * rank // ranks for rank in range(ranks + 1)])
        assert bool((self.positions.diff() >= 0).all()), "each rank takes targets in the order of the row"
        holders = self.positions // (whole.num_tokens // ranks)
        takers = torch.searchsorted(firsts[1:], torch.arange(number), right=True)
        moves = (holders * ranks + takers).bincount(minlength=ranks**2).view(ranks, ranks)
        mine = slice(*firsts[context.rank : context.rank + 2].tolist())
        of_document = torch.arange(len(self.targets_of)).repeat_interleave(torch.tensor(self.targets_of).long())
        part = replace(
            self,
            input_ids=whole.input_ids[:, own],
            lengths=whole.lengths,
            positions=self.positions[holders == context.rank] - own.start,
            moves=(tuple(moves[context.rank].tolist()), tuple(moves[:, context.rank].tolist())),
            targets=self.targets[mine],
            weights=self.weights[mine],
            columns={name: column[mine] for name, column in self.columns.items()},
            teacher_tokens=None if self.teacher_tokens is None else self.teacher_tokens[mine],
            teacher_logprobs=None if self.teacher_logprobs is None else self.teacher_logprobs[mine],
            targets_of=tuple(of_document[mine].bincount(minlength=len(self.targets_of)).tolist()),
            ends=(),
            context=context,
        )
        return part.rounded(round_to)

    @staticmethod
    def blank(*, is_padded: bool = False) -> MicroBatch:
        """A micro-batch that changes nothing. A row of its own has two tokens: a recurrence of one would leave out what
        it does from token to token, and ranks would have gradients of different parameters."""
        none, tokens = torch.zeros(0, dtype=torch.int64), 2 if is_padded else 1
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        return MicroBatch(ids, (tokens,), none, none, torch.zeros(0), is_padded=is_padded)


@dataclass(frozen=True)
class PackedDocument:
    """One of a pack, or a piece of one that was split."""

    tokens: np.ndarray
    weights: np.ndarray
    number: int
    """In the dataset."""
    prefix: int
    """Number of the longest common prefix that it begins with."""
    start: int = 0
    """Of its tokens, the first that is here."""
    carried: Mapping[str, float] = field(default_factory=dict)
    """Numbers that go with it."""
    fork: tuple[int, int] = NO_FORK
    """Where it parts into two answers, if it is a pair."""
    prompt: int = 0
    """Where it is one of the two answers of a pair, with its prompt: the tokens that the other one has, too."""
    reference: tuple[float, ...] = ()
    """Log-probabilities under the reference: of both answers, or of the one that it is."""
    taught: np.ndarray | None = None
    """What a teacher expects of its supervised tokens, if there is one."""
    features: ImageFeatures | None = None
    """Those of its images, if it has any."""

    def answers(self) -> tuple[PackedDocument, PackedDocument]:
        """The two of a pair, each with the prompt before it."""
        shared, second = self.fork
        first = replace(
            self,
            tokens=self.tokens[:second],
            weights=self.weights[:second],
            fork=NO_FORK,
            prompt=shared,
            reference=self.reference[:1],
        )
        other = replace(
            first,
            tokens=np.concatenate([self.tokens[:shared], self.tokens[second:]]),
            weights=np.concatenate([self.weights[:shared], self.weights[second:]]),
            reference=self.reference[1:],
        )
        return first, other


def _answers(documents: Iterable[PackedDocument]) -> Iterator[PackedDocument]:
    """Documents, and in the place of pairs their answers."""
    for document in documents:
        yield from (document.answers() if document.fork[0] else (document,))


def documents_of(pack: Pack) -> Iterator[PackedDocument]:
    """The documents of a pack, apart."""
    ends = np.cumsum(pack.lengths)[:-1]
    tokens, weights = np.split(pack.input_ids, ends), np.split(pack.weights, ends)
    described = (array.tolist() for array in (pack.documents, pack.prefixes, pack.starts))
    carried = [dict(zip(pack.carried, numbers, strict=True)) for numbers in zip(*pack.carried.values(), strict=True)]
    plain = starmap(PackedDocument, zip(tokens, weights, *described, carried or repeat({}), strict=False))
    if pack.taught is not None:
        counts = [np.count_nonzero(of_document) for of_document in weights]
        assert len(pack.taught) == sum(counts), "a teacher's rows are those of the supervised tokens"
        taught = np.split(pack.taught, np.cumsum(counts)[:-1])
        return (replace(document, taught=rows) for document, rows in zip(plain, taught, strict=True))
    if pack.features:
        return (replace(document, features=own) for document, own in zip(plain, pack.features, strict=False))
    if pack.forks is None:
        return plain
    references = repeat(()) if pack.reference is None else map(tuple, pack.reference.tolist())
    pairs = zip(plain, map(tuple, pack.forks.tolist()), references, strict=False)
    return (replace(document, fork=fork, reference=reference) for document, fork, reference in pairs)


Supervised = tuple[np.ndarray, np.ndarray, np.ndarray, int]
"""Of a document, the positions from which its targets are predicted, the targets, their weights, and the position of
its last token."""


def _supervised(
    ids: Tensor, lengths: tuple[int, ...], documents: Sequence[PackedDocument], supervised: Sequence[Supervised]
) -> MicroBatch:
    """Documents that are laid out in ``ids``, with what is ``supervised`` of each and what goes with it."""
    *arrays, ends = zip(*supervised, strict=True)
    positions, targets, weights = map(np.concatenate, arrays)
    counts = tuple(map(len, arrays[1]))
    names = documents[0].carried
    carried = {name: np.array([document.carried[name] for document in documents], np.float32) for name in names}
    taught = [document.taught for document in documents if document.taught is not None]
    of_teacher = np.concatenate(taught) if taught else None
    return MicroBatch(
        ids,
        lengths,
        torch.from_numpy(positions),
        torch.from_numpy(targets.astype(np.int64)),
        torch.from_numpy(weights.astype(np.float32)),
        columns={name: torch.from_numpy(np.repeat(column, counts)) for name, column in carried.items()},
        prompts=tuple(document.prompt for document in documents) if documents[0].prompt else (),
        reference=torch.tensor([document.reference[0] for document in documents], dtype=torch.float64)
        if documents[0].reference
        else None,
        documents=tuple(document.number for document in documents),
        starts=tuple(document.start for document in documents),
        targets_of=counts,
        ends=tuple(map(int, ends)),
        teacher_tokens=None if of_teacher is None else torch.from_numpy(of_teacher["tokens"].copy()),
        teacher_logprobs=None if of_teacher is None else torch.from_numpy(of_teacher["logprobs"].astype(np.float32)),
    )


def _with_features(batch: MicroBatch, laid_out: Sequence[tuple[PackedDocument, int, int]]) -> MicroBatch:
    """A micro-batch with the features of its documents' images; each of these with its row, and where in that it
    begins."""
    rows, width = batch.input_ids.shape
    of_images = [
        (own, row * width + start) for document, row, start in laid_out if (own := document.features) is not None
    ]
    if look_ahead := of_images[0][0].look_ahead:
        images = torch.full((rows, width), -1)
        for own, first in of_images:
            images.view(-1)[torch.from_numpy(own.places + first)] = torch.from_numpy(images_of(own.places))
        batch = replace(batch, images=images, look_ahead=look_ahead)
    if any(isinstance(own.rows, RowImages) for own, _ in of_images):
        return _with_images(batch, laid_out)
    positions = None
    if any(own.positions is not None for own, _ in of_images):
        positions = torch.arange(width).repeat(3, rows, 1)
        for document, row, start in laid_out:
            stop, own = start + len(document.tokens), document.features
            of_text = torch.arange(len(document.tokens)).expand(3, -1)
            in_space = None if own is None or own.positions is None else torch.from_numpy(own.positions.T.copy())
            positions[:, row, start:stop] = of_text if in_space is None else in_space
    return replace(
        batch,
        features=tuple(own.rows for own, _ in of_images if isinstance(own.rows, StoredRows)),
        feature_places=torch.from_numpy(np.concatenate([own.places + first for own, first in of_images])),
        token_positions=positions,
    )


def _with_images(batch: MicroBatch, laid_out: Sequence[tuple[PackedDocument, int, int]]) -> MicroBatch:
    """As ``_with_features``, of documents whose images the tower is to look at."""
    width, documents, places = batch.input_ids.shape[1], list[Placed](), list[np.ndarray]()
    for document, row, start in laid_out:
        own = document.features
        images = own.rows if own is not None and isinstance(own.rows, RowImages) else None
        documents.append(Placed(row, start, len(document.tokens), images))
        if own is not None:
            places.append(own.places + row * width + start)
    return replace(batch, opening=Opening(documents), feature_places=torch.from_numpy(np.concatenate(places)))


class _Row:
    """A row as it is laid out: each prefix that several documents have, then what these go on with."""

    def __init__(self, documents: Sequence[PackedDocument], prefixes: Sequence[Prefix]) -> None:
        self.documents = documents
        self.parts: list[np.ndarray] = []
        self.shared: list[Shared] = []
        self.order: list[PackedDocument] = []
        self.firsts: list[int] = []
        """Where what each of these goes on with begins."""
        self.supervised: list[Supervised] = []
        self._lengths = [prefix.length for prefix in prefixes]
        self._chains = [chain(prefixes, document.prefix if prefixes else -1) for document in documents]
        self._end = 0

    def place(self, members: Sequence[int], begun: np.ndarray) -> None:
        """Lay out the rest of documents that have in common what lies where ``begun`` says, (tokens,)."""
        by_next: dict[int, list[int]] = {}
        for member in members:
            more = (number for number in self._chains[member] if self._lengths[number] > len(begun))
            by_next.setdefault(next(more, -1 - member), []).append(member)
        for those in by_next.values():
            if len(those) == 1:
                self._end_with(self.documents[those[0]], begun)
                continue
            levels = zip(*(self._chains[member] for member in those), strict=False)
            common = [level[0] for level in levels if len(set(level)) == 1]
            part, prefix = len(self.parts), self._lengths[common[-1]]
            places = self._append(self.documents[those[0]].tokens[len(begun) : prefix])
            self.place(those, np.concatenate([begun, places]))
            self.shared.append(Shared(part, len(self.parts) - part - 1))

    def _end_with(self, document: PackedDocument, begun: np.ndarray) -> None:
        """Lay out the rest of a document; of a pair the rest of the prompt, and both answers."""
        if not document.fork[0]:
            self._finish(document, begun)
            return
        part, shared = len(self.parts), document.fork[0]
        begun = np.concatenate([begun, self._append(document.tokens[len(begun) : shared])])
        for answer in document.answers():
            self._finish(answer, begun)
        self.shared.append(Shared(part, 2))

    def _finish(self, document: PackedDocument, begun: np.ndarray) -> None:
        self.firsts.append(self._end)
        places = np.concatenate([begun, self._append(document.tokens[len(begun) :])])
        targets = document.weights.nonzero()[0]
        last = int(places[-1])
        self.supervised.append((places[targets - 1], document.tokens[targets], document.weights[targets], last))
        self.order.append(document)

    def _append(self, tokens: np.ndarray) -> np.ndarray:
        """Add a part to the row; the places of its tokens."""
        self.parts.append(tokens)
        self._end += len(tokens)
        return np.arange(self._end - len(tokens), self._end)


@dataclass(frozen=True)
class RankStep:
    number: int
    """From 1."""
    next_position: int
    """Global position of the first pack of the step after this one."""
    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    """Tokens of this rank's documents."""
    supervised_tokens: int
    weight: float
    """Sum of the weights of this rank's supervised tokens."""

    @property
    def computed_tokens(self) -> int:
        """Tokens of this rank's rows: what documents share counts once, and what fills a row up counts, too."""
        return sum(batch.num_tokens for batch in self.micro_batches)


@dataclass(frozen=True)
class Deal:
    """How the packs of a run are dealt to its ranks; those that compute the same packs together, or divide their rows,
    count as one."""

    packs_per_step: int
    micro_batch: int
    """Packs per forward."""
    rank: int
    world_size: int
    round_to: int = 1
    """Of which numbers of tokens are multiples (``MicroBatch.rounded``)."""
    share_prefixes: bool = False
    """Whether what documents of a row begin with alike is there once."""
    padded_tokens: int = 0
    """Tokens of a forward at most, padding included, where documents have rows of their own; 0 where they are
    packed."""
    chunk: int = 1
    """Of which tokens of a document then count as a multiple."""
    context: Context | None = None
    """The ranks that divide each row of this one, if any do."""
    costs: tuple[float, float] = (0.0, 0.0)
    """By which the packs of a training step are divided among ranks (``planning.seconds.pack_costs``)."""

    def share(self, positions: range) -> list[list[int]]:
        """This rank's micro-batches (lists of positions) of a step; an empty list stands for a blank."""
        mine = list(positions[self.rank :: self.world_size])
        most = -(-len(positions) // self.world_size)
        num_micro_batches = -(-most // self.micro_batch)
        return [mine[i * self.micro_batch : (i + 1) * self.micro_batch] for i in range(num_micro_batches)]


Packs = PackedDataset | HeldPacks
"""Where packs come from: a data set on disk, or rows that a program has."""


def round_to(row_tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """Of which numbers of tokens the rows should be multiples: so that there are few sizes where that matters, and rows
    of up to ``row_tokens`` grow by a few percent at most."""
    return max(8, min(64, row_tokens // 512 * 16)) if sizes_matter(device, dtype) else 1


def training_steps(
    dataset: PackedDataset, deal: Deal, *, seed: int, num_packs: int, steps_done: int = 0, position: int = 0
) -> Iterator[RankStep]:
    """The steps of a run of ``num_packs`` packs in all, after ``steps_done``, from a global ``position`` on.

    Their masks of dropout are drawn by ``seed`` and the number of the step.
    """

    def dealt(positions: range) -> _Rows:
        order = np.array([dataset.pack_at(position, seed) for position in positions])
        packs = dataset.dealt(
            order,
            packs_per_step=len(positions),
            workers=deal.world_size,
            share_prefixes=deal.share_prefixes,
            costs=deal.costs,
        )
        return _Rows(dataset, deal, dict(zip(positions, packs.tolist(), strict=True)).__getitem__)

    starts = enumerate(range(position, num_packs, deal.packs_per_step), start=steps_done + 1)
    ranges = ((number, range(start, min(start + deal.packs_per_step, num_packs))) for number, start in starts)
    steps = (dealt(positions).step(number, positions, draw_of(seed, number)) for number, positions in ranges)
    has_images = isinstance(dataset, PackedDataset) and isinstance(dataset.features, Pictures)
    yield from opened_ahead(steps) if has_images else steps


def opened_ahead(steps: Iterable[RankStep]) -> Iterator[RankStep]:
    """The same steps, each made before the one before it is over, so that its images can be opened in time."""
    waiting: RankStep | None = None
    last: Opening | None = None
    for step in steps:
        for opening in (batch.opening for batch in step.micro_batches if batch.opening is not None):
            if last is not None:
                last.following = opening
            last = opening
        if waiting is not None:
            yield waiting
        waiting = step
    if waiting is not None:
        yield waiting


def draw_of(seed: int, step: int) -> int:
    """What the masks of a step depend on besides tokens and layers; ``step`` counts from 1."""
    return number_of("step", seed, step)


def evaluation_steps(dataset: Packs, deal: Deal, packs: Sequence[int] | None = None) -> Iterator[RankStep]:
    """The whole dataset once, in its own order, or some ``packs``, in steps of the same size; nothing is dropped."""
    packs = range(dataset.num_packs) if packs is None else packs
    rows = _Rows(dataset, deal, packs.__getitem__)
    for start in range(0, len(packs), deal.packs_per_step):
        positions = range(start, min(start + deal.packs_per_step, len(packs)))
        yield rows.step(start // deal.packs_per_step + 1, positions)


@dataclass(frozen=True)
class _Rows:
    """Packs of a data set as micro-batches of one rank."""

    dataset: Packs
    deal: Deal
    pack_of: Callable[[int], int]
    """Number of the pack at a global position."""

    def step(self, number: int, positions: range, draw: int | None = None) -> RankStep:
        data = self.dataset
        assert not (isinstance(data, PackedDataset) and data.images and data.features is None), (
            "images without features"
        )
        laid_out = self._padded(positions) if self.deal.padded_tokens else self._packed(positions)
        micro_batches = tuple(replace(batch, draw=draw) for batch in laid_out)
        mine = positions[self.deal.rank :: self.deal.world_size]
        return RankStep(
            number=number,
            next_position=positions.stop,
            micro_batches=micro_batches,
            tokens=sum(int(self.dataset.lengths(self.pack_of(position)).sum()) for position in mine)
            if self.deal.context is None
            else sum(sum(batch.own_lengths[: len(batch.documents)]) for batch in micro_batches),
            supervised_tokens=sum(int(batch.weights.count_nonzero()) for batch in micro_batches),
            weight=float(sum(batch.weight for batch in micro_batches)),
        )

    def _packed(self, positions: range) -> list[MicroBatch]:
        deal, dataset = self.deal, self.dataset
        prefixes = dataset.common_prefixes if deal.share_prefixes else ()
        share = [[dataset.pack(self.pack_of(position)) for position in part] for part in deal.share(positions)]
        rows = [MicroBatch.of(packs, prefixes, shares=deal.share_prefixes) if packs else None for packs in share]
        if deal.context is not None:
            context, blank = deal.context, MicroBatch.blank().divided(deal.context, deal.round_to)
            return [blank if row is None else row.divided(context, deal.round_to) for row in rows]
        return [(row or MicroBatch.blank()).rounded(deal.round_to) for row in rows]

    def _padded(self, positions: range) -> list[MicroBatch]:
        """Every rank knows how the others cut up their share, for as many forwards as the most has each."""
        deal, dataset = self.deal, self.dataset

        def row_lengths(position: int) -> np.ndarray:
            return dataset.row_lengths(self.pack_of(position), deal.chunk)

        shares = [positions[rank :: deal.world_size] for rank in range(deal.world_size)]
        cut = [
            forwards(np.concatenate([np.zeros(0, int), *map(row_lengths, share)]), deal.padded_tokens)
            for share in shares
        ]
        packs = (dataset.pack(self.pack_of(position)) for position in shares[deal.rank])
        documents = [document for pack in packs for document in documents_of(pack)]
        batches = [MicroBatch.padded([documents[place] for place in part], deal.round_to) for part in cut[deal.rank]]
        return batches + [MicroBatch.blank(is_padded=True)] * (max(map(len, cut)) - len(batches))
