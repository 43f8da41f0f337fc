"""The teacher of a run that distils: whether it has the same vocabulary, and where what it expects lies."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Config
from tonnage.decide.models import ModelFound
from tonnage.errors import UserError, user_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tonnage.data import Prepared, Progress
    from tonnage.model.files import ModelFiles
    from tonnage.planning.plan import Plan


@dataclass(frozen=True)
class Teacher:
    """A teacher whose weights nobody has read yet."""

    files: ModelFiles
    config: PreTrainedConfig


def find_teacher(config: Config, model: ModelFound) -> Teacher | None:
    """The teacher of a run, whose tokens are those of the model that is trained; None if the run has none.

    Raises:
        UserError: there is no such model, its tokens are others, or it has fewer than are to be kept of each.
    """
    from tonnage.model.files import check_fit, read_model, read_tokenizer
    from tonnage.model.matching import check_weights

    objective = config.objective
    if not objective.distils or objective.teacher is None:
        return None
    trusts, where = config.trust_remote_code, "objective.teacher"
    try:
        files, teacher_config = read_model(
            objective.teacher, revision=objective.teacher_revision, trust_remote_code=trusts
        )
        tokenizer = read_tokenizer(files, trust_remote_code=trusts)
        check_fit(teacher_config, tokenizer, config.data.max_length)
        check_weights(files, teacher_config, allow_unexpected=config.allow_unexpected)
    except UserError as error:
        problems = (replace(one, where=f"{where}, {one.where}" if one.where else where) for one in error.problems)
        raise UserError(*problems) from error
    _check_same(model.tokenizer, tokenizer, objective.teacher)
    least = min(teacher_config.vocab_size, model.config.vocab_size)
    if objective.top_k > least:
        observed = f"objective.top_k is {objective.top_k:,}, and the vocabulary has {least:,} tokens"
        raise user_error(observed, "at most all of them", f"objective.top_k={least}", "objective.top_k")
    return Teacher(files, teacher_config)


def check_no_token_is_new(prepared: Prepared, model: ModelFound) -> None:
    """Refuse tokens that training adds, and of which a teacher knows nothing. Raises ``UserError``."""
    known = model.tokenizer.get_vocab()
    new = sorted(set(prepared.tokenizer.get_vocab()) - set(known))
    if new:
        observed = f"tokens that are new to the vocabulary ({', '.join(new[:5])}), and objective.kind distil"
        change = "leave data.added_tokens and data.eos_token out, or use another data.template"
        raise user_error(observed, "tokens that the teacher knows too", change, "objective.teacher")


def _check_same(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, teacher: str) -> None:
    """Refuse a teacher whose tokens are others. Its rows of padding do not matter. Raises ``UserError``."""
    own_ids, other_ids = own.get_vocab(), other.get_vocab()
    if own_ids == other_ids:
        return
    tokens = sorted(set(own_ids) | set(other_ids))
    different = [token for token in tokens if own_ids.get(token) != other_ids.get(token)]
    first = different[0]
    numbers = " and ".join(
        f"{ids.get(first, 'no token')} of the {owner}" for ids, owner in ((own_ids, "model"), (other_ids, "teacher"))
    )
    raise user_error(
        f"{teacher} has another vocabulary: {len(different):,} tokens differ; {first!r} is {numbers}",
        "a teacher of the same family, whose tokenizer has the same tokens with the same numbers",
        "choose another teacher, or another model",
        "objective.teacher",
    )


def entry_of(config: Config, teacher: Teacher, plan: Plan, progress: Progress) -> Path:
    """The cache's entry for a run, which need not be there. The teacher's files are read once, to know them again.

    The temperature is no part of its address: what is kept is as it is at 1, from which the rest follows.
    """
    from tonnage.data import cache as store

    packs = Path(plan.data.train_path).parent
    cache, files = packs.parent.parent, teacher.files
    adapter = sorted(files.adapter.directory.glob("adapter_*")) if files.adapter is not None else []
    weights, digests = [*sorted(files.weights), *adapter], []
    for number, file in enumerate(weights):
        progress("reading the teacher's files", number, len(weights))
        digests.append(store.remembered_digest(cache, str(file)))
    progress("reading the teacher's files", len(weights), len(weights))
    sees_all = plan.num_packs >= plan.data.num_packs
    described: dict[str, Any] = teacher.config.to_dict()
    described.pop("_name_or_path", None)
    parts: dict[str, Any] = {
        "weights": digests,
        "config": repr(sorted(described.items())),
        "packs": packs.name,
        "visited": None if sees_all else [plan.num_packs, config.seed],
        "precision": config.precision,
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
    from tonnage.data.packs.taught import row_type
    from tonnage.planning.words import size
    from tonnage.rundir.directory import RunDirectory

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
    if _existing(own).stat().st_dev != _existing(entry).stat().st_dev:
        needs.append((own, num_bytes))
    for place, needed in needs:
        space = os.statvfs(_existing(place))
        if (free := space.f_bavail * space.f_frsize) < needed:
            observed = f"{free:,} bytes free, and {needed:,} to come of what the teacher expects"
            change = "make room, lower objective.top_k, or set data.cache and output to another disk"
            raise user_error(observed, "room for all of it", change, str(_existing(place)))


def _existing(path: Path) -> Path:
    """A path, or the nearest above it that is there."""
    while not path.exists():
        path = path.absolute().parent
    return path
