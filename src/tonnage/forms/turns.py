"""Lists of messages, as all kinds of programs write them, into messages as chat templates want them.

Names of roles, of contents and of flags differ; calls of tools come in five ways; a content is a string or a list of
parts. ``TurnReader`` reads what it knows of, raises ``RowError`` for what it cannot use, and counts the names of all
fields that it does not read. It never repairs a message in silence.

Calls:

    {"tool_calls": [{"id", "type": "function", "function": {"name", "arguments"}}]}     OpenAI
    {"tool_calls": [{"name", "arguments"}]}                                             without the wrapping
    {"function_call": {"name", "arguments"}}                                            OpenAI, before 2023-11
    {"from": "function_call", "value": '{"name": ..., "arguments": ...}'}               ShareGPT; also a list of them
    {"content": [{"type": "tool_use", "id", "name", "input"}]}                          Anthropic

Arguments are an object, or JSON text of one, once or twice over.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tonnage.forms.conversation import CLOSES_THOUGHT, OPENS_THOUGHT, Image, Message, Pieces, RowError, Turn
from tonnage.forms.images import MARK, MESSAGE_KEY, PART_TYPES, image_of_part
from tonnage.forms.values import (
    FLAGS,
    as_list,
    count_unread,
    is_empty,
    kind_of,
    names_of,
    parse_json,
    weights_of,
    without_nulls,
)
from tonnage.forms.verdicts import Values

LISTS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat", "turns")
"""Fields under which lists of messages are kept."""
ROLE_NAMES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "chatgpt", "bot", "chatbot", "model", "ai", "bing", "bard", "claude"), "assistant"
    ),
    **dict.fromkeys(
        (
            *("tool", "tools", "tool_response", "tool_responses", "tool_result", "tool_results", "tool_output"),
            *("function", "function_response", "function_result", "function_output"),
            *("ipython", "observation", "observations"),
        ),
        "tool",
    ),
    **dict.fromkeys(("function_call", "function_calls", "tool_call", "tool_calls"), "assistant"),
}
"""Names that people give to roles, in small letters, blanks and dashes written as ``_``."""
CALL_ROLES = ("function_call", "function_calls", "tool_call", "tool_calls")
REASONING = ("reasoning_content", "reasoning", "thinking")
MEDIA = ("image", "images", "image_url", "audio", "audios", "audio_url", "input_audio", "video", "videos", "video_url")
"""Fields of a row, and types of a part, that stand for what no text holds."""
PLACEHOLDERS = tuple(f"<{kind}>" for kind in ("image", "audio", "video"))
_KNOWN = frozenset(
    (
        *("role", "from", "content", "value", "name", "tool_call_id", "tool_calls", "function_call"),
        *REASONING,
        *FLAGS,
        "train_detail",
    )
)
MOST_MESSAGES = 20_000
"""In a row: rendering each beginning of more would take hours."""


class TurnReader:
    def __init__(
        self,
        roles: Mapping[str, str],
        unread: Counter[str],
        values: Values,
        *,
        fills_nulls: bool = False,
        images: bool = False,
    ) -> None:
        """``roles``: names of roles besides the known ones -> ours. ``unread`` counts fields that nobody reads, and
        ``values`` what they hold. ``fills_nulls``: whether the file's kind gives objects the fields of all others,
        null. ``images``: whether messages may hold images."""
        self.fills_nulls, self.images = fills_nulls, images
        own = {_folded(name): role for name, role in roles.items()}
        self._roles = {**ROLE_NAMES, **own}
        self._calls = frozenset(CALL_ROLES) - own.keys()
        self._quick = {name: role for name, role in self._roles.items() if name not in self._calls}
        self.unread, self._values = unread, values

    def read(self, value: object, name: str, *, or_text: bool = False) -> list[Turn]:
        """The turns of a list (or of its JSON text) that stands in field ``name``; ``or_text`` where words may, too.

        Raises ``RowError``.
        """
        value = as_list(value)
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            expected = "a text or a list of messages" if or_text else "a list of messages"
            raise RowError("wrong_type", f"{name!r} is {kind_of(value)}, not {expected}")
        if not value:
            raise RowError("missing_field", f"{name!r} is an empty list")
        if len(value) > MOST_MESSAGES:
            raise RowError("too_large", f"{name!r} has {len(value):,} messages; at most {MOST_MESSAGES:,} are read")
        turns: list[Turn] = []
        for number, item in enumerate(value):
            if isinstance(item, dict) and (plain := self._plain(item)) is not None:
                turns.append(plain)
                continue
            where = f"{name}[{number}]"
            if not isinstance(item, dict):
                raise RowError("wrong_type", f"{where} is {kind_of(item)}, not a message")
            for field, content in item.items():
                if field not in _KNOWN and not is_empty(content):
                    self._never_read(where, field)
                    self._values.note(f"{name}[].{field}", content, str(item.get("content", item.get("value"))))
            turns += self._turns(item, where)
        return turns

    def count_others(self, mapping: Mapping[str, Any], read_fields: Collection[str], where: str) -> None:
        """Count the fields of an object that hold something and are not among those that are read."""
        for field in mapping:
            if field not in read_fields and not is_empty(mapping[field]):
                self._never_read(where, field)

    def _plain(self, turn: dict[str, Any]) -> Turn | None:
        """A turn that is a role and words and nothing else: most are, and this is quick."""
        match turn:
            case {"role": str(role), "content": str(words)} | {"from": str(role), "value": str(words)} if (
                len(turn) == 2
            ):
                role = self._quick.get(role, "")
                if role and (role != "assistant" or words.strip()):
                    return Turn({"role": role, "content": words}, float(role == "assistant"))
        return None

    def role(self, name: object, where: str) -> str:
        """Our name of a role. Raises ``RowError``."""
        role = self._roles.get(_folded(name)) if isinstance(name, str) else None
        if role is None:
            shown = str(name)[:60]
            raise RowError(
                "unknown_role",
                f"{where}: unknown role {shown!r}; known: {', '.join(self._roles)}",
                f"say whose it is: roles: {{{json.dumps(shown)}: assistant}} (or system, user, tool)",
            )
        return role

    def _turns(self, turn: Mapping[str, Any], where: str) -> list[Turn]:
        """The turns of an item of a list: one for each result of a tool among its parts, then its own."""
        role_key = "role" if "role" in turn else "from"
        if role_key not in turn:
            raise RowError("missing_field", f"{where} has no 'role' (it has {names_of(turn)})")
        role = self.role(turn[role_key], where)
        if not is_empty(turn.get("train_detail")):
            raise RowError(
                "unsupported",
                f"{where}: train_detail is not read",
                'write the content in parts, each with its flag: [{"type": "text", "text": "...", "train": false}]',
            )
        content_key = self._one_of(turn, ("content", "value"), where)
        called = not is_empty(turn.get("tool_calls")) or not is_empty(turn.get("function_call"))
        if content_key not in turn and not called:
            raise RowError("missing_field", f"{where} has no 'content' (it has {names_of(turn)})")
        only_calls = _folded(turn[role_key]) in self._calls
        content = turn.get(content_key)
        raw_calls = content if only_calls and _are_calls(content) else None
        parts = self._parts(content if raw_calls is None else None, role, f"{where}.{content_key}")
        message: Message = {"role": role, "content": parts.text}
        if parts.images:
            message[MESSAGE_KEY] = parts.images
        reasoning = turn.get(self._one_of(turn, REASONING, where))
        if is_empty(reasoning):
            reasoning = parts.reasoning
        elif parts.reasoning:
            self._never_read(where, "reasoning")
        if not isinstance(reasoning, str):
            raise RowError("wrong_type", f"{where}: the reasoning is {kind_of(reasoning)}, not a string")
        if reasoning.strip():
            message["reasoning_content"] = reasoning
        calls = parts.calls
        if only_calls:
            thought, text = _thought_before(parts.text)
            if thought:
                message["reasoning_content"] = thought
            message["content"] = ""
            raw_calls = parse_json(text, f"{where}: a tool call") if raw_calls is None else raw_calls
            calls += [self._call(call, where) for call in (raw_calls if isinstance(raw_calls, list) else [raw_calls])]
        elif called:
            key = self._one_of(turn, ("tool_calls", "function_call"), where)
            raw_calls = as_list(turn[key]) if key == "tool_calls" else [turn[key]]
            if not isinstance(raw_calls, list):
                raise RowError("wrong_type", f"{where}.tool_calls is {kind_of(raw_calls)}, not a list")
            calls += [self._call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(raw_calls)]
        if calls:
            message["tool_calls"] = calls
        for key in ("name", "tool_call_id"):
            if isinstance(turn.get(key), str) and turn[key]:
                message[key] = turn[key]
            elif not is_empty(turn.get(key)):
                self._never_read(where, key)
        if role == "assistant" and not message["content"].strip() and not calls:
            raise RowError("empty_answer", f"{where}: an assistant message with nothing in it")
        results = [Turn(result) for result in parts.results]
        if results and not (message["content"].strip() or calls):
            return results
        return [*results, _weighed(message, parts, weights_of(turn, FLAGS, where), where)]

    def _one_of(self, turn: Mapping[str, Any], names: Sequence[str], where: str) -> str:
        """Of several fields of the same meaning, the first that holds something, else the first that is there; those
        that say something else are counted as not read."""
        key, *others = [name for name in names if not is_empty(turn.get(name))] or [
            next((name for name in names if name in turn), names[0])
        ]
        for other in others:
            if turn[other] != turn[key]:
                self._never_read(where, other)
        return key

    def _never_read(self, where: str, field: str) -> None:
        count_unread(self.unread, f"{re.sub(_NUMBER, '[]', where)}.{field}")

    def _call(self, value: object, where: str) -> dict[str, Any]:
        """A call as templates want it. Raises ``RowError``."""
        value = as_list(without_nulls(value) if self.fills_nulls else value)
        function = value
        if isinstance(value, dict):
            self.count_others(value, _CALL_FIELDS, where)
            if isinstance(value.get("function"), dict):
                function = value["function"]
                self.count_others(function, _FUNCTION_FIELDS, where)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("wrong_type", f"{where} is not a function call with a name")
        arguments = next((function[name] for name in _ARGUMENTS if function.get(name) is not None), None)
        for _ in range(2):
            if isinstance(arguments, str):
                arguments = parse_json(arguments, f"{where}: the text of the arguments") if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            raise RowError("wrong_type", f"{where}: the arguments are {kind_of(arguments)}, not an object")
        call: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
        if isinstance(value, dict) and isinstance(value.get("id"), str) and value["id"]:
            call["id"] = value["id"]
        return call

    def _parts(self, value: object, role: str, where: str) -> _Parts:
        if role == "tool" and (isinstance(value, dict) or (isinstance(value, list) and not all(map(_is_part, value)))):
            value = json.dumps(value, ensure_ascii=False)
        parts = _Parts()
        if isinstance(value, str):
            parts.text = value
        if value is None or isinstance(value, str):
            return parts
        if not isinstance(value, list):
            raise RowError("wrong_type", f"{where} is {kind_of(value)}, not a string")
        pieces: Pieces = []
        for number, part in enumerate(value):
            text = self._part(part, parts, f"{where}[{number}]")
            flags = weights_of(part, FLAGS, f"{where}[{number}]")
            parts.flags += flags
            pieces.append((len(text), math.prod(flags)))
            parts.text += text
        if parts.flags:
            parts.pieces = pieces
        return parts

    def _part(self, part: object, parts: _Parts, where: str) -> str:
        """The text of a part; what else it is goes into ``parts``."""
        if not isinstance(part, dict):
            raise RowError("wrong_type", f"{where} holds a part that is not text ({kind_of(part)})")
        kind = part.get("type", "text")
        if kind not in MEDIA:
            self.count_others(part, _PART_FIELDS, where)
        if kind in _TEXT_TYPES:
            text = part["text"] if isinstance(part.get("text"), str) else part.get("value", part.get("content"))
            if isinstance(text, str):
                return text
        if kind in REASONING:
            thought = next((part[k] for k in (kind, *REASONING, *_TEXTS) if isinstance(part.get(k), str)), None)
            if thought is not None:
                parts.reasoning += thought
                return ""
        if kind == "tool_use":
            call = {key: part[key] for key in ("id", "name", "input") if key in part}
            parts.calls.append(self._call({"arguments": call.pop("input", {}), **call}, where))
            return ""
        if kind == "tool_result":
            inner = self._parts(part.get("content"), "tool", where)
            result: Message = {"role": "tool", "content": inner.text}
            if inner.images:
                result[MESSAGE_KEY] = inner.images
            if isinstance(part.get("tool_use_id"), str):
                result["tool_call_id"] = part["tool_use_id"]
            parts.results.append(result)
            return ""
        if self.images and kind in PART_TYPES:
            parts.images.append(image_of_part(part, where))
            return MARK
        if kind in MEDIA:
            raise media_error(f"{where} is a part of type {kind!r}", images=self.images)
        if kind in _TEXT_TYPES or kind in REASONING:
            named = _TEXTS if kind in _TEXT_TYPES else dict.fromkeys((kind, *REASONING, *_TEXTS))
            raise RowError(
                "wrong_type",
                f"{where} is a part of type {kind!r} without its words (it has {names_of(part)}), which stand as a "
                f"string in one of {', '.join(named)}",
            )
        raise RowError("wrong_type", f"{where} holds a part that is not text ({str(kind)[:40]})", _PARTS_READ)


_TEXT_TYPES = ("text", "input_text", "output_text")
_TEXTS = ("text", "value", "content")
"""Where the words of a part stand."""
_PARTS_READ = f"parts that are read have the types {', '.join((*_TEXT_TYPES, *REASONING))}, tool_use and tool_result"
_NUMBER = re.compile(r"\[\d+\]")
_ARGUMENTS = ("arguments", "parameters", "args", "input")
"""Fields of a call that have what it is called with: OpenAI's, those of Llama's templates, LangChain's, Anthropic's."""
_FUNCTION_FIELDS = frozenset(("name", *_ARGUMENTS))
_CALL_FIELDS = _FUNCTION_FIELDS | {"type", "id", "index", "function", "cache_control"}
_PART_FIELDS = frozenset(
    (
        *("type", "text", "value", "content", *REASONING, "id", "name", "input", "tool_use_id"),
        *("cache_control", "signature", "is_error", "citations"),
        *FLAGS,
        *MEDIA,
    )
)


class _Parts:
    """What the content of one message holds."""

    def __init__(self) -> None:
        self.text = ""
        self.reasoning = ""
        self.calls: list[dict[str, Any]] = []
        self.results: list[Message] = []
        self.images: list[Image | None] = []
        self.flags: list[float] = []
        self.pieces: Pieces | None = None


def _weighed(message: Message, parts: _Parts, weights: Sequence[float], where: str) -> Turn:
    """A message with what its flags come to, and those of its parts. Raises ``RowError``."""
    role, pieces = message["role"], parts.pieces
    weight = math.prod(weights) if weights else None
    if role != "assistant":
        is_part_trained = any(parts.flags) and any(piece_weight for _, piece_weight in pieces or ())
        if any(weights) or (is_part_trained and weight != 0):
            raise RowError("wrong_type", f"{where}: only what the assistant says can be trained, not role {role!r}")
        return Turn(message, is_unsaid=weight == 0)
    if pieces is not None and weight is not None:
        pieces = [(size, piece_weight * weight) for size, piece_weight in pieces]
    return Turn(message, 1.0 if weight is None else weight, pieces, is_unsaid=weight == 0)


def media_error(description: str, *, images: bool = False) -> RowError:
    """A row that holds more than text; ``images``: whether it may hold these."""
    return RowError(
        "media",
        f"{description}; only text{' and images are' if images else ' is'} trained",
        "leave such rows out (data.on_bad_row: skip), or take pictures and sounds out of them if the text means "
        "something alone",
    )


def _is_part(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("type"), str)


def _are_calls(value: object) -> bool:
    """Whether a value is a call, or some, not written as text."""
    some = value if isinstance(value, list) else [value]
    return bool(some) and all(isinstance(call, dict) and ("name" in call or "function" in call) for call in some)


def _folded(name: str) -> str:
    return re.sub(r"[\s-]+", "_", name.strip().lower())


def _thought_before(text: str) -> tuple[str, str]:
    """The reasoning that stands before a call, and the call."""
    match = re.match(rf"\s*{OPENS_THOUGHT}(.*?){CLOSES_THOUGHT}\s*", text, re.DOTALL)
    return (match[1].strip(), text[match.end() :]) if match else ("", text)


def read_tools(value: object) -> list[dict[str, Any]] | None:
    """Tools as templates want them, ``{"type": "function", "function": {"name", "description", "parameters"}}``, from
    that, from what is inside of it, or from Anthropic's form. Raises ``RowError``."""
    if is_empty(value):
        return None
    if isinstance(value, str):
        value = parse_json(value, "'tools'")
    if isinstance(value, dict) and ("name" in value or "function" in value):
        value = [value]
    if not isinstance(value, list):
        raise RowError("wrong_type", "'tools' is not a list of function schemas")
    return [_tool(as_list(tool), f"tools[{number}]") for number, tool in enumerate(value)] or None


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise RowError("wrong_type", f"{where} is {kind_of(tool)}, not a function schema")
    if isinstance(tool.get("function"), dict):
        if not isinstance(tool["function"].get("name"), str):
            raise RowError("wrong_type", f"{where} is a function schema without a name")
        return tool if "type" in tool else {"type": "function", **tool}
    if isinstance(tool.get("type"), str) and tool["type"] not in ("function", "custom") and "name" not in tool:
        return tool  # a tool that is built in, such as a search
    if not isinstance(tool.get("name"), str):
        raise RowError("wrong_type", f"{where} is not a function schema with a name (it has {names_of(tool)})")
    inner = dict(tool)
    if "input_schema" in inner and "parameters" not in inner:
        inner["parameters"] = inner.pop("input_schema")
    inner.pop("type", None)
    return {"type": "function", "function": inner}


def placeholder_in(turns: Sequence[Turn]) -> str | None:
    """What stands for a picture or a sound at the beginning or the end of a user's message, if anything does."""
    for turn in turns:
        if turn.role != "user":
            continue
        words = turn.message["content"].strip()
        for mark in PLACEHOLDERS:
            if words.startswith(mark) or words.endswith("\n" + mark):
                return mark
    return None
