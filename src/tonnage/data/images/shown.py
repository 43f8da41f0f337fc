"""Images of a document for people: what they are, how many tokens each has, and a small picture of each.

A picture is made by Pillow from the pixels, never the bytes of the file, and has at most ``MOST_BYTES``.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.data.images.opening import decode
from tonnage.data.images.processing import ImageRecipe, process_row, processor_of
from tonnage.errors import UserError
from tonnage.forms.conversation import RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from PIL.Image import Image as Pixels

    from tonnage.data.packs.dataset import PackedDataset

MOST_BYTES = 8 << 10
"""Of a picture."""
SIZES = ((160, 75), (112, 60), (64, 40))
"""Its longest side and the quality of its JPEG, the first that is small enough."""
KIND = "data:image/jpeg;base64,"


@dataclass(frozen=True)
class ShownImage:
    """An image in words, and as a picture."""

    file: str
    """Its name; empty of one that stands in its row."""
    width: int
    height: int
    tokens: int
    thumbnail: str = ""
    """A data URI; empty where no picture is wanted."""

    @property
    def words(self) -> str:
        """What stands in the place of its tokens."""
        size = f"{self.width:,} x {self.height:,}, {self.tokens:,} token{'s' if self.tokens != 1 else ''}"
        return f"<image: {self.file}, {size}>" if self.file else f"<image: {size}>"


def shown_images(
    dataset: PackedDataset, document: int, recipe: ImageRecipe | None, num_thumbnails: int = 0
) -> list[ShownImage]:
    """The images of a document, the first of them with pictures. None where they cannot be looked at any more: the
    files are others, or Pillow is gone."""
    if recipe is None or not dataset.images:
        return []
    places = dataset.source.images(document)
    if not places:
        return []
    try:
        pixels = [decode(table.load(number)) for table, number in places]
        counts = _tokens_of(pixels, dataset, document, recipe)
        thumbnails = [thumbnail(image) if at < num_thumbnails else "" for at, image in enumerate(pixels)]
    except (RowError, UserError):
        return []
    names = [Path(table.path_of(number)).name for table, number in places]
    sizes = [image.size for image in pixels]
    return [
        ShownImage(name, *size, tokens, picture)
        for name, size, tokens, picture in zip(names, sizes, counts, thumbnails, strict=False)
    ]


def _tokens_of(pixels: Sequence[Pixels], dataset: PackedDataset, document: int, recipe: ImageRecipe) -> list[int]:
    """How many of a document's tokens each of its images has; none where the processor does not say it of each."""
    tokens = dataset.source.tokens(document)
    total = int((tokens == recipe.token_id).sum())
    if len(pixels) == 1:
        return [total]
    token = processor_of(recipe).image_token
    row = process_row(recipe, "\n".join([token] * len(pixels)), pixels)
    counts = [replacement.count(token) for _, _, replacement in row.replaced]
    return counts if sum(counts) == total else []


def thumbnail(pixels: Pixels) -> str:
    """A small picture as a data URI; empty where even the smallest is too large."""
    for side, quality in SIZES:
        small = pixels.copy()
        small.thumbnail((side, side))
        file = io.BytesIO()
        small.save(file, "JPEG", quality=quality)
        if len(content := file.getvalue()) <= MOST_BYTES:
            return KIND + base64.b64encode(content).decode()
    return ""
