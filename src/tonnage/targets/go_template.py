"""The part of Go's text/template that we write, rendered here: to see what Ollama will make of it without Ollama.

Known are text, ``define`` and ``template``, ``if``, ``else if``, ``else``, ``range`` over a list, variables, fields,
quoted strings, whole numbers, and the functions ``eq``, ``ne``, ``and``, ``or``, ``not``, ``len``, ``slice`` and
``ge``. Anything else is an error, as it is no template of ours. Strings are bytes, as they are in Go: ``len`` and
``slice`` count bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_ACTION = re.compile(r"\{\{(-\s)?\s*(.*?)\s*(\s-)?\}\}", re.DOTALL)
_TOKEN = re.compile(r'\s*("(?:[^"\\]|\\.)*"|\$\w*(?:\.\w+)*|\.(?:\w+(?:\.\w+)*)?|\w+|:=|=|[(),])', re.DOTALL)


class GoTemplateError(Exception):
    """A template that is not of the part that is known here, or that fails as Go's would."""


@dataclass
class _Node:
    """A piece of text, an action, or a block with its branches."""

    kind: str
    """text, output, set, define, template, if or range."""
    words: list[str] = field(default_factory=list)
    text: bytes = b""
    branches: list[tuple[list[str] | None, list[_Node]]] = field(default_factory=list)


@dataclass(frozen=True)
class _Room:
    """What a piece of a template sees."""

    dot: Any
    root: Any
    variables: dict[str, Any]
    defined: Mapping[str, list[_Node]]


def render(template: str, data: Mapping[str, Any]) -> str:
    """The text of a template, given its data: strings, whole numbers, lists and mappings by the names of fields.

    Raises:
        GoTemplateError: the template is not of the part that is known.
    """
    nodes = _parse(template)
    defined = {one.words[0]: one.branches[0][1] for one in nodes if one.kind == "define"}
    dot = _as_go(data)
    return b"".join(_run(nodes, _Room(dot, dot, {}, defined))).decode()


def _as_go(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, Mapping):
        return {name: _as_go(one) for name, one in value.items()}
    return [_as_go(one) for one in value] if isinstance(value, Sequence) and not isinstance(value, bytes) else value


def _parse(template: str) -> list[_Node]:
    nodes, stack = list[_Node](), list[_Node]()
    here, end, trims = nodes, 0, False

    def text(until: int, trim: bool) -> None:
        piece = template[end:until]
        piece = piece.lstrip(" \t\r\n") if trims else piece
        piece = piece.rstrip(" \t\r\n") if trim else piece
        if piece:
            here.append(_Node("text", text=piece.encode()))

    for found in _ACTION.finditer(template):
        text(found.start(), bool(found[1]))
        end, trims = found.end(), bool(found[3])
        words = _words(found[2])
        first = words[0] if words else ""
        if first in ("if", "range", "define"):
            node = _Node(first, [json.loads(words[1])] if first == "define" else words[1:])
            node.branches.append((None if first == "define" else words[1:], []))
            here.append(node)
            stack.append(node)
            here = node.branches[-1][1]
        elif first == "else" and stack and stack[-1].kind == "if":
            condition = words[2:] if words[1:2] == ["if"] else None
            stack[-1].branches.append((condition, []))
            here = stack[-1].branches[-1][1]
        elif first == "end" and stack:
            stack.pop()
            here = stack[-1].branches[-1][1] if stack else nodes
        elif first == "template":
            here.append(_Node("template", [json.loads(words[1]), *words[2:]]))
        elif words[1:2] in ([":="], ["="]):
            here.append(_Node("set", words))
        elif words and first not in ("else", "end", "with", "block", "break", "continue"):
            here.append(_Node("output", words))
        else:
            raise GoTemplateError(f"{{{{ {found[2]} }}}}")
    text(len(template), trim=False)
    if stack:
        raise GoTemplateError(f"{stack[-1].kind} without an end")
    return nodes


def _words(action: str) -> list[str]:
    words, at = list[str](), 0
    while at < len(action):
        found = _TOKEN.match(action, at)
        if found is None:
            raise GoTemplateError(f"{{{{ {action} }}}}")
        words.append(found[1])
        at = found.end()
    return words


def _run(nodes: Sequence[_Node], room: _Room) -> Iterator[bytes]:
    for node in nodes:
        if node.kind == "text":
            yield node.text
        elif node.kind == "output":
            value = _value(node.words, room)
            yield value if isinstance(value, bytes) else str(value).encode()
        elif node.kind == "set":
            name, _, *words = node.words
            room.variables[name] = _value(words, room)
        elif node.kind == "template":
            name, *words = node.words
            dot = _value(words, room)
            yield from _run(room.defined[name], _Room(dot, dot, {}, room.defined))
        elif node.kind == "if":
            for condition, branch in node.branches:
                if condition is None or _value(condition, room):
                    yield from _run(branch, room)
                    break
        elif node.kind == "range":
            yield from _ranged(node, room)


def _ranged(node: _Node, room: _Room) -> Iterator[bytes]:
    words, names = node.words, list[str]()
    if ":=" in words:
        at = words.index(":=")
        names, words = [word for word in words[:at] if word != ","], words[at + 1 :]
    for index, one in enumerate(_value(words, room)):
        room.variables.update(zip(names, (index, one)[-len(names) :] if names else (), strict=True))
        yield from _run(node.branches[0][1], _Room(one, room.root, room.variables, room.defined))


def _value(words: Sequence[str], room: _Room) -> Any:
    value, rest = _command(list(words), room)
    if rest:
        raise GoTemplateError(" ".join(words))
    return value


def _command(words: list[str], room: _Room) -> tuple[Any, list[str]]:
    """The value of a function with its operands, or of one operand, and the words behind it."""
    if not words:
        raise GoTemplateError("nothing where a value was expected")
    if words[0] in ("and", "or"):  # which look at no more than they must
        return _shortened(words[0] == "and", words[1:], room)
    if words[0] in _FUNCTIONS:
        name, rest, given = words[0], words[1:], []
        while rest and rest[0] != ")":
            one, rest = _operand(rest, room)
            given.append(one)
        return _FUNCTIONS[name](*given), rest
    return _operand(words, room)


def _shortened(every: bool, rest: list[str], room: _Room) -> tuple[Any, list[str]]:
    value: Any = None
    decided = False
    while rest and rest[0] != ")":
        if decided:
            rest = _skipped(rest)
        else:
            value, rest = _operand(rest, room)
            decided = bool(value) is not every
    return value, rest


def _skipped(rest: list[str]) -> list[str]:
    depth = 0
    for at, word in enumerate(rest):
        depth += (word == "(") - (word == ")")
        if depth == 0:
            return rest[at + 1 :]
    raise GoTemplateError("an open bracket")


def _operand(words: list[str], room: _Room) -> tuple[Any, list[str]]:
    first, rest = words[0], words[1:]
    if first == "(":
        value, rest = _command(rest, room)
        if rest[:1] != [")"]:
            raise GoTemplateError("an open bracket")
        return value, rest[1:]
    if first.startswith('"'):
        return json.loads(first).encode(), rest
    if first.isdecimal():
        return int(first), rest
    if first.startswith(("$", ".")):
        name, *fields = first.split(".")
        value = room.dot if not name else room.root if name == "$" else room.variables[name]
        for one in filter(None, fields):
            value = value[one]
        return value, rest
    raise GoTemplateError(f"an operand {first!r}")


def _slice(value: Any, start: int = 0, end: int | None = None) -> Any:
    if not 0 <= start <= (len(value) if end is None else end) <= len(value):
        raise GoTemplateError(f"a slice from {start} to {end} of {len(value)}")
    return value[start:end]


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "eq": lambda first, *others: any(first == one for one in others),
    "ne": lambda first, other: first != other,
    "ge": lambda first, other: first >= other,
    "not": lambda value: not value,
    "len": len,
    "slice": _slice,
}
