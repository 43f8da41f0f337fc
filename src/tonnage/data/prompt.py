"""What the model is given before the assistant speaks, from the same code that makes training text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from tonnage.data.text.choice import of_tokenizer
from tonnage.data.text.rendering import ChatTemplate
from tonnage.data.text.shape import TurnShape
from tonnage.data.tokens.control import KEPT, ControlTokens, control_tokens, special_tokens
from tonnage.data.tokens.encoder import plain_json
from tonnage.errors import user_error
from tonnage.forms.conversation import Conversation, Message, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encode_prompt(
    conversation: Conversation | Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> list[int]:
    """Tokens of a conversation up to and including the opening of the assistant's next turn.

    These are exactly the tokens that stand before the assistant's answer in training: control tokens in the words of
    messages are words, unless the tokenizer's run kept them. Raises ``UserError`` when the tokenizer has no template,
    or its template refuses the conversation.
    """
    tools = conversation.tools if isinstance(conversation, Conversation) else None
    originals = conversation.messages if isinstance(conversation, Conversation) else conversation
    messages: list[Message] = [dict(message) for message in originals]
    template = of_tokenizer(tokenizer, tools)
    shape = turn_shape(template, tokenizer)
    kept_tokens = tokenizer.init_kwargs.get(KEPT, ())
    controls = _controls(tuple(token for token in control_tokens(tokenizer, [shape]) if token not in kept_tokens))
    try:
        text = shape.opening(template.render(messages, tools, opened=shape.opens))
        text.encode()
        if shape.writes_turns and controls.in_words(messages, tools):
            broken = shape.opening(template.render(*controls.broken(messages, tools), opened=shape.opens))
            return controls.encoder(plain_json(tokenizer.backend_tokenizer)).ids(controls.words(text, broken))
    except RowError as error:
        reason, needed = error.reason, "messages the template knows"
    except UnicodeEncodeError as error:
        reason, needed = f"{error.object[error.start]!r} is not valid Unicode", "text"
    else:
        ids: list[int] = tokenizer(text, add_special_tokens=False, split_special_tokens=False)["input_ids"]
        return ids
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
