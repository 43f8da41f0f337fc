"""Where gradients rest between the backward pass and the update: beside their parameters, in the host's memory, or on
disk.

Elsewhere a gradient leaves as soon as it is whole: its norm is taken, its bytes go, its memory is free before the next
ones come. Micro-batches add up there. The norm of all is then known without reading them again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tonnage.host.locked import locked_for, sent
from tonnage.kernels.regions import local_part
from tonnage.kernels.streams import Stream
from tonnage.offload.pages import Pages
from tonnage.offload.residency import GRADIENTS
from tonnage.offload.ring import Ring, Tensors
from tonnage.optim.tiers import TrainedParameter, content
from tonnage.optim.tiles import aligned, locked_tensors

NORM_ELEMENTS = 1 << 22
"""Elements of a gradient whose norm is taken at a time."""
LEAVING = GRADIENTS["host"].slots
"""Gradients on their way to the host's memory."""
SENT_ELEMENTS, BUFFERS = GRADIENTS["disk"].unit_bytes // 4, GRADIENTS["disk"].slots
"""Of a gradient that goes to disk at a time, whole runs of ``NORM_ELEMENTS``, and buffers through which a device's
go."""


class Gradients(Protocol):
    """The gradients of a step, this rank's parts of them; by default where autograd puts them."""

    def names(self) -> list[str]:
        """Parameters that have a gradient here, in their order."""
        ...

    def local(self, name: str) -> Tensor:
        """The gradient of a parameter's shard, contiguous."""
        ...

    def squared_norm(self) -> Tensor:
        """Sum of squares of all, an fp64 scalar. Over the ranks that hold different parts these add up: where several
        ranks of the tensor or pipeline axis hold the same part (``copies``), each has its share of the square."""
        ...

    def take(self) -> None:
        """Set the present gradients aside, for an update that goes on while new ones are computed: ``local`` returns
        them until ``turn_to`` has passed them."""
        ...

    def turn_to(self, coming: Sequence[str], first: int = 0) -> None:
        """``coming[0]`` is needed now, from its element ``first`` on, and the others soon; those before are no longer
        needed."""
        ...

    def divide(self, name: str, numel: int) -> None:
        """The gradient of a parameter's shard comes (``add_part``) and leaves in parts of so many elements."""
        return

    def add_part(self, parameter: nn.Parameter, first: int, gradient: Tensor) -> None:
        """A micro-batch's gradient of a part of a parameter's shard, from element ``first`` on, fp32 and contiguous; it
        is not the caller's any more. Several of a micro-batch add up."""
        ...

    def came(self, parameter: nn.Parameter) -> None:
        """A micro-batch's gradient of a parameter is complete; called where it was not autograd that added it."""
        return

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace the gradient of a parameter's shard by what ``change`` makes of it, before the norm is asked for."""
        ...

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for a disk."""
        return 0.0

    def settle(self) -> None:
        """Release the device's memory of those that are leaving: what is done next waits for them."""
        return

    def clear(self, *, keep: bool = False) -> None:
        """Forget them: free their memory or, with ``keep``, set it to zero for the next step to add to."""
        ...


class GradientsInMemory(Gradients):
    def __init__(self, trained: Sequence[TrainedParameter]) -> None:
        self._trained = {one.name: one.parameter for one in trained}
        self._copies = {one.name: one.copies for one in trained}
        self._taken: dict[str, Tensor] = {}
        self._divided: dict[str, int] = {}
        self._there: Sequence[str] = ()

    def names(self) -> list[str]:
        return [
            name
            for name, parameter in self._trained.items()
            if parameter.grad is not None and local_part(parameter.grad).numel()
        ]

    def local(self, name: str) -> Tensor:
        gradient = self._taken.get(name, self._trained[name].grad)
        assert gradient is not None
        return local_part(gradient).contiguous()

    def squared_norm(self) -> Tensor:
        norms = []  # as where they leave: the same bits
        for name in self.names():
            gradient = self.local(name).view(-1)
            parts = gradient.split(self._divided.get(name, gradient.numel()))
            norms += [(_norm(part), self._copies[name]) for part in parts]
        return sum_of_squares(norms)

    def take(self) -> None:
        self._taken = {name: self.local(name) for name in self.names()}
        self.clear()

    def turn_to(self, coming: Sequence[str], first: int = 0) -> None:
        """See ``Gradients``. All are there; those taken are freed."""
        for name in set(self._there).difference(coming):
            self._taken.pop(name, None)
        self._there = coming

    def divide(self, name: str, numel: int) -> None:
        self._divided[name] = numel

    @torch.no_grad()
    def add_part(self, parameter: nn.Parameter, first: int, gradient: Tensor) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=_dtype_of(parameter))
        local_part(parameter.grad).view(-1)[first : first + gradient.numel()] += gradient.view(-1)

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        gradient = self._trained[name].grad
        assert gradient is not None
        local_part(gradient).copy_(change(local_part(gradient)))

    def clear(self, *, keep: bool = False) -> None:
        for parameter in self._trained.values():
            if keep and parameter.grad is not None:
                local_part(parameter.grad).zero_()
            else:
                parameter.grad = None


class _Leaving(Gradients):
    """Gradients that leave while others are computed."""

    def __init__(self, trained: Sequence[TrainedParameter]) -> None:
        held = [one for one in trained if local_part(one.parameter).numel()]
        self._names = {id(one.computed): one.name for one in trained}
        self._copies = {one.name: one.copies for one in trained}
        self._shapes = {one.name: local_part(one.parameter).shape for one in held}
        self._dtypes = {one.name: _dtype_of(one.computed) for one in held}
        self._norms: dict[str, dict[int, Tensor]] = {}
        """By name and by where a part of it begins: 0, where it came as a whole."""
        for parameter in trained:
            parameter.computed.register_post_accumulate_grad_hook(partial(self._take, parameter.name))

    def _sizes(self) -> dict[str, int]:
        return {name: shape.numel() * self._dtypes[name].itemsize for name, shape in self._shapes.items()}

    def _take(self, name: str, parameter: Tensor) -> None:
        """A micro-batch's gradient of a parameter is complete."""
        if parameter.grad is None:  # it comes later (``parallel.deferred``), though autograd is through with it
            return
        gradient = local_part(parameter.grad).detach().contiguous()
        parameter.grad = None
        if gradient.numel():  # else it may be a view of what others were reduced with
            self._add(name, gradient)

    def _add(self, name: str, gradient: Tensor) -> None:
        """Let a whole gradient leave, added to the sum of earlier micro-batches."""
        if name in self._norms:
            gradient += self._earlier(name)
        self._norms[name] = {0: _norm(gradient)}
        self._send(name, gradient)

    def came(self, parameter: nn.Parameter) -> None:
        self._take(self._names[id(parameter)], parameter)

    @torch.no_grad()
    def add_part(self, parameter: nn.Parameter, first: int, gradient: Tensor) -> None:
        name = self._names[id(parameter)]
        norms, part = self._norms.setdefault(name, {}), slice(first, first + gradient.numel())
        if first in norms:
            gradient += self._part(name, part).view(gradient.shape)
        gradient = gradient.to(self._dtypes[name])
        norms[first] = _norm(gradient)
        self._send_part(name, part, gradient)

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        gradient = change(self.local(name))
        self.turn_to([])
        self._norms[name] = {0: _norm(gradient)}
        self._send(name, gradient)

    @abstractmethod
    def _earlier(self, name: str) -> Tensor:
        """The sum of earlier micro-batches' gradients."""

    @abstractmethod
    def _send(self, name: str, gradient: Tensor) -> None:
        """Let a gradient leave."""

    @abstractmethod
    def _part(self, name: str, part: slice) -> Tensor:
        """Elements of the sum of earlier micro-batches, flat, on the device that has the parameters."""

    @abstractmethod
    def _send_part(self, name: str, part: slice, gradient: Tensor) -> None:
        """Let some elements leave, or be added."""

    def names(self) -> list[str]:
        return [name for name in self._shapes if name in self._norms]

    def squared_norm(self) -> Tensor:
        norms = [(norm, self._copies[name]) for name in self.names() for norm in self._norms[name].values()]
        return sum_of_squares(norms)

    def take(self) -> None:
        """See ``Gradients``. They are where they were; new ones come when the update is through."""
        self.clear()

    def clear(self, *, keep: bool = False) -> None:
        self._norms.clear()


class GradientsOnDisk(_Leaving):
    """Gradients in files. Parameters must be on the CPU; ``FromDevice`` is for a device that computes with copies."""

    def __init__(self, trained: Sequence[TrainedParameter], directories: Sequence[Path]) -> None:
        """Reserve the space.

        Raises:
            UserError: not enough space.
        """
        super().__init__(trained)
        self.pages = Pages(self._sizes(), directories, "gradients")
        self._there: list[str] = []

    def _earlier(self, name: str) -> Tensor:
        return self.local(name)

    def _send(self, name: str, gradient: Tensor) -> None:
        self.pages.rewrite(name, 0, content(gradient))
        self.pages.rest([name])

    def divide(self, name: str, numel: int) -> None:
        if name in self.pages:
            self.pages.divide(name, numel * self._dtypes[name].itemsize)

    def _part(self, name: str, part: slice) -> Tensor:
        return self.local(name).view(-1)[part]

    def _send_part(self, name: str, part: slice, gradient: Tensor) -> None:
        first = part.start * gradient.itemsize
        self.pages.rewrite(name, first, content(gradient))
        self.pages.rest(self.pages.ahead([name], first)[:1])

    def local(self, name: str) -> Tensor:
        """See ``Gradients``; mapped."""
        return torch.frombuffer(self.pages.memory(name), dtype=self._dtypes[name]).view(self._shapes[name])

    def turn_to(self, coming: Sequence[str], first: int = 0) -> None:
        if coming and first:
            first *= self._dtypes[coming[0]].itemsize
        self._there = self.pages.turn(self._there, self.pages.ahead(coming, first))

    @property
    def waited_seconds(self) -> float:
        return self.pages.waited_seconds


class _Sent(NamedTuple):
    """Elements of a gradient that are on their way to the host."""

    name: str
    first: int
    """Where in the shard the gradient begins of which they are a piece."""
    elements: slice
    """Which elements of the shard they are."""
    is_last: bool
    """Whether they are the last piece of that gradient."""
    source: Tensor
    """On the device; nobody may write to it before they have left."""
    values: Tensor
    """In a buffer, when ``mark`` is passed."""
    mark: Any


class FromDevice(GradientsOnDisk):
    """Gradients of a device in files. They leave through a ring of locked buffers, piece by piece: while one is taken
    up, added to what earlier micro-batches came to and written, those after it are copied, in a stream of their own."""

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        directories: Sequence[Path],
        *,
        device: torch.device,
    ) -> None:
        """Reserve the space, and take the buffers.

        Raises:
            UserError: not enough space, or so much of the host's memory cannot be locked.
        """
        super().__init__(trained, directories)
        largest = max((shape.numel() for shape in self._shapes.values()), default=0)
        size = 4 * min(SENT_ELEMENTS, largest)
        memory = locked_for("memory.gradient_tier", BUFFERS * size, device, "memory.gradient_tier=host")
        self._buffers = cycle(memory.split(max(1, size)))
        self._outward = Stream(device)
        self._leaving = deque[_Sent]()
        self._piece_norms: list[Tensor] = []
        """Norms of pieces of what is being taken up."""
        self.copied_bytes = 0
        """To the host, so far."""

    def _add(self, name: str, gradient: Tensor) -> None:
        self._leave(name, 0, gradient.view(-1))

    @torch.no_grad()
    def add_part(self, parameter: nn.Parameter, first: int, gradient: Tensor) -> None:
        self._leave(self._names[id(parameter)], first, gradient.view(-1))

    def _leave(self, name: str, first: int, gradient: Tensor) -> None:
        """Let elements of a shard's gradient leave, from ``first`` on."""
        for start in range(0, len(gradient), SENT_ELEMENTS):
            if len(self._leaving) == BUFFERS:
                self._arrive()
            piece = gradient[start : start + SENT_ELEMENTS]
            values = next(self._buffers)[: piece.nbytes].view(piece.dtype)
            stop = start + len(piece)
            self._outward.follow()
            with self._outward:
                values.copy_(piece, non_blocking=True)
            mark, elements = self._outward.mark(), slice(first + start, first + stop)
            self._leaving.append(_Sent(name, first, elements, stop == len(gradient), piece, values, mark))
            self.copied_bytes += piece.nbytes

    @torch.no_grad()
    def _arrive(self) -> None:
        """Wait for the piece that left first, add it to the sum of earlier micro-batches, and write that."""
        transfer = self._leaving.popleft()
        transfer.mark.synchronize()
        dtype, norms = self._dtypes[transfer.name], self._norms.setdefault(transfer.name, {})
        values = transfer.values
        if transfer.first in norms:
            values += self._part(transfer.name, transfer.elements)
        values = values.to(dtype)
        self._piece_norms += _norms(values)
        start = transfer.elements.start * dtype.itemsize
        self.pages.rewrite(transfer.name, start, content(values))
        if transfer.is_last:
            norms[transfer.first], self._piece_norms = _norm_of(self._piece_norms), []
            self.pages.rest(self.pages.ahead([transfer.name], transfer.first * dtype.itemsize)[:1])

    @torch.no_grad()
    def settle(self) -> None:
        while self._leaving:
            self._arrive()

    def names(self) -> list[str]:
        self.settle()
        return super().names()

    def clear(self, *, keep: bool = False) -> None:
        """See ``Gradients``. Pieces that are still on their way are dropped."""
        self._outward.finish()
        self._leaving.clear()
        self._piece_norms = []
        super().clear()


class GradientsOnHost(_Leaving):
    """Gradients in the host's memory, locked, of exactly their size. They leave and come in streams beside the device's
    other work."""

    def __init__(
        self,
        trained: Sequence[TrainedParameter],
        *,
        device: torch.device,
        log: Callable[[str], None] = lambda message: None,
        used_there: bool = False,
    ) -> None:
        """Take the memory. ``used_there``: whether the host computes the update.

        Raises:
            UserError: so much of the host's memory cannot be locked.
        """
        super().__init__(trained)
        self._used_there = used_there
        forms = {name: (self._dtypes[name], tuple(shape)) for name, shape in self._shapes.items()}
        self._homes = locked_tensors("memory.gradient_tier", forms, device, "memory.gradient_tier=device")
        self._device = device
        outward, inward = Stream(device), Stream(device)
        self.ring = Ring(Tensors(self._homes.__getitem__, device), inward, outward, LEAVING)
        self._order: list[str] = []
        self._parts_bytes = 0
        """Of parts, which leave at once."""
        num_bytes = sum(aligned(tensor.nbytes) for tensor in self._homes.values())
        log(f"gradients in host memory: {num_bytes / 1e9:.2f} GB")

    @property
    def copied_bytes(self) -> int:
        """To the host and back, so far."""
        return self.ring.home.copied_bytes + self._parts_bytes

    def _earlier(self, name: str) -> Tensor:
        """The sum of earlier micro-batches. The next gradients begin to come, too: they become whole in the same order
        each time."""
        after = self._order.index(name) + 1
        self._call([name, *(other for other in self._order[after : after + LEAVING] if other in self._norms)])
        return self.ring.take(name)

    def _send(self, name: str, gradient: Tensor) -> None:
        if name not in self._order:
            self._order.append(name)
        self.ring.give(name, gradient)

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """See ``Gradients``. It is changed on the device, where all norms are taken."""
        self.ring.call(name)
        gradient = change(self.ring.take(name))
        self._norms[name] = {0: _norm(gradient)}
        self._send(name, gradient)

    def local(self, name: str) -> Tensor:
        """See ``Gradients``; a copy on the device, unless it is used there."""
        if self._used_there:
            if self.ring.leaving:
                self.ring.outward.finish()
            return self._homes[name]
        self.ring.call(name)
        return self.ring.have(name)

    def take(self) -> None:
        if self._used_there:
            self.ring.outward.finish()
        super().take()

    def settle(self) -> None:
        self.ring.settle()

    def _part(self, name: str, part: slice) -> Tensor:
        return self._homes[name].view(-1)[part].to(self._device)

    def _send_part(self, name: str, part: slice, gradient: Tensor) -> None:
        """At once: the memory of a part is the next one's."""
        self._parts_bytes += gradient.nbytes
        self._homes[name].view(-1)[part].copy_(gradient.view(-1))

    def turn_to(self, coming: Sequence[str], first: int = 0) -> None:
        if self._used_there:
            return
        for name in self.ring.here.keys() - set(coming):
            self.ring.drop(name)
        self._call(coming)

    def _call(self, names: Iterable[str]) -> None:
        """Begin to copy to the device what is not there."""
        for name in names:
            self.ring.call(name)

    def clear(self, *, keep: bool = False) -> None:
        super().clear()
        self.ring.settle()


def _dtype_of(parameter: nn.Parameter) -> torch.dtype:
    """The type of a parameter's gradient, summed over micro-batches."""
    dtype: torch.dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
    return dtype


def _norm(gradient: Tensor) -> Tensor:
    """Norm in fp32, by pieces: of a gradient in 16 bits torch makes a copy in fp32 first."""
    return _norm_of(_norms(gradient))


def _norms(gradient: Tensor) -> list[Tensor]:
    """Norms of the pieces of a gradient."""
    pieces = gradient.view(-1).split(NORM_ELEMENTS)
    return [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces]


def _norm_of(norms: Sequence[Tensor]) -> Tensor:
    """The norm of a gradient from those of its pieces."""
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm


def sum_of_squares(norms_and_copies: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Sum of the squares of fp32 norms, each divided by its number of copies, an fp64 scalar."""
    if not norms_and_copies:
        return torch.zeros((), dtype=torch.float64)
    norms, copies = zip(*norms_and_copies, strict=True)
    squares = torch.stack(norms).double().square()
    return (squares / sent(torch.tensor(copies, dtype=torch.float64), squares.device)).sum()
