"""Find out whether a model's blocks compile, before the run depends on it.

Whether a compiler is there, and whether it can cope with a family in a data type, shows only when it is tried, and in
the backward pass only then. So one block of the model's own shape, with a small vocabulary and random weights, runs
forward and backward on each rank. Ranks agree on the outcome, since half a world compiled would be another program.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable

import torch
from transformers import PreTrainedConfig

from tonnage.errors import user_error
from tonnage.kernels.fp8 import Fp8
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.model.fp8 import compute_in_fp8
from tonnage.model.scorer import as_causal
from tonnage.model.tiny import count_layers
from tonnage.parallel.compile import Compile, compile_blocks
from tonnage.parallel.world import World
from tonnage.planning.layout import PLAIN, Layout
from tonnage.training.batch import MicroBatch
from tonnage.training.loss import LossModel

VOCABULARY = 64


def can_compile(
    mode: Compile,
    config: PreTrainedConfig,
    world: World,
    dtype: torch.dtype,
    log: Callable[[str], None],
    layout: Layout = PLAIN,
    fp8: Fp8 | None = None,
) -> bool:
    """Whether the blocks compile on every rank. Where they do not, ``auto`` says so in the log.

    Raises:
        UserError: they do not, and ``mode`` is ``on``.
    """
    reason = _trial(config, world.device, dtype, layout, fp8)
    gc.collect()  # what was tried points at itself, and has a block's memory; a worker that starts collects nothing
    reasons = [text for text in world.gather(reason) if text]
    if not reasons:
        return True
    if mode == "on":
        kind = f"{config.model_type} in {str(dtype).removeprefix('torch.')}"
        needed = "a compiler that can (gcc or clang on CPU, Triton on CUDA)"
        change = "compile: auto goes on without, compile: off does not try"
        raise user_error(f"a block of {kind} does not compile: {reasons[0]}", needed, change, "compile")
    log(f"blocks are not compiled, because one could not be: {reasons[0]}")
    return False


def _trial(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, layout: Layout, fp8: Fp8 | None) -> str:
    """Why a block does not compile; empty if it does."""
    try:
        model = build_on_meta(_one_block(config), dtype, attention_name=layout.attention)
        anatomy = dissect(model)
        if fp8 is not None:
            compute_in_fp8(model, anatomy, fp8)
        loss_model = LossModel(model, anatomy)
        compile_blocks(anatomy.blocks)
        allocate(model, device)
        initialise_randomly(model, seed=0)
        is_padded = layout.arrangement == "padded"
        ids = torch.arange(24).remainder(VOCABULARY)
        places, targets = torch.arange(12, 22), ids[13:23]
        shape, lengths = ((2, 12), (12, 12)) if is_padded else ((1, 24), (10, 14))
        batch = MicroBatch(ids.view(shape), lengths, places, targets, torch.ones(10), is_padded=is_padded)
        loss_model(batch, 10.0).backward()
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        summary = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")
        return f"{type(error).__name__}: {summary}"[:500]
    return ""


def _one_block(config: PreTrainedConfig) -> PreTrainedConfig:
    small = copy.deepcopy(as_causal(config))
    if count := count_layers(small.to_dict())[0]:
        setattr(small, count, 1)
    small.vocab_size = VOCABULARY
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(small, name, None)
    if getattr(small, "layer_types", None):
        small.layer_types = list(small.layer_types[:1])
    return small
