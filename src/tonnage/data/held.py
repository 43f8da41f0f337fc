"""Packs of rows that lie in memory and stay there: for steps that a program takes with rows of its own.

No cache, no file, no account: every row is a document or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.data.builder import PartBuilder
from tonnage.data.in_memory import SHOWN, plain_rows
from tonnage.data.packing import best_fit
from tonnage.data.packs import Pack
from tonnage.data.prefixes import Prefix
from tonnage.data.recipe import Recipe
from tonnage.data.tokens import Document
from tonnage.errors import Problem, UserError
from tonnage.forms.conversation import RowError
from tonnage.forms.formats import Form, detect, known_forms

MOST_TOLD = 10
"""Problems of rows."""


@dataclass(frozen=True)
class HeldPacks:
    """Packs in memory; of a data set on disk, what a step asks for."""

    packs: tuple[Pack, ...]
    rows: tuple[int, ...]
    """Of each document its row, from 0."""
    common_prefixes: tuple[Prefix, ...] = ()

    @property
    def num_packs(self) -> int:
        """How many there are."""
        return len(self.packs)

    def pack(self, index: int) -> Pack:
        """One pack."""
        return self.packs[index]

    def lengths(self, index: int) -> np.ndarray:
        """Tokens of every document of a pack, int32 (num_documents,)."""
        return self.packs[index].lengths

    def where(self, document: int) -> tuple[str, int]:
        """What the rows are called, and the number of a document's row."""
        return SHOWN, self.rows[document]


class Packer:
    """Packs rows as those of a run were."""

    def __init__(self, recipe: Recipe, forms: Sequence[Form], max_length: int) -> None:
        """``recipe`` and ``forms`` are the run's; ``max_length`` is the most tokens of a pack, and of a document."""
        self._recipe, self._forms, self._max_length = recipe, forms, max_length
        self._builder = PartBuilder(recipe, overlap=False)

    def pack(self, rows: Any) -> HeldPacks:
        """Packs of rows, which are as ``keep_rows`` takes them.

        Raises:
            UserError: a row makes no document, or one that is too long; names it by its number, from 0.
        """
        given = plain_rows(rows)
        made: list[tuple[int, Document]] = []
        problems: list[Problem] = []
        for number, one in self._builder.documents(iter(enumerate(given)), self._form(given)):
            where = f"{SHOWN}:{number}"
            if isinstance(one, RowError):
                problems.append(Problem(one.reason, "a row that can be trained on", one.change, where))
            elif (length := len(one.tokens)) > self._max_length:
                problems.append(
                    Problem(f"{length:,} tokens", f"at most {self._max_length:,} (data.max_length)", where=where)
                )
            else:
                made.append((number, one))
        if problems:
            more = len(problems) - MOST_TOLD
            told = [Problem(f"{more:,} more rows like these", "rows that can be trained on")] if more > 0 else []
            raise UserError(*problems[:MOST_TOLD], *told)
        lengths = np.array([len(one.tokens) for _, one in made])
        pack_of = best_fit(lengths, self._max_length, np.arange(len(made)))
        packs = (np.flatnonzero(pack_of == number) for number in range(int(pack_of.max()) + 1))
        return HeldPacks(
            tuple(self._pack([(int(at), made[at][1]) for at in pack]) for pack in packs),
            tuple(number for number, _ in made),
        )

    def _pack(self, documents: Sequence[tuple[int, Document]]) -> Pack:
        weights = []
        for _, one in documents:
            weights.append(np.zeros(len(one.tokens), dtype=np.float32))
            for start, stop, weight in one.spans:
                weights[-1][max(start, 1) : stop] = weight
        carried = np.array([one.carried for _, one in documents], dtype=np.float64).T
        return Pack(
            input_ids=np.concatenate([one.tokens for _, one in documents]).astype(np.int32),
            weights=np.concatenate(weights),
            lengths=np.array([len(one.tokens) for _, one in documents], dtype=np.int32),
            documents=np.array([number for number, _ in documents], dtype=np.int64),
            prefixes=np.full(len(documents), -1, dtype=np.int16),
            starts=np.zeros(len(documents), dtype=np.int32),
            carried=dict(zip(self._recipe.options.carry, carried, strict=True)) if self._recipe.options.carry else {},
        )

    def _form(self, rows: Sequence[dict[str, Any]]) -> Form:
        """The form of the run's rows whose columns these have, else the one that fits. Raises ``UserError``."""
        for form in self._forms:
            if form.columns and {*form.columns.values()}.difference(form.optional) <= rows[0].keys():
                return form
        found = detect(rows)
        if len(found) == 1:
            return next((form for form in self._forms if form.format == found[0] and not form.columns), Form(found[0]))
        columns = ", ".join(map(str, list(rows[0])[:20]))
        fits = f"rows that fit several forms: {', '.join(found)} (fields: {columns})" if found else f"fields {columns}"
        raise UserError(Problem(fits, f"rows of one form that is known: {known_forms()}", where=SHOWN))
