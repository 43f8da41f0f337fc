"""Images that are looked at while a model is trained: in every micro-batch, by the tower that is attached to the model.

    files ──► a thread: opened, checked, the processor's pixels ──► tower, projector ──► in the places of tokens
              while the micro-batch before is computed              with gradients, where these learn

The rows of a micro-batch are looked at one after another, each as transformers looks at it. Where the tower learns, a
micro-batch without images looks at a blank one and takes no row of its features, so that every worker has gradients of
the same parameters, of zeros there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tonnage.data.images.processing import ImageRecipe, has_processor, tower_inputs
from tonnage.errors import user_error
from tonnage.model.files import ModelFiles, read_whole_config
from tonnage.model.vision import AttachedTower, image_token
from tonnage.training.batch import MicroBatch
from tonnage.training.opening import Opening, Placed

BLANK = (64, 64)
"""Width and height of the image that is looked at where there is none."""


def image_recipe(
    files: ModelFiles, *, pixels: tuple[int | None, int | None], trusts: bool = False
) -> ImageRecipe | None:
    """How images become tokens of the model in ``files``; None of one that takes none, or comes without a processor.

    ``pixels``: the fewest and the most of an image.
    """
    if not files.weights or not has_processor(files.directory):
        return None
    token = image_token(read_whole_config(files, trust_remote_code=trusts))
    if token is None:
        return None
    return ImageRecipe(str(files.directory), token, trusts, min_pixels=pixels[0], max_pixels=pixels[1])


class Sight:
    def __init__(self, tower: AttachedTower, recipe: ImageRecipe) -> None:
        self._tower, self._recipe = tower, recipe
        self._blank: Mapping[str, Any] | None = None

    def look(self, batch: MicroBatch) -> tuple[Tensor | None, Tensor | None]:
        """Features of a micro-batch's images, (image tokens, hidden), and positions of its tokens, int64 (3, rows,
        tokens), if they have such; None where there are none, and no gradient of any is wanted.

        Raises:
            UserError: an image is gone or another, or the model makes other features than the row has tokens for.
        """
        if batch.opening is None:
            if not (self._tower.learns and torch.is_grad_enabled()):
                return None, None
            (features,) = self._tower([self._of_nothing()])
            return features[:0], None
        inputs = batch.opening.take()
        features = self._tower(inputs)
        for (document, images), rows in zip(batch.opening.with_images, features, strict=True):
            tokens = _tokens_of(batch, document)
            if (number := int((tokens == self._recipe.token_id).sum())) != len(rows):
                raise user_error(
                    where=images.where,
                    found=f"{len(rows):,} features of images, and {number:,} tokens of images in the row",
                    needed="one for each: model and processor do not belong together",
                    change="choose another model, or report this with the model's name",
                )
        return torch.cat(features), self._positions(batch, batch.opening, inputs)

    def _positions(self, batch: MicroBatch, opening: Opening, inputs: Sequence[Mapping[str, Any]]) -> Tensor | None:
        in_space = [
            self._tower.positions(_tokens_of(batch, document), own)
            for (document, _), own in zip(opening.with_images, inputs, strict=True)
        ]
        if in_space[0] is None:
            return None
        rows, width = batch.input_ids.shape
        positions, of_images = torch.arange(width).repeat(3, rows, 1), iter(in_space)
        for document in opening.documents:
            of_text = torch.arange(document.length).expand(3, -1)
            own = of_text if document.images is None else next(of_images)
            assert own is not None
            positions[:, document.row, document.start : document.start + document.length] = own
        return positions

    def _of_nothing(self) -> Mapping[str, Any]:
        """What the tower is given of a blank image."""
        if self._blank is None:
            from PIL import Image

            self._blank = tower_inputs(self._recipe, [Image.new("RGB", BLANK)])[0]
        return self._blank


def _tokens_of(batch: MicroBatch, document: Placed) -> Tensor:
    return batch.input_ids[document.row, document.start : document.start + document.length]
