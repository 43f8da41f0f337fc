"""Parameters that are trained, and that a device's host updates: they rest there, and the device computes with copies.

Its copies are what the model has, and what gradients are computed of. Those of blocks come and go with their
block (``host_blocks``) or, like those that no block holds, stay, and are copied anew after every update, before what
has them runs:

    device    forward and backward passes, with copies        gradients leave (``optim.gradients``)
    host      copies of what runs next                        update, in the order in which a forward pass needs it

Of what workers share each has its own shard there, and updates it; FSDP2 gathers what comes to its device
(``host_blocks.HostShards``). Of what the tensor axis divides each has its part, and a copy of that on its device. So a
device needs no room for the optimizer's state, and what a step sends over the link is weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.host.locked import locked_for
from tonnage.kernels.regions import region_of
from tonnage.kernels.streams import Stream
from tonnage.offload.residency import TILES
from tonnage.offload.ring import Home, Pairs, Ring
from tonnage.parallel.homes import FileHome, Staging, aligned
from tonnage.parallel.host_blocks import BlocksElsewhere, Elsewhere
from tonnage.parallel.parts import is_gathered, padded_shape, turned, with_local
from tonnage.parallel.tiled import TiledWeight


class _Tile(NamedTuple):
    """A tile of a weight, in one of the times that it comes."""

    weight: TiledWeight
    number: int
    time: int


class HostTiles(Home[_Tile]):
    """Tiles of some weights (``tiled``), which come to ``device`` one after another; their home.

    There is room for two on the device: the one that is computed with, and the next one. What rests on disk is copied
    into a locked buffer on its way. Nothing goes back: gradients leave tile by tile (``optim.gradients``).

        device    computes with tile 0      computes with tile 1
        stream    1 comes                   2 comes
        disk      2 is read                 3 is read
    """

    def __init__(
        self,
        weights: Sequence[TiledWeight],
        device: torch.device,
        files: FileHome | None,
    ) -> None:
        """Take room on the device and, where weights rest in ``files``, the buffers.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        largest = max(weight.part_numel * weight.parameter.itemsize for weight in weights)
        self._ring = Ring(self, Stream(device))
        size = aligned(largest)
        self._ring.open(torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(TILES.slots))
        self._files, self._times = files, 0
        self._staging = None if files is None else Staging(largest, device, "memory.parameter_tier=host")
        self.num_bytes = 0 if self._staging is None else self._staging.num_bytes
        """Of the host's memory, for buffers."""
        for weight in weights:
            weight.come_by(self.bring, device)

    def bring(self, weight: TiledWeight, order: Sequence[int]) -> Iterator[Tensor]:
        """The rows of one tile after another, for what the calling thread does next: each until the next is asked
        for."""
        self._times += 1
        tiles: list[_Tile | None] = [_Tile(weight, number, self._times) for number in order]
        for tile, following, later in zip(tiles, [*tiles[1:], None], [*tiles[2:], None, None], strict=False):
            assert tile is not None
            memory = self._ring.have(tile, following)
            if following is not None:
                self._ring.call(following, keeping=tile, following=later)
            rows = weight.own(tile.number)
            yield memory[: rows.nbytes].view(rows.dtype).view(rows.shape)

    def pairs(self, unit: _Tile, memory: Tensor) -> Pairs:
        """See ``Home``. The memory of its files is given back."""
        content = unit.weight.own(unit.number).reshape(-1).view(torch.uint8)
        self.copied_bytes += content.nbytes
        if self._staging is not None and self._files is not None:
            buffer, parts = self._staging.take()[: content.numel()], unit.weight.parts([unit.number])
            self._files.waited_seconds += self._files.pages.bring(parts)
            content = buffer.copy_(content)
            self._files.pages.rest(parts)
        return [(content, memory[: content.numel()])]

    def prefetch(self, unit: _Tile) -> None:
        if self._files is not None:
            self._files.pages.prefetch(unit.weight.parts([unit.number]))

    def sent(self, mark: Any) -> None:
        if self._staging is not None:
            self._staging.sent(mark)


@dataclass
class _Copies:
    """Copies on the device of what rests in the host's memory."""

    pairs: Sequence[tuple[Tensor, Tensor]]
    """This rank's parameters in the host's memory, each with its copy."""
    updates: Callable[[], int]
    """How many updates there were."""
    update: int = -1
    """The number of updates that the copies contain."""
    copied_bytes: int = 0

    @torch.no_grad()
    def renew(self, *_: Any) -> None:
        """Copy what was updated since. What is computed with it comes after that."""
        if self.update == (now := self.updates()):
            return
        for master, copy in self.pairs:
            copy.copy_(master, non_blocking=True)
            self.copied_bytes += copy.nbytes
        self.update = now


class HostMasters:
    """What a model trains, in the host's memory, or the home of its ``blocks``, unless these have what is frozen.

    To be made while parameters are on the meta device, but for those of ``blocks``, which rest already. All get their
    memory at once, to be filled by the caller; shards get it in ``rest``. ``begin`` replaces them in the model by a
    device's copies.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        blocks: BlocksElsewhere | None,
        tiled: Sequence[TiledWeight] = (),
    ) -> None:
        """Take the memory. Of what comes in tiles (``tiled``) the device has no copies, and it rests in files where the
        ``blocks`` do.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        self._model, self._device, self._blocks = model, device, blocks
        self._updates: Callable[[], int] = int
        self._renewed: list[_Copies] = []
        theirs = set(map(id, blocks.parameters)) if blocks is not None else set()
        self._stay = {name: parameter for name, parameter in _trained(model).items() if id(parameter) not in theirs}
        self._moves = len(self._stay) < len(_trained(model))
        """Whether the blocks have some of it, and not what is frozen."""
        self._before = dict[str, nn.Parameter]()
        """What the model had in their place."""
        in_tiles = set(map(id, (weight.parameter for weight in tiled)))
        self._tiled = tiled
        self._in_tiles = {name for name, parameter in self._stay.items() if id(parameter) in in_tiles}
        self._is_gathered = any(map(is_gathered, _trained(model).values()))
        home = blocks.home if blocks is not None else None
        self._files = home if isinstance(home, FileHome) else None
        files = {name: self._files.bytes_of(name) for name in self._in_tiles} if self._files is not None else {}
        locked = {name: parameter for name, parameter in self._stay.items() if name not in files}
        sizes = [aligned(region_of(parameter)[0].numel() * parameter.itemsize) for parameter in locked.values()]
        otherwise = " ".join(f"memory.{key}_tier=device" for key in ("parameter", "optimizer", "gradient"))
        memory = locked_for("an update by the host", sum(sizes), device, otherwise)
        self.num_bytes = memory.nbytes + (blocks.home.num_bytes if blocks is not None else 0)
        """Of the host's memory, with that of the blocks."""
        self._memory = files | {
            name: memory[end - size :] for name, size, end in zip(locked, sizes, accumulate(sizes), strict=True)
        }
        self.parameters = _trained(model)
        """By name, all in the host's memory; shards when they ``rest`` there."""
        self._tiles: HostTiles | None = None
        self.copies: dict[str, nn.Parameter] = {}
        """By name, what the model has on the device, once it has begun."""
        if not self._is_gathered:
            self.rest()

    def rest(self) -> None:
        """Give shards their memory, once all else that FSDP2 manages has its own: FSDP2 would pad whatever it sees
        before, in memory of its own. Shards of blocks ``rest`` already, and so does what is no shard."""
        if self._before:
            return
        for name, parameter in self._stay.items():
            part, _ = region_of(parameter)
            content = self._memory[name][: part.numel() * parameter.itemsize].view(parameter.dtype).view(part.shape)
            self._before[name], self._stay[name] = parameter, self._put(parameter, with_local(parameter, content))
        self.parameters = _trained(self._model)

    def begin(self, loss_model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """From now on the model, whose ``blocks`` run in ``loss_model``, has copies on the device.

        Hooks that wait for an update are to be registered later, in front of those that copy what was updated.
        """
        if self._blocks is not None:
            self._blocks.begin()
        if self._tiled:
            self._bring_tiles()
        for name, parameter in self._stay.items():
            if name not in self._in_tiles:
                self._put(parameter, self._copied(name, parameter))
        self.copies = _trained(self._model)
        if self._is_gathered:
            return
        numbered = reversed([*enumerate(blocks, start=1)])  # of what several have, the first
        inside = {id(parameter): number for number, block in numbered for parameter in block.parameters()}
        for number, module in enumerate((loss_model, *blocks)):
            names = [name for name in self._stay if inside.get(id(self.copies[name]), 0) == number]
            copied = [(self.parameters[name], self.copies[name]) for name in names if name not in self._in_tiles]
            pairs = [(region_of(master)[0], region_of(copy)[0]) for master, copy in copied]
            module.register_forward_pre_hook(self._kept(pairs).renew, prepend=True)

    def _bring_tiles(self) -> None:
        """Let tiles come to the device when they are computed with."""
        names = {id(parameter): name for name, parameter in self._stay.items()}
        if self._files is not None:
            for weight in self._tiled:
                weight.rest_in(self._files.pages, names[id(weight.parameter)])
        self._tiles = HostTiles(self._tiled, self._device, self._files)
        self.num_bytes += self._tiles.num_bytes

    def _copied(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The model's copy on the device of a parameter that stays there; FSDP2 asks for a shard's copy itself."""
        part, before = region_of(parameter)[0], self._before[name]
        if not is_gathered(parameter):
            return with_local(parameter, torch.empty_like(part, device=self._device))
        assert isinstance(parameter, DTensor)
        assert isinstance(before, DTensor)
        room = torch.zeros(padded_shape(parameter), dtype=parameter.dtype, device=self._device)
        copies = self._kept([(part, room[: len(part)])])

        def fetch() -> Tensor:
            copies.renew()
            return room

        return turned(before, Elsewhere(room.shape, parameter.dtype, self._device, fetch))

    def _kept(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> _Copies:
        """Copies that stay on the device."""
        self._renewed.append(_Copies(pairs, lambda: self._updates()))
        return self._renewed[-1]

    @property
    def copied_bytes(self) -> int:
        """To the device, so far."""
        copying: list[BlocksElsewhere | HostTiles | _Copies | None] = [self._blocks, self._tiles, *self._renewed]
        return sum(one.copied_bytes for one in copying if one is not None)

    def follow(self, updates: Callable[[], int], wait_for: Callable[[int], None], first_turn: int = 0) -> None:
        """``updates`` returns how many updates there were, and ``wait_for`` waits for that of a turn. What no block
        holds has the ``first_turn``; the blocks follow it, one turn each."""
        self._updates = updates
        if self._blocks is not None and self._moves:
            self._blocks.updates = updates
            self._blocks.await_block = lambda number: wait_for(first_turn + number + 1)

    def _put(self, parameter: nn.Parameter, replacement: nn.Parameter) -> nn.Parameter:
        """Replace a parameter of the model in every module that has it; returns the replacement."""
        for module in self._model.modules():
            for name, held in module._parameters.items():
                if held is parameter:
                    module._parameters[name] = replacement
        return replacement


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
