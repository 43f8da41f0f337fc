"""What a worker reads: packs of whole documents, memory-mapped, with no tokenizer and no list of its own.

A data set is a directory of a few arrays beside the documents that it points into:

    packs.json       how many packs, documents and tokens; where the documents lie
    offsets.npy      int64 (num_packs + 1,): first piece of every pack
    documents.npy    int64 (num_pieces,): the document of every piece
    starts.npy       int32 (num_pieces,): its first token in the document (0 unless the document was split)
    lengths.npy      int32 (num_pieces,): its number of tokens
    contexts.npy     int32 (num_pieces,): how many of these only stand before what is its own; not there if none do
    prefixes.npy     int16 (num_pieces,): which of the common prefixes in packs.json it begins with, -1 for none
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.data.packs.features import Features, ImageFeatures
from tonnage.data.packs.order import balanced, first_packs, pack_at
from tonnage.data.packs.padding import in_chunks, of_pairs
from tonnage.data.packs.pictures import Pictures
from tonnage.data.packs.prefixes import Prefix, chain
from tonnage.data.packs.taught import Taught
from tonnage.data.text.masks import Span
from tonnage.data.tokens.documents import Documents

ARRAYS = ("offsets", "documents", "starts", "lengths", "prefixes")
CONTEXTS = "contexts"


@dataclass(frozen=True)
class Pack:
    """One row of at most ``max_length`` tokens, documents one after another, no padding anywhere."""

    input_ids: np.ndarray
    """int32 (num_tokens,)"""
    weights: np.ndarray
    """float32 (num_tokens,): weight of each token as a target, predicted from the token before it in the same
    document; 0 for context, and always 0 at a document's first token."""
    lengths: np.ndarray
    """int32 (num_documents,)"""
    documents: np.ndarray
    """int64 (num_documents,): index of each document in the data set, for reports."""
    prefixes: np.ndarray
    """int16 (num_documents,): number of the longest common prefix that each begins with, -1 for none."""
    starts: np.ndarray
    """int32 (num_documents,): where in each document its first token of this pack is, 0 unless it was split."""
    carried: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Numbers that go with the documents, by name: float64 (num_documents,) each."""
    forks: np.ndarray | None = None
    """int64 (num_documents, 2): where each parts into two answers (``Fork``), if they are pairs."""
    reference: np.ndarray | None = None
    """float64 (num_documents, 2): log-probabilities of both answers under the reference, if there is one."""
    taught: np.ndarray | None = None
    """``taught.row_type`` (supervised tokens,): what a teacher expects of each, in their order, if there is one."""
    features: tuple[ImageFeatures | None, ...] = ()
    """Of each document those of its images, None of one that has none; empty of a data set without images."""


@dataclass(frozen=True)
class PackSizes:
    """Sizes of all packs, each (num_packs,), from which those of rows follow."""

    tokens: np.ndarray
    """int64"""
    supervised: np.ndarray
    """int64. Where a document was split, an upper bound: all of its supervised tokens may lie in one piece."""
    own: np.ndarray
    """int64: tokens after a common prefix, or of documents that have none."""
    prefixes: np.ndarray
    """uint64: bit k says whether a document of the pack begins with common prefix k."""
    prompts: np.ndarray
    """int64: tokens that both answers of pairs go on from."""
    images: np.ndarray
    """int64: tokens that stand for images."""


@dataclass(frozen=True)
class PackedDataset:
    """Packs on disk. Opening maps the arrays and reads nothing else."""

    path: Path
    num_packs: int
    num_documents: int
    num_tokens: int
    supervised_tokens: int
    max_length: int
    common_prefixes: tuple[Prefix, ...] = ()
    """What documents begin with alike."""
    in_order: bool = False
    """Whether packs are trained one after the other, as documents were given."""
    pairs: bool = False
    """Whether every document is a pair of answers to one prompt."""
    reference: np.ndarray | None = field(default=None, repr=False, compare=False)
    """float64 (documents of the source, 2): log-probabilities of both answers under the reference."""
    taught: Taught | None = field(default=None, repr=False, compare=False)
    """What a teacher expects of the supervised tokens of packs."""
    images: bool = False
    """Whether documents have images."""
    features: Features | Pictures | None = field(default=None, repr=False, compare=False)
    """What the tower makes of these, or the images for it to look at."""

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PackedDataset:
        """Open what ``prepare`` has written. Raises ``FileNotFoundError`` when it is not there."""
        described = json.loads((Path(path) / "packs.json").read_text(encoding="utf-8"))
        names = ("num_packs", "num_documents", "num_tokens", "supervised_tokens", "max_length")
        totals: dict[str, Any] = {name: int(described[name]) for name in names}
        prefixes = tuple(Prefix(length, parent) for length, parent in described["common_prefixes"])
        in_order = bool(described.get("in_order", False))  # packs from before this option do not say
        pairs, images = bool(described.get("pairs", False)), bool(described.get("images", False))
        return cls(Path(path), **totals, common_prefixes=prefixes, in_order=in_order, pairs=pairs, images=images)

    def pack_at(self, position: int, seed: int) -> int:
        """The pack that is trained at a global position, counted from the start of a run over all epochs."""
        return position % self.num_packs if self.in_order else pack_at(position, self.num_packs, seed)

    def first_packs(self, count: int, seed: int) -> np.ndarray:
        """``pack_at`` of the first ``count`` positions: int64 (count,)."""
        if self.in_order:
            return np.arange(count, dtype=np.int64) % self.num_packs
        return first_packs(count, self.num_packs, seed)

    def dealt(
        self,
        order: np.ndarray,
        *,
        packs_per_step: int,
        workers: int,
        share_prefixes: bool,
        costs: tuple[float, float] = (0.0, 0.0),
    ) -> np.ndarray:
        """The packs of an ``order``, with those of each step put in the order in which workers take them in turn, so
        that all have about equally much to compute (``order.balanced``).

        ``costs``: of a supervised token in the head, and of a pair of tokens of one document in attention. The unit is
        what a token costs in the blocks (``planning.seconds.pack_costs``).
        """
        if workers == 1:
            return order
        amounts, dealt = self._costs(order, costs, share_prefixes=share_prefixes), order.copy()
        whole = len(order) // packs_per_step * packs_per_step
        for part, width in ((slice(whole), packs_per_step), (slice(whole, None), len(order) - whole)):
            if width:
                places = balanced(amounts[part].reshape(-1, width), workers)
                dealt[part] = np.take_along_axis(order[part].reshape(-1, width), places, axis=1).ravel()
        return dealt

    def _costs(self, packs: np.ndarray, costs: tuple[float, float], *, share_prefixes: bool) -> np.ndarray:
        arrays, offsets = self._arrays, self._arrays["offsets"]
        numbers = offsets[packs + 1] - offsets[packs]
        begins = np.cumsum(numbers) - numbers
        pieces = np.arange(numbers.sum()) + np.repeat(offsets[packs] - begins, numbers)
        lengths = arrays["lengths"][pieces].astype(np.int64)
        shared = np.array([*(prefix.length for prefix in self.common_prefixes), 0])[arrays["prefixes"][pieces]]
        shared = shared * share_prefixes
        supervised = np.minimum(self.source.column("supervised")[arrays["documents"][pieces]], lengths)
        own, targets, attended = (
            np.add.reduceat(amounts, begins) for amounts in (lengths - shared, supervised, lengths**2 - shared**2)
        )
        return own + costs[0] * targets + costs[1] * attended

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        names = [*ARRAYS, *([CONTEXTS] if (self.path / f"{CONTEXTS}.npy").exists() else [])]
        return {name: np.load(self.path / f"{name}.npy", mmap_mode="r") for name in names}

    @cached_property
    def document_tokens(self) -> float:
        """Length of the document that a token is in, averaged over tokens."""
        lengths = np.asarray(self._arrays["lengths"], dtype=np.float64)
        return float((lengths**2).sum() / lengths.sum())

    def row_sizes(
        self, order: np.ndarray, *, packs_per_step: int, workers: int, micro_batch: int, share_prefixes: bool
    ) -> tuple[int, int, float, float]:
        """Sizes of the rows of a run that trains packs in an ``order``: most tokens of a row, most supervised tokens of
        a row, mean tokens of a row, and mean tokens of the documents in a row.

        The last two differ with ``share_prefixes``, where a row has every common prefix once, and the prompt of a pair;
        without, that is there twice.
        """
        row = _rows(len(order), packs_per_step, workers, micro_batch)
        by_row = np.argsort(row, kind="stable")
        begins = np.flatnonzero(np.diff(row[by_row], prepend=-1))
        packs, sizes = order[by_row], self._sizes
        supervised, whole = (np.add.reduceat(amounts[packs], begins) for amounts in (sizes.supervised, sizes.tokens))
        tokens = whole + np.add.reduceat(sizes.prompts[packs], begins)
        if share_prefixes:
            tokens = np.add.reduceat(sizes.own[packs], begins)
            prefix_bits = np.bitwise_or.reduceat(sizes.prefixes[packs], begins)
            for number, prefix in enumerate(self.common_prefixes):
                added = prefix.length - (self.common_prefixes[prefix.parent].length if prefix.parent >= 0 else 0)
                tokens += added * ((prefix_bits >> np.uint64(number)) & np.uint64(1)).astype(np.int64)
        return int(tokens.max()), int(supervised.max()), float(tokens.mean()), float(whole.mean())

    def image_tokens_of_rows(
        self, order: np.ndarray, *, packs_per_step: int, workers: int, micro_batch: int
    ) -> tuple[int, float]:
        """Tokens that stand for images in the rows of a run, as for ``row_sizes``: the most, and the mean."""
        if not self.images:
            return 0, 0.0
        row = _rows(len(order), packs_per_step, workers, micro_batch)
        of_rows = np.bincount(np.unique(row, return_inverse=True)[1], weights=self._sizes.images[order])
        return int(of_rows.max()), float(of_rows.mean())

    def image_tokens(self, index: int) -> np.ndarray:
        """Tokens that stand for images in every document of a pack, int (num_documents,)."""
        documents = self._of_pack(index, "documents")
        return (
            self.source.column("image_tokens")[documents] if self.images else np.zeros(len(documents), dtype=np.int64)
        )

    @cached_property
    def _sizes(self) -> PackSizes:
        arrays, begins = self._arrays, self._arrays["offsets"][:-1]
        lengths, prefix_numbers = np.asarray(arrays["lengths"], dtype=np.int64), np.asarray(arrays["prefixes"])
        supervised = np.minimum(self.source.column("supervised")[arrays["documents"]], lengths)
        chains = [chain(self.common_prefixes, number) for number in range(len(self.common_prefixes))]
        bits = np.array([*(sum(1 << number for number in members) for members in chains), 0], dtype=np.uint64)
        shared = np.array([*(prefix.length for prefix in self.common_prefixes), 0])
        return PackSizes(
            tokens=np.add.reduceat(lengths, begins),
            supervised=np.add.reduceat(supervised, begins),
            own=np.add.reduceat(lengths - shared[prefix_numbers], begins),
            prefixes=np.bitwise_or.reduceat(bits[prefix_numbers], begins),
            prompts=np.add.reduceat(self.source.column("shared")[arrays["documents"]].astype(np.int64), begins),
            images=np.add.reduceat(self.source.column("image_tokens")[arrays["documents"]].astype(np.int64), begins),
        )

    @cached_property
    def source(self) -> Documents:
        """The documents that the packs point into."""
        described = json.loads((self.path / "packs.json").read_text(encoding="utf-8"))
        return Documents((self.path / described["documents"]).resolve())

    def pack(self, index: int) -> Pack:
        """One pack. Raises ``IndexError``."""
        if not 0 <= index < self.num_packs:
            raise IndexError(f"pack {index} of {self.num_packs}")
        names = ("documents", "starts", "lengths", "prefixes")
        documents, starts, lengths, prefixes = (self._of_pack(index, name) for name in names)
        contexts = self._of_pack(index, CONTEXTS) if CONTEXTS in self._arrays else np.zeros_like(lengths)
        pieces = list(zip(documents.tolist(), starts.tolist(), lengths.tolist(), contexts.tolist(), strict=True))
        input_ids = [self.source.tokens(document)[start : start + length] for document, start, length, _ in pieces]
        weights = [piece_weights(self.source.spans(document), *borders) for document, *borders in pieces]
        carry = self.source.carry
        carried = np.array([self.source.carried(document) for document in documents.tolist()]).T if carry else ()
        forks = np.array([self.source.fork(document) for document in documents.tolist()]) if self.pairs else None
        return Pack(
            np.concatenate(input_ids),
            np.concatenate(weights),
            lengths,
            documents,
            prefixes,
            starts,
            dict(zip(carry, carried, strict=True)),
            forks,
            None if self.reference is None else self.reference[documents],
            None if self.taught is None else self.taught.of_pack(index),
            () if self.features is None else self.features.of_pack(documents.tolist(), input_ids),
        )

    def documents(self, index: int) -> np.ndarray:
        """Index in the source of every document of a pack: int64 (num_documents,)."""
        return self._of_pack(index, "documents")

    def lengths(self, index: int) -> np.ndarray:
        """Tokens of every document of a pack, int32 (num_documents,)."""
        return self._of_pack(index, "lengths")

    def row_lengths(self, index: int, chunk: int = 1) -> np.ndarray:
        """Tokens that every document of a pack takes in rows of its own, multiples of ``chunk``: int (num_documents,);
        of a pair those of both answers."""
        lengths = self.lengths(index)
        if not self.pairs:
            return in_chunks(lengths, chunk)
        documents = self._of_pack(index, "documents")
        forks = np.stack([self.source.column(name)[documents] for name in ("shared", "second")], axis=1)
        return of_pairs(lengths, forks, chunk)

    @property
    def most_row_tokens(self) -> int:
        """Tokens that a document takes in rows of its own, at most."""
        return self.max_length * (2 if self.pairs else 1)

    def supervised(self, index: int) -> np.ndarray:
        """Supervised tokens of every document of a pack, int64 (num_documents,); at most, of one that was split."""
        supervised = self.source.column("supervised")[self._of_pack(index, "documents")]
        counts: np.ndarray = np.minimum(supervised, self.lengths(index))
        return counts

    def _of_pack(self, index: int, name: str) -> np.ndarray:
        offsets = self._arrays["offsets"]
        return np.array(self._arrays[name][int(offsets[index]) : int(offsets[index + 1])])

    def where(self, document: int) -> tuple[str, int]:
        """File and row that a document of ``Pack.documents`` came from."""
        return self.source.where(document)


def _rows(number: int, packs_per_step: int, workers: int, micro_batch: int) -> np.ndarray:
    """Numbers that tell the rows of a run apart, one for each of its first packs: int64 (number,)."""
    step, within = np.divmod(np.arange(number), packs_per_step)
    turn, worker = np.divmod(within, workers)
    row: np.ndarray = (step * workers + worker) * packs_per_step + turn // micro_batch
    return row


def piece_weights(spans: Sequence[Span], start: int, length: int, context: int = 0) -> np.ndarray:
    """``Pack.weights`` of ``length`` tokens of a document from ``start`` on, float32, given the spans of all of it; the
    first ``context`` of them are trained elsewhere."""
    weights = np.zeros(length, dtype=np.float32)
    for first, stop, weight in spans:
        weights[max(first - start, context, 1) : max(stop - start, 0)] = weight
    return weights


def write_packs(path: Path, documents: str, arrays: dict[str, np.ndarray], totals: dict[str, Any]) -> None:
    """Write a data set. ``documents`` is the path of the documents relative to ``path``."""
    path.mkdir(parents=True)
    for name, values in arrays.items():
        np.save(path / f"{name}.npy", values)
    (path / "packs.json").write_text(json.dumps({**totals, "documents": documents}, indent=2) + "\n", encoding="utf-8")
