"""Files of other programs in, a config of ours out, with an account of every key.

    files ──► keys that were given ──► rules, quantity by quantity ──► keys of ours ──► YAML text
                                         │                                 │
                                         └── what became of each ──────────┴──► Import

The order of the rules is the order in which they need each other: the objective before all, workers before the batch,
rows before evaluations, the rate before what is a fraction of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tonnage.config import check
from tonnage.config.schema import Config
from tonnage.migration import (
    adapters,
    axolotl,
    evaluation,
    images,
    lengths,
    llama_factory,
    memory,
    model,
    objective,
    rendering,
    rounding,
    saving,
    swift,
    torchtune,
    torchtune_rows,
    trainer,
    training,
    workers,
)
from tonnage.migration.config_text import config_text, nested
from tonnage.migration.draft import Conflict, Draft, Entry, Implied, MissingAnswer, Pick
from tonnage.migration.keys import AXOLOTL, LLAMA_FACTORY, SWIFT, TORCHTUNE, VERDICTS, VERSION_1, Verdict
from tonnage.migration.reading import Files, read_files
from tonnage.migration.templates import AXOLOTL_TEMPLATES, LLAMA_FACTORY_TEMPLATES
from tonnage.migration.values import flag, whole

REQUIRED = {
    "model": MissingAnswer("model", "a hub id or a local directory", "HUB_ID_OR_DIRECTORY"),
    "data.train": MissingAnswer("data.train", "rows to train on: a file, directory or hub id", "ROWS"),
}
STAND_INS = {"model": "x", "data.train": "x", "batch.sequences": 2**20, "objective.kind": "dpo"}
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
    needs: tuple[MissingAnswer, ...]
    """What is missing; a config that ``tonnage train`` takes if empty."""
    notes: tuple[str, ...]

    def of(self, verdict: Verdict) -> list[Entry]:
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
            "implied": [asdict(implied) for implied in self.implied],
            "conflicts": [{"said": list(conflict.said), "taken": conflict.taken} for conflict in self.conflicts],
            "needed": [{"key": need.key, "sentence": need.sentence} for need in self.needs],
            "notes": list(self.notes),
            "lost": [entry.setting.shown for entry in self.lost],
        }


def import_files(sources: Sequence[str | Path], *, workers: int | None = None) -> Import:
    """Turn configurations of other programs into one of ours.

    Sources are files, or a command in one string; several are combined. ``workers`` says how many workers there are
    where no file does. Raises ``UserError`` if a file cannot be read as any of them.
    """
    return convert(read_files(sources, workers))


def convert(files: Files) -> Import:
    draft = Draft(files)
    if files.has(TORCHTUNE):
        torchtune.components(draft)
    elif files.has(SWIFT):
        swift.components(draft)
    objective.objective(draft)
    workers.other_files(draft)
    num_ranks = workers.workers(draft)
    training.batch(draft, num_ranks)
    training.duration(draft)
    training.optimizer(draft)
    training.schedule(draft)
    training.precision(draft)
    memory.memory(draft)
    model.model(draft)
    model.positions(draft)
    adapters.trained(draft)
    training.loraplus(draft)
    rounding.rounding(draft)
    if any(draft.files.has(table) for table in (AXOLOTL, LLAMA_FACTORY, VERSION_1)):
        _rows_of_lists(draft)
        lengths.lengths(draft)
    elif draft.files.has(TORCHTUNE):
        torchtune_rows.rows(draft)
    elif draft.files.has(SWIFT):
        swift.rows(draft)
    else:
        trainer.rows(draft, evaluates=evaluation.evaluates(draft))
        lengths.lengths(draft)
        rendering.mask(draft)
        rendering.template_of_arguments(draft)
        rendering.special_tokens(draft)
        model.tokens(draft)
    evaluation.evaluation(draft)
    evaluation.best_step(draft)
    saving.saving(draft)
    saving.pushing(draft)
    saving.tracking(draft)
    training.seeds(draft)
    training.sampling(draft)
    _length_of_the_run(draft)
    draft.finish()
    named = {need.key for need in draft.needs}
    draft.needs[:0] = [need for key, need in REQUIRED.items() if key not in draft.tree and key not in named]
    draft.needs += _contradictions(draft)
    version = draft.program.with_version if draft.has_arguments else ""
    return Import(
        program=files.program,
        version=version,
        files=files.names,
        tree=nested(draft.tree),
        text=config_text(draft.tree, draft.origins, draft.needs, files.names, version),
        entries=tuple(draft.entries[setting.number] for setting in files.settings),
        implied=tuple(draft.implied),
        conflicts=tuple(draft.conflicts),
        needs=tuple(draft.needs),
        notes=tuple(draft.notes),
    )


def _rows_of_lists(draft: Draft) -> None:
    """Rows, how they are shown and what of them is trained, where a program lists data sets: Axolotl, LLaMA-Factory."""
    is_axolotl = draft.files.has(AXOLOTL)
    sources = axolotl.put_sources(draft) if is_axolotl else llama_factory.put_sources(draft)
    images.images(draft, sources)
    evaluation.validation_fraction(draft)
    draft.copy("data.duplicates", lambda value: "drop" if flag(value) else "keep")
    if is_axolotl:
        axolotl.order(draft)
    else:
        draft.switch("unshuffled", "data.order", "given", "Off.")
        llama_factory.stage(draft, sources)
    rendering.template(draft, sources, AXOLOTL_TEMPLATES if is_axolotl else LLAMA_FACTORY_TEMPLATES)
    model.tokens(draft)
    lengths.shortest(draft)
    lengths.over_length(draft, sources.shown)
    rendering.mask(draft, sources.shown)
    if is_axolotl:
        axolotl.plugins(draft)
    elif "chat" in sources.shown:
        llama_factory.note_differences(draft)


def _length_of_the_run(draft: Draft) -> None:
    """``total_num_steps`` of a DeepSpeed scheduler, where nothing else says how long the run is."""
    if draft.has_arguments and (autos := draft.autos("total_steps")):
        draft.drop(Pick("auto", tuple(autos)), "Follows from epochs or steps.")
    pick = next(iter(draft.every("total_steps", whole)), None)
    if pick is None:
        return
    if "steps" in draft.tree or "epochs" in draft.tree:
        draft.drop(pick, "Other keys say how long the run is.")
    else:
        draft.put("steps", pick.value, pick)


def _contradictions(draft: Draft) -> list[MissingAnswer]:
    """What our own checks say of the whole, files left aside."""
    tree = nested({need.key: STAND_INS[need.key] for need in draft.needs if need.key in STAND_INS} | draft.tree)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        return [MissingAnswer(".".join(map(str, problem["loc"])), problem["msg"]) for problem in error.errors()]
    needs = []
    for problem in check.contradictions(config):
        change = f" ({problem.change})" if problem.change else ""
        needs.append(MissingAnswer(problem.keys[0], f"{problem.found}; needed: {problem.needed}{change}"))
    return needs


def _entry_as_json(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.setting.shown,
        "value": entry.setting.shown_value,
        "file": entry.setting.where,
        "to": dict(entry.to),
        "note": entry.note,
    }
