"""The sheet an import is worked out on: what was given on one side, keys of ours on the other, and what became of each.

Rules take quantities off the sheet (``first``, ``every``), and say what became of what they took: ``put`` (a key of
ours), ``drop`` (needless), ``refuse`` (not possible) or ``leave_open`` (the user must say); what was not given (None)
they pass over. Everything that no rule takes is settled by its table in ``finish``, so that each key that was given is
in the account exactly once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from tonnage.config import keys as ours
from tonnage.files.paths import is_jinja
from tonnage.migration.given import RANK_WORDS, Given
from tonnage.migration.keys import DEEPSPEED, Verdict, asks_for_nothing, decides
from tonnage.migration.programs import Program, in_words
from tonnage.migration.reading import Files

T = TypeVar("T")
LARGEST = 2**53
"""Whole numbers are below it: they may be written as ``1e9``, so they pass through floating point."""


NOT_TAKEN = "Beside the other keys nothing here says it."
"""Of a key that decides one of ours, and that no rule has taken: there should be none."""
TOKENS = ("data.eos_token", "data.added_tokens")
"""Quantities whose values look like what an author leaves open, and are none."""


@dataclass(frozen=True)
class Entry:
    """What became of one key."""

    given: Given
    verdict: Verdict
    to: tuple[tuple[str, Any], ...]
    """Keys of ours it decided, with their values."""
    note: str

    @property
    def is_lost(self) -> bool:
        """Whether it decides what is computed and is not carried over. What nobody knows may decide anything."""
        key = self.given.key
        if self.verdict == "unknown":
            return self.given.value not in (None, "", [], {})
        if self.verdict != "not supported" or key is None:
            return False
        return key.decides if key.verdict == "not supported" else decides(key.to)


@dataclass(frozen=True)
class Implied:
    """A key of ours that follows from a default of the other program."""

    key: str
    value: Any
    because: str


@dataclass(frozen=True)
class Conflict:
    """One thing that was said in different ways."""

    said: tuple[str, ...]
    taken: str


@dataclass(frozen=True)
class Need:
    """What the user must still say."""

    key: str
    """Of ours."""
    sentence: str
    example: str = "..."


@dataclass(frozen=True)
class Pick(Generic[T]):
    """A value taken off the sheet, and the keys that agree on it."""

    value: T
    givens: tuple[Given, ...]

    @property
    def shown(self) -> str:
        """The first key, as it was written, and its value."""
        return f"{self.givens[0].shown} {self.givens[0].shown_value}"


@dataclass
class Sheet:
    """See the module."""

    files: Files
    tree: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of ours."""
    origins: dict[str, list[str]] = field(default_factory=dict)
    """Where each key of ours comes from, in words."""
    entries: dict[int, Entry] = field(default_factory=dict)
    implied: list[Implied] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    needs: list[Need] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Keys of ours for which a value was given that they do not take."""
    notes: list[str] = field(default_factory=list)
    """Differences that no single key brings about."""

    def __post_init__(self) -> None:
        self._by_quantity: dict[str, list[Given]] = {}
        for given in self.files.givens:
            key = given.key
            if key is not None and key.verdict == "mapped":
                self._by_quantity.setdefault(key.quantity, []).append(given)

    @property
    def has_arguments(self) -> bool:
        """Whether arguments of a trainer were given, so that its defaults hold where they say nothing."""
        return bool(self.program.defaults)

    @property
    def program(self) -> Program:
        """Whose defaults hold."""
        return self.files.trainer

    def default(self, key: str) -> Any:
        """What the program does where nothing is said; None if it does nothing by itself."""
        return self.program.defaults[key][1] if key in self.program.defaults else None

    def imply_default(self, key: str, *quantities: str, value: Any = None) -> None:
        """Set a key of ours, unless it is set, from the program's default for it."""
        if key in self.program.defaults:
            default = self.default(key) if value is None else value
            self.imply(key, default, in_words(self.program.defaults[key]), *quantities)

    def is_open(self, *keys: str) -> bool:
        """Whether one of these keys of ours was asked for, with a value that its author left open."""
        return any(need.key in keys for need in self.needs)

    def has(self, quantity: str) -> bool:
        """Whether any key tells a quantity."""
        return quantity in self._by_quantity

    def raw(self, quantity: str) -> list[Any]:
        """The values of all keys that tell a quantity, whatever became of them."""
        return [given.value for given in self._by_quantity.get(quantity, [])]

    def every(self, quantity: str, parse: Callable[[Any], T]) -> list[Pick[T]]:
        """Each key that tells a quantity, one by one; those that cannot be understood are refused."""
        picks = []
        for given in self._by_quantity.get(quantity, []):
            if given.is_auto or given.number in self.entries or self._is_placeholder(given):
                continue
            try:
                picks.append(Pick(parse(given.value), (given,)))
            except ValueError as error:
                if given.value in (None, "", "None", "none", {}, []):
                    self._settle(given, "not applicable", "Not set.")
                else:
                    self._settle(given, "not supported", f"{given.shown_value} {error}.")
        return picks

    def first(self, quantity: str, parse: Callable[[Any], T]) -> Pick[T] | None:
        """What the keys that tell a quantity agree on; if they do not, the one that counts, and a conflict is noted."""
        picks = self.every(quantity, parse)
        if not picks:
            return None
        rank = min(pick.givens[0].rank for pick in picks)
        taken = [pick for pick in picks if pick.givens[0].rank == rank][-1]
        agreeing = [pick.givens[0] for pick in picks if pick.value == taken.value and pick is not taken]
        others = [pick for pick in picks if pick.value != taken.value]
        if others:
            said = tuple(f"{pick.givens[0].where}: {pick.shown}" for pick in (taken, *others))
            self.conflicts.append(Conflict(said, said[0]))
            for pick in others:
                self.drop(pick, f"{taken.shown} in {taken.givens[0].where} counts (see conflicts).")
        return Pick(taken.value, (taken.givens[0], *agreeing, *self.autos(quantity)))

    def put(self, key: str, value: Any, *picks: Pick[Any] | None, note: str = "") -> bool:
        """Set a key of ours from what was taken. False, and the picks refused, if our schema refuses the value."""
        refusal = _refusal(key, value)
        if refusal:
            self.refused.add(key)
            for pick in picks:
                self.refuse(pick, f"{key} takes {refusal}.")
            return False
        self.tree[key] = value
        for given in _givens(*picks):
            origins = self.origins.setdefault(key, [])
            if not given.is_auto and given.shown not in origins:
                origins.append(given.shown)
            old = self.entries.get(given.number)
            to = (*(old.to if old else ()), (key, value))
            parts = [old.note] if old else [given.key.reason if given.key else ""]
            if given.is_auto and not old:
                parts = ["The Trainer fills in `auto` from its arguments."]
            parts += [note] if note and note not in parts[0] else []
            self.entries[given.number] = Entry(given, "mapped", to, " ".join(part for part in parts if part))
        return True

    def copy(self, key: str, parse: Callable[[Any], Any]) -> Pick[Any] | None:
        """Set a key of ours to the quantity of its name."""
        pick = self.first(key, parse)
        if pick is not None:
            self.put(key, pick.value, pick)
        return pick

    def imply(self, key: str, value: Any, because: str, *quantities: str) -> None:
        """Set a key of ours, unless it is set, from a default of the other program: ``auto`` of the quantities too."""
        if key in self.tree or key in self.refused or self.is_open(key):
            return
        self.tree[key] = value
        self.origins[key] = [because]
        self.implied.append(Implied(key, value, because))
        for given in (given for quantity in quantities for given in self.autos(quantity)):
            self._settle(given, "mapped", f"The Trainer fills in `auto`: {because}.", ((key, value),))

    def drop(self, pick: Pick[Any] | None, reason: str) -> None:
        """What was taken is not needed."""
        for given in _givens(pick):
            self._settle(given, "not applicable", reason)

    def refuse(self, pick: Pick[Any] | None, reason: str = "") -> None:
        """What was taken cannot be done; why, its table says unless a reason is given."""
        for given in _givens(pick):
            self._settle(given, "not supported", reason or (given.key.reason if given.key else ""))

    def unknown(self, pick: Pick[Any], reason: str) -> None:
        """What was taken is nothing that anybody knows."""
        for given in pick.givens:
            self._settle(given, "unknown", reason)

    def leave_open(self, need: Need, *picks: Pick[Any] | None) -> None:
        """The user must say more; what was taken is mapped as far as it goes."""
        if need.key not in [known.key for known in self.needs]:
            self.needs.append(need)
        for given in _givens(*picks):
            self._settle(given, "mapped", f"Left open: {need.sentence}.", ((need.key, None),) if need.key else ())

    def finish(self) -> None:
        """Settle by its table what no rule has taken."""
        left_to_the_trainer = []
        for given in self.files.givens:
            if given.number in self.entries:
                continue
            key = given.key
            if key is None and given.table.has_section(given.name) and given.value in (None, "", {}, []):
                self._settle(given, "not applicable", "Empty.")
            elif key is None:
                near = given.table.nearest(given.name)
                self._settle(
                    given, "unknown", f"Did you mean {near}?" if near else f"Not a key of {given.table.title}."
                )
            elif key.verdict == "not applicable":
                self._settle(given, "not applicable", key.reason)
            elif key.verdict == "not supported":
                self._settle_by_value(given)
            elif given.is_auto:
                left_to_the_trainer.append(given.shown)
                note = "The Trainer fills in `auto` from its arguments, which no file gives."
                self._settle(given, "mapped", note, tuple((name, None) for name in key.to))
            elif given.value in (None, "", {}, []):
                self._settle(given, "not applicable", "Not set.")
            else:
                self._settle(given, "not supported", NOT_TAKEN)
        own = [
            entry.given.shown
            for entry in self.entries.values()
            if entry.verdict == "unknown" and entry.given.rank == RANK_WORDS
        ]
        if own:
            self.notes.append(
                f"The script has arguments of its own ({', '.join(own)}): what they say is not in the config, and the "
                "Trainer's defaults may stand in their place."
            )
        if left_to_the_trainer and not self.has_arguments:
            sentence = f"{', '.join(left_to_the_trainer)} were auto: give the Trainer's arguments as well"
            self.needs.append(Need("", sentence))

    def _settle_by_value(self, given: Given) -> None:
        key = given.key
        assert key is not None
        if asks_for_nothing(given.value, key.idle):
            self._settle(given, "not applicable", f"Asks for nothing. {key.reason}")
            return
        if key.of:
            switches = [other for other in self.files.givens if other.table is given.table and other.name == key.of]
            is_off = not switches and given.table is DEEPSPEED
            for switch in switches:
                is_auto_and_off = switch.value == "auto" and self.tree.get("precision") != key.of.partition(".")[0]
                is_off = is_off or is_auto_and_off or (switch.value != "auto" and asks_for_nothing(switch.value))
            if is_off:
                self._settle(given, "not applicable", f"{key.of} is off.")
                return
        self._settle(given, "not supported", key.reason)

    def _settle(self, given: Given, verdict: Verdict, note: str, to: tuple[tuple[str, Any], ...] = ()) -> None:
        self.entries.setdefault(given.number, Entry(given, verdict, to, note))

    def autos(self, quantity: str) -> list[Given]:
        return [
            given for given in self._by_quantity.get(quantity, []) if given.is_auto and given.number not in self.entries
        ]

    def _is_placeholder(self, given: Given) -> bool:
        """A value that its author left for others to fill in: ``<your path>``, ``$MODEL``."""
        text = given.value.strip() if isinstance(given.value, str) else ""
        if given.key is not None and given.key.quantity in TOKENS:
            return False
        if "{instruction}" in text or "{system}" in text or is_jinja(text):
            return False  # a prompt, in whose places rows are put, or a template
        if not ((text.startswith("<") and text.endswith(">")) or "$" in text):
            return False
        key = given.key
        to = key.to[0] if key is not None and key.to else ""
        self.leave_open(
            Need(to, f"{given.shown} is {given.shown_value}, which {PurePath(given.where).name} leaves open"),
            Pick(None, (given,)),
        )
        return True


def _givens(*picks: Pick[Any] | None) -> list[Given]:
    """All keys of what was taken."""
    return [given for pick in picks if pick is not None for given in pick.givens]


def _refusal(key: str, value: Any) -> str:
    """What a key of ours takes, if it does not take a value; empty if it does."""
    found = ours.field_at(tuple(key.split(".")))
    assert found is not None, key
    if ours.section_of(found.annotation) is not None:
        return ""
    try:
        _adapter(key).validate_python(value, strict=True)
    except ValidationError:
        return ours.takes(found)
    return ""


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    """What validates the value of a key of ours by itself."""
    found = ours.field_at(tuple(key.split(".")))
    assert found is not None, key
    annotation: Any = found.annotation
    for constraint in found.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation)


def text(value: Any) -> str:
    """A value that is words. Raises ``ValueError`` otherwise."""
    if isinstance(value, list | dict | bool) or value is None or not str(value).strip():
        raise ValueError("is no name")
    return str(value).strip()


def texts(value: Any) -> list[str]:
    """One value or several that are words. Raises ``ValueError`` otherwise."""
    if value == []:
        raise ValueError("is no name")
    return [text(item) for item in value] if isinstance(value, list) else [text(value)]


def words(value: Any) -> list[str]:
    """Words of a list, or between commas. Raises ``ValueError`` otherwise."""
    return [name.strip() for one in texts(value) for name in one.split(",") if name.strip()]


def number(value: Any) -> float:
    """A number. Raises ``ValueError`` for what is none."""
    if isinstance(value, bool | list | dict) or value is None:
        raise ValueError("is not a number")
    try:
        found = float(value)
    except (ValueError, OverflowError):
        raise ValueError("is not a number") from None
    if not math.isfinite(found):
        raise ValueError("is not a finite number")
    return found


def whole(value: Any) -> int:
    """A whole number, also as ``1e9``. Raises ``ValueError`` for what is none."""
    found = number(value)
    if found != int(found):
        raise ValueError("is not a whole number")
    if abs(found) >= LARGEST:
        raise ValueError("is too large")
    return int(found)


def numbers(value: Any) -> list[float]:
    """Several numbers. Raises ``ValueError`` for what are none."""
    items: Iterable[Any] = value if isinstance(value, list) else str(value).strip("[]()").replace(",", " ").split()
    return [number(item) for item in items]


def flag(value: Any) -> bool:
    """True or false, in any of the words that the other programs take. Raises ``ValueError`` otherwise."""
    word = str(value).strip().lower()
    if word in ("true", "yes", "y", "1", "on", "t"):
        return True
    if word in ("false", "no", "n", "0", "off", "f", "none"):
        return False
    raise ValueError("is neither true nor false")
