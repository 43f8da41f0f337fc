"""The images of the rows of a part on their way into its documents and its table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tonnage.data.images.opening import MOST_PIXELS, EncodedImage, decode, load_image
from tonnage.data.images.processing import ImageRecipe, ProcessedRow, process_row
from tonnage.data.images.table import ImageTableWriter, stamps_now
from tonnage.data.text.masks import Marked, Span
from tonnage.data.tokens.encoder import Document
from tonnage.forms.conversation import Image, RowError

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels


class ImagesOfPart:
    """Reads the images of rows, one row after another."""

    def __init__(self, recipe: ImageRecipe, folder: Path, table: Path) -> None:
        """``folder``: from which their paths start. ``table``: the file that is written, if there are any."""
        self._recipe, self._folder, self._table = recipe, folder, ImageTableWriter(table)

    def of_row(self, text: str, images: Sequence[Image]) -> ImagesOfDocument:
        """The images of a row, which stand in its ``text``. Raises ``RowError``."""
        encoded = [self._load(image) for image in images]
        row = process_row(self._recipe, text, list(decoded(encoded)))
        numbers = tuple(map(self._table.add, encoded))
        return ImagesOfDocument(row, numbers, tuple(one.digest for one in encoded), self._recipe.token_id)

    def close(self) -> None:
        self._table.close()

    def _load(self, image: Image) -> EncodedImage:
        try:
            return load_image(image, self._folder)
        except RowError:
            if image.path and "\0" not in image.path:  # where it is there later, its row is another
                ((path, size, modified),) = stamps_now([(str(self._folder / image.path), 0, 0)])
                self._table.add(EncodedImage(b"", "", path, size, modified))
            raise


def decoded(images: Iterable[EncodedImage]) -> Iterator[Pixels]:
    """The pixels of the images of a row. Raises ``RowError``, also where they are too many together."""
    number = 0
    for image in images:
        pixels = decode(image)
        number += pixels.width * pixels.height
        if number > MOST_PIXELS:
            raise RowError("image", f"images of more than {MOST_PIXELS:,} pixels in one row")
        yield pixels


@dataclass(frozen=True)
class ImagesOfDocument:
    """The images of a row, as tokens."""

    row: ProcessedRow
    numbers: tuple[int, ...]
    """In the table of the part."""
    digests: tuple[str, ...]
    token_id: int
    """The token in whose places features go."""

    def expanded(self, marked: Marked, written: Callable[[str], str] = str) -> Marked:
        """A text of as many characters as the row's with the placeholders replaced, as they are ``written`` there, and
        its spans moved; what stands for an image is not trained."""
        pieces, at, moves = list[str](), 0, list[tuple[int, int]]()
        for start, stop, replacement in self.row.replaced:
            text = written(replacement)
            pieces += [marked.text[at:start], text]
            moves.append((stop, len(text) - (stop - start)))
            at = stop
        spans: list[Span] = []
        for first, last, weight in marked.spans:
            within = [(start, stop) for start, stop, _ in self.row.replaced if start < last and first < stop]
            borders = [first, *(border for place in within for border in place), last]
            for begin, end in zip(borders[::2], borders[1::2], strict=True):
                moved = sum(by for place, by in moves if place <= begin)
                if begin < end:
                    spans.append((begin + moved, end + moved, weight))
        return Marked("".join([*pieces, marked.text[at:]]), spans)

    def put_into(self, document: Document, *, checks: bool) -> Document | RowError:
        """The document with its images; ``checks``: that it is what the processor makes of the row."""
        if checks and not np.array_equal(document.tokens, self.row.ids):
            length = min(len(document.tokens), len(self.row.ids))
            differ = np.flatnonzero(document.tokens[:length] != self.row.ids[:length])
            at = int(differ[0]) if len(differ) else length
            return RowError("image", f"the model's processor makes other tokens of the row, from token {at} on")
        document.images, document.image_digests = self.numbers, self.digests
        document.image_tokens = int(np.count_nonzero(document.tokens == self.token_id))
        if not document.image_tokens:
            return RowError("image", f"the processor puts no token {self.token_id} in the place of an image")
        return document
