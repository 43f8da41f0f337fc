"""What is trained, as numbers: batch, length of the run, AdamW, schedule, precision."""

from __future__ import annotations

from contextlib import suppress
from math import ceil
from typing import Any

from tonnage.migration.draft import Conflict, Draft, Pick
from tonnage.migration.keys import DEEPSPEED
from tonnage.migration.muon import muon
from tonnage.migration.programs import AXOLOTL_YAML, in_words
from tonnage.migration.values import flag, number, numbers, optional, text, whole

COSINE_FINAL = 1e-4
"""``cos_min_ratio`` of DeepSpeed's WarmupCosineLR where it is not given."""


def batch(draft: Draft, ranks: int | None) -> None:
    """Sequences in a step: what one process holds, times accumulation, times the ``ranks`` that see different data."""
    total = draft.first("batch.sequences", whole)
    each = draft.first("memory.micro_batch", whole)
    accumulation = draft.first("accumulation", whole)
    of_worker = draft.first("batch_of_worker", whole)
    is_whole = of_worker is not None and each is not None and each.value > 0 and of_worker.value % each.value == 0
    if of_worker is not None and (accumulation is not None or not is_whole):
        draft.drop(of_worker, "gradient_accumulation_steps counts.")
    elif of_worker is not None and each is not None:
        accumulation = Pick(of_worker.value // each.value, of_worker.settings)
    picks = [pick for pick in (total, each, accumulation) if pick is not None]
    if each is not None:
        draft.put("memory.micro_batch", each.value, each)
    if draft.is_open("batch.sequences"):
        draft.leave_open("batch.sequences", "sequences in a step: other keys leave it open", *picks)
        return
    num_each = each.value if each is not None else draft.default("memory.micro_batch")
    num_accumulated = accumulation.value if accumulation is not None else _accumulated(draft, num_each, ranks)
    arithmetic = f"{num_each} x {num_accumulated} x {ranks or 'number of'} {'worker' if ranks == 1 else 'workers'}"
    if total is not None:
        draft.put("batch.sequences", total.value, *picks)
        if each is not None and accumulation is not None and ranks:
            product = each.value * accumulation.value * ranks
            if product != total.value:
                factors = f"{each.value} x {accumulation.value} x {ranks} workers"
                draft.note("another batch", total=total.value, factors=factors, product=product)
    elif num_each is None:
        if accumulation is not None:
            sentence = "sequences in a step: no file says how many one worker takes"
            draft.leave_open("batch.sequences", sentence, accumulation)
    elif ranks is None:
        sentence = f"sequences in a step: {arithmetic}, and no file says how many"
        draft.leave_open("batch.sequences", sentence, *picks, example=str(num_each * num_accumulated))
    elif picks:
        draft.put("batch.sequences", num_each * num_accumulated * ranks, *picks, note=f"{arithmetic}.")
    else:
        because = f"{in_words(draft.defaults['memory.micro_batch'])}, {arithmetic}"
        size = num_each * num_accumulated * ranks
        draft.imply("batch.sequences", size, because, "batch.sequences", "memory.micro_batch", "accumulation")
    _claim_autos(draft, "batch.sequences", "batch.sequences", "memory.micro_batch", "accumulation")


def _accumulated(draft: Draft, num_each: int | None, ranks: int | None) -> int:
    """Forwards of a worker in a step where nothing says how many."""
    least = draft.default("batch.sequences")
    if least and num_each and ranks:
        return max(1, ceil(int(least) / (num_each * ranks)))
    return int(draft.default("accumulation") or 1)


def _claim_autos(draft: Draft, key: str, *quantities: str) -> None:
    """``auto`` values that stand for a key that other keys have decided."""
    if key not in draft.tree:
        return
    for quantity in quantities:
        if autos := draft.autos(quantity):
            draft.put(key, draft.tree[key], Pick("auto", tuple(autos)))


def duration(draft: Draft) -> None:
    """Steps or epochs; ``max_steps`` decides where both are given, as in the Trainer."""
    steps = draft.first("steps", whole)
    epochs = draft.first("epochs", number)
    if steps is not None and steps.value > 0:
        draft.put("steps", steps.value, steps)
        draft.drop(epochs, "The number of steps decides.")
        return
    draft.drop(steps, "-1: the number of epochs decides.")
    if epochs is not None:
        draft.put("epochs", epochs.value, epochs)
    elif not draft.is_open("steps"):
        draft.imply_default("epochs", "steps")


def optimizer(draft: Draft) -> None:
    """AdamW or Muon: rate, decay, betas, eps, clipping, and how moments rest."""
    muon(draft)
    ds_type = draft.follow("optimizer_type", any_case=True)
    if ds_type is None:
        draft.follow("optim", any_case=True)
    else:
        draft.drop(draft.first("optim", text), f"DeepSpeed's {ds_type.value} counts.")
    _rate(draft)
    _decay(draft, has_own_optimizer=ds_type is not None)
    draft.copy("optimizer.eps", number)
    _betas(draft, knows_defaults=draft.has_arguments or ds_type is not None)
    _clip(draft)
    draft.copy("router_loss", number)
    draft.imply_default("router_loss")
    draft.imply_default("optimizer.lr", "optimizer.lr", "schedule_lr")
    draft.imply_default("optimizer.weight_decay", "optimizer.weight_decay")
    draft.imply_default("optimizer.eps", "optimizer.eps")
    if ds_type is not None and not any((draft.has_arguments, draft.autos("optimizer.lr"), draft.autos("schedule_lr"))):
        draft.imply("optimizer.lr", 1e-3, "lr 0.001 by default in DeepSpeed")
    draft.switch("bf16_moments", "memory.moments", "bf16", "Moments rest in fp32.")


EMBEDDING_RATE = 1e-6
"""Of LoRA+, where it is not given: that of additions to embeddings."""


def loraplus(draft: Draft) -> None:
    """LoRA+: the B matrices have a higher rate, and additions to embeddings one of their own."""
    ratio = draft.first("loraplus", optional(number))
    embedding = draft.first("loraplus_embedding", optional(number))
    adapter_keys = {key: value for key, value in draft.tree.items() if key.partition(".")[0] == "adapter"}
    if ratio is None or not ratio.value or not adapter_keys:
        draft.drop(ratio, "Off." if adapter_keys else "Belongs to LoRA.")
    elif "norms" in adapter_keys.get("adapter.also", ()):
        draft.refuse(ratio, "Norms that are trained beside it would have the higher rate too.")
    elif (rate := draft.tree.get("optimizer.lr")) is None:
        draft.refuse(ratio, "Nothing says the rate of the other matrices.")
    else:
        groups = [{"match": "*lora_B", "lr": rate * ratio.value}]
        targets = adapter_keys.get("adapter.targets", "all-linear")
        adapts_embedding = targets != "all-linear" and any("embed" in target for target in targets)
        if adapts_embedding:
            names = "*lora_embedding_?" if draft.program is AXOLOTL_YAML else "*lora_embedding_B"
            own = embedding.value if embedding is not None else None
            groups.append({"match": names, "lr": EMBEDDING_RATE if own is None else own})
        draft.put("optimizer.groups", groups, ratio, embedding if adapts_embedding else None)
    draft.drop(embedding, "Belongs to LoRA+ with an addition to the embedding.")


def _rate(draft: Draft) -> None:
    """The highest rate: a schedule of DeepSpeed that has one of its own sets it, whatever the optimizer was given."""
    rate, peak = draft.first("optimizer.lr", number), draft.first("schedule_lr", number)
    if rate is not None and peak is not None and rate.value != peak.value:
        shown = tuple(f"{pick.settings[0].where}: {pick.shown}" for pick in (peak, rate))
        draft.conflicts.append(Conflict(shown, shown[0]))
        draft.put("optimizer.lr", peak.value, peak)
        draft.drop(rate, f"{peak.shown} counts (see conflicts).")
    elif peak is not None or rate is not None:
        picks = [pick for pick in (rate, peak) if pick is not None]
        draft.put("optimizer.lr", picks[0].value, *picks)
    _claim_autos(draft, "optimizer.lr", "optimizer.lr", "schedule_lr")


def _decay(draft: Draft, *, has_own_optimizer: bool) -> None:
    was_auto = bool(draft.autos("optimizer.weight_decay"))
    decay = draft.copy("optimizer.weight_decay", number)
    if decay is not None and has_own_optimizer and decay.settings[0].table is not DEEPSPEED and not was_auto:
        draft.note("decay of another file", key=decay.settings[0].shown)


def _betas(draft: Draft, *, knows_defaults: bool) -> None:
    both = draft.first("optimizer.betas", numbers)
    first, second = draft.first("beta1", number), draft.first("beta2", number)
    if both is not None:
        draft.put("optimizer.betas", both.value, both)
        draft.drop((first, second), "DeepSpeed's betas count.")
    elif first is not None or second is not None:
        betas = [first.value if first else 0.9, second.value if second else 0.999]
        draft.put("optimizer.betas", betas, first, second)
        _claim_autos(draft, "optimizer.betas", "optimizer.betas")
    elif knows_defaults and (draft.has_arguments or not draft.autos("optimizer.betas")):
        draft.imply("optimizer.betas", [0.9, 0.999], "betas 0.9 and 0.999 by default", "optimizer.betas")


def _clip(draft: Draft) -> None:
    was_auto = bool(draft.autos("optimizer.clip"))
    clip = draft.copy("optimizer.clip", number)
    if clip is None and draft.files.has(DEEPSPEED) and not was_auto:
        draft.imply("optimizer.clip", 0.0, "DeepSpeed clips nothing without gradient_clipping")
    elif clip is None:
        draft.imply_default("optimizer.clip", "optimizer.clip")
    elif draft.files.has(DEEPSPEED) and clip.settings[0].table is not DEEPSPEED and not was_auto:
        draft.note("clipping of another file", key=clip.settings[0].shown)


def schedule(draft: Draft) -> None:
    """Shape and warm-up. DeepSpeed's scheduler, where there is one, is the one that runs."""
    ds_kind = draft.follow("ds_schedule", any_case=True)
    kind = draft.first("optimizer.schedule", text)
    if ds_kind is not None:
        draft.drop(kind, f"DeepSpeed's {ds_kind.value} counts.")
    elif kind is not None:
        draft.apply("optimizer.schedule", kind, any_case=True)
    else:
        draft.imply_default("optimizer.schedule")
    has_no_warmup = kind is not None and ds_kind is None and kind.value.lower() == "constant"
    _warmup(draft, ds_kind, has_no_warmup=has_no_warmup)
    _final(draft, ds_kind, kind)
    _of_shapes(draft, str(draft.tree.get("optimizer.schedule", "")) if ds_kind is None and kind is not None else "")


POLYNOMIAL_END = 1e-7
"""Where transformers' polynomial ends if nothing is said: a rate, not a fraction of the highest."""


def _of_shapes(draft: Draft, shape: str) -> None:
    """Keys of one schedule each; ``shape`` is empty where the schedule is not transformers'."""
    for quantity, owner, key, parse in (
        ("optimizer.power", "polynomial", "optimizer.power", number),
        ("optimizer.timescale", "inverse_sqrt", "optimizer.timescale", optional(whole)),
        ("optimizer.decay", "wsd", "optimizer.decay", whole),
        ("optimizer.decay_shape", "wsd", "optimizer.decay_shape", text),
        ("min_lr_ratio", "wsd", "optimizer.final", number),
    ):
        pick = draft.first(quantity, parse)
        if pick is not None and shape == owner and pick.value is not None:
            draft.put(key, pick.value, pick)
        else:
            draft.drop(pick, f"Belongs to {owner}.")
    cycles, end = draft.first("cycles", number), draft.first("lr_end", number)
    if cycles is not None and shape == "cosine_with_restarts":
        draft.put("optimizer.cycles", int(cycles.value) if cycles.value == int(cycles.value) else cycles.value, cycles)
    elif cycles is not None and shape in ("cosine", "wsd") and cycles.value != 0.5:
        draft.refuse(cycles, "A cosine falls once, from the peak to its end.")
    draft.drop(cycles, "Belongs to cosine_with_restarts.")
    if shape == "polynomial" and (peak := draft.tree.get("optimizer.lr")):
        if end is not None:
            draft.put("optimizer.final", end.value / peak, end)
        draft.imply("optimizer.final", POLYNOMIAL_END / peak, f"a polynomial ends at {POLYNOMIAL_END:g} by default")
    draft.drop(end, "Belongs to polynomial.")
    if shape == "wsd" and "optimizer.decay" not in draft.tree:
        sentence = "steps in which the rate decays: transformers has no default"
        draft.leave_open("optimizer.decay", sentence, example="0.1")


MOST_WARMUP_STEPS = 100
"""Of Axolotl's warm-up by default, which is otherwise 3% of all steps."""


def _as_axolotl_counts(draft: Draft, value: float, *, is_default: bool = False) -> float:
    """Steps of a warm-up in Axolotl, where the number of all steps is known: whole ones of a fraction, and two in the
    place of one."""
    if draft.program is not AXOLOTL_YAML:
        return value
    if value < 1 and "steps" in draft.tree:
        value = int(value * draft.tree["steps"])
        value = min(value, MOST_WARMUP_STEPS) if is_default else value
    return 2 if value == 1 else value


def _warmup(draft: Draft, ds_kind: Pick[str] | None, *, has_no_warmup: bool) -> None:
    steps = draft.first("warmup_steps", number)
    ratio = draft.first("warmup_ratio", number)
    shape = draft.follow("warmup_type", any_case=True)
    if has_no_warmup:
        draft.drop((steps, ratio), "transformers' constant schedule has no warm-up.")
        draft.imply("optimizer.warmup", 0, "the constant schedule of transformers has no warm-up")
    elif steps is not None and (steps.value > 0 or ratio is None):
        value = _as_axolotl_counts(draft, steps.value)
        draft.put("optimizer.warmup", int(value) if value == int(value) else value, steps)
        draft.drop(ratio, "The number of warm-up steps decides.")
    elif ratio is not None:
        draft.drop(steps, "0: the ratio decides.")
        if ratio.value < 1:
            draft.put("optimizer.warmup", _as_axolotl_counts(draft, ratio.value), ratio)
            _claim_autos(draft, "optimizer.warmup", "warmup_steps")
        else:
            draft.refuse(ratio, "A fraction of all steps is below 1.")
    elif draft.has_arguments:
        value = _as_axolotl_counts(draft, draft.default("optimizer.warmup"), is_default=True)
        draft.imply_default("optimizer.warmup", "warmup_steps", value=value)
        if draft.program is AXOLOTL_YAML and "steps" not in draft.tree:
            longest = round(MOST_WARMUP_STEPS / draft.default("optimizer.warmup"))
            draft.note("short warm-up", most=MOST_WARMUP_STEPS, longest=longest)
    if ds_kind is None and draft.has_arguments and draft.tree.get("optimizer.warmup"):
        draft.imply("optimizer.warmup_from", "zero", "transformers' warm-up begins at zero")
    _rise(draft, ds_kind)
    if shape is None and ds_kind is not None and "optimizer.warmup" in draft.tree and draft.tree["optimizer.warmup"]:
        draft.note("logarithmic warm-up")


def _rise(draft: Draft, ds_kind: Pick[str] | None) -> None:
    """Axolotl's quadratic warm-up, which a cosine has, whose end is zero then."""
    pick = draft.first("optimizer.warmup_shape", flag)
    if pick is None:
        return
    if not pick.value or draft.tree.get("optimizer.schedule") != "cosine" or ds_kind is not None:
        draft.drop(pick, "Off." if not pick.value else "Belongs to a cosine.")
        return
    draft.put("optimizer.warmup_shape", "quadratic", pick)
    draft.drop(draft.every("cosine_final", number), "A cosine with a quadratic warm-up ends at zero.")


def _final(draft: Draft, ds_kind: Pick[str] | None, kind: Pick[str] | None) -> None:
    final = draft.first("optimizer.final", number)
    ratio, lowest = draft.first("min_lr_rate", number), draft.first("min_lr", number)
    is_ds_cosine = ds_kind is not None and ds_kind.value.lower() == "warmupcosinelr"
    cosine = draft.first("cosine_final", number)
    if kind is not None and kind.value.lower() != "cosine":
        draft.drop(cosine, "Belongs to a cosine.")
    elif cosine is not None:
        draft.put("optimizer.final", cosine.value, cosine)
    has_minimum = ds_kind is None and kind is not None and kind.value.lower() == "cosine_with_min_lr"
    if final is not None and is_ds_cosine:
        draft.put("optimizer.final", final.value, final)
    elif final is None and is_ds_cosine:
        draft.imply("optimizer.final", COSINE_FINAL, "cos_min_ratio 0.0001 by default")
    draft.drop(final, "Belongs to WarmupCosineLR.")
    if has_minimum and ratio is not None:
        draft.put("optimizer.final", ratio.value, ratio)
    elif has_minimum and lowest is not None and draft.tree.get("optimizer.lr"):
        draft.put("optimizer.final", lowest.value / draft.tree["optimizer.lr"], lowest)
    unused = "Belongs to cosine_with_min_lr." if not has_minimum else "The other of the two counts."
    draft.drop((ratio, lowest), unused)


BOTH = ("bf16", "fp16")
HALVES = {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16", "half": "fp16"}
"""Types of weights."""
MIXED = {"no": "fp32", "false": "fp32", "fp32": "fp32"}
MIXED |= {f"{half}{end}": half for half in BOTH for end in ("", "_mixed")}
"""What ``mixed_precision`` asks for."""


def precision(draft: Draft) -> None:
    """bf16, fp16 or fp32, as flags, as Accelerate's mixed precision, or as the type of the weights; then fp8."""
    bf16, fp16 = draft.first("bf16", _on), draft.first("fp16", flag)
    mixed, dtype = draft.first("mixed_precision", text), draft.first("dtype", text)
    of_mixed = MIXED.get(mixed.value.lower(), "") if mixed is not None else ""
    half = HALVES.get(dtype.value.removeprefix("torch."), "") if dtype is not None else ""
    has_flags = bf16 is not None or fp16 is not None
    enabled = [name for pick, name in ((bf16, "bf16"), (fp16, "fp16")) if pick is not None and pick.value]
    requested = next((word for word in (*enabled, of_mixed, half) if word in BOTH), "")
    if not requested and draft.default("precision") == "bf16" and not has_flags:
        draft.imply_default("precision", "bf16")
    elif not requested and (draft.has_arguments or has_flags or mixed is not None or draft.files.has(DEEPSPEED)):
        requested = "" if draft.autos("bf16") and not draft.has_arguments else "fp32"
    if requested == "fp32" and not has_flags and mixed is None:
        draft.imply("precision", "fp32", "fp32 by default", "bf16", "fp16")
    chosen = draft.tree.get("precision") or requested
    for pick, name in ((bf16, "bf16"), (fp16, "fp16")):
        if pick is None:
            continue
        if pick.value and chosen != name:
            draft.refuse(pick, f"precision is {chosen}: bf16 and fp16 were both asked for.")
        elif pick.value == (chosen == name) and chosen and (pick.value or chosen == "fp32"):
            draft.put("precision", chosen, pick)
        else:
            draft.drop(pick, f"Off; precision is {chosen or 'left open'}.")
    if mixed is not None and not of_mixed:
        draft.refuse(mixed, f"bf16, fp16 or fp32, not {mixed.value}.")
    elif mixed is not None and of_mixed == chosen:
        draft.put("precision", chosen, mixed)
    draft.drop(mixed, f"Other keys make it {chosen}.")
    if half and half == requested and not has_flags and mixed is None:
        draft.put("precision", requested, dtype)
    draft.drop(dtype, "Weights rest in the precision of the run, beside an fp32 master.")
    _claim_autos(draft, "precision", "bf16", "fp16")
    _loss_scale(draft)
    _products(draft)


def _products(draft: Draft) -> None:
    """Products in fp8, where all else is in bf16."""
    fp8, usual = draft.first("fp8", flag), draft.tree.get("precision")
    if fp8 is not None and fp8.value and usual == "bf16":
        draft.withdraw("precision", "Products are in fp8, all else in bf16.")
        draft.put("precision", "fp8", fp8)
        draft.note("products in fp8", program=draft.program.name)
    elif fp8 is not None and fp8.value:
        draft.refuse(fp8, f"Products in fp8 go with bf16; precision is {usual or 'left open'}.")
    draft.drop(fp8, "Off.")


def _on(value: Any) -> bool:
    """A flag; Axolotl's ``auto`` is true on every device that has the type, and ``full`` is evaluation in it too."""
    return True if str(value).lower() in ("auto", "full") else flag(value)


LARGEST_POWER = 64
"""Of two, as a loss scale: fp16 itself ends at 2**16."""


def _loss_scale(draft: Draft) -> None:
    power, window = draft.first("optimizer.loss_scale", whole), draft.first("optimizer.loss_scale_growth", whole)
    if draft.tree.get("precision") != "fp16":
        draft.drop((power, window), "fp16 is off.")
        return
    if power is not None and not 0 <= power.value <= LARGEST_POWER:
        draft.refuse(power, f"A power of two from 0 to {LARGEST_POWER}.")
    elif power is not None:
        draft.put("optimizer.loss_scale", float(2**power.value), power)
    if window is not None:
        draft.put("optimizer.loss_scale_growth", window.value, window)


def steps_of(draft: Draft, value: float) -> int | None:
    """A number of steps; a fraction below 1 is one of all steps, None if those are not known."""
    if value >= 1:
        return int(value)
    return ceil(value * draft.tree["steps"]) if "steps" in draft.tree else None


def per_epoch(draft: Draft, quantity: str) -> tuple[Pick[float], float] | None:
    """What happens so many times an epoch, as a fraction of all steps; of a run counted in steps, as if those were its
    epochs, which is what Axolotl does."""
    pick = draft.first(quantity, number)
    if pick is None:
        return None
    if pick.value <= 0:
        draft.drop(pick, "Never.")
        return None
    return pick, 1.0 / (pick.value * _epochs(draft))


def _epochs(draft: Draft) -> float:
    """Passes over the data that are written, also where a number of steps decides."""
    for setting in draft.settings("epochs"):
        with suppress(ValueError):
            if (epochs := number(setting.value)) > 0:
                return epochs
    return float(draft.default("epochs") or 1.0)


def sampling(draft: Draft) -> None:
    """The order of rows."""
    draft.follow("sampling", any_case=True)
    draft.imply_default("data.order")


def seeds(draft: Draft) -> None:
    seed = draft.copy("seed", whole)
    order = draft.first("data_seed", lambda value: None if value in (None, "None") else whole(value))
    if order is None:
        return
    if order.value is None or (seed is not None and order.value == seed.value):
        draft.drop(order, "seed decides.")
    else:
        draft.refuse(order, "One seed decides everything.")
