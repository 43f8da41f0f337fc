"""Answers about images: what a model is given beside the tokens of a conversation that has some.

The model of text answers as ever. Where an image comes, the model's processor makes tokens of the conversation, and
transformers' own model of text and images answers: its vision tower is loaded when it is first asked, and its model of
text is the one that is there already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.data.images.opening import load_image
from tonnage.data.images.processing import KINDS, ImageRecipe, has_processor, model_inputs, processor_of
from tonnage.data.images.rows import decoded
from tonnage.errors import user_error
from tonnage.files.paths import path_word
from tonnage.forms.conversation import Conversation, Image, RowError
from tonnage.forms.reader import conversation_of

if TYPE_CHECKING:
    from torch import Tensor

    from tonnage.model.files import ModelFiles
    from tonnage.model.vision import Tower


@dataclass(frozen=True)
class Sight:
    """How a model looks at images."""

    recipe: ImageRecipe
    load: Callable[[], Tower]
    """Makes the tower, around the model of text."""

    @cached_property
    def tower(self) -> Tower:
        """The tower in the whole model. Raises ``UserError`` where its weights cannot be loaded, or have no room."""
        import torch

        try:
            return self.load()
        except torch.OutOfMemoryError as error:
            raise user_error(
                "no room for the vision tower beside the model", "a larger GPU", "the CPU: CUDA_VISIBLE_DEVICES="
            ) from error

    @cached_property
    def pads(self) -> bool:
        """Whether the processor takes several conversations at a time."""
        return processor_of(self.recipe).tokenizer.pad_token_id is not None

    def inputs(self, ids: Tensor, images: Sequence[Sequence[Image]]) -> dict[str, Any]:
        """What the whole model is given beside ``ids``, int64 (conversations, tokens), in which the tokens of
        ``images`` stand, those of each conversation. Raises ``UserError`` where a file has changed meanwhile."""
        from tonnage.model.vision import accepted

        try:
            rows = [list(decoded(load_image(image, None) for image in row)) for row in images]
        except RowError as error:
            raise user_error(error.reason, "the image that its conversation was made with", error.change) from error
        inputs, counts = model_inputs(self.recipe, rows)
        is_image = ids == self.recipe.token_id
        if is_image.sum(1).tolist() != counts:
            raise user_error(
                f"{counts} tokens of images, and {is_image.sum(1).tolist()} of them in the conversations",
                "the images that these were made with, and as many tokens for each beside others",
                "one conversation at a time (--batch-size 1)" if len(counts) > 1 else "",
            )
        inputs |= {name: is_image.long() for name in KINDS if name in inputs}
        return self.tower.sent(accepted(self.tower.model.forward, inputs))


def sight_of(files: ModelFiles, text: Any, tokenizer: Any, device: Any, *, trusts: bool) -> Sight | None:
    """How the model of ``text`` in ``files`` looks at images; None of one that takes none, or has no processor.
    ``tokenizer`` is its own, or an adapter's, which may have more tokens."""
    from tonnage.model.files import read_model_config
    from tonnage.model.vision import load_tower

    def load() -> Tower:
        tower = load_tower(files, read_model_config(files, trust_remote_code=trusts), text.dtype, device, trusts=trusts)
        tower.around(text)
        return tower

    token = _image_token(files, trusts=trusts)
    if token is None:
        return None
    added = tuple(str(one) for _, one in sorted(tokenizer.added_tokens_decoder.items()) if one.special)
    return Sight(ImageRecipe(str(files.directory), token, trusts, added=added), load)


def check_images(directory: str | Path, *, trusts: bool) -> None:
    """Refuse images where the model of a directory takes none, before it is loaded. Raises ``UserError``."""
    from tonnage.model.files import find_model

    if _image_token(find_model(str(directory)), trusts=trusts) is None:
        raise user_error(
            where=str(directory),
            found="images, and a model that takes none, or whose files lack its processor",
            needed="a model of text and images with preprocessor_config.json or processor_config.json",
            change="choose another model, or ask about words",
        )


def _image_token(files: ModelFiles, *, trusts: bool) -> int | None:
    """The token in whose places features of images go; None of a model that takes none, or has no processor."""
    from tonnage.model.files import read_whole_config
    from tonnage.model.vision import image_token

    if not has_processor(files.directory):
        return None
    return image_token(read_whole_config(files, trust_remote_code=trusts))


def with_images(
    conversation: Conversation | Sequence[Mapping[str, Any]],
) -> Conversation | Sequence[Mapping[str, Any]]:
    """A conversation whose messages may have lists of parts, in which paths of images start where the program is.
    Raises ``UserError``."""
    if isinstance(conversation, Conversation) or not any(
        isinstance(message.get("content"), list) for message in conversation
    ):
        return conversation
    try:
        whole = conversation_of(conversation)
    except RowError as error:
        raise user_error(error.reason, "messages of text and images", error.change) from error
    whole.images = [Image(str(path_word(image.path).absolute())) if image.path else image for image in whole.images]
    return whole
