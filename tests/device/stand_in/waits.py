"""Where the host waits for the device, by line of tonnage: a table, and what goes into the results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from device.stand_in.machine import Served
from device.stand_in.settings import Setting
from device.stand_in.shapes import shapes
from device.stand_in.walk import Walked, folder_of, make_models, notes_of, walk

SHOWN = 12
PHASES = ("step", "forward", "backward", "update")
"""Of the loop, between saves and evaluations."""


def lines(folder: Path) -> dict[str, int]:
    """Waits of rank 0 in all of its steps, by the phase and the line of tonnage that led to them; most first."""
    notes = [note for note in notes_of(folder, "waits") if note["rank"] == 0 and note["phase"] in PHASES]
    found = Counter(f"{note['phase']}: {note['places'][0] if note['places'] else 'torch'}" for note in notes)
    return dict(found.most_common())


def counted(shape: Setting, served: Served, models: Path, work: Path) -> tuple[Walked, dict[str, int]]:
    """What became of a shape that is watched by ``waits``, and its waits by line over all of its steps."""
    folder = folder_of(work, shape)
    return walk(shape, served, models, folder), lines(folder / "notes-0")


def show(names: list[str], version: str, work: Path) -> int:
    """Print the table; returns 1 where a shape did not train."""
    models = work / version / "models"
    make_models(models, version)
    good = True
    with Served(version) as served:
        chosen = [shape for shape in shapes("waits") if not names or shape.name in names]
        found = [counted(shape, served, models, work / version / "shapes") for shape in chosen]
    for walked, places in found:
        facts = walked.facts
        print(f"{walked.name}: {walked.outcome}; {facts.get('synchronisations_a_step')} a step")
        for place, count in list(places.items())[:SHOWN]:
            print(f"  {count:6d}  {place}")
        good = good and walked.went_well
        if not walked.went_well:
            print(walked.told)
    return 0 if good else 1
