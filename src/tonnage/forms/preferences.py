"""Pairs of answers, a chosen and a rejected one, as all kinds of programs write them, into two whole conversations.

    prompt       a text; messages (in `prompt` or where lists of messages are kept); nothing, where both conversations
                 begin alike; `instruction` with `input` and `history`; `question`
    chosen,      texts; messages, or one, that answer; whole conversations with the prompt in them, as messages or as
    rejected     the text of Anthropic's hh ("\\n\\nHuman: ...\\n\\nAssistant: ...")

Both conversations come out with the same messages before their answers. An answer begins where the two part: it is all
that the assistant says from there on, with calls of tools and their results between, and what stands before is context.
What could be read in two ways is refused: swapped or misplaced, a pair would teach the opposite of what it says.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from typing import Any

from tonnage.forms.beside import after_system, history_of, instruction_of, with_beside
from tonnage.forms.conversation import Conversation, Message, RowError, Turn
from tonnage.forms.turns import LISTS, TurnReader
from tonnage.forms.values import (
    Row,
    answer_of,
    as_float,
    as_turns,
    count_unread,
    is_empty,
    is_turns,
    kind_of,
    names_of,
    optional_string,
    quietly,
)

ANSWERS = (("chosen", "rejected"), ("chosen_response", "rejected_response"))
"""Fields of the two answers, the preferred one first."""
QUESTIONS = ("prompt", "instruction", "question", "query", "input")
"""Fields of a prompt, besides those in which lists of messages are kept."""
SCORES = (
    *(("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"), ("chosen-rating", "rejected-rating")),
    *(("chosen_rating", "rejected_rating"), ("rating_chosen", "rating_rejected")),
)
FIELDS = (
    *(*QUESTIONS, "history", "system", "tools", "functions", *LISTS),
    *(*ANSWERS[1], "output", *chain.from_iterable(SCORES)),
)
"""What is read of a row besides ``chosen`` and ``rejected``."""
SKIPPING = "data.on_bad_row: skip leaves such rows out"
_CANDIDATES = ("completions", "answers", "responses", "candidates", "generations", "outputs")
_SPEAKER = re.compile(r"\n\n(Human|Assistant):")
_HUMAN = "\n\nHuman:"
_SHORTEST_REPEATED = 24
"""Letters of a prompt that no answer repeats by chance."""


@dataclass(frozen=True)
class Prompt:
    """What stands before the answers, by the field ``name``."""

    name: str
    turns: list[Turn]
    is_text: bool
    """Whether it is one message of a user, and not said to be all that stands before the answers."""

    @property
    def messages(self) -> list[Message]:
        return [turn.message for turn in self.turns]


def has_pair(row: Row) -> bool:
    """Whether a row seems to hold two answers of which one is preferred, in fields of their own or in ``output``."""
    if any(first in row and second in row and not is_empty([row[first], row[second]]) for first, second in ANSWERS):
        return True
    output = row.get("output")
    return "instruction" in row and isinstance(output, list) and len(output) > 1 and _are_texts(output)


def read_preference(row: Row, reader: TurnReader, between: str, named: Collection[str]) -> Conversation:
    """The preferred conversation of a row, with the other one. Raises ``RowError``.

    ``between`` stands between ``instruction`` and ``input``; ``named`` are the fields whose columns the source names.
    """
    names, values = _answers(row, reader)
    if "full_chosen" in row and "full_rejected" in row and "chosen" not in named:
        fault = "'full_chosen' and 'full_rejected' beside 'chosen' and 'rejected', which are only steps of them"
        raise RowError("partial_answers", fault, "format: step_dpo for this source, which reads the whole answers")
    _check_scores(row, reader)
    chosen, rejected = (side_of(value, name, reader) for value, name in zip(values, names, strict=True))
    is_whole = [side[0].role != "assistant" for side in (chosen, rejected)]
    if is_whole[0] != is_whole[1]:
        whole, bare = names if is_whole[0] else names[::-1]
        fault = f"{whole!r} is a conversation with its prompt, and {bare!r} an answer alone"
        raise RowError("mixed_answers", fault, "write both with their prompt, or both without it")
    prompt = prompt_of(row, reader, between, named, chosen)
    if is_whole[0]:
        paired = pair(chosen, rejected, names)
        if prompt is not None:
            check_prompt(prompt, [turn.message for turn in paired.turns if not turn.weight], names[0])
    elif prompt is None and chosen[0].message == rejected[0].message:
        paired = pair(chosen, rejected, names)  # conversations that the assistant begins
    elif prompt is None:
        raise RowError(
            "no_prompt",
            f"no prompt before the answers {names[0]!r} and {names[1]!r} (the row has {names_of(row)})",
            "name the column of the prompt (columns: {prompt: ...}), or write whole conversations; texts are read as "
            f"such where both begin with {_HUMAN!r}",
        )
    else:
        _check_repeated(prompt, (chosen, rejected))
        paired = pair([*prompt.turns, *chosen], [*prompt.turns, *rejected], names)
    whole_pair = with_beside(paired, row, reader)
    assert paired.rejected is not None
    other = replace(paired.rejected, tools=whole_pair.tools)
    system = optional_string(row, "system")
    whole_pair.rejected = after_system(other, system) if system.strip() else other
    return whole_pair


def pair(chosen: list[Turn], rejected: list[Turn], names: tuple[str, str]) -> Conversation:
    """Two whole conversations as one pair, whose answers are what is not common to both. Raises ``RowError``.

    ``names`` are the fields that they come from.
    """
    num_shared = sum(
        1 for _ in takewhile(lambda both: both[0].message == both[1].message, zip(chosen, rejected, strict=False))
    )
    answers = chosen[num_shared:], rejected[num_shared:]
    first, second = names
    if _words(answers[0]) == _words(answers[1]):
        fault = f"{first!r} and {second!r} are equal: neither can be preferred"
        raise RowError("equal_answers", fault, f"take the row out; {SKIPPING}")
    for name, other, answer in ((first, second, answers[0]), (second, first, answers[1])):
        if not answer:
            fault = f"{name!r} is the beginning of {other!r}: there is one answer, and nothing it is preferred to"
            raise RowError("one_answer", fault, f"take the row out; {SKIPPING}")
    starts = [answer[0].role for answer in answers]
    if not num_shared:
        fault = f"{first!r} and {second!r} have no first message in common, and no prompt stands beside them"
        raise RowError("nothing_shared", fault, "a pair has one prompt: write both answers to the same one")
    if starts != ["assistant"] * 2:
        fault = (
            f"message {num_shared} of {first!r} and of {second!r} differ, and they are of the roles "
            f"{starts[0]} and {starts[1]}"
        )
        raise RowError("different_prompts", fault, "a pair has one prompt: write both answers to the same one")
    for name, answer in zip(names, answers, strict=True):
        check_answer(answer, name, num_shared)
    context = [turn.message for turn in chosen[:num_shared]]
    chosen_pair, rejected_pair = (
        Conversation([*(Turn(message) for message in context), *answer]) for answer in answers
    )
    return replace(chosen_pair, rejected=rejected_pair)


def check_answer(answer: list[Turn], name: str, start: int) -> None:
    """Refuse an answer that is not the assistant's alone, or not all of it."""
    roles = [turn.role for turn in answer]
    if not {"user", "system"}.isdisjoint(roles):
        raise RowError(
            "multi_turn",
            f"the conversation {name!r} goes on behind the answers that differ (roles from message {start} on: "
            f"{', '.join(roles)}), and of a pair only the answers may differ",
            f"cut both conversations off behind message {start}, the first that differs; {SKIPPING}",
        )
    if roles[-1] != "assistant":
        fault = f"{name!r} ends with a message of the role {roles[-1]}, and not with an answer of the assistant"
        raise RowError("no_answer", fault)
    for at, turn in enumerate(answer, start):
        if turn.role == "assistant" and (turn.weight != 1 or turn.pieces is not None):
            raise RowError(
                "mask",
                f"message {at} of {name!r} has a weight of its own, and of a pair whole answers are compared",
                "take the weight out of the message; loss_weight of the row counts for the pair",
            )


def _words(turns: list[Turn]) -> list[dict[str, Any]]:
    """Messages without the space around their words, which templates often leave out."""
    return [turn.message | {"content": turn.message["content"].strip()} for turn in turns]


# The answers


def _answers(row: Row, reader: TurnReader) -> tuple[tuple[str, str], list[Any]]:
    """The names of the two answers, and what they hold."""
    output = row.get("output")
    for names in ANSWERS:
        if any(not is_empty(row.get(name)) for name in names):
            for name in (*chain.from_iterable(ANSWERS), "output"):
                if name not in names and not is_empty(row.get(name)):
                    count_unread(reader.unread, name)
            for name in names:
                if name not in row:
                    raise RowError("missing_field", f"no field {name!r} (it has {names_of(row)})")
                if is_empty(row[name]):
                    raise RowError("empty_answer", f"{name!r} is empty: there is nothing to compare", SKIPPING)
            return names, [row[name] for name in names]
    if isinstance(output, list) and _are_texts(output):
        if len(output) != 2:
            raise _ranking("output", len(output))
        return ("output[0]", "output[1]"), output
    raise other_preference(row) or RowError(
        "missing_field", f"no 'chosen' and no 'rejected' that hold an answer (it has {names_of(row)})"
    )


def side_of(value: object, name: str, reader: TurnReader) -> list[Turn]:
    """The messages of an answer, or of a whole conversation with its prompt."""
    value = as_turns(value)
    if isinstance(value, str):
        turns = _transcript(value, name) or [Turn({"role": "assistant", "content": answer_of(value, name)}, 1.0)]
    elif isinstance(value, list) and _are_texts(value):
        if len(value) == 1:
            raise RowError("wrong_type", f"{name!r} is a list with one text in it", "write the text itself")
        raise _ranking(name, len(value))
    else:
        turns = reader.read(value, name, or_text=True)
    if all(turn.role != "assistant" for turn in turns):
        roles = ", ".join(turn.role for turn in turns)
        raise RowError("not_an_answer", f"{name!r} holds nothing that the assistant says (roles: {roles})")
    return turns


def _transcript(text: str, name: str, *, is_prompt: bool = False) -> list[Turn]:
    """The messages of a text that begins with ``_HUMAN``, a blank behind each colon; none of any other text.

    A prompt ends with the empty beginning of an answer.
    """
    if not text.startswith(_HUMAN):
        return []
    _, *pieces = _SPEAKER.split(text)
    turns: list[Turn] = []
    for speaker, words in zip(pieces[::2], pieces[1::2], strict=True):
        content = words.removeprefix(" ")
        if speaker == "Human":
            turns.append(Turn({"role": "user", "content": content}))
        elif content.strip():
            turns.append(Turn({"role": "assistant", "content": content}, 1.0))
        elif not is_prompt or len(turns) + 1 < len(pieces) // 2:
            raise RowError("empty_answer", f"{name!r}: an 'Assistant:' with nothing behind it", SKIPPING)
    return turns


def _are_texts(value: list[Any]) -> bool:
    return bool(value) and all(isinstance(item, str) for item in value)


# The prompt


def prompt_of(row: Row, reader: TurnReader, between: str, named: Collection[str], chosen: list[Turn]) -> Prompt | None:
    """The prompt of a row; ``None`` where only the conversations hold it. Raises ``RowError`` where there are two."""
    conversation = [turn.message for turn in chosen]
    prompts = [
        prompt
        for prompt in _prompts(row, reader, between, named)
        if not (prompt.name in LISTS and prompt.messages == conversation)  # the chosen conversation once more
    ]
    if others := [prompt.name for prompt in prompts[1:] if prompt.messages != prompts[0].messages]:
        raise RowError(
            "two_prompts",
            f"{prompts[0].name!r} and {others[0]!r} differ, and either might be the prompt",
            f"say which: columns: {{{prompts[0].name}: {prompts[0].name}}} or columns: {{{others[0]}: {others[0]}}}",
        )
    history = [Turn(turn.message) for turn in history_of(row)]
    if history and not (prompts and prompts[0].is_text):
        fault = "'history' beside a prompt that is messages, and either might come first"
        raise RowError("two_prompts", fault, "write the history into the messages")
    if not prompts:
        return None
    prompt = replace(prompts[0], turns=[*history, *prompts[0].turns], is_text=prompts[0].is_text and not history)
    if prompt.turns[-1].role == "assistant":
        raise RowError(
            "answered_prompt",
            f"the prompt {prompt.name!r} ends with an answer of the assistant, which the two answers might follow or "
            "replace",
            "end the prompt with what was asked",
        )
    return prompt


def _prompts(row: Row, reader: TurnReader, between: str, named: Collection[str]) -> Iterator[Prompt]:
    """All prompts that a row has, or of them those whose columns the source names."""
    names = [name for name in (*QUESTIONS, *LISTS) if not is_empty(row.get(name))]
    names = [name for name in names if name not in LISTS or is_turns(row[name], "role", "from")]
    for name in LISTS:
        if name not in names and not is_empty(row.get(name)):
            count_unread(reader.unread, name)
    has_instruction = "instruction" in names
    if has_instruction and "input" in names:
        names.remove("input")
    wanted_names = [name for name in names if name in named or (name == "instruction" and "input" in named)]
    for name in names if wanted_names else ():
        if name not in wanted_names:
            count_unread(reader.unread, name)
    for name in wanted_names or names:
        value = as_turns(row[name])
        if not isinstance(value, str):
            turns = [Turn(turn.message) for turn in reader.read(value, name, or_text=True)]
            yield Prompt(name, turns, is_text=False)
        elif turns := [Turn(turn.message) for turn in _transcript(value, name, is_prompt=True)]:
            yield Prompt(name, turns, is_text=False)
        elif name == "instruction":
            yield Prompt(name, [Turn(instruction_of(row, between))], is_text=True)
        else:
            yield Prompt(name, [Turn({"role": "user", "content": value})], is_text=True)


def check_prompt(prompt: Prompt, context: list[Message], name: str) -> None:
    """Refuse a prompt that is another than that of the conversations, whose messages before the answers are
    ``context``."""
    if prompt.is_text:
        words = prompt.turns[0].message["content"].strip()
        is_theirs = any(message["role"] == "user" and message["content"].strip() == words for message in context)
    else:
        skipped = int(context[0]["role"] == "system" and prompt.turns[0].role != "system")
        is_theirs = context[skipped:][: len(prompt.turns)] == prompt.messages
    if not is_theirs:
        raise RowError(
            "other_prompt",
            f"{prompt.name!r} is not what the conversation {name!r} begins with, so that either might be the prompt",
            f"take {prompt.name!r} out of the rows if the conversations are whole",
        )


def _check_repeated(prompt: Prompt, sides: tuple[list[Turn], list[Turn]]) -> None:
    """Refuse answers that seem to hold the prompt once more."""
    words = prompt.turns[-1].message["content"].strip()
    size = len(prompt.turns)
    if any([turn.message for turn in side[:size]] == prompt.messages for side in sides) or (
        len(words) >= _SHORTEST_REPEATED
        and all(side[0].message["content"].lstrip().startswith(words) for side in sides)
        and all(len(side) == 1 for side in sides)
    ):
        raise RowError(
            "repeated_prompt",
            f"the answers begin with the prompt {prompt.name!r}, which is part of them or only repeated",
            "take the prompt out of the answers, or write whole conversations as messages, with no prompt beside them",
        )


# Scores


def _scores(row: Row) -> Iterator[tuple[tuple[str, str], tuple[float, float]]]:
    """The scores of both answers, by the names of their fields. Raises ``RowError``."""
    for first, second in SCORES:
        if not is_empty(row.get(first)) and not is_empty(row.get(second)):
            yield (first, second), (number_of(row, first), number_of(row, second))


def number_of(row: Row, name: str) -> float:
    """A number of a row, also from text, as CSV files hold it. Raises ``RowError``."""
    value = row.get(name)
    try:
        number = float(value) if isinstance(value, str) else math.nan
    except ValueError:
        number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        number = as_float(value)
    if not math.isfinite(number):
        shown = repr(value[:40]) if isinstance(value, str) else kind_of(value)
        raise RowError("wrong_type", f"{name!r} is {shown}, not a number")
    return number


def check_order(names: tuple[str, str], scores: tuple[float, float]) -> None:
    """Refuse a pair of which the rejected answer has the better score; ``names`` are the fields of the ``scores``."""
    if scores[0] < scores[1]:
        raise RowError(
            "score_order",
            f"{names[0]!r} is {scores[0]:g} and {names[1]!r} is {scores[1]:g}: the answer that is not preferred has "
            "the better score",
            f"swap the two answers, or take the scores out if they measure something else; {SKIPPING}",
        )


def _check_scores(row: Row, reader: TurnReader) -> None:
    """Refuse a row whose scores say that the other answer is the better one, and count scores of one answer alone."""
    for names, scores in _scores(row):
        check_order(names, scores)
    for names in SCORES:
        lone_names = [name for name in names if not is_empty(row.get(name))]
        if len(lone_names) == 1:
            count_unread(reader.unread, lone_names[0])


def is_tie(row: Row) -> bool:
    """Whether both answers of a row have the same score."""
    all_scores = [scores for _, scores in _scores(row)]
    return bool(all_scores) and all(chosen == rejected for chosen, rejected in all_scores)


# What else says that one answer is better than another


def has_turns(row: Row) -> bool:
    """Whether a pair is conversations, and not a text with two answers."""
    names = (*QUESTIONS, *chain.from_iterable(ANSWERS), "context", "conversation_a", "conversation_b")
    values = [as_turns(row[name]) for name in names if not is_empty(row.get(name))]
    return (
        any(not isinstance(value, str) or value.startswith(_HUMAN) for value in values)
        or isinstance(quietly(row.get("history")), list)
        or any(is_turns(row.get(name), "role", "from") for name in LISTS)
    )


def other_preference(row: Row) -> RowError | None:
    """Why a row is refused that says which answers are good in a way that nothing here learns from."""
    if isinstance(quietly(row.get("completions")), list) and isinstance(quietly(row.get("labels")), list):
        return RowError(
            "stepwise",
            "completions with a label each: preferences of steps, which no objective here learns from",
            "write pairs of whole answers: prompt, chosen, rejected",
        )
    if "completion" in row and isinstance(row.get("label"), bool):
        return RowError(
            "kto",
            "a completion with a label of true or false: one answer, of which a pair has two",
            "learn from answers that are each good or bad: objective: kto; or write a good and a bad answer to the "
            "same prompt as one row (prompt, chosen, rejected)",
        )
    for name in _CANDIDATES:
        answers = quietly(row.get(name))
        if isinstance(answers, list) and len(answers) > 2 and all(isinstance(item, str | Mapping) for item in answers):
            return _ranking(name, len(answers))
    return None


def _ranking(name: str, number: int) -> RowError:
    return RowError(
        "ranking",
        f"{name!r} is a list of {number} answers: a ranking, and a pair has one chosen and one rejected answer",
        "write a row for each two of them, the better one first: prompt, chosen, rejected",
    )
