"""Checkpoints whose numbers are not weights as they stand, by the names that their makers gave them.

A tensor of a quantised layer is integers, or floats to be multiplied by scales that stand beside it. Loading what fits
and leaving the rest would train another model in silence, so all of them are refused, whoever made them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tonnage.errors import Problem
from tonnage.model.stored import StoredTensor

QUANTISATION = ("quantization_config", "compression_config")
"""Entries of a configuration that say how weights are packed."""
LAYOUTS = (
    (r"_scale_inv|\.activation_scale", "fp8 with a scale for each block"),
    (r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes\w*)", "bitsandbytes 4-bit"),
    (r"\.(SCB|weight_format)", "bitsandbytes 8-bit"),
    (r"\.(qweight|qzeros|g_idx)", "GPTQ or AWQ"),
    (r"_(blocks|scales)", "mxfp4"),
    (r"\.(weight_packed|weight_shape|weight_zero_point|weight_global_scale|weight_g_idx)", "compressed-tensors"),
    (r"\.(weight|input|output)_scale(_\w+)?", "fp8 or int8 with scales"),
    (r"\.(W_q|nbits|packing|view_as_float|unpack_view_dtype|zero)", "HQQ"),
    (r"\.(codes|codebooks)", "AQLM"),
    (r"\.(_data|_scale|_zero_point)", "quanto"),
    (r"(:|\._weight_)(qdata|scale|zero_point)", "torchao"),
    (r"\.(indices|res_indices|centroids|res_centroids)", "VPTQ"),
    (r"\.(dense_weights|row_offsets|col_vals|in_perm)", "SpQR"),
    (r"\.(scales|zeros|scale|qscale|meta)", "integers with scales"),
)
"""What quantisers put behind the name of a layer, or of its weight, and which of them do."""


def method_of(config: Any) -> str | None:
    """What the configuration of a model says that its weights are quantised with; None where it says nothing."""
    for place in (config, getattr(config, "text_config", None)):
        for name in QUANTISATION:
            entry = getattr(place, name, None)
            if not entry:
                continue
            described = entry if isinstance(entry, Mapping) else vars(entry) if hasattr(entry, "__dict__") else {}
            named = described.get("quant_method") or described.get("quant_algo") or described.get("format")
            if named == "bitsandbytes":
                return f"bitsandbytes, {'4-bit' if described.get('load_in_4bit') else '8-bit'}"
            return named[:80] if isinstance(named, str) else "a method that it does not name"
    return None


def quantised(
    unplaced: Iterable[StoredTensor],
    placed: Iterable[StoredTensor],
    is_weight: Callable[[str], bool],
    method: str | None,
    where: str,
) -> Problem | None:
    """The problem with a quantised checkpoint; None if it is none.

    ``unplaced`` is what the model has no place for, ``placed`` what it has one for, and ``method`` what its
    configuration says. ``is_weight`` tells whether a key would be that of a parameter: what stands beside other things,
    such as a tower of another kind that nobody reads, quantises nothing here.
    """
    beside = {tensor.key: layout for tensor in unplaced if (layout := _layout(tensor.key, is_weight)) is not None}
    packed = [tensor for tensor in placed if not tensor.is_float]
    if not beside and method is None and all(tensor.dtype.startswith("F8_E") for tensor in packed):
        return None  # 8-bit floats without a scale are numbers as they stand
    if not beside and not packed:
        return None
    name = method or next(iter(beside.values()), f"weights stored as {packed[0].dtype}" if packed else "")
    examples = [*sorted(beside)[:2], *(f"{tensor.key} ({tensor.dtype})" for tensor in packed[:1])]
    return Problem(
        where=where,
        found=f"a quantised checkpoint ({name}): {len(beside) + len(packed):,} tensors such as {', '.join(examples)}",
        needed="weights as they stand, in bf16, fp16 or fp32",
        change="give the original model that this one was quantised from, or have it dequantised and saved",
    )


def _layout(key: str, is_weight: Callable[[str], bool]) -> str | None:
    for pattern, name in LAYOUTS:
        match = re.search(f"({pattern})$", key)
        if match and (is_weight(stem := key[: match.start()]) or is_weight(f"{stem}.weight")):
            return name
    return None
