"""From a row as it lies in a file to a conversation.

Five forms are known, each told by its columns:

    alpaca       instruction, output [, input, system, history]
    messages     messages: [{role, content, ...}] [, tools]          (also a list under ``conversation(s)``)
    sharegpt     conversations: [{from, value}] [, system, tools]
    completion   prompt, completion: strings, or lists of messages
    text         text

``detect`` looks at the rows and refuses to guess between two forms that both fit. ``convert`` checks every value it
uses and raises ``RowError`` with the reason; it never repairs a row in silence. Which tokens are trained is
settled elsewhere: here a message only gets its weight (``train: false`` is weight 0).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tonnage.data.conversation import Conversation, Message, RowError

_ROLE_NAMES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "ipython": "tool",
    "observation": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function_call": "assistant",
    "tool_call": "assistant",
}
_CALL_ROLES = ("function_call", "tool_call")

FIELDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "alpaca": (("instruction", "output"), ("input", "system", "history")),
    "messages": (("messages",), ("tools",)),
    "sharegpt": (("conversations",), ("system", "tools")),
    "completion": (("prompt", "completion"), ()),
    "text": (("text",), ()),
}
"""Format -> (fields it must have, fields it may have)."""


def rename(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """The row under our names: ``columns`` maps our field to the file's column."""
    renamed = {name: value for name, value in row.items() if name not in columns.values()}
    for ours, theirs in columns.items():
        if theirs in row:
            renamed[ours] = row[theirs]
    return renamed


def candidates(row: Mapping[str, Any]) -> tuple[str, ...]:
    """Formats whose fields the row has."""
    found = []
    if "instruction" in row and "output" in row:
        found.append("alpaca")
    if _is_turns(row.get("messages"), "role") or _is_turns(row.get("conversations"), "role"):
        found.append("messages")
    if _is_turns(row.get("conversations"), "from"):
        found.append("sharegpt")
    if "prompt" in row and "completion" in row:
        found.append("completion")
    if isinstance(row.get("text"), str):
        found.append("text")
    return tuple(found)


def detect(rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Formats that fit the rows: one when all is well, several when it is ambiguous, none when nothing fits.

    A row that fits nothing is left to ``convert``, which names it; rows that disagree make it ambiguous.
    """
    fitting = [found for row in rows if (found := candidates(row))]
    if not fitting:
        return ()
    shared = set(fitting[0]).intersection(*fitting)
    every = sorted(set().union(*fitting), key=list(FIELDS).index)
    if len(every) == 1 or not shared:
        return tuple(every)
    return tuple(name for name in every if name in shared)


def converter(format: str) -> Callable[[Mapping[str, Any]], Conversation]:
    """The function that turns a row of this format into a conversation, raising ``RowError``."""
    match format:
        case "alpaca":
            return _alpaca
        case "messages":
            return _messages
        case "sharegpt":
            return _sharegpt
        case "completion":
            return _completion
        case "text":
            return _text
    raise ValueError(f"unknown format {format!r}")


def _is_turns(value: object, key: str) -> bool:
    return isinstance(value, list) and any(isinstance(turn, dict) and key in turn for turn in value)


def _kind(value: object) -> str:
    if value is None:
        return "nothing (null)"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    return {
        str: "a string",
        int: "a number",
        float: "a number",
        bool: "true/false",
        list: "a list",
        dict: "an object",
    }.get(type(value), f"a {type(value).__name__}")


def _string(row: Mapping[str, Any], name: str) -> str:
    if name not in row:
        raise RowError("missing_field", f"no field {name!r} (it has {_names(row)})")
    value = row[name]
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name!r} is {_kind(value)}, not a string")
    return value


def _optional(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise RowError("wrong_type", f"{name!r} is {_kind(value)}, not a string")
    return value


def _names(row: Mapping[str, Any]) -> str:
    names = [str(name)[:40] for name in list(row)[:12]]
    return ", ".join(names) if names else "no fields at all"


def _answer(text: str, name: str) -> str:
    if not text or text.isspace():
        raise RowError("empty_answer", f"{name!r} is empty: there is nothing to learn")
    return text


def _alpaca(row: Mapping[str, Any]) -> Conversation:
    instruction = _string(row, "instruction")
    given = _optional(row, "input")
    answer = _answer(_string(row, "output"), "output")
    system = _optional(row, "system")
    if not instruction.strip() and not given.strip():
        raise RowError("empty_prompt", "'instruction' is empty")
    messages: list[Message] = [{"role": "system", "content": system}] if system.strip() else []
    weights = [0.0] * len(messages)
    for pair in _history(row.get("history")):
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
        weights += [0.0, 1.0]
    user: Message = {"role": "user", "content": instruction}
    if given.strip():
        user = {
            "role": "user",
            "content": f"{instruction}\n\n{given}" if instruction.strip() else given,
            "instruction": instruction,
            "input": given,
        }
    messages += [user, {"role": "assistant", "content": answer}]
    return Conversation(messages, [*weights, 0.0, 1.0])


def _history(value: object) -> list[list[str]]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError("wrong_type", f"'history' is {_kind(value)}, not a list of [prompt, answer] pairs")
    for pair in value:
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise RowError("wrong_type", "'history' is not a list of [prompt, answer] pairs of strings")
        _answer(pair[1], "history")
    return value


def _text(row: Mapping[str, Any]) -> Conversation:
    return Conversation(text=_answer(_string(row, "text"), "text"))


def _completion(row: Mapping[str, Any]) -> Conversation:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        before = _turns(prompt, "prompt", row.get("tools"))
        after = _turns(completion, "completion", None)
        weights = [0.0] * len(before.weights) + after.weights
        return _finish(Conversation(before.messages + after.messages, weights, before.tools))
    text = _string(row, "prompt")
    answer = _answer(_string(row, "completion"), "completion")
    if not text:
        raise RowError("empty_prompt", "'prompt' is empty")
    return Conversation([{"role": "user", "content": text}, {"role": "assistant", "content": answer}], [0.0, 1.0])


def _messages(row: Mapping[str, Any]) -> Conversation:
    name = "messages" if "messages" in row else "conversations"
    if name not in row:
        raise RowError("missing_field", f"no field 'messages' (it has {_names(row)})")
    return _finish(_turns(row[name], name, row.get("tools")))


def _sharegpt(row: Mapping[str, Any]) -> Conversation:
    if "conversations" not in row:
        raise RowError("missing_field", f"no field 'conversations' (it has {_names(row)})")
    system = _optional(row, "system")
    conversation = _turns(row["conversations"], "conversations", row.get("tools"))
    if system.strip():
        conversation.messages.insert(0, {"role": "system", "content": system})
        conversation.weights.insert(0, 0.0)
    return _finish(conversation)


def _finish(conversation: Conversation) -> Conversation:
    roles = [message["role"] for message in conversation.messages]
    if "assistant" not in roles:
        raise RowError("no_answer", f"no assistant message (roles: {', '.join(roles) or 'none'})")
    if not any(conversation.weights):
        raise RowError("nothing_supervised", "every assistant message has train: false or weight 0")
    return conversation


def _turns(value: object, name: str, tools: object) -> Conversation:
    if not isinstance(value, list):
        raise RowError("wrong_type", f"{name!r} is {_kind(value)}, not a list of messages")
    if not value:
        raise RowError("missing_field", f"{name!r} is an empty list")
    conversation = Conversation(tools=_tools(tools))
    for number, turn in enumerate(value):
        where = f"{name}[{number}]"
        if not isinstance(turn, dict):
            raise RowError("wrong_type", f"{where} is {_kind(turn)}, not a message")
        message, weight = _message(turn, where)
        conversation.messages.append(message)
        conversation.weights.append(weight)
    return conversation


def _message(turn: Mapping[str, Any], where: str) -> tuple[Message, float]:
    role_key = "role" if "role" in turn else "from"
    if role_key not in turn:
        raise RowError("missing_field", f"{where} has no 'role' (it has {_names(turn)})")
    given = turn[role_key]
    role = _ROLE_NAMES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise RowError("unknown_role", f"{where}: unknown role {str(given)[:60]!r}; known: {', '.join(_ROLE_NAMES)}")
    content_key = "content" if "content" in turn or "value" not in turn else "value"
    if content_key not in turn and "tool_calls" not in turn:
        raise RowError("missing_field", f"{where} has no 'content' (it has {_names(turn)})")
    content = _content(turn.get(content_key), f"{where}.{content_key}")
    message: Message = {"role": role, "content": content}
    reasoning = next((turn[k] for k in ("reasoning_content", "reasoning", "thinking") if turn.get(k) is not None), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise RowError("wrong_type", f"{where}: the reasoning is {_kind(reasoning)}, not a string")
        if reasoning.strip():
            message["reasoning_content"] = reasoning
    if isinstance(given, str) and given.lower() in _CALL_ROLES:
        message = {"role": role, "content": "", "tool_calls": [_call(_json(content, where), where)]}
    elif turn.get("tool_calls"):
        calls = turn["tool_calls"]
        if not isinstance(calls, list):
            raise RowError("wrong_type", f"{where}.tool_calls is {_kind(calls)}, not a list")
        message["tool_calls"] = [_call(call, f"{where}.tool_calls[{n}]") for n, call in enumerate(calls)]
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    if role == "assistant" and not content.strip() and "tool_calls" not in message:
        raise RowError("empty_answer", f"{where}: an assistant message with nothing in it")
    return message, _weight(turn, role, where)


def _weight(turn: Mapping[str, Any], role: str, where: str) -> float:
    train, weight = turn.get("train"), turn.get("weight")
    if train is not None and not isinstance(train, bool):
        raise RowError("wrong_type", f"{where}.train is {_kind(train)}, not true/false")
    if weight is not None and (isinstance(weight, bool) or not isinstance(weight, int | float)):
        raise RowError("wrong_type", f"{where}.weight is {_kind(weight)}, not a number")
    if weight is not None and not (math.isfinite(weight) and 0 <= weight <= 1e6):
        raise RowError("wrong_type", f"{where}.weight is {weight}, not a number from 0 up")
    if role != "assistant":
        if train or weight:
            raise RowError("wrong_type", f"{where}: only what the assistant says can be trained, not role {role!r}")
        return 0.0
    if train is False:
        return 0.0
    return 1.0 if weight is None else float(weight)


def _content(value: object, where: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        parts = []
        for part in value:
            if not (
                isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"
            ):
                kind = part.get("type") if isinstance(part, dict) else _kind(part)
                raise RowError("wrong_type", f"{where} holds a part that is not text ({str(kind)[:40]})")
            parts.append(part["text"])
        return "".join(parts)
    raise RowError("wrong_type", f"{where} is {_kind(value)}, not a string")


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("wrong_type", f"{where}: a tool call that is not JSON ({error})") from None


def _call(value: object, where: str) -> dict[str, Any]:
    inner = value.get("function") if isinstance(value, dict) and isinstance(value.get("function"), dict) else value
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str):
        raise RowError("wrong_type", f"{where} is not a function call with a name")
    arguments = inner.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, where)
    if not isinstance(arguments, dict):
        raise RowError("wrong_type", f"{where}: the arguments are {_kind(arguments)}, not an object")
    call: dict[str, Any] = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
    if isinstance(value, dict) and isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _tools(value: object) -> list[dict[str, Any]] | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        value = _json(value, "tools")
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise RowError("wrong_type", "'tools' is not a list of function schemas")
    return value or None
