"""What another model takes of a worker's memory while it is asked before training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tonnage.config import Config
from tonnage.decide.other_model import OtherModel
from tonnage.errors import user_error
from tonnage.host.cachedir import default_directory
from tonnage.planning.layout import PLAIN
from tonnage.planning.machine import Machine
from tonnage.planning.memory import LOADING, instants
from tonnage.planning.plan import Plan
from tonnage.planning.profile import head_chunk
from tonnage.planning.words import size

HEAP = 0.75
"""What the heap keeps of what comes and goes in a forward pass, beside that: of four passes 0.1 to 0.9 of it."""


def guest_bytes(config: Config, other: OtherModel, plan: Plan, machine: Machine) -> float:
    """Most bytes of a worker in that pass: of the weights that it shares with the others, and of forward passes."""
    import torch

    from tonnage.training.isolation import isolation_for
    from tonnage.training.weigh import Conditions, weigh_once

    cache, max_length = default_directory(), plan.data.max_length
    most_tokens = max_length * (1 + config.objective.is_preference)  # the prompt is there for each answer
    device = torch.device("cuda" if machine.kind == "cuda" and torch.cuda.is_available() else "cpu")
    isolation = isolation_for(other.config, device, max_length)
    conditions = Conditions(
        config.dtype,
        max_length,
        machine.kind,
        arrangement=isolation.arrangement,
        attention=isolation.attention,
    )
    model = weigh_once(other.config, None, conditions, cache=cache, kernels_off=config.kernels_off)
    layout = replace(
        PLAIN,
        workers=plan.workers,
        precision=config.dtype,
        device=machine.kind,
        micro_batch=plan.layout.micro_batch,
        row_tokens=plan.layout.micro_batch * most_tokens,
        arrangement=isolation.arrangement,
        attention=isolation.attention,
    )
    loading, passing = (
        next(moment.bytes for moment in instants(layout, model, evaluates=True) if moment.name == name)
        for name in (LOADING, "evaluation")
    )
    chunk = min(layout.row_tokens, head_chunk(other.config.vocab_size, trains=True))
    width = 4 + (layout.width if layout.width < 4 else 0)  # of a logit as it is computed, and in fp32
    logits = float(chunk * other.config.vocab_size * width)
    stays = passing["weights"] + passing.get("gathered", 0.0)
    in_block = passing.get("activations", 0.0) + passing.get("workspace", 0.0)
    comes = max(in_block, logits) * (1 + HEAP * (machine.kind == "cpu"))
    return max(sum(loading.values()), stays + comes) + plan.choice.runtime_bytes


def with_guest(config: Config, other: OtherModel, plan: Plan, machine: Machine) -> Plan:
    """The plan with ``guest_bytes`` among its reasons, unless the cache has what the other model is asked for.

    Raises:
        UserError: several workers have no room for it. (Of one alone, the blocks come and go then.)
    """
    entry = plan.data.teacher_path or plan.data.reference_path
    if entry is None or Path(entry).exists():
        return plan
    needed, budget = guest_bytes(config, other, plan, machine), plan.budget.usable
    if plan.workers > 1 and needed > budget:
        observed = f"{size(needed)} a worker for the {other.key} before training, and room for {size(budget)}"
        change = f"use more workers, or a smaller {other.key}"
        raise user_error(observed, "room for its weights, which workers share", change, f"objective.{other.key}")
    takes = f"it takes {size(min(needed, budget))} of a worker's memory until then"
    key = f"objective.{other.key}"
    return replace(plan, reasons=plan.reasons | {key: f"{plan.reasons[key]}; {takes}"})
