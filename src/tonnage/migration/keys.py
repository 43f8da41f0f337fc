"""What is known of one key of another program's configuration, and the words the tables are written in.

A table is a tuple of ``Key``. Each says what becomes of it, and a sentence why. The sentences are shown in the
account of an import and in ``docs/importing.md``. What a key becomes is one of three things:

* *mapped*: it decides a key of ours, alone or together with others. ``quantity`` names what it tells; keys of
  different programs that tell the same thing share one, and the rules (``convert`` lists them) turn quantities into
  keys of ours.
* *not applicable*: the same run needs no such key here.
* *not supported*: there is nothing here that does it. A value that asks for nothing (``false``, ``none``, 0, or what
  ``idle`` lists) makes it not applicable, and so does the key in ``of``, if that one asks for nothing. Most such keys
  *decide* what is computed: without them the run is another one than was asked for. Others say where bytes rest, how
  fast it goes or where it is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

Verdict = Literal["mapped", "not applicable", "not supported", "unknown"]

VERDICTS: tuple[Verdict, ...] = ("mapped", "not applicable", "not supported", "unknown")
NOT_SAID = (None, "", "null", "auto")
NOTHING = (*NOT_SAID, False, 0, "none", "no", "false", "off", "0")
"""Values, in lower case, that ask for nothing; the first of them even where ``idle`` holds true."""


LONGEST_NAME = 120
"""Of a key that may be a known one misspelt."""


@dataclass(frozen=True)
class Key:
    """One documented key of another program."""

    name: str
    """Dotted inside its file; a last part ``*`` stands for everything below, and ``_*`` for whatever begins so."""
    verdict: Verdict
    reason: str
    """A sentence: how the meaning shifts, or why there is nothing to map it to."""
    to: tuple[str, ...] = ()
    """Keys of ours it has a say in."""
    quantity: str = ""
    """What it tells; the first of ``to`` if that says it all."""
    idle: tuple[object, ...] = ()
    """Values besides ``NOTHING`` that ask for nothing."""
    of: str = ""
    """The key of the same table without which this one means nothing."""
    is_flag: bool = False
    """On a command line it is a word by itself."""
    decides: bool = True
    """Where it is not supported: whether it decides what is computed."""


APART = ("memory", "parallel", "launch", "kernels", "compile", "track", "checkpoint", "evaluate", "output")
"""Sections of ours that leave what is computed as it is."""
DECIDING = ("memory.moments", "launch.workers", "checkpoint.best", "evaluate.patience")
"""Keys in them that do not."""


def decides(to: Iterable[str]) -> bool:
    """Whether one of these keys of ours has a say in what is computed."""
    return any(key in DECIDING or key.partition(".")[0] not in APART for key in to)


def maps(name: str, to: str, reason: str, *, quantity: str = "", is_flag: bool = False) -> Key:
    """A key that is mapped; ``to`` holds our keys, separated by blanks."""
    ours = tuple(to.split())
    return Key(name, "mapped", reason, ours, quantity or ours[0], is_flag=is_flag)


def moot(name: str, reason: str, *, is_flag: bool = False) -> Key:
    """A key that does not apply here."""
    return Key(name, "not applicable", reason, is_flag=is_flag)


def lacks(
    name: str,
    reason: str,
    *,
    idle: Iterable[object] = (),
    of: str = "",
    is_flag: bool = False,
    decides: bool = True,
) -> Key:
    """A key that asks for what tonnage cannot do; ``decides`` if what is computed depends on it."""
    return Key(name, "not supported", reason, idle=tuple(idle), of=of, is_flag=is_flag, decides=decides)


def alike(make: Callable[..., Key], reason: str, names: str, *, is_flag: bool = False) -> Iterator[Key]:
    """Keys of one verdict for one reason, or that tell one quantity; ``names`` are separated by blanks."""
    for name in names.split():
        yield make(name, reason, is_flag=True) if is_flag else make(name, reason)


def within(section: str, keys: Iterable[Key]) -> Iterator[Key]:
    """Keys with what their names begin with in a file, ``fsdp_config.`` or ``fsdp_`` for instance."""
    for key in keys:
        yield replace(key, name=section + key.name, of=key.of and section + key.of)


def asks_for_nothing(value: object, idle: Iterable[object] = ()) -> bool:
    """Whether a value leaves a key as it would be without."""
    if isinstance(value, list | tuple | dict):
        return len(value) == 0 or value in list(idle)
    plain = value.strip().lower() if isinstance(value, str) else value
    candidates = [item.lower() if isinstance(item, str) else item for item in idle]
    nothing = NOT_SAID if any(item is True for item in idle) else NOTHING
    return plain in nothing or plain in candidates or any(_same_number(plain, item) for item in candidates)


def _same_number(value: object, other: object) -> bool:
    if isinstance(other, bool) or not isinstance(other, int | float):
        return False
    try:
        return float(str(value)) == other
    except ValueError:
        return False


@dataclass(frozen=True)
class Table:
    """The keys of one kind of configuration."""

    title: str
    keys: tuple[Key, ...] = field(repr=False)
    sections: Mapping[str, str] = field(repr=False)
    """Leading parts of a name that are replaced before it is looked up: the same keys are written flat elsewhere."""
    hints: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names that scripts use for what a key is for, but that are spelt otherwise."""

    def find(self, name: str) -> Key | None:
        """The key a name stands for; None if it is unknown."""
        return self._known(self.plain(name)) or self._known(name)

    def _known(self, plain: str) -> Key | None:
        if plain in self._by_name:
            return self._by_name[plain]
        parts = plain.split(".")
        for length in range(len(parts) - 1, 0, -1):
            if found := self._by_name.get(".".join([*parts[:length], "*"])):
                return found
        return next((key for key in self.keys if key.name.endswith("_*") and plain.startswith(key.name[:-1])), None)

    def keys_named(self, names: str) -> Iterator[Key]:
        """Keys that are the same in another table; ``names`` are separated by blanks."""
        for name in names.split():
            yield self._by_name[name]

    def has_section(self, name: str) -> bool:
        """Whether keys are known below a name."""
        return any(key.name.startswith(f"{self.plain(name)}.") for key in self.keys) or f"{name}." in self.sections

    def plain(self, name: str) -> str:
        """A name as the table has it: without numbers of list items, sections replaced."""
        name = ".".join(part for part in name.split(".") if not part.isdecimal())
        for section, instead in self.sections.items():
            if name.startswith(section):
                return instead + name.removeprefix(section)
        return name

    def nearest(self, name: str) -> str:
        """The known name most like an unknown one; empty if none is."""
        plain = self.plain(name)
        if plain in self.hints:
            return self.hints[plain]
        if len(plain) > LONGEST_NAME:
            return ""
        names = [key.name for key in self.keys if not key.name.endswith("*")]
        if near := difflib.get_close_matches(plain, names, n=1, cutoff=0.7):
            return near[0]
        last = {known.rpartition(".")[2]: known for known in reversed(names)}
        near = difflib.get_close_matches(plain.rpartition(".")[2], last, n=1, cutoff=0.7)
        return last[near[0]] if near else ""

    @cached_property
    def _by_name(self) -> dict[str, Key]:
        return {key.name: key for key in self.keys}
