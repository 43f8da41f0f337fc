"""Workers that hold embedding and head in tiles against whole ones; told ``ROWS:TILES:TIED:SOFTCAP [...]``.

Every worker has tokens of its own, the last one none. The whole ones are torch's, on the tokens of all workers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tonnage.kernels.regions import local_part
from tonnage.model.anatomy import Anatomy
from tonnage.optim.gradients import GradientsInMemory
from tonnage.optim.tiers import TrainedParameter
from tonnage.parallel.world import World, join_world
from tonnage.training.tiling import tile_model

COLUMNS, SCALE, PADDING = 24, 0.7, 3


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 1.5


def of_worker(rank: int, size: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, targets and weights."""
    numbers = torch.Generator().manual_seed(rank)
    tokens = 0 if rank == size - 1 > 0 else 11 + rank
    ids = torch.randint(rows, (1, tokens), generator=numbers)
    ids[:, :2] = PADDING
    return ids, torch.randint(rows, (tokens,), generator=numbers), torch.rand(tokens, generator=numbers)


def whole(embedding: nn.Embedding, head: nn.Linear, softcap: float, told: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    ids, targets, weights = told
    hidden = torch.tanh(embedding(ids)[0])
    logits = SCALE * head(hidden)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return (F.cross_entropy(logits, targets, reduction="none") * weights).sum(), logits


def tiled(one: str, world: World) -> None:
    rows, number, tied = map(int, one.split(":")[:3])
    softcap = float(one.split(":")[3])
    torch.manual_seed(5)
    embedding, head = Scaled(rows, COLUMNS, padding_idx=PADDING), nn.Linear(COLUMNS, rows, bias=not tied)
    if tied:
        head.weight = embedding.weight
    everyone = [of_worker(rank, world.size, rows) for rank in range(world.size)]
    expected = [whole(embedding, head, softcap, told) for told in everyone]
    torch.stack([loss for loss, _ in expected]).sum().backward()
    assert embedding.weight.grad is not None
    assert head.weight.grad is not None
    wanted = {"embedding": embedding.weight.grad, "head": head.weight.grad}
    values = {"embedding": embedding.weight.detach().clone(), "head": head.weight.detach().clone()}
    bias = None if head.bias is None else head.bias.grad
    head.zero_grad()

    anatomy = Anatomy(nn.Module(), (), embedding, head, SCALE, softcap or None)
    weights, of_head = tile_model(anatomy, world.mesh["replicate", "shard"], number, torch.float32)
    assert len(weights) == (1 if tied else 2)
    names = ["embedding", "head"][: len(weights)]
    for name, weight in zip(names, weights, strict=True):
        shard: Any = torch.empty_like(weight.parameter, device="cpu")
        whole_rows = values[name]
        here = local_part(shard)
        each = -(-rows // world.size)
        here.copy_(whole_rows[world.rank * each : world.rank * each + len(here)])
        weight.put(nn.Parameter(shard))
    gradients = GradientsInMemory(
        [TrainedParameter(n, w.parameter, decay=0.0, first=0) for n, w in zip(names, weights, strict=True)]
    )
    for weight in weights:
        weight.begin(gradients.add_part)

    ids, targets, factors = everyone[world.rank]
    hidden = torch.tanh(embedding(ids)[0])
    hidden.retain_grad()
    loss, logits = of_head.loss(hidden, targets, factors), expected[world.rank][1]
    torch.testing.assert_close(loss, expected[world.rank][0], rtol=1e-6, atol=1e-6)
    loss.backward()
    for name, weight in zip(names, weights, strict=True):
        assert weight.parameter.shape == (rows, COLUMNS)
        if not local_part(weight.parameter).numel():
            continue
        assert weight.parameter.grad is not None
        own = local_part(weight.parameter.grad)
        want = wanted[name][world.rank * each : world.rank * each + len(own)]
        torch.testing.assert_close(own, want, rtol=1e-6, atol=1e-6)
    if bias is not None:
        of_all = torch.zeros_like(bias) if head.bias.grad is None else head.bias.grad
        dist.all_reduce(of_all)
        torch.testing.assert_close(of_all, bias, rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        assert of_head.likeliest(hidden.detach()).equal(logits.argmax(1))
        found: list[Tensor] = []
        logprobs = of_head.log_probabilities(hidden.detach(), targets, likeliest_of=found)
        want = logits.log_softmax(1).gather(1, targets[:, None])[:, 0]
        torch.testing.assert_close(logprobs, want.detach(), rtol=1e-6, atol=1e-6)
        assert found[0].equal(logits.argmax(1))


def main(told: list[str]) -> None:
    with join_world() as world:
        for one in told:
            tiled(one, world)
