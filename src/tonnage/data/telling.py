"""The account of the data in words: what its lines are called, which of them stand out, and what else there is to say.

Commands print them, and the report of a run shows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from tonnage.data.account import Account, SourceAccount

LINES: dict[str, Callable[[SourceAccount], str]] = {
    "format": lambda a: a.format,
    "rows read": lambda a: f"{a.rows_read:,}",
    "  packed": lambda a: f"{a.rows_packed:,}",
    "  of it validation": lambda a: f"{a.rows_validation:,}",
    "  dropped": lambda a: f"{a.rows_dropped:,}",
    "  bad": lambda a: f"{a.rows_bad:,}",
    "bytes unread": lambda a: f"{a.bytes_unread:,}",
    "  duplicates dropped": lambda a: f"{a.rows_duplicate_dropped:,}",
    "  left out": lambda a: f"{a.rows_left_out:,}",
    "duplicates": lambda a: f"{a.rows_duplicate:,}",
    "split": lambda a: f"{a.rows_split:,}",
    "  pieces": lambda a: f"{a.pieces:,}",
    "  tokens of context": lambda a: f"{a.context_tokens:,}",
    "tokens read": lambda a: f"{a.tokens.read:,}",
    "  supervised": lambda a: f"{a.supervised.read:,}",
    "  of images": lambda a: f"{a.image_tokens:,}",
    "  repeated": lambda a: f"{a.tokens.repeated:,}",
    "  cut": lambda a: f"{a.tokens.cut:,}",
    "  cut supervised": lambda a: f"{a.supervised.cut:,}",
    "turns without end": lambda a: f"{a.turns_without_end:,}",
    "length p50": lambda a: _percentile(a, "p50"),
    "  p95": lambda a: _percentile(a, "p95"),
    "  p99": lambda a: _percentile(a, "p99"),
    "  longest": lambda a: f"{a.lengths.longest:,}" if a.lengths.longest else "",
}
"""Lines of the account table, in order."""

ALWAYS = ("format", "rows read", "  packed", "  dropped", "  bad", "tokens read", "  supervised", "  cut")
"""Lines that are there even when they are 0."""

LOSSES = (
    *("  dropped", "  bad", "bytes unread"),
    *("  duplicates dropped", "  left out", "  cut", "  cut supervised", "turns without end"),
)
"""Lines that stand out when they are not 0."""


def table_lines(sources: Sequence[SourceAccount]) -> Iterator[tuple[str, list[str], bool]]:
    """Lines of the account table: name, a cell for each source, and whether the line stands out."""
    for name, cell_of in LINES.items():
        cells = [cell_of(source) for source in sources]
        is_counted = any(cell not in ("", "0") for cell in cells)
        if name in ALWAYS or is_counted:
            yield name, cells, name in LOSSES and is_counted


def _percentile(source: SourceAccount, name: str) -> str:
    return f"{source.lengths.percentiles[name]:,}" if name in source.lengths.percentiles else ""


def file_name(path: str) -> str:
    """A path as a heading: its last part; a hub id whole."""
    return path.rstrip("/").rsplit("/", 1)[-1] if path.startswith(("/", ".", "~")) else path


def remarks(account: Account) -> Iterator[str | tuple[str, str]]:
    """Lines, each with its style if it has one."""
    whole = account.total
    for name, packs in (("train", account.train), ("validation", account.validation)):
        if packs is not None:
            yield (
                f"{name}: {packs.packs:,} packs of {packs.max_length:,}, {packs.documents:,} documents, "
                f"{packs.fill:.2%} full, {packs.supervised:,} of {packs.tokens:,} tokens supervised"
            )
    added = f"; adds {', '.join(account.added_tokens)} to the vocabulary" if account.added_tokens else ""
    ends = f"; a turn ends with {' or '.join(account.end_of_turn)}" if account.end_of_turn else ""
    yield f"template: {account.template} ({account.template_reason}){ends}{added}"
    for source in account.sources:
        if source.commit:
            yield f"{file_name(source.name)}: commit {source.commit}"
        if source.left:
            yield f"{file_name(source.name)}: not read: {_some(source.left)}"
    if whole.unread:
        yield f"never read: {_some([f'{name} ({count:,})' for name, count in whole.unread.items()])}"
    if whole.images:
        yield (
            f"{whole.images:,} images in {whole.rows_with_images:,} rows, {whole.image_tokens:,} tokens of theirs; "
            "such rows are never cut"
        )
    if whole.rows_trimmed:
        yield f"{whole.rows_trimmed:,} rows held a first or last token that the template adds; it is there once"
    if whole.rows_without_thoughts:
        yield f"{whole.rows_without_thoughts:,} rows: the template leaves out what was thought before the last question"
    if whole.rows_tied:
        yield (
            f"{whole.rows_tied:,} pairs: both answers have the same score, and one is preferred all the same",
            "yellow",
        )
    if whole.rows_desirable or whole.rows_undesirable:
        labels = f"{whole.rows_desirable:,} desirable answers, {whole.rows_undesirable:,} undesirable ones"
        is_one_sided = not (whole.rows_desirable and whole.rows_undesirable)
        yield (labels, "yellow") if is_one_sided else labels
    if whole.turns_moved:
        yield (
            f"{whole.turns_moved:,} answers begin inside of a token that also holds the end of what is before them; "
            "that token is supervised"
        )
    for source in account.sources:
        if source.rows_with_control_tokens:
            yield _control_tokens(source, account), "yellow"
    if whole.rows_bad:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in whole.bad_kinds.items())
        yield f"bad rows: {kinds}; listed in {account.bad_rows_file}", "yellow"
    for source in account.sources:
        if source.bytes_unread:
            share = source.bytes_unread / max(source.bytes, 1)
            unread = f"{source.bytes_unread:,} of {source.bytes:,} bytes ({share:.2%}) are not read, behind damage"
            yield f"{file_name(source.name)}: {unread}", "yellow"
    if whole.supervised.cut:
        yield f"{account.supervised_loss:.2%} of the supervised tokens are cut", "yellow"
    if account.rows_in_both:
        yield f"{account.rows_in_both:,} validation rows are in the training data as well", "yellow"


def _control_tokens(source: SourceAccount, account: Account) -> str:
    """How many rows of a source hold control tokens in their own words, which and where, and what became of them."""
    tokens = _some([f"{token} ({count:,})" for token, count in source.control_tokens.items()])
    more = source.rows_with_control_tokens - len(source.control_token_rows)
    places = ", ".join(source.control_token_rows) + (f" and {more:,} more" if more > 0 else "")
    setting = account.options.get("control_tokens", "keep")
    as_words = setting == "text" and account.template != "plain"
    return (
        f"{file_name(source.name)}: {source.rows_with_control_tokens:,} rows hold control tokens in their own words, "
        f"{'trained as words' if as_words else 'which stay tokens'} (data.control_tokens: {setting}): {tokens}; "
        f"in {places}"
    )


def _some(names: Sequence[str], most: int = 12) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def lengths_of(account: Account) -> dict[int, int]:
    """Documents of all sources by the lower edge of the bin that their length is in."""
    counts: Counter[int] = Counter()
    for source in account.sources:
        counts.update(source.lengths.counts)
    return dict(sorted(counts.items()))


def grouped(counts: Mapping[int, int]) -> dict[tuple[int, int], int]:
    """At most about two dozen bins, from the fine ones: whole, half or quarter powers of two."""
    for parts in (4, 2, 1):
        bins: dict[tuple[int, int], int] = {}
        for edge in sorted(counts):
            power = 1 << (edge.bit_length() - 1)
            step = max(1, power // parts)
            low = power + (edge - power) // step * step
            bins[low, low + step - 1] = bins.get((low, low + step - 1), 0) + counts[edge]
        if len(bins) <= 24:
            break
    return bins
