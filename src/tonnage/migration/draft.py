"""The config that an import drafts: settings of the other program on one side, keys of ours on the other, and what
became of each.

Rules take quantities out of the settings (``first``, ``every``), and say what became of what they took: ``put`` (a key
of ours), ``drop`` (needless), ``refuse`` (not possible) or ``leave_open`` (the user must say); what is not there (None)
they pass over. The first word on a setting stands, so a rule ends with what holds for whatever it has not settled; only
``put`` may come twice, for several keys of ours. Everything that no rule takes is settled by its table in ``finish``,
so that each setting is in the account exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from tonnage.config import keys as ours
from tonnage.files.paths import is_jinja
from tonnage.migration.keys import DEEPSPEED, Verdict, asks_for_nothing, decides
from tonnage.migration.meanings import Meaning, meaning_of
from tonnage.migration.methods import Method
from tonnage.migration.programs import Program, in_words
from tonnage.migration.reading import Files
from tonnage.migration.settings import RANK_WORDS, ForeignSetting
from tonnage.migration.values import flag, text
from tonnage.migration.yaml_files import read_data

T = TypeVar("T")
_NOTES: dict[str, str] = read_data("notes")
NOT_TAKEN = "Beside the other keys nothing here says it."
"""Of a key that decides one of ours, and that no rule has taken: there should be none."""
TOKENS = ("data.eos_token", "data.added_tokens", "role_boundaries")
"""Quantities whose values look like what an author leaves open, and are none."""


@dataclass(frozen=True)
class Entry:
    """What became of one key."""

    setting: ForeignSetting
    verdict: Verdict
    to: tuple[tuple[str, Any], ...]
    """Keys of ours it decided, with their values."""
    note: str

    @property
    def is_lost(self) -> bool:
        """Whether it decides what is computed and is not carried over. What nobody knows may decide anything."""
        key = self.setting.key
        if self.verdict == "unknown":
            return self.setting.value not in (None, "", [], {})
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
class MissingAnswer:
    """What the user must still say."""

    key: str
    """Of ours."""
    sentence: str
    example: str = "..."


@dataclass(frozen=True)
class Pick(Generic[T]):
    """A value taken out of the settings, and those that agree on it."""

    value: T
    settings: tuple[ForeignSetting, ...]

    @property
    def shown(self) -> str:
        """The first key, as it was written, and its value."""
        return f"{self.settings[0].shown} {self.settings[0].shown_value}"


Picks = Pick[Any] | None | Iterable[Pick[Any] | None]
"""What was taken: one thing or several, or nothing where it was not there."""


@dataclass
class Draft:
    files: Files
    tree: dict[str, Any] = field(default_factory=dict)
    """Dotted keys of ours."""
    origins: dict[str, list[str]] = field(default_factory=dict)
    """Where each key of ours comes from, in words."""
    entries: dict[int, Entry] = field(default_factory=dict)
    implied: list[Implied] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    needs: list[MissingAnswer] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    """Keys of ours for which a value was given that they do not take."""
    notes: list[str] = field(default_factory=list)
    """Differences that no single key brings about."""
    method: Method = "supervised"
    """How is learned."""
    is_quantised: bool = False
    """Whether the model's weights are of few bits there."""
    has_images: bool = False
    """Whether rows hold images."""

    def __post_init__(self) -> None:
        self._by_quantity: dict[str, list[ForeignSetting]] = {}
        for setting in self.files.settings:
            key = setting.key
            if key is not None and key.verdict == "mapped":
                self._by_quantity.setdefault(key.quantity, []).append(setting)

    @property
    def has_arguments(self) -> bool:
        """Whether arguments of a trainer were given, so that its defaults hold where they say nothing."""
        return bool(self.program.defaults)

    @property
    def program(self) -> Program:
        """Whose defaults hold."""
        return self.files.trainer

    @property
    def model(self) -> str:
        """The model, as far as it is said by now."""
        return str(self.tree.get("model", ""))

    @property
    def defaults(self) -> Mapping[str, tuple[str, Any]]:
        """What the program does where nothing is said, by what it decides."""
        return {**self.program.defaults, **self.program.of_methods.get(self.method, {})}

    @property
    def is_preference(self) -> bool:
        """Whether answers are judged, and not learned as they are."""
        return self.method != "supervised"

    def default(self, key: str) -> Any:
        """What the program does where nothing is said; None if it does nothing by itself."""
        return self.defaults[key][1] if key in self.defaults else None

    def imply_default(self, key: str, *quantities: str, value: Any = None) -> None:
        """Set a key of ours, unless it is set, from the program's default for it."""
        if key in self.defaults:
            default = self.default(key) if value is None else value
            self.imply(key, default, in_words(self.defaults[key]), *quantities)

    def is_open(self, key: str) -> bool:
        """Whether a key of ours was asked for, with a value that its author left open."""
        return any(need.key == key for need in self.needs)

    def settings(self, quantity: str) -> list[ForeignSetting]:
        """All settings that tell a quantity, whatever became of them."""
        return self._by_quantity.get(quantity, [])

    def has(self, quantity: str) -> bool:
        return bool(self.settings(quantity))

    def every(self, quantity: str, parse: Callable[[Any], T]) -> list[Pick[T]]:
        """Each key that tells a quantity, one by one; those that cannot be understood are refused."""
        picks = []
        for setting in self.settings(quantity):
            if setting.is_auto or setting.number in self.entries or self._is_placeholder(setting):
                continue
            try:
                picks.append(Pick(parse(setting.value), (setting,)))
            except ValueError as error:
                if setting.value in (None, "", "None", "none", {}, []):
                    self._settle(setting, "not applicable", "Not set.")
                else:
                    self._settle(setting, "not supported", f"{setting.shown_value} {error}.")
        return picks

    def first(self, quantity: str, parse: Callable[[Any], T]) -> Pick[T] | None:
        """What the keys that tell a quantity agree on; if they do not, the one that counts, and a conflict is noted."""
        picks = self.every(quantity, parse)
        if not picks:
            return None
        rank = min(pick.settings[0].rank for pick in picks)
        taken = [pick for pick in picks if pick.settings[0].rank == rank][-1]
        agreeing = [pick.settings[0] for pick in picks if pick.value == taken.value and pick is not taken]
        others = [pick for pick in picks if pick.value != taken.value]
        if others:
            self.prefer(taken, *others)
        return Pick(taken.value, (taken.settings[0], *agreeing, *self.autos(quantity)))

    def prefer(self, taken: Pick[Any], *others: Pick[Any]) -> None:
        """What was taken counts, and the others say something else: a conflict is noted."""
        shown = tuple(f"{pick.settings[0].where}: {pick.shown}" for pick in (taken, *others))
        self.conflicts.append(Conflict(shown, shown[0]))
        for pick in others:
            self.drop(pick, f"{taken.shown} in {taken.settings[0].where} counts (see conflicts).")

    def put(self, key: str, value: Any, *picks: Pick[Any] | None, note: str = "") -> None:
        """Set a key of ours from what was taken; the picks are refused if our schema refuses the value."""
        if refusal := _refusal(key, value):
            self.refused.add(key)
            self.refuse(picks, f"{key} takes {refusal}.")
            return
        self.tree[key] = value
        for setting in _settings(*picks):
            origins = self.origins.setdefault(key, [])
            if not setting.is_auto and setting.shown not in origins:
                origins.append(setting.shown)
            old = self.entries.get(setting.number)
            to = (*(old.to if old else ()), (key, value))
            reason = old.note if old else setting.key.reason if setting.key else ""
            if setting.is_auto and not old:
                reason = "The Trainer fills in `auto` from its arguments."
            sentences = reason if note in reason else f"{reason} {note}".strip()
            self.entries[setting.number] = Entry(setting, "mapped", to, sentences)

    def only(self, quantity: str, parse: Callable[[Any], Any], value: object, usual: str, otherwise: str = "") -> None:
        """Take a quantity of which one value is so here anyway, as ``usual`` says, and no other is possible."""
        pick = self.first(quantity, parse)
        self.drop(pick if pick is not None and pick.value == value else None, usual)
        self.refuse(pick, otherwise)

    def copy(
        self, key: str, parse: Callable[[Any], Any], *, of: str = "", usual: object = None, reason: str = ""
    ) -> Pick[Any] | None:
        """Set a key of ours to the quantity of its name, or to that ``of`` another one; why it is not set to ``usual``,
        ``reason`` says if given."""
        pick = self.first(of or key, parse)
        if pick is not None and reason and pick.value == usual:
            self.drop(pick, reason)
        elif pick is not None:
            self.put(key, pick.value, pick)
        return pick

    def switch(self, quantity: str, key: str, value: Any, off: str, note: str = "") -> Pick[bool] | None:
        """Set a key of ours to a value where a flag is true; why one that is false changes nothing, ``off`` says."""
        pick = self.first(quantity, flag)
        if pick is not None and pick.value:
            self.put(key, value, pick, note=note)
        self.drop(pick, off)
        return pick

    def follow(self, quantity: str, *, any_case: bool = False) -> Pick[str] | None:
        """Take a word, and do what ``meanings`` say it comes to."""
        pick = self.first(quantity, text)
        self.apply(quantity, pick, any_case=any_case)
        return pick

    def apply(self, quantity: str, pick: Pick[str] | None, *, any_case: bool = False) -> None:
        """Do what the word that was taken comes to, in small letters if they may be any."""
        if pick is not None:
            self.carry_out(meaning_of(quantity, pick.value.lower() if any_case else pick.value), pick)

    def carry_out(self, meaning: Meaning, pick: Pick[Any]) -> None:
        """Do what something that was taken comes to."""
        value = meaning.value.format(word=pick.value) if isinstance(meaning.value, str) else meaning.value
        match meaning.outcome:
            case "needless":
                self.drop(pick, value)
            case "refused":
                self.refuse(pick, value)
            case "unknown":
                self.unknown(pick, value)
            case key:
                self.put(key, value, pick, note=meaning.note)

    def imply(self, key: str, value: Any, because: str, *quantities: str) -> None:
        """Set a key of ours, unless it is set, from a default of the other program: ``auto`` of the quantities too."""
        if key in self.tree or key in self.refused or self.is_open(key):
            return
        self.tree[key] = value
        self.origins[key] = [because]
        self.implied.append(Implied(key, value, because))
        for setting in (setting for quantity in quantities for setting in self.autos(quantity)):
            self._settle(setting, "mapped", f"The Trainer fills in `auto`: {because}.", ((key, value),))

    def withdraw(self, key: str, reason: str = "") -> None:
        """Take back a key of ours; whatever decided nothing else is not needed, for a reason."""
        del self.tree[key]
        self.origins.pop(key, None)
        self.implied = [implied for implied in self.implied if implied.key != key]
        for number, entry in self.entries.items():
            if any(name == key for name, _ in entry.to):
                to = tuple(part for part in entry.to if part[0] != key)
                verdict: Verdict = "mapped" if to else "not applicable"
                self.entries[number] = Entry(entry.setting, verdict, to, entry.note if to else reason)

    def drop(self, picks: Picks, reason: str) -> None:
        """What was taken is not needed."""
        for setting in _settings(picks):
            self._settle(setting, "not applicable", reason)

    def drop_every(self, reason: str, *quantities: str) -> None:
        """Whatever tells these quantities is not needed."""
        for quantity in quantities:
            self.drop(self.every(quantity, lambda value: value), reason)

    def refuse(self, picks: Picks, reason: str = "") -> None:
        """What was taken cannot be done; why, its table says unless a reason is given."""
        for setting in _settings(picks):
            self._settle(setting, "not supported", reason or (setting.key.reason if setting.key else ""))

    def unknown(self, pick: Pick[Any], reason: str) -> None:
        """What was taken is nothing that anybody knows."""
        for setting in pick.settings:
            self._settle(setting, "unknown", reason)

    def leave_open(self, key: str, sentence: str, *picks: Pick[Any] | None, example: str = "...") -> None:
        """The user must say more; what was taken is mapped as far as it goes."""
        if not self.is_open(key):
            self.needs.append(MissingAnswer(key, sentence, example))
        for setting in _settings(*picks):
            self._settle(setting, "mapped", f"Left open: {sentence}.", ((key, None),) if key else ())

    def note(self, name: str, **words: object) -> None:
        """Tell a difference, by its name in ``tables/notes.yaml``, with words for its places."""
        if (sentence := _NOTES[name].format(**words)) not in self.notes:
            self.notes.append(sentence)

    def finish(self) -> None:
        """Settle by its table what no rule has taken."""
        left_to_the_trainer = []
        for setting in self.files.settings:
            if setting.number in self.entries:
                continue
            key = setting.key
            if key is None and setting.table.has_section(setting.name) and setting.value in (None, "", {}, []):
                self._settle(setting, "not applicable", "Empty.")
            elif key is None:
                near = setting.table.nearest(setting.name)
                sentence = f"Did you mean {near}?" if near else f"Not a key of {setting.table.title}."
                self._settle(setting, "unknown", sentence)
            elif key.verdict == "not applicable":
                self._settle(setting, "not applicable", key.reason)
            elif key.verdict == "not supported":
                self._settle_by_value(setting)
            elif setting.is_auto:
                left_to_the_trainer.append(setting.shown)
                note = "The Trainer fills in `auto` from its arguments, which no file gives."
                self._settle(setting, "mapped", note, tuple((name, None) for name in key.to))
            elif setting.value in (None, "", {}, []):
                self._settle(setting, "not applicable", "Not set.")
            else:
                self._settle(setting, "not supported", NOT_TAKEN)
        unknown = [entry.setting for entry in self.entries.values() if entry.verdict == "unknown"]
        if own := [setting.shown for setting in unknown if setting.rank == RANK_WORDS]:
            self.note("arguments of its own", names=", ".join(own))
        if left_to_the_trainer and not self.has_arguments:
            sentence = f"{', '.join(left_to_the_trainer)} were auto: give the Trainer's arguments as well"
            self.needs.append(MissingAnswer("", sentence))

    def _settle_by_value(self, setting: ForeignSetting) -> None:
        key = setting.key
        assert key is not None
        if asks_for_nothing(setting.value, key.idle):
            self._settle(setting, "not applicable", f"Asks for nothing. {key.reason}")
            return
        if key.of:
            switches = [other for other in self.files.settings if other.table is setting.table and other.name == key.of]
            is_off = not switches and setting.table is DEEPSPEED
            for switch in switches:
                is_auto_and_off = switch.value == "auto" and self.tree.get("precision") != key.of.partition(".")[0]
                is_off = is_off or is_auto_and_off or (switch.value != "auto" and asks_for_nothing(switch.value))
            if is_off:
                self._settle(setting, "not applicable", f"{key.of} is off.")
                return
        self._settle(setting, "not supported", key.reason)

    def _settle(
        self, setting: ForeignSetting, verdict: Verdict, note: str, to: tuple[tuple[str, Any], ...] = ()
    ) -> None:
        self.entries.setdefault(setting.number, Entry(setting, verdict, to, note))

    def autos(self, quantity: str) -> list[ForeignSetting]:
        """Settings that tell a quantity and are ``auto``, as far as no rule has taken them."""
        settings = self.settings(quantity)
        return [setting for setting in settings if setting.is_auto and setting.number not in self.entries]

    def _is_placeholder(self, setting: ForeignSetting) -> bool:
        """A value that its author left for others to fill in: ``<your path>``, ``$MODEL``."""
        written = setting.value.strip() if isinstance(setting.value, str) else ""
        if setting.key is not None and setting.key.quantity in TOKENS:
            return False
        if any(place in written for place in ("{instruction}", "{system}", "{prompt}")) or is_jinja(written):
            return False  # a prompt, in whose places rows are put, or a template
        if not ((written.startswith("<") and written.endswith(">")) or "$" in written):
            return False
        to = setting.key.to[0] if setting.key is not None and setting.key.to else ""
        sentence = f"{setting.shown} is {setting.shown_value}, which {PurePath(setting.where).name} leaves open"
        self.leave_open(to, sentence, Pick(None, (setting,)))
        return True


def _settings(*picks: Picks) -> list[ForeignSetting]:
    settings: list[ForeignSetting] = []
    for pick in picks:
        if isinstance(pick, Pick):
            settings += pick.settings
        elif pick is not None:
            settings += _settings(*pick)
    return settings


def _refusal(key: str, value: Any) -> str:
    """What a key of ours takes, if it does not take a value; empty if it does."""
    field_of_ours = ours.field_at(tuple(key.split(".")))
    assert field_of_ours is not None, key
    if ours.section_of(field_of_ours.annotation) is not None:
        return ""
    try:
        _adapter(key).validate_python(value, strict=True)
    except ValidationError:
        return ours.takes(field_of_ours)
    return ""


@cache
def _adapter(key: str) -> TypeAdapter[Any]:
    """What validates the value of a key of ours by itself."""
    schema_field = ours.field_at(tuple(key.split(".")))
    assert schema_field is not None, key
    annotation: Any = schema_field.annotation
    for constraint in schema_field.metadata:
        annotation = Annotated[annotation, constraint]
    return TypeAdapter(annotation)
