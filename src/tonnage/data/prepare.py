"""From options to packs, once, before any worker starts.

Two entries of the cache come out, each addressed by everything that decides its bytes:

    documents/KEY    tokens and spans of every row, in Arrow files, with the rows that were bad
                     (files, formats, tokenizer, template, train_on)
    packs/KEY        which documents go into which pack, and the account of it all
                     (documents, lengths, policies, validation, mixture, seed)

so that another ``max_length`` needs no tokenising, and a second run needs nothing at all. What the user has said must
not happen (bad rows, over-long rows, too much lost) is checked every time, on the account.
"""

from __future__ import annotations

import datetime
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.data import cache as store
from tonnage.data.account import Account, Flow, Lengths, PackAccount, SourceAccount
from tonnage.data.advice import advice, written
from tonnage.data.choice import TOOL_USE, Choice, choose, of_tokenizer
from tonnage.data.conversation import Conversation, RowError
from tonnage.data.documents import Documents, PartTotals, Recipe, Script
from tonnage.data.formats import FORMATS, Form, as_turns, candidates, detect, fields_of, form_of, nearest_field, rename
from tonnage.data.options import DataOptions, Progress, RayCluster, Source, silent
from tonnage.data.order import mix, mix_all
from tonnage.data.packing import best_fit
from tonnage.data.packs import PackedDataset, write_packs
from tonnage.data.prefixes import find_prefixes, within
from tonnage.data.processes import build_parts, build_parts_on_ray, num_processes
from tonnage.data.prompt import stop_tokens, turn_shape
from tonnage.data.reader import PATH, SOURCE, Reader
from tonnage.data.sources import Part, digest, first_rows, resolve
from tonnage.data.tokens import plain_json
from tonnage.errors import Problem, UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAMPLED_ROWS = 64
SHOWN_ROWS = 20


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
    date: str = ""
    """The day that templates were told, in ISO form; empty where none asks for it."""


class DataError(UserError):
    """The data were read, but must not be trained on as they are. ``account`` says what is in them."""

    def __init__(self, account: Account, *problems: Problem) -> None:
        self.account = account
        super().__init__(*problems)


@dataclass(frozen=True)
class _Sources:
    """All sources, those for validation last."""

    given: tuple[Source, ...]
    num_train: int
    parts: list[Part]
    forms: list[Form]
    commits: list[str]
    """Of hub data sets, by source; else empty."""
    left: list[tuple[str, ...]]
    """Files beside each source that belong to other splits."""
    single_turn: bool
    with_turns: bool
    """Whether completions are lists of messages, and no plain texts."""
    row_bytes: float

    @property
    def files(self) -> list[str]:
        """All files, each once."""
        return list(dict.fromkeys(file for part in self.parts for file in part.files))

    @property
    def total_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in self.files)

    @property
    def formats(self) -> list[str]:
        """What templates must be able to write."""
        return ["messages" if form.format == "completion" and self.with_turns else form.format for form in self.forms]

    def key(self, at: int) -> str:
        """Where the config says a source."""
        side, count = (
            ("train", self.num_train) if at < self.num_train else ("validation", len(self.given) - self.num_train)
        )
        number = at if at < self.num_train else at - self.num_train
        return f"data.{side}" if count == 1 else f"data.{side}.{number}"


def prepare(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    *,
    cache: Path | None = None,
    progress: Progress = silent,
    processes: int | None = None,
    cluster: RayCluster | None = None,
) -> Prepared:
    """Read, render, tokenise and pack, or find it done already.

    ``processes``: how many to use for tokenising, ``None`` for as many as make sense; it changes no byte. Nor does
    ``cluster``, whose nodes tokenise what is worth more than one process. Raises
    ``UserError`` with every problem of the options, files and formats at once, and ``DataError`` (a ``UserError``)
    when the rows themselves may not be trained on.
    """
    options.check()
    directory = store.default_directory() if cache is None else Path(cache)
    sources = _read_sources(options)
    own, choice = choose(options.template, tokenizer, sources.formats, sources.single_turn, options.template_arguments)
    recipe = _recipe(own, options, sources.formats)

    def build(building: Path, advance: Callable[[int], None]) -> list[PartTotals]:
        count = num_processes(sources.total_bytes, len(sources.parts)) if processes is None else processes
        if cluster is not None and count > 0:
            return build_parts_on_ray(sources.parts, sources.forms, recipe, building, cluster, advance)
        return build_parts(sources.parts, sources.forms, recipe, building, count, advance)

    documents = _documents(sources, recipe, directory, progress, build)
    date = next((script.date for script in recipe.scripts if script.date), "")
    options = replace(options, date=datetime.date.fromisoformat(date) if date else None)
    packs = _packs(documents, sources, options, choice, own, directory, progress)
    account = Account.from_json(json.loads((packs / "account.json").read_text(encoding="utf-8")))
    if account.bad_rows_file:
        account = replace(account, bad_rows_file=str(packs / account.bad_rows_file))
    _refuse(account, options, documents, sources, own)
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
    )


# Sources and their formats


def _read_sources(options: DataOptions) -> _Sources:
    validation = options.validation if isinstance(options.validation, tuple) else ()
    given = options.train + validation
    found = _Sources(given, len(options.train), [], [], [], [], True, False, 1.0)
    problems: list[Problem] = []
    single_turn, with_turns, sizes = True, False, []
    for index, source in enumerate(given):
        try:
            resolved = resolve(source, index)
            sample, first_bad = _sample(resolved.parts)
            form = _form(source, found.key(index), sample, first_bad)
        except UserError as error:
            problems += error.problems
            continue
        found.parts.extend(resolved.parts)
        found.forms.append(form)
        found.commits.append(resolved.commit)
        found.left.append(resolved.left)
        sizes += [len(json.dumps(row, default=str)) for row in sample[:16]]
        single_turn &= all(_is_single(conversation) for conversation in _conversations(sample, form))
        with_turns |= any(_has_turns(rename(row, form.columns)) for row in sample)
    if problems:
        raise UserError(*problems)
    row_bytes = float(np.mean(sizes)) if sizes else 1.0
    return replace(found, single_turn=single_turn, with_turns=with_turns, row_bytes=row_bytes)


def _sample(parts: Sequence[Part]) -> tuple[list[dict[str, Any]], str]:
    """The first readable rows of each of the first files, and why the first row that is not readable is not."""
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    first_bad = ""
    for part in parts:
        if part.file in seen or len(seen) >= 8:
            continue
        seen.add(part.file)
        found = 0
        for number, row in first_rows(part):
            if isinstance(row, dict):
                rows.append(row)
                found += 1
            else:
                first_bad = first_bad or f"{part.file}:{number}: {row.reason}"
            if found >= SAMPLED_ROWS or number >= 16 * SAMPLED_ROWS:
                break
    return rows, first_bad


def _form(source: Source, key: str, sample: Sequence[dict[str, Any]], first_bad: str) -> Form:
    where = f"data: {source.path}"
    if source.format != "auto":
        form = form_of(source.format, source.columns, source.roles)
        _check_columns(form, source, where)
        return form
    if not sample:
        raise UserError(
            Problem(
                found=f"no readable row; the first one: {first_bad}" if first_bad else "no row",
                needed="at least one row",
                where=where,
            )
        )
    renamed = [rename(row, source.columns) for row in sample] if source.columns else list(sample)
    found = detect(renamed)
    if len(found) == 1:
        form = Form(found[0], dict(source.columns), dict(source.roles))
        _check_columns(form, source, where)
        return form
    columns = ", ".join(map(str, list(sample[0])[:20]))
    if not found:
        known = "; ".join(f"{name} ({', '.join(format.must)})" for name, format in FORMATS.items())
        change = advice(key, source.path, sample[0])
        if not change and source.columns:
            change = "correct columns, which maps our fields to those of the rows"
        raise UserError(
            Problem(
                found=f"rows with the fields {columns}",
                needed=f"a form that is known: {known}",
                change=change
                or "map the columns of a question and its answer: "
                f"{key}: {{path: {written(source.path)}, columns: {{instruction: ..., output: ...}}}}",
                where=where,
            )
        )
    apart = [next(iter(candidates(row)), "") for row in renamed]
    mixed = len(set(map(candidates, renamed))) > 1 and not set.intersection(*(set(candidates(row)) for row in renamed))
    raise UserError(
        Problem(
            found=f"rows of several forms in one file: {', '.join(dict.fromkeys(filter(None, apart)))}"
            if mixed
            else f"rows that fit several forms: {', '.join(found)} (fields: {columns})",
            needed="one form",
            change="write the rows of each form to a file of their own"
            if mixed
            else f"{key}: {written({'path': source.path, 'format': found[0]})} (or {', '.join(found[1:])})",
            where=where,
        )
    )


def _check_columns(form: Form, source: Source, where: str) -> None:
    """Refuse columns for fields that the form does not have."""
    problems = []
    for ours in source.columns:
        if ours not in fields_of(form.format):
            near = nearest_field(ours, form.format)
            problems.append(
                Problem(
                    found=f"columns names a field {ours!r}, which rows of form {form.format} do not have",
                    needed=f"one of {', '.join(fields_of(form.format))}",
                    change=f"did you mean {near}?" if near else "",
                    where=where,
                )
            )
    if problems:
        raise UserError(*problems)


def _conversations(rows: Sequence[dict[str, Any]], form: Form) -> Iterator[Conversation]:
    """The conversations of those rows that can be read."""
    reader = Reader(form)
    for row in rows:
        with suppress(RowError, RecursionError):
            yield from reader.read(row)


def _is_single(conversation: Conversation) -> bool:
    return [message["role"] for message in conversation.messages] in ([], ["user", "assistant"])


def _has_turns(row: dict[str, Any]) -> bool:
    """Whether a prompt or a completion is messages, which have roles, and no plain text."""
    return any(
        as_turns(row[name]) is not row[name] or not isinstance(row[name], str)
        for name in ("prompt", "completion")
        if name in row
    )


# Documents


def _recipe(tokenizer: PreTrainedTokenizerBase, options: DataOptions, formats: Sequence[str]) -> Recipe:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UserError(
            Problem(
                found=f"a tokenizer without a Rust backend ({type(tokenizer).__name__})",
                needed="a fast tokenizer (tokenizer.json)",
                change="load it with AutoTokenizer (use_fast=True) once and save it",
                where="model",
            )
        )
    if not {"text", "segments"}.isdisjoint(formats) and tokenizer.eos_token is None:
        raise UserError(
            Problem(
                found="rows of plain text, and a tokenizer without an end-of-text token",
                needed="eos_token: a model trained without one never stops",
                change="set eos_token in tokenizer_config.json",
                where="data.train",
            )
        )
    today = (options.date or datetime.date.today()).isoformat()
    own = tokenizer.chat_template
    tools = [None, True] if isinstance(own, dict) and TOOL_USE in own else [None]
    templates = [of_tokenizer(tokenizer, one, options.template_arguments, today) for one in tools]
    begin = tokenizer("")["input_ids"]
    starts = tokenizer.bos_token_id is not None and begin[:1] == [tokenizer.bos_token_id]
    return Recipe(
        tokenizer_json=plain_json(backend),
        scripts=tuple(
            Script(one.text, dict(one.special), dict(one.arguments), one.date, turn_shape(one, tokenizer))
            for one in templates
        ),
        train_on=options.train_on,
        fold_system=options.fold_system,
        text_start=str(tokenizer.bos_token) if starts else "",
        text_end=str(tokenizer.eos_token or ""),
    )


def _documents(
    sources: _Sources,
    recipe: Recipe,
    cache: Path,
    progress: Progress,
    build_all: Callable[[Path, Callable[[int], None]], list[PartTotals]],
) -> Documents:
    name = store.key(
        {
            "recipe": recipe.key(),
            "parts": [asdict(part) for part in sources.parts],
            "forms": [asdict(form) for form in sources.forms],
            "commits": sources.commits,
            "files": [store.remembered_digest(cache, file, digest) for file in sources.files],
        }
    )
    directory = cache / "documents" / name
    expected = max(1, round(sources.total_bytes / sources.row_bytes))
    done = 0

    def advance(rows: int) -> None:
        nonlocal done
        done += rows
        progress("tokenise", min(done, expected), expected)

    def build(building: Path) -> None:
        totals = build_all(building, advance)
        stored = []
        base = 0
        for part, found in zip(sources.parts, totals, strict=True):
            base = base if part.start else 0
            stored.append({"source": part.source, "files": part.files, "row_base": base, "totals": found.to_json()})
            base += found.lines
        described = {"parts": stored}
        (building / "documents.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")

    if store.entry(directory, build):
        progress("tokenise", expected, expected)
    return Documents(directory)


# Packs


def _packs(
    documents: Documents,
    sources: _Sources,
    options: DataOptions,
    choice: Choice,
    tokenizer: PreTrainedTokenizerBase,
    cache: Path,
    progress: Progress,
) -> Path:
    shown = {
        "max_length": options.max_length,
        "over_length": options.over_length,
        "train_on": options.train_on,
        "pack": options.pack,
        "duplicates": options.duplicates,
        "mixture": options.mixture,
        "validation": options.validation if isinstance(options.validation, float | int) else "sources of their own",
        "seed": options.seed,
        "template_arguments": dict(options.template_arguments),
        "date": str(options.date or ""),
        "fold_system": options.fold_system,
    }
    weights = [source.weight for source in sources.given]
    name = store.key([documents.path.name, shown, weights, sources.num_train, asdict(choice)])
    directory = cache / "packs" / name

    def build(building: Path) -> None:
        progress("pack", 0, 1)
        _Packing(documents, sources, options).write(building, choice, tokenizer, shown)
        progress("pack", 1, 1)

    store.entry(directory, build)
    return directory


class _Packing:
    """Decides which documents are trained, in which packs, and keeps the account."""

    def __init__(self, documents: Documents, sources: _Sources, options: DataOptions) -> None:
        self.documents = documents
        self.sources = sources
        self.options = options
        self.lengths = documents.column("lengths")
        self.supervised = documents.column("supervised")
        self.content = documents.column("content")
        self.source = documents.sources()
        self.is_train = self.source < sources.num_train

        self.duplicate = np.zeros(len(documents), dtype=bool)
        for side in (self.is_train, ~self.is_train):
            found = np.flatnonzero(side)
            _, first = np.unique(self.content[found], return_index=True)
            self.duplicate[np.delete(found, first)] = True

        # Every document is in exactly one state; those that are packed have pieces.
        self.duplicate_dropped = self.duplicate & (options.duplicates == "drop")
        self.truncated = np.zeros(len(documents), dtype=bool)
        self.split = np.zeros(len(documents), dtype=bool)
        self.lost_ends = np.zeros(len(documents), dtype=np.int32)
        self._fit()
        self.dropped = ~self.duplicate_dropped & (self.kept_supervised == 0)
        usable = ~self.duplicate_dropped & ~self.dropped
        self.validation = usable & ~self.is_train
        if not isinstance(options.validation, tuple) and options.validation > 0:
            self.validation = self._pick_validation(usable)
        self.copies = np.where(usable, 1, 0).astype(np.int32)
        self._mix(usable & self.is_train & ~self.validation)
        self.left_out = usable & (self.copies == 0)
        self.train = usable & ~self.validation & ~self.left_out
        self.common_prefixes, self.prefix = find_prefixes(documents.token_batches())

    def _fit(self) -> None:
        """Pieces of every document within ``max_length``: most have one, the whole."""
        room, policy = self.options.max_length, self.options.over_length
        long = np.flatnonzero(self.lengths > room)
        kept_tokens, kept_supervised = self.lengths.copy(), self.supervised.copy()
        kept_tokens[long] = kept_supervised[long] = 0
        document, start, length, supervised = [], [], [], []
        for at in long.tolist() if policy in ("truncate", "split") else []:
            spans = self.documents.spans(at)
            whole = int(self.lengths[at])
            borders = range(0, whole if policy == "split" else 1, room)
            for begin in borders:
                size = min(room, whole - begin)
                inside = [
                    max(0, min(stop - begin, size) - max(first - begin, 1))
                    for first, stop, weight in spans
                    if weight > 0
                ]
                if sum(inside) == 0:
                    continue
                document.append(at)
                start.append(begin)
                length.append(size)
                supervised.append(sum(inside))
                kept_tokens[at] += size
                kept_supervised[at] += sum(inside)
            cuts = [begin + room for begin in borders if begin + room < whole]
            reach = whole if policy == "split" else room
            self.lost_ends[at] = sum(
                any(first < cut < stop for cut in cuts) or stop > reach for first, stop, _ in spans
            )
            (self.split if policy == "split" else self.truncated)[at] = kept_supervised[at] > 0
        short = np.flatnonzero(self.lengths <= room)
        self.piece_document = np.concatenate([short, np.array(document, dtype=np.int64)]).astype(np.int64)
        self.piece_start = np.concatenate([np.zeros(len(short), np.int32), np.array(start, dtype=np.int32)])
        self.piece_length = np.concatenate([self.lengths[short], np.array(length, dtype=np.int32)])
        self.piece_supervised = np.concatenate([self.supervised[short], np.array(supervised, dtype=np.int32)])
        self.kept_tokens, self.kept_supervised = kept_tokens, kept_supervised

    def _pick_validation(self, usable: np.ndarray) -> np.ndarray:
        """The smallest set of contents, taken in an order that the seed decides, that has the wanted share of rows."""
        found = np.flatnonzero(usable)
        picked = np.zeros(len(usable), dtype=bool)
        contents, inverse, counts = np.unique(self.content[found], return_inverse=True, return_counts=True)
        if len(contents) < 2:
            return picked
        order = np.argsort(_mixed(contents, self.options.seed), kind="stable")
        share = self.options.validation
        assert not isinstance(share, tuple)
        wanted = math.ceil(share * len(found))
        taken = min(int(np.searchsorted(np.cumsum(counts[order]), wanted)) + 1, len(contents) - 1)
        chosen = np.zeros(len(contents), dtype=bool)
        chosen[order[:taken]] = True
        picked[found] = chosen[inverse]
        return picked

    def _mix(self, rows: np.ndarray) -> None:
        """How often each training row is seen per epoch."""
        sources, options = self.sources, self.options
        wanted = np.array([source.weight for source in sources.given[: sources.num_train]])
        tokens = np.array([int(self.kept_tokens[rows & (self.source == at)].sum()) for at in range(sources.num_train)])
        if options.mixture == "tokens":
            wanted = np.where(tokens > 0, wanted, 0)
            if wanted.sum() > 0:
                wanted = wanted / wanted.sum() * tokens.sum() / np.maximum(tokens, 1)
        for at, times in enumerate(wanted.tolist()):
            whole, fraction = divmod(times, 1.0)
            found = np.flatnonzero(rows & (self.source == at))
            self.copies[found] = int(whole)
            if fraction > 1e-9:
                order = np.argsort(_mixed(found.astype(np.uint64), options.seed + 1), kind="stable")
                self.copies[found[order[: round(fraction * len(found))]]] += 1

    def write(self, building: Path, choice: Choice, tokenizer: PreTrainedTokenizerBase, shown: dict[str, Any]) -> None:
        """Write packs and account."""
        train = self._write_packs(building / "train", self.train)
        validation = self._write_packs(building / "validation", self.validation) if self.validation.any() else None
        bad_rows = building / "bad_rows.jsonl"
        kinds: list[dict[str, int]] = [{} for _ in self.sources.given]
        with bad_rows.open("w", encoding="utf-8") as out:
            for part, row in self.documents.bad_rows():
                file, number = part.where(row.row)
                told = {"file": file, "row": number, "kind": row.kind, "reason": row.reason, "change": row.change}
                out.write(json.dumps(told) + "\n")
                kinds[part.source][row.kind] = kinds[part.source].get(row.kind, 0) + 1
        if not any(kinds):
            bad_rows.unlink()
        ends = tokenizer.convert_ids_to_tokens(
            [token for token in self.documents.closing if token in tokenizer.added_tokens_decoder]
        )
        in_both = 0
        if isinstance(self.options.validation, tuple):
            in_both = int(np.isin(self.content[self.validation], self.content[self.train]).sum())
        account = Account(
            sources=tuple(self._account(at, kinds[at]) for at in range(len(self.sources.given))),
            train=train,
            validation=validation,
            template=choice.name,
            template_reason=choice.reason,
            added_tokens=choice.added_tokens,
            end_of_turn=tuple(ends),
            options=shown,
            rows_in_both=in_both,
            bad_rows_file=bad_rows.name if any(kinds) else "",
        )
        account.check()
        (building / "account.json").write_text(json.dumps(account.to_json(), indent=1) + "\n", encoding="utf-8")

    def _write_packs(self, path: Path, rows: np.ndarray) -> PackAccount:
        pieces = np.repeat(np.arange(len(self.piece_document)), np.where(rows, self.copies, 0)[self.piece_document])
        lengths = self.piece_length[pieces]
        if self.options.pack:
            keys = _mixed(np.arange(len(pieces), dtype=np.uint64), self.options.seed)
            packs = best_fit(lengths, self.options.max_length, keys)
        else:
            packs = np.arange(len(pieces), dtype=np.int64)
        order = np.argsort(packs, kind="stable")
        num_packs = int(packs.max()) + 1 if len(packs) else 0
        offsets = np.zeros(num_packs + 1, dtype=np.int64)
        np.cumsum(np.bincount(packs, minlength=num_packs), out=offsets[1:])
        pieces = pieces[order]
        prefixes = np.where(self.piece_start[pieces] == 0, self.prefix[self.piece_document[pieces]], np.int16(-1))
        account = PackAccount(
            packs=num_packs,
            tokens=int(lengths.sum(dtype=np.int64)),
            supervised=int(self.piece_supervised[pieces].sum(dtype=np.int64)),
            documents=len(pieces),
            max_length=self.options.max_length,
        )
        write_packs(
            path,
            f"../../../documents/{self.documents.path.name}",
            {
                "offsets": offsets,
                "documents": self.piece_document[pieces],
                "starts": self.piece_start[pieces],
                "lengths": self.piece_length[pieces],
                "prefixes": within(self.common_prefixes, prefixes, self.piece_length[pieces]),
            },
            {
                "num_packs": num_packs,
                "num_documents": len(pieces),
                "num_tokens": account.tokens,
                "supervised_tokens": account.supervised,
                "max_length": self.options.max_length,
                "common_prefixes": [[one.length, one.parent] for one in self.common_prefixes],
            },
        )
        return account

    def _account(self, at: int, kinds: dict[str, int]) -> SourceAccount:
        here = self.source == at
        parts = [part for part in self.documents.parts if part.source == at]
        source = self.sources.given[at]

        def rows(state: np.ndarray) -> int:
            return int(np.count_nonzero(here & state))

        return SourceAccount(
            name=source.path,
            role="train" if at < self.sources.num_train else "validation",
            format=self.sources.forms[at].format,
            files=len({file for part in parts for file in part.files}),
            commit=self.sources.commits[at],
            left=self.sources.left[at],
            rows_read=sum(part.totals.rows for part in parts),
            rows_train=rows(self.train),
            rows_validation=rows(self.validation),
            rows_dropped=rows(self.dropped),
            rows_bad=sum(part.totals.bad for part in parts),
            rows_duplicate=rows(self.duplicate),
            rows_duplicate_dropped=rows(self.duplicate_dropped),
            rows_left_out=rows(self.left_out),
            rows_truncated=rows(self.truncated & (self.train | self.validation)),
            rows_split=rows(self.split & (self.train | self.validation)),
            tokens=self._flow(here, self.lengths, self.kept_tokens),
            supervised=self._flow(here, self.supervised, self.kept_supervised),
            turns_without_end=int(self.lost_ends[here & (self.train | self.validation)].sum()),
            rows_nothing_supervised=kinds.get("nothing_supervised", 0),
            bad_kinds=dict(sorted(kinds.items())),
            unread=_most_first(part.totals.unread for part in parts),
            turns_moved=sum(part.totals.moved for part in parts),
            rows_trimmed=sum(part.totals.trimmed for part in parts),
            rows_without_thoughts=sum(part.totals.thoughts for part in parts),
            lengths=Lengths.of(self.lengths[here]),
        )

    def _flow(self, here: np.ndarray, whole: np.ndarray, kept: np.ndarray) -> Flow:
        def count(amounts: np.ndarray, state: np.ndarray) -> int:
            return int(amounts[here & state].sum(dtype=np.int64))

        in_packs = self.train | self.validation
        return Flow(
            read=int(whole[here].sum(dtype=np.int64)),
            repeated=count(kept.astype(np.int64) * (self.copies - 1), self.train),
            train=count(kept.astype(np.int64) * self.copies, self.train),
            validation=count(kept, self.validation),
            cut=count(whole - kept, in_packs) + count(whole, self.dropped),
            duplicate=count(whole, self.duplicate_dropped),
            left_out=count(whole, self.left_out),
        )


def _most_first(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums of counts, the largest first."""
    whole: Counter[str] = Counter()
    for one in counts:
        whole.update(one)
    return dict(whole.most_common())


def _mixed(values: np.ndarray, seed: int) -> np.ndarray:
    """``order.mix`` of every value under a seed: uint64, the same on every machine and version."""
    return mix_all(values ^ np.uint64(mix(seed & ((1 << 64) - 1))))


# What must not be


def _refuse(
    account: Account, options: DataOptions, documents: Documents, sources: _Sources, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Raise ``DataError`` with everything that the options forbid."""
    problems = list(_columns_never_seen(documents, sources))
    whole = account.total
    if whole.rows_bad and options.on_bad_row == "error":
        problems += _bad_rows(account, documents, sources, options)
    if options.over_length == "error" and whole.rows_dropped:
        share = whole.supervised.cut / max(whole.supervised.read, 1)
        longest = max(source.lengths.longest for source in account.sources)
        room = options.most_positions
        longer = f"data.max_length: {longest}, or " if room is None or longest <= room else ""
        problems.append(
            Problem(
                found=f"{whole.rows_dropped:,} of {whole.rows_read:,} rows are longer than {options.max_length:,} "
                f"tokens (the longest has {longest:,}); they hold {share:.2%} of the supervised tokens",
                needed="rows that fit" if longer else f"rows that fit; the model has positions for {room:,} tokens",
                change=f"{longer}data.over_length: drop (or truncate, split)",
                where="data.max_length",
            )
        )
    elif account.supervised_loss > options.max_loss:
        problems.append(
            Problem(
                found=f"over_length: {options.over_length} would lose {whole.supervised.cut:,} of "
                f"{whole.supervised.read:,} supervised tokens ({account.supervised_loss:.2%})",
                needed=f"at most {options.max_loss:.2%}",
                change=f"data.max_loss: {math.ceil(account.supervised_loss * 1000) / 1000:g}"
                + (
                    ""
                    if (options.most_positions or math.inf) <= options.max_length
                    else ", or a larger data.max_length"
                ),
                where="data.max_loss",
            )
        )
    if account.train.packs == 0 and not problems:
        problems.append(Problem(found="no row is left to train on", needed="at least one", where="data.train"))
    if isinstance(options.validation, tuple) and account.validation is None and not problems:
        problems.append(Problem(found="no row is left to validate on", needed="at least one", where="data.validation"))
    if (
        not isinstance(options.validation, tuple)
        and options.validation > 0
        and account.validation is None
        and not problems
    ):
        problems.append(
            Problem(found="too few different rows to set some aside", needed="at least two", where="data.validation")
        )
    if problems:
        raise DataError(account, *problems)


def _columns_never_seen(documents: Documents, sources: _Sources) -> Iterator[Problem]:
    """Columns that a source names and no row of it has."""
    for at, (source, form) in enumerate(zip(sources.given, sources.forms, strict=True)):
        seen = _most_first(part.totals.columns for part in documents.parts if part.source == at)
        for ours, theirs in form.columns.items():
            if theirs not in seen and ours not in form.optional:
                yield Problem(
                    found=f"columns says that {ours!r} stands in {theirs!r}, and no row has such a column",
                    needed="a column of the rows",
                    change="correct it, or leave it out",
                    where=f"data: {source.path}",
                )


def _bad_rows(account: Account, documents: Documents, sources: _Sources, options: DataOptions) -> Iterator[Problem]:
    """Bad rows, those with the same reason as one, and how many there are."""
    alike: dict[tuple[int, str], list[tuple[str, int]]] = {}
    changes: dict[tuple[int, str], str] = {}
    for part, bad in documents.bad_rows():
        alike.setdefault((part.source, bad.reason), []).append(part.where(bad.row))
        changes[part.source, bad.reason] = bad.change
    for (at, reason), places in list(alike.items())[:SHOWN_ROWS]:
        file, number = places[0]
        near = [other for name, other in places[1:4] if name == file]
        others = f" and {len(places) - 1 - len(near):,} more" if len(places) - 1 > len(near) else ""
        where = f"{file}:{number}" + "".join(f", :{other}" for other in near) + others
        change = changes[at, reason].replace(SOURCE, sources.key(at)).replace(PATH, written(sources.given[at].path))
        yield Problem(found=reason, needed="a row that can be trained on", change=change, where=where)
    whole = account.total
    listed = f"; {SHOWN_ROWS} of {len(alike):,} reasons are above" if len(alike) > SHOWN_ROWS else ""
    yield Problem(
        found=f"{whole.rows_bad:,} of {whole.rows_read:,} rows are bad{listed}; all are in {account.bad_rows_file}",
        needed="none",
        change="mend them, or set data.on_bad_row: skip (they are counted and listed in any case)",
        where="data.on_bad_row",
    )
