"""torchtune's recipes: what a file of components comes to, and what its recipe does where it is silent.

A file does not say which recipe reads it: ``tune run`` does, and else its name and its keys, as far as they go. What
keys of other programs say too the shared rules take; here is what components mean (``tables/torchtune_rows.yaml``).
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

from tonnage.migration.adapters import dora
from tonnage.migration.draft import Draft, Pick
from tonnage.migration.methods import refusal
from tonnage.migration.values import flag, number, optional, text, texts, whole
from tonnage.migration.yaml_files import read_data

_TABLE = read_data("torchtune_rows")
RECIPES = {recipe: kind for kind, recipes in _TABLE["recipes"].items() for recipe in recipes.split()}
"""What a recipe trains: ``supervised``, ``pairs`` or ``distil``."""
OTHER_RECIPES = {recipe: does for does, recipes in _TABLE["others"].items() for recipe in recipes.split()}
KD_RATIO = 0.5
QUANTIZER_GROUP = 256
"""Numbers that share a scale in its quantisers where nothing is said."""
OF_SEVERAL_DEVICES = ("offload_all", "sharding", "parallel.tensor", "shard_workers", "parallel.replicate")
"""Quantities of which recipes for one device read nothing."""
LAYERS = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
MLP = ["gate_proj", "up_proj", "down_proj"]
FUSED = "Phi-3 and Phi-4 hold such layers as one (qkv_proj, gate_up_proj), whose addition is another: name those."


def components(draft: Draft) -> None:
    """Everything but the rows, as far as the shared rules do not know it."""
    objective(draft)
    devices(draft)
    training(draft)
    model(draft)
    rounding(draft)
    output(draft)


def objective(draft: Draft) -> None:
    """Supervised rows, pairs of answers, or a teacher; recipes of anything else are refused."""
    recipe = draft.first("tune_recipe", text)
    kind = _kind(draft, recipe)
    loss = draft.first("tune_loss", text)
    draft.apply("tune_loss", loss)
    if kind == "pairs":
        draft.method = "pairs"
        draft.put("objective.kind", draft.tree.get("objective.kind", "dpo"), recipe)
        draft.copy("objective.beta", number)
        draft.imply_default("objective.beta")
        draft.copy("objective.label_smoothing", number, usual=0, reason="Off.")
        _reference(draft)
    elif kind == "distil":
        _teacher(draft, recipe)
    draft.drop(recipe, "Supervised fine-tuning.")
    unread = ("objective.beta", "objective.label_smoothing", "tune_reference")
    draft.drop_every("Belongs to preferences.", *unread)
    draft.drop_every("Belongs to distillation.", "tune_teacher", "tune_kd_loss", "tune_kd_ratio")


def _kind(draft: Draft, recipe: Pick[str] | None) -> str:
    """What is trained: as the recipe's name says, else what the file's components are for."""
    if recipe is not None:
        name = PurePath(recipe.value).stem
        if name not in RECIPES:
            does = OTHER_RECIPES.get(name)
            draft.refuse(recipe, f"By its name it {does}." if does else refusal(name))
        return str(RECIPES.get(name, ""))
    losses = [str(setting.value) for setting in draft.settings("tune_loss")]
    return "pairs" if any(".rlhf." in loss for loss in losses) else "distil" if draft.has("tune_teacher") else ""


def _reference(draft: Draft) -> None:
    """The model that answers are compared with, where it is another one than is trained."""
    reference = draft.first("tune_reference", _directory)
    if reference is not None and any(pick.value == reference.value for pick in draft.every("model", _directory)):
        draft.drop(reference, "The reference is the model as it was at the start.")
    elif reference is not None:
        draft.put("objective.reference", reference.value, reference)


def _teacher(draft: Draft, recipe: Pick[str] | None) -> None:
    """Distillation: the teacher, and what its loss weighs beside the answers' own."""
    teacher, loss = draft.first("tune_teacher", _directory), draft.first("tune_kd_loss", text)
    draft.put("objective.kind", "distil", recipe, teacher)
    if teacher is not None:
        draft.put("objective.teacher", teacher.value, teacher)
    draft.apply("tune_kd_loss", loss)
    ratio = draft.first("tune_kd_ratio", number)
    if ratio is not None:
        draft.put("objective.supervised", round(1 - ratio.value, 9), ratio)
    draft.imply("objective.supervised", 1 - KD_RATIO, f"kd_ratio {KD_RATIO} by default")
    draft.note("likeliest tokens")


def _directory(value: Any) -> str:
    """A directory without a line at its end."""
    return text(value).rstrip("/") or "/"


def devices(draft: Draft) -> None:
    """One device, or several that share everything (FSDP), as far as the recipe or the file says."""
    names = [str(setting.value) for setting in draft.settings("tune_recipe")]
    names = names or [PurePath(name).stem for name in draft.files.names]
    is_single = any(re.search(r"single_device|full_low_memory", name) for name in names)
    is_several = any("distributed" in name for name in names) or any(draft.has(key) for key in OF_SEVERAL_DEVICES)
    if is_single:
        draft.drop_every("A recipe for one device does not read it.", *OF_SEVERAL_DEVICES)
        if draft.files.workers is None:
            draft.imply("launch.workers", 1, "a recipe for one device")
    elif is_several and not draft.has("sharding"):
        draft.imply("memory.zero", 3, "FSDP by default, which gathers the weights of a block when it needs them")
    for pick in draft.every("shard_workers", whole):
        draft.drop(pick if pick.value <= 0 else None, "All that are left.")
    draft.drop_every("The device is found.", "tune_device")


def training(draft: Draft) -> None:
    """What is counted and updated otherwise than the shared rules know: steps of an epoch, and components."""
    draft.apply("tune_optimizer", draft.first("tune_optimizer", text), any_case=True)
    steps, epochs = draft.first("tune_steps", optional(whole)), draft.first("epochs", whole)
    if steps is not None and steps.value is not None:
        num_epochs = epochs.value if epochs is not None else 1
        draft.put("steps", steps.value * num_epochs, steps, epochs)
        draft.note("steps of an epoch")
    else:
        draft.drop(steps, "An epoch is all rows.")
    if any(pick.value > 0 for pick in draft.every("warmup_steps", whole)):
        draft.imply("optimizer.warmup_from", "zero", "its warm-up begins at zero")
    if not draft.has("tune_attention"):
        draft.note("decay of all", program=draft.program.name)


def model(draft: Draft) -> None:
    """The directory of the model's files, and whether LoRA is trained on it."""
    draft.copy("model", _directory)
    component = draft.first("tune_model", text)
    if component is not None:
        name = component.value.rpartition(".")[2]
        is_lora = name.startswith(("lora_", "qlora_")) or draft.has("tune_attention")
        if is_lora and component.value.startswith("torchtune.models."):
            _adapter(draft, component, is_quantised=name.startswith("qlora_"))
        draft.apply("tune_model", component)
    draft.drop_every("There is no adapter.", "tune_attention", "tune_mlp", "tune_quantize")


def rounding(draft: Draft) -> None:
    """Weights that are rounded in training, by a quantiser of torchao's."""
    draft.follow("tune_quantizer")
    if "quantize_aware.scheme" not in draft.tree:
        draft.drop_every("Belongs to the quantizer.", "tune_groups", "quantize_aware.after_steps")
        return
    draft.copy("quantize_aware.group_size", whole, of="tune_groups")
    draft.imply("quantize_aware.group_size", QUANTIZER_GROUP, f"groups of {QUANTIZER_GROUP} by default")
    draft.copy("quantize_aware.after_steps", whole)
    has_adapter = "adapter.rank" in draft.tree
    draft.note("adapted layers that torchtune rounds" if has_adapter else "layers that torchtune rounds")


def _adapter(draft: Draft, component: Pick[str], *, is_quantised: bool) -> None:
    """Rank, alpha and dropout, the layers by torchtune's names, and the 4 bits of the rest."""
    for key, parse in (("adapter.rank", whole), ("adapter.alpha", number), ("adapter.dropout", number)):
        draft.copy(key, parse)
        draft.imply_default(key)
    attention, mlp = draft.first("tune_attention", _layers), draft.first("tune_mlp", flag)
    is_mlp = mlp is not None and mlp.value
    layers = [*(attention.value if attention is not None else []), *(MLP if is_mlp else [])]
    if ".phi" in component.value and set(layers) - {"o_proj"}:
        draft.refuse((attention, mlp if is_mlp else None), FUSED)
    elif layers:
        draft.put("adapter.targets", layers, component, attention, mlp if is_mlp else None)
    draft.drop(mlp, "Off.")
    quantise = draft.first("tune_quantize", flag)
    if is_quantised or (quantise is not None and quantise.value):
        draft.put("adapter.quantize", "nf4-double", quantise, component if is_quantised else None)
    draft.drop(quantise, "Off.")
    dora(draft)


def _layers(value: Any) -> list[str]:
    names = texts(value) if value != [] else []
    if unknown := [name for name in names if name not in LAYERS]:
        raise ValueError(f"has {', '.join(unknown)}, where {', '.join(LAYERS)} may be")
    return [LAYERS[name] for name in names]


def output(draft: Draft) -> None:
    """The run's directory, and where its metrics are shown."""
    own = draft.first("tune_output", _directory)
    if any(setting.value for setting in draft.settings("output")):
        draft.drop(own, "output_dir says it.")
    elif own is not None:
        draft.put("output", own.value, own)
    draft.apply("tune_logger", draft.first("tune_logger", text))
