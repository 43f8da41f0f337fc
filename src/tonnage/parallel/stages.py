"""One stage of a model: some successive blocks of it, and at the ends what comes before and after them.

A stage is the whole transformers model, still without memory, whose other parts lose their parameters and do nothing,
so that the names of its parameters are the whole model's, and the family's own forward pass runs it:

    embedding ─ block 0 ─ block 1 │ (embedding) ─ (block 0) ─ entry ─ block 2 ─ block 3 ─ norm ─ head
            first stage, exit ────┘                             └── hidden states of the stage before

The last block before a stage hands over what the stage before sent; whatever the family computed up to there (learned
positions, a scaled embedding) is thrown away. The first block after it notes what comes out. What every stage needs,
such as rotary angles, every stage computes.

An embedding that is the head as well (tied) is in the first stage and in the last; both name it as the model does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tonnage.errors import UserError, user_error
from tonnage.model.anatomy import Anatomy
from tonnage.model.attention import NAME, PackedRow


@dataclass
class Doors:
    """Where hidden states, (1, tokens, hidden), enter and leave a stage."""

    first: bool
    """Whether token ids enter instead."""
    last: bool
    """Whether the loss leaves instead."""
    hidden_size: int
    blocks_before: int = 0
    """How many are in the stages before."""
    entering: Tensor | None = field(default=None, repr=False)
    leaving: Tensor | None = field(default=None, repr=False)

    def run(
        self, backbone: nn.Module, ids: Tensor, received: Tensor | None, embedded: Tensor | None = None, **packing: Any
    ) -> Tensor:
        """The hidden states that leave a stage's backbone, for those that enter it; ``embedded`` are what tokens begin
        as, (rows, tokens, hidden), where that is not their embeddings alone."""
        if self.first and embedded is not None:
            output = backbone(inputs_embeds=embedded, use_cache=False, **packing)
        elif self.first:
            output = backbone(ids, use_cache=False, **packing)
        else:
            assert received is not None
            self.entering = received
            output = backbone(inputs_embeds=received.detach(), use_cache=False, **packing)
        hidden = output.last_hidden_state if self.last else self.leaving
        self.entering = self.leaving = None
        assert isinstance(hidden, Tensor)
        return hidden

    def enter(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Forward pass of the last block before the stage."""
        assert self.entering is not None
        return self.entering

    def leave(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Forward pass of the first block after the stage."""
        self.leaving = hidden
        return hidden


@dataclass(frozen=True)
class Stage:
    """What one stage has of a model."""

    anatomy: Anatomy
    """Its ``blocks`` are the stage's."""
    doors: Doors
    elsewhere: frozenset[str]
    """Names of the model's parameters that are in other stages alone."""
    shared: frozenset[str]
    """Names of those that are in another stage too."""


def keep_stage(model: PreTrainedModel, anatomy: Anatomy, number: int, stages: tuple[int, ...]) -> Stage:
    """Reduce ``model``, on the meta device, to a stage of it; ``stages`` are the numbers of blocks in each.

    Raises:
        UserError: the family does more between its blocks than to hand hidden states on.
    """
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    embedding = next(name for name, value in model.named_parameters() if value is anatomy.embedding.weight)
    first, last = number == 0, number == len(stages) - 1
    start = sum(stages[:number])
    stop = start + stages[number]
    before, after, hidden_size = _outside(model, anatomy)
    doors = Doors(first, last, hidden_size, start)
    tied = anatomy.tied
    for place, block in enumerate(anatomy.blocks):
        if not start <= place < stop:
            _empty(block, doors.enter if place == start - 1 else doors.leave if place == stop else _hand_on)
    for module in before if not first else ():
        _empty(module, _nothing)
    for module in after if not last else ():
        _empty(module, _hand_on)
    if not (first or (tied and last)):
        _empty(anatomy.embedding, _hand_on)
    if not (last or (tied and first)):
        _empty(anatomy.head, _hand_on)
    remaining = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    shared = {embedding} if tied and first != last else set()
    return Stage(
        replace(anatomy, blocks=anatomy.blocks[start:stop]),
        doors,
        elsewhere=frozenset(names) - remaining,
        shared=frozenset(shared),
    )


def _outside(model: PreTrainedModel, anatomy: Anatomy) -> tuple[list[nn.Module], list[nn.Module], int]:
    """Modules with parameters that run before the first block and after the last (embedding and head left out), and
    the size of the hidden states between: found by running the model without memory, its blocks standing aside."""
    inside = {id(module) for block in anatomy.blocks for module in block.modules()}
    excluded = (*inside, id(anatomy.embedding), id(anatomy.head))
    outside = [
        module
        for module in anatomy.backbone.modules()
        if id(module) not in excluded and next(module.parameters(recurse=False), None) is not None
    ]
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    passed: list[torch.Size] = []
    tokens = 2

    def aside(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        if hidden.dim() != 3 or hidden.shape[:2] != (1, tokens):  # some take the first of what a block returns
            raise _cannot_cut(model, "blocks that do not simply hand hidden states on")
        passed.append(hidden.shape)
        return hidden

    def note(module: nn.Module, *_: Any) -> None:
        (after if passed else before).append(module)

    hooks = [module.register_forward_pre_hook(note) for module in outside]
    own = [block.__dict__.get("forward") for block in anatomy.blocks]
    ids, positions = (torch.zeros(1, tokens, dtype=torch.int64, device="meta") for _ in range(2))
    packs = model.config._attn_implementation == NAME
    packed_inputs: dict[str, Any] = {"position_ids": positions, "row": PackedRow((tokens,))} if packs else {}
    try:
        for block in anatomy.blocks:
            block.forward = aside
        with torch.no_grad():
            anatomy.backbone(ids, use_cache=False, **packed_inputs)
    finally:
        for hook in hooks:
            hook.remove()
        for block, forward in zip(anatomy.blocks, own, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward
    if len(passed) != len(anatomy.blocks):
        raise _cannot_cut(model, "blocks that do not simply hand hidden states on")
    if len(before) + len(after) != len(outside) or set(before) & set(after):
        raise _cannot_cut(model, "parameters outside the blocks that are used neither only before nor only after them")
    return before, after, passed[0][-1]


def _cannot_cut(model: PreTrainedModel, observed: str) -> UserError:
    return user_error(
        where=f"parallel.pipeline, model type {model.config.model_type}",
        found=observed,
        needed="a family whose blocks follow one another",
        change="parallel.pipeline=1",
    )


def _empty(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Remove a module's parameters, buffers and children, and replace its forward pass."""
    for members in (module._parameters, module._buffers, module._modules):
        members.clear()
    module.forward = forward


def _hand_on(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _nothing(first: Any, *_: Any, **__: Any) -> Tensor:
    """Forward pass, in later stages, of what runs before the first block: whatever it returns is thrown away."""
    if isinstance(first, Tensor) and first.is_floating_point() and first.dim() == 3:
        return first
    return torch.zeros((), device=first.device if isinstance(first, Tensor) else None)
