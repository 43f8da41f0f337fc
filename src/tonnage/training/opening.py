"""The images of micro-batches, opened by a thread of their own before they are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

from tonnage.data.packs.features import RowImages


@dataclass(frozen=True)
class Placed:
    """A document of a micro-batch, and where its tokens are."""

    row: int
    start: int
    length: int
    images: RowImages | None


class Opening:
    def __init__(self, documents: Sequence[Placed]) -> None:
        self.documents = tuple(documents)
        """All of the micro-batch's."""
        self.following: Opening | None = None
        """Of the micro-batch with images that comes next."""
        self._opened: Future[list[dict[str, Any]]] | None = None

    @property
    def with_images(self) -> list[tuple[Placed, RowImages]]:
        """The documents that have any, with them."""
        return [(document, document.images) for document in self.documents if document.images is not None]

    def begin(self) -> None:
        """Let them be opened, if they are not yet."""
        if self._opened is None:
            self._opened = _opener().submit(lambda: [images.inputs() for _, images in self.with_images])

    def take(self) -> list[dict[str, Any]]:
        """What the tower is given of each of ``with_images``. Raises ``UserError``."""
        self.begin()
        assert self._opened is not None
        inputs, self._opened = self._opened.result(), None
        if self.following is not None:
            self.following.begin()
        return inputs


@cache
def _opener() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "images")
