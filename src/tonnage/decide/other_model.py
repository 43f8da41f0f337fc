"""Another model than the one that is trained, which is asked before training: a teacher, or a reference by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.config import Config
from tonnage.data import Prepared, Progress
from tonnage.data import cache as store
from tonnage.decide.models import ModelFound
from tonnage.errors import UserError, user_error

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tonnage.model.files import ModelFiles


@dataclass(frozen=True)
class OtherModel:
    """A model whose weights nobody has read yet."""

    key: str
    """The key of ``objective`` that names it."""
    files: ModelFiles
    config: PreTrainedConfig


def find_other(config: Config, model: ModelFound) -> OtherModel | None:
    """The other model of a run, whose tokens are those of the model that is trained; None if the run has none.

    Raises:
        UserError: there is no such model, its tokens are others, or it has fewer than are to be kept of each.
    """
    from tonnage.model.files import check_fit, read_model, read_tokenizer
    from tonnage.model.matching import check_weights

    objective = config.objective
    key = "teacher" if objective.teacher is not None else "reference"
    name, revision = getattr(objective, key), getattr(objective, f"{key}_revision")
    if name is None:
        return None
    trusts, where = config.trust_remote_code, f"objective.{key}"
    try:
        files, other_config = read_model(name, revision=revision, trust_remote_code=trusts)
        tokenizer = read_tokenizer(files, trust_remote_code=trusts)
        check_fit(other_config, tokenizer, config.data.max_length)
        check_weights(files, other_config, allow_unexpected=config.allow_unexpected)
    except UserError as error:
        problems = (replace(one, where=f"{where}, {one.where}" if one.where else where) for one in error.problems)
        raise UserError(*problems) from error
    _check_same(model.tokenizer, tokenizer, name, where)
    least = min(other_config.vocab_size, model.config.vocab_size)
    if objective.distils and objective.top_k > least:
        observed = f"objective.top_k is {objective.top_k:,}, and the vocabulary has {least:,} tokens"
        raise user_error(observed, "at most all of them", f"objective.top_k={least}", "objective.top_k")
    return OtherModel(key, files, other_config)


def digests_of(cache: Path, files: Sequence[Path], what: str, progress: Progress) -> list[str]:
    """Of a model's files, which are read once, to know them again. ``what`` says whose."""
    digests = []
    for number, file in enumerate(files):
        progress(f"reading {what} files", number, len(files))
        digests.append(store.remembered_digest(cache, str(file)))
    progress(f"reading {what} files", len(files), len(files))
    return digests


def check_no_token_is_new(prepared: Prepared, model: ModelFound, other: OtherModel) -> None:
    """Refuse tokens that training adds, and of which the other model knows nothing. Raises ``UserError``."""
    known = model.tokenizer.get_vocab()
    new = sorted(set(prepared.tokenizer.get_vocab()) - set(known))
    if new:
        observed = f"tokens that are new to the vocabulary ({', '.join(new[:5])}), and objective.{other.key}"
        change = "leave data.added_tokens and data.eos_token out, or use another data.template"
        raise user_error(observed, f"tokens that the {other.key} knows too", change, f"objective.{other.key}")


def _check_same(own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, name: str, where: str) -> None:
    """Refuse a model whose tokens are others. Its rows of padding do not matter. Raises ``UserError``."""
    own_ids, other_ids = own.get_vocab(), other.get_vocab()
    if own_ids == other_ids:
        return
    tokens = sorted(set(own_ids) | set(other_ids))
    different = [token for token in tokens if own_ids.get(token) != other_ids.get(token)]
    first, key = different[0], where.rpartition(".")[2]
    numbers = " and ".join(
        f"{ids.get(first, 'no token')} of the {owner}" for ids, owner in ((own_ids, "model"), (other_ids, key))
    )
    raise user_error(
        f"{name} has another vocabulary: {len(different):,} tokens differ; {first!r} is {numbers}",
        f"a {key} of the same family, whose tokenizer has the same tokens with the same numbers",
        f"choose another {key}, or another model",
        where,
    )
