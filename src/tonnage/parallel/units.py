"""Units of sharding for the few parameters that are computed with in fp32 where all others are in 16 bits.

FSDP2 gathers all parameters of a unit in one type, and gathers them when a module is called. A unit of its own around
a router, say, would gather it in the middle of its block, where a forward pass that is run again must find everything
as it was. So what a block has in fp32 is a unit that is called around the block's forward pass, recompute included:

    block ─ gathers the block ─ unit ─ gathers what is in fp32 ─ (recompute) ─ the block's forward pass
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from torch import nn

NAME = "in_fp32"
"""Under which the root of the modules has the units. They own no module: what is theirs has its place in the model."""


class UnitInFp32(nn.Module):
    """Whatever has parameters in fp32 of a block, or of the root; it runs what it is given."""

    def __init__(self, owners: Sequence[nn.Module], kept: Collection[nn.Parameter]) -> None:
        super().__init__()
        self.owners = nn.ModuleList(owners)
        self._kept = [(one, name) for one in owners for name, value in one._parameters.items() if value in kept]

    @property
    def kept(self) -> set[nn.Parameter]:
        """Its parameters, which are others once they are sharded. (What its owners have besides is not its own.)"""
        return {getattr(owner, name) for owner, name in self._kept}

    def forward(self, inner: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        """What ``inner`` returns."""
        return inner(*args, **keywords)


def units_in_fp32(
    root: nn.Module, blocks: Sequence[nn.Module], kept: Collection[nn.Parameter]
) -> dict[nn.Module, UnitInFp32]:
    """A unit around each of ``blocks`` that has some of the parameters ``kept`` in fp32, and around ``root`` if it has
    others; by what it is around."""
    units = dict[nn.Module, UnitInFp32]()
    left = set(kept)
    for module in (*blocks, root):
        owners = [one for one in module.modules() if not left.isdisjoint(one.parameters(recurse=False))]
        if owners:
            left -= {parameter for one in owners for parameter in one.parameters(recurse=False)}
            units[module] = unit = UnitInFp32(owners, kept)
            module.forward = partial(unit, module.forward)
    if units:
        setattr(root, NAME, nn.ModuleList(units.values()))
    return units
