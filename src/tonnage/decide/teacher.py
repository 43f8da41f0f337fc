"""The teacher of a run that distils: where what it expects lies, and how much that is."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tonnage.config import Config
from tonnage.data import Progress
from tonnage.data import cache as store
from tonnage.data.packs.taught import row_type
from tonnage.decide.other_model import OtherModel, digests_of
from tonnage.errors import user_error
from tonnage.files.places import existing, free_bytes
from tonnage.planning.plan import Plan
from tonnage.planning.words import size
from tonnage.rundir.directory import RunDirectory


def entry_of(config: Config, teacher: OtherModel, plan: Plan, progress: Progress) -> Path:
    """The cache's entry for a run, which need not be there. The teacher's files are read once, to know them again.

    The temperature is no part of its address: what is kept is as it is at 1, from which the rest follows.
    """
    packs = Path(plan.data.train_path).parent
    cache, files = packs.parent.parent, teacher.files
    adapter = sorted(files.adapter.directory.glob("adapter_*")) if files.adapter is not None else []
    digests = digests_of(cache, [*sorted(files.weights), *adapter], "the teacher's", progress)
    sees_all = plan.num_packs >= plan.data.num_packs
    described: dict[str, Any] = teacher.config.to_dict()
    described.pop("_name_or_path", None)
    parts: dict[str, Any] = {
        "weights": digests,
        "config": repr(sorted(described.items())),
        "packs": packs.name,
        "visited": None if sees_all else [plan.num_packs, config.seed],
        "precision": config.dtype,
        "top_k": config.objective.top_k,
        "tokens": min(teacher.config.vocab_size, plan.model.vocab_size),
        "versions": [version(name) for name in ("torch", "transformers")],
    }
    return cache / "teachers" / store.key(parts)


def with_teacher(config: Config, plan: Plan, entry: Path, validation_tokens: int) -> Plan:
    """The plan with the place of what the teacher expects, and how much that is. ``validation_tokens`` are supervised.

    Raises:
        UserError: the disk has no room for it.
    """
    objective, data = config.objective, plan.data
    fraction = min(1.0, plan.num_packs / data.num_packs)
    tokens = math.ceil(data.supervised_tokens * fraction) + validation_tokens
    num_bytes = tokens * row_type(objective.top_k, config.precision).itemsize
    own = RunDirectory(config.output).teacher / entry.name
    if own.exists():
        has = "the run has them"
    elif entry.exists():
        has = "the cache has them from an earlier run"
    else:
        has = "computed once, before training, by the run's workers, who share the teacher's weights until then"
    if not own.exists():
        _check_room(entry, own, num_bytes)
    likeliest = f"the {objective.top_k:,} likeliest tokens in the place of each of {tokens:,} supervised tokens"
    why = f"{likeliest}, {size(num_bytes)} ({has})"
    return replace(plan, data=replace(data, teacher_path=str(entry)), reasons=plan.reasons | {"objective.teacher": why})


def _check_room(entry: Path, own: Path, num_bytes: int) -> None:
    """Refuse where the cache has no room for its entry, or the run's own disk, where that is another, for a copy.

    Raises ``UserError``.
    """
    from tonnage.training.chunks import parts_of

    written = sum(file.stat().st_size for file in parts_of(entry).glob("*.npy"))
    needs = [] if entry.exists() else [(entry, num_bytes - written)]
    if existing(own).stat().st_dev != existing(entry).stat().st_dev:
        needs.append((own, num_bytes))
    for place, needed in needs:
        if (free := free_bytes(place)) < needed:
            observed = f"{free:,} bytes free, and {needed:,} to come of what the teacher expects"
            change = "make room, lower objective.top_k, or set data.cache and output to another disk"
            raise user_error(observed, "room for all of it", change, str(existing(place)))
