"""From rows of a form to conversations.

``Reader`` checks every value it uses, raises ``RowError`` with the reason, and counts the fields that nobody reads; it
never repairs a row in silence. Rows that were made for another purpose (preferences, pictures) are refused, since their
texts alone mean something else. Which tokens are trained is settled elsewhere: here a message only gets its weight.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tonnage.data.conversation import Conversation, Message, Pieces, RowError
from tonnage.data.formats import (
    FORMATS,
    LISTS,
    MASKS,
    Form,
    Row,
    as_turns,
    fields_of,
    is_strings,
    pair_names,
    quietly,
    rename,
    turns_of,
)
from tonnage.data.turns import (
    FLAGS,
    MEDIA,
    Turns,
    as_list,
    count_unread,
    is_empty,
    kind_of,
    media_error,
    names_of,
    number_weight,
    placeholder_in,
    read_tools,
    without_nulls,
)
from tonnage.data.verdicts import Values

MOST_IN_TREE = 2_000
LARGEST_CARRIED = 3.4e38
_GEMINI_PART = (
    *("text", "thought", "functionCall", "function_call", "functionResponse", "function_response"),
    *("thoughtSignature", "thought_signature"),
)
SOURCE, PATH = "{source}", "{path}"
"""In a ``RowError``'s advice: the key of the row's source in the config, and its path."""


class Reader:
    """Reads the rows of one source."""

    def __init__(self, form: Form, *, fills_nulls: bool = False, carry: Sequence[str] = ()) -> None:
        """``fills_nulls``: whether the file's kind gives objects the fields of all others, null. ``carry``: columns of
        numbers that go with each conversation of a row."""
        self.unread: Counter[str] = Counter()
        """Fields that hold something and are not read -> rows (or messages) that have them."""
        self.columns: Counter[str] = Counter()
        """Columns that the form names -> rows that have them."""
        self.values = Values()
        """Of the fields that are not read."""
        self._form = form
        self._turns = Turns(form.roles, self.unread, self.values, fills_nulls=fills_nulls)
        self._fills_nulls = fills_nulls
        self._carry = tuple(carry)
        self._read: Callable[[Row], list[Conversation]] = getattr(self, f"_{form.format}")
        self._known = frozenset((*fields_of(form.format), *carry))
        self._usual = FORMATS[form.format].must[0]
        self._lists = form.format in ("messages", "sharegpt", "pairs")
        self._asked_for = frozenset(form.columns.values())

    def read(self, row: Row) -> list[Conversation]:
        """The conversations of a row: one, or one for every path of a tree and every instance. Raises ``RowError``."""
        carried = tuple(_carried(row, name) for name in self._carry)
        if self._form.columns:
            self.columns.update(self._asked_for.intersection(row))
            for ours, theirs in self._form.columns.items():
                if ours in row and theirs in row and ours not in self._asked_for and not is_empty(row[ours]):
                    count_unread(self.unread, ours)  # another column stands in its place
            row = rename(row, self._form.columns)
        beside = [name for name in row if name not in self._known]
        for name in beside:
            self._unknown(name, row)
        found = self._read(row)
        if beside:
            self._note_values(row, beside, found[-1])
        if self._form.drops_system:
            found = list(map(_without_system, found))
        if (weight := number_weight(row.get("loss_weight"), "loss_weight")) is not None:
            found = [conversation.scaled(weight) for conversation in found]
        if carried:
            found = [replace(conversation, carried=carried) for conversation in found]
        for conversation in found:
            if mark := placeholder_in(conversation.messages):
                raise media_error(f"a message that begins or ends with {mark}")
            if conversation.is_chat:
                _finish(conversation)
        return found

    def _unknown(self, name: str, row: Row) -> None:
        """Count a field that is not read, or refuse the row for it."""
        value = row[name]
        if is_empty(value) or (self._lists and name in LISTS and name == turns_of(row, self._usual)):
            return
        if name in MEDIA:
            raise media_error(f"a field {name!r}")
        if name == "kto_tag" or (name == "label" and isinstance(value, bool)):
            raise RowError(
                "preference",
                f"a field {name!r} that says whether the answer is a good one",
                f"write the rows whose {name} is true to a file of their own, without that field; training on both "
                "kinds is not there yet",
            )
        if name in ("chosen", "rejected") and row.get("chosen") is not None:
            raise RowError(
                "preference",
                "an answer that was chosen, or one that was rejected, beside it: a preference, which needs another "
                "objective",
                for_chosen(row),
            )
        if name == "train_detail":
            raise RowError(
                "unsupported", "train_detail is not read", "mark messages, or parts of them, with train: false"
            )
        count_unread(self.unread, str(name))

    def _note_values(self, row: Row, beside: Sequence[str], conversation: Conversation) -> None:
        """Note the values of the fields ``beside`` those that are read."""
        answer = conversation.messages[-1]["content"] if conversation.messages else ""
        for name in beside:
            if not (self._lists and name in LISTS):
                self.values.note(name, row[name], answer)

    def _count(self, item: Row, known: tuple[str, ...], name: str) -> None:
        """Count the fields of an item of list ``name`` that are not read."""
        for field in item:
            if field not in known and not is_empty(item[field]):
                count_unread(self.unread, f"{name}[].{field}")

    # Formats

    def _alpaca(self, row: Row) -> list[Conversation]:
        instruction = _string(row, "instruction")
        given = _optional(row, "input")
        answer = _answer(_string(row, "output"), "output")
        if not instruction.strip() and not given.strip():
            raise RowError("empty_prompt", "'instruction' is empty")
        conversation = Conversation()
        for pair in _history(row.get("history")):
            _say(conversation, pair[0], pair[1])
        _say(conversation, instruction, answer)
        if given.strip():
            conversation.messages[-2] = {
                "role": "user",
                "content": f"{instruction}{self._form.between}{given}" if instruction.strip() else given,
                "instruction": instruction,
                "input": given,
            }
        return [self._with_system(conversation, row)]

    def _text(self, row: Row) -> list[Conversation]:
        return [Conversation(text=_answer(_string(row, "text"), "text"))]

    def _completion(self, row: Row) -> list[Conversation]:
        prompt, completion = as_turns(row.get("prompt")), as_turns(row.get("completion"))
        if isinstance(prompt, str) and isinstance(completion, str):
            _answer(completion, "completion")
            if not prompt:
                raise RowError("empty_prompt", "'prompt' is empty")
            return [self._with_system(_say(Conversation(), prompt, completion), row)]
        before = self._side(prompt, "prompt", "user")
        after = self._side(completion, "completion", "assistant")
        at = len(before.messages)
        return [
            self._with_system(
                Conversation(
                    before.messages + after.messages,
                    [0.0] * at + after.weights,
                    pieces={at + number: pieces for number, pieces in after.pieces.items()},
                    unsaid=frozenset(at + number for number in after.unsaid),
                ),
                row,
            )
        ]

    def _side(self, value: object, name: str, role: str) -> Conversation:
        if isinstance(value, str):
            return Conversation([{"role": role, "content": _answer(value, name)}], [float(role == "assistant")])
        return self._turns.read(value, name, or_text=True)

    def _messages(self, row: Row) -> list[Conversation]:
        name = turns_of(row, self._usual)
        if name not in row:
            raise RowError("missing_field", f"no field {name!r} (it has {names_of(row)})")
        return [self._with_system(self._turns.read(row[name], name), row)]

    _sharegpt = _messages

    def _pairs(self, row: Row) -> list[Conversation]:
        name = next((name for name in LISTS if pair_names(row.get(name)) is not None), "conversation")
        turns, names = quietly(row.get(name)), pair_names(row.get(name))
        if names is None or not isinstance(turns, list):
            raise RowError("wrong_type", f"{name!r} is not a list of questions and answers ({kind_of(turns)})")
        conversation = Conversation()
        for number, turn in enumerate(turns):
            where = f"{name}[{number}]"
            if not isinstance(turn, dict):
                raise RowError("wrong_type", f"{where} is {kind_of(turn)}, not a question and its answer")
            self._count(turn, (*names, "system", *FLAGS, "output_with_loss"), name)
            system, asked = _optional(turn, "system"), _optional(turn, names[0])
            if system.strip():
                conversation.messages.append({"role": "system", "content": system})
                conversation.weights.append(0.0)
            said = _answer(_string(turn, names[1]), f"{where}.{names[1]}")
            flags = [number_weight(turn.get(flag), f"{where}.{flag}") for flag in (*FLAGS, "output_with_loss")]
            weight = next((flag for flag in flags if flag is not None), 1.0)
            _say(conversation, asked, said, weight)
        return [self._with_system(conversation, row)]

    def _strings(self, row: Row) -> list[Conversation]:
        said = quietly(row.get("data"))
        if not is_strings(said) or not isinstance(said, list):
            raise RowError("wrong_type", "'data' is not a list of strings, what the user and the assistant say in turn")
        conversation = Conversation()
        for number, words in enumerate(said):
            role = "assistant" if number % 2 else "user"
            if role == "assistant":
                _answer(words, f"data[{number}]")
            conversation.messages.append({"role": role, "content": words})
            conversation.weights.append(float(number % 2))
        return [self._with_system(conversation, row)]

    def _gemini(self, row: Row) -> list[Conversation]:
        contents = quietly(row.get("contents"))
        if not isinstance(contents, list):
            raise RowError("wrong_type", f"'contents' is {kind_of(contents)}, not a list of messages")
        turns = [self._gemini_turn(content, f"contents[{number}]") for number, content in enumerate(contents)]
        conversation = self._turns.read(
            [one for some in turns for one in some], "contents", _gemini_tools(row.get("tools"))
        )
        system = row.get("systemInstruction", row.get("system_instruction"))
        if not is_empty(system):
            words = (
                system
                if isinstance(system, str)
                else self._gemini_turn({"role": "system", **system}, "systemInstruction")[0]["content"]
                if isinstance(system, dict)
                else ""
            )
            conversation = _after_system(conversation, str(words))
        return [conversation]

    def _gemini_turn(self, content: object, where: str) -> list[dict[str, Any]]:
        parts = content.get("parts") if isinstance(content, dict) else None
        if not isinstance(content, dict) or not isinstance(parts, list):
            raise RowError("wrong_type", f"{where} is {kind_of(content)}, not a message with parts")
        made = ("parts", "content", "reasoning_content", "tool_calls")
        self._count(content, tuple(name for name in content if name not in made[1:]), where.split("[")[0])
        beside = {name: found for name, found in content.items() if name not in made and found is not None}
        turn: dict[str, Any] = {"role": "user", **beside, "content": ""}
        results = []
        for number, part in enumerate(parts):
            match part:
                case {"text": str(text), "thought": True}:
                    turn["reasoning_content"] = turn.get("reasoning_content", "") + text
                case {"text": str(text)}:
                    turn["content"] += text
                case {"functionCall": {"name": str(name), **call}} | {"function_call": {"name": str(name), **call}}:
                    turn.setdefault("tool_calls", []).append({"name": name, "arguments": call.get("args") or {}})
                case {"functionResponse": {"name": str(name), **given}} | {
                    "function_response": {"name": str(name), **given}
                }:
                    results.append({"role": "tool", "name": name, "content": given.get("response")})
                case {"inlineData": _} | {"inline_data": _} | {"fileData": _} | {"file_data": _}:
                    raise media_error(f"{where}.parts[{number}] is a file")
                case _:
                    raise RowError("wrong_type", f"{where}.parts[{number}] holds neither text nor a call of a function")
            self._count(part, _GEMINI_PART, f"{where.split('[')[0]}[].parts")
        return [*results, turn] if turn["content"] or "tool_calls" in turn or not results else results

    def _instances(self, row: Row) -> list[Conversation]:
        instances = quietly(row.get("instances"))
        if not isinstance(instances, list) or not instances:
            raise RowError("wrong_type", f"'instances' is {kind_of(instances)}, not a list of inputs and outputs")
        found = []
        for number, instance in enumerate(instances):
            if not isinstance(instance, dict):
                raise RowError("wrong_type", f"instances[{number}] is {kind_of(instance)}, not an object")
            self._count(instance, ("input", "output"), "instances")
            beside = {name: row[name] for name in ("instruction", "system") if name in row}
            found += self._alpaca({**beside, **{k: instance[k] for k in ("input", "output") if k in instance}})
        return found

    def _tree(self, row: Row) -> list[Conversation]:
        found: list[Conversation] = []
        root = row.get("prompt")
        if not isinstance(root, dict):
            raise RowError("wrong_type", f"'prompt' is {kind_of(root)}, not a message with replies")
        seen: set[int] = set()
        said: set[tuple[str, ...]] = set()
        for path in _paths(root):
            messages: list[Message] = []
            for number, node in enumerate(path):
                words = node.get("text")
                if not isinstance(words, str):
                    raise RowError("wrong_type", f"a message of the tree has no text (it has {names_of(node)})")
                if id(node) not in seen:
                    self._count(node, ("role", "text", "replies"), "replies")
                seen.add(id(node))
                messages.append({"role": self._turns.role(node.get("role"), f"reply {number}"), "content": words})
            while messages and messages[-1]["role"] != "assistant":
                messages.pop()
            weights = [float(message["role"] == "assistant") for message in messages]
            words_of = tuple(words for message in messages for words in message.values())
            if messages and words_of not in said:
                said.add(words_of)
                found.append(Conversation(messages, weights))
        if not found:
            raise RowError("no_answer", "no reply of the assistant in the tree")
        return found

    def _segments(self, row: Row) -> list[Conversation]:
        segments = quietly(row.get("segments"))
        if not isinstance(segments, list) or not segments:
            raise RowError("wrong_type", f"'segments' is {kind_of(segments)}, not a list of texts with labels")
        pieces: Pieces = []
        text = ""
        for number, segment in enumerate(segments):
            where = f"segments[{number}]"
            if not isinstance(segment, dict) or not isinstance(segment.get("text"), str):
                raise RowError("wrong_type", f"{where} is {kind_of(segment)} without a text")
            flags = [number_weight(segment.get(name), f"{where}.{name}") for name in ("label", *FLAGS)]
            weight = next((flag for flag in flags if flag is not None), None)
            if weight is None:
                raise RowError("missing_field", f"{where} has no label (it has {names_of(segment)})")
            self._count(segment, ("text", "label", *FLAGS), "segments")
            pieces.append((len(segment["text"]), weight))
            text += segment["text"]
        if not any(weight for _, weight in pieces):
            raise RowError("nothing_supervised", "no segment has the label true")
        return [Conversation(text=_answer(text, "segments"), pieces={0: pieces})]

    def _tokens(self, row: Row) -> list[Conversation]:
        ids = row.get("input_ids")
        if not isinstance(ids, list) or not ids or not all(type(token) is int and 0 <= token < 2**31 for token in ids):
            raise RowError("wrong_type", "'input_ids' is not a list of token ids")
        names = [name for name in MASKS if not is_empty(row.get(name))]
        if not names:
            raise RowError(
                "missing_field",
                f"token ids without a mask (it has {names_of(row)})",
                f"say which are trained: one of {', '.join(MASKS)} beside input_ids",
            )
        masks = []
        for name in (*names, *(("attention_mask",) if not is_empty(row.get("attention_mask")) else ())):
            mask = row[name]
            if not isinstance(mask, list) or len(mask) != len(ids):
                size = f"{len(mask)} long" if isinstance(mask, list) else kind_of(mask)
                raise RowError("wrong_type", f"{name!r} is {size}, and 'input_ids' has {len(ids)} tokens")
            if name == "labels":
                if any(label not in (-100, token) for label, token in zip(mask, ids, strict=True)):
                    raise RowError("wrong_type", "'labels' holds other tokens than 'input_ids' and -100")
                mask = [float(label != -100) for label in mask]
            masks.append([number_weight(one, f"{name}[{at}]") or 0.0 for at, one in enumerate(mask)])
        if any(mask != masks[0] for mask in masks[1 : len(names)]):
            raise RowError("wrong_type", f"{' and '.join(names)} do not agree")
        weights = masks[0]
        if len(masks) > len(names):  # padding is no token
            there = [at for at, one in enumerate(masks[-1]) if one]
            if there != list(range(there[0], there[-1] + 1)) if there else True:
                raise RowError("wrong_type", "'attention_mask' leaves tokens out between others")
            ids, weights = ids[there[0] : there[-1] + 1], weights[there[0] : there[-1] + 1]
        if not any(weights[1:]):
            raise RowError("nothing_supervised", "no token of the row is trained on")
        return [Conversation(ids=ids, ids_weights=weights)]

    # What stands beside

    def _with_system(self, conversation: Conversation, row: Row) -> Conversation:
        given, other = row.get("tools"), row.get("functions")
        if is_empty(given):
            given = other
        elif not is_empty(other) and other != given:
            count_unread(self.unread, "functions")
        if conversation.tools is None and given is not None:
            conversation.tools = read_tools(without_nulls(as_list(given)) if self._fills_nulls else given)
        system = _optional(row, "system")
        return _after_system(conversation, system) if system.strip() else conversation


def _say(conversation: Conversation, asked: str, said: str, weight: float = 1.0) -> Conversation:
    """Add a question and its answer."""
    if weight == 0:
        conversation.unsaid |= {len(conversation.messages) + 1}
    conversation.messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    conversation.weights += [0.0, weight]
    return conversation


def _after_system(conversation: Conversation, system: str) -> Conversation:
    """The conversation behind a system message. Raises ``RowError`` if it has another one."""
    messages = conversation.messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"].strip() == system.strip():
            return conversation
        raise RowError("wrong_type", "two system prompts: one in the messages, another one beside them")
    return Conversation(
        [{"role": "system", "content": system}, *messages],
        [0.0, *conversation.weights],
        conversation.tools,
        pieces={at + 1: pieces for at, pieces in conversation.pieces.items()},
        unsaid=frozenset(at + 1 for at in conversation.unsaid),
    )


def _without_system(conversation: Conversation) -> Conversation:
    """The conversation without the system message that it begins with, if it does."""
    if not conversation.messages or conversation.messages[0]["role"] != "system":
        return conversation
    return replace(
        conversation,
        messages=conversation.messages[1:],
        weights=conversation.weights[1:],
        pieces={at - 1: pieces for at, pieces in conversation.pieces.items() if at},
        unsaid=frozenset(at - 1 for at in conversation.unsaid if at),
    )


def _finish(conversation: Conversation) -> None:
    """Refuse a conversation of which nothing would be trained."""
    roles = [message["role"] for message in conversation.messages]
    if "assistant" not in roles:
        raise RowError("no_answer", f"no assistant message (roles: {', '.join(roles) or 'none'})")
    pieces = conversation.pieces
    if not any(
        weight and (at not in pieces or any(one for _, one in pieces[at]))
        for at, weight in enumerate(conversation.weights)
    ):
        raise RowError(
            "nothing_supervised", "every assistant message is marked as not to be trained (train: false or weight 0)"
        )


def _string(row: Row, name: str) -> str:
    if name not in row:
        raise RowError("missing_field", f"no field {name!r} (it has {names_of(row)})")
    value = row[name]
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, not a string")
    return value


def _optional(row: Row, name: str) -> str:
    value = row.get(name)
    if is_empty(value):
        return ""
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, not a string")
    return value


def _answer(text: str, name: str) -> str:
    if not text or text.isspace():
        raise RowError("empty_answer", f"{name!r} is empty: there is nothing to learn")
    return text


def _carried(row: Row, name: str) -> float:
    """The number of a row that goes with its documents. Raises ``RowError``."""
    value = row.get(name)
    if is_empty(value):
        raise RowError("missing_field", f"no {name!r}, which data.carry names (it has {names_of(row)})")
    if not isinstance(value, int | float):
        raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, and data.carry takes numbers")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= LARGEST_CARRIED:  # in fp32, as a loss is given it
        raise RowError("wrong_type", f"{name!r} is {str(value)[:20]}, and data.carry takes numbers that fp32 holds")
    return number


def _history(value: object) -> list[list[str]]:
    value = as_list(value)
    if is_empty(value):
        return []
    if not isinstance(value, list):
        raise RowError("wrong_type", f"'history' is {kind_of(value)}, not a list of [prompt, answer] pairs")
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise RowError("wrong_type", "'history' is not a list of [prompt, answer] pairs of strings")
        _answer(pair[1], "history")
    return value


def _paths(root: Mapping[str, Any]) -> Iterator[list[Mapping[str, Any]]]:
    """The ways from the root of a tree to its leaves. Raises ``RowError``."""
    waiting: list[list[Mapping[str, Any]]] = [[root]]
    count = 0
    while waiting:
        path = waiting.pop()
        replies = path[-1].get("replies") or []
        if not isinstance(replies, list) or not all(isinstance(reply, dict) for reply in replies):
            raise RowError("wrong_type", f"'replies' is {kind_of(replies)}, not a list of messages")
        if len(path) > MOST_IN_TREE or (count := count + 1) > MOST_IN_TREE:
            raise RowError("too_large", f"a tree of more than {MOST_IN_TREE:,} messages")
        if not replies:
            yield path
        waiting += [[*path, reply] for reply in reversed(replies)]


def _gemini_tools(value: object) -> object:
    """Tools of Gemini's form, which wraps a list of declarations once more."""
    tools = quietly(value)
    if not isinstance(tools, list):
        return tools
    declared = [
        tool.get("functionDeclarations", tool.get("function_declarations")) if isinstance(tool, dict) else None
        for tool in tools
    ]
    return [one for some in declared if isinstance(some, list) for one in some] or tools


def for_chosen(row: Row) -> str:
    """How to train on the chosen answers of preferences; ``SOURCE`` and ``PATH`` stand for what only the caller
    knows."""
    chosen = quietly(row["chosen"])
    names = ("prompt", "question", "instruction", "query", "input", *LISTS)
    asked = next((name for name in names if not is_empty(row.get(name))), None)
    if isinstance(chosen, list) and len(chosen) > 1:
        form = "messages, columns: {messages: chosen}"
    elif asked is None:
        return "to train on the chosen answers alone, write them to a file of their own, as prompt and completion"
    else:
        prompt = "" if asked == "prompt" else f"prompt: {asked}, "
        form = f"completion, columns: {{{prompt}completion: chosen}}"
    return f"train on the chosen answers alone: {SOURCE}: {{path: {PATH}, format: {form}}}"
