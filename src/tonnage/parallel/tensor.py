"""Tensor parallelism: ranks along ``tensor`` compute every block together, each with its part of every matrix.

Which part is the model's own plan (``model.tensor_plan``). Parameters become ``DTensor`` on the tensor axis, so whoever
shards, loads or saves them sees what they are; modules compute with the local part, and five places communicate:

    place                  forward          backward         each token sends
    entrance of a block    all-gather       reduce-scatter   its hidden state, once for attention and once for the MLP
    rows, embedding        reduce-scatter   all-gather       its hidden state
    whole parameters       -                all-reduce       nothing: their gradient
    entrance of the head   all-reduce       all-reduce       supervised tokens only
    loss                   all-reduce       -                three numbers of each supervised token

Between a sum and the next entrance (norms, residuals) a rank has its own part of a row's tokens, so parameters there
have a gradient of these tokens, which is summed; and so has what every rank applies to its own heads (norms of queries
and keys). Rows are filled up to a multiple of the ranks (``training.setting``).

Where a plan does not divide tokens, all-reduces take the place of both scatters and gathers there, every rank computes
all tokens alike between them, from the same numbers, and gradients of parameters there are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from tonnage.kernels.regions import local_part, part_of
from tonnage.model.adapters import DOWN, EMBEDDING_DOWN, EMBEDDING_UP, UP
from tonnage.model.packed_layers import compute
from tonnage.model.tensor_plan import TensorPlan, first_argument


def divide(root: nn.Module, plan: TensorPlan, mesh: DeviceMesh) -> None:
    """Divide the parameters of ``root``, which are on the meta device, along ``mesh`` of one axis, in place."""

    def on_mesh(local: Tensor, parameter: nn.Parameter, placement: Placement) -> Tensor:
        return DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=parameter.shape, stride=parameter.stride()
        )

    _divide(root, plan, Ranks.along(mesh), on_mesh)


def divide_in_shape(root: nn.Module, plan: TensorPlan, size: int) -> None:
    """Let ``root`` compute what the first of ``size`` ranks computes, without the others: results have the right
    shapes, but nothing is summed. For weighing."""
    _divide(root, plan, Ranks("", size, 0), lambda local, *_: local)


def _divide(
    root: nn.Module,
    plan: TensorPlan,
    ranks: Ranks,
    placed: Callable[[Tensor, nn.Parameter, Placement], Tensor],
) -> None:
    placements: dict[int, dict[str, Placement]] = {}
    for module in (*plan.columns, plan.embedding, plan.head):
        placements[id(module)] = {"weight": Shard(0), "bias": Shard(0), UP: Shard(0), EMBEDDING_DOWN: Shard(0)}
    for module in plan.rows:
        placements[id(module)] = {"weight": Shard(1), DOWN: Shard(1)}
    divided_parameters: dict[int, nn.Parameter] = {}
    others = (module for module in root.modules() if id(module) not in placements)
    alike = [module for module in others if next(module.parameters(recurse=False), None) is not None]
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                placement = placements.get(id(module), {}).get(name, Replicate())
                if id(parameter) not in divided_parameters:
                    divided = placed(_local_shape(parameter, placement, ranks), parameter, placement)
                    divided_parameters[id(parameter)] = nn.Parameter(divided, requires_grad=parameter.requires_grad)
                module._parameters[name] = divided_parameters[id(parameter)]

    inside, tokens = set(map(id, plan.inside)), _Tokens(ranks, plan.divides_tokens)
    for module in alike:
        change = partial(_enter_any, ranks=ranks) if id(module) in inside or tokens.divided else _as_it_is
        _let(module, partial(_forward_with_local_parameters, module, module.forward, change))
    for linear_layer in (*plan.columns, plan.head):
        _let(linear_layer, partial(_forward_columns, linear_layer, ranks))
    for linear_layer in plan.rows:
        _let(linear_layer, partial(_forward_rows, linear_layer, tokens))
    _divide_embedding(plan.embedding, tokens)
    for module in (*plan.entrances, plan.head):
        _let(module, partial(_forward_entered, module.forward, first_argument(module), tokens))


@dataclass(frozen=True)
class Ranks:
    """The ranks of one tensor axis."""

    group: str
    """Name of their process group, as collectives know it; empty if there are none (``divide_in_shape``)."""
    size: int
    rank: int
    """This one among them."""

    @staticmethod
    def along(mesh: DeviceMesh) -> Ranks:
        return Ranks(mesh.get_group().group_name, mesh.size(), mesh.get_local_rank())

    def part_of(self, size: int) -> slice:
        """This rank's part of a dimension."""
        return part_of(slice(0, size), self.size, self.rank)


@dataclass(frozen=True)
class _Tokens:
    """What ranks have of the tokens of a row, (1, tokens, hidden), where they do not divide a matrix."""

    ranks: Ranks
    divided: bool
    """Whether each has a part of them; else all."""

    def enter(self, tensor: Tensor) -> Tensor:
        """All tokens of what each rank then multiplies by its part of a matrix."""
        return gather_tokens(tensor, self.ranks) if self.divided else enter(tensor, self.ranks)

    def leave(self, tensor: Tensor) -> Tensor:
        """The sum of what the ranks have of all tokens."""
        return scatter_tokens(tensor, self.ranks) if self.divided else leave(tensor, self.ranks)

    def own(self, parameter: Tensor) -> Tensor:
        """A whole parameter, with a gradient of all tokens."""
        return enter(parameter, self.ranks) if self.divided else parameter


def ranks_of(parameter: Tensor) -> Ranks | None:
    """The ranks that have the other parts of a parameter that is gathered for computing; None if it is whole."""
    return Ranks.along(parameter.device_mesh) if isinstance(parameter, DTensor) else None


def copies_of(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """How many ranks of the tensor axis hold the same part of a parameter, where it is more than one."""
    found = {}
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and "tensor" in (names := parameter.device_mesh.mesh_dim_names or ()):
            axis = names.index("tensor")
            if parameter.placements[axis].is_replicate():
                found[name] = parameter.device_mesh.size(axis)
    return found


def all_reduce(tensor: Tensor, ranks: Ranks, operation: str = "sum") -> Tensor:
    """``tensor`` reduced over ``ranks``; a new tensor, without gradient."""
    reduced: Tensor = torch.ops._c10d_functional.all_reduce(tensor.contiguous(), operation, ranks.group)
    if ranks.group:
        reduced = torch.ops._c10d_functional.wait_tensor(reduced)
    return reduced


def gathered(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The tokens of all ranks, (1, tokens, ...), from a part of as many on each; a new tensor, without gradient."""
    own = tensor.flatten(0, 1).contiguous()
    tokens: Tensor = torch.ops._c10d_functional.all_gather_into_tensor(own, ranks.size, ranks.group)
    if ranks.group:
        tokens = torch.ops._c10d_functional.wait_tensor(tokens)
    return tokens.unsqueeze(0)


def scattered(tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of the sum of ``tensor``, (1, tokens, ...), over ``ranks``; a new tensor, without gradient."""
    whole = tensor.flatten(0, 1).contiguous()
    tokens: Tensor = torch.ops._c10d_functional.reduce_scatter_tensor(whole, "sum", ranks.size, ranks.group)
    if ranks.group:
        tokens = torch.ops._c10d_functional.wait_tensor(tokens)
    return tokens.unsqueeze(0)


def enter(tensor: Tensor, ranks: Ranks) -> Tensor:
    """``tensor`` unchanged; its gradient is summed over the ranks."""
    entered: Tensor = _Exchange.apply(tensor, ranks, "nothing", "sum")  # type: ignore[no-untyped-call]
    return entered


def leave(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The sum of ``tensor`` over the ranks."""
    left: Tensor = _Exchange.apply(tensor, ranks, "sum", "nothing")  # type: ignore[no-untyped-call]
    return left


def gather_tokens(tensor: Tensor, ranks: Ranks) -> Tensor:
    """The tokens of all ranks, (1, tokens, ...); the gradient of each is summed over the ranks."""
    tokens: Tensor = _Exchange.apply(tensor, ranks, "gather", "scatter")  # type: ignore[no-untyped-call]
    return tokens


def scatter_tokens(tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's tokens of the sum of ``tensor``, (1, tokens, ...), over the ranks."""
    tokens: Tensor = _Exchange.apply(tensor, ranks, "scatter", "gather")  # type: ignore[no-untyped-call]
    return tokens


def pick_tokens(own: Tensor, places: Tensor, ranks: Ranks) -> Tensor:
    """The tokens in some ``places`` of a row, (places, hidden), of which each rank has its ``own``, (tokens, hidden).
    All get them; their gradient is to be summed already (``enter``)."""
    here = places - ranks.rank * len(own)
    is_own = (here >= 0) & (here < len(own))
    picked = own.index_select(0, torch.where(is_own, here, 0))
    return leave(torch.where(is_own.unsqueeze(-1), picked, 0), ranks)


def _same(tensor: Tensor, _: Ranks) -> Tensor:
    return tensor.view_as(tensor)


_EXCHANGES: dict[str, Callable[[Tensor, Ranks], Tensor]] = {
    "nothing": _same,
    "sum": all_reduce,
    "gather": gathered,
    "scatter": scattered,
}


class _Exchange(torch.autograd.Function):
    """One of ``_EXCHANGES`` forward, and another one backward: by their names, which Dynamo can put into a graph."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: Ranks, forward: str, backward: str) -> Tensor:
        ctx.ranks, ctx.exchange = ranks, backward
        return _EXCHANGES[forward](tensor, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _EXCHANGES[ctx.exchange](gradient, ctx.ranks), None, None, None


def _local_shape(parameter: nn.Parameter, placement: Placement, ranks: Ranks) -> Tensor:
    """This rank's part of a parameter, on the meta device."""
    shape = list(parameter.shape)
    if isinstance(placement, Shard):
        part = ranks.part_of(shape[placement.dim])
        shape[placement.dim] = part.stop - part.start
    return torch.empty(shape, dtype=parameter.dtype, device="meta")


def _let(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace a module's forward pass."""
    module.forward = forward


def _as_it_is(name: str, tensor: Tensor) -> Tensor:
    return tensor


def _enter_any(name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    return enter(tensor, ranks)


def _enter_up(name: str, tensor: Tensor, ranks: Ranks) -> Tensor:
    """Of an embedding's addition, each rank has a gradient of this matrix for its own tokens."""
    return enter(tensor, ranks) if name == EMBEDDING_UP else tensor


def _forward_with_local_parameters(
    module: nn.Module, forward: Callable[..., Any], change: Callable[[str, Tensor], Tensor], *args: Any, **keywords: Any
) -> Any:
    """A module's forward pass with each parameter replaced by its local part, as ``change`` makes it of name and part.
    Afterwards the module has its own parameters again."""
    held = dict(module._parameters)
    parameters: dict[str, Any] = module._parameters
    for name, parameter in held.items():
        if parameter is not None:
            parameters[name] = change(name, local_part(parameter))
    try:
        return forward(*args, **keywords)
    finally:
        parameters.update(held)


def _forward_columns(module: Any, ranks: Ranks, inputs: Tensor) -> Tensor:
    own = {name: local_part(parameter) for name, parameter in module._parameters.items() if parameter is not None}
    down = own.get(DOWN)
    if down is not None:  # each rank has its gradient for its own outputs
        down = enter(down, ranks)
    return compute(module, inputs, own.get("weight"), own.get("bias"), down, own.get(UP))


def _forward_rows(module: Any, tokens: _Tokens, inputs: Tensor) -> Tensor:
    own = {name: local_part(parameter) for name, parameter in module._parameters.items() if parameter is not None}
    up, whole_down, first = own.get(UP), module._parameters.get(DOWN), 0
    if up is not None:  # each rank has its gradient for its own inputs
        up = enter(up, tokens.ranks)
    if whole_down is not None:
        first = tokens.ranks.part_of(whole_down.shape[-1]).start
    output = tokens.leave(compute(module, inputs, own.get("weight"), None, own.get(DOWN), up, first))
    return output if module.bias is None else output + tokens.own(own["bias"])


def _forward_entered(forward: Callable[..., Any], name: str, tokens: _Tokens, *args: Any, **keywords: Any) -> Any:
    """A module's forward whose first argument enters."""
    if args:
        return forward(tokens.enter(args[0]), *args[1:], **keywords)
    return forward(**keywords | {name: tokens.enter(keywords[name])})


def _divide_embedding(embedding: nn.Embedding, tokens: _Tokens) -> None:
    """Let a rank look up the tokens whose rows it has; the others add zero."""
    part = tokens.ranks.part_of(embedding.num_embeddings)
    padding = embedding.padding_idx
    embedding.padding_idx = None if padding is None or not part.start <= padding < part.stop else padding - part.start
    change = partial(_enter_up, ranks=tokens.ranks)
    forward = partial(_forward_with_local_parameters, embedding, embedding.forward, change)

    def look_up(ids: Tensor) -> Tensor:
        is_local = (ids >= part.start) & (ids < part.stop)
        vectors = forward(torch.where(is_local, ids - part.start, 0))
        return tokens.leave(torch.where(is_local.unsqueeze(-1), vectors, 0))

    _let(embedding, look_up)
