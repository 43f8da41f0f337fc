"""Where the optimizer's state rests: the interface, and the tier that needs nothing, memory beside the parameters.

A tier hands out the state of a step piece by piece, to be changed in place: the last one is updated when the next one
is asked for. The update does not know which tier it works on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tonnage.kernels.adamw import LOW
from tonnage.kernels.moments import BLOCK, Codec, Moments, Momentum, cut, row_length
from tonnage.kernels.muon import Muon
from tonnage.kernels.regions import cuts_of, local_part


@dataclass(frozen=True)
class Group:
    """How parameters are updated."""

    decay: float
    """Weight decay, of those with two or more dimensions."""
    rate: float = 1.0
    """What the learning rate is multiplied by."""
    muon: Muon | None = None
    """The rule of matrices that AdamW does not update."""


@dataclass(frozen=True)
class TrainedParameter:
    """A parameter that is trained, and this rank's place in it."""

    name: str
    parameter: nn.Parameter
    decay: float
    first: int
    """Index of the shard's first element in the whole parameter, or in all of its rows that have the same columns."""
    rate: float = 1.0
    muon: Muon | None = None
    turn: int = 0
    """When a forward pass first needs it: before those with higher turns."""
    copies: int = 1
    """Ranks of the tensor and pipeline axes that hold this same part: a norm counts each of them in part."""
    noise: str = ""
    """Distinguishes its random bits from those of others: the name, and its columns where it has only some."""
    copy: nn.Parameter | None = None
    """The copy that a device computes with, where the parameter itself is in the host's memory."""

    @property
    def takes_whole_matrices(self) -> bool:
        """Whether no part of it can be updated by itself: moments come first, whole, and then weights."""
        return self.muon is not None

    @property
    def computed(self) -> nn.Parameter:
        """The tensor that gradients are computed of."""
        return self.parameter if self.copy is None else self.copy

    @property
    def ranks(self) -> int:
        """Ranks that have a part each of what a rank of a tensor axis has of it."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return 1
        return math.prod(parameter.device_mesh.size(axis) for axis, _ in cuts_of(parameter, tensor_axis=False))

    @property
    def row(self) -> int:
        """Elements that this rank has of one row of dimension 0: all its columns, or this rank's part of them."""
        return row_length(local_part(self.parameter).shape)


@dataclass(frozen=True)
class StatePiece:
    """The state of a run of elements of a parameter's shard."""

    trained: TrainedParameter
    start: int
    """First element, counted flat in the shard."""
    stop: int
    low: Tensor | None
    """The low halves of the masters, if the parameter has 16 bits (``kernels.adamw.LOW``)."""
    moments: Moments | Momentum | None
    """None: only weights are updated, by what came of moments that were handed out before."""

    def parts(self, most: int) -> Iterator[StatePiece]:
        """The same in pieces of at most about ``most`` elements, as rows and blocks of moments allow."""
        row = self.trained.row if self.moments is None else self.moments.row
        for first, end in cut(self.stop - self.start, row, max(BLOCK, most)):
            low = None if self.low is None else self.low.view(-1)[first:end]
            moments = None if self.moments is None else self.moments.part(first, end)
            yield StatePiece(self.trained, self.start + first, self.start + end, low, moments)


@dataclass(frozen=True)
class Visit:
    """A parameter whose state is handed out: all of it, or that of the moments or the weights alone."""

    trained: TrainedParameter
    part: Literal["all", "moments", "weights"] = "all"
    window: int = 0
    """Number of the matrices that are updated together."""

    def has(self, piece: StatePiece) -> bool:
        """Whether a piece is handed out in this visit."""
        return piece.trained is self.trained and (piece.moments is None) == (self.part == "weights")


def visits(trained: Iterable[TrainedParameter]) -> Iterator[Visit]:
    """In which order the state of parameters is handed out: by turns, and in each whole matrices last.

    Matrices that several ranks have parts of are updated in windows of as many, each whole on one of them.
    """
    window = 0
    by_turns = sorted(trained, key=lambda parameter: parameter.turn)
    for _, in_turn in groupby(by_turns, key=lambda parameter: parameter.turn):
        of_turn = list(in_turn)
        yield from (Visit(parameter) for parameter in of_turn if not parameter.takes_whole_matrices)
        matrices = [parameter for parameter in of_turn if parameter.takes_whole_matrices]
        while matrices:
            together, matrices = matrices[: matrices[0].ranks], matrices[matrices[0].ranks :]
            yield from (Visit(parameter, "moments", window) for parameter in together)
            yield from (Visit(parameter, "weights", window) for parameter in together)
            window += 1


class StateTier(Protocol):
    """Where state rests; by default, in memory, where nothing is waited for."""

    hands_out_copies: bool = False
    """Whether what ``tensors`` returns stays as it is when the state changes."""

    def pieces(self, names: Sequence[str]) -> Iterator[StatePiece]:
        """The state of ``names``, in the order of ``visits``, to be updated in place, each piece before the next is
        asked for."""
        ...

    def prefetch(self) -> None:
        """Begin to bring what ``pieces`` will hand out first; returns at once."""
        return

    def settle(self) -> None:
        """Wait until the pieces handed out so far are updated, unless what uses parameters is asked of their device
        later, and in the same order."""
        return

    def tensors(self) -> dict[str, Tensor]:
        """This rank's parts of all state, as ``NAME.m`` and so on, shaped as the shards are."""
        ...

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the state in ``tensors``, by the same names and shapes."""
        ...

    @property
    def state_bytes(self) -> int:
        """Bytes of state, wherever they rest."""
        ...

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for a disk."""
        return 0.0


class StateInMemory(StateTier):
    """State beside the parameters. Nothing is allocated lazily: the memory of the first step is that of every step."""

    def __init__(self, trained: Sequence[TrainedParameter], codec: Codec) -> None:
        self._pieces: dict[str, StatePiece] = {}
        self._visits = list(visits(trained))
        for one in trained:
            shard = local_part(one.parameter)
            low = torch.zeros_like(shard, dtype=LOW[shard.dtype]) if shard.dtype in LOW else None
            form = Moments if one.muon is None else Momentum
            moments = form.zeros(codec, shard.shape, shard.device)
            self._pieces[one.name] = StatePiece(one, 0, shard.numel(), low, moments)

    def pieces(self, names: Sequence[str]) -> Iterator[StatePiece]:
        selected_names = set(names)
        for visit in self._visits:
            if visit.trained.name not in selected_names:
                continue
            piece = self._pieces[visit.trained.name]
            match visit.part:
                case "all":
                    yield piece
                case "moments":
                    yield replace(piece, low=None)
                case "weights":
                    yield replace(piece, moments=None)

    def tensors(self) -> dict[str, Tensor]:
        """See ``StateTier``; not copies."""
        named: dict[str, Tensor] = {}
        for name, piece in self._pieces.items():
            assert piece.moments is not None
            named |= {f"{name}.{part}": tensor for part, tensor in piece.moments.named().items()}
            if piece.low is not None:
                named[f"{name}.low"] = piece.low
        return named

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """See ``StateTier``; nothing to do for what ``tensors`` returned."""
        for name, own in self.tensors().items():
            if tensors[name].data_ptr() != own.data_ptr():
                own.copy_(tensors[name])

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())


def content(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data
