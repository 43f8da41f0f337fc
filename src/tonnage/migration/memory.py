"""How it fits: recompute, tiers and compilation."""

from __future__ import annotations

from typing import Any

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.values import flag, text

NEEDS_ZERO_3 = "Parameters of several workers rest in the host's memory with ZeRO 3 alone."


def memory(draft: Draft) -> None:
    """Recompute, tiers and compilation."""
    _recompute(draft)
    _inputs(draft)
    _tier(draft, "memory.optimizer_tier", "memory.optimizer_tier")
    _tier(draft, "memory.parameter_tier", "memory.parameter_tier")
    _directories(draft)
    _compile(draft)


def _recompute(draft: Draft) -> None:
    places = draft.every("checkpointing", _checkpointing)
    for place in places:
        if place.value == "host":
            draft.put("memory.activation_tier", "host", place)
    picks = [
        *draft.every("memory.recompute", flag),
        *(Pick(not pick.value, pick.settings) for pick in draft.every("kept", flag)),
        *(Pick(pick.value != "none", pick.settings) for pick in places),
    ]
    enabled = [pick for pick in picks if pick.value]
    if enabled:
        draft.put("memory.recompute", "full", *enabled)
        draft.drop([pick for pick in picks if not pick.value], f"{enabled[0].shown} counts.")
    elif picks:
        draft.put("memory.recompute", "none", *picks)
    elif draft.default("memory.recompute"):
        draft.imply_default("memory.recompute")


def _checkpointing(value: Any) -> str:
    """Axolotl's ``gradient_checkpointing``: a flag, or where inputs of blocks go."""
    word = str(value).lower()
    return "host" if word in ("offload", "unsloth", "offload_disk") else "full" if flag(value) else "none"


def _is_elsewhere(value: Any) -> bool:
    return str(value).lower() in ("legacy", "disk", "hidden_states") or flag(value)


def _inputs(draft: Draft) -> None:
    _offloaded(draft)
    pick = draft.first("memory.activation_tier", _is_elsewhere)
    if pick is None:
        return
    if not pick.value:
        draft.drop(pick, "Nothing is offloaded.")
    elif draft.tree.get("memory.recompute") == "none":
        draft.refuse(pick, "Inputs of blocks go to the host's memory only where all else is recomputed.")
    else:
        draft.put("memory.activation_tier", "host", pick)
        draft.imply("memory.recompute", "full", f"{pick.shown}: inputs of blocks go, all else is recomputed")


def _offloaded(draft: Draft) -> None:
    """FSDP's offloading of everything, where the optimizer's state is what there is a place for."""
    note = "Parameters rest where the plan says."
    draft.switch("offload_all", "memory.optimizer_tier", "host", "Nothing is offloaded.", note)


def _tier(draft: Draft, quantity: str, key: str) -> None:
    device = draft.first(quantity, _device)
    if device is None:
        return
    match device.value:
        case "nvme":
            draft.put(key, "disk", device)
        case "cpu" if "optimizer" in key or draft.tree.get("launch.workers") == 1 or draft.tree.get("memory.zero") == 3:
            draft.put(key, "host", device)
        case "cpu":
            draft.refuse(device, NEEDS_ZERO_3)
        case "none":
            draft.drop(device, "Nothing is offloaded.")
        case _:
            draft.refuse(device, f"none, cpu or nvme, not {device.value}.")


def _device(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "cpu" if value else "none"
    return text(value).lower()


def _directories(draft: Draft) -> None:
    picks = draft.every("memory.offload_dirs", lambda value: "" if value in (None, "none") else text(value))
    uses_disk = "disk" in (draft.tree.get("memory.optimizer_tier"), draft.tree.get("memory.parameter_tier"))
    named = [pick for pick in picks if pick.value and uses_disk]
    if named:
        draft.put("memory.offload_dirs", list(dict.fromkeys(pick.value for pick in named)), *named)
    draft.drop(picks, "Nothing rests on disk.")


def _compile(draft: Draft) -> None:
    flags: list[Pick[Any]] = list(draft.every("compile", flag))
    backends: list[Pick[Any]] = list(draft.every("compile_backend", _backend))
    enabled: list[Pick[Any]] = [pick for pick in flags if pick.value]
    enabled += [pick for pick in backends if pick.value not in ("no", "none")]
    if enabled:
        draft.put("compile", "on", *enabled)
    draft.drop([*flags, *backends], "Off.")


def _backend(value: Any) -> str:
    return "no" if value in (False, None) else text(value).lower()
