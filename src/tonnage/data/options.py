"""What the data room is told: plain values, all of which change the prepared bytes.

``Source`` and ``DataOptions`` are the only way in. They hold no path of a cache, no number of processes and no
device: two preparations with equal options over equal files give equal bytes wherever they are made.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tonnage.data.conversation import ROLES
from tonnage.data.formats import NAMES as FORMATS
from tonnage.errors import Problem, UserError

OVER_LENGTH = ("error", "drop", "truncate", "split")
TRAIN_ON = ("assistant", "last", "all")
CONTROL_TOKENS = ("text", "keep", "error")
DOCUMENTS = ("file", "paragraph", "line")
MOST_COPIES = 1_000_000
"""How often a row may be seen in an epoch."""

Progress = Callable[[str, int, int], None]
"""Called as ``progress(what, done, total)``: the stage by name and how much of it is done, in the stage's own unit."""


def silent(what: str, done: int, total: int) -> None:
    """A progress that shows nothing."""


@dataclass(frozen=True)
class RayCluster:
    """Nodes that share the work of preparing; they change no byte."""

    address: str
    """``HOST:PORT`` of its head, or ``auto``."""
    runtime_env: Mapping[str, object] = field(default_factory=dict)
    """Runtime environment in Ray's words."""


@dataclass(frozen=True)
class Source:
    """Where rows come from."""

    path: str
    """A file, a glob, a directory, or a hub id."""
    format: str = "auto"
    """One of ``FORMATS``, or ``auto`` to detect it from the rows."""
    name: str | None = None
    """Subset of a hub data set."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set; none is its newest state."""
    files: tuple[str, ...] = ()
    """Names or patterns of the files of a hub data set, or of a directory, that are read; none is all of a split."""
    split: str = "train"
    """Split of a hub data set, or of a directory that is a copy of one."""
    weight: float = 1.0
    """See ``DataOptions.mixture``."""
    first: int | float | None = None
    """Only so many of its rows, or below 1 such a fraction of them, from its beginning."""
    columns: Mapping[str, str] = field(default_factory=dict)
    """Our field -> the column that holds it, for example ``{"instruction": "question", "output": "answer"}``."""
    between: str = "\n\n"
    """What stands between ``instruction`` and ``input`` where a template has one place for both."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """A name of a role besides the usual ones -> one of ``ROLES``."""
    system: Literal["keep", "drop"] = "keep"
    """Whether a system message at the beginning of a conversation stays."""
    documents: Literal["file", "paragraph", "line"] = "file"
    """What one document is in a file of plain text or Markdown."""


@dataclass(frozen=True)
class DataOptions:
    """How rows become packs."""

    train: tuple[Source, ...]
    validation: float | tuple[Source, ...] = 0.0
    """A fraction of the training rows (equal rows always fall on the same side), or sources of their own."""
    max_length: int = 2048
    """Tokens of a pack, and the most that a document may have."""
    over_length: Literal["error", "drop", "truncate", "split"] = "error"
    most_positions: int | None = field(default=None, compare=False)
    """Tokens that the model has positions for, where that is known: no longer ``max_length`` is ever advised."""
    max_loss: float = 0.01
    """Largest fraction of the supervised tokens that ``over_length`` may lose."""
    template: str = "auto"
    """``auto``, the name of a built-in or of one of the tokenizer's own, or a Jinja file."""
    template_arguments: Mapping[str, object] = field(default_factory=dict)
    """What the template is given besides messages and tools, such as ``enable_thinking``."""
    eos_token: str | None = None
    """What ends a text; none is the tokenizer's own."""
    added_tokens: tuple[str, ...] = ()
    """Special tokens that the tokenizer gets where it has no such token."""
    date: datetime.date | None = None
    """What a template that asks for the date is told; none is today."""
    fold_system: bool = False
    """Put a system message at the beginning of the first user's, where the template takes none."""
    control_tokens: Literal["text", "keep", "error"] = "text"
    """What becomes of the tokenizer's control tokens where a row's own words hold their characters."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    pack: bool = True
    order: Literal["shuffled", "given"] = "shuffled"
    """Whether packs are trained in an order that the seed decides, or documents in that of the sources."""
    on_bad_row: Literal["error", "skip"] = "error"
    duplicates: Literal["keep", "drop"] = "keep"
    mixture: Literal["rows", "tokens"] = "rows"
    """What a source's weight means. ``rows``: how often each of its rows is seen per epoch (2 is twice, 0.5 is half of
    them). ``tokens``: its share of an epoch's tokens; the epoch has as many tokens as all sources together."""
    carry: tuple[str, ...] = ()
    """Columns of the rows, numbers, that a loss of one's own is given."""
    seed: int = 0

    def check(self) -> None:
        """Refuse values that mean nothing. Raises ``UserError`` with all of them."""
        problems = []

        def must(holds: bool, where: str, found: object, needed: str) -> None:
            if not holds:
                problems.append(Problem(found=f"{found!r}", needed=needed, where=where))

        must(len(self.train) > 0, "data.train", list(self.train), "at least one source")
        must(self.max_length >= 2, "data.max_length", self.max_length, "at least 2 tokens")
        must(self.over_length in OVER_LENGTH, "data.over_length", self.over_length, " | ".join(OVER_LENGTH))
        must(self.train_on in TRAIN_ON, "data.train_on", self.train_on, " | ".join(TRAIN_ON))
        must(self.control_tokens in CONTROL_TOKENS, "data.control_tokens", self.control_tokens, "text | keep | error")
        must(self.order in ("shuffled", "given"), "data.order", self.order, "shuffled | given")
        must(self.on_bad_row in ("error", "skip"), "data.on_bad_row", self.on_bad_row, "error | skip")
        must(self.duplicates in ("keep", "drop"), "data.duplicates", self.duplicates, "keep | drop")
        must(self.mixture in ("rows", "tokens"), "data.mixture", self.mixture, "rows | tokens")
        must(0.0 <= self.max_loss <= 1.0, "data.max_loss", self.max_loss, "a fraction from 0 to 1")
        if not isinstance(self.validation, tuple):
            must(
                0.0 <= self.validation < 1.0,
                "data.validation",
                self.validation,
                "a fraction from 0 to below 1, or sources",
            )
        sources = self.train + (self.validation if isinstance(self.validation, tuple) else ())
        for source in sources:
            must(
                source.format in ("auto", *FORMATS),
                f"{source.path}: format",
                source.format,
                " | ".join(("auto", *FORMATS)),
            )
            must(
                math.isfinite(source.weight) and 0 < source.weight <= (MOST_COPIES if self.mixture == "rows" else 1e15),
                f"{source.path}: weight",
                source.weight,
                f"a number above 0 (at most {MOST_COPIES:,} with mixture: rows)",
            )
            must(
                source.first is None
                or (source.first >= 1 and source.first == int(source.first))
                or 0 < source.first < 1,
                f"{source.path}: first",
                source.first,
                "a number of rows, or a fraction of them below 1",
            )
            must(source.system in ("keep", "drop"), f"{source.path}: system", source.system, "keep | drop")
            must(source.documents in DOCUMENTS, f"{source.path}: documents", source.documents, " | ".join(DOCUMENTS))
            for role in source.roles.values():
                must(role in ROLES, f"{source.path}: roles", role, " | ".join(ROLES))
        if problems:
            raise UserError(*problems)
