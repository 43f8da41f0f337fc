"""Which weights of a model come in tiles, and in how many: none comes in a larger piece than the largest one does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from tonnage.model.anatomy import Anatomy
from tonnage.model.packed_layers import stacks_of
from tonnage.parallel.tiled import Holder, TiledWeight
from tonnage.planning.tiling import tiles_of
from tonnage.training import tiled_experts, tiled_linear
from tonnage.training.tiled_vocabulary import TiledHead, look_up_in_tiles


def tile_model(
    anatomy: Anatomy, mesh: DeviceMesh, number: int, dtype: torch.dtype, in_fp32: Collection[nn.Parameter] = ()
) -> tuple[list[TiledWeight], TiledHead]:
    """Divide what a model on the meta device has of large weights into tiles: the largest into ``number``.

    They are those of embedding and head, which may be one, however large, and of linear layers and experts of blocks
    that are larger than a tile. They are computed with in ``dtype``, or ``in_fp32``. Returns them and the head.
    """
    embedding, head, kept = anatomy.embedding, anatomy.head, set(in_fp32)
    in_blocks = [holder for block in anatomy.blocks for holder in large_weights(block)]
    largest = max(one.numel() for one in (embedding.weight, head.weight, *(getattr(*one) for one in in_blocks)))

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
    for module, name in in_blocks:
        weight = getattr(module, name)
        if tiles_of(weight.numel(), largest, number) > 1 and weight not in kept:
            found.append(tiled((module, name)))
            if isinstance(module, nn.Linear):
                tiled_linear.use_tiles(module, found[-1])
            else:
                tiled_experts.use_tiles(module, name, found[-1])
    return found, of_head


def large_weights(block: nn.Module) -> list[Holder]:
    """What of a block may come in tiles: weights of linear layers and stacked matrices of experts, if they are trained,
    and no other module's as well."""
    modules = list(block.modules())
    holders = Counter(id(value) for one in modules for value in one._parameters.values())
    # Of a list of modules some may not run, on some workers: who gathers would wait for them.
    listed = {id(one) for some in modules if isinstance(some, nn.ModuleList) for one in some.modules()}
    linear = [one for one in modules if type(one) is nn.Linear and id(one) not in listed]
    found: list[Holder] = [(one, "weight") for one in linear if "weight" in one._parameters]
    found += [(one, name) for one in modules for name in stacks_of(one)]
    weights = [(holder, getattr(*holder)) for holder in found]
    return [holder for holder, one in weights if holders[id(one)] == 1 and one.requires_grad]
