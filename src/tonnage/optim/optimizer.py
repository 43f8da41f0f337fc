"""The optimizer over sharded parameters, with its state as named tensors: AdamW and, of matrices that it is told, Muon.

The state of each trainable parameter is the moments of the local shard (``kernels.moments``), two or, of Muon's
matrices, one; and where the parameter is of 16 bits, what is missing of its fp32 master (``kernels.adamw``). A tier
says where state rests (``tiers``), ``gradients`` where gradients do; parameters may rest on disk too
(``offload.pages``). The update is the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from tonnage.kernels import adamw as kernels
from tonnage.kernels.moments import (
    SHORTEST_ROW,
    Codec,
    Moments,
    Momentum,
    blocks_in,
    keeps_blocks,
    noise_key,
    row_length,
)
from tonnage.kernels.muon import add_momentum, add_update
from tonnage.kernels.regions import local_part, region_of
from tonnage.kernels.threads import num_threads as threads_of_loops
from tonnage.kernels.threads import use_loop_threads
from tonnage.offload.pages import Pages
from tonnage.optim import gradients as gradient_tiers
from tonnage.optim.background import Background
from tonnage.optim.gradients import Gradients
from tonnage.optim.muon import Updates
from tonnage.optim.tiers import Group, StateInMemory, StatePiece, StateTier, TrainedParameter, Visit, content, visits

AHEAD = 4
"""Parameters whose weights and gradients are brought from disk before they are updated."""


class ShardedOptimizer:
    """AdamW (decoupled decay), or Muon where a group says so, with exact fp32 masters, whatever the parameters' type.

    ``parameters`` maps names to parameters, whole or in parts (``DTensor``); int8 moments need parts of whole blocks.
    ``decay`` is applied to parameters with two or more dimensions. ``groups`` says by name which are updated otherwise:
    biases and norms of several dimensions do not decay (``model.anatomy.undecayed``). ``moments`` is how the moments
    rest, ``tier`` where the state does, ``gradients`` where gradients do; ``pages`` has the parameters whose memory is
    a file.
    ``copies`` says how many ranks of the tensor and pipeline axes hold the same part of a parameter (1 if not named).
    ``seed`` is that of the random bits which round bf16 moments. ``device_copies`` are what a device computes with, and
    has gradients of, where the parameters are in the host's memory.

    ``turns`` says in which order a forward pass needs the parameters (0 if not named). With it, an update goes on in
    the background, in this order, while the next forward pass begins, which must ``wait_for`` each turn. The numbers
    are the same: nothing is used before it is updated, and nothing updated before the norm of all gradients is known.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float],
        eps: float,
        decay: float,
        groups: Mapping[str, Group] | None = None,
        moments: Codec = "fp32",
        tier: Callable[[Sequence[TrainedParameter], Codec], StateTier] = StateInMemory,
        gradients: Callable[[Sequence[TrainedParameter]], Gradients] = gradient_tiers.GradientsInMemory,
        pages: Pages | None = None,
        turns: Mapping[str, int] | None = None,
        copies: Mapping[str, int] | None = None,
        device_copies: Mapping[str, nn.Parameter] | None = None,
        seed: int = 0,
    ) -> None:
        self.betas, self.eps, self.seed = betas, eps, seed
        self._pages = pages
        self._lazy = turns is not None
        self._background: Background | None = None
        self.waited_seconds = 0.0
        """Time in which training stood still for the disk: in an update or, in the background, waiting for one."""
        self.num_steps = 0
        """Updates made so far."""
        of_names = turns or {}, copies or {}, device_copies or {}
        group_of, usual = groups or {}, Group(decay)
        self._trained = {
            name: _trained(name, parameter, group_of.get(name, usual), *of_names)
            for name, parameter in parameters.items()
            if parameter.requires_grad
        }
        if moments == "int8" and (
            cut := [trained.name for trained in self._trained.values() if not has_whole_blocks(trained)]
        ):
            raise NotImplementedError(f"int8 moments of parts of blocks ({cut[0]}), which share a scale")
        self._visits = list(visits(self._trained.values()))
        self.tier = tier(list(self._trained.values()), moments)
        self.gradients = gradients(list(self._trained.values()))
        self._divided: dict[str, int] = {}

    def divide(self, name: str, numel: int) -> None:
        """Never hold a parameter's shard, or its gradient, in memory whole, but about ``numel`` elements at a time."""
        if name in self._trained:
            self._divided[name] = numel
            self.gradients.divide(name, numel)

    def prefetch(self) -> None:
        """Begin to bring state from where it rests; to be called while gradients are still being computed."""
        self.finish()
        self.tier.prefetch()

    def step(self, lr: float, scale: float | Tensor = 1.0) -> None:
        """One update of every parameter that has a gradient; gradients are multiplied by ``scale`` on the way.

        ``scale`` may be what the device has yet to compute, an fp32 scalar; if it is no number (NaN), nothing changes,
        and whoever learns of it must ``take_back`` the step.
        """
        self.finish()
        self.num_steps += 1
        names = sorted(self.gradients.names(), key=lambda name: self._trained[name].turn)
        work = self._update(names, lr, scale, self.num_steps, threads_of_loops())
        if self._lazy:
            self.gradients.take()
            self._background = Background(work)
        else:
            waited = self._disk_seconds()
            for _ in work:
                pass
            self.waited_seconds += self._disk_seconds() - waited

    def take_back(self) -> None:
        """The last step changed nothing, and does not count."""
        self.num_steps -= 1

    @property
    def is_unseen(self) -> bool:
        """Whether ``step`` returns before the device has made the update, or computed the scale of its gradients."""
        devices = {local_part(trained.parameter).device for trained in self._trained.values()}
        beside = isinstance(self.tier, StateInMemory) and isinstance(self.gradients, gradient_tiers.GradientsInMemory)
        has_matrices = any(trained.takes_whole_matrices for trained in self._trained.values())
        return beside and not self._lazy and not has_matrices and all(map(kernels.is_unseen, devices))

    def wait_for(self, turn: int) -> None:
        """Wait until the parameters of a turn, and of those before, are updated."""
        if self._background is not None:
            self.waited_seconds += self._background.wait(turn)

    def finish(self) -> None:
        """Wait until the update is through."""
        if self._background is not None:
            self.waited_seconds += self._background.wait()
            self._background = None

    def _update(self, names: Sequence[str], lr: float, scale: float | Tensor, step: int, threads: int) -> Iterator[int]:
        """Update ``names``; says whose turn it is before each turn."""
        use_loop_threads(threads)
        in_memory, number, of_turn, first = list[str](), -1, None, 0
        stay = isinstance(self.gradients, gradient_tiers.GradientsInMemory)  # gradients of a turn until it is over
        order, updates = self._order(names)
        for piece in self._in_parts(self.tier.pieces(names)):
            trained = piece.trained
            if number < 0 or not order[number].has(piece):
                number = next(at for at in range(number + 1, len(order)) if order[at].has(piece))
                if not stay or trained.turn != of_turn:
                    self.tier.settle()
                    yield trained.turn
                    of_turn, first = trained.turn, number
            if not piece.start or trained.name in self._divided:
                coming = [visit.trained.name for visit in order[first : number + AHEAD] if visit.part != "weights"]
                self.gradients.turn_to(coming, piece.start if first == number else 0)
                coming = [visit.trained.name for visit in order[number : number + AHEAD] if visit.part != "moments"]
                start = piece.start if order[number].part != "moments" else 0
                in_memory = self._turn_weights(in_memory, coming, start)
            hyper = kernels.Hyper(
                lr * trained.rate,
                *self.betas,
                self.eps,
                decay=trained.decay,
                step=step,
                scale=scale,
                key=noise_key(self.seed, step, trained.noise),
                first=trained.first + piece.start,
            )
            if trained.takes_whole_matrices:
                self._update_matrix(piece, hyper, updates, order[number].window)
            else:
                self._update_piece(piece, hyper)
        updates.finish_all()
        self.tier.settle()
        self.gradients.turn_to([])
        self._turn_weights(in_memory, [])

    def _order(self, names: Sequence[str]) -> tuple[list[Visit], Updates]:
        """In which order the state of ``names`` is handed out, and the updates of the matrices among them."""
        present = set(names)
        order = [visit for visit in self._visits if visit.trained.name in present]
        windows: dict[int, list[TrainedParameter]] = {}
        for visit in self._visits:  # and those of which this rank has nothing: the others need it for their updates
            is_empty = not local_part(visit.trained.parameter).numel()
            if visit.part == "moments" and (visit.trained.name in present or is_empty):
                windows.setdefault(visit.window, []).append(visit.trained)
        return order, Updates(windows)

    def _update_piece(self, piece: StatePiece, hyper: kernels.Hyper) -> None:
        assert isinstance(piece.moments, Moments)
        gradient = self._gradient(piece)
        with self._weight(piece) as weight:
            kernels.update(weight, piece.low, piece.moments, gradient, hyper)

    def _update_matrix(self, piece: StatePiece, hyper: kernels.Hyper, updates: Updates, window: int) -> None:
        """The momentum of a piece of a matrix or, once it is there of all of it, the weights."""
        trained, rule, scale = piece.trained, piece.trained.muon, float(hyper.scale)
        assert rule is not None
        if math.isnan(scale):
            return
        if isinstance(piece.moments, Momentum):
            part = updates.part(trained)[piece.start : piece.stop]
            add_momentum(piece.moments, self._gradient(piece), part, rule.momentum, scale, hyper.key, hyper.first)
            return
        updates.finish(window)
        part = updates.part(trained)[piece.start : piece.stop]
        with self._weight(piece) as weight:
            adjusted = rule.adjusted(hyper.lr, trained.parameter.shape)
            add_update(weight, piece.low, part, adjusted, 1.0 - hyper.lr * hyper.decay)

    def _gradient(self, piece: StatePiece) -> Tensor:
        """A piece's gradient, flat, which nobody holds when others are turned to."""
        return self.gradients.local(piece.trained.name).view(-1)[piece.start : piece.stop]

    def _disk_seconds(self) -> float:
        pages = 0.0 if self._pages is None else self._pages.waited_seconds
        return self.tier.waited_seconds + self.gradients.waited_seconds + pages

    def _turn_weights(self, in_memory: Sequence[str], coming: Sequence[str], start: int = 0) -> list[str]:
        """Bring the weights of ``coming`` that are on disk; of the first, those from element ``start`` on."""
        if self._pages is None:
            return []
        first = start * self._trained[coming[0]].parameter.itemsize if coming and coming[0] in self._pages else 0
        return self._pages.turn(in_memory, self._pages.ahead([name for name in coming if name in self._pages], first))

    def _in_parts(self, pieces: Iterable[StatePiece]) -> Iterator[StatePiece]:
        """Split pieces of parameters that are never in memory whole (``divide``)."""
        for piece in pieces:
            most = self._divided.get(piece.trained.name, piece.stop - piece.start)
            yield from (piece,) if piece.stop - piece.start <= most else piece.parts(most)

    @contextmanager
    def _weight(self, piece: StatePiece) -> Iterator[Tensor]:
        """The weights of a piece, to be changed in place; if they are in a file, in a copy, which is written there."""
        trained = piece.trained
        weight = local_part(trained.parameter).detach().view(-1)[piece.start : piece.stop]
        if self._pages is None or trained.name not in self._pages:
            yield weight
        else:
            changed = weight.clone()
            yield changed
            self._pages.rewrite(trained.name, piece.start * weight.itemsize, content(changed))

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, sharded as the parameters are: the state itself in memory, a mapped copy on disk.

        ``NAME.m`` and, of second moments, ``NAME.v``, with int8 moments ``NAME.m_scale`` and ``NAME.v_scale``, for a
        parameter of 16 bits ``NAME.low``. What goes on in the background is waited for.
        """
        self.finish()
        return {
            name: _like(self._trained[name.rpartition(".")[0]].parameter, shard)
            for name, shard in self.tier.tensors().items()
        }

    @property
    def tensors_are_copies(self) -> bool:
        """Whether what ``tensors`` returns stays as it is when training goes on."""
        return self.tier.hands_out_copies

    def adopt(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what ``tensors`` returned, after it was filled with other values."""
        self.tier.adopt({name: local_part(tensor) for name, tensor in tensors.items()})

    @property
    def state_bytes(self) -> int:
        """Bytes of state on this rank, wherever they rest."""
        return self.tier.state_bytes


def _trained(
    name: str,
    parameter: nn.Parameter,
    group: Group,
    turns: Mapping[str, int],
    copies: Mapping[str, int],
    device_copies: Mapping[str, nn.Parameter],
) -> TrainedParameter:
    """A parameter and this rank's place in it. Random bits begin where its rows do; parts that have other columns of
    the same rows have bits of their own."""
    shard, region = region_of(parameter)
    return TrainedParameter(
        name,
        parameter,
        decay=group.decay if parameter.dim() >= 2 else 0.0,
        rate=group.rate,
        muon=group.muon,
        first=region[0].start * row_length(shard.shape) if region else 0,
        turn=turns.get(name, 0),
        copies=copies.get(name, 1),
        noise=name + "".join(f"@{side.start}" for side in region[1:] if side.start),
        copy=device_copies.get(name),
    )


def has_whole_blocks(trained: TrainedParameter) -> bool:
    """Whether no rank has a part of a block of int8 moments."""
    row = row_length(trained.parameter.shape)
    return keeps_blocks(row, -(-row // trained.row)) if trained.row else row < SHORTEST_ROW


def _like(parameter: Tensor, shard: Tensor) -> Tensor:
    """``shard`` as a tensor distributed in the same way as ``parameter``: of its shape, or one value for a block of a
    row. It stays where it is (``DTensor.from_local`` copies what rests on the host to the device)."""
    if not isinstance(parameter, DTensor):
        return shard
    same = shard.shape == local_part(parameter).shape
    shape = parameter.shape if same else torch.Size((parameter.shape[0], blocks_in(row_length(parameter.shape))))
    form = TensorMeta(shape, torch.empty(shape, device="meta").stride(), shard.dtype)
    spec = DTensorSpec(parameter.device_mesh, parameter.placements, tensor_meta=form)
    return DTensor(shard, spec, requires_grad=False)
