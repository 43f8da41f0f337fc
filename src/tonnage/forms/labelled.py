"""Answers that are each desirable or not (KTO), as all kinds of programs write them, into conversations.

    completion, output   the answer: a text; messages; a whole conversation with the prompt in it. Then `prompt` or
                         another field of one holds what stands before it, as beside pairs (``preferences``)
    messages, ...        a whole conversation, where neither is there
    label, kto_tag       whether the answer is desirable

The answer is all that ``completion`` or ``output`` holds, and of a whole conversation its last message. What stands
before is context: an earlier answer may have been good or bad, and nobody says which.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import chain

from tonnage.forms.beside import with_beside
from tonnage.forms.conversation import Conversation, RowError, Turn
from tonnage.forms.preferences import ANSWERS, QUESTIONS, check_prompt, prompt_of, side_of
from tonnage.forms.turns import LISTS, TurnReader
from tonnage.forms.values import Row, as_turns, count_unread, is_empty, is_turns, kind_of, names_of

LABELS = ("label", "kto_tag")
COMPLETIONS = ("completion", "output")
FIELDS = (*LABELS[1:], *COMPLETIONS[1:], *QUESTIONS, "history", "system", "tools", "functions", *LISTS)
"""What is read of a row besides ``completion`` and ``label``."""
_WORDS = {"true": True, "false": False, "1": True, "0": False}


def has_label(row: Row) -> bool:
    """Whether a row seems to hold one answer that is said to be desirable or not."""
    if not any(isinstance(row.get(name), bool) or _is_word(row.get(name)) for name in LABELS):
        return False
    if any(not is_empty(row.get(name)) for name in chain.from_iterable(ANSWERS)):
        return False
    has_answer = any(not is_empty(row.get(name)) for name in COMPLETIONS)
    return has_answer or any(is_turns(row.get(name), "role", "from") for name in LISTS)


def read_labelled(row: Row, reader: TurnReader, between: str, named: Collection[str]) -> Conversation:
    """The conversation of a row, ``carried`` beside it 1 if its answer is desirable, else 0. Raises ``RowError``.

    ``between`` stands between ``instruction`` and ``input``; ``named`` are the fields whose columns the source names.
    """
    names = [name for name in COMPLETIONS if not is_empty(row.get(name))]
    if len(names) == 2:
        change = f"say which: columns: {{{names[0]}: {names[0]}}} and take the other one out of the rows"
        raise RowError("two_answers", f"{names[0]!r} and {names[1]!r}, and either might be the answer", change)
    is_desirable = _label(row)
    context, answer = _of_fields(row, names[0], reader, between, named) if names else _of_messages(row, reader)
    if not context:
        has = f"the row has {names_of(row)}"
        raise RowError("no_prompt", f"no prompt before the answer ({has})", "name its column (columns: {prompt: ...})")
    _check_answer(answer)
    turns = [*(Turn(turn.message) for turn in context), *answer]
    return replace(with_beside(Conversation(turns), row, reader), carried=(float(is_desirable),))


def _of_fields(
    row: Row, name: str, reader: TurnReader, between: str, named: Collection[str]
) -> tuple[list[Turn], list[Turn]]:
    """What stands before an answer that has a field of its own, and the answer."""
    side = side_of(row[name], name, reader)
    prompt = prompt_of(row, reader, between, named, side)
    if side[0].role == "assistant":
        return [] if prompt is None else prompt.turns, side
    context, answer = side[:-1], side[-1:]
    if prompt is not None:
        check_prompt(prompt, [turn.message for turn in context], name)
    return context, answer


def _of_messages(row: Row, reader: TurnReader) -> tuple[list[Turn], list[Turn]]:
    """What stands before the last message of a conversation, and that message."""
    names = [name for name in LISTS if is_turns(as_turns(row.get(name)), "role", "from")]
    if not names:
        raise RowError("missing_field", f"no 'completion' that holds an answer (the row has {names_of(row)})")
    for name in (*names[1:], *QUESTIONS, "history"):
        if not is_empty(row.get(name)):
            count_unread(reader.unread, name)
    turns = reader.read(row[names[0]], names[0])
    return turns[:-1], turns[-1:]


def _check_answer(answer: list[Turn]) -> None:
    """Refuse an answer that is not the assistant's alone, or not all of it."""
    roles = [turn.role for turn in answer]
    if roles[-1] != "assistant" or not {"user", "system"}.isdisjoint(roles):
        fault = f"the answer is not the assistant's alone (roles: {', '.join(roles)})"
        raise RowError("no_answer", fault, "end the conversation with the answer that the label is about")
    if any(turn.role == "assistant" and (turn.weight != 1 or turn.pieces is not None) for turn in answer):
        fault = "the answer has a weight of its own in its message, and a label is about all of it"
        raise RowError("mask", fault, "take the weight out of the message; loss_weight of the row counts")


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("true", "false")


def _label(row: Row) -> bool:
    """Whether the answer of a row is desirable. Raises ``RowError``."""
    labels = {name: _read_label(row[name], name) for name in LABELS if not is_empty(row.get(name))}
    if not labels:
        raise RowError("missing_field", f"no 'label' that says whether the answer is desirable ({names_of(row)})")
    if len(set(labels.values())) > 1:
        raise RowError("two_verdicts", f"{' and '.join(map(repr, labels))} do not agree", "take one out of the rows")
    return next(iter(labels.values()))


def _read_label(value: object, name: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.strip().lower() in _WORDS:
        return _WORDS[value.strip().lower()]
    shown = repr(value[:40]) if isinstance(value, str) else kind_of(value)
    raise RowError("wrong_type", f"{name!r} is {shown}, not true or false (or 1 or 0)")
