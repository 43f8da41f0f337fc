"""Packs of rows that lie in memory and stay there: for steps that a program takes with rows of its own.

No cache, no file, no account: every row is a document or an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.data.building.builder import PartBuilder
from tonnage.data.building.mates import LABEL
from tonnage.data.building.recipe import Recipe
from tonnage.data.packs.dataset import Pack, piece_weights
from tonnage.data.packs.packing import best_fit
from tonnage.data.packs.padding import in_chunks, of_pairs
from tonnage.data.packs.prefixes import Prefix
from tonnage.data.sources.in_memory import SHOWN, plain_rows
from tonnage.data.tokens.encoder import Document
from tonnage.errors import Problem, UserError, user_error
from tonnage.forms.conversation import RowError
from tonnage.forms.formats import FORMATS, Form, detect, known_forms

MOST_TOLD = 10
"""Problems of rows that an error names."""


@dataclass(frozen=True)
class HeldPacks:
    """Packs in memory, with what a step uses of a ``PackedDataset``."""

    packs: tuple[Pack, ...]
    rows: tuple[int, ...]
    """Of each document its row, from 0."""
    common_prefixes: tuple[Prefix, ...] = ()

    @property
    def num_packs(self) -> int:
        return len(self.packs)

    def pack(self, index: int) -> Pack:
        return self.packs[index]

    def lengths(self, index: int) -> np.ndarray:
        """Tokens of every document of a pack, int32 (num_documents,)."""
        return self.packs[index].lengths

    def row_lengths(self, index: int, chunk: int = 1) -> np.ndarray:
        """Tokens that every document of a pack takes in rows of its own, as of a ``PackedDataset``."""
        pack = self.packs[index]
        return in_chunks(pack.lengths, chunk) if pack.forks is None else of_pairs(pack.lengths, pack.forks, chunk)

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
        row_dicts = plain_rows(rows)
        documents: list[tuple[int, Document]] = []
        problems: list[Problem] = []
        for number, result in self._builder.documents(iter(enumerate(row_dicts)), self._form(row_dicts)):
            where = f"{SHOWN}:{number}"
            if isinstance(result, RowError):
                problems.append(Problem(result.reason, "a row that can be trained on", result.change, where))
            elif (length := len(result.tokens)) > self._max_length:
                problems.append(
                    Problem(f"{length:,} tokens", f"at most {self._max_length:,} (data.max_length)", where=where)
                )
            else:
                documents.append((number, result))
        if problems:
            more = len(problems) - MOST_TOLD
            summary = [Problem(f"{more:,} more rows like these", "rows that can be trained on")] if more > 0 else []
            raise UserError(*problems[:MOST_TOLD], *summary)
        lengths = np.array([len(document.tokens) for _, document in documents])
        pack_of = best_fit(lengths, self._max_length, np.arange(len(documents)))
        packs = (np.flatnonzero(pack_of == number) for number in range(int(pack_of.max()) + 1))
        return HeldPacks(
            tuple(self._pack([(int(at), documents[at][1]) for at in pack]) for pack in packs),
            tuple(number for number, _ in documents),
        )

    def _pack(self, documents: Sequence[tuple[int, Document]]) -> Pack:
        carried = np.array([document.carried for _, document in documents], dtype=np.float64).T
        carry = (LABEL,) if documents[0][1].has_mate else self._recipe.options.carry
        weights = [piece_weights(document.spans, 0, len(document.tokens)) for _, document in documents]
        return Pack(
            input_ids=np.concatenate([document.tokens for _, document in documents]).astype(np.int32),
            weights=np.concatenate(weights),
            lengths=np.array([len(document.tokens) for _, document in documents], dtype=np.int32),
            documents=np.array([number for number, _ in documents], dtype=np.int64),
            prefixes=np.full(len(documents), -1, dtype=np.int16),
            starts=np.zeros(len(documents), dtype=np.int32),
            carried=dict(zip(carry, carried, strict=True)),
            forks=np.array([document.fork for _, document in documents]) if documents[0][1].fork.shared else None,
        )

    def _form(self, rows: Sequence[dict[str, Any]]) -> Form:
        """The form of the run's rows whose columns these have, else the one that fits. Raises ``UserError``."""
        for form in self._forms:
            if form.columns and {*form.columns.values()}.difference(form.optional) <= rows[0].keys():
                return form
        purpose = FORMATS[self._forms[0].format].purpose
        formats = detect(rows, purpose)
        if len(formats) == 1:
            return next(
                (form for form in self._forms if form.format == formats[0] and not form.columns), Form(formats[0])
            )
        fields = ", ".join(map(str, list(rows[0])[:20]))
        fault = (
            f"rows that fit several forms: {', '.join(formats)} (fields: {fields})" if formats else f"fields {fields}"
        )
        raise user_error(fault, f"rows of one form that is known: {known_forms(purpose=purpose)}", where=SHOWN)
