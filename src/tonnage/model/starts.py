"""Additions that begin as a part of the frozen weights (PiSSA), or as what quantising takes from them (LoftQ).

    pissa    W = U S V'                  A, B: its largest singular values      frozen: W - factor B A
    loftq    Q = quantised W             A, B: the largest of W - Q             frozen: Q
             of more rounds: Q = quantised (W - factor B A), and so on

(Meng et al. 2024, "PiSSA"; Li et al. 2023, "LoftQ".) Both halve the singular values between A and B, divided by the
factor by which additions are multiplied, so that frozen weight and addition together are the model as it was, or what
comes nearest to it.

What is frozen is another weight than the model's own, and follows from where the additions began. So that is kept, in
the run's directory, for as long as the run is: whoever goes on makes the same frozen weights of it, whatever a
decomposition gives on another machine, and an export is an addition to the model's own weights, ``[A A0]`` and
``[B -B0]`` of twice the rank, as peft makes of it too (``path_initial_model_for_weight_conversion``).

    start/rank-0.safetensors, ...     PATH.lora_A and PATH.lora_B, fp32; PATH.taken_A and _B where another addition
                                      was taken from the weight
    start/index.json                  how it was made, and the files with their digests
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from tonnage.errors import UserError, user_error
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.host.quantized import Format
from tonnage.kernels.quantized import pack, unpack
from tonnage.model.adapter_files import factor_of
from tonnage.model.adapters import DOWN, UP, AdapterSpec, Target

INDEX = "index.json"
TAKEN_DOWN, TAKEN_UP = "taken_A", "taken_B"


class Low(NamedTuple):
    """Two matrices whose product is an addition: (rank, in) and (out, rank)."""

    down: Tensor
    up: Tensor


class Beginning(NamedTuple):
    """How the addition to a layer begins."""

    addition: Low
    taken: Low | None
    """What is taken from the layer's weight before that is frozen."""


def largest(weight: Tensor, rank: int, factor: float, rounds: int = 0) -> Low:
    """The ``rank`` largest singular values of a matrix (out, in), fp32, as an addition that is multiplied by
    ``factor``: exactly, or with so many ``rounds`` of a randomised decomposition (``torch.svd_lowrank``)."""
    if rounds:
        left, values, right = torch.svd_lowrank(weight, rank, niter=rounds)
        right = right.t()
    else:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[:rank] / factor).sqrt()
    return Low(roots.unsqueeze(1) * right[:rank], left[:, :rank] * roots)


@torch.no_grad()
def beginning_of(weight: Tensor, adapter: AdapterSpec, path: str, form: Format | None, seed: int) -> Beginning:
    """How the addition to the layer at ``path`` begins, whose frozen ``weight`` (out, in) is fp32, and rests in a
    ``form``."""
    rank, factor = adapter.rank_of(path), adapter.factor_of(path)
    if adapter.init == "pissa":
        with torch.random.fork_rng(devices=[weight.device] if weight.device.type == "cuda" else []):
            torch.manual_seed(seed)
            addition = largest(weight, rank, factor, adapter.rounds)
        return Beginning(addition, addition)
    assert form is not None, "config.check_adapter refuses it"
    taken: Low | None = None
    for _ in range(max(1, adapter.rounds)):
        rest = weight if taken is None else weight - factor * taken.up @ taken.down
        addition = largest(weight - unpack(pack(rest, form), torch.float32), rank, factor)
        before, taken = taken, addition
    return Beginning(addition, before)


@dataclass(frozen=True)
class Index:
    """How additions began, and where that is."""

    init: Literal["pissa", "loftq"]
    rounds: int
    digests: dict[str, str]
    """Of the files, by their names."""


class Origins:
    """Where the additions of a run began, by the paths of their layers."""

    def __init__(self, directory: Path, adapter: AdapterSpec) -> None:
        """Read what lies in ``directory``.

        Raises:
            UserError: it is not there, or damaged, or was made otherwise than an ``adapter`` begins.
        """
        self._directory, self._adapter = directory, adapter
        try:
            index = read_record(directory / INDEX, Index)
            digests = {name: _digest(directory / name) for name in index.digests}
        except (UserError, OSError) as error:
            raise self._lost("files that cannot be read") from error
        if digests != index.digests or (index.init, index.rounds) != (adapter.init, adapter.rounds):
            raise self._lost("other files than those with which the run began")
        self._files = [directory / name for name in digests]

    def _lost(self, observed: str) -> UserError:
        return user_error(
            where=str(self._directory),
            found=observed,
            needed=f"where the additions of the run began (adapter.init {self._adapter.init}): what is frozen follows "
            "from it",
            change="restore the directory, or begin the run anew",
        )

    @cached_property
    def _tensors(self) -> Mapping[str, Any]:
        opened: list[Any] = [safe_open(file, framework="pt") for file in self._files]
        return {key: source for source in opened for key in source.keys()}  # noqa: SIM118

    def _low(self, path: str, down: str, up: str) -> Low | None:
        names = f"{path}.{down}", f"{path}.{up}"
        if names[0] not in self._tensors:
            return None
        return Low(*(self._tensors[name].get_tensor(name) for name in names))

    def addition(self, path: str) -> Low:
        """With what the addition to a layer began."""
        if (low := self._low(path, DOWN, UP)) is None:
            raise self._lost(f"nothing of {path}")
        return low

    def taken(self, target: Target) -> Tensor | None:
        """What was taken from the weight of a layer, of its shape, fp32; None if nothing was."""
        pissa = self._adapter.init == "pissa"
        low = self.addition(target.path) if pissa else self._low(target.path, TAKEN_DOWN, TAKEN_UP)
        if low is None:
            return None
        product = (low.up @ low.down).mul_(self._adapter.factor_of(target.path))
        return product.t() if target.lies_turned else product

    def since(self, path: str, now: Low) -> Low:
        """The addition that leads from the model as it was to that with the addition ``now`` to a layer: of twice the
        rank."""
        began = self.addition(path)
        return Low(torch.cat([now.down, began.down]), torch.cat([now.up, -began.up], dim=1))


def doubled(adapter: AdapterSpec, alpha: float, *, rank_stabilised: bool) -> tuple[AdapterSpec, float]:
    """What ``since`` makes of an adapter whose alpha is given: of twice the rank, multiplied by the same factors, which
    begins as any other; and its alpha."""
    times = 2**0.5 if rank_stabilised else 2.0
    patterns = tuple(
        replace(
            own,
            rank=2 * own.rank,
            alpha=times * own.alpha,
            factor=factor_of(2 * own.rank, times * own.alpha, rank_stabilised=rank_stabilised),
        )
        for own in adapter.patterns
    )
    rank, alpha = 2 * adapter.rank, times * alpha
    factor = factor_of(rank, alpha, rank_stabilised=rank_stabilised)
    return replace(adapter, rank=rank, factor=factor, patterns=patterns, init="zero", rounds=0), alpha


def tensors_of(path: str, beginning: Beginning, init: str) -> dict[str, Tensor]:
    """What a file has of the beginning of the addition to a layer."""
    tensors = {f"{path}.{DOWN}": beginning.addition.down, f"{path}.{UP}": beginning.addition.up}
    if init != "pissa" and beginning.taken is not None:
        tensors |= {f"{path}.{TAKEN_DOWN}": beginning.taken.down, f"{path}.{TAKEN_UP}": beginning.taken.up}
    return {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}


def write_index(directory: Path, adapter: AdapterSpec, files: Sequence[Path]) -> None:
    """Complete a start, of which all ``files`` are there."""
    assert adapter.init != "zero"
    digests = {file.name: _digest(file) for file in files}
    write_json(directory / INDEX, asdict(Index(adapter.init, adapter.rounds, digests)))


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
