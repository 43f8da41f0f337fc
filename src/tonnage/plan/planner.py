"""From a config, a model's profile and the data's numbers to a Plan. Arithmetic only: nothing is measured here."""

from __future__ import annotations

import math

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.plan.plan import DataProfile, ModelProfile, Plan

MICRO_BATCH_TOKENS = 4096
"""Tokens a forward should hold for the machine's matrix units to be busy; ``micro_batch: auto`` aims at it."""


def make_plan(config: Config, model: ModelProfile, data: DataProfile, *, threads_per_worker: int) -> Plan:
    """Decide what the run will do.

    Raises:
        UserError: the data is too small for the workers.
    """
    workers = config.launch.workers
    packs_per_step = config.packs_per_step
    num_packs = _num_packs(config, data, packs_per_step)
    if data.num_packs < workers:
        raise UserError(
            Problem(
                where="launch.workers",
                found=f"{workers} workers, {data.num_packs} packs of training data",
                needed="at least one pack for each worker",
                change=f"launch.workers={data.num_packs}, or a smaller data.max_length",
            )
        )
    packs_per_step = min(packs_per_step, num_packs)
    packs_per_worker = math.ceil(packs_per_step / workers)
    micro_batch = _micro_batch(config, packs_per_worker)
    num_steps = math.ceil(num_packs / packs_per_step)
    tokens_per_step = round(data.num_tokens / data.num_packs * packs_per_step)

    weights, gradients, optimizer = _state_bytes(
        config.precision,
        config.memory.moments,
        model.num_parameters,
        workers,
        shard=workers // config.replicas,
        zero=config.memory.zero,
        accumulates=packs_per_worker > micro_batch,
    )
    supervised = data.supervised_tokens / data.num_tokens
    return Plan(
        workers=workers,
        threads_per_worker=threads_per_worker,
        replicate=config.replicas,
        zero=config.memory.zero,
        recompute=config.memory.recompute,
        precision=config.precision,
        moments=config.memory.moments,
        optimizer_tier=config.memory.optimizer_tier,
        gradient_tier=config.memory.gradient_tier,
        parameter_tier=config.memory.parameter_tier,
        packs_per_step=packs_per_step,
        micro_batch=micro_batch,
        micro_batches_per_step=math.ceil(packs_per_worker / micro_batch),
        num_packs=num_packs,
        num_steps=num_steps,
        warmup_steps=_warmup_steps(config.optimizer.warmup, num_steps),
        tokens_per_step=tokens_per_step,
        weight_bytes_per_worker=weights,
        gradient_bytes_per_worker=gradients,
        optimizer_bytes_per_worker=optimizer,
        flops_per_step=_flops(model, tokens_per_step, tokens_per_step * supervised),
        model=model,
        data=data,
    )


def _num_packs(config: Config, data: DataProfile, packs_per_step: int) -> int:
    if config.steps is not None:
        return config.steps * packs_per_step
    assert config.epochs is not None
    return max(1, round(config.epochs * data.num_packs))


def _micro_batch(config: Config, packs_per_worker: int) -> int:
    if config.memory.micro_batch != "auto":
        return min(config.memory.micro_batch, packs_per_worker)
    return min(packs_per_worker, max(1, MICRO_BATCH_TOKENS // config.data.max_length))


def _warmup_steps(warmup: float, num_steps: int) -> int:
    return round(warmup * num_steps) if warmup < 1 else int(warmup)


MOMENT_BYTES = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / 256}
"""Bytes of both moments of a parameter; int8 ones have two fp32 scales for every 256."""


def _state_bytes(
    precision: str, moments: str, parameters: int, workers: int, *, shard: int, zero: int, accumulates: bool
) -> tuple[int, int, int]:
    """Bytes of weights, gradients and optimizer state that one worker keeps through a step.

    One worker in bf16: 2 + 2 + 10 bytes a parameter (low half of the master and two fp32 moments); gradients take 4
    where micro-batches are summed. Several workers: an fp32 master, fp32 gradients and the moments, over ``shard`` of
    them, and below ZeRO 3 the gathered weights in the compute type besides; ZeRO 1 sums micro-batches before it
    reduces, so it holds whole fp32 gradients.
    """
    if workers == 1 and precision == "bf16":
        optimizer = math.ceil((2 + MOMENT_BYTES[moments]) * parameters)
        return 2 * parameters, (4 if accumulates else 2) * parameters, optimizer
    part = math.ceil(parameters / shard)
    if zero == 3 or (workers == 1 and precision == "fp32"):
        gathered = 0
    else:
        gathered = {"bf16": 2, "fp16": 2, "fp32": 4 if shard > 1 else 0}[precision] * parameters
    gradients = parameters if zero == 1 and accumulates else part
    return 4 * part + gathered, 4 * gradients, math.ceil(MOMENT_BYTES[moments] * part)


def _flops(model: ModelProfile, tokens: float, supervised: float) -> float:
    """Products of one step, forward and backward: 6 per parameter and token; the head at supervised positions only."""
    head = model.hidden_size * model.vocab_size
    body = model.num_parameters - model.embedding_parameters - head
    return 6.0 * (body * tokens + head * supervised)
