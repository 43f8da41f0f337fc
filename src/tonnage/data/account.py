"""The account of the data: what came in, what went out, and where the difference is.

An account is a small algebra. Every row and every token of a source is in exactly one of its columns, accounts of
sources add up to the account of all, and ``check`` proves both equations whenever an account is made:

    rows read           = packed (train + validation) + dropped + bad + duplicates dropped + left out
    tokens + repeated   = packed (train + validation) + cut + duplicates dropped + left out

and the second one again for supervised tokens. A dropped row's tokens are cut; a bad row has no tokens. Rows are left
out by the mixture, or because a source wants its first ones only. Repeated tokens are those that a mixture shows more
than once per epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
from pydantic import TypeAdapter

PERCENTILES = (1, 5, 25, 50, 75, 95, 99)


@dataclass(frozen=True)
class Flow:
    """Where tokens went; used once for all tokens and once for supervised ones."""

    read: int = 0
    repeated: int = 0
    train: int = 0
    validation: int = 0
    cut: int = 0
    duplicate: int = 0
    """In duplicate rows that were dropped."""
    left_out: int = 0
    """In rows that the mixture left out, or that lie beyond what a source's ``first`` takes."""

    def __add__(self, other: Flow) -> Flow:
        return Flow(*(a + b for a, b in zip(self.__dict__.values(), other.__dict__.values(), strict=True)))

    @property
    def packed(self) -> int:
        """Tokens in packs."""
        return self.train + self.validation

    def check(self, what: str) -> None:
        """Raise ``AssertionError`` unless what came in is what went out."""
        came, went = self.read + self.repeated, self.packed + self.cut + self.duplicate + self.left_out
        if came != went or min(self.__dict__.values()) < 0:
            raise AssertionError(f"{what}: {came:,} came in, {went:,} are accounted for: {self}")


@dataclass(frozen=True)
class Lengths:
    """Lengths of documents in tokens, before anything is cut: a histogram over powers of two in eighths."""

    counts: Mapping[int, int] = field(default_factory=dict)
    """Lower edge of a bin -> documents in it."""
    longest: int = 0
    percentiles: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(lengths: np.ndarray) -> Lengths:
        """Lengths of documents: int (num_documents,)."""
        if len(lengths) == 0:
            return Lengths()
        edges = _edges(int(lengths.max()))
        counts, _ = np.histogram(lengths, bins=np.append(edges, edges[-1] * 2 + 1))
        percentiles = np.percentile(lengths, PERCENTILES, method="higher")
        return Lengths(
            {int(edge): int(count) for edge, count in zip(edges, counts, strict=True) if count},
            int(lengths.max()),
            {f"p{name}": int(value) for name, value in zip(PERCENTILES, percentiles, strict=True)},
        )


def _edges(longest: int) -> np.ndarray:
    edges = [1, 2, 3, 4, 5, 6, 7]
    power = 8
    while power <= longest:
        edges += [power + power * eighth // 8 for eighth in range(8)]
        power *= 2
    return np.array(edges)


@dataclass(frozen=True)
class SourceAccount:
    name: str
    role: str = "train"
    """train | validation"""
    format: str = ""
    files: int = 0
    commit: str = ""
    """Of a hub data set: what its revision was."""
    left: tuple[str, ...] = ()
    """Files that lie there and were not read: of other splits, texts among files of rows, files of other kinds."""
    bytes: int = 0
    """Of its files, as they lie on the disk."""
    bytes_unread: int = 0
    """Behind a damaged place: no row is made of them."""
    rows_read: int = 0
    rows_train: int = 0
    rows_validation: int = 0
    rows_dropped: int = 0
    rows_bad: int = 0
    rows_duplicate: int = 0
    """Rows equal to an earlier one of the same source or of one before it."""
    rows_duplicate_dropped: int = 0
    rows_left_out: int = 0
    rows_truncated: int = 0
    rows_split: int = 0
    pieces: int = 0
    """That these became."""
    context_tokens: int = 0
    """Tokens that are in two pieces, as context of the second: among those that are repeated."""
    tokens: Flow = Flow()
    supervised: Flow = Flow()
    turns_without_end: int = 0
    """Supervised turns that lost their end token to ``truncate`` or ``split``."""
    rows_nothing_supervised: int = 0
    """Rows refused because nothing of them would be trained on: among ``rows_bad``."""
    bad_kinds: Mapping[str, int] = field(default_factory=dict)
    unread: Mapping[str, int] = field(default_factory=dict)
    """Fields that hold something and that nothing reads -> how often they were there, the most frequent first."""
    turns_moved: int = 0
    """Turns whose first token begins in the template's header: it holds both the header's end and their beginning."""
    rows_trimmed: int = 0
    """Rows that brought a first or last token of their own, removed because the template writes it too."""
    rows_without_thoughts: int = 0
    """Rows whose thoughts before the last question the template leaves out."""
    rows_with_control_tokens: int = 0
    """Rows with documents whose own words hold the characters of control tokens."""
    rows_tied: int = 0
    """Pairs of which both answers have the same score, and one is preferred all the same."""
    rows_desirable: int = 0
    """Rows with documents whose label says that their answer is a good one."""
    rows_undesirable: int = 0
    """The others of those with a label."""
    rows_with_images: int = 0
    """Rows with documents that have images; they are never cut."""
    images: int = 0
    """Those of these rows."""
    image_tokens: int = 0
    """Their tokens, among all of the rows."""
    control_tokens: Mapping[str, int] = field(default_factory=dict)
    """Those tokens -> such rows that hold them, the most frequent first."""
    control_token_rows: tuple[str, ...] = ()
    """The first of these rows, as ``file:row``."""
    lengths: Lengths = Lengths()

    @property
    def rows_packed(self) -> int:
        """Rows that are, at least in part, in packs."""
        return self.rows_train + self.rows_validation

    def check(self) -> None:
        """Raise ``AssertionError`` unless every row and token is in exactly one column."""
        went = self.rows_packed + self.rows_dropped + self.rows_bad + self.rows_duplicate_dropped + self.rows_left_out
        if not 0 <= self.bytes_unread <= self.bytes:
            raise AssertionError(f"{self.name}: {self.bytes_unread:,} of {self.bytes:,} bytes are not read")
        if self.rows_read != went:
            raise AssertionError(f"{self.name}: {self.rows_read:,} rows came in, {went:,} are accounted for")
        if sum(self.bad_kinds.values()) != self.rows_bad:
            raise AssertionError(f"{self.name}: {self.rows_bad:,} bad rows, kinds {dict(self.bad_kinds)}")
        self.tokens.check(f"{self.name}: tokens")
        self.supervised.check(f"{self.name}: supervised tokens")


@dataclass(frozen=True)
class PackAccount:
    """How full the packs of one data set are."""

    packs: int = 0
    tokens: int = 0
    supervised: int = 0
    documents: int = 0
    max_length: int = 0

    @property
    def fill(self) -> float:
        """Fraction of the packs' room that holds tokens."""
        return self.tokens / (self.packs * self.max_length) if self.packs else 0.0


@dataclass(frozen=True)
class Account:
    sources: tuple[SourceAccount, ...]
    train: PackAccount
    validation: PackAccount | None = None
    template: str = ""
    template_reason: str = ""
    added_tokens: tuple[str, ...] = ()
    """Tokens that the template added to the vocabulary: the embedding must have room for them."""
    end_of_turn: tuple[str, ...] = ()
    """Tokens that close a supervised turn."""
    options: Mapping[str, Any] = field(default_factory=dict)
    rows_in_both: int = 0
    """Validation rows (of sources of their own) that are in the training data as well."""
    bad_rows_file: str = ""

    @property
    def total(self) -> SourceAccount:
        return total(self.sources)

    @property
    def supervised_loss(self) -> float:
        """Fraction of the supervised tokens that was cut."""
        supervised = self.total.supervised
        return supervised.cut / supervised.read if supervised.read else 0.0

    def check(self) -> None:
        """Raise ``AssertionError`` unless everything adds up, sources and packs."""
        for source in self.sources:
            source.check()
        whole = self.total
        packs = (self.train, self.validation or PackAccount())
        if (whole.tokens.train, whole.tokens.validation) != tuple(pack.tokens for pack in packs):
            raise AssertionError(f"tokens of sources {whole.tokens} are not those of packs {packs}")
        if (whole.supervised.train, whole.supervised.validation) != tuple(pack.supervised for pack in packs):
            raise AssertionError(f"supervised tokens of sources {whole.supervised} are not those of packs {packs}")

    def to_json(self) -> dict[str, Any]:
        """The account as plain values, with what follows from them, for ``data.json`` and ``--json``."""
        value = asdict(self)
        value["total"] = {
            key: entry for key, entry in asdict(self.total).items() if key not in ("role", "format", "lengths")
        }
        value["supervised_loss"] = self.supervised_loss
        for name, packs in (("train", self.train), ("validation", self.validation)):
            if packs is not None:
                value[name]["fill"] = packs.fill
        return value

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Account:
        return TypeAdapter(Account).validate_python(value)


def total(sources: Iterable[SourceAccount]) -> SourceAccount:
    """The sum of accounts; lengths are left to the sources."""
    sources, zero = tuple(sources), SourceAccount("total", role="", format="")
    sums: dict[str, Any] = {
        f.name: sum((getattr(source, f.name) for source in sources), getattr(zero, f.name))
        for f in fields(SourceAccount)
        if isinstance(getattr(zero, f.name), int | Flow)
    }
    for name in ("bad_kinds", "unread", "control_tokens"):
        counts: Counter[str] = Counter()
        for source in sources:
            counts.update(getattr(source, name))
        sums[name] = dict(counts)
    return replace(zero, **sums)
