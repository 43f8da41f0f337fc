"""What Python gives as keyword arguments, as overrides: ``optimizer={"lr": 1e-4}`` is ``optimizer.lr=0.0001``.

So whatever may be said is read, checked and refused as on a command line. A dictionary changes those keys of a section
that it names; a source, and where the keys are the user's own (``columns``), it is a value as it stands.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic.fields import FieldInfo

from tonnage.config import keys
from tonnage.config.schema import Source
from tonnage.config.yaml_tree import MAX_DEPTH, path_of
from tonnage.errors import Problem, UserError
from tonnage.files.visible import shortened


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as ``KEY=VALUE``, in their order.

    Values are what YAML knows: None, booleans, numbers, text, lists or tuples, dictionaries with text as keys; paths
    (``os.PathLike``) are text, and numbers of numpy and the like are numbers.

    Raises:
        UserError: a value is none of these; names all of them by their keys.
    """
    overrides: list[str] = []
    problems: list[Problem] = []
    for key, value in _leaves(values, ""):
        try:
            overrides.append(f"{key}={_quoted(plain(value))}")
        except (TypeError, ValueError) as error:
            needed = "None, True or False, a number, text, a path, a list or a dictionary with text as keys"
            problems.append(Problem(f"{shortened(key)} holds {error}", needed))
    if problems:
        raise UserError(*problems)
    return overrides


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and what they are set to: sections are entered."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        path = path_of(key)
        is_section = isinstance(value, Mapping) and keys.section_at(path) not in (None, Source)
        if is_section and (value or not _may_be_word(keys.field_at(path))):
            yield from _leaves(value, f"{key}.")
        else:
            yield key, value


def _may_be_word(field: FieldInfo | None) -> bool:
    """Whether a key takes a word or a section: then an empty section replaces the word."""
    return field is not None and any(keys.section_of(kind) is None for kind in get_args(field.annotation))


def plain(value: Any, depth: int = 0) -> Any:
    """A value of plain types. Raises ``TypeError`` or ``ValueError`` that says what in it is none."""
    if depth > MAX_DEPTH:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            if value != value or value in (float("inf"), float("-inf")):
                raise ValueError(f"{value}, which is no number to compute with")
            return value
        case os.PathLike():
            return os.fspath(value)
        case Mapping():
            if wrong := [key for key in value if not isinstance(key, str)]:
                raise TypeError(f"a dictionary with the key {wrong[0]!r}, which is no text")
            return {key: plain(item, depth + 1) for key, item in value.items()}
        case list() | tuple():
            return [plain(item, depth + 1) for item in value]
    if callable(as_list := getattr(value, "tolist", None)):  # numbers and arrays of numpy, torch, pandas
        return plain(as_list(), depth + 1)
    raise TypeError(f"a {type(value).__name__}")


NO_YAML = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ud800-\udfff\ufffe\uffff]")
"""Characters that JSON has as they are, and YAML does not allow, or takes for the end of a line."""


_WORD = re.compile(r"(?!(null|true|false|yes|no|on|off|y|n)$)[a-z][\w/-]*(\.[\w/-]+)*", re.ASCII | re.IGNORECASE)
"""Text that YAML takes for text as it is."""


def _quoted(value: Any) -> str:
    """A value in JSON that is YAML as well, or as a plain word."""
    if isinstance(value, str) and _WORD.fullmatch(value):
        return value
    return NO_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
