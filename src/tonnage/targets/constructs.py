"""What of a Jinja template goes beyond a text for each message, by the line it stands in."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import Environment, TemplateError, nodes

_TELLING = {
    "strftime_now": "the date of today",
    "namespace": "a variable that is carried from message to message",
}
_OF_LOOP = ("last", "index", "revindex", "revindex0", "length", "nextitem")
_PLAIN_FILTERS = ("trim", "tojson", "string", "safe", "length", "selectattr", "rejectattr", "list")
_PLAIN_METHODS = ("strip", "items", "get", "keys")


def construct(text: str) -> str:
    """The construct of a template that is likeliest to make it more than a table, with its line."""
    from jinja2.ext import loopcontrols

    try:
        parsed = Environment(extensions=[loopcontrols]).parse(text)
    except (TemplateError, RecursionError):
        return "it cannot be read by Jinja alone"
    found = sorted(_found(parsed))
    return f"{found[0][2]} in line {found[0][1]}" if found else "what it writes depends on more than two roles"


def _found(parsed: nodes.Template) -> Iterator[tuple[int, int, str]]:
    """Rank, line and description of everything suspicious."""
    for call in parsed.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name in _TELLING:
            rank = list(_TELLING).index(call.node.name) * 2
            yield rank, call.lineno, f"`{call.node.name}`, {_TELLING[call.node.name]},"
        elif isinstance(call.node, nodes.Getattr) and call.node.attr not in _PLAIN_METHODS:
            yield 1, call.lineno, f"`.{call.node.attr}()` of a text"
    for attribute in parsed.find_all(nodes.Getattr):
        if isinstance(attribute.node, nodes.Name) and attribute.node.name == "loop" and attribute.attr in _OF_LOOP:
            yield 2, attribute.lineno, f"`loop.{attribute.attr}`"
    for applied in parsed.find_all(nodes.Filter):
        if applied.name not in _PLAIN_FILTERS:
            yield 1, applied.lineno, f"the filter `{applied.name}`"
    for item in parsed.find_all(nodes.Getitem):
        if isinstance(item.arg, nodes.Slice):
            yield 3, item.lineno, "a slice of the messages"
