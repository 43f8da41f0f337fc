"""What a worker reads: packs of whole documents, memory-mapped, with no tokenizer and no list of its own.

A data set is a directory of a few arrays beside the documents that it points into:

    packs.json       how many packs, documents and tokens; where the documents lie
    offsets.npy      int64 (num_packs + 1,): first piece of every pack
    documents.npy    int64 (num_pieces,): the document of every piece
    starts.npy       int32 (num_pieces,): its first token in the document (0 unless the document was split)
    lengths.npy      int32 (num_pieces,): its number of tokens
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.data.documents import Documents

ARRAYS = ("offsets", "documents", "starts", "lengths")


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


@dataclass(frozen=True)
class PackedDataset:
    """Packs on disk. Opening maps the arrays and reads nothing else."""

    path: Path
    num_packs: int
    num_documents: int
    num_tokens: int
    supervised_tokens: int
    max_length: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> PackedDataset:
        """Open what ``prepare`` has written. Raises ``FileNotFoundError`` when it is not there."""
        described = json.loads((Path(path) / "packs.json").read_text(encoding="utf-8"))
        names = ("num_packs", "num_documents", "num_tokens", "supervised_tokens", "max_length")
        return cls(Path(path), *(described[name] for name in names))

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        return {name: np.load(self.path / f"{name}.npy", mmap_mode="r") for name in ARRAYS}

    @cached_property
    def document_tokens(self) -> float:
        """Length of the document that a token is in, averaged over tokens."""
        lengths = np.asarray(self._arrays["lengths"], dtype=np.float64)
        return float((lengths**2).sum() / lengths.sum())

    def longest(self, packs: int) -> tuple[int, ...]:
        """Tokens of the longest pack, of the two longest, and so on, up to ``packs``."""
        lengths = np.add.reduceat(self._arrays["lengths"], self._arrays["offsets"][:-1], dtype=np.int64)
        return tuple(np.cumsum(-np.sort(-lengths)[:packs]).tolist())

    def most_supervised(self, packs: int) -> tuple[int, ...]:
        """Supervised tokens of the pack that has most of them, of the two that have, and so on, up to ``packs``.

        At most, where a document was split: all of its may lie in one piece.
        """
        documents, lengths = self._arrays["documents"], self._arrays["lengths"]
        supervised = np.minimum(self.source.column("supervised")[documents], lengths)
        sums = np.add.reduceat(supervised, self._arrays["offsets"][:-1], dtype=np.int64)
        return tuple(np.cumsum(-np.sort(-sums)[:packs]).tolist())

    @cached_property
    def source(self) -> Documents:
        """The documents that the packs point into."""
        described = json.loads((self.path / "packs.json").read_text(encoding="utf-8"))
        return Documents((self.path / described["documents"]).resolve())

    def pack(self, index: int) -> Pack:
        """One pack. Raises ``IndexError``."""
        if not 0 <= index < self.num_packs:
            raise IndexError(f"pack {index} of {self.num_packs}")
        arrays = self._arrays
        first, last = int(arrays["offsets"][index]), int(arrays["offsets"][index + 1])
        documents = np.array(arrays["documents"][first:last])
        starts = arrays["starts"][first:last].tolist()
        lengths = np.array(arrays["lengths"][first:last])
        input_ids = np.empty(int(lengths.sum()), dtype=np.int32)
        weights = np.zeros(len(input_ids), dtype=np.float32)
        at = 0
        for document, start, length in zip(documents.tolist(), starts, lengths.tolist(), strict=True):
            input_ids[at : at + length] = self.source.tokens(document)[start : start + length]
            for begin, stop, weight in self.source.spans(document):
                begin, stop = max(begin - start, 1), min(stop - start, length)
                if stop > begin:
                    weights[at + begin : at + stop] = weight
            at += length
        return Pack(input_ids, weights, lengths, documents)

    def where(self, document: int) -> tuple[str, int]:
        """File and row that a document of ``Pack.documents`` came from."""
        return self.source.where(document)


def write_packs(path: Path, documents: str, arrays: dict[str, np.ndarray], totals: dict[str, int]) -> None:
    """Write a data set. ``documents`` is the path of the documents relative to ``path``."""
    path.mkdir(parents=True)
    for name in ARRAYS:
        np.save(path / f"{name}.npy", arrays[name])
    (path / "packs.json").write_text(json.dumps({**totals, "documents": documents}, indent=2) + "\n", encoding="utf-8")
