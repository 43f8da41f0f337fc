"""A first look at a model and its rows, before anybody has decided anything: what ``tonnage init`` goes by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from tonnage.config import Config, as_overrides, overridden_key, read_config
from tonnage.data import Account, DataError, Progress, SourceAccount, silent
from tonnage.data.sources.given import read_sources
from tonnage.decide.models import ModelFound, find
from tonnage.decide.rows import prepare_data
from tonnage.errors import Problem, UserError
from tonnage.forms.formats import FORMATS, RowPurpose

Purpose = Literal["chat", "task", "text"]
"""What a model is trained for: answers in conversations, one task, or text that goes on like the rows."""

LOOKED_AT = 32768
"""Tokens of a pack while lengths are looked at, of a model that says no number of positions; no length is cut."""
MOST_BAD = 0.01
"""Of the rows, that are left out with a word; more of them, and the rows are refused."""
SHORTEST = 2
"""What any model has positions for."""


@dataclass(frozen=True)
class Wanted:
    """What the user asks for: a model, rows, and keys of the config in words as ``optimizer.lr=1e-4``."""

    model: str
    rows: str
    words: tuple[str, ...] = ()

    def says(self, key: str) -> bool:
        """Whether the words say what a key is, the whole of it or a part."""
        said = map(overridden_key, self.words)
        return any(one == key or one.startswith(f"{key}.") or key.startswith(f"{one}.") for one in said)

    def config(self, tree: Mapping[str, Any]) -> Config:
        """The config of a tree of keys, with what is asked for in it. Raises ``UserError`` with every problem."""
        given = {"model": self.model, "data": {"train": self.rows}}
        return read_config(None, [*as_overrides(tree), *as_overrides(given), *self.words])

    def with_data(self, config: Config, keys: Mapping[str, Any]) -> Config:
        """The config with other ``keys`` of ``data``, but those that the words say."""
        free = {name: value for name, value in keys.items() if not self.says(f"data.{name}")}
        return config.with_keys("data", free)


@dataclass(frozen=True)
class Looked:
    """What was found."""

    wanted: Wanted
    model: ModelFound
    positions: int | None
    """Tokens that the model has positions for, if it says so."""
    account: Account
    """Of all rows that can be read, however long."""
    is_chat: bool
    """Whether rows are made into text by a template."""
    single_turn: bool
    """Whether rows are one question and one answer each, as far as they were looked at."""

    @property
    def purpose(self) -> Purpose:
        """What the rows look like they are for."""
        if not self.is_chat:
            return "text"
        return "task" if self.single_turn else "chat"

    @property
    def different_rows(self) -> int:
        """Rows that can be read, equal ones counted once."""
        total = self.account.total
        return total.rows_read - total.rows_bad - total.rows_duplicate


def look(wishes: Wanted, progress: Progress = silent) -> Looked:
    """Find the model and read all rows.

    Raises:
        UserError: there is no such model or there are no such rows, more than ``MOST_BAD`` of them cannot be read, or
            the words name another model or other rows.
    """
    from tonnage.model.files import positions_of

    twice = {"model", "data.train"} & {*map(overridden_key, wishes.words)}
    if twice:
        raise UserError(*(Problem("given twice", "one value", f"leave {key}=... out", key) for key in sorted(twice)))
    config = wishes.config({"data": {"max_length": SHORTEST}})
    if config.adapter == "auto":  # as it is where nothing is said
        wishes = replace(wishes, words=tuple(word for word in wishes.words if overridden_key(word) != "adapter"))
    wishes = _with_objective(wishes, config)
    config = wishes.config({"data": {"max_length": SHORTEST}})
    model = find(config)
    sources = read_sources(config.data, config.objective.rows)
    positions = positions_of(model.config)
    return Looked(
        wanted=wishes,
        model=model,
        positions=positions,
        account=_account(wishes, config, model, positions or LOOKED_AT, progress),
        is_chat=any(format not in FORMATS or FORMATS[format].is_chat for format in sources.formats),
        single_turn=sources.single_turn,
    )


def _with_objective(wishes: Wanted, config: Config) -> Wanted:
    """The same with the objective that rows of preferences are for, where they are such and nothing is said of it."""
    if wishes.says("objective"):
        return wishes
    # A label beside an answer is found out row by row where rows are for supervised training, so it comes first.
    kinds: dict[RowPurpose, str] = {"verdicts": "kto", "supervised": "supervised", "pairs": "dpo"}
    refusals: dict[str, UserError] = {}
    for purpose, kind in kinds.items():
        try:
            read_sources(config.data, purpose)
        except UserError as refusal:
            refusals[kind] = refusal
            continue
        return wishes if kind == "supervised" else replace(wishes, words=(*wishes.words, f"objective={kind}"))
    raise refusals["supervised"]


def _account(wishes: Wanted, config: Config, model: ModelFound, length: int, progress: Progress) -> Account:
    """The account of all rows, those that training would refuse included."""
    free: dict[str, Any] = {"max_length": length, "over_length": "truncate", "max_loss": 1.0, "validation": 0.0}
    lenient = wishes.with_data(config, free | {"on_bad_row": "skip"})
    refusal = None
    try:
        account = prepare_data(lenient, model, progress).account
    except DataError as error:
        account, refusal = error.account, error
    if account.total.rows_bad > MOST_BAD * account.total.rows_read:
        prepare_data(wishes.with_data(lenient, {"on_bad_row": "error"}), model, progress)  # names them
    if refusal is not None:
        raise refusal
    return account


def longest(account: Account) -> int:
    """Tokens of the longest document to train on."""
    return max((source.lengths.longest for source in _trained(account)), default=0)


def typical(account: Account) -> int:
    """Tokens that 99 of 100 documents to train on do not exceed."""
    return max((source.lengths.percentiles.get("p99", 0) for source in _trained(account)), default=0)


def _trained(account: Account) -> list[SourceAccount]:
    return [source for source in account.sources if source.role == "train"]
