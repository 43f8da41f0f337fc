"""Quantisation-aware training as other programs ask torchao for it."""

from __future__ import annotations

from tonnage.migration.draft import Draft
from tonnage.migration.values import optional, text, whole

SCHEMES = {
    ("int4", None): "int4",
    ("int4", "int8"): "int8-int4",
    ("mxfp4", None): "mxfp4",
    ("mxfp4", "mxfp4"): "mxfp4",
    ("nvfp4", "nvfp4"): "nvfp4",
}
"""Types of weights and of inputs of layers, as Axolotl names them -> ``quantize_aware.scheme``."""
FIXED_GROUPS = {"mxfp4": 32, "nvfp4": 16}
AXOLOTL_GROUP = 32
"""Numbers that share a scale in Axolotl where nothing is said."""


def rounding(draft: Draft) -> None:
    """How weights are rounded in training."""
    weights = draft.first("rounded_weights", text)
    inputs = draft.first("rounded_inputs", optional(text))
    scheme = None
    if weights is not None:
        of_inputs = None if inputs is None or inputs.value is None else inputs.value.lower()
        scheme = SCHEMES.get((weights.value.lower(), of_inputs))
        if scheme is None:
            beside = f", inputs in {of_inputs}" if of_inputs else ""
            draft.refuse((weights, inputs), f"No quantize_aware.scheme has weights in {weights.value}{beside}.")
    if scheme is None:
        draft.drop_every("Belongs to qat.", "rounded_inputs", "quantize_aware.group_size", "quantize_aware.after_steps")
        return
    draft.put("quantize_aware.scheme", scheme, weights, inputs)
    if scheme in FIXED_GROUPS:
        sentence = f"Groups of {scheme} are {FIXED_GROUPS[scheme]} numbers."
        draft.only("quantize_aware.group_size", whole, FIXED_GROUPS[scheme], sentence, sentence)
    else:
        draft.copy("quantize_aware.group_size", whole)
        draft.imply("quantize_aware.group_size", AXOLOTL_GROUP, "groups of 32 are Axolotl's default")
    draft.copy("quantize_aware.after_steps", whole)
