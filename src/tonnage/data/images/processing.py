"""The model's own processor: what a text becomes in which images stand, and the pixels that its tower is given.

Which tokens stand for an image, and how many, only the processor knows; it may depend on how many images a row has. So
it is given the whole row as transformers gives it, and says what it has put in the place of each placeholder. The
tokens that it makes of the row are those that the document must have.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.data.images.opening import INSTALL
from tonnage.data.text.choice import extended
from tonnage.errors import user_error
from tonnage.forms.conversation import RowError, first_line

if TYPE_CHECKING:
    from PIL.Image import Image as Pixels

FILES = ("preprocessor_config.json", "processor_config.json")
"""Either of them a processor of images has."""
OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
KINDS = ("token_type_ids", "mm_token_type_ids")
"""Of these, what tells which tokens are images'."""
LEAST_TRANSFORMERS = "a transformers whose processors say where they put the tokens of an image (5.23's do)"


@dataclass(frozen=True)
class ImageRecipe:
    """How images become tokens: plain values, so that they can be handed to another process."""

    directory: str
    """Of the model, with the files of its processor."""
    token_id: int
    """The token in whose places the features of an image go."""
    trust_remote_code: bool = False
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Of an image as the processor sees it; None is as many as it has."""
    added: tuple[str, ...] = ()
    """Special tokens that its tokenizer gets where it lacks them, in the order of their ids."""

    def key(self) -> dict[str, Any]:
        """Plain values that differ where tokens may."""
        digests = {}
        for name in (*FILES, "tokenizer_config.json"):
            with suppress(OSError):
                digests[name] = hashlib.blake2b(Path(self.directory, name).read_bytes(), digest_size=16).hexdigest()
        limits = {name: getattr(self, name) for name in ("min_pixels", "max_pixels") if getattr(self, name) is not None}
        added = {"added": self.added} if self.added else {}
        return {"files": digests, "token": self.token_id, "versions": versions(), **limits, **added}

    def resized(self, pixels: Pixels) -> Pixels:
        """An image with no more and no fewer pixels than there may be, its sides in about the same proportion."""
        width, height = pixels.size
        for limit, is_beyond in ((self.max_pixels, operator.gt), (self.min_pixels, operator.lt)):
            if limit is not None and is_beyond(width * height, limit):
                factor = math.sqrt(limit / (width * height))
                width, height = max(1, int(width * factor)), max(1, int(height * factor))
                pixels = pixels.resize((width, height))
        return pixels


def versions() -> dict[str, str]:
    """Of the packages that images go through."""
    known = {}
    for name in ("transformers", "pillow", "torchvision"):
        with suppress(PackageNotFoundError):
            known[name] = version(name)
    return known


def has_processor(directory: Path) -> bool:
    """Whether a model comes with a processor of images."""
    return any((directory / name).is_file() for name in FILES)


@lru_cache(maxsize=2)
def processor_of(recipe: ImageRecipe) -> Any:
    """The processor. Raises ``UserError`` where it cannot be loaded, or takes no images."""
    where = recipe.directory
    try:
        from transformers import AutoProcessor

        processor = AutoProcessor.from_pretrained(where, trust_remote_code=recipe.trust_remote_code)
    except Exception as error:  # a stranger's values, or a package that is missing
        needed = "a processor that the installed transformers can load"
        raise user_error(f"rows with images, and {first_line(error)[:300]}", needed, INSTALL, where) from error
    if getattr(processor, "image_processor", None) is None or getattr(processor, "image_token", None) is None:
        observed = f"rows with images, and a {type(processor).__name__}, which puts no token in their place"
        raise user_error(observed, "a model whose processor takes images", "choose another model", where)
    processor.tokenizer, _ = extended(processor.tokenizer, None, recipe.added)
    return processor


@dataclass(frozen=True)
class ProcessedRow:
    """What the processor makes of a row with images."""

    replaced: tuple[tuple[int, int, str], ...]
    """First character and one past the last of every placeholder in the row's text, and what goes there."""
    ids: np.ndarray
    """int32 (tokens,), of the whole."""


def process_row(recipe: ImageRecipe, text: str, pixels: Sequence[Pixels]) -> ProcessedRow:
    """What the processor makes of a text and the images that stand in it. Raises ``RowError``."""
    processor = processor_of(recipe)
    try:
        sized = [recipe.resized(image) for image in pixels]
        output = processor(text=[text], images=[sized], add_special_tokens=False, return_text_replacement_offsets=True)
    except Exception as error:  # placeholders that are too many, sizes that it cannot use
        raise RowError("image", f"the model's processor does not take the row ({first_line(error)[:300]})") from None
    offsets = output.get("text_replacement_offsets")
    if offsets is None:
        raise user_error(
            f"{type(processor).__name__}, which does not say where it puts the tokens of an image",
            LEAST_TRANSFORMERS,
            "update transformers, or choose another model",
            recipe.directory,
        )
    replaced = tuple((*place["span"], place["replacement"]) for place in offsets[0])
    if any(text[slice(*place["span"])] != place["text"] for place in offsets[0]):
        raise RowError("image", "the model's processor changes the row before it puts images into it")
    if len(replaced) != len(pixels):
        raise RowError("image", f"the processor put {len(replaced)} images into a row that has {len(pixels)}")
    return ProcessedRow(replaced, np.array(output["input_ids"][0], dtype=np.int32))


def tower_inputs(recipe: ImageRecipe, pixels: Sequence[Pixels]) -> tuple[dict[str, Any], list[int]]:
    """What the tower is given of the images of a row, as torch's tensors, and the tokens that stand for these."""
    processor = processor_of(recipe)
    text, sized = processor.image_token * len(pixels), [recipe.resized(image) for image in pixels]
    output = processor(text=[text], images=[sized], add_special_tokens=False, return_tensors="pt")
    return {name: value for name, value in output.items() if name not in OF_TEXT}, output["input_ids"][0].tolist()


def model_inputs(recipe: ImageRecipe, rows: Sequence[Sequence[Pixels]]) -> tuple[dict[str, Any], list[int]]:
    """What the whole model is given beside the tokens of rows with images, and how many tokens those of each row have.
    ``KINDS`` are among it where the model wants to know which tokens are images', with values that are of no row.
    """
    processor = processor_of(recipe)
    output = processor(
        text=[processor.image_token * len(pixels) for pixels in rows],
        images=[list(pixels) for pixels in rows],
        add_special_tokens=False,
        return_tensors="pt",
        **({"padding": True} if len(rows) > 1 else {}),
    )
    counts = (output["input_ids"] == recipe.token_id).sum(1).tolist()
    others = set(OF_TEXT) - set(KINDS)
    return {name: value for name, value in output.items() if name not in others}, counts
