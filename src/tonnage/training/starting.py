"""Where the additions of a run begin that begin as a part of its frozen weights: made by all workers, each its share.

A decomposition of a large matrix takes seconds to minutes, and gives other last bits on another machine, so each matrix
is decomposed by one worker, once, before anything has memory, and all of them read what it wrote (``model.starts``).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tonnage.host.quantized import Format
from tonnage.model.adapters import AdapterSpec, Target
from tonnage.model.build import seed_of, values_of
from tonnage.model.merging import Match
from tonnage.model.starts import beginning_of, tensors_of, write_index
from tonnage.parallel.world import World


def begin(
    directory: Path,
    model: PreTrainedModel,
    match: Match,
    targets: Sequence[Target],
    how: tuple[AdapterSpec, Format | None, torch.dtype, int],
    world: World,
    progress: Callable[[], None],
) -> None:
    """Write how the additions to all ``targets`` of ``model``, whose weights lie where ``match`` says, begin.

    ``how``: the adapter, the form in which frozen weights rest, the type in which they are computed with otherwise, and
    the seed of the run. ``progress`` is called after every matrix.
    """
    from safetensors.torch import save_file

    adapter, form, compute, seed = how
    if world.rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
    world.barrier()
    largest_first = sorted(targets, key=lambda target: -target.shape[0] * target.shape[1] * min(target.shape))
    own = {target.weight: target for target in largest_first[world.rank :: world.size]}
    tensors = dict[str, torch.Tensor]()
    for name, value in values_of(match, own, model):
        target = own[name]
        weight = (value if form is not None else value.to(compute)).to(world.device).float()
        weight = weight.t().contiguous() if target.lies_turned else weight
        beginning = beginning_of(weight, adapter, target.path, form, seed_of(name, seed))
        tensors |= tensors_of(target.path, beginning, adapter.init)
        progress()
    if tensors:
        save_file(tensors, directory / f"rank-{world.rank}.safetensors")
    world.barrier()
    if world.rank == 0:
        write_index(directory, adapter, sorted(directory.glob("*.safetensors")))
    world.barrier()
