"""Which weights of a model come in tiles, and in how many: none comes in a larger piece than the largest one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tonnage.model.anatomy import Anatomy
from tonnage.parallel.tiled import Holder, TiledWeight
from tonnage.planning.tiling import tiles_of
from tonnage.training.tiled_linear import use_tiles
from tonnage.training.tiled_vocabulary import TiledHead, look_up_in_tiles


def tile_model(
    anatomy: Anatomy, mesh: DeviceMesh, number: int, dtype: torch.dtype, in_fp32: Collection[nn.Parameter] = ()
) -> tuple[list[TiledWeight], TiledHead]:
    """Divide what a model on the meta device has of large weights into tiles: the largest into ``number``.

    They are those of embedding and head, which may be one, however large, and of linear layers of blocks that are
    larger than a tile. They are computed with in ``dtype``, or ``in_fp32``. Returns them and the head.
    """
    embedding, head, kept = anatomy.embedding, anatomy.head, set(in_fp32)
    linears = {one: one.weight for block in anatomy.blocks for one in linears_of(block)}
    largest = max(one.numel() for one in (embedding.weight, head.weight, *linears.values()))

    def tiled(*holders: Holder) -> TiledWeight:
        weight: nn.Parameter = getattr(*holders[0])
        in_tiles = tiles_of(weight.numel(), largest, number)
        return TiledWeight(holders, in_tiles, torch.float32 if weight in kept else dtype, mesh)

    if anatomy.tied:
        found = [tiled((embedding, "weight"), (head, "weight"))]
    else:
        found = [tiled((embedding, "weight")), tiled((head, "weight"))]
    look_up_in_tiles(embedding, found[0])
    of_head = TiledHead(found[-1], head, anatomy.logit_scale, anatomy.logit_softcap)
    for layer, weight in linears.items():
        if tiles_of(weight.numel(), largest, number) > 1 and weight not in kept:
            found.append(tiled((layer, "weight")))
            use_tiles(layer, found[-1])
    return found, of_head


def linears_of(block: nn.Module) -> list[nn.Linear]:
    """The linear layers of a block whose weights are their own, and are trained."""
    layers = [one for one in block.modules() if type(one) is nn.Linear]
    holders = Counter(id(value) for one in block.modules() for value in one._parameters.values())
    return [one for one in layers if holders[id(one.weight)] == 1 and one.weight.requires_grad]
