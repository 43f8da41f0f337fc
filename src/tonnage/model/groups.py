"""Which trained parameters are updated otherwise than the rest: by patterns of their names, of which the first match
counts, and matrices, which have an optimizer of their own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tonnage.errors import user_error
from tonnage.model.adapters import is_named, matches_nothing
from tonnage.model.anatomy import Anatomy, undecayed

KEY = "optimizer.groups"


def groups_of(model: nn.Module, anatomy: Anatomy, patterns: Sequence[str]) -> dict[str, int]:
    """The number of the pattern that decides for each trained parameter of a whole model, by name; those that none
    matches are left out. Patterns are as for ``train``; a tied parameter has all of its names.

    Raises:
        UserError: a pattern matches no trained parameter, or only those that patterns before it match.
    """
    if not patterns:
        return {}
    paths = {id(module): path for path, module in model.named_modules()}
    blocks = [paths[id(block)] for block in anatomy.blocks]
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            aliases.setdefault(id(parameter), []).append(name)
    matched = {
        names[0]: [
            number for number, pattern in enumerate(patterns) if any(is_named(name, pattern, blocks) for name in names)
        ]
        for names in aliases.values()
    }
    all_matches = {number for numbers in matched.values() for number in numbers}
    if nothing := [pattern for number, pattern in enumerate(patterns) if number not in all_matches]:
        raise matches_nothing(KEY, nothing, matched, "trained parameters")
    deciding = {name: numbers[0] for name, numbers in matched.items() if numbers}
    if hidden := [pattern for number, pattern in enumerate(patterns) if number not in deciding.values()]:
        raise user_error(
            where=KEY,
            found=f"{', '.join(hidden)}: all that matches is matched by a group before",
            needed="parameters for each group: of several groups that match, the first counts",
            change=f"put {hidden[0]} before the others, or leave it out",
        )
    return deciding


def matrices_of(model: nn.Module, anatomy: Anatomy) -> frozenset[str]:
    """Names of the trained matrices of a whole model's blocks: what Muon updates. Stacks of experts are not among them,
    nor is anything that is no matrix but stored as one."""
    of_blocks = {id(parameter) for block in anatomy.blocks for parameter in block.parameters()}
    ends = {id(parameter) for part in (anatomy.embedding, anatomy.head) for parameter in part.parameters()}
    vectors = undecayed(model)
    return frozenset(
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
        and parameter.dim() == 2
        and id(parameter) in of_blocks - ends
        and name not in vectors
    )
