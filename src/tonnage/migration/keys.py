"""What is known of the keys of another program's configuration: read from ``tables``, one YAML for each kind of file.

    keys:
      lora_r: adapter.rank                                               it tells a quantity
      lora_target_linear: {tells: all_linear, becomes: adapter.targets, why: "true is all-linear."}
      lora_bias: {not supported: "Biases stay as they are."}
      bf16.auto_cast bf16.check_overflow: {not applicable: "The model and its inputs have one type."}
      fsdp_config.: {include: fsdp}                                      keys of another table, with this in front

A key is one of three things, for a reason that the account of an import and ``docs/importing.md`` show:

* *mapped*: it decides a key of ours, alone or together with others. What it tells is a quantity: keys of different
  programs that tell the same thing share one (``tables/quantities.yaml``), and the rules (``convert`` lists them) turn
  quantities into keys of ours. A quantity that is one of our keys has its name.
* *not applicable*: the same run needs no such key here.
* *not supported*: there is nothing here that does it. A value that asks for nothing (``false``, ``none``, 0, or what
  ``idle`` lists) makes it not applicable, and so does the key in ``of``, if that one asks for nothing. Most such keys
  *decide* what is computed: without them the run is another one than was asked for. Others (``decides: false``) say
  where bytes rest, how fast it goes or where it is written.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from tonnage.migration.yaml_files import read_data

Verdict = Literal["mapped", "not applicable", "not supported", "unknown"]

VERDICTS: tuple[Verdict, ...] = ("mapped", "not applicable", "not supported", "unknown")
NOT_SAID = (None, "", "null", "auto")
NOTHING = (*NOT_SAID, False, 0, "none", "no", "false", "off", "0")
"""Values, in lower case, that ask for nothing; the first of them even where ``idle`` holds true."""
LONGEST_NAME = 120
"""Of a key that may be a known one misspelt."""


@dataclass(frozen=True)
class DocumentedKey:
    """One documented key of another program."""

    name: str
    """Dotted inside its file; a last part ``*`` stands for everything below, and ``_*`` for whatever begins so."""
    verdict: Verdict
    reason: str
    """A sentence: how the meaning shifts, or why there is nothing to map it to."""
    to: tuple[str, ...] = ()
    """Keys of ours it has a say in."""
    quantity: str = ""
    """What it tells."""
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


def asks_for_nothing(value: object, idle: Iterable[object] = ()) -> bool:
    """Whether a value leaves a key as it would be without."""
    if isinstance(value, list | tuple | dict):
        return len(value) == 0 or value in list(idle)
    plain = value.strip().lower() if isinstance(value, str) else value
    candidates = [other.lower() if isinstance(other, str) else other for other in idle]
    nothing = NOT_SAID if any(other is True for other in idle) else NOTHING
    return plain in nothing or plain in candidates or any(_same_number(plain, other) for other in candidates)


def _same_number(value: object, other: object) -> bool:
    if isinstance(other, bool) or not isinstance(other, int | float):
        return False
    try:
        return float(str(value)) == other
    except ValueError:
        return False


@dataclass(frozen=True)
class Table:
    title: str
    keys: tuple[DocumentedKey, ...] = field(repr=False)
    sections: Mapping[str, str] = field(repr=False)
    """Leading parts of a name that are replaced before it is looked up: the same keys are written flat elsewhere."""
    hints: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Names that scripts use for what a key is for, but that are spelt otherwise."""
    signs: tuple[frozenset[str], ...] = field(default=(), repr=False)
    """Sets of keys that this program alone has: a file that has all of one set is such a configuration."""

    def find(self, name: str) -> DocumentedKey | None:
        """The key a name stands for; None if it is unknown."""
        return self._known(self.plain(name)) or self._known(name)

    def _known(self, plain: str) -> DocumentedKey | None:
        if plain in self._by_name:
            return self._by_name[plain]
        parts = plain.split(".")
        for length in range(len(parts) - 1, 0, -1):
            if found := self._by_name.get(".".join([*parts[:length], "*"])):
                return found
        return next((key for key in self.keys if key.name.endswith("_*") and plain.startswith(key.name[:-1])), None)

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
    def _by_name(self) -> dict[str, DocumentedKey]:
        return {key.name: key for key in self.keys}


def _quantities() -> dict[str, tuple[str, str]]:
    """By name: keys of ours that keys of several programs have a say in, and the usual sentence for them."""
    quantities = {}
    for name, entry in read_data("quantities").items():
        fields = {"why": entry} if isinstance(entry, str) else entry
        quantities[name] = (fields.get("becomes", name), fields["why"])
    return quantities


QUANTITIES: Mapping[str, tuple[str, str]] = _quantities()


def read_table(name: str) -> Table:
    content = read_data(name)
    keys = tuple(_keys_of(content["keys"]))
    signs = tuple(frozenset(names.split()) for names in content.get("signs", ()))
    return Table(content.get("title", ""), keys, content.get("sections", {}), content.get("hints", {}), signs)


def _keys_of(entries: Mapping[str, Any]) -> Iterator[DocumentedKey]:
    own = {name for names in entries for name in names.split()}
    for names, entry in entries.items():
        if isinstance(entry, dict) and "include" in entry:
            yield from _included(names, read_table(entry["include"]), own, entry.get("without", "").split())
        else:
            key = _key({"tells": entry} if isinstance(entry, str) else entry)
            yield from (replace(key, name=name) for name in names.split())


def _included(prefix: str, table: Table, own: Iterable[str], without: list[str]) -> Iterator[DocumentedKey]:
    """Keys of another table but for those that the including table has itself and those it names."""
    for key in table.keys:
        if key.name not in without and prefix + key.name not in own:
            yield replace(key, name=prefix + key.name, of=key.of and prefix + key.of)


def _key(fields: Mapping[str, Any]) -> DocumentedKey:
    """What an entry says of its keys, which are still without a name."""
    is_flag, idle, of = fields.get("flag", False), tuple(fields.get("idle", ())), fields.get("of", "")
    if "tells" in fields:
        quantity = fields["tells"]
        becomes, usual = QUANTITIES.get(quantity, (quantity, ""))
        to, reason = tuple(fields.get("becomes", becomes).split()), fields.get("why", usual)
        return DocumentedKey("", "mapped", reason, to, quantity, is_flag=is_flag)
    if "not applicable" in fields:
        return DocumentedKey("", "not applicable", fields["not applicable"], is_flag=is_flag)
    return DocumentedKey(
        "", "not supported", fields["not supported"], (), "", idle, of, is_flag, fields.get("decides", True)
    )


DEEPSPEED = read_table("deepspeed")
ACCELERATE = read_table("accelerate")
ARGUMENTS = read_table("trainer")
TORCHRUN = read_table("torchrun")
DEEPSPEED_LAUNCHER = read_table("deepspeed_launcher")
PYTHON = read_table("python")
AXOLOTL = read_table("axolotl")
LLAMA_FACTORY = read_table("llama_factory")
VERSION_1 = read_table("llama_factory_1")
TORCHTUNE = read_table("torchtune")
SWIFT = read_table("swift")
TABLES = (
    *(DEEPSPEED, ACCELERATE, ARGUMENTS, TORCHRUN, DEEPSPEED_LAUNCHER, PYTHON),
    *(AXOLOTL, LLAMA_FACTORY, VERSION_1, TORCHTUNE, SWIFT),
)
"""In the order of the page."""
