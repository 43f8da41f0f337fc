"""What is said of values that contradict one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Contradiction:
    """A problem, and the dotted keys it comes from."""

    keys: tuple[str, ...]
    found: str
    needed: str
    change: str = ""


def of_other_kinds(
    section: str, values: Any, defaults: Any, owners: Mapping[str, tuple[str, ...]], kind: str = "kind"
) -> Iterator[Contradiction]:
    """Keys of a section that are given and that its kind, which another key of it says, does not know; ``owners`` are
    the kinds that know each."""
    of, own = f"{section}.{kind}", getattr(values, kind)
    for name, kinds in owners.items():
        key, value, default = f"{section}.{name}", getattr(values, name), getattr(defaults, name)
        if own not in kinds and value != default:
            yield Contradiction(
                (key, of),
                f"{key} is {value!r}, and {of} is {own}",
                f"{of} {' or '.join(kinds)}, which know{'s' if len(kinds) == 1 else ''} it",
                f"leave {key} out (it is {default!r} then), or change {of}",
            )


def of_idle_items(key: str, items: Sequence[Any], names: tuple[str, str], of: str) -> Iterator[Contradiction]:
    """Items of a list that say neither of the two keys for the sake of which they are there, of what they ``match``."""
    for index, item in enumerate(items):
        if all(getattr(item, name) is None for name in names):
            place, (first, second) = f"{key}.{index}", names
            observed = f"{place} ({item.match}) has neither {first} nor {second}"
            yield Contradiction((place,), observed, f"what its {of} have otherwise than the rest", "write one of them")


def did_you_mean(names: Iterable[str]) -> str:
    """A hint that offers names, empty if there are none."""
    listed = " or ".join(names)
    return f"did you mean {listed}?" if listed else ""
