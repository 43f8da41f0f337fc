"""A step of families whose matrices ranks divide, beside the step of the whole model: says by how much it is off.
All but the loss is in fp64, so that what is off is not rounding.

One row of three documents; its tokens are no multiple of the ranks, and documents lie on both sides of their borders.
"""

from __future__ import annotations

import copy
import json

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from tonnage.kernels.regions import region_of
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.model.tensor_plan import tensor_plan
from tonnage.parallel.tensor import Ranks, divide
from tonnage.parallel.world import World, join_world
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel

LENGTHS, SUPERVISED = (7, 3, 13), (2, 3, 4, 5, 8, 12, 13, 17, 21)
SHAPE = {
    "vocab_size": 263,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "initializer_range": 0.2,
}
CPU = torch.device("cpu")


def main(told: list[str]) -> None:
    with join_world(tensor=2) as world:
        found = {}
        for name in told:
            family, _, changes = name.partition(" ")
            config = CONFIG_MAPPING[family](**SHAPE | json.loads(changes or "{}"))
            found[name] = _off(config, world)
        if world.rank == 0:
            print(json.dumps(found))


def _off(config: PreTrainedConfig, world: World) -> tuple[bool, float, float]:
    """Whether ranks divide tokens; by how much loss and gradients are off, of the latter those that are most."""
    whole = _whole(config)
    alone = LossModel(whole, dissect(whole))
    part = build_on_meta(copy.deepcopy(config), torch.float64)
    anatomy = dissect(part)
    plan = tensor_plan(part, anatomy)
    together = LossModel(part, anatomy)
    divide(part, plan, world.mesh["tensor"])
    allocate(part, CPU)
    parameters = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            local, region = region_of(parameter.data)
            local.copy_(parameters[name][region])
    if plan.divides_tokens:
        together.token_ranks = Ranks.along(world.mesh["tensor"])
    losses = []
    for model, batch in ((alone, _batch()), (together, _batch().rounded(2))):
        losses.append(model(batch, float(len(SUPERVISED))))
        losses[-1].backward()
    offs = [0.0]
    for name, parameter in part.named_parameters():
        want, got = parameters[name].grad, parameter.grad
        assert (want is None) == (got is None), name
        if want is None or got is None:
            continue
        offs.append(float((region_of(got)[0] - want[region_of(got)[1]]).norm() / want.norm()))
    return plan.divides_tokens, abs(float(losses[1] / losses[0]) - 1), max(map(float, world.gather(str(max(offs)))))


def _whole(config: PreTrainedConfig) -> PreTrainedModel:
    """With norms and biases that are not all alike."""
    model, chance = build_on_meta(copy.deepcopy(config), torch.float64), torch.Generator().manual_seed(1)
    allocate(model, CPU)
    initialise_randomly(model, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn(parameter.shape, generator=chance), alpha=0.1)
    return model


def _batch() -> MicroBatch:
    ids = torch.randint(2, 256, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(2))
    places = torch.tensor(SUPERVISED)
    targets: Tensor = ids[0, places + 1]
    return MicroBatch(ids, LENGTHS, places, targets, torch.ones(len(SUPERVISED)))
