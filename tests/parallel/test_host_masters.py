"""What is trained rests in host memory and is updated there: the numbers of a model that has it all beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tonnage.kernels.moments import Codec
from tonnage.kernels.streams import Stream
from tonnage.optim import gradients
from tonnage.optim.gradients import Gradients
from tonnage.optim.on_disk import StateOnDisk
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.tiers import StateInMemory, StateTier, TrainedParameter
from tonnage.parallel.homes import FileHome
from tonnage.parallel.host_blocks import HostBlocks
from tonnage.parallel.host_masters import HostMasters

CPU, WIDTH, VOCABULARY = torch.device("cpu"), 16, 11
Where = tuple[
    Callable[[Sequence[TrainedParameter], Codec], StateTier], Callable[[Sequence[TrainedParameter]], Gradients]
]


class Model(nn.Module):
    """An embedding that is the head too, and blocks between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = self.embedding(tokens)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden[:-1]), tokens[1:])


def numbers(named: dict[str, nn.Parameter]) -> None:
    with torch.no_grad():
        for name, one in named.items():
            one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) / 3)


def losses(model: Model, optimizer: ShardedOptimizer) -> list[float]:
    found = []
    for step in range(4):
        for micro_batch in range(2):
            tokens = torch.randint(VOCABULARY, (12,), generator=torch.Generator().manual_seed(2 * step + micro_batch))
            loss = model(tokens)
            optimizer.finish()
            loss.backward()
            found.append(loss.item())
        optimizer.gradients.squared_norm()
        optimizer.step(0.05)
        optimizer.gradients.clear()
    optimizer.finish()
    with torch.no_grad():
        return [*found, float(model(tokens)), float(model(tokens))]


def of_one_with_masters(
    where: Where, streams: bool, on_disk: Sequence[Path] = ()
) -> tuple[list[float], dict[str, nn.Parameter]]:
    tier, rest = where
    with torch.device("meta"):
        model = Model()
    blocks = list(model.blocks)
    there = HostBlocks(model, blocks, CPU, recomputed=0, trains=True, directories=on_disk) if streams else None
    masters = HostMasters(model, CPU, there)
    assert set(masters.parameters) == set(dict(model.named_parameters()))
    numbers(masters.parameters)
    masters.begin(model, blocks)
    assert model.head.weight is model.embedding.weight
    turns = {name: int(name.split(".")[1]) + 1 if "blocks" in name else 0 for name in masters.parameters}
    optimizer = ShardedOptimizer(
        masters.parameters,
        betas=(0.9, 0.95),
        eps=1e-8,
        decay=0.1,
        tier=tier,
        gradients=rest,
        turns=turns,
        device_copies=masters.copies,
        pages=there.home.pages if there is not None and isinstance(there.home, FileHome) else None,
    )
    masters.follow(lambda: optimizer.num_steps, optimizer.wait_for)
    for turn, module in enumerate((model, *blocks)):
        module.register_forward_pre_hook(lambda *_, turn=turn: optimizer.wait_for(turn), prepend=True)
    return losses(model, optimizer), masters.parameters


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("disk", [True, False])
def test_losses_and_weights_are_those_of_a_model_that_has_all(streams: bool, disk: bool, tmp_path: Path) -> None:
    plain = Model()
    numbers(dict(plain.named_parameters()))
    at_once = ShardedOptimizer(dict(plain.named_parameters()), betas=(0.9, 0.95), eps=1e-8, decay=0.1)
    wanted = losses(plain, at_once)
    where: Where = (StateInMemory, partial(gradients.GradientsOnHost, device=CPU, used_there=True))
    if disk:
        directories = [tmp_path]
        where = (
            partial(StateOnDisk, directories=directories),
            partial(gradients.FromDevice, directories=directories, device=CPU),
        )
    found, parameters = of_one_with_masters(where, streams, [tmp_path / "blocks"] if disk else [])
    assert found == wanted
    for name, one in plain.named_parameters():
        assert one.equal(parameters[name]), name


def test_a_gradient_that_left_last_is_found(tmp_path: Path) -> None:
    model = Model()
    named = dict(model.named_parameters())
    trained = [TrainedParameter(name, one, decay=0.0, first=0, copy=one) for name, one in named.items()]
    rest = gradients.FromDevice(trained, [tmp_path], device=CPU)
    model(torch.arange(8) % VOCABULARY).backward()
    assert rest.names() == list(named)
    assert float(rest.squared_norm()) > 0
    rest.clear()
    assert rest.names() == []


def test_gradients_leave_in_pieces_while_earlier_ones_are_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With the norms and bits of gradients in memory, of several micro-batches; to the last buffer, copies come
    first."""
    monkeypatch.setattr(gradients, "NORM_ELEMENTS", 8)
    monkeypatch.setattr(gradients, "SENT_ELEMENTS", 16)
    said = list[str]()

    class Noted(gradients.FromDevice):
        def _arrive(self) -> None:
            said.append("written")
            super()._arrive()

    class NotedLane(Stream):
        def follow(self) -> None:
            said.append("copied")
            super().follow()

    here, there = (nn.Parameter(torch.zeros(6, 7)) for _ in range(2))
    memory = gradients.GradientsInMemory([TrainedParameter("w", here, decay=0.0, first=0)])
    monkeypatch.setattr(gradients, "Stream", NotedLane)
    disk = Noted([TrainedParameter("w", there, decay=0.0, first=0, copy=there)], [tmp_path], device=CPU)
    for number in range(2):
        drawn = torch.randn(6, 7, generator=torch.Generator().manual_seed(number))
        for one in (here, there):
            (one * drawn).sum().backward()
    assert said == ["copied"] * 3 + ["written", "copied"] * 3, "three pieces of each micro-batch, three buffers"
    assert float(disk.squared_norm()) == float(memory.squared_norm())
    assert disk.local("w").equal(memory.local("w"))
    for one in (here, there):
        (one * drawn).sum().backward()
    disk.clear()
    memory.clear()
    (there * drawn).sum().backward()
    assert disk.names() == ["w"]
    assert disk.local("w").equal(drawn), "nothing of what was forgotten comes after it"


def test_parts_of_gradients_go_through_the_buffers_too(tmp_path: Path) -> None:
    """Two of one micro-batch are added up in fp32, whatever type they rest in."""
    one, other = (nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16)) for _ in range(2))
    memory = gradients.GradientsInMemory([TrainedParameter("w", one, decay=0.0, first=0)])
    disk = gradients.FromDevice([TrainedParameter("w", other, decay=0.0, first=0, copy=other)], [tmp_path], device=CPU)
    for rest, parameter in ((memory, one), (disk, other)):
        rest.divide("w", 8)
        for first in (0, 8, 16, 8):
            rest.add_part(parameter, first, torch.full((2, 4), first + 0.125))
    assert float(disk.squared_norm()) == float(memory.squared_norm())
    assert disk.local("w").equal(memory.local("w"))


def test_a_block_is_copied_when_its_update_is_made() -> None:
    """Not before, though the block before it, beside which it comes, is updated earlier."""
    with torch.device("meta"):
        model = Model()
    blocks = list(model.blocks)
    masters = HostMasters(model, CPU, HostBlocks(model, blocks, CPU, recomputed=0, trains=True))
    numbers(masters.parameters)
    masters.begin(model, blocks)
    updates, tokens = [0], torch.arange(8) % VOCABULARY
    of_block = {
        turn: [one for name, one in masters.parameters.items() if f"blocks.{turn - 1}." in name] for turn in range(1, 5)
    }
    late: set[int] = set()

    def wait_for(turn: int) -> None:
        for one in sorted(late):
            if one <= turn:
                late.remove(one)
                for parameter in of_block[one]:
                    parameter.data.add_(1)

    masters.follow(lambda: updates[0], wait_for)
    with torch.no_grad():
        before = float(model(tokens))
        updates[0], late = 1, set(of_block)
        after = float(model(tokens))
        assert not late
        assert float(model(tokens)) == after != before


def test_a_shard_without_rows_leaves_no_gradient(tmp_path: Path) -> None:
    """FSDP2 tells of its gradient as of others'."""
    one, empty = (nn.Parameter(torch.ones(rows, 4)) for rows in (2, 0))
    trained = [TrainedParameter(name, it, decay=0.0, first=0, copy=it) for name, it in (("one", one), ("empty", empty))]
    found = gradients.FromDevice(trained, [tmp_path], device=CPU)
    (one.sum() + empty.sum()).backward()
    assert found.names() == ["one"]
    found.clear()
