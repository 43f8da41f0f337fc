"""Recompute: give up activations in the forward pass and compute them again in the backward pass.

Known elsewhere as activation (or gradient) checkpointing. A block keeps

* ``none``: everything its backward pass needs;
* ``selective``: the results of its matrix products, of attention and of sums over ranks, which are dear; the cheap
  rest (norms, rotary, activations, residual sums) is computed again from them, and tokens of other ranks are gathered;
* ``full``: its input only, 2 bytes a token and hidden unit in bf16; the whole forward runs twice.

Some blocks may be recomputed whole and the others keep everything. Those are the first ones. When the loss is computed
it makes no difference which they are. But in its backward pass a recomputed block has all that a kept one has kept,
while all blocks before it still hold theirs: the fewer those hold, the better. With the first ones recomputed, as much
as can be has been given up before each of their turns. With the last ones there would be a whole block more than at
the loss.

The numbers do not change: the same operations run on the same values. Nothing random happens in a block: a model's own
dropout is off, and what an adapter drops is a function of its tokens (``model.dropout``). So no random state is kept.

Some families write to the result of a product in place (``predictions += hidden_states``, in Gemma 3n). Had it been
kept, the second forward would find there what the first has left. So ``selective`` watches what is written to: a kept
result is given up when its memory changes, and computed again. torch's own selective checkpoint looks at the version
counter of the kept tensor alone, and 3D products come out of ``_unsafe_view``, whose result has a counter of its own.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from tonnage.model.attention import is_computed_anew

RecomputeMode = Literal["none", "selective", "full"]

_aten = torch.ops.aten
_DEAR = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.bmm.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        torch.ops._c10d_functional.all_reduce.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
"""Results that ``selective`` keeps."""
_DEAR_NAMES = frozenset(
    {
        "torch_attn::_varlen_attn",
        "mkldnn::_linear_pointwise",
        "tonnage::packed_attention",
        "tonnage::product_in_fp32",
        "tonnage::adapted_linear",
        "tonnage::quantized_linear",
        "tonnage::quantized_grouped_product",
        "tonnage::grouped_product",
        "aten::_grouped_mm",
    }
)
"""The same, for operations that exist only once their module is imported."""


def recompute_blocks(blocks: Sequence[nn.Module], mode: RecomputeMode) -> None:
    """Let each block recompute as ``mode`` says. Names of parameters do not change."""
    if mode == "none":
        return
    run = _run_selectively if mode == "selective" else partial(checkpoint, **_HOW)
    for block in blocks:
        block.forward = partial(run, block.forward)


_HOW: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def _run_selectively(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    results = _Results()

    def run(*args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        for output in tree_leaves(outputs):  # whoever gets them may write to them
            results.give_up(output)
        return outputs

    return checkpoint(run, *args, context_fn=lambda: (_Keep(results), _Reuse(results)), **_HOW, **kwargs)


class _Results:
    """What a block keeps: the results of each operation, in the order of its calls."""

    def __init__(self) -> None:
        self._of: dict[Any, deque[list[Any]]] = defaultdict(deque)
        self._in_memory: dict[int, list[list[Any]]] = defaultdict(list)

    def keep(self, operation: Any, result: Any) -> None:
        held = [tree_map_only(Tensor, Tensor.detach, result)]
        self._of[operation].append(held)
        for part in tree_leaves(result):
            for memory in _memory_of(part):
                self._in_memory[memory].append(held)

    def give_up(self, written: Any) -> None:
        """No longer keep what shares memory with a tensor."""
        for memory in _memory_of(written):
            for held in self._in_memory.pop(memory, ()):
                held.clear()

    def take(self, operation: Any) -> list[Any]:
        """The next result of an operation; nothing if it was given up."""
        return self._of[operation].popleft()


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, results: _Results) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._results = results


class _Keep(_Mode):
    """The forward pass."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, name in _written_by(operation):
            self._results.give_up(args[place] if place < len(args) else kwargs.get(name))
        result = operation(*args, **kwargs)
        if _is_dear(operation) and not is_computed_anew():
            self._results.keep(operation, result)
        return result


class _Reuse(_Mode):
    """The forward pass that runs again, within the backward pass."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_dear(operation) and not is_computed_anew() and (held := self._results.take(operation)):
            return held.pop()
        return operation(*args, **(kwargs or {}))


@cache
def _is_dear(operation: Any) -> bool:
    return operation in _DEAR or str(getattr(operation, "_schema", "")).split("(")[0] in _DEAR_NAMES


@cache
def _written_by(operation: Any) -> tuple[tuple[int, str], ...]:
    """Places and names of the arguments that an operation writes to."""
    schema = getattr(operation, "_schema", None)
    arguments = () if schema is None else schema.arguments
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _memory_of(value: Any) -> Iterator[int]:
    """Numbers of the memory in which a tensor, or each of a list of them, lies; a sharded one's is that of its part."""
    for part in value if isinstance(value, list | tuple) else (value,):
        if isinstance(part, DTensor):
            part = part.to_local()
        if isinstance(part, Tensor):
            yield part.untyped_storage()._cdata
