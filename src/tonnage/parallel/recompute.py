"""Recompute: give up activations in the forward pass and compute them again in the backward pass.

Known elsewhere as activation (or gradient) checkpointing. A block keeps

* ``none``: everything its backward pass needs;
* ``selective``: the results of its matrix products, of attention and of sums over ranks, which are dear; the cheap
  rest (norms, rotary, activations, residual sums) is computed again from them;
* ``full``: its input only, 2 bytes a token and hidden unit in bf16; the whole forward runs twice.

Some blocks may be recomputed whole and the others keep everything. Those are the first ones. When the loss is computed
it makes no difference which they are. But in its backward pass a recomputed block has all that a kept one has kept,
while all blocks before it still hold theirs: the fewer those hold, the better. With the first ones recomputed, as much
as can be has been given up before each of their turns. With the last ones there would be a whole block more than at
the loss.

The numbers do not change: the same operations run on the same values. Nothing random happens in a block: a model's own
dropout is off, and what an adapter drops is a function of its tokens (``model.dropout``). So no random state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tonnage.model.attention import is_computed_anew

Recompute = Literal["none", "selective", "full"]

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
    }
)
"""Results that ``selective`` keeps."""
_DEAR_NAMES = frozenset(
    {
        "torch_attn::_varlen_attn",
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


def recompute_blocks(blocks: Sequence[nn.Module], mode: Recompute) -> None:
    """Let each block recompute as ``mode`` says. Names of parameters do not change."""
    if mode == "none":
        return
    more: dict[str, Any] = {}
    if mode == "selective":
        more["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **more)


def _policy(context: Any, operation: Any, *arguments: Any, **keywords: Any) -> CheckpointPolicy:
    if is_computed_anew():
        return CheckpointPolicy.PREFER_RECOMPUTE
    if operation in _DEAR or str(getattr(operation, "_schema", "")).split("(")[0] in _DEAR_NAMES:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
