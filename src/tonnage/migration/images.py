"""Rows with images: what a configuration says of them, of their sizes, and of the tower that sees them.

Axolotl says with ``processor_type`` that rows may hold images, and no more about them; LLaMA-Factory's
``dataset_info.json`` says in which column they are. Towers and projectors are frozen here unless they are named in
``train`` or ``adapter.targets``: Axolotl trains them with all other weights, LLaMA-Factory where it is told.
"""

from __future__ import annotations

import re

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.keys import AXOLOTL, asks_for_nothing
from tonnage.migration.sources import ImportedSources
from tonnage.migration.values import flag, text, whole
from tonnage.migration.yaml_files import read_data

_TABLE = read_data("images")
TOWERS = frozenset(_TABLE["towers"])
"""Parts of names of modules that are no model of text."""
_TEXT_MODEL = re.compile(r"(?:base_model\.model\.)?(?:model\.)?(?:language_model|text_model)\.(?:model\.)?")
ALL_BUT_TOWERS, TOWERS_WHOLE = "*", "tower.*"
"""Patterns of parameters that are trained: of the model of text, and of what sees."""
FREEZING = ("freeze_vision_tower", "freeze_multi_modal_projector")
"""Keys of LLaMA-Factory, each true unless it is said."""
OF_IMAGES = ("data.image_min_pixels", "data.image_max_pixels")
SOUNDS = re.compile(r"(?<![a-z])(audio|speech|voxtral|video|whisper)")
"""In names of processors and of data sets, in small letters."""


def may_have_images(draft: Draft) -> bool:
    """Whether Axolotl is told that rows may hold images."""
    return any(setting.value for setting in draft.settings("media"))


def in_text_model(pattern: str) -> str:
    """A pattern for names of layers in the whole of a model as one for those in its model of text."""
    return _TEXT_MODEL.sub("", pattern, count=1) if _TEXT_MODEL.match(pattern) else pattern


def names_tower(pattern: str) -> bool:
    """Whether a pattern for names of layers or parameters means some of a tower or projector."""
    return not TOWERS.isdisjoint(pattern.split("."))


def images(draft: Draft, sources: ImportedSources) -> None:
    """Whether rows hold images, and what else is said of them."""
    if draft.files.has(AXOLOTL):
        _of_axolotl(draft)
    else:
        draft.has_images = sources.hold_images
        _of_llama_factory(draft)
    if draft.has_images:
        draft.note("images")
    if draft.has_images and "parallel.tensor" in draft.tree:
        _without_tensor_parallelism(draft)


def _without_tensor_parallelism(draft: Draft) -> None:
    """Workers that share layers, which rows with images do not go with, and which changes no number."""
    size = draft.tree["parallel.tensor"]
    draft.withdraw(
        "parallel.tensor", "Rows with images are not trained so: how workers share the model, the plan says."
    )
    if any(implied.key == "launch.workers" and implied.value % size == 0 for implied in draft.implied):
        count = draft.tree["launch.workers"] // size
        draft.withdraw("launch.workers")
        draft.imply("launch.workers", count, "as many as the other axes need")


def _of_axolotl(draft: Draft) -> None:
    media, sizes = draft.first("media", text), draft.every("image_size", lambda value: value)
    draft.has_images = media is not None
    if media is None:
        draft.drop(sizes, "Rows are text.")
        draft.drop_every("Rows are text.", "towers_frozen", "role_boundaries")
        return
    entries = draft.tree.get("data.train", [])
    named = [name for name in (media.value, *(entry["path"] for entry in entries)) if SOUNDS.search(str(name).lower())]
    frozen = draft.first("towers_frozen", flag)
    is_frozen = frozen is not None and frozen.value
    is_whole = not draft.has("train") and not any(key.startswith("adapter.") for key in draft.tree)
    if draft.is_preference:
        draft.refuse(media, "Preferences between answers to images are not trained on.")
    elif named:
        draft.refuse(
            media, f"Rows with sounds or videos, as the name of {named[0]} says, are not trained on: images are."
        )
    elif entries:
        draft.put("data.train", entries, media)
    if is_whole and not is_frozen:
        draft.imply("train", [ALL_BUT_TOWERS, TOWERS_WHOLE], "Axolotl trains the tower with the rest")
    draft.drop((media, frozen), "Towers are frozen unless they are named.")
    draft.refuse([pick for pick in sizes if not asks_for_nothing(pick.value)])
    draft.drop(sizes, "Not set.")
    draft.note("images of Axolotl")
    _masks(draft)


def _masks(draft: Draft) -> None:
    """Axolotl trains every token but images where it does not know how the turns of a template begin."""
    own = draft.every("role_boundaries", lambda value: value)
    names = [str(setting.value) for setting in draft.settings("chat_template")]
    is_known = any(name in _TABLE["turns"] for name in names) or re.search(_TABLE["turns_of"], draft.model.lower())
    draft.drop(own, "Where turns begin and end, the template says.")
    if own or is_known:
        return
    because = "Axolotl knows no turns of this template, and trains all but images"
    draft.drop(draft.first("train_on_inputs", flag), f"{because}.")
    draft.imply("data.train_on", "all", because)
    draft.note("turns unknown")


def _towers(draft: Draft, trained: list[Pick[bool]]) -> None:
    """Tower and projector, which LLaMA-Factory trains where it is told not to freeze them."""
    is_whole = not any(key == "train" or key.startswith("adapter.") for key in draft.tree)
    if len(trained) == len(FREEZING) and is_whole:
        draft.put("train", [ALL_BUT_TOWERS, TOWERS_WHOLE], *trained)
    draft.refuse(trained, "Tower and projector are trained together, with all weights: name others in train.")


def _of_llama_factory(draft: Draft) -> None:
    crops, frozen = draft.every("image_crops", flag), draft.every("towers_frozen", flag)
    limits: list[Pick[int] | None] = []
    for key in OF_IMAGES:
        limits.append(draft.first(key, whole) if not draft.has_images else draft.copy(key, whole))
        if draft.has_images:
            draft.imply_default(key)
    if draft.has_images:
        draft.refuse(
            [pick for pick in crops if pick.value], "An image is one, in the size that the processor gives it."
        )
        _towers(draft, [pick for pick in frozen if not pick.value])
        if draft.tree.get("data.over_length", "truncate") == "truncate":
            draft.note("images too long")
    reason = "So it is here." if draft.has_images else "No row holds images."
    draft.drop((*limits, *crops, *frozen), reason)
