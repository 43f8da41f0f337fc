"""What of a model stays in fp32 whatever the rest is in: routers, their corrections, sometimes norms.

transformers says it in three ways, and heeds the first two when it reads weights, though not when it builds a model
without: ``_keep_in_fp32_modules_strict`` for bf16 and fp16, ``_keep_in_fp32_modules`` for fp16, and parameters that the
model makes in fp32 itself.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import build_glob_alternation


def keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Make fp32 what transformers keeps so of the parameters and buffers of a ``model`` that was built in ``dtype`` on
    the meta device."""
    if not (plan := model._get_dtype_plan(dtype)):
        return
    named = build_glob_alternation(list(plan))[0]
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point() and named.search(f"{path}.{name}"):
                module._parameters[name] = nn.Parameter(parameter.detach().float(), parameter.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and named.search(f"{path}.{name}"):
                module._buffers[name] = buffer.float()


def kept_in_fp32(model: nn.Module, twin: PreTrainedModel) -> list[nn.Parameter]:
    """The parameters of ``model`` that are computed with in fp32: those that are fp32 in ``twin``, the same model built
    in a type of 16 bits."""
    names = {name for name, parameter in twin.named_parameters() if parameter.dtype == torch.float32}
    return [parameter for name, parameter in model.named_parameters() if name in names]
