"""The account of the data as people read it: a table before every run, and for ``inspect`` a histogram and the rows.

Everything here takes what ``tonnage.data`` made and prints it; nothing is computed anew. In rows, supervised tokens
are green, context is dim, special tokens are reversed; where there is no colour, supervised text stands between
``⟦`` and ``⟧``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.files.visible import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from tonnage.data import Account, PackedDataset, Prepared, SourceAccount

BARS = "▏▎▍▌▋▊▉█"


def show_account(account: Account, console: Console) -> None:
    """Print what came in and what became of it: a column per source, or one for all where there are too many."""
    from rich.table import Table

    from tonnage.display.terminal import say

    shown = [*account.sources, account.total] if len(account.sources) > 1 else list(account.sources)
    if len(shown) > max(2, (console.width - 22) // 14):
        shown = [account.total]
    table = Table(title="Data", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", no_wrap=True)
    for source in shown:
        role = "\n(validation)" if source.role == "validation" else ""
        table.add_column(
            f"{_file_name(source.name)}{role}", justify="right", overflow="fold", min_width=9, max_width=24
        )
    for name, cell in LINES.items():
        cells = [cell(source) for source in shown]
        if name in ALWAYS or any(found not in ("", "0") for found in cells):
            style = "yellow" if name in LOSSES and any(found != "0" for found in cells) else ""
            table.add_row(name, *cells, style=style)
    console.print(table)
    for line in _remarks(account):
        say(console, line)


LINES: dict[str, Callable[[SourceAccount], str]] = {
    "format": lambda a: a.format,
    "rows read": lambda a: f"{a.rows_read:,}",
    "  packed": lambda a: f"{a.rows_packed:,}",
    "  of it validation": lambda a: f"{a.rows_validation:,}",
    "  dropped": lambda a: f"{a.rows_dropped:,}",
    "  bad": lambda a: f"{a.rows_bad:,}",
    "  duplicates dropped": lambda a: f"{a.rows_duplicate_dropped:,}",
    "  left out": lambda a: f"{a.rows_left_out:,}",
    "duplicates": lambda a: f"{a.rows_duplicate:,}",
    "tokens read": lambda a: f"{a.tokens.read:,}",
    "  supervised": lambda a: f"{a.supervised.read:,}",
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

LOSSES = ("  dropped", "  bad", "  duplicates dropped", "  left out", "  cut", "  cut supervised", "turns without end")
"""Lines that stand out when they are not 0."""


def _percentile(source: SourceAccount, name: str) -> str:
    return f"{source.lengths.percentiles[name]:,}" if name in source.lengths.percentiles else ""


def _file_name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1] if path.startswith(("/", ".", "~")) else path


def _short(path: str) -> str:
    return path if len(path) <= 44 else "…" + path[-43:]


def _remarks(account: Account) -> Iterator[str | tuple[str, str]]:
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
            yield f"{_file_name(source.name)}: commit {source.commit}"
        if source.left:
            yield f"{_file_name(source.name)}: not read: {_some(source.left)}"
    if whole.unread:
        yield f"never read: {_some([f'{name} ({count:,})' for name, count in whole.unread.items()])}"
    if whole.rows_trimmed:
        yield f"{whole.rows_trimmed:,} rows held a first or last token that the template adds; it is there once"
    if whole.rows_without_thoughts:
        yield f"{whole.rows_without_thoughts:,} rows: the template leaves out what was thought before the last question"
    if whole.turns_moved:
        yield (
            f"{whole.turns_moved:,} answers begin inside of a token that also holds the end of what is before them; "
            "that token is supervised"
        )
    if whole.rows_bad:
        kinds = ", ".join(f"{kind} {count:,}" for kind, count in whole.bad_kinds.items())
        yield f"bad rows: {kinds}; listed in {account.bad_rows_file}", "yellow"
    if whole.supervised.cut:
        yield f"{account.supervised_loss:.2%} of the supervised tokens are cut", "yellow"
    if account.rows_in_both:
        yield f"{account.rows_in_both:,} validation rows are in the training data as well", "yellow"


def _some(names: Sequence[str], most: int = 12) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def show_lengths(account: Account, console: Console) -> None:
    """Print a histogram of the lengths of all documents, before anything was cut."""
    from tonnage.display.terminal import say

    counts: dict[int, int] = {}
    for source in account.sources:
        for edge, count in source.lengths.counts.items():
            counts[edge] = counts.get(edge, 0) + count
    if not counts:
        return
    grouped = _grouped(counts)
    widest, limit = max(grouped.values()), account.train.max_length
    width = max(10, min(60, console.width - 30))
    console.print("Lengths in tokens", style="bold")
    for (low, high), count in grouped.items():
        filled = round(count / widest * width * 8)
        bar = "█" * (filled // 8) + (BARS[filled % 8 - 1] if filled % 8 else "")
        style = "yellow" if low > limit else "green"
        say(console, f"{low:>8,} – {high:<8,} ", (bar or BARS[0], style), f" {count:,}")


def _grouped(counts: dict[int, int]) -> dict[tuple[int, int], int]:
    """At most about two dozen bins, from the fine ones: whole, half or quarter powers of two."""
    for parts in (4, 2, 1):
        found: dict[tuple[int, int], int] = {}
        for edge in sorted(counts):
            power = 1 << (edge.bit_length() - 1)
            step = max(1, power // parts)
            low = power + (edge - power) // step * step
            found[low, low + step - 1] = found.get((low, low + step - 1), 0) + counts[edge]
        if len(found) <= 24:
            break
    return found


def first_documents(dataset: PackedDataset, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The first documents that will be trained: where each is from, its tokens and their weights."""
    from tonnage.data import pack_at

    shown = 0
    for position in range(dataset.num_packs):
        index = pack_at(position, dataset.num_packs, seed)
        pack = dataset.pack(index)
        at = 0
        for document, length in zip(pack.documents.tolist(), pack.lengths.tolist(), strict=True):
            if shown == count:
                return
            file, row = dataset.where(document)
            yield {
                "file": file,
                "row": row,
                "pack": index,
                "ids": pack.input_ids[at : at + length].tolist(),
                "weights": pack.weights[at : at + length].tolist(),
            }
            at += length
            shown += 1


def show_documents(prepared: Prepared, count: int, seed: int, console: Console) -> None:
    """Print the first documents that will be trained, each token in the colour of what it is for."""
    from rich.rule import Rule
    from rich.text import Text

    if count == 0:
        return
    plain = console.no_color or not console.is_terminal
    legend = Text.assemble(("supervised", "green"), "  ", ("context", "dim"), "  ", ("special", "reverse"))
    console.print(legend if not plain else Text("⟦supervised⟧ context"))
    for document in first_documents(prepared.train, count, seed):
        supervised = sum(weight > 0 for weight in document["weights"])
        title = (
            f"{_short(document['file'])}:{document['row']}  {len(document['ids']):,} tokens, "
            f"{supervised:,} supervised, pack {document['pack']}"
        )
        console.print(Rule(Text(visible(title)), align="left", style="dim"))
        console.print(_coloured(document, prepared.tokenizer, plain), soft_wrap=True)
    console.print(Rule(style="dim"))


def _coloured(document: dict[str, Any], tokenizer: Any, plain: bool) -> Text:
    """The text of a document, decoded in runs of equal kind so that characters of several tokens stay whole."""
    from rich.text import Text

    special = set(tokenizer.all_special_ids)
    text = Text()
    run: list[int] = []
    kind: tuple[float, bool] | None = None
    for token, weight in [*zip(document["ids"], document["weights"], strict=True), (-1, -1.0)]:
        now = (weight, token in special and not plain)
        if run and now != kind and kind is not None:
            words = tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            words = visible(words)
            style = ("green" if kind[0] == 1 else "yellow" if kind[0] > 0 else "dim") + (" reverse" if kind[1] else "")
            text.append(f"⟦{words}⟧" if plain and kind[0] > 0 else words, "" if plain else style)
            run = []
        run.append(token)
        kind = now
    return text


def documents_as_json(prepared: Prepared, count: int, seed: int) -> list[dict[str, Any]]:
    """The same documents as data: every token with its id, text, weight and whether it is special."""
    special = set(prepared.tokenizer.all_special_ids)
    found = []
    for document in first_documents(prepared.train, count, seed):
        ids, weights = document.pop("ids"), document.pop("weights")
        texts = prepared.tokenizer.convert_ids_to_tokens(ids)
        tokens = [
            {"id": token, "text": text, "weight": weight, "special": token in special}
            for token, text, weight in zip(ids, texts, weights, strict=True)
        ]
        found.append({**document, "tokens": tokens})
    return found
