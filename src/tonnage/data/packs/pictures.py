"""The images of documents where features are not computed beforehand: they are opened when a micro-batch needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.data.images.opening import decode
from tonnage.data.images.processing import ImageRecipe, tower_inputs
from tonnage.data.packs.features import ImageFeatures
from tonnage.data.tokens.documents import Documents
from tonnage.errors import user_error
from tonnage.forms.conversation import RowError


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
class Pictures:
    """Those of the documents of a data set, in the place of ``Features``."""

    source: Documents
    recipe: ImageRecipe
    look_ahead: str = ""
    """As in ``ImageFeatures``."""

    def of_pack(self, documents: Sequence[int], tokens: Sequence[np.ndarray]) -> tuple[ImageFeatures | None, ...]:
        """As ``Features.of_pack``."""
        return tuple(map(self._of_document, documents, tokens))

    def _of_document(self, document: int, tokens: np.ndarray) -> ImageFeatures | None:
        places = np.flatnonzero(tokens == self.recipe.token_id)
        if not len(places):
            return None
        return ImageFeatures(RowImages(self.source, document, self.recipe), places, look_ahead=self.look_ahead)
