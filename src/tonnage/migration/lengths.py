"""How long a sequence is, what becomes of longer ones, and whether several are packed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from tonnage.migration.draft import Draft, Need, Pick
from tonnage.migration.keys import AXOLOTL
from tonnage.migration.programs import TRL, TUTORIAL
from tonnage.migration.values import flag, text, whole


def lengths(draft: Draft) -> None:
    """Longest conversation, what becomes of longer ones, packing."""
    longest = draft.first("data.max_length", _length)
    if longest is not None and longest.value is None:
        draft.leave_open(Need("data.max_length", "a longest length: there is none without", "2048"), longest)
    elif longest is not None:
        draft.put("data.max_length", longest.value, longest)
    elif draft.default("data.max_length"):
        draft.imply_default("data.max_length", "data.max_length")
    elif draft.has_arguments:
        draft.notes.append("No argument says how long a sequence is: data.max_length is tonnage's default, 2048.")
    is_block = (longest is not None and longest.settings[0].name == "block_size") or any(
        setting.name == "script" and str(setting.value).endswith("run_clm.py") for setting in draft.files.settings
    )
    pack = draft.copy("data.pack", flag)
    pack = _neat(draft) or pack
    if pack is None and draft.has_arguments and not is_block:
        draft.imply_default("data.pack")
    elif pack is None and not draft.has_arguments and "batch.sequences" in draft.tree:
        draft.notes.append(
            "batch.sequences counts packs of data.max_length tokens; where a sample of your script is one "
            "conversation, write data.pack: false for the same batch."
        )
    _over_length(draft, is_packed=pack is not None and bool(pack.value))


def _neat(draft: Draft) -> Pick[bool] | None:
    """LLaMA-Factory's other switch for packing, and version 1's strategy."""
    batching = draft.first("batching", text)
    if batching is not None and batching.value in ("normal", "padding_free"):
        draft.drop(batching, "A row for each conversation, without padding.")
    elif batching is not None and batching.value == "dynamic_padding_free":
        draft.put("data.pack", True, batching, note="A row is filled up to cutoff_len.")
        return Pick(True, batching.settings)
    elif batching is not None:
        draft.refuse(batching, "How many conversations a batch has does not follow from padding: dynamic_padding_free.")
    neat = draft.switch("neat", "data.pack", True, "Off.")
    return neat if neat is not None and neat.value else None


def _length(value: Any) -> int | None:
    return None if value is None or str(value).lower() in ("none", "null") else whole(value)


def _over_length(draft: Draft, *, is_packed: bool) -> None:
    strategy = draft.first("packing_strategy", text)
    if strategy is not None and not is_packed:
        draft.drop(strategy, "Nothing is packed.")
    else:
        note = "More than data.max_loss lost stops the run."
        otherwise = "Documents are packed whole, best fit first."
        draft.translate("data.over_length", strategy, PACKING_STRATEGIES, otherwise, note)
    is_old = any(setting.name in ("max_seq_length", "max_seq_len") for setting in draft.settings("data.max_length"))
    if draft.program is TRL and is_packed and strategy is None and is_old:
        draft.imply("data.over_length", "split", "with that name for the length, packing cuts documents in pieces")
    elif draft.program is TUTORIAL:
        draft.imply_default("data.over_length")
    elif draft.program is TRL:
        because = "TRL cuts what is longer; here more than data.max_loss lost stops the run"
        draft.imply("data.over_length", "truncate", because)


OVER_LENGTH = {"drop": "drop", "truncate": "truncate", "raise": "error"}
"""Axolotl's ``excess_length_strategy``."""
PACKING_STRATEGIES = {"bfd": "truncate", "bfd_split": "split", "bfd-requeue": "split", "ffd": "truncate"}
"""TRL's ``packing_strategy``: what becomes of rows too long."""


def over_length(draft: Draft, shown: Collection[str]) -> None:
    """What becomes of rows too long: Axolotl cuts text in pieces, and leaves other rows out."""
    excess = draft.first("data.over_length", text)
    if shown == {"text"} and draft.files.has(AXOLOTL):
        draft.imply("data.over_length", "split", "rows of type completion are cut in pieces")
        draft.drop(excess, "Text is cut in pieces before.")
        return
    if excess is not None:
        draft.translate("data.over_length", excess, OVER_LENGTH, f"{', '.join(OVER_LENGTH)}, not {excess.value}.")
    else:
        draft.imply_default("data.over_length")
    if draft.tree.get("data.over_length") in ("drop", "truncate"):
        draft.notes.append("More than data.max_loss (1%) of the supervised tokens lost to the length stops the run.")
