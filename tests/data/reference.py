"""Which tokens of a conversation are trained, worked out anew from ``apply_chat_template`` and the tokenizer alone.

Nothing here comes from ``tonnage.data``, and the way is another one: tokens are compared, not texts. A turn begins with
the first token in which the whole differs from the prompt that opens it, and ends with the token that closes turns, of
which its own words may hold some. ``test_reference`` holds this up against rows that were marked by hand.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]


def trained(
    tokenizer: Any,
    messages: Sequence[Message],
    weights: Sequence[float],
    closing: Sequence[str],
    tools: list[dict[str, Any]] | None = None,
    **arguments: Any,
) -> tuple[list[int], list[float]]:
    """Tokens of a conversation and the weight of each.

    ``weights``: one for each message; ``closing``: the tokens that close a turn of this template.
    """

    # Newer versions of transformers give a template the thought under this name too.
    told = [{"thinking": m["reasoning_content"], **m} if "reasoning_content" in m else m for m in messages]

    def tokens(upto: int, opened: bool = False) -> list[int]:
        text = tokenizer.apply_chat_template(
            told[:upto], tools=tools, tokenize=False, add_generation_prompt=opened, **arguments
        )
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    ends = {tokenizer.convert_tokens_to_ids(token) for token in closing}
    ids = tokens(len(messages))
    marked = [0.0] * len(ids)
    for turn, message in enumerate(messages):
        if message["role"] != "assistant" or weights[turn] == 0:
            continue
        start = common(tokens(turn, opened=True), ids)
        own = tokenizer(words_of(message), add_special_tokens=False)["input_ids"]
        more = sum(token in ends for token in own)
        at = start
        while ids[at] not in ends or more:
            more -= ids[at] in ends
            at += 1
        for place in range(max(start, 1), at + 1):
            marked[place] = weights[turn]
    return ids, marked


def words_of(message: Message) -> str:
    """All that a message says, in calls of tools too."""
    called = json.dumps(message.get("tool_calls", ""), ensure_ascii=False)
    return f"{message.get('reasoning_content', '')} {message['content'] or ''} {called}"


def common(first: Sequence[object], second: Sequence[object]) -> int:
    """How many tokens (or letters) two lists begin with alike."""
    return next(
        (n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
