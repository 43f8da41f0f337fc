"""What a step holds where the config leaves it open, and what to say of a run that takes few steps.

``batch: auto`` is the most packs with which an epoch still has ``EPOCH_STEPS`` steps, but no more than ``MOST_TOKENS``,
a multiple of the workers that take packs of their own, and one for each of them at least. What is found is written into
the run's config, so a run that goes on has it too.
"""

from __future__ import annotations

import math

from tonnage.config import Batch, Config

EPOCH_STEPS = 20
MOST_TOKENS = 65536
FEW_STEPS = 10
"""In a run: fewer leave a model almost as it was."""
ENOUGH_STEPS = 20
"""What is advised where a run has few."""


def resolved(config: Config, num_packs: int | None) -> tuple[Config, str]:
    """The config with its batch written out, and why it is what it is (empty where the config says it).

    ``num_packs`` of training data; None where there is no data, only a model.
    """
    if config.batch != "auto":
        return config, ""
    workers, length = config.pack_groups, config.data.max_length
    for_tokens = MOST_TOKENS // length
    for_epoch = for_tokens if num_packs is None else num_packs // EPOCH_STEPS
    most_packs = min(for_tokens, for_epoch)
    packs = max(workers, most_packs - most_packs % workers)
    each, many = ("pack", "packs") if config.data.pack else ("conversation", "conversations")
    if packs > most_packs:
        why = f"one {each} for each of {workers} workers, the least" if workers > 1 else f"one {each}, the least"
        if num_packs is not None and for_epoch < packs:
            why += f": the data have {num_packs:,}"
    else:
        limit = f"{MOST_TOKENS:,} tokens" if for_tokens <= for_epoch else f"{EPOCH_STEPS} steps in an epoch"
        why = f"{packs:,} {many if packs > 1 else each}, the most for {limit}"
        if packs < most_packs:
            why += f" by the {workers} workers"
    launch = config.launch
    if launch.fewest_workers < launch.num_workers:
        why += f"; with fewer than {launch.num_workers} workers some take one more than others in a step"
    batch = Batch(tokens=packs * length) if config.data.pack else Batch(sequences=packs)
    return config.model_copy(update={"batch": batch}), f"auto: {why}"


def steps_of(length: float, num_steps: int) -> int:
    """Steps of a warm-up, or a decay, that is a fraction of all or, from 1 on, a number of steps."""
    return round(length * num_steps) if length < 1 else int(length)


def warnings(config: Config, *, packs_in_data: int, packs_in_run: int, num_steps: int, warmup_steps: int) -> list[str]:
    """What a batch and a length do that nobody wants, and what to set instead. ``config`` has its batch written out."""
    sentences = []
    packs, unit = config.packs_per_step, "packs" if config.data.pack else "conversations"
    if packs > packs_in_data:
        times = min(packs, packs_in_run) / packs_in_data
        repetition = f"sees them {times:.3g} times" if times > 1 else "takes all of them"
        sentences.append(
            f"a step is to hold {packs:,} {unit}, and the data have {packs_in_data:,}: each step {repetition}"
        )
    if num_steps < FEW_STEPS:
        steps = f"{num_steps} step{'s' if num_steps > 1 else ''} in the whole run"
        change = _more_steps(config, packs_in_data, packs_in_run, num_steps)
        sentences.append(f"{steps}: hardly anything is learnt in so few. {change}")
    if warmup_steps >= num_steps > 1:
        sentences.append(
            f"a warm-up of {warmup_steps:,} steps in a run of {num_steps:,}: the learning rate never reaches "
            "optimizer.lr. Lower optimizer.warmup, or write it as a fraction such as 0.03"
        )
    optimizer = config.optimizer
    decay_steps = steps_of(optimizer.decay, num_steps) if optimizer.schedule == "wsd" else 0
    if decay_steps > (left := max(0, num_steps - warmup_steps)):
        sentences.append(
            f"a decay of {decay_steps:,} steps, and warm-up leaves {left:,}: it is shortened to them. Lower "
            "optimizer.decay, or write it as a fraction such as 0.1"
        )
    return sentences


def _more_steps(config: Config, packs_in_data: int, packs_in_run: int, num_steps: int) -> str:
    """Words for the command line with which the run has ``ENOUGH_STEPS``, or as many as it can."""
    if config.steps is not None:
        return f"Set steps={ENOUGH_STEPS} or more"
    epochs = ENOUGH_STEPS * config.packs_per_step / packs_in_data
    longer = f"epochs={math.ceil(epochs) if epochs >= 1 else math.ceil(100 * epochs) / 100:g} or more"
    workers = config.pack_groups
    packs = max(workers, (fitting := packs_in_run // ENOUGH_STEPS) - fitting % workers)
    steps = math.ceil(packs_in_run / packs)
    if config.packs_per_step > packs_in_data:  # more epochs alone would show each step the same rows many times over
        packs = max(workers, packs_in_data - packs_in_data % workers)
        epochs = math.ceil(ENOUGH_STEPS * packs / packs_in_data)
        return f"Set {_batch_of(config, packs)} epochs={epochs}, or give it more rows"
    if steps < FEW_STEPS or steps <= num_steps:
        return f"Set {longer}, or give it more rows"
    return f"Set {_batch_of(config, packs)} for {steps} steps, or {longer}"


def _batch_of(config: Config, packs: int) -> str:
    """The override for so many packs, or conversations, in a step."""
    return f"batch.tokens={packs * config.data.max_length}" if config.data.pack else f"batch.sequences={packs}"
