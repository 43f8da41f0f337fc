"""The page of the documentation that says what becomes of every family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sweep.trial import Outcome

HEAD = """# Model families

Every name in the causal language model mapping of transformers, tried as a tiny model of its default configuration:
two steps in fp32, at least five documents a pack. A family is in the table as trained only if losses are equal to those
of plain transformers on one document at a time to 1e-5, and gradient norms to 1e-4 (relative), with weights so large
that documents which see each other change the loss by ten times as much at least (of most by a hundred times).

- *packed*: documents lie in one row, one after another, and keep to themselves there.
- *padded*: each document has a row of its own, padded at the right; documents of a step are sorted by length, so that
  little is padding, and a plan says how much. What a step is made of is the same as in packed rows.
- *refused*: in one sentence, before any weight is read.
- *too slow*: nothing was found out in minutes.
- *not tried*: transformers makes no tiny model of the family's default configuration.

A run asks the same of its own model before it starts ([how](planning.md#packed-or-padded)), on the kind of device that
it runs on. No family is known by its name: what counts is what a tiny model of the very configuration computes.

Each family that trains was also trained by two workers with ZeRO 3, with full recompute (gradient checkpointing), with
its optimizer on disk, and with everything on disk, each time stopped after a step, resumed and exported
([2026-11-27](../benchmarks/results/models_layouts.json), `python -m tests.sweep --layouts NAME ...`): losses and norms
are equal to plain transformers' as above, and the export has every tensor of the original, by name and shape.
"""


def page(outcomes: Sequence[Outcome], date: str, torch: str, transformers: str) -> str:
    """Markdown."""
    counts = Counter(outcome.kind for outcome in outcomes)
    told = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    rows = [f"| {one.name} | {one.kind} | {_cell(one)} |" for one in outcomes]
    made = f"On {date}, with torch {torch.split('+')[0]} and transformers {transformers}, on a CPU: {told}."
    command = "`python -m tests.sweep --output benchmarks/results/models.json --page docs/models.md` makes this page."
    return "\n".join([HEAD, made, command, "", "| family | rows | what was found |", "|---|---|---|", *rows, ""])


def _cell(outcome: Outcome) -> str:
    if outcome.kind == "packed":
        return ""
    note = outcome.note.removeprefix(f"model type {outcome.name}: ")
    note = note.removeprefix("padded: documents would not keep to themselves in one row (").partition("), so each")[0]
    return note.replace("|", "/").replace("<", "&lt;").replace("_", "\\_").replace("*", "\\*")
