"""Where the host waits for the device, by line of tonnage: a table, and what goes into the results."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from device.stand_in.machine import Served
from device.stand_in.shapes import shapes
from device.stand_in.walk import Walked, make_models, notes_of, walk

SHOWN = 12


def lines(folder: Path) -> dict[str, int]:
    """Waits of rank 0 in its second step, by the line of tonnage that led to them and the phase; most first."""
    found, step = Counter[str](), 0
    for note in notes_of(folder, "waits"):
        if note["rank"] != 0:
            continue
        if note["phase"] == "step" and not note["places"]:
            step += 1
        place = note["places"][0] if note["places"] else "torch"
        found[f"{note['phase']}: {place}"] += 1
    return dict(found.most_common())


def counted(served: Served, models: Path, work: Path, names: list[str]) -> list[tuple[Walked, dict[str, Any]]]:
    """Each shape, and its waits by line over all of its steps."""
    found = []
    for shape in shapes("waits"):
        if names and shape.name not in names:
            continue
        walked = walk(shape, served, models, work / shape.name.replace(", ", "-").replace(" ", "-"))
        found.append((walked, lines(work / shape.name.replace(", ", "-").replace(" ", "-") / "notes-0")))
    return found


def show(names: list[str], version: str, work: Path) -> int:
    """Print the table; returns 1 where a shape did not train."""
    models = work / version / "models"
    make_models(models, version)
    good = True
    with Served(version) as served:
        found = counted(served, models, work / version / "shapes", names)
    for walked, places in found:
        facts = walked.facts
        print(f"{walked.name}: {walked.outcome}; {facts.get('synchronisations_a_step')} a step")
        for place, count in list(places.items())[:SHOWN]:
            print(f"  {count:6d}  {place}")
        good = good and walked.went_well
        if not walked.went_well:
            print(walked.told)
    return 0 if good else 1
