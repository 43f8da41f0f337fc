"""How long a sequence is, what becomes of longer ones, and whether several are packed."""

from __future__ import annotations

from collections.abc import Collection

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.keys import AXOLOTL
from tonnage.migration.programs import TRL, TUTORIAL
from tonnage.migration.values import flag, optional, text, whole

LEAST_ROW = 2
"""Tokens of a row that has anything to predict."""


def lengths(draft: Draft) -> None:
    """Longest conversation, what becomes of longer ones, packing."""
    longest = draft.first("data.max_length", optional(whole))
    if draft.is_preference:
        _of_preferences(draft, longest)
        return
    draft.only("truncation_mode", text, "keep_start", "Only ends are cut off.", "Only ends are cut off.")
    if longest is not None and longest.value is None:
        draft.leave_open("data.max_length", "a longest length: there is none without", longest, example="2048")
    elif longest is not None:
        draft.put("data.max_length", longest.value, longest)
    elif draft.default("data.max_length"):
        draft.imply_default("data.max_length", "data.max_length")
    elif draft.has_arguments:
        draft.note("no length")
    is_block = (longest is not None and longest.settings[0].name == "block_size") or any(
        setting.name == "script" and str(setting.value).endswith("run_clm.py") for setting in draft.files.settings
    )
    pack = draft.copy("data.pack", flag)
    pack = _neat(draft) or pack
    if pack is None and draft.has_arguments and not is_block:
        draft.imply_default("data.pack")
    elif pack is None and not draft.has_arguments and "batch.sequences" in draft.tree:
        draft.note("packs in the place of samples")
    _over_length(draft, is_packed=pack is not None and bool(pack.value))


_PAIR = "a pair is a prompt with both answers"


def _of_preferences(draft: Draft, longest: Pick[int | None] | None) -> None:
    """The other programs' length is of a prompt with one answer, ours with two: both of a pair, or of KTO a row's own
    and that of another row. None is cut."""
    holds = "a row is a prompt with its answer and another row's" if draft.method == "kto" else _PAIR
    length = longest.value if longest is not None else None
    if length is not None:
        draft.put("data.max_length", 2 * length, longest, note=f"Twice: {holds}.")
    elif longest is not None:
        draft.leave_open("data.max_length", "a longest length: there is none without", longest, example="4096")
    elif draft.default("data.max_length"):
        name, usual = draft.defaults["data.max_length"]
        draft.imply("data.max_length", 2 * usual, f"{name} {usual} by default, and {holds}")
    draft.drop_every("They are not packed there; data.pack: true does it here.", "data.pack", "neat", "batching")
    draft.drop_every("They are not packed there.", "packing_strategy")
    draft.imply("data.pack", False, "preferences are not packed there")
    draft.drop_every("No answer is cut, from either end.", "truncation_mode")
    prompts = draft.every("longest_prompt", optional(whole))
    draft.drop(prompts, "Prompts are not cut: a row is whole, or left out.")
    draft.imply("data.over_length", "drop", "an answer that is judged is never cut here")
    draft.note("labelled rows too long" if draft.method == "kto" else "pairs too long", program=draft.program.name)
    if any(pick.value for pick in prompts):
        draft.note("prompts too long", program=draft.program.name)


def _neat(draft: Draft) -> Pick[bool] | None:
    """LLaMA-Factory's other switch for packing, and version 1's strategy."""
    batching = draft.follow("batching")
    if batching is not None and batching.value.startswith("dynamic_"):
        return Pick(True, batching.settings)
    neat = draft.switch("neat", "data.pack", True, "Off.")
    return neat if neat is not None and neat.value else None


def _over_length(draft: Draft, *, is_packed: bool) -> None:
    strategy = draft.first("packing_strategy", text)
    if is_packed:
        draft.apply("packing_strategy", strategy, any_case=True)
    draft.drop(strategy, "Nothing is packed.")
    is_old = any(setting.name in ("max_seq_length", "max_seq_len") for setting in draft.settings("data.max_length"))
    if draft.program is TRL and is_packed and strategy is None and is_old:
        draft.imply("data.over_length", "split", "with that name for the length, packing cuts documents in pieces")
    elif draft.program is TUTORIAL:
        draft.imply_default("data.over_length")
    elif draft.program is TRL:
        because = "TRL cuts what is longer; here more than data.max_loss lost stops the run"
        draft.imply("data.over_length", "truncate", because)


def shortest(draft: Draft) -> None:
    """Rows that are left out for being short. Rows of one token or none hold nothing to learn."""
    pick = draft.first("data.min_length", whole)
    if pick is not None and pick.value > LEAST_ROW and not draft.is_preference:
        draft.put("data.min_length", pick.value, pick)
    draft.drop(pick, "It leaves out no row." if not draft.is_preference else "Not of rows with preferences.")


def over_length(draft: Draft, shown: Collection[str]) -> None:
    """What becomes of rows too long: Axolotl cuts text in pieces, and leaves other rows out."""
    excess = draft.first("data.over_length", text)
    if shown == {"text"} and draft.files.has(AXOLOTL):
        draft.imply("data.over_length", "split", "rows of type completion are cut in pieces")
        draft.drop(excess, "Text is cut in pieces before.")
        return
    if draft.is_preference and excess is not None and excess.value.lower() == "truncate":
        draft.put("data.over_length", "drop", excess, note="An answer that is judged is not cut.")
    else:
        draft.apply("data.over_length", excess, any_case=True)
    if excess is None and (not draft.is_preference or draft.default("data.over_length") == "drop"):
        draft.imply_default("data.over_length")
    if draft.tree.get("data.over_length") in ("drop", "truncate") and not draft.is_preference:
        draft.note("much too long")
