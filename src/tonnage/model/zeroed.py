"""Rows that transformers sets to zero whenever it loads a model, whatever its files have there.

A class that initialises its padding token's row by slicing the weight does so on every load: transformers marks loaded
parameters, so that nothing draws them anew, and a slice does not bear the mark (Youtu, in transformers 5.23). What a
model computes in transformers is what it computes here. So its own initialisation is asked, on the meta device, what it
writes to parameters that are loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from tonnage.errors import user_error
from tonnage.kernels.regions import region_of

_MARK = "_is_hf_initialized"
_aten = torch.ops.aten


def zeroed_rows(model: PreTrainedModel) -> dict[str, range]:
    """The rows, by name of parameter, that transformers sets to zero when it loads ``model``, which is on the meta
    device.

    Raises:
        UserError: transformers draws a part of a loaded parameter anew.
    """
    tensors = [*model.parameters(), *model.buffers()]
    before = [(holder, holder.__dict__.pop(_MARK, None)) for holder in (*tensors, *model.modules())]
    writes = _Writes({holder.untyped_storage()._cdata: name for name, holder in model.named_parameters()})
    for tensor in tensors:
        setattr(tensor, _MARK, True)
    try:
        with writes, torch.random.fork_rng(devices=[]):
            model.initialize_weights()
    finally:
        for holder, mark in before:
            holder.__dict__.pop(_MARK, None)
            if mark is not None:
                setattr(holder, _MARK, mark)
    return {name: _rows(name, model, operation, part) for name, operation, part in writes.seen}


def zero_rows(target: Tensor, rows: range) -> None:
    """Set to zero those of ``rows`` of a parameter that this rank has."""
    local, region = region_of(target.data)
    if local.numel():
        first = region[0].start
        local[max(0, rows.start - first) : max(0, rows.stop - first)].zero_()


def _rows(name: str, model: PreTrainedModel, operation: Any, part: Tensor) -> range:
    whole = model.get_parameter(name)
    width = whole[0].numel()
    start, odd = divmod(int(part.storage_offset()), width)
    if operation is not _aten.zero_.default or odd or part.numel() % width or not part.is_contiguous():
        raise user_error(
            where=f"model type {model.config.model_type}",
            found=f"a class that changes {name} whenever transformers loads it ({operation})",
            needed="weights that are what their files say",
            change="choose another model family, or another version of transformers",
        )
    return range(start, start + part.numel() // width)


class _Writes(TorchDispatchMode):
    """Records what is written to some parameters, which it knows by their memory."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = names
        self.seen: list[tuple[str, Any, Tensor]] = []

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = operation._schema
        for argument, value in zip(schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if not is_written or not isinstance(value, Tensor):
                continue
            if name := self._names.get(value.untyped_storage()._cdata):
                self.seen.append((name, operation, value))
        return operation(*args, **(kwargs or {}))
