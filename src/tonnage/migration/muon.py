"""Muon as other programs have it: which of them is the one that is here, and what it is told.

The direction of an update is the same whether gradients are added to the momentum or averaged into it, so what is left
are rates and decays. Axolotl's is another one on several workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tonnage.migration.adapters import has_adapter
from tonnage.migration.draft import Draft
from tonnage.migration.programs import AXOLOTL_YAML
from tonnage.migration.values import flag, number, numbers, text, whole

AXOLOTL_BETAS = [0.95, 0.95]
"""Of what AdamW updates beside Muon, where Axolotl is not told."""
OF_VERSION_1: dict[str, tuple[str, Callable[[Any], Any], Any]] = {
    "muon_lr": ("optimizer.lr", number, 1e-3),
    "muon_decay": ("optimizer.weight_decay", number, 0.1),
    "muon_betas": ("optimizer.betas", numbers, [0.9, 0.95]),
    "muon_eps": ("optimizer.eps", number, 1e-8),
    "muon_momentum": ("optimizer.momentum", number, 0.95),
}
"""Keys of LLaMA-Factory's version 1, what they become, and what holds without them."""
ITERATIONS = 5
BESIDE_ADAPTERS = "Muon updates matrices of the model itself: those of an addition mean something as a product alone."


def muon(draft: Draft) -> None:
    """Muon in the place of AdamW, if it is asked for."""
    if draft.program is AXOLOTL_YAML:
        _of_axolotl(draft)
    switch = draft.first("muon", flag)
    draft.refuse(switch if switch is not None and switch.value and has_adapter(draft) else None, BESIDE_ADAPTERS)
    if switch is not None and switch.value and not has_adapter(draft):
        draft.put("optimizer.kind", "muon", switch)
        draft.drop_every("Muon is asked for.", "optim")
        draft.note("Muon's decay")
    draft.drop(switch, "Off.")
    _of_version_1(draft)


def _word(value: Any) -> str:
    return text(value).lower()


def _of_axolotl(draft: Draft) -> None:
    pick = draft.first("optim", _word)
    if pick is None or pick.value != "muon":
        return
    if has_adapter(draft):
        draft.refuse(pick, BESIDE_ADAPTERS)
        return
    if draft.tree.get("launch.workers", 1) > 1:
        reason = (
            "On several workers Axolotl's Muon is another: no Nesterov, other iterations, rates by rows over columns."
        )
        draft.refuse(pick, reason)
        return
    draft.put("optimizer.kind", "muon", pick)
    if not (draft.has("beta1") and draft.has("beta2")):
        draft.drop_every("Both count, or none, beside Muon.", "beta1", "beta2")
        draft.imply("optimizer.betas", AXOLOTL_BETAS, "betas 0.95 and 0.95 by default beside Muon")
    draft.note("Axolotl's Muon")


def _of_version_1(draft: Draft) -> None:
    name = draft.first("optimizer_name", _word)
    if name is None or name.value != "muon":
        draft.only("optimizer_name", _word, "adamw", "AdamW is the usual optimizer.", "AdamW and Muon are there.")
        draft.drop_every("Belongs to Muon.", *OF_VERSION_1, "muon_nesterov", "muon_steps")
        return
    draft.only("muon_nesterov", flag, True, "So it is here.", "Muon's momentum is Nesterov's.")
    otherwise = f"Muon makes a matrix orthogonal in {ITERATIONS} iterations."
    draft.only("muon_steps", whole, ITERATIONS, "So it is here.", otherwise)
    if has_adapter(draft):
        draft.refuse(name, BESIDE_ADAPTERS)
        return
    draft.put("optimizer.kind", "muon", name)
    draft.drop_every("With Muon optim_config.lr is the rate there.", "optimizer.lr")
    for quantity, (key, parse, usual) in OF_VERSION_1.items():
        draft.copy(key, parse, of=quantity)
        draft.imply(key, usual, f"{usual} by default with Muon")
