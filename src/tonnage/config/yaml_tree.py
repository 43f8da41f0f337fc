"""YAML that remembers where everything was written.

PyYAML composes the node tree; values are built here so that each keeps its line and every mistake is
reported instead of the first. The dialect is the plain part of YAML that means the same to every reader:
numbers such as ``1e-5`` are numbers, only ``true`` and ``false`` are booleans (``no`` is text), there are
no dates and no base-60 integers, and anchors, aliases and tags are refused.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import yaml

from tonnage.config import keys
from tonnage.config.contradiction import did_you_mean
from tonnage.config.schema import Source
from tonnage.errors import Problem, UserError, user_error
from tonnage.files.reading import read_text
from tonnage.files.visible import LONGEST_SHOWN, shortened

MAX_DEPTH = 20
LONGEST_PLACE = 200
"""Characters of an override that a message repeats as a place."""
MOST_SHOWN = 8
"""Items of a list that a message names."""
MAX_BYTES = 256 << 10
"""Of a config: a hundred times the longest that people write, and read in a second."""
MAX_ITEMS = 20_000
"""Keys and items: what is listed one by one is better named by a directory or a glob."""
_TAB = "found character '\\t' that cannot start any token"

_NUMBER_START = list("-+.0123456789")
_RESOLVERS = (
    ("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), _NUMBER_START),
    (
        "tag:yaml.org,2002:float",
        re.compile(
            r"^(?:[-+]?(?:[0-9][0-9_]*)?\.?[0-9][0-9_]*\.?[eE][-+]?[0-9]+"
            r"|[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        _NUMBER_START,
    ),
)


class _RefusedError(Exception):
    """Something in the file that YAML allows and a config does not, and its line from 0."""

    def __init__(self, what: str, line: int) -> None:
        super().__init__(what)
        self.line = line


_UNREADABLE = (yaml.YAMLError, _RefusedError, RecursionError)


class _Loader(yaml.SafeLoader):
    """Composes nodes in our dialect."""

    num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; an alias would make the tree a graph: it is refused, and so is an anchor, its other end."""
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        line = int(event.start_mark.line) if event.start_mark is not None else 0
        if isinstance(event, yaml.AliasEvent):
            raise _RefusedError("an alias; write the value out", line)
        if getattr(event, "anchor", None) is not None:
            raise _RefusedError("an anchor (&); write values out where they are used", line)
        self.num_nodes += 1
        if self.num_nodes > MAX_ITEMS:
            raise _RefusedError(f"more than {MAX_ITEMS:,} keys and items", line)
        return super().compose_node(parent, index)


class _Dumper(yaml.SafeDumper):
    """Writes what ``_Loader`` and any other YAML reader read back as the same values."""

    def ignore_aliases(self, data: Any) -> bool:
        """Equal values are written out each time."""
        return True


_BREAKS = re.compile("[\n\x85\u2028\u2029]")
"""What is a line break in YAML 1.1; the last three are none in 1.2."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    """Text with a line break in one line, as ``"\\n"``: in other styles the break would stand in the file, where some
    are read back as a space."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style='"' if _BREAKS.search(value) else None)


_Dumper.add_representer(str, _text)

_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in _RESOLVERS:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)


@dataclass
class YamlTree:
    """A tree of plain values and where each was written."""

    value: dict[str, Any] = field(default_factory=dict)
    where: dict[keys.Path, str] = field(default_factory=dict)
    """``config.yaml:12``, or the text of an override."""
    problems: list[Problem] = field(default_factory=list)

    def place(self, path: keys.Path) -> str:
        """Where the value at a path was written, or else the nearest thing around it."""
        while path and path not in self.where:
            path = path[:-1]
        return self.where.get(path, "")


def read_document(path: Path) -> YamlTree:
    """Read a config file. Raises ``UserError`` if nothing can be made of it."""
    try:
        text = read_text(path, MAX_BYTES, "a config file")
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_missing(path)) from None
    except IsADirectoryError:
        configs = sorted(str(file) for file in path.iterdir() if file.suffix in (".yaml", ".yml"))[:3]
        raise user_error(f"{path} is a directory", "a config file", did_you_mean(configs), str(path)) from None
    document = YamlTree(where={(): str(path)})

    def place(line: int) -> str:
        return f"{path}:{line + 1}"

    try:
        node = _compose(text)
        if node is None:
            return document
        value = _build(node, (), document, place)
    except _UNREADABLE as error:
        raise UserError(_syntax_problem(error, text, place)) from None
    if not isinstance(value, dict):
        problem = Problem(f"the file holds {_kind(value)}", "keys and values, such as `model: NAME`", where=str(path))
        raise UserError(problem, *document.problems)
    document.value = value
    _nest(document)
    return document


def path_of(key: str) -> keys.Path:
    """Where a dotted key leads: ``("data", "train", 0, "path")`` for ``data.train.0.path``."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


def split_override(text: str) -> tuple[str, str] | None:
    """Key and value of an override, ``KEY=VALUE`` or, as in a file, ``KEY: VALUE``; None if it is neither."""
    if in_file := _AS_IN_FILE.match(text):
        return in_file["key"], text[in_file.end() :]
    key, equals, written = text.partition("=")
    return (key.strip(), written) if equals and all(key.strip().split(".")) else None


def apply_override(document: YamlTree, text: str) -> None:
    """Set one value from ``a.b=value``, the value read as YAML; problems are added to the document's."""
    if _HALVES.search(text):
        key = text.partition("=")[0].strip()
        document.problems.append(Problem("bytes that are not UTF-8", "KEY=VALUE in UTF-8", where=f"{key}=..."))
        return
    if (override := split_override(text)) is None:
        needed = "an override is KEY=VALUE, such as optimizer.lr=1e-5"
        document.problems.append(Problem("not an override", needed, _respelt(text), shortened(text)))
        return
    key, written = override
    path = path_of(key)
    where = shortened(text, LONGEST_PLACE)
    if keys.field_at(path) is None and not _inside_names(path):
        where = f"{shortened(key)}=..."  # an unknown key may hold anything, a secret too: its value is not repeated
    own = YamlTree(where={})
    try:
        node = _compose(written)
        if node is None:  # nothing, or a comment: a shell has put in a variable that is not set
            field = keys.field_at(path)
            may_be_none = field is not None and type(None) in get_args(field.annotation)
            change = f"write {shortened(key)}=null for none, or leave it out" if may_be_none else "leave it out"
            document.problems.append(Problem(f"{shortened(key)} without a value", "a value", change, where))
            return
        value = _build(node, path, own, lambda _: where)
    except _UNREADABLE as error:
        document.problems.append(_syntax_problem(error, written, lambda _: where))
        return
    document.problems += own.problems
    problem = _put(document.value, path, value)
    if problem is not None:
        document.problems.append(replace(problem, where=where))
        return
    for old in [old for old in document.where if old[: len(path)] == path]:
        del document.where[old]
    document.where |= own.where
    for length in range(1, len(path) + 1):
        document.where.setdefault(path[:length], where)


def number_in(text: str) -> str:
    """The number that a text holds, as a config would have it: ``1,024`` is ``1024``; empty if it is none."""
    plain = text.strip()
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", plain):
        plain = plain.replace(",", "")
    is_number = len(plain) <= LONGEST_SHOWN and any(pattern.match(plain) for _, pattern, _ in _RESOLVERS[2:])
    return plain if is_number else ""


def write_yaml(value: Any) -> str:
    """YAML text that reads back as exactly the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None)


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _build(node: yaml.Node, path: keys.Path, document: YamlTree, place: Callable[[int], str]) -> Any:
    """The value of a node; where it was written goes into the document."""
    where = place(_line(node))
    document.where.setdefault(path, where)
    if len(path) > MAX_DEPTH:
        raise _RefusedError(f"more than {MAX_DEPTH} levels", _line(node))
    if isinstance(node, yaml.MappingNode):
        if node.tag != "tag:yaml.org,2002:map":
            raise _RefusedError(f"a tag, {node.tag}", _line(node))
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise _RefusedError("a key that is not text", _line(key_node))
            key = _whole(str(key_node.value), key_node)
            inner = (*path, key)
            line = place(_line(key_node))
            if key in mapping:
                first = document.where[inner].rpartition(":")[2]
                change = f"remove one; the first is on line {first}"
                problem = Problem(f"{keys.dotted(inner)} is written twice", "each key once", change, line)
                document.problems.append(problem)
                _build(value_node, inner, YamlTree(), place)
                continue
            document.where[inner] = line
            mapping[key] = _build(value_node, inner, document, place)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        if node.tag != "tag:yaml.org,2002:seq":
            raise _RefusedError(f"a tag, {node.tag}", _line(node))
        return [_build(item, (*path, index), document, place) for index, item in enumerate(node.value)]
    return _scalar(node)


def _scalar(node: yaml.Node) -> bool | int | float | str | None:
    text = str(node.value)
    match node.tag.removeprefix("tag:yaml.org,2002:"):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int" if len(text) < 4000:
            return int(text.replace("_", ""))
        case "float":
            text = text.replace("_", "").lower()
            return float(text.replace(".inf", "inf").replace(".nan", "nan"))
        case "str":
            return _whole(text, node)
        case tag:
            raise _RefusedError("a number too long" if tag == "int" else f"a tag, {node.tag}", _line(node))


_AS_IN_FILE = re.compile(r"\s*(?P<key>[A-Za-z_]\w*(?:\.\w+)*):\s+(?=\S)")
_HALVES = re.compile("[\ud800-\udfff]")


def _whole(text: str, node: yaml.Node) -> str:
    """The text, unless YAML's escapes wrote half a character in it, which no file can hold."""
    if _HALVES.search(text):
        raise _RefusedError("half a character (\\ud800 to \\udfff)", _line(node))
    return text


def _line(node: yaml.Node) -> int:
    """The line on which a node starts, from 0."""
    return int(node.start_mark.line) if node.start_mark is not None else 0


def _put(tree: dict[str, Any], path: keys.Path, value: Any) -> Problem | None:
    """Set a value deep in a tree, making sections on the way; the problem, if that is impossible.

    What is written short (a source as its path, one item instead of a list of one) is entered as what it stands for,
    and the number of the only item of a list may be left out.
    """
    parent: Any = None
    node: Any = tree
    steps: list[str | int] = list(path)
    depth = 0
    while depth < len(steps):
        step, above = steps[depth], tuple(steps[:depth])
        if (long := _spelt_out(node, above, step)) is not None:
            parent[above[-1]] = node = long
        if isinstance(node, list) and isinstance(step, str):
            if len(node) > 1:
                return _several(node, above, tuple(steps[depth:]))
            steps.insert(depth, 0)
            continue
        if isinstance(node, list):
            if not isinstance(step, int) or step > len(node):
                observed = f"{keys.dotted(above)} is a list of {len(node)}; {keys.dotted(path)} names no item of it"
                return Problem(observed, "a key that can be set")
            if step == len(node):
                node.append(None)
        elif isinstance(node, dict):
            step = str(step)
            node.setdefault(step, None)
        else:
            observed = f"{keys.dotted(above)} is {shortened(keys.as_written(node))}, which has no {step} in it"
            return Problem(observed, "a key that can be set")
        if depth == len(steps) - 1:
            node[step] = value
        elif node[step] is None:
            field, numbered = keys.field_at((*above, step)), isinstance(steps[depth + 1], int)
            node[step] = [] if numbered and field is not None and keys.is_list(field.annotation) else {}
        parent, node = node, node[step]
        depth += 1
    return None


def _spelt_out(node: Any, path: keys.Path, step: str | int) -> Any:
    """The long form of a value that ``step`` is to enter; None where it is entered as it is."""
    field = keys.field_at(path)
    if field is None or not isinstance(node, str | dict):
        return None
    if isinstance(step, int) and not isinstance(path[-1], int) and keys.is_list(field.annotation):
        return [node]
    if isinstance(node, str) and isinstance(step, str) and keys.section_of(field.annotation) is Source:
        return {"path": node}
    return None


def _several(items: list[Any], path: keys.Path, rest: keys.Path) -> Problem:
    """The problem of a key that does not say which item of a list it means."""
    shown = [
        f"{index} is {shortened(str(item.get('path', '{...}') if isinstance(item, dict) else item))}"
        for index, item in enumerate(items[:MOST_SHOWN])
    ]
    more = [f"and {len(items) - MOST_SHOWN:,} more"] if len(items) > MOST_SHOWN else []
    return Problem(
        f"{keys.dotted(path)} is a list of {len(items):,}: {', '.join([*shown, *more])}",
        "the number of the one that is meant",
        f"write {keys.dotted((*path, 0, *rest))}=... for the first",
    )


def _nest(document: YamlTree) -> None:
    """Put what stands under dotted keys (``data.max_length: 512``) where it belongs."""
    dotted: list[tuple[keys.Path, keys.Path, Any]] = []
    _take_dotted(document.value, (), (), dotted)
    for path, written, value in sorted(dotted, key=lambda entry: len(entry[0])):
        where, section = document.where[written], keys.dotted(path[:-1])
        if _is_there(document.value, path):
            observed = f"{keys.dotted(path)} is written twice, under its dotted name and as a key of {section}"
            change = f"remove one; the other is on line {document.place(path).rpartition(':')[2]}"
            document.problems.append(Problem(observed, "each key once", change, where))
        elif (problem := _put(document.value, path, value)) is not None:
            document.problems.append(replace(problem, where=where))
        else:
            _copy_places(document.where, value, written, path)
            for length in range(1, len(path) + 1):
                document.where.setdefault(path[:length], where)


def _take_dotted(
    value: Any, path: keys.Path, written: keys.Path, dotted: list[tuple[keys.Path, keys.Path, Any]]
) -> None:
    """Take what stands under dotted keys out of a tree: where it belongs, where it was written, and itself.

    Only out of sections: the keys of other mappings (``columns``) are the user's own, dots and all.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            _take_dotted(item, (*path, index), (*written, index), dotted)
    if not isinstance(value, dict) or keys.section_at(path) is None:
        return
    for key, item in list(value.items()):
        inner = (*path, key)
        if "." in key and all(key.split(".")) and keys.field_at((*path, key.partition(".")[0])) is not None:
            inner = (*path, *path_of(key))
            dotted.append((inner, (*written, key), item))
            del value[key]
        _take_dotted(item, inner, (*written, key), dotted)


def _is_there(tree: Any, path: keys.Path) -> bool:
    """Whether something stands at a path, the number of the only item of a list left out or not."""
    for step in path:
        if isinstance(tree, list) and isinstance(step, str):
            tree = tree[0] if len(tree) == 1 else None
        elif isinstance(tree, dict) and step == 0 and "path" in tree:
            continue
        try:
            tree = tree[step]
        except (KeyError, IndexError, TypeError):
            return False
    return tree is not None


def _copy_places(where: dict[keys.Path, str], value: Any, old: keys.Path, new: keys.Path) -> None:
    """Where a value and all in it were written, under the path at which they stand now."""
    if old in where:
        where.setdefault(new, where[old])
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        _copy_places(where, item, (*old, key), (*new, key))


def _respelt(text: str) -> str:
    """How ``KEY:`` and ``KEY:VALUE`` are written on a command line; empty for anything else."""
    key, colon, value = (part.strip() for part in text.partition(":"))
    if not colon or keys.field_at(path_of(key)) is None:
        return ""
    return f"write {key}={shortened(value) or 'VALUE'}, in one word"


def _inside_names(path: keys.Path) -> bool:
    """Whether a path leads into a mapping whose keys are the user's own (``columns``)."""
    return keys.field_at(path[:-1]) is not None and keys.section_at(path[:-1]) is None


def _kind(value: Any) -> str:
    match value:
        case list():
            return "a list"
        case str():
            return "only text"
        case _:
            return f"only {keys.as_written(value)}"


def _syntax_problem(error: Exception, text: str, place: Callable[[int], str]) -> Problem:
    needed = "valid YAML"
    match error:
        case RecursionError():
            return Problem("brackets in brackets, too deep", "plain keys, values and lists", where=place(0))
        case _RefusedError():
            return Problem(str(error), "plain keys, values and lists", where=place(error.line))
        case yaml.reader.ReaderError():
            line = text.count("\n", 0, error.position)
            return Problem(f"a character that YAML does not allow: {error.reason}", needed, where=place(line))
        case yaml.MarkedYAMLError(problem_mark=mark) if mark is not None:
            content = [*text.splitlines(), *[""] * (mark.line + 1)][mark.line].strip()
            if error.problem == _TAB:
                return Problem("a tab where YAML allows only spaces", needed, "indent with spaces", place(mark.line))
            shown = f": {content}" if content and _looks_harmless(content) else ""
            detail = ", ".join(part for part in (error.problem, error.context) if part)
            return Problem(f"not YAML{shown}", f"{needed} ({detail})", where=place(mark.line))
        case _:
            return Problem("not YAML", needed, where=place(0))


def _looks_harmless(line: str) -> bool:
    """Whether a line begins with a known key: others may hold a secret and are not repeated."""
    key = line.strip().removeprefix("- ").partition(":")[0].strip()
    return key in {name.name.rsplit(".", 1)[-1] for name in keys.all_keys()}


def _missing(path: Path) -> Problem:
    parent = path.parent
    if not os.path.isdir(parent):  # noqa: PTH112  (nor of a name that is too long, for which pathlib raises)
        return Problem("no such file", "a config file", f"there is no directory {parent}", str(path))
    names = sorted(item.name for item in parent.iterdir() if item.is_file())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if not near:
        near = difflib.get_close_matches(path.stem, [Path(name).stem for name in names], n=3, cutoff=0.6)
        near = [name for name in names if Path(name).stem in near]
    return Problem("no such file", "a config file", did_you_mean(str(parent / name) for name in near), str(path))
