"""Weigh a vision tower without its weights: what it takes to look at the images of a row, and to learn from them.

The whole tower runs forward and backward on what the processor makes of real images, sizes and positions among it, with
parameters that have no content (fake tensors): a ledger sees every tensor come and go, as in ``weigh``, and its figures
are those of a real run. On CUDA tensors are taken to be as large as on a CPU.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedConfig

from tonnage.errors import user_error
from tonnage.host.cachedir import remembered
from tonnage.model.adapters import Trains, prepare
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate_part, on_meta
from tonnage.model.files import ModelFiles
from tonnage.model.towers import TOWER
from tonnage.model.vision import AttachedTower, attach_tower
from tonnage.planning.profile import TowerCost
from tonnage.training.ledger import Ledger
from tonnage.training.weigh import move_without_content

FORMAT = 1
"""Of costs in the cache, and of how they are measured."""


def weigh_tower_once(
    config: PreTrainedConfig,
    files: ModelFiles,
    trains: Trains,
    dtype: torch.dtype,
    inputs: Mapping[str, Any],
    tokens: int,
    *,
    cache: Path,
) -> TowerCost:
    """As ``weigh_tower``; what came out is kept in ``profiles`` of ``cache`` for the next time."""
    described = [
        (name, tuple(value.shape) if value.is_floating_point() else value.tolist())
        for name, value in sorted(inputs.items())
        if isinstance(value, Tensor)
    ]
    whole = json.loads((files.directory / "config.json").read_text(encoding="utf-8"))
    versions = [version(name) for name in ("tonnage", "torch", "transformers")]
    parts = [whole, asdict(trains), str(dtype), described, tokens, FORMAT, versions]
    find = partial(weigh_tower, config, files, trains, dtype, inputs, tokens)
    return remembered((cache, "profiles", "tower-"), parts, TowerCost, find, "towers are weighed again every time")


def weigh_tower(
    config: PreTrainedConfig,
    files: ModelFiles,
    trains: Trains,
    dtype: torch.dtype,
    inputs: Mapping[str, Any],
    tokens: int,
) -> TowerCost:
    """What the tower of the model in ``files``, whose model of text ``config`` describes, takes for a row for whose
    images ``tokens`` stand, and of which its processor makes ``inputs``; ``dtype`` is that of the forward pass.

    Raises:
        UserError: the tower does not run so.
    """
    model = on_meta(copy.deepcopy(config), dtype)
    anatomy = dissect(model)
    tower = attach_tower(model, files, dtype)
    prepare(model, anatomy, trains, dtype)
    if trains.all:
        tower.requires_grad_(requires_grad=False)
    parameters = dict(tower.named_parameters())
    trained = sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad)
    frozen = [parameter for parameter in parameters.values() if not parameter.requires_grad]
    allocate_part(model, {f"{TOWER}.{name}" for name, _ in tower.named_buffers()}, torch.device("cpu"))
    _pretend(tower)
    try:
        costs = _run(tower, inputs, trains=trained > 0)
        evaluated = _run(tower, inputs, trains=False)["forward"]
    except Exception as error:  # of the tower's classes, in as many ways as there are families
        lines = str(error).strip().split("\n")
        raise user_error(
            where=f"model type {config.model_type}",
            found=f"a vision tower that cannot be weighed ({type(error).__name__}: {lines[0][:200]})",
            needed="one that runs on tensors without content",
            change="data.image_features=cached, with the tower frozen",
        ) from error
    by_token = {name: costs[name] / tokens for name in ("saved", "forward_flops", "backward_flops")}
    in_bytes = sum(value.nbytes for value in inputs.values() if isinstance(value, Tensor))
    return TowerCost(
        trained=trained,
        frozen=sum(parameter.numel() for parameter in frozen),
        frozen_bytes=sum(parameter.nbytes for parameter in frozen),
        tokens=tokens,
        forward=costs["forward"],
        backward=costs["backward"],
        bare_backward=costs["bare_backward"],
        evaluated=evaluated,
        input_bytes=in_bytes / tokens,
        **by_token,
    )


def _pretend(tower: nn.Module) -> None:
    """Let parameters be without content, on a CPU; all else is there, as what towers ask of sizes is computed."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        move_without_content(tower, torch.device("cpu"), buffers=False)


def _run(tower: AttachedTower, inputs: Mapping[str, Any], *, trains: bool) -> dict[str, float]:
    """Bytes and products of one look."""
    with Ledger() as ledger, torch.set_grad_enabled(trains):
        ledger.leave_out(iter((*tower.parameters(), *tower.buffers())))
        handles = [
            parameter.register_post_accumulate_grad_hook(ledger.is_whole)
            for parameter in tower.parameters()
            if parameter.requires_grad
        ]
        ledger.mark()
        (features,) = tower([inputs])
        features = features.clone()  # of all rows together
        forward = ledger.mark()
        costs = {"forward": max(forward.heights), "saved": forward.live, "forward_flops": forward.flops}
        if not trains:
            return costs | {"backward": 0.0, "bare_backward": 0.0, "backward_flops": 0}
        features.backward(torch.empty_like(features))
        backward = ledger.mark()
    for handle in handles:
        handle.remove()
    return costs | {
        "backward": max(backward.heights) - forward.live,
        "bare_backward": max(backward.bare_heights) - forward.live,
        "backward_flops": backward.flops,
    }
