"""The files of the model that a run was started from, for what its export takes from them.

A checkpoint holds what is trained. An export has it under the names that it had in those files, and besides it what
they hold and nobody trained: other towers, layers that predict further tokens, values beside the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from tonnage.checkpoint.shards import Shards
from tonnage.errors import UserError, user_error
from tonnage.model.files import find_model
from tonnage.model.matching import ANY, find_places
from tonnage.model.merging import Match
from tonnage.model.names import Names
from tonnage.model.towers import digest, in_tower
from tonnage.model.vision import attach_tower


@dataclass(frozen=True)
class Origin:
    """What an export needs to know of the files of a model."""

    found: Match
    """Where its tensors are."""
    keys: Mapping[str, tuple[str, ...]]
    """Parameter -> the names under which it is stored as it is."""


def read_origin(directory: Path, model: PreTrainedModel, carried_digest: str, weights_digest: str) -> Origin | None:
    """The files in ``directory`` that a run of ``model`` was started from; only headers, and the ends of what is
    carried, are read.

    ``carried_digest`` is of what an export has to carry, as the plan has it; empty if that is nothing. Then it does not
    matter if the files are gone, or are another model's: the result is None. ``weights_digest`` is of the weights that
    were not trained, which an export has to take as well.

    Raises:
        UserError: what has to be carried is not there any more, or has changed.
    """
    try:
        files = find_model(str(directory), tokenizer=False)
        match = find_places(model, files, ANY, ANY)
    except UserError as error:
        if not carried_digest and not weights_digest:
            return None
        raise _refused(directory, error.problems[0].found) from error
    changed = weights_digest and digest(match.sources) != weights_digest
    if changed or (carried_digest and digest(match.carried) != carried_digest):
        raise _refused(directory, "other values than the run was started from")
    return _origin(model, match)


def trains_tower(shards: Shards) -> bool:
    """Whether a checkpoint has parameters of a tower, or additions to it."""
    return any(in_tower(name.removeprefix("model.")) for name in shards.names("model."))


def with_tower(model: PreTrainedModel, directory: Path) -> Origin:
    """As ``read_origin`` of files that it has looked at, where some of the tower was trained: it is attached to
    ``model``."""
    files = find_model(str(directory), tokenizer=False)
    attach_tower(model, files, model.dtype)
    return _origin(model, find_places(model, files, ANY, ANY))


def _origin(model: PreTrainedModel, match: Match) -> Origin:
    names = Names(model, match.whole)
    keys: dict[str, list[str]] = {}
    for stored, name in match.places:
        if names.knows(stored.key):  # what wrappers put into a name is not kept
            keys.setdefault(name, []).append(stored.key)
    return Origin(match, {name: tuple(several) for name, several in keys.items()})


def _refused(directory: Path, observed: str) -> UserError:
    return user_error(
        where=str(directory),
        found=f"{observed}, where the export takes what was not trained",
        needed="the files of the model that the run was started from",
        change="put them back there (or download the model again), then export once more",
    )
