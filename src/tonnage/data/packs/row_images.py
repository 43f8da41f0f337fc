"""The images of a document where features are not computed beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tonnage.data.images.processing import ImageRecipe, inputs_of
from tonnage.data.tokens.documents import Documents


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
        return inputs_of(self.recipe, images, self.where)
