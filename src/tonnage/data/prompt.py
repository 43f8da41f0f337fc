"""What the model is given before the assistant speaks, from the same code that makes training text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tonnage.data.images.opening import load_image
from tonnage.data.images.processing import ImageRecipe, process_row
from tonnage.data.images.rows import ImagesOfDocument, decoded
from tonnage.data.text.choice import of_tokenizer
from tonnage.data.text.masks import Marked
from tonnage.data.text.rendering import ChatTemplate
from tonnage.data.text.shape import TurnShape
from tonnage.data.tokens.control import KEPT, ControlTokens, control_tokens, special_tokens
from tonnage.data.tokens.encoder import Document, plain_json
from tonnage.errors import user_error
from tonnage.forms.conversation import Conversation, Message, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    conversation: Conversation | Sequence[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    images: ImageRecipe | None = None,
) -> list[int]:
    """Tokens of a conversation up to and including the opening of the assistant's next turn.

    These are exactly the tokens that stand before the assistant's answer in training: control tokens in the words of
    messages are words, unless the tokenizer's run kept them. ``images``: how those of a conversation become tokens;
    paths of files are whole there. Raises ``UserError`` when the tokenizer has no template, or its template refuses the
    conversation, or an image of it cannot be used.
    """
    whole = conversation if isinstance(conversation, Conversation) else None
    tools, files = (None, []) if whole is None else (whole.tools, whole.images)
    originals = conversation.messages if isinstance(conversation, Conversation) else conversation
    messages: list[Message] = [dict(message) for message in originals]
    template = of_tokenizer(tokenizer, tools)
    if files:
        if images is None:
            raise user_error("a conversation with images", "words alone: nothing looks at images here")
        template = replace(template, parts=template.parts or "images")
    shape = turn_shape(template, tokenizer)
    kept_tokens = tokenizer.init_kwargs.get(KEPT, ())
    controls = _controls(tuple(token for token in control_tokens(tokenizer, [shape]) if token not in kept_tokens))
    try:
        text = shape.opening(template.render(messages, tools, opened=shape.opens))
        text.encode()
        ids: list[int]
        as_words = shape.writes_turns and bool(controls.in_words(messages, tools))
        words, own = text, None
        if as_words:
            broken = template.render(*controls.broken(messages, tools), opened=shape.opens)
            words = controls.words(text, shape.opening(broken))
        if files and images is not None:
            row = process_row(images, text, list(decoded(load_image(image, None) for image in files)))
            own = ImagesOfDocument(row, (), (), images.token_id)
            words = own.expanded(Marked(words, ()), controls.stood_in if as_words else str).text
        if as_words:
            ids = controls.encoder(plain_json(tokenizer.backend_tokenizer)).ids(words)
        else:
            ids = tokenizer(words, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        if own is not None:
            refusal = own.put_into(Document(np.array(ids, dtype=np.int32), []), checks=not as_words)
            if isinstance(refusal, RowError):
                raise refusal
        return ids
    except RowError as error:
        if error.kind == "image":
            raise user_error(error.reason, "images that can be used", error.change) from error
        reason, needed = error.reason, "messages the template knows"
    except UnicodeEncodeError as error:
        reason, needed = f"{error.object[error.start]!r} is not valid Unicode", "text"
    raise user_error(found=f"the conversation cannot be rendered ({reason})", needed=needed)


_controls = lru_cache(maxsize=4)(ControlTokens)


def stop_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Ids at which the assistant's turn is over: the template's closing token and the end of text."""
    ids = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    if isinstance(tokenizer.chat_template, str | dict):
        for end in reversed(turn_shape(of_tokenizer(tokenizer), tokenizer).stops):
            closing = tokenizer.convert_tokens_to_ids(end)
            if isinstance(closing, int):
                ids.insert(0, closing)
    return tuple(dict.fromkeys(ids))


def turn_shape(template: ChatTemplate, tokenizer: PreTrainedTokenizerBase) -> TurnShape:
    """The shape of the assistant's turn. Raises ``UserError`` when turns are never closed."""
    context = json.dumps([dict(template.special), dict(template.arguments)], sort_keys=True, default=str)
    return _shape(template.text, context, template.date, special_tokens(tokenizer), template.parts)


@lru_cache(maxsize=16)
def _shape(
    text: str, context: str, date: str, tokens: tuple[str, ...], parts: Literal["", "images", "all"]
) -> TurnShape:
    special, arguments = json.loads(context)
    return TurnShape.of(ChatTemplate(text, special, arguments, date, parts), tokens)
