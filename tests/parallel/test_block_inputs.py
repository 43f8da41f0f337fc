"""Inputs of blocks in the host's memory: the same gradients, whenever they leave and come back, and little is held."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tape import Tape, put_on_tapes
from tonnage.errors import UserError
from tonnage.offload.residency import INPUTS
from tonnage.parallel import block_inputs
from tonnage.parallel.block_inputs import BlockInputs
from tonnage.parallel.recompute import recompute_blocks

CPU = torch.device("cpu")
WIDTH, NUM_BLOCKS, MOST_TOKENS = 8, 6, 10
INPUT_BYTES = MOST_TOKENS * WIDTH * 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, scale: Tensor, *, shift: float) -> Tensor:
        return hidden + torch.tanh(self.inner(hidden) * scale + shift)


def blocks(recomputed: int = NUM_BLOCKS) -> list[Block]:
    torch.manual_seed(0)
    found = [Block() for _ in range(NUM_BLOCKS)]
    recompute_blocks(found[:recomputed], "full")
    return found


def run(found: Sequence[Block], tokens: int) -> Tensor:
    torch.manual_seed(tokens)
    hidden = torch.randn(1, tokens, WIDTH).requires_grad_() * 1
    scale = torch.randn(WIDTH)
    for block in found:
        hidden = block(hidden, scale, shift=0.1)
    return hidden


def gradients(found: Sequence[Block]) -> list[Tensor]:
    """Of several micro-batches of other lengths, one of them too long and one without a backward pass."""
    for tokens in (MOST_TOKENS, 3, MOST_TOKENS + 1, 7):
        run(found, tokens).square().sum().backward()
        with torch.no_grad():
            run(found, 5)
        run(found, 4)
    return [parameter.grad.clone() for block in found for parameter in block.parameters() if parameter.grad is not None]


def taped(found: Sequence[nn.Module], *, prompt: tuple[bool, bool]) -> BlockInputs:
    with patch.object(block_inputs, "Stream", Tape):
        inputs = BlockInputs(found, INPUT_BYTES, CPU)
    put_on_tapes(inputs.ring, prompt)
    return inputs


@pytest.mark.parametrize("number", [1, 2, 4])
def test_only_inputs_of_blocks_that_are_recomputed_leave(number: int) -> None:
    here, there = blocks(), blocks(number)
    inputs = taped(there[:number], prompt=(False, False))
    for one, other in zip(gradients(here), gradients(there), strict=True):
        assert torch.equal(one, other)
    assert inputs.copied_bytes > 0
    assert inputs._rooms.shape[1] == number


@pytest.mark.parametrize("prompt", [(False, False), (False, True), (True, False), (True, True)])
def test_gradients_are_the_same_whenever_copies_are_made(prompt: tuple[bool, bool]) -> None:
    here, there = blocks(), blocks()
    inputs = taped(there, prompt=prompt)
    for one, other in zip(gradients(here), gradients(there), strict=True):
        assert torch.equal(one, other)
    assert inputs.copied_bytes > 0


@pytest.mark.parametrize("missing", ["outward", "inward"])
def test_a_lane_for_which_nobody_waits_would_be_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = blocks(), blocks()
    inputs = taped(there, prompt=(False, False))
    monkeypatch.setattr(getattr(inputs.ring, missing), "join", lambda mark: None)
    assert not all(map(torch.equal, gradients(here), gradients(there)))


def test_bytes_are_those_of_inputs_that_fit_but_the_last_do_not_come_back() -> None:
    found = blocks()
    inputs = BlockInputs(found, INPUT_BYTES, CPU)
    run(found, 5).sum().backward()
    assert inputs.copied_bytes == (NUM_BLOCKS + NUM_BLOCKS - INPUTS.slots) * 5 * WIDTH * 4
    run(found, MOST_TOKENS + 1).sum().backward()
    assert inputs.copied_bytes == (NUM_BLOCKS + NUM_BLOCKS - INPUTS.slots) * 5 * WIDTH * 4


def test_few_inputs_are_there_at_a_time() -> None:
    def most_inputs(watch: Callable[[Sequence[Block]], Any]) -> int:
        """That are there when a block begins, and at the end."""
        found = blocks()
        watch(found)
        seen: list[weakref.ref[Tensor]] = []
        most = [0]

        def note(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
            most.append(sum(one() is not None for one in seen))
            seen.append(weakref.ref(arguments[0]))

        for block in found:
            block.register_forward_pre_hook(note)
        output = run(found, 5)
        most.append(sum(one() is not None for one in seen))
        output.sum().backward()
        return max(most)

    assert most_inputs(lambda found: None) == NUM_BLOCKS
    assert most_inputs(lambda found: BlockInputs(found, INPUT_BYTES, CPU)) <= INPUTS.slots


def test_memory_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tonnage.host.locked.lock", lambda memory: 2)
    with pytest.raises(UserError, match=r"memory.activation_tier: CUDA error 2 when 0\.60 GB"):
        block_inputs.BlockInputs(blocks(), 10**8, torch.device("cuda"))


def test_several_micro_batches_are_under_way_in_a_pipeline() -> None:
    """Each finds its own inputs again, in the places of those that have ended."""

    def learnt(found: Sequence[Block]) -> list[Tensor]:
        under_way: list[Tensor] = []
        for tokens in (10, 3, 7, 5, 9, 4):
            under_way.append(run(found, tokens))
            if len(under_way) == 3:
                under_way.pop(0).square().sum().backward()
        for output in under_way:
            output.square().sum().backward()
        return [
            parameter.grad.clone() for block in found for parameter in block.parameters() if parameter.grad is not None
        ]

    here, there = blocks(), blocks()
    inputs = BlockInputs(there, INPUT_BYTES, CPU, passes=3)
    for one, other in zip(learnt(here), learnt(there), strict=True):
        assert torch.equal(one, other)
    assert inputs.copied_bytes > 0
