"""Files of other programs in, a config of ours out, with an account of every key.

    files ──► keys that were given ──► rules, quantity by quantity ──► keys of ours ──► YAML text
                                         │                                 │
                                         └── what became of each ──────────┴──► Import

The order of the rules is the order in which they need each other: workers before the batch, rows before evaluations,
the rate before what is a fraction of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tonnage.config import check
from tonnage.config.schema import Config
from tonnage.migration import adapters, material, placement, scripts, showing, training, upkeep
from tonnage.migration.keys import VERDICTS, Verdict
from tonnage.migration.reading import Files, read_files
from tonnage.migration.sheet import Conflict, Entry, Implied, Need, Pick, Sheet, whole
from tonnage.migration.text import config_text, nested

REQUIRED = {
    "model": Need("model", "a hub id or a local directory", "HUB_ID_OR_DIRECTORY"),
    "data.train": Need("data.train", "rows to train on: a file, directory or hub id", "ROWS"),
}
STAND_INS = {"model": "x", "data.train": "x", "batch.sequences": 2**20}
"""For what is still needed, while the rest is checked."""


@dataclass(frozen=True)
class Import:
    """What became of the files."""

    program: str
    """Whose configuration it is."""
    version: str
    """The program and the version of it whose defaults hold where the files are silent; empty without any."""
    files: tuple[str, ...]
    tree: dict[str, Any]
    """Keys of ours that are set, nested."""
    text: str
    """The same as YAML, with what is still needed as comments."""
    entries: tuple[Entry, ...]
    """One for each key that was given, in the order of the files."""
    implied: tuple[Implied, ...]
    conflicts: tuple[Conflict, ...]
    needs: tuple[Need, ...]
    """What is missing; a config that ``tonnage train`` takes if empty."""
    notes: tuple[str, ...]

    def of(self, verdict: Verdict) -> list[Entry]:
        """One of the four lists."""
        return [entry for entry in self.entries if entry.verdict == verdict]

    @property
    def is_whole(self) -> bool:
        """Whether every key was known and could be done."""
        return not self.of("unknown") and not self.of("not supported")

    @property
    def lost(self) -> list[Entry]:
        """Keys that decide what is computed and are not carried over."""
        return [entry for entry in self.entries if entry.is_lost]

    def to_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        lists = {
            verdict.replace(" ", "_"): [_entry_as_json(entry) for entry in self.of(verdict)] for verdict in VERDICTS
        }
        return {
            "program": self.program,
            "version": self.version,
            "files": list(self.files),
            "config": self.tree,
            "yaml": self.text,
            **lists,
            "implied": [{"key": i.key, "value": i.value, "because": i.because} for i in self.implied],
            "conflicts": [{"said": list(conflict.said), "taken": conflict.taken} for conflict in self.conflicts],
            "needed": [{"key": need.key, "sentence": need.sentence} for need in self.needs],
            "notes": list(self.notes),
            "lost": [entry.given.shown for entry in self.lost],
        }


def import_files(sources: Sequence[str | Path], *, workers: int | None = None) -> Import:
    """Turn configurations of other programs into one of ours.

    Sources are files, or a command in one string; several are combined. ``workers`` says how many workers there are
    where no file does. Raises ``UserError`` if a file cannot be read as any of them.
    """
    return convert(read_files(sources, workers))


def convert(files: Files) -> Import:
    """Turn what was read into a config."""
    sheet = Sheet(files)
    scripts.supervised(sheet)
    placement.other_files(sheet)
    ranks = placement.workers(sheet)
    training.batch(sheet, ranks)
    training.duration(sheet)
    training.optimizer(sheet)
    training.schedule(sheet)
    training.precision(sheet)
    placement.memory(sheet)
    material.model(sheet)
    adapters.trained(sheet)
    if showing.lists_data_sets(sheet):
        showing.rows_and_template(sheet)
        showing.plugins(sheet)
        material.lengths(sheet)
    else:
        material.rows(sheet, evaluates=upkeep.evaluates(sheet))
        material.lengths(sheet)
        material.mask(sheet)
        material.special_tokens(sheet)
        showing.tokens(sheet)
    upkeep.evaluation(sheet)
    upkeep.best_step(sheet)
    upkeep.saving(sheet)
    upkeep.pushing(sheet)
    upkeep.tracking(sheet)
    upkeep.seeds(sheet)
    _length_of_the_run(sheet)
    sheet.finish()
    named = {need.key for need in sheet.needs}
    sheet.needs[:0] = [need for key, need in REQUIRED.items() if key not in sheet.tree and key not in named]
    sheet.needs += _contradictions(sheet)
    version = sheet.program.with_version if sheet.has_arguments else ""
    return Import(
        program=files.program,
        version=version,
        files=files.names,
        tree=nested(sheet.tree),
        text=config_text(sheet.tree, sheet.origins, sheet.needs, files.names, version),
        entries=tuple(sheet.entries[given.number] for given in files.givens),
        implied=tuple(sheet.implied),
        conflicts=tuple(sheet.conflicts),
        needs=tuple(sheet.needs),
        notes=tuple(sheet.notes),
    )


def _length_of_the_run(sheet: Sheet) -> None:
    """``total_num_steps`` of a DeepSpeed scheduler, where nothing else says how long the run is."""
    if sheet.has_arguments and (autos := sheet.autos("total_steps")):
        sheet.drop(Pick("auto", tuple(autos)), "Follows from epochs or steps.")
    pick = next(iter(sheet.every("total_steps", whole)), None)
    if pick is None:
        return
    if "steps" in sheet.tree or "epochs" in sheet.tree:
        sheet.drop(pick, "Other keys say how long the run is.")
    else:
        sheet.put("steps", pick.value, pick)


def _contradictions(sheet: Sheet) -> list[Need]:
    """What our own checks say of the whole, files left aside."""
    tree = nested({need.key: STAND_INS[need.key] for need in sheet.needs if need.key in STAND_INS} | sheet.tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        return [Need(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
    return [
        Need(found.keys[0], f"{found.found}; needed: {found.needed}" + (f" ({found.change})" if found.change else ""))
        for found in check.contradictions(config)
    ]


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.given.shown,
        "value": entry.given.shown_value,
        "file": entry.given.where,
        "to": dict(entry.to),
        "note": entry.note,
    }
