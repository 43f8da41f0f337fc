"""What forms share besides lists of messages: an instruction with its input, questions that came before with their
answers, and the system message and tools that stand in fields of their own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from tonnage.forms.conversation import Conversation, Message, RowError, Turn
from tonnage.forms.turns import TurnReader, read_tools
from tonnage.forms.values import (
    Row,
    answer_of,
    as_list,
    count_unread,
    is_empty,
    kind_of,
    optional_string,
    string_of,
    without_nulls,
)


def instruction_of(row: Row, between: str) -> Message:
    """The message of a user that ``instruction`` and ``input`` make, with ``between`` between them."""
    instruction, more = string_of(row, "instruction"), optional_string(row, "input")
    if not instruction.strip() and not more.strip():
        raise RowError("empty_prompt", "'instruction' is empty")
    if not more.strip():
        return {"role": "user", "content": instruction}
    whole = f"{instruction}{between}{more}" if instruction.strip() else more
    return {"role": "user", "content": whole, "instruction": instruction, "input": more}


def exchange(question: str, reply: str, weight: float = 1.0) -> tuple[Turn, Turn]:
    """What a user asks, and what the assistant says to it."""
    answer: Message = {"role": "assistant", "content": reply}
    return Turn({"role": "user", "content": question}), Turn(answer, weight, is_unsaid=weight == 0)


def history_of(row: Row) -> list[Turn]:
    """The turns of ``history``: questions and answers before the row's own. Raises ``RowError``."""
    value = as_list(row.get("history"))
    if is_empty(value):
        return []
    if not isinstance(value, list):
        raise RowError("wrong_type", f"'history' is {kind_of(value)}, not a list of [prompt, answer] pairs")
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise RowError("wrong_type", "'history' is not a list of [prompt, answer] pairs of strings")
        answer_of(pair[1], "history")
    return [*chain.from_iterable(exchange(question, reply) for question, reply in value)]


def with_beside(conversation: Conversation, row: Row, reader: TurnReader) -> Conversation:
    """The conversation with the tools and the system message that stand in fields of their own."""
    tools, other = row.get("tools"), row.get("functions")
    if is_empty(tools):
        tools = other
    elif not is_empty(other) and other != tools:
        count_unread(reader.unread, "functions")
    if tools is not None:
        conversation.tools = read_tools(without_nulls(as_list(tools)) if reader.fills_nulls else tools)
    system = optional_string(row, "system")
    return after_system(conversation, system) if system.strip() else conversation


def after_system(conversation: Conversation, system: str) -> Conversation:
    """The conversation with a system message in front. Raises ``RowError`` if it has another one."""
    turns = conversation.turns
    if turns and turns[0].role == "system":
        if turns[0].message["content"].strip() == system.strip():
            return conversation
        raise RowError("wrong_type", "two system prompts: one in the messages, another one beside them")
    return replace(conversation, turns=[Turn({"role": "system", "content": system}), *turns])
