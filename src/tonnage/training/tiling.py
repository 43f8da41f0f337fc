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
    embedding, head, wide = anatomy.embedding, anatomy.head, set(in_fp32)
    in_blocks = [holder for block in anatomy.blocks for holder in large_weights(block)]
    outside: list[Holder] = [(embedding, "weight"), (head, "weight")]
    largest = max(getattr(*holder).numel() for holder in (*outside, *in_blocks))

    def tiled(*holders: Holder) -> TiledWeight:
        weight: nn.Parameter = getattr(*holders[0])
        in_tiles = tiles_of(weight.numel(), largest, number)
        return TiledWeight(holders, in_tiles, torch.float32 if weight in wide else dtype, mesh)

    weights = [tiled(*outside)] if anatomy.tied else [tiled(holder) for holder in outside]
    look_up_in_tiles(embedding, weights[0])
    of_head = TiledHead(weights[-1], head, anatomy.logit_scale, anatomy.logit_softcap)
    for module, name in in_blocks:
        weight = getattr(module, name)
        if tiles_of(weight.numel(), largest, number) > 1 and weight not in wide:
            weights.append(tiled((module, name)))
            if isinstance(module, nn.Linear):
                tiled_linear.use_tiles(module, weights[-1])
            else:
                tiled_experts.use_tiles(module, name, weights[-1])
    return weights, of_head


def large_weights(block: nn.Module) -> list[Holder]:
    """What of a block may come in tiles: weights of linear layers and stacked matrices of experts, if they are trained,
    and no other module's as well."""
    modules = list(block.modules())
    owners = Counter(id(weight) for module in modules for weight in module._parameters.values())
    # Of a list of modules some may not run, on some workers: who gathers would wait for them.
    listed = {id(part) for module in modules if isinstance(module, nn.ModuleList) for part in module.modules()}
    linear = [module for module in modules if type(module) is nn.Linear and id(module) not in listed]
    holders: list[Holder] = [(layer, "weight") for layer in linear if "weight" in layer._parameters]
    holders += [(module, name) for module in modules for name in stacks_of(module)]
    weights = [(holder, getattr(*holder)) for holder in holders]
    return [holder for holder, weight in weights if owners[id(weight)] == 1 and weight.requires_grad]
