"""Which part of a rendered conversation the assistant says: borders in the text, from rendering it in other ways.

A conversation is rendered whole, and then its beginnings are rendered: up to a turn of the assistant, with the turn
opened (``add_generation_prompt``), which is where inference starts to write. Where that beginning ends in the whole,
the turn begins. Templates of models that think open a thought as well, which a finished turn may lack or close at once:
there the turn begins where the whole goes another way than the opening.

A turn ends with the special token that closes it, which is supervised; what the template puts after it (a line break,
the next header) is not. Most turns take the short way: at the border the whole goes on with the message's own words and
then a closing token. For the others (calls of tools, thoughts, words that the template changes) the conversation is
rendered with other words in that message: what stays the same behind them is the template's, and the closing token is
the first thing in it, before the next message's words, which are found in the same way.

When a template leaves the thoughts of earlier turns out, they are taken out of the messages first, if the whole stays
the same without them.

Nothing here guesses: where neither way leads to a border, the row is refused with the place where the texts part.
Nothing is ever searched for in a user's words, so a user who writes ``<|im_start|>assistant`` moves no border.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from tonnage.data.text.rendering import ChatTemplate, Request
from tonnage.data.text.shape import TurnShape, agreement, closing
from tonnage.data.text.thoughts import check_rendered
from tonnage.forms.conversation import CLOSES_THOUGHT, OPENS_THOUGHT, Conversation, Message, RowError
from tonnage.forms.images import MARK

Span = tuple[int, int, float]
"""First character, one past the last, weight."""


class Marked(NamedTuple):
    """A text, and what of it is trained."""

    text: str
    spans: Sequence[Span]


_THOUGHT = re.compile(rf"\A\s*(?:{OPENS_THOUGHT})?(.*?){CLOSES_THOUGHT}\s*", re.DOTALL)


def requests(conversation: Conversation, shape: TurnShape, train_on: str) -> list[Request]:
    """What must be rendered to find the borders: the whole, then the opening of each supervised turn."""
    messages, tools = conversation.messages, conversation.tools
    turns = supervised_turns(conversation, train_on)
    return [(messages, tools, False), *((messages[:at], tools, shape.opens) for at in turns)]


def supervised_turns(conversation: Conversation, train_on: str) -> list[int]:
    """Indices of the assistant's turns whose borders are looked for: those that are trained, or with ``train_on: all``
    those that are not trained like the rest."""
    answers = [(at, turn) for at, turn in enumerate(conversation.turns) if turn.role == "assistant"]
    if train_on == "all":
        return [at for at, turn in answers if turn.weight != 1 or turn.pieces is not None]
    chosen = answers[-1:] if train_on == "last" else answers
    return [at for at, turn in chosen if turn.weight > 0 or turn.has_weight]


class Borders:
    """Finds the spans that the assistant says, for one template."""

    def __init__(self, template: ChatTemplate, shape: TurnShape, train_on: str) -> None:
        self._template = template
        self._shape = shape
        self._train_on = train_on
        self.settled = 0
        """Conversations of which the template left thoughts out."""

    def find(self, conversation: Conversation, whole: str, openings: Sequence[str | RowError]) -> list[Span]:
        """Spans of characters with their weights, in order. Raises ``RowError``."""
        self._all_rendered(conversation, whole)
        turns = supervised_turns(conversation, self._train_on)
        if self._train_on == "all":
            for at, turn in enumerate(conversation.turns):
                if turn.is_unsaid and turn.role != "assistant":
                    raise RowError(
                        "unsupported",
                        f"message {at} ({turn.role}) is marked as not to be trained, and train_on: all trains "
                        "everything that the assistant does not say",
                    )
        elif not turns:
            raise RowError("nothing_supervised", "no assistant message is trained on")
        settled = self._as_rendered(conversation, whole)
        if settled is not conversation:
            self.settled += 1
            conversation = settled
            openings = self._template.render_many(requests(settled, self._shape, self._train_on))[1:]
        spans: list[Span] = []
        end = 0
        for at, opening in zip(turns, openings, strict=True):
            if isinstance(opening, RowError):
                raise RowError(opening.kind, f"before message {at}: {opening.reason}")
            start = self._start(conversation, at, whole, self._shape.opening(opening))
            if start < end:
                raise RowError("mask", f"message {at} begins before the one in front of it ends")
            end = self._end(conversation, at, whole, start)
            check_rendered(conversation.turns[at].message, at, whole[start:end])
            spans += self._weighed(conversation, at, whole, start, end)
        return _everything_but(spans, len(whole)) if self._train_on == "all" else spans

    def _start(self, conversation: Conversation, turn: int, whole: str, opening: str) -> int:
        if whole.startswith(opening):
            return len(opening)
        # The whole parts from the opening at some place. Behind the messages before and a header, or the beginning of
        # one, the turn begins at this place; unless it lies in the words, which happen to begin alike.
        begins = agreement(whole, self._otherwise(conversation, turn))
        same = min(self._before_token(opening, agreement(whole, opening)), begins)
        before = self._template.render(conversation.messages[:turn], conversation.tools)
        if whole.startswith(before) and (whole[len(before) : same].strip() or begins == len(before)):
            return same
        if agreement(whole, before) >= self._end_of_words(conversation, turn - 1, whole):
            for header in (self._shape.opener, *self._shape.headers):
                if header and whole.endswith(header, 0, begins):
                    return begins
        raise _parted(f"the messages before message {turn}", opening, whole)

    def _before_token(self, text: str, at: int) -> int:
        """``at``, or where the special token begins that it would cut."""
        for token in self._shape.specials:
            start = text.find(token, max(0, at - len(token) + 1), at + len(token) - 1)
            if 0 <= start < at:
                return start
        return at

    def _end(self, conversation: Conversation, turn: int, whole: str, start: int) -> int:
        """Where a turn ends, its closing token included."""
        messages = conversation.messages
        message = messages[turn]
        if not message.get("tool_calls") and not message.get("reasoning_content"):
            words = message["content"].strip()
            at = start
            while at < len(whole) and whole[at].isspace():
                at += 1
            if whole.startswith(words, at) and (closed := closing(whole, at + len(words), self._shape.ends)):
                return closed[1]
        at = max(start, self._end_of_words(conversation, turn, whole))
        stop = len(whole)
        if turn + 1 < len(messages):
            with suppress(RowError):
                later = self._otherwise(conversation, turn + 1)
                stop = max(at, agreement(whole, later)) if later != whole else stop
        for tokens in (self._shape.ends, self._shape.specials):
            places = [(place, -len(token)) for token in tokens if (place := whole.find(token, at, stop)) >= 0]
            if places:
                place, minus_length = min(places)
                return place - minus_length
        raise RowError("never_closed", f"message {turn}: the template puts no special token after it")

    def _end_of_words(self, conversation: Conversation, turn: int, whole: str) -> int:
        """Where the words of a message end; 0 before the first one."""
        return len(whole) - agreement(whole[::-1], self._otherwise(conversation, turn)[::-1]) if turn >= 0 else 0

    def _otherwise(self, conversation: Conversation, turn: int) -> str:
        """The whole with other words in one message; raises ``RowError`` where the template does not take them."""
        messages = list(conversation.messages)
        messages[turn] = _with_other_words(messages[turn])
        return self._template.render(messages, conversation.tools)

    def _weighed(self, conversation: Conversation, turn: int, whole: str, start: int, end: int) -> list[Span]:
        """The spans of a turn: one, or one for each of its pieces, the last one with what closes the turn."""
        pieces = conversation.turns[turn].pieces
        if pieces is None:
            return [(start, end, conversation.turns[turn].weight)]
        words = conversation.turns[turn].message["content"]
        at = start
        while not whole.startswith(words, at) and at < end and whole[at].isspace():
            at += 1
        skipped = 0
        if not whole.startswith(words, at):
            skipped = len(words) - len(words.lstrip())
            at = agreement(whole, self._otherwise(conversation, turn))
            words = words.strip()
        if not whole.startswith(words, at) or at + len(words) > end:
            raise RowError("mask", f"message {turn}: its parts are not found in the text that the template made of it")
        spans: list[Span] = []
        border, first = start, at - skipped
        for number, (size, weight) in enumerate(pieces):
            first += size
            stop = end if number == len(pieces) - 1 else min(max(first, border), end)
            if stop > border:
                spans.append((border, stop, weight))
            border = stop
        return spans

    def _as_rendered(self, conversation: Conversation, whole: str) -> Conversation:
        """The conversation without the thoughts that the template leaves out of the whole."""
        messages = conversation.messages
        if not any(map(has_thought, messages)):
            return conversation
        last = _last_question(messages)
        without = [_without_thought(message) if at < last else message for at, message in enumerate(messages)]
        if without != messages and self._template.render(without, conversation.tools) == whole:
            turns = [replace(turn, message=message) for turn, message in zip(conversation.turns, without, strict=True)]
            return replace(conversation, turns=turns)
        return conversation

    def _all_rendered(self, conversation: Conversation, whole: str) -> None:
        """Refuse a row of which the template has left out words, apart from thoughts before the last question."""
        messages, at = conversation.messages, 0
        lacks, last = self._shape.lacks, _last_question(messages)
        for number, message in enumerate(messages):
            name = f"message {number} ({message['role']})"
            kind = "results" if message["role"] == "tool" else "calls" if "tool_calls" in message else ""
            if kind in lacks:
                raise RowError("left_out", f"the template leaves out {name}: it has no place for {_PLACES[kind]}")
            for part in _without_images(_words(message, number > last)):
                position = whole.find(part, at)
                if position >= 0:
                    at = position
                elif part not in whole:  # parts of one message may change places, but none may be missing
                    raise RowError("left_out", f"{name} is not in the text the template made of it: {part[:60]!r}")
        if not conversation.tools:
            return
        names = [tool["function"]["name"] for tool in conversation.tools if isinstance(tool.get("function"), dict)]
        missing = next((name for name in names if name not in whole), None)
        if missing is None and any(map(_all_words(messages).__contains__, names)):
            with suppress(RowError):  # it cannot do without
                missing = names[0] if self._template.render(messages, None) == whole else None
        if missing is not None or (names and "tools" in lacks):
            raise RowError(
                "left_out",
                f"the template leaves out the tool {(missing or names[0])[:60]!r}",
                "name a template that shows tools to the model (data.template), or take the tools out of the rows",
            )


_PLACES = {"calls": "calls of tools", "results": "results of tools"}


def _last_question(messages: Sequence[Message]) -> int:
    """Which is the last message of the user; -1 for none."""
    return max((at for at, message in enumerate(messages) if message["role"] == "user"), default=-1)


def has_thought(message: Message) -> bool:
    """Whether a message of the assistant holds what it thinks: in a field of its own, or in its words."""
    return message["role"] == "assistant" and ("reasoning_content" in message or CLOSES_THOUGHT in message["content"])


def _without_thought(message: Message) -> Message:
    if not has_thought(message):
        return message
    message = {key: value for key, value in message.items() if key != "reasoning_content"}
    if CLOSES_THOUGHT in message["content"]:
        message["content"] = message["content"].rsplit(CLOSES_THOUGHT, 1)[1].lstrip("\n")
    return message


def _with_other_words(message: Message) -> Message:
    """A message in which every word is another one, and nothing else is."""

    def other(text: str) -> str:
        return _mark_outside(text) * 3

    content = message["content"]
    if message["role"] == "assistant" and CLOSES_THOUGHT in content:
        thought, answer = content.rsplit(CLOSES_THOUGHT, 1)
        opened = f"{OPENS_THOUGHT}\n" if OPENS_THOUGHT in thought else ""
        content = f"{opened}{other(content)}\n{CLOSES_THOUGHT}\n\n{other(content + answer)}"
    elif content or "tool_calls" not in message:
        content = other(content)
    changed = {**message, "content": content}
    for field in ("instruction", "input", "reasoning_content"):
        if field in message:
            changed[field] = other(content + message[field]) if message[field] else message[field]
    if "tool_calls" in message:
        changed["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _other_arguments(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
    return changed


def _other_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if not arguments:
        return {_MARKS[0]: _MARKS[1]}
    names = list(arguments)
    changed = dict(arguments)
    for name in (names[0], names[-1]):
        changed[name] = _mark_outside(repr(arguments[name])) * 3
    return changed


_MARKS = tuple("◆◇◈●◉◎★☆■□▲△▼▽")


def _mark_outside(text: str) -> str:
    """A character that a text does not hold."""
    return next(mark for mark in itertools.chain(_MARKS, map(chr, range(0x4E00, 0xA000))) if mark not in text)


def _everything_but(spans: Sequence[Span], length: int) -> list[Span]:
    """All of a text with weight 1, and the spans with theirs."""
    all_spans: list[Span] = []
    at = 0
    for start, stop, weight in spans:
        if start > at:
            all_spans.append((at, start, 1.0))
        all_spans.append((start, stop, weight))
        at = stop
    if at < length:
        all_spans.append((at, length, 1.0))
    return all_spans


def _words(message: Message, recent: bool) -> list[str]:
    if "input" in message:
        return [part for part in (message["instruction"].strip(), message["input"].strip()) if part]
    content, thought = message["content"], message.get("reasoning_content", "")
    if message["role"] == "assistant" and (inline := _THOUGHT.match(content)):
        thought, content = inline[1], content[inline.end() :]
    if message["role"] == "tool":
        content = ""  # templates may re-encode a result; its borders are checked like all others
    words = [content.strip()]
    if recent and message["role"] == "assistant":
        words.insert(0, thought.strip())
    words += [call["function"]["name"] for call in message.get("tool_calls", [])]
    return [word for word in words if word]


def _without_images(words: Sequence[str]) -> list[str]:
    """The words between images, those that are none left out."""
    if not any(MARK in word for word in words):
        return list(words)
    return [piece for word in words for piece in map(str.strip, word.split(MARK)) if piece]


def _all_words(messages: Sequence[Message]) -> str:
    return "\n".join(
        "\n".join([message["content"], *(call["function"]["name"] for call in message.get("tool_calls", ()))])
        for message in messages
    )


def _parted(subject: str, beginning: str, whole: str) -> RowError:
    at = agreement(beginning, whole)
    return RowError(
        "not_a_prefix",
        f"{subject}, rendered alone, part from the whole at character {at}: "
        f"{beginning[at : at + 40]!r} alone, {whole[at : at + 40]!r} in the whole",
        "data.train_on: last (the template writes what comes before otherwise where it is not the end)",
    )
