"""Rotary positions scaled for more of them than a model was trained with, as other programs ask transformers for it."""

from __future__ import annotations

from tonnage.migration.draft import Draft
from tonnage.migration.values import number, text, whole

NUMBERS = (
    *("rope.factor", "rope.theta", "rope.attention_factor", "rope.beta_fast", "rope.beta_slow"),
    *("rope.low_freq_factor", "rope.high_freq_factor"),
)
FACTOR = "how many times as many positions as the model has there are to be, which follows there from the model's files"


def positions(draft: Draft) -> None:
    """Types and their numbers, or a type alone, whose factor the other program computes from the model's files."""
    longest = draft.first("longest_positions", whole)
    draft.copy("rope.type", lambda value: text(value).lower())
    draft.copy("rope.original_max_position_embeddings", whole)
    for key in NUMBERS:
        draft.copy(key, number)
    if "rope.theta" in draft.tree:
        draft.imply("rope.type", "default", "another base of the frequencies, which are not scaled")
    if "rope.type" in draft.tree and "rope.factor" not in draft.tree:
        draft.leave_open("rope.factor", FACTOR, longest, example="4.0")
    draft.drop(longest if "rope.factor" in draft.tree else None, "rope.factor says it.")
    draft.refuse(longest, "Positions are the model's own, or rope.factor times as many.")
