"""What a vision tower makes of the images of documents: files of features, and of positions beside images.

A directory of a few arrays:

    index.npy             int64 (documents, 5), of all documents with images that a run sees: document, chunk, first row
                          of its features, rows, and first row of its positions
    token.npy             int64 (): the token in whose places features go
    000000.npy ...        chunks, (rows, hidden), or several features side by side: fp32, fp16, or bf16 as its 16 bits
                          (uint16)
    000000.positions.npy  int32 (tokens of the chunk's documents, 3), of families whose tokens have three each

Documents that have the same images have the same rows. Nothing is read that is not asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from tonnage.data.images.opening import decode
from tonnage.data.images.processing import ImageRecipe, tower_inputs
from tonnage.data.tokens.documents import Documents
from tonnage.errors import user_error
from tonnage.forms.conversation import RowError

INDEX, TOKEN = "index.npy", "token.npy"


def chunk_name(number: int) -> str:
    """Of the file of a chunk."""
    return f"{number:06}.npy"


def positions_name(number: int) -> str:
    """Of the file of its documents' positions."""
    return f"{number:06}.positions.npy"


@dataclass(frozen=True)
class StoredRows:
    """Rows of an array in a file, which nobody has read yet: mapped into memory, what is read would stay there."""

    file: Path
    offset: int
    """Bytes before them."""
    dtype: np.dtype[np.generic]
    shape: tuple[int, int]

    def read(self) -> np.ndarray:
        """The rows. Raises ``OSError`` where the file is gone."""
        count = self.shape[0] * self.shape[1]
        return np.fromfile(self.file, self.dtype, count, offset=self.offset).reshape(self.shape)


@dataclass(frozen=True)
class RowImages:
    """The images of a document, which nobody has opened yet."""

    source: Documents
    document: int
    recipe: ImageRecipe

    @property
    def where(self) -> str:
        """File and row of the document."""
        file, row = self.source.where(self.document)
        return f"{file}:{row}"

    def inputs(self) -> dict[str, Any]:
        """What the tower is given of them. Raises ``UserError`` where one is another than when its row was prepared."""
        images = [table.load(number) for table, number in self.source.images(self.document)]
        try:
            return tower_inputs(self.recipe, [decode(image) for image in images])[0]
        except RowError as error:
            raise user_error(error.reason, "the image that its row was prepared with", where=self.where) from error


@dataclass(frozen=True)
class ImageFeatures:
    """What stands in the places of a document's image tokens."""

    rows: StoredRows | RowImages
    """(image tokens, width), in the order of the tokens; or the images, where the tower is to look at them itself."""
    places: np.ndarray
    """int64 (image tokens,): which of its tokens these are."""
    positions: np.ndarray | None = None
    """int32 (tokens, 3), where tokens have three each."""
    look_ahead: str = ""
    """In which layers tokens of an image see those after them (``planning.plan.DataProfile``)."""

    def of_tokens(self, number: int) -> ImageFeatures:
        """What the first ``number`` tokens of the document have, or so many tokens that begin with it and go on with
        words, of features that are stored."""
        assert isinstance(self.rows, StoredRows)
        places = self.places[self.places < number]
        own = replace(self, rows=replace(self.rows, shape=(len(places), self.rows.shape[1])), places=places)
        if self.positions is None:
            return own
        positions = self.positions[:number]
        behind = np.arange(1, number - len(positions) + 1, dtype=np.int32)[:, None]
        return replace(own, positions=np.concatenate([positions, positions.max() + behind.repeat(3, 1)]))


def images_of(places: np.ndarray) -> np.ndarray:
    """Which image the token in each of ``places`` is of, int64 (image tokens,): its tokens follow one another."""
    return np.cumsum(np.diff(places, prepend=places[:1]) > 1)


@dataclass(frozen=True)
class Features:
    """The features of the documents of a data set."""

    directory: Path
    token: int
    places: dict[int, tuple[int, ...]]
    """Document -> chunk, first row, rows, and first row of its positions."""
    look_ahead: str = ""
    """As in ``ImageFeatures``."""
    _chunks: dict[str, np.memmap[Any, Any]] = field(default_factory=dict)

    @staticmethod
    def open(directory: Path) -> Features:
        """Raises ``OSError`` and ``ValueError`` where the files are damaged."""
        index = np.load(directory / INDEX, allow_pickle=False)
        token = int(np.load(directory / TOKEN, allow_pickle=False))
        return Features(directory, token, {document: (*place,) for document, *place in index.tolist()})

    def of_pack(self, documents: Sequence[int], tokens: Sequence[np.ndarray]) -> tuple[ImageFeatures | None, ...]:
        """Those of every document of a pack, whose ``tokens`` are all of its; None of one without images."""
        return tuple(map(self._of_document, documents, tokens))

    def _of_document(self, document: int, tokens: np.ndarray) -> ImageFeatures | None:
        places = np.flatnonzero(tokens == self.token)
        if document not in self.places:
            if len(places):
                raise IndexError(f"document {document}, whose images nobody has looked at ({self.directory})")
            return None
        chunk, first, number, first_position = self.places[document]
        if number != len(places):
            raise IndexError(f"document {document} has {len(places)} tokens of images, and {number} features")
        array = self._chunk(chunk_name(chunk))
        offset = int(array.offset) + first * int(array.strides[0])
        rows = StoredRows(self.directory / chunk_name(chunk), offset, array.dtype, (number, array.shape[1]))
        if not (self.directory / positions_name(chunk)).exists():
            return ImageFeatures(rows, places, look_ahead=self.look_ahead)
        stored = self._chunk(positions_name(chunk))
        positions = np.array(stored[first_position : first_position + len(tokens)])
        return ImageFeatures(rows, places, positions, self.look_ahead)

    def _chunk(self, name: str) -> np.memmap[Any, Any]:
        if name not in self._chunks:
            self._chunks[name] = np.load(self.directory / name, mmap_mode="r", allow_pickle=False)
        return self._chunks[name]
