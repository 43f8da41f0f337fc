"""Where gradients rest between the backward pass and the update: in memory beside their parameters, or on disk.

On disk a gradient leaves as soon as it is whole: its norm is taken, its bytes go to a file, its memory is free before
the next one comes. Micro-batches add up in the file. The norm of all is then known without reading them again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from tonnage.offload.pages import Pages
from tonnage.optim.tiers import Trained, content, local

NORM_ELEMENTS = 1 << 22
"""Of a gradient whose norm is taken at a time."""


class Gradients(Protocol):
    """The gradients of a step, this rank's parts of them."""

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
        """Set aside those there are, for an update that goes on while parameters get new ones: ``local`` has them until
        ``turn_to`` has passed them."""
        ...

    def turn_to(self, coming: Sequence[str]) -> None:
        """``coming[0]`` is wanted now and the others soon, and what was wanted before is not wanted any more."""
        ...

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for a disk."""
        ...

    def clear(self, *, keep: bool = False) -> None:
        """Forget them: free their memory or, with ``keep``, set it to zero for the next step to add to."""
        ...


class InMemory:
    """Gradients where autograd puts them."""

    waited_seconds = 0.0

    def __init__(self, trained: Sequence[Trained]) -> None:
        self._trained = {one.name: one.parameter for one in trained}
        self._copies = {one.name: one.copies for one in trained}
        self._taken: dict[str, Tensor] = {}
        self._there: Sequence[str] = ()

    def names(self) -> list[str]:
        """See ``Gradients``."""
        return [name for name, one in self._trained.items() if one.grad is not None and local(one.grad).numel()]

    def local(self, name: str) -> Tensor:
        """See ``Gradients``."""
        gradient = self._taken.get(name, self._trained[name].grad)
        assert gradient is not None
        return local(gradient).contiguous()

    def squared_norm(self) -> Tensor:
        """See ``Gradients``."""
        names = self.names()
        return sum_of_squares([_norm(self.local(name)) for name in names], [self._copies[name] for name in names])

    def take(self) -> None:
        """See ``Gradients``."""
        self._taken = {name: self.local(name) for name in self.names()}
        self.clear()

    def turn_to(self, coming: Sequence[str]) -> None:
        """See ``Gradients``. All are there; those taken are freed."""
        for name in set(self._there).difference(coming):
            self._taken.pop(name, None)
        self._there = coming

    def clear(self, *, keep: bool = False) -> None:
        """See ``Gradients``."""
        for parameter in self._trained.values():
            if keep and parameter.grad is not None:
                local(parameter.grad).zero_()
            else:
                parameter.grad = None


class OnDisk:
    """Gradients that leave memory during the backward pass. Parameters must be on the CPU."""

    def __init__(self, trained: Sequence[Trained], directories: Sequence[Path]) -> None:
        """Reserve the space, and watch the parameters' gradients.

        Raises:
            UserError: not enough space.
        """
        here = {one.name: one.parameter for one in trained if local(one.parameter).numel()}
        self._copies = {one.name: one.copies for one in trained}
        self._shapes = {name: local(one).shape for name, one in here.items()}
        self._dtypes = {name: getattr(one, "grad_dtype", None) or one.dtype for name, one in here.items()}
        sizes = {name: shape.numel() * self._dtypes[name].itemsize for name, shape in self._shapes.items()}
        self.pages = Pages(sizes, directories, "gradients")
        self._norms: dict[str, Tensor] = {}
        self._there: list[str] = []
        for name, parameter in here.items():
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))

    def _take(self, name: str, parameter: Tensor) -> None:
        """A micro-batch's gradient of a parameter is whole."""
        assert parameter.grad is not None
        gradient = local(parameter.grad).detach().contiguous()
        parameter.grad = None
        if name in self._norms:
            gradient += self.local(name)
        self._norms[name] = _norm(gradient)
        self.pages.rewrite(name, 0, content(gradient))
        self.pages.rest([name])

    def names(self) -> list[str]:
        """See ``Gradients``."""
        return [name for name in self._shapes if name in self._norms]

    def local(self, name: str) -> Tensor:
        """See ``Gradients``; mapped."""
        return torch.frombuffer(self.pages.memory(name), dtype=self._dtypes[name]).view(self._shapes[name])

    def squared_norm(self) -> Tensor:
        """See ``Gradients``."""
        names = self.names()
        return sum_of_squares([self._norms[name] for name in names], [self._copies[name] for name in names])

    def take(self) -> None:
        """See ``Gradients``. They are where they were; new ones come when the update is through."""
        self.clear()

    def turn_to(self, coming: Sequence[str]) -> None:
        """See ``Gradients``."""
        self._there = turn(self.pages, self._there, coming)

    @property
    def waited_seconds(self) -> float:
        """See ``Gradients``."""
        return self.pages.waited_seconds

    def clear(self, *, keep: bool = False) -> None:
        """See ``Gradients``."""
        self._norms.clear()


def turn(pages: Pages, there: Collection[str], coming: Sequence[str]) -> list[str]:
    """Bring the first of ``coming`` and begin to read the others; what else is ``there`` rests. What is there now."""
    pages.rest([name for name in there if name not in coming])
    pages.prefetch(coming)
    if coming:
        pages.bring(coming[:1])
    return list(coming)


def _norm(gradient: Tensor) -> Tensor:
    """Norm in fp32, by pieces: of a gradient in 16 bits torch makes a copy in fp32 first."""
    pieces = gradient.view(-1).split(NORM_ELEMENTS)
    norms = torch.stack([torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces])
    norm: Tensor = torch.linalg.vector_norm(norms)
    return norm


def sum_of_squares(norms: Sequence[Tensor], copies: Sequence[int]) -> Tensor:
    """Sum of the squares of fp32 norms, each divided by its number of copies, an fp64 scalar."""
    if not norms:
        return torch.zeros((), dtype=torch.float64)
    squares = torch.stack(list(norms)).double().square()
    return (squares / torch.tensor(copies, dtype=torch.float64, device=squares.device)).sum()
