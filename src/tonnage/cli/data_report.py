"""The account of the data as people read it: a table before every run, and for ``inspect`` a histogram and the rows.

Everything here takes what ``tonnage.data`` made and prints it; nothing is computed anew. In rows, supervised tokens
are green, context is dim, special tokens are reversed; where there is no colour, supervised text stands between
``⟦`` and ``⟧``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

from rich.table import Column
from rich.text import Text

from tonnage.data.building.mates import LABEL
from tonnage.data.images.shown import shown_images
from tonnage.data.pictures import image_token_of, pieces
from tonnage.data.telling import file_name, grouped, lengths_of, remarks, table_lines
from tonnage.display.terminal import say, table
from tonnage.files.visible import visible

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.data import Account, Prepared
    from tonnage.data.images.shown import ShownImage

BARS = "▏▎▍▌▋▊▉█"
NAMES = {
    None: ("chosen", "rejected"),
    True: ("desirable", "of another row"),
    False: ("undesirable", "of another row"),
}
"""What the two answers of a document are called, by its label if it has one."""


def show_account(account: Account, console: Console) -> None:
    """Print what came in and what became of it: a column per source, or one for all where there are too many."""
    shown = [*account.sources, account.total] if len(account.sources) > 1 else list(account.sources)
    if len(shown) > max(2, (console.width - 22) // 14):
        shown = [account.total]
    data = table(Column(no_wrap=True), title="Data", header_style="bold")
    for source in shown:
        role = "\n(validation)" if source.role == "validation" else ""
        data.add_column(f"{file_name(source.name)}{role}", justify="right", overflow="fold", min_width=9, max_width=24)
    for name, cells, stands_out in table_lines(shown):
        data.add_row(name, *cells, style="yellow" if stands_out else "")
    console.print(data)
    for line in remarks(account):
        say(console, line)


def _short(path: str) -> str:
    return path if len(path) <= 44 else "…" + path[-43:]


def show_lengths(account: Account, console: Console) -> None:
    """Print a histogram of the lengths of all documents, before anything was cut."""
    if not (counts := lengths_of(account)):
        return
    bins = grouped(counts)
    widest, limit = max(bins.values()), account.train.max_length
    width = max(10, min(60, console.width - 30))
    console.print("Lengths in tokens", style="bold")
    for (low, high), count in bins.items():
        filled = round(count / widest * width * 8)
        bar = "█" * (filled // 8) + (BARS[filled % 8 - 1] if filled % 8 else "")
        style = "yellow" if low > limit else "green"
        say(console, f"{low:>8,} – {high:<8,} ", (bar or BARS[0], style), f" {count:,}")


def first_documents(prepared: Prepared, count: int, seed: int) -> Iterator[dict[str, Any]]:
    """The first documents that will be trained: where each is from, its tokens and their weights, and its images."""
    dataset, images, shown = prepared.train, prepared.recipe.images, 0
    for position in range(dataset.num_packs):
        index = dataset.pack_at(position, seed)
        pack = dataset.pack(index)
        at = 0
        forks = repeat(None) if pack.forks is None else pack.forks.tolist()
        labels = pack.carried[LABEL].tolist() if LABEL in pack.carried else repeat(None)
        for document, length, fork, label in zip(
            pack.documents.tolist(), pack.lengths.tolist(), forks, labels, strict=False
        ):
            if shown == count:
                return
            file, row = dataset.where(document)
            yield {
                "file": file,
                "row": row,
                "pack": index,
                **({} if fork is None else {"prompt_tokens": fork[0], "rejected_from": fork[1]}),
                **({} if label is None else {"desirable": bool(label)}),
                **({"images": shown_images(dataset, document, images)} if dataset.images else {}),
                "ids": pack.input_ids[at : at + length].tolist(),
                "weights": pack.weights[at : at + length].tolist(),
            }
            at += length
            shown += 1


def show_documents(prepared: Prepared, count: int, seed: int, console: Console) -> None:
    """Print the first documents that will be trained, each token in the colour of what it is for."""
    from rich.rule import Rule

    if count == 0:
        return
    plain = console.no_color or not console.is_terminal
    legend = Text.assemble(("supervised", "green"), "  ", ("context", "dim"), "  ", ("special", "reverse"))
    console.print(legend if not plain else Text("⟦supervised⟧ context"))
    for document in first_documents(prepared, count, seed):
        ids, weights, second = document["ids"], document["weights"], document.get("rejected_from")
        supervised = f"{sum(weight > 0 for weight in weights):,} supervised"
        names = NAMES[document.get("desirable")]
        if second is not None:
            prompt = document["prompt_tokens"]
            supervised = f"{prompt:,} before both answers, {second - prompt:,} {names[0]}, "
            supervised += f"{len(ids) - second:,} {names[1]}"
        title = f"{_short(document['file'])}:{document['row']}  {len(ids):,} tokens, "
        images = document.get("images", [])
        counted_images = f"{len(images):,} image{'s' if len(images) != 1 else ''}, " if images else ""
        title += f"{supervised}, {counted_images}pack {document['pack']}"
        console.print(Rule(Text(visible(title)), align="left", style="dim"))
        token = image_token_of(prepared)
        of_text = _coloured(ids[:second], weights[:second], prepared.tokenizer, plain, token, images)
        console.print(of_text, soft_wrap=True)
        if second is not None:
            console.print(Text(f"{names[1]}:", style="" if plain else "red"))
            console.print(_coloured(ids[second:], weights[second:], prepared.tokenizer, plain), soft_wrap=True)
    console.print(Rule(style="dim"))


def _coloured(
    ids: list[int],
    weights: list[float],
    tokenizer: Any,
    plain: bool,
    image_token: int | None = None,
    images: Sequence[ShownImage] = (),
) -> Text:
    """The text of a document, decoded in runs of equal kind so that characters of several tokens stay whole."""
    text = Text()
    special = () if plain else frozenset(tokenizer.all_special_ids)
    for piece in pieces(ids, weights, tokenizer, special, image_token, images):
        words, counts = visible(piece.text), piece.weight > 0
        style = ("green" if piece.weight == 1 else "yellow" if counts else "dim") + (
            " reverse" if piece.special else ""
        )
        text.append(f"⟦{words}⟧" if plain and counts else words, "" if plain else style)
    return text


def documents_as_json(prepared: Prepared, count: int, seed: int) -> list[dict[str, Any]]:
    """The same documents as data: every token with its id, text, weight and whether it is special."""
    special = set(prepared.tokenizer.all_special_ids)
    plain = []
    for document in first_documents(prepared, count, seed):
        ids, weights = document.pop("ids"), document.pop("weights")
        texts = prepared.tokenizer.convert_ids_to_tokens(ids)
        tokens = [
            {"id": token, "text": text, "weight": weight, "special": token in special}
            for token, text, weight in zip(ids, texts, weights, strict=True)
        ]
        if "images" in document:
            names = ("file", "width", "height", "tokens")
            document["images"] = [{name: getattr(image, name) for name in names} for image in document["images"]]
        plain.append({**document, "tokens": tokens})
    return plain
