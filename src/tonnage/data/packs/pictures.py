"""The images of documents where features are not computed beforehand: they are opened when a micro-batch needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tonnage.data.images.processing import ImageRecipe
from tonnage.data.packs.features import ImageFeatures, RowImages
from tonnage.data.tokens.documents import Documents


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
