"""Whose a mapping is: told by keys that one program alone has, else by whose keys most of it are.

A file of which too little is known is refused. A configuration that is taken for somebody else's is lost without a
word: all of its keys are unknown, and that program's defaults stand in their place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.errors import user_error
from tonnage.migration.keys import (
    ACCELERATE,
    ARGUMENTS,
    AXOLOTL,
    DEEPSPEED,
    LLAMA_FACTORY,
    SWIFT,
    TORCHTUNE,
    VERSION_1,
    Table,
)
from tonnage.migration.settings import RANK_ACCELERATE, RANK_ARGUMENTS, RANK_DEEPSPEED, unreadable


@dataclass(frozen=True)
class Kind:
    table: Table
    rank: int
    prefix: str = ""
    """What its keys are below in the table."""
    beside_signs: frozenset[str] = frozenset()
    """Keys that such a file has besides the signs of its table."""
    is_counted: bool = True
    """Whether a mapping without signs may be of this kind because most of its keys are. Not of programs that take
    the Trainer's arguments beside their own: with a few of those their defaults, an adapter even, would be written."""


KINDS = (
    Kind(AXOLOTL, RANK_ARGUMENTS, is_counted=False),
    Kind(VERSION_1, RANK_ARGUMENTS, is_counted=False),
    Kind(LLAMA_FACTORY, RANK_ARGUMENTS, beside_signs=frozenset({"model_name_or_path"}), is_counted=False),
    Kind(TORCHTUNE, RANK_ARGUMENTS, is_counted=False),
    Kind(SWIFT, RANK_ARGUMENTS, is_counted=False),
    Kind(DEEPSPEED, RANK_DEEPSPEED),
    Kind(ARGUMENTS, RANK_ARGUMENTS),
    Kind(ACCELERATE, RANK_ACCELERATE),
    Kind(ARGUMENTS, RANK_ARGUMENTS, prefix="fsdp_config."),
)
OTHERS = {
    "_component_": "components of torchtune without a checkpointer and a model, tokenizer or dataset beside it",
    "apiVersion": "a manifest of Kubernetes",
    "trainer.total_epochs": "a configuration of verl, which is not read",
    "nemo": "a configuration of NeMo, which is not read",
}
"""What a last part of a key is a sign of, where nothing is read."""
LEAST_KNOWN = 0.5
"""Of the keys of a mapping that no key tells."""


def kind_of(mapping: Mapping[str, Any], leaves: Sequence[tuple[str, Any]], where: str) -> Kind:
    """What a mapping is. Raises ``UserError`` for what cannot be told."""
    names = set(mapping)
    by_signs = [kind for kind in KINDS if any(signs | kind.beside_signs <= names for signs in kind.table.signs)]
    if len(by_signs) > 1:
        titles = " and ".join(kind.table.title for kind in by_signs)
        raise user_error(f"keys of several programs ({titles})", "one program's", "divide it", where)
    if by_signs:
        return by_signs[0]
    counted = [kind for kind in KINDS if kind.is_counted]
    num_known = [sum(kind.table.find(kind.prefix + name) is not None for name, _ in leaves) for kind in counted]
    best = counted[num_known.index(max(num_known))]
    shown = ", ".join(name[:60] for name in list(mapping)[:5]) or "nothing"
    for name, _ in leaves:
        if other := OTHERS.get(name) or OTHERS.get(name.rpartition(".")[2]):
            raise unreadable(other, where)
    if not max(num_known):
        raise unreadable(f"no key that is known ({shown})", where)
    if max(num_known) < LEAST_KNOWN * len(leaves):
        problem = f"{len(leaves)} keys ({shown}), of which {best.table.title} has {max(num_known)} and no program more"
        raise unreadable(problem, where)
    return best
