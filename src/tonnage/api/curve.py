"""Curves as small SVGs, for notebooks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, MARGIN = 480, 120, 6
MOST_POINTS = 240

SHOWN = {
    "loss": "loss",
    "eval_loss": "loss of evaluations",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "tokens_per_second": "tokens a second",
}
"""Keys of records that are drawn, and what they are called."""


def curves(records: Sequence[Mapping[str, Any]]) -> str:
    """What the records of a run say, as SVGs side by side, each under its name."""
    series = {name: [record[key] for record in records if key in record] for key, name in SHOWN.items()}
    return "".join(
        f'<div style="display: inline-block; margin: 6px 12px 0 0"><small>{name}</small><br>{drawn}</div>'
        for name, values in series.items()
        if (drawn := curve(values, name))
    )


def curve(values: Sequence[float | None], name: str = "loss") -> str:
    """Values of a ``name``, one after another, as an SVG with the least and the greatest of them; empty where none is
    finite.

    Longer curves are drawn through the means of as many stretches as there are points. A value that is None or not
    finite is a gap.
    """
    length, number = len(values), min(len(values), MOST_POINTS)
    means = [_mean(values[length * at // number : length * (at + 1) // number]) for at in range(number)]
    present = [mean for mean in means if mean is not None]
    if not present:
        return ""
    low, high = min(present), max(present)
    span = high - low or 1.0

    def place(index: int, mean: float) -> str:
        across = MARGIN + (WIDTH - 2 * MARGIN) * index / max(1, len(means) - 1)
        down = MARGIN + (HEIGHT - 2 * MARGIN) * (high - mean) / span
        return f"{across:.1f},{down:.1f}"

    lines: list[list[str]] = [[]]
    for index, mean in enumerate(means):
        if mean is None:
            lines.append([])
        else:
            lines[-1].append(place(index, mean))
    drawn = "".join(
        f'<polyline points="{" ".join(points if len(points) > 1 else points * 2)}" fill="none" stroke="#2b5f8f" '
        'stroke-width="2" stroke-linecap="round"/>'
        for points in lines
        if points
    )
    title = f"{name}: {len(values):,} values, {low:.4g} to {high:.4g}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img"><title>{title}</title>'
        f'{drawn}<text x="{WIDTH - MARGIN}" y="14" text-anchor="end" font-size="11" fill="gray">{high:.4g}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - MARGIN}" font-size="11" fill="gray">{low:.4g}</text></svg>'
    )


def _mean(values: Sequence[float | None]) -> float | None:
    finite = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(value / len(finite) for value in finite) if finite else None
