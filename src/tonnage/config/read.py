"""A config file and overrides in, one checked ``Config`` out, or every problem at once.

    file ──► tree with line numbers ──► overrides put in ──► schema ──► checks between fields ──► Config
                                                                         │               │
                                                                         └── problems ───┴──► one UserError

Each problem says where (file and line, or the override), what was found, what is needed, and the nearest
known key or value. Values of unknown keys are never repeated, since a misplaced token must not end up in a
log.
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from tonnage.config import check, keys, other_names, yaml_tree
from tonnage.config.changes import as_json
from tonnage.config.check_here import missing_files
from tonnage.config.schema import KERNELS, Config, ObjectiveKind, Rounding
from tonnage.config.yaml_tree import YamlTree
from tonnage.errors import Problem, UserError
from tonnage.files.paths import NotAPathError
from tonnage.files.visible import shortened
from tonnage.files.writing import write_whole

ALTERNATIVES: tuple[tuple[keys.Path, keys.Path], ...] = (
    (("epochs",), ("steps",)),
    (("batch", "tokens"), ("batch", "sequences")),
)
"""Pairs of which a config holds one; an override of either takes the place of the other in the file."""

SOURCES = (("data", "train"), ("data", "validation"))
TAGGED: tuple[keys.Path, ...] = (("batch",), ("kernels",), ("launch",), ("data", "validation"))
"""Keys that take one of several kinds of value."""
AS_SECTIONS: Mapping[tuple[str, str], Mapping[str, str]] = {
    ("adapter", "none"): {},
    ("adapter", "auto"): {},
    ("batch", "auto"): {},
    ("kernels", "auto"): {},
    ("kernels", "plain"): dict.fromkeys(KERNELS, "off"),
    **{("objective", kind): {"kind": kind} for kind in get_args(ObjectiveKind)},
    **{("quantize_aware", scheme): {"scheme": scheme} for scheme in get_args(Rounding)},
}
"""What a key and the word that it has stand for, written as a section."""
STAND_IN = "x"
"""For a required value that is missing or faulty, while the rest is checked."""
MOST_PROBLEMS = 50
"""That are told one by one."""


def read_config(
    path: str | os.PathLike[str] | None, overrides: Sequence[str] = (), *, check_files: bool = True
) -> Config:
    """Read a config file and apply overrides such as ``optimizer.lr=1e-5``; without a file, these are the config.

    ``check_files=False`` leaves out whether the files that the config names exist: for reading back the
    config of a run whose data may have moved. Relative paths are relative to the working directory.

    Raises ``UserError`` with every problem.
    """
    document = YamlTree() if path is None else yaml_tree.read_document(Path(path))
    _apply(document, overrides)
    problems = list(document.problems)
    _drop_empty_sections(document)
    config, faulty, mistakes = _validate(document)
    problems += mistakes
    contradictions = list(check.contradictions(config))
    if check_files:
        contradictions += missing_files(config)
    for contradiction in contradictions:
        if not any(_touches(key, faulty) for key in contradiction.keys):
            where = _places(document, contradiction.keys)
            problems.append(Problem(contradiction.found, contradiction.needed, contradiction.change, where))
    if problems:
        raise UserError(*_bounded(problems))
    return config


def _bounded(problems: list[Problem]) -> list[Problem]:
    """No more problems than a person may read."""
    if (rest := len(problems) - MOST_PROBLEMS) <= 0:
        return problems
    return [
        *problems[:MOST_PROBLEMS],
        Problem(f"{rest:,} more problems", "the first ones mended", where=problems[-1].where),
    ]


def write_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the config with every default spelled out; reading it back gives the same config."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, config_text(config))


def config_text(config: Config) -> str:
    return yaml_tree.write_yaml(as_json(config))


def overrides_text(overrides: Sequence[str]) -> str:
    """A config file that says the same as overrides, with no default written out. Raises ``UserError``."""
    document = YamlTree()
    _apply(document, overrides)
    if document.problems:
        raise UserError(*_bounded(document.problems))
    return yaml_tree.write_yaml(document.value)


def overridden_key(override: str) -> str:
    """The dotted key that an override is for; empty if it is none."""
    return (yaml_tree.split_override(override) or ("", ""))[0]


def _apply(document: YamlTree, overrides: Sequence[str]) -> None:
    overridden = []
    for override in overrides:
        path = tuple(overridden_key(override).split("."))
        if len(path) > 1 and (spelt_out := AS_SECTIONS.get((path[0], str(document.value.get(path[0]))))) is not None:
            document.value[path[0]] = dict(spelt_out)  # or nothing could be put into it
        yaml_tree.apply_override(document, override)
        overridden.append(path)
    for pair in ALTERNATIVES:
        left = [path for path in pair if path not in overridden or _value_at(document.value, path) is None]
        if len(left) == 1:
            _forget(document, left[0])
    _drop_other_kinds(document, overridden)


def _drop_other_kinds(document: YamlTree, overridden: Sequence[keys.Path]) -> None:
    """Where an override changes the launcher, drop the keys of the file that only the other one has."""
    launch = document.value.get("launch")
    if ("launch", "with") not in overridden or not isinstance(launch, dict):
        return
    kind = launch.get("with")
    for path in [("launch", name) for name in launch]:
        kinds = keys.kinds_with(path)
        if kind in keys.kinds_with(("launch", "with")) and kinds and kind not in kinds and path not in overridden:
            _forget(document, path)


def _forget(document: YamlTree, path: keys.Path) -> None:
    _remove(document.value, path)
    document.where.pop(path, None)


def _drop_empty_sections(document: YamlTree) -> None:
    """A section whose keys are all commented out reads as nothing: its defaults hold."""
    for name, value in list(document.value.items()):
        if value is None and keys.section_at((name,)) is not None:
            document.value[name] = {}


def _validate(document: YamlTree) -> tuple[Config, list[keys.Path], list[Problem]]:
    """The config without its faulty values, their paths, and their problems."""
    try:
        return Config.model_validate(document.value), [], []
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems: dict[keys.Path, Problem] = {}
    sound = copy.deepcopy(document.value)
    faulty = []
    for detail in errors:
        path = _written_path(document.value, detail)
        if path is None or path in problems:
            continue
        if detail["type"] == "too_short" and any(other[: len(path)] == path for other in problems):
            _remove(sound, path)  # what is in it was told
            continue
        if len(problems) < MOST_PROBLEMS:
            problems[path] = _problem(document, path, detail)
        else:  # only counted
            problems[path] = Problem(str(detail["msg"]), "", where=document.place(path))
        if detail["type"] != "extra_forbidden":
            faulty.append(path)
        _remove(sound, _outside_lists(path))
    sound.setdefault("model", STAND_IN)
    sound.setdefault("data", {}).setdefault("train", STAND_IN)
    return Config.model_validate(sound), faulty, _offering_import(_in_order(document, problems))


def _offering_import(problems: list[Problem]) -> list[Problem]:
    """The problems; the first that names a key of another program says how whole configurations are converted."""
    hints = {*map(other_names.hint, (*other_names.OURS, *other_names.SENTENCES))}
    for at, problem in enumerate(problems):
        if problem.change in hints:
            offer = replace(problem, change=f"{problem.change} ({other_names.WHOLE})")
            return [*problems[:at], offer, *problems[at + 1 :]]
    return problems


def _written_path(value: Any, detail: ErrorDetails) -> keys.Path | None:
    """Where the faulty value stands in the file: the location in the schema without what shorthand left out.

    None for errors that only follow from others.
    """
    if detail["type"] == "default_factory_not_called":
        return None
    path: list[str | int] = []
    tagged = set(TAGGED)
    for index, step in enumerate(detail["loc"]):
        if tuple(path) in tagged:  # the next step is which kind was taken, not a key
            tagged.remove(tuple(path))
            continue
        is_last = index == len(detail["loc"]) - 1
        if isinstance(value, dict) and (step in value or (is_last and detail["type"] == "missing")):
            value = value.get(step)
        elif isinstance(value, list) and isinstance(step, int) and step < len(value):
            value = value[step]
        else:
            continue
        path.append(step)
    if detail["type"] == "too_short" and isinstance(value, list) and value:
        return None
    return tuple(path)


def _problem(document: YamlTree, path: keys.Path, detail: ErrorDetails) -> Problem:
    name, where = shortened(keys.dotted(path)), document.place(path)
    if detail["type"] == "extra_forbidden" and (kinds := keys.kinds_with(path)):
        kind, key = " or ".join(kinds), keys.dotted((*path[:-1], "with"))
        return Problem(
            f"{name} without {key}: {kind}", f"{key}: {kind}", f"write {key}: {kind}, or leave it out", where
        )
    if detail["type"] == "extra_forbidden":
        parent = keys.dotted(path[:-1])
        needed = f"a known key{f' of {parent}' if parent else ''}: {', '.join(keys.keys_under(path[:-1]))}"
        return Problem(f"unknown key {name}", needed, _hint_for_key(document, path), where)
    field = keys.field_at(path)
    takes = keys.takes(field) if field is not None else str(detail["msg"])
    value = _value_at(document.value, path)
    if isinstance(value, list) and (count := _fixed_length(field)) not in (None, len(value)):
        observed = f"{name} has {len(value):,} value{'s' * (len(value) != 1)}"
        return Problem(observed, f"{count} values: {takes}", where=where)
    if detail["type"] == "missing":
        return Problem(f"{name} is missing", takes, f"write {name}: ...", document.place(path[:-1]))
    shown = shortened(repr(value) if isinstance(value, str) else keys.as_written(value))
    change = _hint(value, field.annotation if field else None, takes)
    return Problem(f"{name} is {shown}", _needed(takes, detail), change, where)


def _fixed_length(field: FieldInfo | None) -> int | None:
    """How many values a field takes, if that is a fixed number; else None."""
    arguments = get_args(field.annotation) if field is not None else ()
    is_fixed = field is not None and get_origin(field.annotation) is tuple and Ellipsis not in arguments
    return len(arguments) if is_fixed else None


def _needed(takes: str, detail: ErrorDetails) -> str:
    """What a field takes, with the bound that was exceeded where these words do not name it."""
    bounds: dict[str, Any] = detail.get("ctx", {})
    match detail["type"]:
        case "value_error" if isinstance(bounds.get("error"), NotAPathError):
            return str(bounds["error"])
        case "string_too_long":
            return f"{takes} of at most {bounds['max_length']:,} characters, not {len(detail['input']):,}"
        case "less_than_equal" if f"at most {bounds['le']}" not in takes:
            return f"{takes}, and at most {bounds['le']:,.0f}"
    return takes


def _hint_for_key(document: YamlTree, path: keys.Path) -> str:
    name = str(path[-1])
    if name.isdecimal() and (hint := _hint_for_comma(_value_at(document.value, path[:-1]), name)):
        return hint
    if hint := other_names.hint(name):
        return hint
    near = keys.nearest_key(path)
    return f"did you mean {near}?" if near else ""


def _hint_for_comma(siblings: Any, digits: str) -> str:
    """A hint for ``{a: 1,024}``, which reads as two keys, ``a`` and ``024``."""
    names = list(siblings) if isinstance(siblings, dict) else []
    before = names[names.index(digits) - 1] if digits in names[1:] else ""
    number = siblings[before] if before else None
    if siblings and siblings.get(digits) is None and isinstance(number, int) and len(digits) % 3 == 0:
        return f"write {before}: {number}{shortened(digits)}: a comma ends a value"
    return ""


def _hint(value: Any, annotation: Any, takes: str) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 and "a whole number" in takes:
        return f"write {int(value)}"
    if not isinstance(value, str) or not value:
        return ""
    if annotation is bool:
        words = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}
        plain = words.get(value.lower()) or (value.lower() if value.lower() in ("true", "false") else None)
        return f"write {plain}" if plain else ""
    if "number" in takes and (number := yaml_tree.number_in(value)):
        return f"write {number}" + (" without quotes" if number == value.strip() else "")
    choices = list(_choices(annotation))
    near = difflib.get_close_matches(value.lower(), choices, n=1, cutoff=0.5)
    if not near:
        near = [choice for choice in choices if choice in value.lower() or value.lower() in choice][:1]
    return f"did you mean {near[0]}?" if near else ""


def _choices(annotation: Any) -> Iterable[str]:
    arguments = get_args(annotation)
    if getattr(annotation, "__origin__", None) is Literal:
        return [str(argument) for argument in arguments]
    return [choice for argument in arguments for choice in _choices(argument)]


def _in_order(document: YamlTree, problems: dict[keys.Path, Problem]) -> list[Problem]:
    """Problems in the order in which the file is written, those of overrides last."""

    def position(problem: Problem) -> tuple[int, int]:
        number = problem.where.rpartition(":")[2]
        in_file = problem.where.startswith(document.where.get((), "\0"))
        return (0, int(number) if number.isdecimal() else 0) if in_file else (1, 0)

    return sorted(problems.values(), key=position)


def _places(document: YamlTree, names: Sequence[str]) -> str:
    """Where the keys of a contradiction were written; if none of them was, the file."""
    places = []
    for name in names:
        path = yaml_tree.path_of(name)
        while path not in document.where and len(path) > 2 and path[:2] in SOURCES:
            path = path[:-1]  # a source written as no more than its path
        if path in document.where and document.where[path] not in places:
            places.append(document.where[path])
    return ", ".join(places) or document.place(())


def _touches(name: str, faulty: Sequence[keys.Path]) -> bool:
    return any(
        (name + ".").startswith(keys.dotted(path) + ".") or keys.dotted(path).startswith(name + ".") for path in faulty
    )


def _outside_lists(path: keys.Path) -> keys.Path:
    """A path cut before its first list index: a list with a faulty item is left out whole."""
    return next((path[:index] for index, step in enumerate(path) if isinstance(step, int)), path)


def _value_at(value: Any, path: keys.Path) -> Any:
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _remove(value: Any, path: keys.Path) -> None:
    parent = _value_at(value, path[:-1])
    if isinstance(parent, dict):
        parent.pop(path[-1], None)
