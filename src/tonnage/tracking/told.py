"""What leaves this machine besides numbers: a config without what may be private, an error without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tonnage.config import Config
from tonnage.config.check_here import looks_like_data
from tonnage.config.keys import PRIVATE_KEYS
from tonnage.files.paths import is_jinja
from tonnage.files.visible import visible

HUB_IDS = ("model", "tokenizer", "path")
"""Last parts of keys that hold a path or a hub id."""
NO_PATHS = ("revision",)
"""Last parts of keys whose slashes are none of a path."""
LONGEST_ERROR = 300

_SECRET_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_ARGUMENTS = re.compile(r"((?:key|token|secret|password|auth)\w*=)[^&\s]+", re.IGNORECASE)
_SHORTEST_SECRET = 6


def told_config(config: Config) -> dict[str, Any]:
    """Keys of a config that trackers are told, dotted, with values of JSON that are no objects.

    Paths are cut to their last part; hub ids stay whole. What may hold secrets of a cluster is left out.
    """
    return dict(_told(config.model_dump(mode="json", by_alias=True, exclude_none=True), ""))


def _told(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        key = prefix + name
        if key in PRIVATE_KEYS:
            continue
        if isinstance(value, Mapping):
            yield from _told(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for number, item in enumerate(value):
                yield from _told(item, f"{key}.{number}.")
        elif isinstance(value, list):
            yield key, [_cut(name, item) for item in value]
        else:
            yield key, _cut(name, value)


def _cut(name: str, value: Any) -> Any:
    """A text with slashes is a path: everything but its last part may say who trains, and for whom; so may a template
    that is written out."""
    if isinstance(value, str) and is_jinja(value):
        return "written out"
    if not isinstance(value, str) or "/" not in value or name in NO_PATHS or not value.strip("/"):
        return value
    if name in HUB_IDS and _is_hub_id(value):
        return value
    last = value.rstrip("/").rsplit("/", 1)[-1]
    return last.split("?", 1)[0] if "://" in value else last


def _is_hub_id(text: str) -> bool:
    """Whether it is OWNER/NAME and nothing of that name is here."""
    is_one = text.count("/") == 1 and not text.startswith(("/", ".", "~")) and not text.endswith("/")
    if not is_one or "*" in text or looks_like_data(Path(text)):
        return False
    try:
        return not os.path.lexists(text) and not Path(text.split("/")[0]).is_dir()
    except ValueError:
        return False


def told_error(error: BaseException) -> str:
    """An error of a library on one line, without what may be a secret: it goes into the run's log."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    for name, value in os.environ.items():
        if _SECRET_NAMES.search(name) and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, "***")
    text = _SECRET_ARGUMENTS.sub(r"\1***", _USER_INFO.sub("***@", text))
    return visible(text[:LONGEST_ERROR])
