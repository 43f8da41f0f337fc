"""How a template opens and closes the assistant's turn, and what it has a place for: learned once, by trying it.

A template renders a few conversations with words that stand nowhere else. Where these are in the text, and what stands
around them, is its shape. What it raises at, it does not take. A template that never closes a turn is refused here: a
model trained on it would never stop.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.data.text.rendering import ChatTemplate, TooMuch, bounded
from tonnage.errors import UserError, user_error
from tonnage.forms.conversation import Message, RowError

Tools = list[dict[str, Any]] | None
_ASK: Message = {"role": "user", "content": "Which one?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weigh_pear",
        "description": "Says how heavy a pear is.",
        "parameters": {
            "type": "object",
            "properties": {"ripe_by": {"type": "string", "description": "A day of the week."}},
            "required": ["ripe_by"],
        },
    },
}
_CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "call00001",
            "function": {"name": "weigh_pear", "arguments": {"ripe_by": "Wednesday"}},
        }
    ],
}
_RESULT: Message = {"role": "tool", "name": "weigh_pear", "tool_call_id": "call00001", "content": "Half a pound."}
_THOUGHT: Message = {"role": "assistant", "content": "Both of them.", "reasoning_content": "I saw two pears."}


@dataclass(frozen=True)
class TurnShape:
    """How a template opens and closes the assistant's turn."""

    opens: bool
    """Whether it opens the turn when asked to."""
    opener: str
    """What it puts there then, behind the messages before."""
    header: str
    """What stands between the messages before and the assistant's words, where its turn is the last one."""
    earlier_header: str
    """The same, where another question follows."""
    begins: bool
    """Whether the text of a conversation begins with the beginning-of-text token."""
    ends: tuple[str, ...]
    """The special tokens that close a turn: one that another question follows, the last one, one that ends in a call;
    the second and third only where they differ."""
    specials: tuple[str, ...]
    """All special tokens of the tokenizer, the longest first."""
    within: tuple[str, ...] = ()
    """Of ``ends``, those that stand inside of a turn as well, behind its thought."""
    lacks: tuple[str, ...] = ()
    """What it has no place for: of system, tools, calls, results, thoughts."""
    frame: str = ""
    """What it writes around the words of a system message, questions and answers."""

    @property
    def writes_turns(self) -> bool:
        """Whether anything tells the assistant's words from those before them."""
        return bool((self.opener or self.header or self.earlier_header).strip())

    @property
    def end(self) -> str:
        """The special token that closes an ordinary turn."""
        return self.ends[0]

    @property
    def stops(self) -> tuple[str, ...]:
        """Those of ``ends`` at which generation is over: all but what also closes a part of a turn."""
        return tuple(end for end in self.ends if end not in self.within) or self.ends

    @property
    def headers(self) -> tuple[str, ...]:
        """Both headers, the longer one first."""
        return tuple(sorted({self.header, self.earlier_header}, key=len, reverse=True))

    @staticmethod
    def of(template: ChatTemplate, specials: Sequence[str]) -> TurnShape:
        """Learn the shape. Raises ``UserError`` when the template cannot render two plain turns or never closes one."""
        try:
            with bounded(alone=True):
                try:
                    return _learned(template, specials, None)
                except UserError as error:
                    try:
                        return _learned(template, specials, [_TOOL])  # a template for conversations with tools alone
                    except UserError:
                        raise error from None
        except TooMuch as error:  # of all renderings together, in between
            raise _cannot(f"the template was ended: {error}") from error

    def opening(self, before: str) -> str:
        """The text that the assistant goes on from, given the messages before as rendered."""
        return before if self.opens else before + self.header


def _learned(template: ChatTemplate, specials: Sequence[str], tools: Tools) -> TurnShape:
    both, neither = _say("Both of them."), _say("Neither.")
    try:
        first, second = template.render([_ASK, both], tools), template.render([_ASK, neither], tools)
        four = template.render([_ASK, both, _ASK, neither], tools)
        before, opened = template.render([_ASK], tools), template.render([_ASK], tools, opened=True)
    except RowError as error:
        raise _cannot(error.reason) from error
    ordered = tuple(sorted({token for token in specials if token}, key=lambda token: (-len(token), token)))
    start, middle = first.find("Both of them."), four.find("Both of them.")
    last = first[start + len("Both of them.") :] if start >= 0 else ""
    earlier = four[middle + len("Both of them.") : four.rfind("Which one?")] if middle >= 0 else ""
    if (
        not tokens_in(last, ordered)
        or closing(second[second.rfind("Neither.") + len("Neither.") :], 0, ordered) is None
    ):
        shown = first[max(start, 0) :][:80]
        raise _unclosed(f"never closes the assistant's turn with a special token: {shown!r}")
    if not tokens_in(earlier, ordered):
        raise _unclosed("closes only the last turn of the assistant, not the ones before it")
    # A space at the end of a header belongs to the first word: tokenizers keep the two together.
    opener = opened[len(before) :] if opened.startswith(before) else ""
    header = first[len(before) : start].rstrip(" ") if first.startswith(before) else ""
    earlier_header = four[len(before) : middle].rstrip(" ") if four.startswith(before) else ""
    shared = max((agreement(text, opener) for text in (header, earlier_header)), default=0)
    opens = opened != before and (first.startswith(opened) or bool(opener[:shared].strip()))
    begins = bool(template.special.get("bos_token")) and first.startswith(template.special["bos_token"])
    ends = _ends(earlier, last, opener or header, ordered)
    called = template.attempt([_ASK, _CALL], tools) or ""
    behind = called[called.rfind("Wednesday") :] if "Wednesday" in called else ""
    if (after_call := tokens_in(behind, ordered)) and not set(after_call) & set(ends):
        ends.append(after_call[-1])
    thought = template.attempt([_ASK, _THOUGHT], tools) or ""
    answer_start = thought.find("Both of them.", len(before))
    talk = [{"role": "system", "content": "Mind the plums."}, _ASK, both]
    within = [end for end in ends if len(ends) > 1 and end in thought[len(before) : max(answer_start, len(before))]]
    return TurnShape(
        opens,
        opener,
        header,
        earlier_header,
        begins,
        tuple(ends),
        ordered,
        tuple(within),
        tuple(_lacking(template, tools)),
        re.sub("Mind the plums.|Which one\\?|Both of them.|Neither.", "", four + (template.attempt(talk, tools) or "")),
    )


def _ends(earlier: str, last: str, header: str, specials: Sequence[str]) -> list[str]:
    """The special tokens that close a turn, from what stands behind one that another question follows, and behind the
    last one: the last that both have, before a header begins; else the first of each."""
    both = earlier[: agreement(earlier, last)]
    begins = next(iter(tokens_in(header, specials)), "")
    if begins and (at := both.find(begins)) > 0:
        both = both[:at]
    elif len(both) < min(len(earlier), len(last)) and len(tokens := tokens_in(both, specials)) > 1:
        rest = both[both.rfind(tokens[-1]) + len(tokens[-1]) :]
        if any(token.startswith(rest) for token in specials):
            both = both[: both.rfind(tokens[-1])]  # the beginning of a header, which goes on with a role
    if common := tokens_in(both, specials):
        return [common[-1]]
    return list(dict.fromkeys((tokens_in(earlier, specials)[0], tokens_in(last, specials)[0])))


def _say(text: str) -> Message:
    return {"role": "assistant", "content": text}


def _cannot(reason: str) -> UserError:
    return user_error(
        found=f"the chat template cannot render a question and its answer ({reason})",
        needed="a template that renders user and assistant messages in turn",
        where="data.template",
    )


def _unclosed(fault: str) -> UserError:
    return user_error(
        found=f"the chat template {fault}",
        needed="a special token after every answer: a model trained without one never stops",
        change="put {{ eos_token }} after the assistant's content, or name another template",
        where="data.template",
    )


def _lacking(template: ChatTemplate, tools: Tools) -> list[str]:
    """What leaves no trace in the text. What the template raises at is not lacking: it says so itself, row by row."""
    answer = _say("Both of them.")
    probes: dict[str, tuple[list[Message], Tools, tuple[str, ...]]] = {
        "system": ([{"role": "system", "content": "Mind the plums."}, _ASK, answer], tools, ("Mind the plums.",)),
        "tools": ([_ASK, answer], [_TOOL], ("weigh_pear", "ripe_by")),
        "calls": ([_ASK, _CALL], [_TOOL], ("weigh_pear", "Wednesday")),
        "results": ([_ASK, _CALL, _RESULT, answer], [_TOOL], ("Half a pound.",)),
        "thoughts": ([_ASK, _THOUGHT], tools, ("I saw two pears.",)),
    }
    lacking = []
    for name, (messages, probe_tools, words) in probes.items():
        text = template.attempt(messages, probe_tools)
        if text is None and name == "system":
            lacking.append(name)
        if text is None:
            continue
        if name in ("calls", "results") and (without := template.attempt(messages[:1], probe_tools)) is not None:
            text = text[agreement(text, without) :]  # apart from where the tools are described
        if not all(word in text for word in words):
            lacking.append(name)
    return lacking


def closing(text: str, at: int, specials: Sequence[str]) -> tuple[str, int] | None:
    """The special token that follows at ``at`` after white space at most, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    for token in specials:
        if text.startswith(token, at):
            return token, at + len(token)
    return None


def tokens_in(text: str, specials: Sequence[str]) -> list[str]:
    """The special tokens of a text, in order."""
    return re.findall("|".join(map(re.escape, specials)), text) if specials else []


def agreement(first: str, second: str) -> int:
    """Characters that two texts have in common at their beginnings."""
    at, end = 0, min(len(first), len(second))
    while at < end:  # in strides, as texts are long and mostly the same
        stride = min(4096, end - at)
        if first[at : at + stride] == second[at : at + stride]:
            at += stride
            continue
        while first[at] == second[at]:
            at += 1
        return at
    return end
