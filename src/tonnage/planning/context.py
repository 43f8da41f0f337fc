"""What it costs to divide the tokens of rows among workers (the key ``parallel.context``), beside a part of all else.

Attention exchanges heads (``model.context``): each worker sends its tokens' queries, keys and values, and gets back
what heads made of all tokens. What attention keeps for its backward pass is what was received, as much as it had
itself; only what the output projection keeps is another tensor then, and keys and values of fewer heads than workers
are there more than once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from tonnage.planning.layout import Layout
from tonnage.planning.profile import BlockCost, Envelope, Line, ModelProfile


def divides(model: ModelProfile, context: int) -> bool:
    """Whether so many workers can divide the heads of a model's attention."""
    return context == 1 or (bool(model.heads) and all(one.queries % context == 0 for one in model.heads))


def in_slices(layout: Layout, model: ModelProfile) -> ModelProfile:
    """A model whose blocks hold what attention exchanges, by tokens of a slice."""
    numbers = max(
        one.queries * one.of_values + (one.copies(layout.context) - 1) * one.keys * (one.size + one.of_values)
        for one in model.heads
    )
    held = float(layout.width * numbers)
    return replace(model, blocks={kind: _holding(cost, kind, held) for kind, cost in model.blocks.items()})


@lru_cache(64)
def _holding(cost: BlockCost, recompute: str, per_token: float) -> BlockCost:
    """A block that holds so much more for each token from attention's forward to its backward pass: one that is
    computed again, only then."""

    def raised(line: Line) -> Line:
        return Line(line.fixed, line.per_token + per_token)

    def all_raised(peak: Envelope) -> Envelope:
        return Envelope(tuple(map(raised, peak.lines)))

    keeps = recompute == "none"
    return replace(
        cost,
        saved=raised(cost.saved) if keeps else cost.saved,
        forward_peak=all_raised(cost.forward_peak) if keeps else cost.forward_peak,
        backward_peak=cost.backward_peak if keeps else all_raised(cost.backward_peak),
        backward_bare_peak=cost.backward_bare_peak if keeps else all_raised(cost.backward_bare_peak),
    )


def exchanged_bytes(layout: Layout, model: ModelProfile, row_tokens: float) -> float:
    """Bytes that one worker sends in a step for its parts of rows, of so many tokens: queries, keys and values, and the
    output, and the gradients of all of them; in a block that is recomputed whole the first ones once more."""
    if layout.context == 1:
        return 0.0
    numbers = max(
        (one.queries + one.copies(layout.context) * one.keys) * (one.size + one.of_values) for one in model.heads
    )
    passes = layout.micro_batches * model.num_attending * (2 + layout.recomputed_part)
    return passes * layout.width * numbers * row_tokens * (layout.context - 1) / layout.context
