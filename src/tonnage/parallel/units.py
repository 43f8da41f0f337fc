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
"""The root's attribute that holds the units. Their parameters keep their names in the model."""


class UnitInFp32(nn.Module):
    """The modules of a block, or of the root, that have parameters in fp32. Called, it runs the function it is
    given."""

    def __init__(self, owners: Sequence[nn.Module], in_fp32: Collection[nn.Parameter]) -> None:
        super().__init__()
        self.owners = nn.ModuleList(owners)
        self._kept = [
            (owner, name) for owner in owners for name, parameter in owner._parameters.items() if parameter in in_fp32
        ]

    @property
    def kept(self) -> set[nn.Parameter]:
        """Its parameters, looked up anew, as sharding replaces them. (What else its owners have is not its own.)"""
        return {getattr(owner, name) for owner, name in self._kept}

    def forward(self, inner: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        return inner(*args, **keywords)


def units_in_fp32(
    root: nn.Module, blocks: Sequence[nn.Module], in_fp32: Collection[nn.Parameter]
) -> dict[nn.Module, UnitInFp32]:
    """Wrap each of ``blocks`` that has parameters ``in_fp32`` in a unit, and ``root`` if it has others. Returns the
    units by the module that they wrap."""
    units = dict[nn.Module, UnitInFp32]()
    left = set(in_fp32)
    for module in (*blocks, root):
        owners = [owner for owner in module.modules() if not left.isdisjoint(owner.parameters(recurse=False))]
        if owners:
            left -= {parameter for owner in owners for parameter in owner.parameters(recurse=False)}
            units[module] = unit = UnitInFp32(owners, in_fp32)
            module.forward = partial(unit, module.forward)
    if units:
        setattr(root, NAME, nn.ModuleList(units.values()))
    return units
