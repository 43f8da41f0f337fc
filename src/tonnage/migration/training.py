"""What is trained, as numbers: batch, length of the run, AdamW, schedule, precision."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

from tonnage.migration.keys import DEEPSPEED
from tonnage.migration.programs import AXOLOTL_YAML, in_words
from tonnage.migration.sheet import Conflict, Need, Pick, Sheet, flag, number, numbers, text, whole

ADAMW = {
    "adamw_torch": "",
    "adamw_torch_fused": "",
    "adamw_torch_xla": "",
    "adamw_torch_npu_fused": "",
    "adamw_apex_fused": "",
    "adamw_hf": "",
    "adamw": "",
    "paged_adamw": "",
    "paged_adamw_32bit": "",
    "adamw_8bit": "int8",
    "adamw_bnb_8bit": "int8",
    "adamw_torch_8bit": "int8",
    "adamw_torch_4bit": "int8",
    "ao_adamw_4bit": "int8",
    "ao_adamw_8bit": "int8",
    "ao_adamw_fp8": "int8",
    "optimi_adamw": "",
    "flash_adamw": "int8",
    "paged_adamw_8bit": "int8",
}
"""The optimizers of ``optim`` that are AdamW, and how their moments rest: as always, or in 8 bits."""
OWN_MOMENTS = ("adamw_torch_4bit", "ao_adamw_4bit", "ao_adamw_fp8", "flash_adamw")
"""Of these, those whose moments rest otherwise than in blocks of 8-bit numbers."""

DEEPSPEED_SCHEDULES = {"warmuplr": "constant", "warmupdecaylr": "linear", "warmupcosinelr": "cosine"}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine_with_min_lr": "cosine",
}
COSINE_FINAL = 1e-4
"""``cos_min_ratio`` of DeepSpeed's WarmupCosineLR where it is not given."""


def batch(sheet: Sheet, ranks: int | None) -> None:
    """Sequences in a step: what one process holds, times accumulation, times the ``ranks`` that see different data."""
    total = sheet.first("batch.sequences", whole)
    each = sheet.first("memory.micro_batch", whole)
    accumulation = sheet.first("accumulation", whole)
    of_worker = sheet.first("batch_of_worker", whole)
    if of_worker is not None and (accumulation is not None or each is None or of_worker.value % each.value):
        sheet.drop(of_worker, "gradient_accumulation_steps counts.")
    elif of_worker is not None and each is not None:
        accumulation = Pick(of_worker.value // each.value, of_worker.givens)
    picks = [pick for pick in (total, each, accumulation) if pick is not None]
    if each is not None:
        sheet.put("memory.micro_batch", each.value, each)
    if sheet.is_open("batch.sequences"):
        for pick in picks:
            sheet.leave_open(Need("batch.sequences", "sequences in a step: other keys leave it open"), pick)
        return
    num_each = each.value if each is not None else sheet.default("memory.micro_batch")
    num_accumulated = accumulation.value if accumulation is not None else sheet.default("accumulation") or 1
    if total is None and num_each is None:
        if accumulation is not None:
            sheet.leave_open(
                Need("batch.sequences", "sequences in a step: no file says how many one worker takes"), accumulation
            )
        return
    if total is not None:
        sheet.put("batch.sequences", total.value, *picks)
        if each is not None and accumulation is not None and ranks:
            product = each.value * accumulation.value * ranks
            if product != total.value:
                sheet.notes.append(
                    f"train_batch_size is {total.value}, but {each.value} x {accumulation.value} x {ranks} workers is "
                    f"{product}; DeepSpeed refuses that, and train_batch_size was taken."
                )
    elif num_each is not None:
        arithmetic = f"{num_each} x {num_accumulated} x {ranks or 'number of'} {'worker' if ranks == 1 else 'workers'}"
        if ranks is None:
            sentence = f"sequences in a step: {arithmetic}, and no file says how many"
            sheet.leave_open(Need("batch.sequences", sentence, str(num_each * num_accumulated)), *picks)
        elif picks:
            sheet.put("batch.sequences", num_each * num_accumulated * ranks, *picks, note=f"{arithmetic}.")
        else:
            because = f"{in_words(sheet.program.defaults['memory.micro_batch'])}, {arithmetic}"
            number_of = num_each * num_accumulated * ranks
            sheet.imply("batch.sequences", number_of, because, "batch.sequences", "memory.micro_batch", "accumulation")
    _claim_autos(sheet, "batch.sequences", "batch.sequences", "memory.micro_batch", "accumulation")


def _claim_autos(sheet: Sheet, key: str, *quantities: str) -> None:
    """``auto`` values that stand for a key that other keys have decided."""
    if key not in sheet.tree:
        return
    for quantity in quantities:
        if autos := sheet.autos(quantity):
            sheet.put(key, sheet.tree[key], Pick("auto", tuple(autos)))


def duration(sheet: Sheet) -> None:
    """Steps or epochs; ``max_steps`` decides where both are given, as in the Trainer."""
    steps = sheet.first("steps", whole)
    epochs = sheet.first("epochs", number)
    if steps is not None and steps.value > 0:
        sheet.put("steps", steps.value, steps)
        sheet.drop(epochs, "The number of steps decides.")
        return
    sheet.drop(steps, "-1: the number of epochs decides.")
    if epochs is not None:
        sheet.put("epochs", epochs.value, epochs)
    elif not sheet.is_open("steps"):
        sheet.imply_default("epochs", "steps")


def optimizer(sheet: Sheet) -> None:
    """AdamW: rate, decay, betas, eps, clipping, and how its moments rest."""
    ds_type = sheet.first("optimizer_type", text)
    optim = sheet.first("optim", text)
    knows_defaults = sheet.has_arguments or ds_type is not None
    _kind(sheet, ds_type, optim)
    _rate(sheet)
    _decay(sheet, has_own_optimizer=ds_type is not None)
    sheet.copy("optimizer.eps", number)
    _betas(sheet, knows_defaults)
    _clip(sheet)
    sheet.copy("router_loss", number)
    sheet.imply_default("router_loss")
    if sheet.has_arguments:
        sheet.imply_default("optimizer.lr", "optimizer.lr", "schedule_lr")
        sheet.imply_default("optimizer.weight_decay", "optimizer.weight_decay")
        sheet.imply_default("optimizer.eps", "optimizer.eps")
    elif ds_type is not None and not sheet.autos("optimizer.lr") and not sheet.autos("schedule_lr"):
        sheet.imply("optimizer.lr", 1e-3, "lr 0.001 by default in DeepSpeed")
    moments = sheet.first("bf16_moments", flag)
    if moments is not None and moments.value:
        sheet.put("memory.moments", "bf16", moments)
    elif moments is not None:
        sheet.drop(moments, "Moments rest in fp32.")


def _rate(sheet: Sheet) -> None:
    """The highest rate: a schedule of DeepSpeed that has one of its own sets it, whatever the optimizer was given."""
    rate, peak = sheet.first("optimizer.lr", number), sheet.first("schedule_lr", number)
    if rate is not None and peak is not None and rate.value != peak.value:
        said = tuple(f"{pick.givens[0].where}: {pick.shown}" for pick in (peak, rate))
        sheet.conflicts.append(Conflict(said, said[0]))
        sheet.put("optimizer.lr", peak.value, peak)
        sheet.drop(rate, f"{peak.shown} counts (see conflicts).")
    elif peak is not None or rate is not None:
        picks = [pick for pick in (rate, peak) if pick is not None]
        sheet.put("optimizer.lr", picks[0].value, *picks)
    _claim_autos(sheet, "optimizer.lr", "optimizer.lr", "schedule_lr")


def _decay(sheet: Sheet, *, has_own_optimizer: bool) -> None:
    was_auto = bool(sheet.autos("optimizer.weight_decay"))
    decay = sheet.copy("optimizer.weight_decay", number)
    if decay is not None and has_own_optimizer and decay.givens[0].table is not DEEPSPEED and not was_auto:
        sheet.notes.append(
            f"{decay.givens[0].shown} was taken for optimizer.weight_decay; an optimizer in DeepSpeed's file has a "
            "decay only if its params have weight_decay, so write optimizer.weight_decay: 0 for the run as it was."
        )


def _kind(sheet: Sheet, ds_type: Pick[str] | None, optim: Pick[str] | None) -> None:
    if ds_type is not None:
        if ds_type.value.lower() in ("adam", "adamw"):
            sheet.drop(ds_type, "AdamW is the one optimizer; DeepSpeed's Adam decouples weight decay too.")
        else:
            sheet.refuse(ds_type, f"AdamW is the one optimizer, not {ds_type.value}.")
        sheet.drop(optim, f"DeepSpeed's {ds_type.value} counts.")
        return
    if optim is None:
        return
    name = optim.value.lower()
    if name not in ADAMW:
        sheet.refuse(optim, f"AdamW is the one optimizer, not {optim.value}.")
    elif ADAMW[name]:
        note = "Blocks of 256 with a scale each; moments are rounded otherwise than there."
        if name in OWN_MOMENTS:
            note = "Moments rest in 8 bits here, with more of their digits than there."
        sheet.put("memory.moments", ADAMW[name], optim, note=note)
    else:
        paged = " What does not fit rests where memory.optimizer_tier says." if name.startswith("paged") else ""
        sheet.drop(optim, f"AdamW is the one optimizer.{paged}")


def _betas(sheet: Sheet, knows_defaults: bool) -> None:
    both = sheet.first("optimizer.betas", numbers)
    one, two = sheet.first("beta1", number), sheet.first("beta2", number)
    if both is not None:
        sheet.put("optimizer.betas", both.value, both)
        for single in (one, two):
            sheet.drop(single, "DeepSpeed's betas count.")
    elif one is not None or two is not None:
        betas = [one.value if one else 0.9, two.value if two else 0.999]
        sheet.put("optimizer.betas", betas, one, two)
        _claim_autos(sheet, "optimizer.betas", "optimizer.betas")
    elif knows_defaults and (sheet.has_arguments or not sheet.autos("optimizer.betas")):
        because = "betas 0.9 and 0.999 by default"
        sheet.imply("optimizer.betas", [0.9, 0.999], because, "optimizer.betas")


def _clip(sheet: Sheet) -> None:
    was_auto = bool(sheet.autos("optimizer.clip"))
    clip = sheet.copy("optimizer.clip", number)
    if clip is None and sheet.files.has(DEEPSPEED) and not was_auto:
        sheet.imply("optimizer.clip", 0.0, "DeepSpeed clips nothing without gradient_clipping")
    elif clip is None and sheet.has_arguments:
        sheet.imply_default("optimizer.clip", "optimizer.clip")
    elif clip is not None and sheet.files.has(DEEPSPEED) and clip.givens[0].table is not DEEPSPEED and not was_auto:
        sheet.notes.append(
            f"{clip.givens[0].shown} was taken for optimizer.clip; under DeepSpeed it has no effect without "
            "gradient_clipping in its file, so write optimizer.clip: 0 for the run as it was."
        )


def schedule(sheet: Sheet) -> None:
    """Shape and warm-up. DeepSpeed's scheduler, where there is one, is the one that runs."""
    ds_kind = sheet.first("ds_schedule", text)
    kind = sheet.first("optimizer.schedule", text)
    shape = None
    if ds_kind is not None:
        shape = DEEPSPEED_SCHEDULES.get(ds_kind.value.lower())
        if shape is None:
            sheet.refuse(ds_kind, f"Cosine, linear or constant, not {ds_kind.value}.")
        else:
            sheet.put("optimizer.schedule", shape, ds_kind)
        sheet.drop(kind, f"DeepSpeed's {ds_kind.value} counts.")
    elif kind is not None:
        name = kind.value.lower().removeprefix("schedulertype.")
        shape = SCHEDULES.get(name)
        if shape is None:
            sheet.refuse(kind, f"Cosine, linear or constant, not {kind.value}.")
        else:
            sheet.put("optimizer.schedule", shape, kind)
    elif sheet.has_arguments:
        shape = sheet.default("optimizer.schedule")
        sheet.imply_default("optimizer.schedule")
    has_no_warmup = kind is not None and ds_kind is None and kind.value.lower() == "constant"
    _warmup(sheet, ds_kind, has_no_warmup=has_no_warmup)
    _final(sheet, ds_kind, kind)


MOST_WARMUP_STEPS = 100
"""Of Axolotl's warm-up by default, which is otherwise 3% of all steps."""


def _as_axolotl_counts(sheet: Sheet, value: float, *, is_default: bool = False) -> float:
    """Steps of a warm-up in Axolotl, where the number of all steps is known: whole ones of a fraction, and two in the
    place of one."""
    if sheet.program is not AXOLOTL_YAML:
        return value
    if value < 1 and "steps" in sheet.tree:
        value = int(value * sheet.tree["steps"])
        value = min(value, MOST_WARMUP_STEPS) if is_default else value
    return 2 if value == 1 else value


def _warmup(sheet: Sheet, ds_kind: Pick[str] | None, *, has_no_warmup: bool) -> None:
    steps = sheet.first("warmup_steps", number)
    ratio = sheet.first("warmup_ratio", number)
    shape = sheet.first("warmup_type", text)
    if has_no_warmup:
        for pick in (steps, ratio):
            sheet.drop(pick, "transformers' constant schedule has no warm-up.")
        sheet.imply("optimizer.warmup", 0, "the constant schedule of transformers has no warm-up")
    elif steps is not None and (steps.value > 0 or ratio is None):
        value = _as_axolotl_counts(sheet, steps.value)
        sheet.put("optimizer.warmup", int(value) if value == int(value) else value, steps)
        sheet.drop(ratio, "The number of warm-up steps decides.")
    elif ratio is not None:
        sheet.drop(steps, "0: the ratio decides.")
        if ratio.value < 1:
            sheet.put("optimizer.warmup", _as_axolotl_counts(sheet, ratio.value), ratio)
            _claim_autos(sheet, "optimizer.warmup", "warmup_steps")
        else:
            sheet.refuse(ratio, "A fraction of all steps is below 1.")
    elif sheet.has_arguments:
        value = _as_axolotl_counts(sheet, sheet.default("optimizer.warmup"), is_default=True)
        sheet.imply_default("optimizer.warmup", "warmup_steps", value=value)
        if sheet.program is AXOLOTL_YAML and "steps" not in sheet.tree:
            longest = round(MOST_WARMUP_STEPS / sheet.default("optimizer.warmup"))
            sheet.notes.append(
                f"Axolotl's warm-up by default ends after {MOST_WARMUP_STEPS} steps: if the run has more than "
                f"{longest:,}, write optimizer.warmup: {MOST_WARMUP_STEPS}."
            )
    if ds_kind is None and sheet.has_arguments and sheet.tree.get("optimizer.warmup"):
        sheet.imply("optimizer.warmup_from", "zero", "transformers' warm-up begins at zero")
    _rise(sheet, ds_kind)
    if shape is None and ds_kind is not None and "optimizer.warmup" in sheet.tree and sheet.tree["optimizer.warmup"]:
        sheet.notes.append(
            "DeepSpeed's warm-up rises with the logarithm of the step unless warmup_type is linear; ours is linear."
        )
    elif shape is not None and shape.value.lower() == "linear":
        sheet.drop(shape, "Warm-up is linear.")
    elif shape is not None:
        sheet.refuse(shape, "Warm-up is linear.")


def _rise(sheet: Sheet, ds_kind: Pick[str] | None) -> None:
    """Axolotl's quadratic warm-up, which a cosine has, whose end is zero then."""
    pick = sheet.first("optimizer.warmup_shape", flag)
    if pick is None:
        return
    if not pick.value or sheet.tree.get("optimizer.schedule") != "cosine" or ds_kind is not None:
        sheet.drop(pick, "Off." if not pick.value else "Belongs to a cosine.")
        return
    sheet.put("optimizer.warmup_shape", "quadratic", pick)
    for cosine in sheet.every("cosine_final", number):
        sheet.drop(cosine, "A cosine with a quadratic warm-up ends at zero.")


def _final(sheet: Sheet, ds_kind: Pick[str] | None, kind: Pick[str] | None) -> None:
    final = sheet.first("optimizer.final", number)
    ratio, lowest = sheet.first("min_lr_rate", number), sheet.first("min_lr", number)
    is_ds_cosine = ds_kind is not None and ds_kind.value.lower() == "warmupcosinelr"
    cosine = sheet.first("cosine_final", number)
    if cosine is not None and kind is not None and kind.value.lower() != "cosine":
        sheet.drop(cosine, "Belongs to a cosine.")
    elif cosine is not None:
        sheet.put("optimizer.final", cosine.value, cosine)
    has_minimum = ds_kind is None and kind is not None and kind.value.lower() == "cosine_with_min_lr"
    if final is not None and is_ds_cosine:
        sheet.put("optimizer.final", final.value, final)
    elif final is not None:
        sheet.drop(final, "Belongs to WarmupCosineLR.")
    elif is_ds_cosine:
        sheet.imply("optimizer.final", COSINE_FINAL, "cos_min_ratio 0.0001 by default")
    if has_minimum and ratio is not None:
        sheet.put("optimizer.final", ratio.value, ratio)
    elif has_minimum and lowest is not None and sheet.tree.get("optimizer.lr"):
        sheet.put("optimizer.final", lowest.value / sheet.tree["optimizer.lr"], lowest)
    for pick in (ratio, lowest):
        sheet.drop(pick, "Belongs to cosine_with_min_lr." if not has_minimum else "The other of the two counts.")


def precision(sheet: Sheet) -> None:
    """bf16, fp16 or fp32, as flags, as Accelerate's mixed precision, or as the type of the weights."""
    bf16, fp16 = sheet.first("bf16", _on), sheet.first("fp16", flag)
    mixed, dtype = sheet.first("mixed_precision", text), sheet.first("dtype", text)
    asked = ""
    if bf16 is not None and bf16.value:
        asked = "bf16"
    elif fp16 is not None and fp16.value:
        asked = "fp16"
    elif mixed is not None and mixed.value.lower().removesuffix("_mixed") in ("bf16", "fp16"):
        asked = mixed.value.lower().removesuffix("_mixed")
    elif dtype is not None and (half := _half(dtype.value)):
        asked = half
    elif sheet.default("precision") == "bf16" and fp16 is None and bf16 is None:
        sheet.imply_default("precision", "bf16")
    elif sheet.has_arguments or bf16 is not None or fp16 is not None or mixed is not None or sheet.files.has(DEEPSPEED):
        asked = "" if sheet.autos("bf16") and not sheet.has_arguments else "fp32"
    if asked == "fp32" and bf16 is None and fp16 is None and mixed is None:
        sheet.imply("precision", "fp32", "fp32 by default", "bf16", "fp16")
    chosen = sheet.tree.get("precision") or asked
    for pick, name in ((bf16, "bf16"), (fp16, "fp16")):
        if pick is None:
            continue
        if pick.value and chosen != name:
            sheet.refuse(pick, f"precision is {chosen}: bf16 and fp16 were both asked for.")
        elif pick.value == (chosen == name) and chosen and (pick.value or chosen == "fp32"):
            sheet.put("precision", chosen, pick)
        else:
            sheet.drop(pick, f"Off; precision is {chosen or 'left open'}.")
    if mixed is not None:
        _mixed(sheet, mixed, chosen)
    if dtype is not None:
        if asked and _half(dtype.value) == asked and bf16 is None and fp16 is None and mixed is None:
            sheet.put("precision", asked, dtype)
        else:
            sheet.drop(dtype, "Weights rest in the precision of the run, beside an fp32 master.")
    _claim_autos(sheet, "precision", "bf16", "fp16")
    _loss_scale(sheet)


def _on(value: Any) -> bool:
    """A flag; Axolotl's ``auto`` is true on every device that has the type, and ``full`` is evaluation in it too."""
    return True if str(value).lower() in ("auto", "full") else flag(value)


def _mixed(sheet: Sheet, mixed: Pick[str], chosen: str) -> None:
    said = {"no": "fp32", "false": "fp32", "bf16_mixed": "bf16", "fp16_mixed": "fp16"}.get(
        mixed.value.lower(), mixed.value.lower()
    )
    if said not in ("bf16", "fp16", "fp32"):
        sheet.refuse(mixed, f"bf16, fp16 or fp32, not {mixed.value}.")
    elif said == chosen:
        sheet.put("precision", said, mixed)
    else:
        sheet.drop(mixed, f"Other keys make it {chosen}.")


def _half(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "bf16": "bf16", "fp16": "fp16", "half": "fp16"}.get(
        dtype.removeprefix("torch."), ""
    )


LARGEST_POWER = 64
"""Of two, as a loss scale: fp16 itself ends at 2**16."""


def _loss_scale(sheet: Sheet) -> None:
    power, window = sheet.first("optimizer.loss_scale", whole), sheet.first("optimizer.loss_scale_growth", whole)
    is_fp16 = sheet.tree.get("precision") == "fp16"
    if power is not None and is_fp16 and not 0 <= power.value <= LARGEST_POWER:
        sheet.refuse(power, f"A power of two from 0 to {LARGEST_POWER}.")
    elif power is not None and is_fp16:
        sheet.put("optimizer.loss_scale", float(2**power.value), power)
    if window is not None and is_fp16:
        sheet.put("optimizer.loss_scale_growth", window.value, window)
    for pick in (power, window):
        if pick is not None and not is_fp16:
            sheet.drop(pick, "fp16 is off.")


def steps_of(sheet: Sheet, value: float) -> int | None:
    """A number of steps; a fraction below 1 is one of all steps, None if those are not known."""
    if value >= 1:
        return int(value)
    return ceil(value * sheet.tree["steps"]) if "steps" in sheet.tree else None


def ranks_with_their_own_data(workers: int | None, degrees: list[int]) -> int | None:
    """Workers that see different rows: all, divided by what shares one copy of the model."""
    return None if workers is None else max(1, workers // prod(degrees))
