"""An account of tensors: which come and go, and what operations multiply, read and write.

It works on tensors without content as well as on others, so what a model costs is known before there is one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Heads = tuple[int, int]
"""Heads of queries, and their size."""


@dataclass(frozen=True)
class Mark:
    """What the ledger says at a moment; heights and what comes after them since the moment before."""

    live: int
    heights: list[int]
    """Bytes that were there at the moment before and whenever a tensor had come."""
    bare_heights: list[int]
    """Without gradients of parameters that are whole."""
    flops: int
    fp8_flops: int
    """Of these, in fp8."""
    fp8_numbers: int
    """That were multiplied so."""
    traffic: int
    made: int
    heads: Heads | None
    """Of attention, if that was among the operations."""


class Ledger(TorchDispatchMode):
    """Bytes of all tensors made under it that are still there, and what operations multiply, read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live = self._whole = self._flops = self._fp8_flops = self._fp8_numbers = self._traffic = self._made = 0
        self._times = 1
        self._heights, self._bare_heights = [0], [0]
        self._heads: Heads | None = None
        self._known: dict[int, int] = {}

    def mark(self) -> Mark:
        """The account since the last mark."""
        sums = self._flops, self._fp8_flops, self._fp8_numbers, self._traffic, self._made
        found = Mark(self._live, self._heights, self._bare_heights, *sums, self._heads)
        self._heads = None
        self._heights, self._bare_heights = [self._live], [self._live - self._whole]
        self._flops = self._fp8_flops = self._fp8_numbers = self._traffic = self._made = 0
        return found

    def some(self, tiles: Sequence[slice]) -> Iterator[slice]:
        """Of tiles that cost the same, the first two and the last: what the second one takes counts for all between."""
        yield tiles[0]
        if len(tiles) > 2:
            self._times = len(tiles) - 2
            yield tiles[1]
            self._times = 1
        if len(tiles) > 1:
            yield tiles[-1]

    def is_whole(self, parameter: Tensor) -> None:
        """The gradient of a parameter is."""
        assert parameter.grad is not None
        self._whole += parameter.grad.nbytes

    def leave_out(self, tensors: Iterator[Tensor]) -> None:
        """Do not count tensors that are there already."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            self._live -= self._known.get(key, 0)
            self._known[key] = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # more than half of what is asked of fake tensors
            return args[0].fake_device
        if any(map(is_traceable_wrapper_subclass_type, types)):  # torchao's fp8: what it is made of comes by itself
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for output in outputs:
            self._note(output)
        if "attention" in str(func) or "varlen_attn" in str(func):
            query = next(leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            self._heads = query.shape[1], query.shape[-1]
        if (formula := flop_registry.get(func._overloadpacket)) is not None:
            if "att" not in str(func):  # counted by length of documents, in the planner
                flops = self._times * formula(*args, **(kwargs or {}), out_val=result)
                self._flops += flops
                if func is torch.ops.aten._scaled_mm.default:
                    self._fp8_flops += flops
                    self._fp8_numbers += self._times * (args[0].numel() + args[1].numel())
        elif outputs and not _is_view(func):
            inputs = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
            self._traffic += self._times * sum(tensor.nbytes for tensor in (*inputs, *outputs))
        return result

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = size
        self._live += size
        self._made += self._times * size
        self._heights.append(self._live)
        self._bare_heights.append(self._live - self._whole)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._live -= size
        self._known.pop(key, None)


def _is_view(func: Any) -> bool:
    if func is torch.ops.aten._unsafe_view.default:
        return True
    returns = func._schema.returns
    return bool(returns) and all(one.alias_info is not None and not one.alias_info.is_write for one in returns)


@contextmanager
def pretending(device_type: str) -> Iterator[torch.device]:
    """Tensors without content, as on a CPU, or as on CUDA (whose fused attention runs on meta tensors as well)."""
    if device_type == "cuda":
        yield torch.device("meta")
    else:
        with FakeTensorMode():
            yield torch.device("cpu")
