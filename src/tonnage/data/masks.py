"""Which part of a rendered conversation the assistant says: borders in the text, from rendering prefixes.

A conversation is rendered whole, and then its beginnings are rendered: up to a turn of the assistant, with the turn
opened (``add_generation_prompt``), which is where inference starts to write. Where that beginning ends in the whole,
the turn begins. A turn ends with the special token that closes it, which is supervised; what the template puts after
it (a line break, the next header) is not.

Most turns take the short way: at the border the whole goes on with the message's own words and then a closing token.
Turns with tool calls or reasoning, and templates that render a turn differently when it is the last one, take the
long way: the conversation up to and including the turn is rendered too, cut after its closing token, and what it adds
must be found in the whole at the border. When a template leaves the reasoning of earlier turns out, it is taken out
of the messages first, if the whole stays the same without it.

Nothing here guesses: a row whose beginnings are not beginnings of its whole is refused with the place where they part.
Nothing is ever searched for in a user's words, so a user who writes ``<|im_start|>assistant`` moves no border.

``TurnShape.of`` learns once per template, from conversations of its own, whether it opens the turn on request and which
token closes it; a template that never closes a turn is refused there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.data.conversation import Conversation, Message, RowError
from tonnage.data.rendering import ChatTemplate, Request
from tonnage.errors import Problem, UserError

Span = tuple[int, int, float]
"""First character, one past the last, weight."""


@dataclass(frozen=True)
class TurnShape:
    """How a template opens and closes the assistant's turn."""

    opens: bool
    """Whether it opens the turn when asked to."""
    header: str
    """What stands between the messages before and the assistant's words."""
    end: str
    """The special token that closes an ordinary turn."""
    specials: tuple[str, ...]
    """All special tokens of the tokenizer, the longest first."""

    @staticmethod
    def of(template: ChatTemplate, specials: Sequence[str]) -> TurnShape:
        """Learn the shape. Raises ``UserError`` when the template cannot render two plain turns or never closes one."""
        where = "data.template"
        user: Message = {"role": "user", "content": "Which one?"}

        def say(text: str) -> Message:
            return {"role": "assistant", "content": text}

        try:
            first, second = template.render([user, say("Both of them.")]), template.render([user, say("Neither.")])
            four = template.render([user, say("Both of them."), user, say("Neither.")])
            before, opened = template.render([user]), template.render([user], opened=True)
        except RowError as error:
            raise UserError(
                Problem(
                    found=f"the chat template cannot render a question and its answer ({error.reason})",
                    needed="a template that renders user and assistant messages in turn",
                    where=where,
                )
            ) from error
        start = _agreement(first, second)
        ordered = tuple(sorted({token for token in specials if token}, key=lambda token: (-len(token), token)))
        ends = [
            _closing(text, at, ordered)
            for text, at in ((first, first.rfind("them.") + 5), (second, second.rfind("er.") + 3))
        ]
        ends.append(_closing(four, four.find("them.") + 5, ordered, last=False))
        if not first[start:].startswith("Both of them.") or None in ends[:2]:
            shown = first[start:][:80]
            raise UserError(
                Problem(
                    found=f"the chat template never closes the assistant's turn with a special token: {shown!r}",
                    needed="a special token after every answer: a model trained without one never stops",
                    change="put {{ eos_token }} after the assistant's content, or name another template",
                    where=where,
                )
            )
        if ends[2] is None:
            raise UserError(
                Problem(
                    found="the chat template closes only the last turn of the assistant, not the ones before it",
                    needed="a special token after every answer: a model trained without one never stops",
                    change="put {{ eos_token }} after the assistant's content, or name another template",
                    where=where,
                )
            )
        opens = opened != before and first.startswith(opened)
        # A space at the end of a header belongs to the first word: tokenizers keep the two together.
        header = first[len(before) : start].rstrip(" ") if first.startswith(before) else ""
        return TurnShape(opens, header, ends[2][0], ordered)

    def opening(self, before: str) -> str:
        """The text that the assistant goes on from, given the messages before as rendered."""
        return before if self.opens else before + self.header


def _closing(text: str, at: int, specials: Sequence[str], last: bool = True) -> tuple[str, int] | None:
    """The special token that follows at ``at`` after white space at most, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    for token in specials:
        if text.startswith(token, at):
            return token, at + len(token)
    return None


def requests(conversation: Conversation, shape: TurnShape, train_on: str) -> list[Request]:
    """What must be rendered to find the borders: the whole, then the opening of each supervised turn."""
    wanted: list[Request] = [(conversation.messages, conversation.tools, False)]
    for turn in supervised_turns(conversation, train_on):
        wanted.append((conversation.messages[:turn], conversation.tools, shape.opens))
    return wanted


def supervised_turns(conversation: Conversation, train_on: str) -> list[int]:
    """Indices of the messages that are trained on, apart from ``train_on: all``, which needs none."""
    if train_on == "all":
        return []
    turns = [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]
    return [at for at in (turns[-1:] if train_on == "last" else turns) if conversation.weights[at] > 0]


class Borders:
    """Finds the spans that the assistant says, for one template."""

    def __init__(self, template: ChatTemplate, shape: TurnShape, train_on: str) -> None:
        self._template = template
        self._shape = shape
        self._train_on = train_on
        alternatives = "|".join(re.escape(token) for token in shape.specials)
        self._tail = re.compile(rf"(?:(?:{alternatives})|\s)*\Z")

    def find(self, conversation: Conversation, whole: str, openings: Sequence[str | RowError]) -> list[Span]:
        """Spans of characters with their weights, in order. Raises ``RowError``."""
        self._all_rendered(conversation, whole)
        if self._train_on == "all":
            return [(0, len(whole), 1.0)]
        turns = supervised_turns(conversation, self._train_on)
        if not turns:
            raise RowError("nothing_supervised", "no assistant message is trained on")
        messages = conversation.messages
        settled = self._as_rendered(conversation, whole)
        if settled is not messages:
            again = Conversation(settled, conversation.weights, conversation.tools)
            messages, openings = settled, self._template.render_many(requests(again, self._shape, self._train_on))[1:]
        spans: list[Span] = []
        end = 0
        for turn, opening in zip(turns, openings, strict=True):
            if isinstance(opening, RowError):
                raise RowError(opening.kind, f"before message {turn}: {opening.reason}")
            start = self._start(messages, conversation.tools, turn, whole, self._shape.opening(opening))
            if start < end:
                raise RowError("mask", f"message {turn} begins before the one in front of it ends")
            end = self._end(messages, conversation.tools, turn, whole, start)
            spans.append((start, end, conversation.weights[turn]))
        return spans

    def _start(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turn: int, whole: str, opening: str
    ) -> int:
        if whole.startswith(opening):
            return len(opening)
        if self._shape.opens:
            before = self._template.render(messages[:turn], tools) + self._shape.header
            if whole.startswith(before):
                return len(before)
        raise _parted(f"the messages before message {turn}", opening, whole)

    def _end(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, turn: int, whole: str, start: int
    ) -> int:
        message = messages[turn]
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            said = message["content"].strip()
            at = start
            while at < len(whole) and whole[at].isspace():
                at += 1
            if whole.startswith(said, at) and (closing := _closing(whole, at + len(said), self._shape.specials)):
                return closing[1]
        until = whole if turn == len(messages) - 1 else self._template.render(messages[: turn + 1], tools)
        if until[:start] != whole[:start]:
            raise _parted(f"the messages up to message {turn}", until[:start], whole)
        tail = self._tail.search(until, start)
        closings = [] if tail is None else list(self._specials_in(until, tail.start()))
        if not closings:
            raise RowError("never_closed", f"message {turn}: the template puts no special token after it")
        usual = [end for token, end in closings if token == self._shape.end]
        spoken = until[start : usual[0] if usual else closings[-1][1]]
        if whole.startswith(spoken, start):
            return start + len(spoken)
        # The turn as the last one may open with something (empty reasoning) that it lacks further up.
        content = message["content"].strip()
        for cut in range(1, len(spoken) - max(len(content), 1)):
            if spoken[cut] == whole[start] and whole.startswith(spoken[cut:], start):
                return start + len(spoken) - cut
        raise _parted(f"message {turn}", until, whole)

    def _specials_in(self, text: str, at: int) -> list[tuple[str, int]]:
        found = []
        while closing := _closing(text, at, self._shape.specials):
            found.append(closing)
            at = closing[1]
        return found

    def _as_rendered(self, conversation: Conversation, whole: str) -> list[Message]:
        """The messages without the reasoning that the template leaves out of the whole."""
        messages = conversation.messages
        if not any("reasoning_content" in message for message in messages):
            return messages
        last_user = max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)
        without = [
            {key: value for key, value in message.items() if key != "reasoning_content"} if at < last_user else message
            for at, message in enumerate(messages)
        ]
        if without != messages and self._template.render(without, conversation.tools) == whole:
            return without
        return messages

    def _all_rendered(self, conversation: Conversation, whole: str) -> None:
        """Refuse a row of which the template has left out words, apart from reasoning before the last question."""
        messages, at = conversation.messages, 0
        last_user = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=-1)
        for number, message in enumerate(messages):
            for part in _words(message, number > last_user):
                found = whole.find(part, at)
                if found < 0:
                    # Parts of one message may change places, but none may be missing.
                    found = whole.find(part)
                    if found < 0:
                        role = message["role"]
                        reason = f"message {number} ({role}) is not in the text the template made of it: {part[:60]!r}"
                        raise RowError("left_out", reason)
                else:
                    at = found
        for tool in conversation.tools or []:
            name = tool.get("function", tool).get("name") if isinstance(tool.get("function", tool), dict) else None
            if isinstance(name, str) and name not in whole:
                raise RowError("left_out", f"the template leaves out the tool {name[:60]!r}")


def _words(message: Message, recent: bool) -> list[str]:
    if "input" in message:
        return [part for part in (message["instruction"].strip(), message["input"].strip()) if part]
    content = message["content"]
    if message["role"] == "assistant" and "</think>" in content:
        content = content.rsplit("</think>", 1)[1]
    if message["role"] == "tool":
        content = ""  # templates may re-encode a result; its borders are checked like all others
    words = [content.strip()]
    if recent and message["role"] == "assistant":
        words.insert(0, message.get("reasoning_content", "").strip())
    words += [call["function"]["name"] for call in message.get("tool_calls", [])]
    return [word for word in words if word]


def _agreement(first: str, second: str) -> int:
    """Characters that two texts have in common at their beginnings."""
    return next(
        (at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _parted(what: str, beginning: str, whole: str) -> RowError:
    at = _agreement(beginning, whole)
    return RowError(
        "not_a_prefix",
        f"{what}, rendered alone, part from the whole at character {at}: "
        f"{beginning[at : at + 40]!r} alone, {whole[at : at + 40]!r} in the whole",
    )
