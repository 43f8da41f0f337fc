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
    draft.apply("memory.optimizer_tier", draft.first("memory.optimizer_tier", _device))
    _parameters(draft)
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
    else:
        draft.imply_default("memory.recompute")


def _checkpointing(value: Any) -> str:
    """Axolotl's ``gradient_checkpointing``: a flag, or where inputs of blocks go."""
    word = str(value).lower()
    return "host" if word in ("offload", "unsloth", "offload_disk") else "full" if flag(value) else "none"


def _is_elsewhere(value: Any) -> bool:
    return str(value).lower() in ("legacy", "disk", "hidden_states") or flag(value)


def _inputs(draft: Draft) -> None:
    note = "Parameters rest where the plan says."  # FSDP offloads all; here, there is a place for the optimizer's state
    draft.switch("offload_all", "memory.optimizer_tier", "host", "Nothing is offloaded.", note)
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


def _parameters(draft: Draft) -> None:
    device = draft.first("memory.parameter_tier", _device)
    is_whole = draft.tree.get("launch.workers") == 1 or draft.tree.get("memory.zero") == 3
    if device is not None and device.value == "cpu" and not is_whole:
        draft.refuse(device, NEEDS_ZERO_3)
    else:
        draft.apply("memory.parameter_tier", device)


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
    picks = [*draft.every("compile", flag), *draft.every("compile_backend", _is_backend)]
    enabled = [pick for pick in picks if pick.value]
    if enabled:
        draft.put("compile", "on", *enabled)
    draft.drop(picks, "Off.")


def _is_backend(value: Any) -> bool:
    return value not in (False, None) and text(value).lower() not in ("no", "none")
