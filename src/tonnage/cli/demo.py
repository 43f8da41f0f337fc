"""``tonnage demo``: a small model learns to follow instructions, by the commands that anyone would use.

``CHAPTERS`` is the story: a heading, a sentence, and the command line, which is shown and then carried out by the
same parser as if it had been typed. What the demo itself adds is at the two ends: the folder to work on, and the
held-out instructions with the answers from before and after.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from tonnage.display.terminal import number, say, table, terminal
from tonnage.errors import refusals, user_error
from tonnage.files.paths import path_word

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.demo.folder import Folder

MAX_NEW_TOKENS = 16
SHOWN_EACH = 2


_ANSWER = f"--file {{held_out}} --max-new-tokens {MAX_NEW_TOKENS} --output"
CHAPTERS = (
    (
        "The data, as the model will see them",
        "Rows become conversations, conversations become tokens, and only the answers are trained on.",
        "inspect {config} --rows 2",
    ),
    ("The plan", "What the run will do, before it does it.", "plan {config}"),
    (
        "Before training",
        "The model has random weights. It is asked instructions that will never be trained on.",
        f"generate {{untrained}} {_ANSWER} {{before}}",
    ),
    ("Training", "Ctrl-C would stop it cleanly, with a model that can be used.", "train {config}"),
    (
        "Evaluation",
        "Loss on the held-out instructions, and how many answers are exactly right.",
        f"eval {{run}} --data {{held_out}} --exact-match 1000 --max-new-tokens {MAX_NEW_TOKENS}",
    ),
    ("After training", "The same instructions once more.", f"generate {{run}} {_ANSWER} {{after}}"),
    ("A model for others", "A plain Hugging Face directory.", "export {run} {exported}"),
)
"""Heading, sentence and command of each; words in braces stand for paths of the demo's folder."""
NEXT = (
    ('talk to it (Reverse the word "garden")', "chat {run}"),
    ("ask it one thing", "generate {run} --prompt 'Sort these numbers: 9 4 7'"),
    ("train it again, otherwise", "train {config} optimizer.lr=1e-3 output={again}"),
)


def demo(
    output: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="A new folder; by default runs/demo-1, or the next free.", parser=path_word),
    ] = None,
) -> None:
    """See it all work: a small model learns to follow instructions, on a CPU, in about two minutes."""
    from tonnage.cli.main import app
    from tonnage.demo.folder import free_folder, write_folder

    console = terminal()
    started = time.monotonic()
    path = output if output is not None else free_folder(Path("runs"))
    if os.path.lexists(path):
        raise user_error(f"{path} exists", "a new folder for the demo", where="--output")

    with refusals("the demo's folder could not be written", path):
        try:
            folder = write_folder(path)
            write_untrained(folder)
        except FileExistsError:  # somebody made it in this moment
            raise
        except Exception:
            shutil.rmtree(path, ignore_errors=True)
            raise
    names = _names(folder)
    num_rows, num_held_out = (sum(1 for _ in file.open("rb")) for file in (folder.train, folder.held_out))
    say(
        console,
        (f"{num_rows:,} instructions", "bold"),
        f" to learn from, {num_held_out} held out, a tokenizer and the shape of a small Llama: all written to ",
        (str(path), "bold"),
    )
    for place, (heading, sentence, command) in enumerate(CHAPTERS, start=1):
        console.print()
        console.rule(Text(f"{place}. {heading}", "bold"), align="left")
        console.print(sentence, style="dim")
        words = _words(command, names)
        console.print(_shown(words), style="bold cyan", soft_wrap=True)
        app(words, standalone_mode=False)

    console.print()
    console.rule(Text("Before and after", "bold"), align="left")
    show_comparison(_read(Path(names["before"])), _read(Path(names["after"])), console)
    console.print(f"\nAll of it took {time.monotonic() - started:.0f} seconds. To try next:")
    for purpose, command in NEXT:
        console.print(f"  # {purpose}", style="dim")
        console.print(f"  {_shown(_words(command, names))}", style="bold cyan", soft_wrap=True)


def write_untrained(folder: Folder) -> None:
    """Write the random weights that training will start from as a model directory."""
    import torch

    from tonnage.config import read_config
    from tonnage.model.build import allocate, build_on_meta, initialise_randomly
    from tonnage.model.files import find_model, read_model_config

    config = read_model_config(find_model(str(folder.model), random_weights=True))
    model = build_on_meta(config, torch.float32)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, read_config(str(folder.config), []).seed)
    model.config.use_cache = True
    directory = folder.path / "untrained"
    shutil.copytree(folder.model, directory)
    model.save_pretrained(directory)


def show_comparison(before: list[dict[str, Any]], after: list[dict[str, Any]], console: Console) -> None:
    """Print some instructions with both answers, and the exact matches of every family.

    The rows of both are the same held-out rows, in the same order, each with its answer as ``generated``.
    """
    from tonnage.demo.tasks import FAMILIES
    from tonnage.inference.generate import is_match

    def mark(row: dict[str, Any]) -> Text:
        right = is_match(row["generated"], row["output"])
        return Text(f"{'✓' if right else '✗'} {_printable(row['generated'])}", style="green" if right else "red")

    examples = table(*(Column(name, overflow="fold") for name in ("instruction", "before", "after")))
    scores = table("exact match", number("before"), number("after"))
    pairs = list(zip(before, after, strict=True))
    for family in (*(name for name in FAMILIES if any(row["family"] == name for row in before)), "all"):
        members = [pair for pair in pairs if family in ("all", pair[0]["family"])]
        if family != "all":
            for first, second in members[:SHOWN_EACH]:
                examples.add_row(first["instruction"], mark(first), mark(second))
        counts = [sum(is_match(pair[side]["generated"], pair[side]["output"]) for pair in members) for side in (0, 1)]
        scores.add_row(
            family,
            *(f"{count}/{len(members)}  {count / len(members):4.0%}" for count in counts),
            style="bold" if family == "all" else "",
        )
    console.print(examples)
    console.print()
    console.print(scores)


def _printable(text: str) -> str:
    """Text on one line; what cannot be shown, as a dot."""
    shown = "".join(
        letter if letter.isprintable() and letter != "\N{REPLACEMENT CHARACTER}" else "·" for letter in text
    )
    return shown if len(shown) <= 24 else f"{shown[:23]}…"


def _names(folder: Folder) -> dict[str, str]:
    """What the words in braces stand for."""
    return {
        "config": str(folder.config),
        "held_out": str(folder.held_out),
        "run": str(folder.run),
        **{name: str(folder.path / name) for name in ("untrained", "exported", "again")},
        **{name: str(folder.path / f"{name}.jsonl") for name in ("before", "after")},
    }


def _words(command: str, names: dict[str, str]) -> list[str]:
    return [word.format_map(names) for word in shlex.split(command)]


def _shown(words: list[str]) -> str:
    return f"$ {shlex.join(['tonnage', *words])}"


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
