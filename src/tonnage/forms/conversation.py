"""What a row means: turns with a weight each, a plain text, or tokens.

Messages are plain dictionaries, because chat templates are written against those: ``role`` and ``content`` always,
``tool_calls``, ``reasoning_content``, ``name`` where the row has them, and ``instruction`` and ``input`` beside
``content`` for rows in the Alpaca form, so that a template can set them apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tonnage.errors import TonnageError

Message = dict[str, Any]

Pieces = list[tuple[int, float]]
"""A text in pieces: the characters of each, and its weight in the loss."""

ROLES = ("system", "user", "assistant", "tool")
OPENS_THOUGHT, CLOSES_THOUGHT = "<think>", "</think>"
"""The tags of most families around a thought in an answer's words. A thought is taken out of words, or put into
``reasoning_content``, by these alone; ``data.text.thoughts.TAGS`` has those of all families, to refuse what was cut."""


class RowError(Exception):
    """One row cannot be used, and why. It never leaves a preparation."""

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


def first_line(error: BaseException) -> str:
    """The first line of an error, or its type where it says nothing."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


@dataclass(slots=True)
class Turn:
    """A message, and what of it is trained."""

    message: Message
    weight: float = 0.0
    """Of its tokens in the loss: 0 for everything the assistant did not say."""
    pieces: Pieces | None = None
    """Where parts of it have weights of their own, in place of its weight; what closes it has that of the last."""
    is_unsaid: bool = False
    """Whether the row marks it as not to be trained, whoever says it."""

    @property
    def role(self) -> str:
        """Who says it, one of ``ROLES``."""
        role: str = self.message["role"]
        return role

    @property
    def has_weight(self) -> bool:
        """Whether a part of it has a weight above zero."""
        return any(weight for _, weight in self.pieces) if self.pieces is not None else self.weight > 0


@dataclass(frozen=True, slots=True)
class Image:
    """An image as a row has it: the path of a file, or its bytes."""

    path: str = ""
    content: bytes = b""


@dataclass(slots=True)
class Conversation:
    """The turns of one row, or its text, or its tokens."""

    turns: list[Turn] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    """JSON schemas of the functions the assistant may call."""
    text: str | None = None
    """For rows of plain text; there are no turns then."""
    pieces: Pieces | None = None
    """Of a text whose parts have weights of their own."""
    ids: Sequence[int] | None = None
    """For rows of tokens; there are no turns then."""
    ids_weights: Sequence[float] = ()
    """Weight of each of ``ids``."""
    carried: tuple[float, ...] = ()
    """Numbers of the row that go with it, in the order in which the data's options name them."""
    images: list[Image] = field(default_factory=list)
    """In the order in which they stand in the messages, where each is a mark (``forms.images``)."""
    rejected: Conversation | None = None
    """Of a pair the conversation with the other answer, to which this one is preferred; its tools are these."""

    @staticmethod
    def of(messages: Iterable[Message], tools: list[dict[str, Any]] | None = None) -> Conversation:
        """Messages of which all that the assistant says is trained."""
        return Conversation([Turn(message, float(message["role"] == "assistant")) for message in messages], tools)

    @property
    def messages(self) -> list[Message]:
        """What is said, as chat templates take it."""
        return [turn.message for turn in self.turns]

    @property
    def is_chat(self) -> bool:
        """Whether a template has to make a text of it."""
        return self.text is None and self.ids is None

    def scaled(self, weight: float) -> Conversation:
        """The same with all its weights times ``weight``."""
        return replace(
            self,
            rejected=None if self.rejected is None else self.rejected.scaled(weight),
            turns=[
                replace(turn, weight=turn.weight * weight, pieces=_scaled(turn.pieces, weight)) for turn in self.turns
            ],
            pieces=_scaled(self.pieces, weight),
            ids_weights=tuple(piece_weight * weight for piece_weight in self.ids_weights),
        )


def _scaled(pieces: Pieces | None, weight: float) -> Pieces | None:
    return None if pieces is None else [(size, piece_weight * weight) for size, piece_weight in pieces]
