"""Rows as the model sees them, for people: text in pieces, each of which counts or is context.

A piece is decoded as a whole, so that characters of several tokens stay whole. ``pictures`` takes the first rows that
will be trained, of every source some, for a run to keep.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from tonnage.data.building.mates import LABEL
from tonnage.data.images.shown import ShownImage, shown_images

if TYPE_CHECKING:
    from tonnage.data.prepare import Prepared

ROWS = 20
"""Of each source, at most."""
MOST_ROWS = 120
"""Of all sources together."""
MOST_TOKENS = 600
"""Of a row."""
MOST_IMAGES = 60
"""Of all rows together, of which there is a small picture."""
MOST_PACKS = 2000
"""That are looked through for rows of every source."""


@dataclass(frozen=True)
class TokenRun:
    text: str
    weight: float
    """Of their loss: 0 is context."""
    special: bool
    """Whether they are special tokens."""
    thumbnail: str = ""
    """A data URI, where they are an image's."""


@dataclass(frozen=True)
class Picture:
    """A row, or as much of it as is shown."""

    file: str
    row: int
    """From 1, in its file."""
    tokens: int
    """In all of it."""
    supervised: int
    """Those of them whose loss counts."""
    pieces: list[TokenRun]
    """Of a pair, the prompt and the answer that is preferred."""
    rejected: list[TokenRun] = field(default_factory=list)
    """Of a pair, the other answer."""


@dataclass(frozen=True)
class SourcePictures:
    name: str
    role: str
    rows: list[Picture]


@dataclass(frozen=True)
class Pictures:
    """What ``rows.json`` in the directory of a run holds."""

    sources: list[SourcePictures]


def pieces(
    ids: Sequence[int],
    weights: Sequence[float],
    tokenizer: Any,
    special: Collection[int] = (),
    image_token: int | None = None,
    images: Sequence[ShownImage] = (),
) -> list[TokenRun]:
    """A document in pieces of equal weight that are all special tokens, those of ``special``, or none. In the place of
    an image's tokens stands what it is; where ``images`` are not known, its token once, with how often it is there."""
    owners = _owners(ids, image_token, images)
    kinds = [(weight, token in special, own) for token, weight, own in zip(ids, weights, owners, strict=True)]
    borders = [at for at in range(len(ids) + 1) if at in (0, len(ids)) or kinds[at] != kinds[at - 1]]
    runs, shown = list[TokenRun](), set[int]()
    for start, end in pairwise(borders):
        weight, is_special, owner = kinds[start]
        if owner in shown:
            continue
        if owner is not None:
            shown.add(owner)
            runs.append(TokenRun(images[owner].words, weight, is_special, images[owner].thumbnail))
            continue
        text = tokenizer.decode(list(ids[start:end]), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        text = text if image_token is None else counted(text, tokenizer, image_token)
        runs.append(TokenRun(text, weight, is_special))
    return runs


def _owners(ids: Sequence[int], image_token: int | None, images: Sequence[ShownImage]) -> list[int | None]:
    """Of every token which of ``images`` it stands for."""
    ends = list(accumulate(image.tokens for image in images))
    before = accumulate((token == image_token for token in ids), initial=0)
    return [
        bisect_right(ends, number) if images and token == image_token and number < ends[-1] else None
        for token, number in zip(ids, before, strict=False)
    ]


def counted(text: str, tokenizer: Any, image_token: int) -> str:
    """A text in which the token of images stands once where it is several times, with how often that is."""
    token = str(tokenizer.convert_ids_to_tokens(image_token))
    several = re.compile(f"(?:{re.escape(token)}){{2,}}")
    return several.sub(lambda match: f"{token}×{len(match[0]) // len(token)}", text)


def image_token_of(prepared: Prepared) -> int | None:
    """The token that stands for images, where rows have any."""
    images = prepared.recipe.images
    return images.token_id if images is not None and prepared.account.total.images else None


def pictures(prepared: Prepared, seed: int) -> dict[str, Any]:
    """The first rows that will be trained, and those of validation sources, as ``Pictures`` in plain values; of so many
    sources that not all can have one, the first."""
    sources = prepared.account.sources[:MOST_ROWS]
    most = max(1, min(ROWS, MOST_ROWS // max(1, len(sources))))
    rows: list[list[Picture]] = [[] for _ in sources]
    special = frozenset(prepared.tokenizer.all_special_ids)
    image, left = image_token_of(prepared), MOST_IMAGES
    for dataset, role in ((prepared.train, "train"), (prepared.validation, "validation")):
        if dataset is None:
            continue
        role_sources = {at for at, source in enumerate(sources) if source.role == role}
        for position in range(min(dataset.num_packs, MOST_PACKS)):
            if all(len(rows[at]) == most for at in role_sources):
                break
            pack, at = dataset.pack(dataset.pack_at(position, seed)), 0
            seconds = pack.lengths if pack.forks is None else pack.forks[:, 1]
            has_mates = LABEL in pack.carried
            for document, length, second in zip(
                pack.documents.tolist(), pack.lengths.tolist(), seconds.tolist(), strict=True
            ):
                tokens, at = slice(at, at + length), at + length
                source = dataset.source.part_of(document).source
                if source in role_sources and len(rows[source]) < most:
                    ids, weights = pack.input_ids[tokens].tolist(), pack.weights[tokens].tolist()
                    images = shown_images(dataset, document, prepared.recipe.images, left) if left else []
                    left -= len(images)
                    shown, rejected = (
                        pieces(ids[part], weights[part], prepared.tokenizer, special, image, images)
                        for part in (_shown(ids, 0, second, image), _shown(ids, second, len(ids), image))
                    )
                    rejected = [] if has_mates else rejected  # another row's, not this one's
                    supervised = sum(weight > 0 for weight in weights)
                    rows[source].append(Picture(*dataset.where(document), len(ids), supervised, shown, rejected))
    shown_sources = [SourcePictures(source.name, source.role, rows[at]) for at, source in enumerate(sources)]
    return asdict(Pictures(shown_sources))


def _shown(ids: Sequence[int], start: int, stop: int, image_token: int | None) -> slice:
    """As many tokens of a part of a document as are shown, those of images aside."""
    places = [at for at in range(start, stop) if ids[at] != image_token]
    return slice(start, stop if len(places) <= MOST_TOKENS else places[MOST_TOKENS])
