"""How rows become documents: the tokenizer, the templates and their shapes, and what the options say of it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from tonnage.config import Data
from tonnage.data.images.processing import ImageRecipe
from tonnage.data.text.rendering import ChatTemplate
from tonnage.data.text.shape import TurnShape

OF_DOCUMENTS = ("train_on", "fold_system", "control_tokens", "carry")
"""The options, besides those of templates, by which a row becomes another document."""


@dataclass(frozen=True)
class Script:
    """A template that conversations are written with, and its shape."""

    template: ChatTemplate
    shape: TurnShape


@dataclass(frozen=True)
class Recipe:
    """All that is needed to turn rows into documents: plain values, so that it can be handed to another process."""

    tokenizer_json: str
    scripts: tuple[Script, ...]
    """One, or two: the second is for conversations with tools."""
    options: Data
    text_start: str
    """What goes before a plain text: the beginning-of-text token where the tokenizer puts one."""
    text_end: str
    """What goes after a plain text: the end-of-text token."""
    controls: tuple[str, ...] = ()
    """The control tokens that ``control_tokens`` is about."""
    images: ImageRecipe | None = None
    """How images become tokens; None of a model that takes none."""

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    def key(self) -> dict[str, Any]:
        """Plain values that differ where recipes do; the tokenizer, a few megabytes, as a digest."""
        scripts = [{"template": asdict(script.template), "shape": asdict(script.shape)} for script in self.scripts]
        for script in scripts:
            if not script["template"]["parts"]:  # of text alone the key is what it was before there were images
                del script["template"]["parts"]
        plain = {
            "tokenizer_json": hashlib.blake2b(self.tokenizer_json.encode(), digest_size=16).hexdigest(),
            "scripts": scripts,
            "options": self.options.model_dump(include={*OF_DOCUMENTS}),
            **{name: getattr(self, name) for name in ("text_start", "text_end", "controls")},
        }
        return plain if self.images is None else plain | {"images": self.images.key()}

    @staticmethod
    def from_json(text: str) -> Recipe:
        return _ADAPTER.validate_json(text)


_ADAPTER = TypeAdapter(Recipe)
