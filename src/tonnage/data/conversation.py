"""What a row means: messages with a weight each, or a plain text.

Messages are plain dictionaries, because chat templates are written against those: ``role`` and ``content`` always,
``tool_calls``, ``reasoning_content``, ``name`` where the row has them, and ``instruction`` and ``input`` beside
``content`` for rows in the Alpaca form, so that a template can set them apart.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")


class RowError(Exception):
    """One row cannot be used, and why. Never leaves the data room."""

    def __init__(self, kind: str, reason: str) -> None:
        self.kind = kind
        self.reason = reason
        super().__init__(f"{kind}: {reason}")


@dataclass(slots=True)
class Conversation:
    """The messages of one row, or its text."""

    messages: list[Message] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """Weight of each message's tokens in the loss: 0 for everything the assistant did not say."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions the assistant may call."""
    text: str | None = None
    """For rows of plain text; there are no messages then."""
