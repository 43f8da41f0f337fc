"""From options to packs, once, before any worker starts.

Two entries of the cache come out, each addressed by everything that decides its bytes:

    documents/KEY    tokens and spans of every row, in Arrow files, with the rows that were bad
                     (files, formats, tokenizer, template, train_on)
    packs/KEY        which documents go into which pack, and the account of it all
                     (documents, lengths, policies, validation, mixture, seed)

so that another ``max_length`` needs no tokenising, and a second run needs nothing at all. What the options forbid (bad
rows, over-long rows, too much lost) is checked on the account every time.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Data, RayLaunch
from tonnage.data import cache as store
from tonnage.data.account import Account
from tonnage.data.building.mates import LABEL
from tonnage.data.building.processes import build_parts, num_processes
from tonnage.data.building.recipe import Recipe, Script
from tonnage.data.images.processing import ImageRecipe
from tonnage.data.packs.dataset import PackedDataset
from tonnage.data.progress import Progress, silent
from tonnage.data.prompt import stop_tokens, turn_shape
from tonnage.data.refusals import refuse
from tonnage.data.selection import Selection
from tonnage.data.sources.given import Sources, read_sources
from tonnage.data.text.choice import TOOL_USE, choose, extended, of_tokenizer
from tonnage.data.tokens.control import KEPT, control_tokens
from tonnage.data.tokens.documents import Documents
from tonnage.data.tokens.encoder import plain_json
from tonnage.errors import user_error
from tonnage.forms.formats import Form, RowPurpose

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ModelFacts:
    """What of a model matters for its rows."""

    most_positions: int | None = None
    """Tokens that it has positions for, where that is known."""
    images: ImageRecipe | None = None
    """How images become tokens; None of a model that takes none."""


NO_FACTS = ModelFacts()


@dataclass(frozen=True)
class Prepared:
    """Everything that training needs to know of the data."""

    train: PackedDataset
    validation: PackedDataset | None
    account: Account
    tokenizer: PreTrainedTokenizerBase
    """A copy of the one given, with the chosen template and its special tokens."""
    stop_tokens: tuple[int, ...]
    """Ids at which a turn of the assistant is over."""
    recipe: Recipe
    """How rows became documents."""
    forms: tuple[Form, ...]
    """Of the rows of each source."""
    date: str = ""
    """The day with which templates were rendered, in ISO form; empty if none asks for it."""
    general: PackedDataset | None = None
    """Further rows that are evaluated and never trained on."""


def prepare(
    options: Data,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int = 0,
    model: ModelFacts = NO_FACTS,
    cache: Path | None = None,
    progress: Progress = silent,
    processes: int | RayLaunch | None = None,
    purpose: RowPurpose = "supervised",
) -> Prepared:
    """Read, render, tokenise and pack, or find it done already.

    ``model``: what of it matters for rows. ``processes``: how many to use for tokenising, ``None`` for as many as make
    sense, or the cluster on whose nodes larger data are tokenised; it changes no byte. ``purpose``: what rows must be
    for. Raises ``UserError`` with every problem of the files and formats at once, and ``DataError`` (a ``UserError``)
    when the rows themselves may not be trained on.
    """
    directory = store.default_directory() if cache is None else Path(cache)
    sources = read_sources(options, purpose, images=model.images is not None)
    tokenizer, new = extended(tokenizer, options.eos_token, options.added_tokens)
    own, choice = choose(options.template, tokenizer, sources.formats, sources.single_turn, options.template_arguments)
    choice = replace(choice, added_tokens=(*new, *choice.added_tokens))
    images = model.images
    if images is not None:
        ends = () if options.eos_token is None else (options.eos_token,)
        images = replace(images, added=tuple(dict.fromkeys((*options.added_tokens, *ends, *choice.added_tokens))))
    recipe = _recipe(own, options, sources.formats, images)
    own.init_kwargs = _with_kept(own, recipe)
    cluster = processes if isinstance(processes, RayLaunch) else None
    if not isinstance(processes, int):
        processes = num_processes(sources.total_bytes, len(sources.parts))
    carry = (LABEL,) if purpose == "verdicts" else options.carry
    documents = _documents(sources, recipe, carry, directory, progress, processes, cluster)
    date = next((date for script in recipe.scripts if (date := script.template.date)), "")
    shown = _shown(options, seed, date)
    weights = [(source.weight, source.first) for source in sources.given]
    name = store.key([documents.path.name, shown, weights, sources.num_train, asdict(choice)])
    packs = directory / "packs" / name

    def write(building: Path) -> None:
        progress("pack", 0, 1)
        Selection(documents, sources, options, seed, own).write(building, choice, shown)
        progress("pack", 1, 1)

    store.entry(packs, write)
    account = Account.from_json(json.loads((packs / "account.json").read_text(encoding="utf-8")))
    if account.bad_rows_file:
        account = replace(account, bad_rows_file=str(packs / account.bad_rows_file))
    refuse(account, options, documents, sources, model.most_positions)
    within = {own.convert_tokens_to_ids(end) for script in recipe.scripts for end in script.shape.within}
    special = set(own.all_special_ids) | set(own.added_tokens_decoder)
    closing = [token for token in documents.closing if token in special and token not in within]
    return Prepared(
        train=PackedDataset.open(packs / "train"),
        validation=PackedDataset.open(packs / "validation") if (packs / "validation").is_dir() else None,
        account=account,
        tokenizer=own,
        stop_tokens=tuple(dict.fromkeys([*stop_tokens(own), *closing])),
        date=date,
        recipe=recipe,
        forms=tuple(sources.forms),
    )


def _recipe(
    tokenizer: PreTrainedTokenizerBase, options: Data, formats: Sequence[str], images: ImageRecipe | None
) -> Recipe:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise user_error(
            found=f"a tokenizer without a Rust backend ({type(tokenizer).__name__})",
            needed="a fast tokenizer (tokenizer.json)",
            change="load it with AutoTokenizer (use_fast=True) once and save it",
            where="model",
        )
    if not {"text", "segments"}.isdisjoint(formats) and tokenizer.eos_token is None:
        raise user_error(
            found="rows of plain text, and a tokenizer without an end-of-text token",
            needed="eos_token: a model trained without one never stops",
            change="set eos_token in tokenizer_config.json",
            where="data.train",
        )
    today = datetime.date.today().isoformat() if options.date == "auto" else options.date
    own = tokenizer.chat_template
    tools = [None, True] if isinstance(own, dict) and TOOL_USE in own else [None]
    templates = [of_tokenizer(tokenizer, with_tools, options.template_arguments, today) for with_tools in tools]
    if images is not None:
        templates = [replace(template, parts=template.parts or "images") for template in templates]
    begin = tokenizer("")["input_ids"]
    starts = tokenizer.bos_token_id is not None and begin[:1] == [tokenizer.bos_token_id]
    scripts = tuple(Script(template, turn_shape(template, tokenizer)) for template in templates)
    return Recipe(
        tokenizer_json=plain_json(backend),
        scripts=scripts,
        options=options,
        text_start=str(tokenizer.bos_token) if starts else "",
        text_end=str(tokenizer.eos_token or ""),
        controls=control_tokens(tokenizer, [script.shape for script in scripts], options.added_tokens),
        images=images,
    )


def _with_kept(tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> dict[str, Any]:
    """The tokenizer's settings, with the control tokens that stay tokens in the words of prompts."""
    words = () if recipe.options.control_tokens == "keep" else recipe.controls
    kept_tokens = [
        token for token in control_tokens(tokenizer, [script.shape for script in recipe.scripts]) if token not in words
    ]
    settings = {name: value for name, value in tokenizer.init_kwargs.items() if name != KEPT}
    return settings | ({KEPT: kept_tokens} if kept_tokens else {})


def _documents(
    sources: Sources,
    recipe: Recipe,
    carry: Sequence[str],
    cache: Path,
    progress: Progress,
    processes: int,
    cluster: RayLaunch | None,
) -> Documents:
    made_of = {
        "recipe": recipe.key(),
        "parts": [asdict(part) for part in sources.parts],
        "forms": [form.key() for form in sources.forms],
        "commits": [resolved.commit for resolved in sources.resolved],
        "files": [store.remembered_digest(cache, file) for file in sources.files],
    }
    if recipe.images is not None:  # whose paths are taken from where their rows are
        made_of["folders"] = sorted({str(Path(part.file).absolute().parent) for part in sources.parts})
    directory = cache / "documents" / store.key(made_of)
    if recipe.images is not None and directory.is_dir() and (stamps := Documents(directory).changed_images()):
        directory = cache / "documents" / store.key([made_of, stamps])
    expected = max(1, round(sources.total_bytes / sources.row_bytes))
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        progress("tokenise", min(done, expected), expected)

    def build(building: Path) -> None:
        parts, base = [], 0
        all_totals = build_parts(sources.parts, sources.forms, recipe, building, processes, advance, cluster)
        for part, totals in zip(sources.parts, all_totals, strict=True):
            base = base if part.start else 0
            parts.append({"source": part.source, "files": part.files, "row_base": base, "totals": totals.to_json()})
            base += totals.lines
        described: dict[str, Any] = {"parts": parts}
        if carry:
            described["carry"] = carry
        (building / "documents.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")

    if store.entry(directory, build):
        progress("tokenise", expected, expected)
    return Documents(directory)


SHOWN = (
    *("max_length", "min_length", "over_length", "train_on", "pack", "order", "duplicates", "mixture", "validation"),
    *("seed", "template_arguments", "date", "fold_system", "control_tokens"),
)
"""The options that an account repeats."""


def _shown(options: Data, seed: int, date: str) -> dict[str, Any]:
    """The options in ``SHOWN`` as plain values; ``date`` is the one that templates were rendered with."""
    validation = options.validation if isinstance(options.validation, float | int) else "sources of their own"
    values = options.model_dump(include={*SHOWN}) | {"validation": validation, "seed": seed, "date": date}
    cut = options.model_dump(include={"split_at", "overlap"}, exclude_defaults=True)
    return {name: values[name] for name in SHOWN} | cut
