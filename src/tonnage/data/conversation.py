"""What a row means: messages with a weight each, a plain text, or tokens.

Messages are plain dictionaries, because chat templates are written against those: ``role`` and ``content`` always,
``tool_calls``, ``reasoning_content``, ``name`` where the row has them, and ``instruction`` and ``input`` beside
``content`` for rows in the Alpaca form, so that a template can set them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tonnage.errors import TonnageError

Message = dict[str, Any]

Pieces = list[tuple[int, float]]
"""A text in pieces: the characters of each, and its weight in the loss."""

ROLES = ("system", "user", "assistant", "tool")


class RowError(Exception):
    """One row cannot be used, and why. Never leaves the data room."""

    def __init__(self, kind: str, reason: str, change: str = "") -> None:
        self.kind = kind
        self.reason = reason
        self.change = change
        """What the user can do about it, where that is known."""
        self.unread = 0
        """Bytes of the file behind this place of which no row is made."""
        super().__init__(f"{kind}: {reason}")

    def leaving(self, num_bytes: int) -> RowError:
        """The same error, because of which ``num_bytes`` of the file are not read."""
        self.unread = num_bytes
        if num_bytes:
            self.reason += f"; {num_bytes:,} bytes of the file are not read because of it"
        return self


def as_row_error(error: Exception) -> RowError:
    """What is wrong with the row at which something was raised, whatever that was.

    Raises it again where it is not the row's: what the user has to know (``TonnageError``), what the system refuses,
    and memory that is full.
    """
    if isinstance(error, RowError):
        return error
    if isinstance(error, TonnageError | OSError | MemoryError):
        raise error
    if isinstance(error, RecursionError):
        return RowError("wrong_type", "nested too deeply")
    reason = str(error).splitlines()[0][:300] if str(error) else "no reason"
    return RowError(
        "unexpected",
        f"it cannot be prepared ({type(error).__name__}: {reason})",
        "take it out, and report it: tonnage should have said what is wrong with it",
    )


@dataclass(slots=True)
class Conversation:
    """The messages of one row, or its text, or its tokens."""

    messages: list[Message] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    """Weight of each message's tokens in the loss: 0 for everything the assistant did not say."""
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions the assistant may call."""
    text: str | None = None
    """For rows of plain text; there are no messages then."""
    pieces: dict[int, Pieces] = field(default_factory=dict)
    """Of messages by number (0 for a text), where parts of one have weights of their own; these replace its weight,
    and what closes the turn has that of the last part."""
    unsaid: frozenset[int] = frozenset()
    """Messages that the row marks as not to be trained, whoever says them."""
    ids: Sequence[int] | None = None
    """For rows of tokens; there are no messages then."""
    ids_weights: Sequence[float] = ()
    """Weight of each of ``ids``."""
    carried: tuple[float, ...] = ()
    """Numbers of the row that go with it, in the order in which the data's options name them."""

    @property
    def is_chat(self) -> bool:
        """Whether a template has to make a text of it."""
        return self.text is None and self.ids is None

    def scaled(self, weight: float) -> Conversation:
        """The same with all its weights times ``weight``."""
        return replace(
            self,
            weights=[one * weight for one in self.weights],
            pieces={at: [(size, one * weight) for size, one in pieces] for at, pieces in self.pieces.items()},
            ids_weights=tuple(one * weight for one in self.ids_weights),
        )
