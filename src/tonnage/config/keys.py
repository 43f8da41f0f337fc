"""Every key a config may hold: its dotted name, what it takes, its default, its sentence.

Read off the schema, so that error messages, ``docs/config.md`` and help texts cannot drift from it. Also
finds the nearest known key to one that does not exist.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from tonnage.config import schema
from tonnage.config.schema import Config, Section

Path = tuple[str | int, ...]
"""Where a value stands: keys and list indices from the root."""

COMPUTED_DEFAULTS = {
    "epochs": f"{schema.DEFAULT_EPOCHS:g}",
    "objective.beta": f"{schema.DEFAULT_BETA:g}; simpo {schema.BETAS['simpo']:g}",
    "output": "runs/MODEL-DATA",
    "data.train.columns": "{}",
    "data.train.roles": "{}",
    "data.template_arguments": "{}",
    "launch.runtime_env": "{}",
}
PRIVATE_KEYS = ("launch.runtime_env", "launch.setup", "launch.options")
"""What may hold secrets of a cluster, and is shown to nobody; ``config.yaml`` of a run has it."""


@dataclass(frozen=True)
class Key:
    name: str
    """Dotted, list indices left out: ``data.train.path``."""
    takes: str
    """What it may hold, in words."""
    default: str
    """As it would be written; ``required`` where there is none; empty where none applies."""
    sentence: str
    is_section: bool = False


def dotted(path: Iterable[str | int]) -> str:
    """``data.train.0.path`` for ``("data", "train", 0, "path")``."""
    return ".".join(map(str, path))


def written_name(name: str, field: FieldInfo) -> str:
    """The name by which a field is written in a config."""
    return field.alias or name


def all_keys() -> tuple[Key, ...]:
    """Every key, in the order of the schema."""
    return tuple(_describe_section(Config, ""))


def _describe_section(section: type[Section], prefix: str) -> Iterator[Key]:
    for name, field in _fields(section).items():
        key = prefix + name
        inner = section_of(field.annotation)
        yield Key(
            name=key,
            takes=takes(field),
            default=COMPUTED_DEFAULTS.get(key, _default(field)),
            sentence=field.description or "",
            is_section=inner not in (None, schema.Source),
        )
        if inner is not None and not (inner is schema.Source and name != "train"):
            yield from _describe_section(inner, key + ".")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is PydanticUndefined or field.default is None:
        return ""
    return as_written(field.default)


def as_written(value: Any) -> str:
    """A value as it would be written in a config."""
    match value:
        case None:
            return "nothing"
        case bool():
            return "true" if value else "false"
        case str():
            return value if value and value.isprintable() and value == value.strip() else repr(value)
        case list() | tuple():
            return f"[{', '.join(map(as_written, value))}]"
        case Mapping():
            return "{" + ", ".join(f"{key}: {as_written(item)}" for key, item in value.items()) + "}"
        case _:
            return repr(value)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a type holds, itself or as the items of a list; None if it holds plain values.

    Where it may be one of several kinds, what they have in common.
    """
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return next(kind for kind in annotation.__mro__ if Section in kind.__bases__)
    return next((found for item in get_args(annotation) if (found := section_of(item)) is not None), None)


def is_list(annotation: Any) -> bool:
    """Whether a type is a list of any length, or may be one."""
    if get_origin(annotation) is tuple:
        return get_args(annotation)[-1] is Ellipsis
    return any(is_list(item) for item in get_args(annotation) if not isinstance(item, FieldInfo))


def takes(field: FieldInfo) -> str:
    """What a field may hold, in words, from its type and constraints; bounds that keep out nonsense are not told."""
    return _in_words(field.annotation, field.metadata)


def _in_words(annotation: Any, constraints: Iterable[Any] = ()) -> str:
    if words := next((one.text for one in constraints if isinstance(one, schema.Words)), ""):
        return words
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        metadata = [
            part for item in arguments[1:] for part in (item.metadata if isinstance(item, FieldInfo) else [item])
        ]
        return _in_words(arguments[0], metadata)
    if origin is Literal:
        return " or ".join(map(str, arguments)) if len(arguments) < 3 else f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_in_words(item) for item in arguments if item is not type(None)))
    if origin is tuple:
        if section_of(annotation) is schema.Source:
            return "a path or hub id, or a list of sources"
        if arguments[-1] is Ellipsis:
            return f"a list of {_in_words(arguments[0])}".replace("of a path", "of paths")
        return f"[{', '.join(_in_words(item) for item in arguments)}]"
    if origin is dict:
        values = "values" if isinstance(arguments[1], types.UnionType) else "names"
        return "a mapping" if arguments[1] is Any else f"a mapping of names to {values}"
    if section_of(annotation) is not None:
        return "a section of keys"
    return {str: "text", bool: "true or false"}.get(annotation) or _number_in_words(annotation, constraints)


def _number_in_words(annotation: type, constraints: Iterable[Any]) -> str:
    bounds = []
    for constraint in constraints:
        match constraint:
            case annotated_types.Ge(ge=bound):
                bounds.append(f"of at least {bound}")
            case annotated_types.Gt(gt=bound):
                bounds.append(f"above {bound}")
            case annotated_types.Le(le=int() | float() as bound) if bound < schema.MOST_WORKERS:
                bounds.append(f"at most {bound}")
            case annotated_types.Lt(lt=bound):
                bounds.append(f"below {bound}")
            case _:
                pass
    return " ".join(["a whole number" if annotation is int else "a number", " and ".join(bounds)]).strip()


def field_at(path: Path) -> FieldInfo | None:
    """The field a path leads to, list indices passing through; None if it leads to no field."""
    steps = [step for step in path if isinstance(step, str)]
    fields, field = _fields(Config), None
    for step in steps:
        field = fields.get(step)
        if field is None:
            return None
        fields = _fields(section_of(field.annotation))
    return field


def section_at(path: Path) -> type[Section] | None:
    """The section that a path leads to; None if it leads to plain values, or nowhere."""
    field = field_at(path)
    return section_of(field.annotation) if field is not None else None if path else Config


def keys_under(parents: Path) -> list[str]:
    """Names of the keys that may stand under a path."""
    return list(_fields(section_at(parents)))


def nearest_key(path: Path) -> str | None:
    """The known key that an unknown one probably meant: a sibling spelt alike, or its namesake elsewhere."""
    parents, name = path[:-1], str(path[-1]).lower()
    if near := difflib.get_close_matches(name, keys_under(parents), n=1, cutoff=0.6):
        return dotted((*parents, near[0]))
    names = [key.name for key in all_keys()]
    whole = dotted(step for step in path if isinstance(step, str))
    if near := difflib.get_close_matches(whole, names, n=1, cutoff=0.8):
        return near[0]
    by_last_part = {key.name.rpartition(".")[2]: key.name for key in reversed(all_keys()) if not key.is_section}
    if near := difflib.get_close_matches(name, by_last_part, n=1, cutoff=0.75):
        return by_last_part[near[0]]
    return None


def kinds_with(path: Path) -> list[str]:
    """Kinds of a section (its ``with``) that have the key at ``path``; none if it is no key of any kind."""
    section = section_at(path[:-1])
    kinds = section.__subclasses__() if section is not None else []
    return [
        str(get_args(kind.model_fields["launcher"].annotation)[0])
        for kind in kinds
        if any(path[-1] == written_name(name, field) for name, field in kind.model_fields.items())
    ]


def _fields(section: type[Section] | None) -> dict[str, FieldInfo]:
    """Fields of a section by the names under which they are written: its own, then those of its kinds."""
    if section is None:
        return {}
    kinds = [section, *section.__subclasses__()]
    fields = [(written_name(name, field), field) for kind in kinds for name, field in kind.model_fields.items()]
    found: dict[str, FieldInfo] = {}
    for name, field in fields:
        found.setdefault(name, field)
    return found
