"""A chat template as a table: what stands between two messages, given who spoke before and who speaks now.

Most chat templates are that, however they are written: before each message stands a text that depends on its role and
on the role before it, and the message itself is written as it is, or without the white space around it. Some put the
system message in front of the last question instead of in its place. The table is learned by rendering a few
conversations with words that stand nowhere else; that it is the template is then tried on conversations of all kinds,
and a template that is more than a table is refused with the construct that makes it so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tonnage.data.text.rendering import ChatTemplate
from tonnage.errors import user_error
from tonnage.forms.conversation import Message

ROLES = ("system", "user", "assistant")
TRIMS = ("none", "both", "left", "right")
START, END = "", "end"
"""What stands before the first message, and after the last one, where the assistant begins."""


def _talk(*turns: str, system: str | None = None) -> list[Message]:
    """A conversation of user and assistant in turn."""
    opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    return opening + [{"role": ROLES[1 + at % 2], "content": text} for at, text in enumerate(turns)]


CONVERSATIONS: tuple[list[Message], ...] = (
    _talk("What is heavier, a pound of feathers or a pound of lead?"),
    _talk("Name three rivers.", system="You are brief."),
    _talk("Hi", "Hello! How can I help?", "Who wrote Faust?"),
    _talk("Hi", "Hello.", "Add 2 and 3.", "5", "Now double it.", system="You are a calculator.\nAnswer with numbers."),
    _talk("def f(x):\n    return {'a': [x, \"y\"]}\n\nWhat does f do?", "It wraps `x`.", "Why {{ x }} and {% y %}?"),
    _talk("Grüße aus Köln! 你好 🙂", "¡Hola! ٣", "Çà va?", system="Réponds en français."),
    _talk("  spaces around  ", "\n\nlines around\n\n", "\ttabs\u00a0around\u3000\n", system="  a system message \n"),
    _talk("a\n\n\nb", "1. one\n2. two\n\n", 'What of \\n, \\\\ and "quotes"?', "<b>&amp;</b>", "`code`"),
    _talk("x", "y", "z", "w", "v", "u", "t", system="s"),
    _talk("Write <|im_end|>, </s>, [INST] and <end_of_turn> out.", "No.", '"""'),
    _talk("A long question. " * 40, "A long answer. " * 60, "Go on."),
)
"""On which a template for another program is compared with ours: each ends in a question, as when one is asked."""
BESIDES: Mapping[str, list[Message]] = {
    "a system message behind the first question": [
        *_talk("a", "b"),
        {"role": "system", "content": "c"},
        {"role": "user", "content": "d"},
    ],
    "an empty message": _talk("", "", "a"),
    "thoughts in an earlier answer": _talk("a", "<think>\nb\n</think>\n\nc", "d"),
}
"""What templates treat in ways of their own, and what is said rather than refused where Go's does not."""
_SHAPES = ("u", "su", "uau", "suau", "uasu", "au", "sau", "s")
"""Conversations from which a table is learned, the essential ones first."""
_ESSENTIAL = 4
_PADDED = " \n {} \n "


@dataclass(frozen=True)
class TurnTable:
    """A chat template as a table. What is said is by (role before, role now)."""

    gaps: Mapping[tuple[str, str], str]
    """What stands between."""
    trims: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """At which ends white space is taken off the message."""
    folded: Mapping[str, str] = field(default_factory=dict)
    """Where the system message stands in front of the last question: role before -> what stands before the system
    message. Otherwise empty."""
    silent: frozenset[tuple[str, str]] = frozenset()
    """Messages that are left out."""

    def render(self, messages: Sequence[Message]) -> str | None:
        """The text of a conversation with the assistant's turn opened; ``None`` where the table has no such gap."""
        system = [message for message in messages if message["role"] == "system"] if self.folded else []
        rest = [message for message in messages if message not in system]
        pieces, before = list[str](), START
        for at, message in enumerate(rest):
            role = message["role"]
            if system and at == len(rest) - 1 and role == "user":
                words = "\n\n".join(one["content"] for one in system)
                if before not in self.folded:
                    return None
                pieces += [self.folded[before], trimmed(words, self.trims.get((START, "system"), "none"))]
                before = "system"
            if (before, role) in self.silent:
                continue
            if (before, role) not in self.gaps:
                return None
            pieces += [self.gaps[before, role], trimmed(message["content"], self.trims.get((before, role), "none"))]
            before = role
        end = self.gaps.get((before, END))
        return None if end is None else "".join([*pieces, end])

    @staticmethod
    def of(template: ChatTemplate, where: str) -> TurnTable:
        """Learn the table of a template; ``where`` names it in a refusal.

        Raises:
            UserError: the template is more than such a table; says what of it.
        """
        from tonnage.targets.constructs import construct

        table, differs = _learned(template)
        if not differs and _is_dated(template):
            differs = "another day, another text"
        for messages, text in cases(template) if not differs else ():
            if (written := table.render(messages)) != text:
                differs = _parted(written, text)
                break
        if not differs:
            return table
        raise user_error(
            where=where,
            found=f"a chat template that a Go template cannot repeat: {construct(template.text)} ({differs})",
            needed="a template that writes a text before each message by its role and the role before it",
            change="export --for vllm or gguf, which read the template as it is, or train with one that is simpler",
        )


def trimmed(text: str, ends: str) -> str:
    """A text without white space at ``both`` ends, at the ``left`` or the ``right`` one, or at ``none``."""
    return {"none": text, "both": text.strip(), "left": text.lstrip(), "right": text.rstrip()}[ends]


def cases(template: ChatTemplate) -> Iterator[tuple[list[Message], str]]:
    """The conversations that the template takes, with their texts."""
    for messages in CONVERSATIONS:
        if (text := template.attempt(messages, opened=True)) is not None:
            yield messages, text


def _parted(ours: str | None, text: str) -> str:
    """Where a table and the template part."""
    if ours is None:
        return "a role behind another that the table has no place for"
    at = next((at for at, pair in enumerate(zip(ours, text, strict=False)) if pair[0] != pair[1]), 0)
    return f"after {text[max(0, at - 30) : at]!r} it writes {text[at : at + 30]!r}"


def _learned(template: ChatTemplate) -> tuple[TurnTable, str]:
    """The table, and what stands in the way of one."""
    table = TurnTable({})
    for number, shape in enumerate(_SHAPES):
        found, differs = _with(table, template, shape)
        if not differs:
            table = found
        elif number < _ESSENTIAL:
            return table, differs
    return table, ""


def _with(table: TurnTable, template: ChatTemplate, shape: str) -> tuple[TurnTable, str]:
    """A table with what one more conversation tells, and where it does not agree with what is known."""
    gaps, trims, folded = dict(table.gaps), dict(table.trims), dict(table.folded)
    roles = [{"s": "system", "u": "user", "a": "assistant"}[letter] for letter in shape]
    words = [f"Wvq{letter}{at}zx" for at, letter in enumerate(shape)]
    text = template.attempt(_messages(roles, words), opened=True)
    if text is None:
        return table, "" if "s" in shape else "a plain question is refused"
    shown = [at for at in range(len(shape)) if words[at] in text]
    left_out = {at: (roles[at - 1] if at else START, roles[at]) for at in range(len(shape)) if at not in shown}
    if any(pair[1] != "system" or pair in gaps for pair in left_out.values()):
        return table, "a message that is left out"
    if any(text.count(words[at]) > 1 for at in shown):
        return table, "a message that is written twice"
    order = sorted(shown, key=lambda at: text.index(words[at]))
    if order != shown:
        if (shape, order) != ("suau", [1, 2, 0, 3]):
            return table, "messages in another order"
        folded[START] = gaps.get((START, "system"), "")
    before, start = START, 0
    for at in order:
        role, place = roles[at], text.index(words[at])
        between = text[start:place]
        if folded and role == "system":
            folded[before] = between
        elif (before, role) in table.silent:
            return table, "a message that is left out elsewhere"
        elif gaps.setdefault((before, role), between) != between:
            return table, f"before {role} it writes {between!r} and elsewhere {gaps[before, role]!r}"
        if (before, role) not in trims:
            padded = [_PADDED.format(one) if one == words[at] else one for one in words]
            trims[before, role] = _trim(template.attempt(_messages(roles, padded), opened=True), text, words[at])
        before, start = role, place + len(words[at])
    if gaps.setdefault((before, END), text[start:]) != text[start:]:
        return table, f"at the end it writes {text[start:]!r} and elsewhere {gaps[before, END]!r}"
    return TurnTable(gaps, trims, folded, table.silent | set(left_out.values())), ""


def _is_dated(template: ChatTemplate) -> bool:
    """Whether what it writes depends on the day."""
    if "strftime_now" not in template.text:
        return False
    days = [replace(template, date=day).attempt(CONVERSATIONS[0], opened=True) for day in ("2001-02-03", "2014-11-25")]
    return days[0] != days[1]


def _messages(roles: Sequence[str], words: Sequence[str]) -> list[Message]:
    return [{"role": role, "content": one} for role, one in zip(roles, words, strict=True)]


def _trim(padded: str | None, plain: str, word: str) -> str:
    """At which ends a template takes white space off: from its text with and without."""
    for ends in TRIMS:
        if padded == plain.replace(word, trimmed(_PADDED.format(word), ends)):
            return ends
    return "none"
