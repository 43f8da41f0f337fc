"""Which documents are trained on, how often, in which packs; and the account of it all."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.config import Data
from tonnage.data.account import Account, Flow, Lengths, PackAccount, SourceAccount
from tonnage.data.building.builder import CONTROL_ROWS
from tonnage.data.packs.dataset import write_packs
from tonnage.data.packs.order import mix
from tonnage.data.packs.packing import best_fit, next_fit
from tonnage.data.packs.pieces import Borders, Piece, pieces
from tonnage.data.packs.prefixes import Prefix, find_prefixes, within
from tonnage.data.sources.given import Sources
from tonnage.data.sources.in_memory import shown_name
from tonnage.data.text.choice import TemplateChoice
from tonnage.data.tokens.documents import Documents, StoredPart, half_read_files
from tonnage.data.tokens.encoder import content_key

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Selection:
    def __init__(
        self,
        documents: Documents,
        sources: Sources,
        options: Data,
        seed: int,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.sources = sources
        self.options = options
        self.seed = seed
        self.lengths = documents.column("lengths")
        self.supervised = documents.column("supervised")
        self.content = documents.column("content")
        self.shared = documents.column("shared")
        self.image_tokens = documents.column("image_tokens")
        self.source = documents.sources()
        self.half_read = half_read_files(documents)
        self.is_train = self.source < sources.num_train

        self.duplicate = np.zeros(len(documents), dtype=bool)
        for side in (self.is_train, ~self.is_train):
            indices = np.flatnonzero(side)
            _, first = np.unique(self.content[indices], return_index=True)
            self.duplicate[np.delete(indices, first)] = True

        # Every document is in exactly one state; those that are packed have pieces.
        beyond = self._beyond_the_first() | (self.lengths < options.min_length)
        self.duplicate_dropped = self.duplicate & (options.duplicates == "drop") & ~beyond
        self.truncated = np.zeros(len(documents), dtype=bool)
        self.split = np.zeros(len(documents), dtype=bool)
        self.lost_ends = np.zeros(len(documents), dtype=np.int32)
        self._fit()
        self.dropped = ~self.duplicate_dropped & ~beyond & (self.kept_supervised == 0)
        usable = ~self.duplicate_dropped & ~self.dropped & ~beyond
        self.validation = usable & ~self.is_train
        if not isinstance(options.validation, tuple) and options.validation > 0:
            self.validation = self._pick_validation(usable)
        self.copies = np.where(usable, 1, 0).astype(np.int32)
        self._mix(usable & self.is_train & ~self.validation)
        self.left_out = beyond | (usable & (self.copies == 0))
        self.train = usable & ~self.validation & ~self.left_out
        # Documents with images may begin with the same tokens, in whose places other features go.
        self.common_prefixes: tuple[Prefix, ...] = ()
        self.prefix: np.ndarray = np.full(len(documents), -1, dtype=np.int16)
        if not documents.has_images:
            self.common_prefixes, self.prefix = find_prefixes(documents.token_batches())

    def _prompts(self) -> np.ndarray:
        """Of every document what stands for the prompt of its two answers, or of one that has no two, for all of it."""
        keys, first = self.content.copy(), 0
        for tokens in self.documents.token_batches() if self.shared.any() else ():
            for at, shared in enumerate(self.shared[first : first + len(tokens.offsets) - 1].tolist()):
                keys[first + at] = content_key(tokens[at][:shared], ()) if shared else keys[first + at]
            first += len(tokens.offsets) - 1
        return keys

    def _beyond_the_first(self) -> np.ndarray:
        """Which documents come after those that a source's ``first`` takes; bad rows do not count."""
        beyond = np.zeros(len(self.source), dtype=bool)
        for at, source in enumerate(self.sources.given):
            if source.first is not None:
                indices = np.flatnonzero(self.source == at)
                beyond[indices[round(source.first * len(indices)) if source.first < 1 else int(source.first) :]] = True
        return beyond

    def _fit(self) -> None:
        """Pieces of every document within ``max_length``: most have one, the whole."""
        room, policy = self.options.max_length, self.options.over_length
        long = np.flatnonzero(self.lengths > room)
        kept_tokens, kept_supervised = self.lengths.copy(), self.supervised.copy()
        kept_tokens[long] = kept_supervised[long] = 0
        self.num_pieces, self.context = np.zeros_like(self.lost_ends), np.zeros_like(self.lost_ends)
        cut = long[self.image_tokens[long] == 0].tolist() if policy in ("truncate", "split") else []
        borders = Borders(self.tokenizer, self.options.split_at) if cut and policy == "split" else None
        cut_pieces: list[tuple[int, int, int, int, int]] = []
        for at in cut:
            spans, whole = self.documents.spans(at), int(self.lengths[at])
            parts = [Piece(0, 0, room)]
            if borders is not None:
                parts = pieces(whole, room, self.options.overlap, borders.find(self.documents.tokens(at), spans))
            for start, own, stop in parts:
                first_target = max(own, start + 1)
                inside = sum(
                    max(0, min(last, stop) - max(first, first_target)) for first, last, weight in spans if weight > 0
                )
                if inside == 0:
                    continue
                cut_pieces.append((at, start, own - start, stop - start, inside))
                kept_tokens[at] += stop - own
                kept_supervised[at] += inside
                self.context[at] += own - start
                self.num_pieces[at] += policy == "split"
            cuts, reach = [part.stop for part in parts if part.stop < whole], parts[-1].stop
            self.lost_ends[at] = sum(
                any(first < place < stop for place in cuts) or stop > reach for first, stop, _ in spans
            )
            (self.split if policy == "split" else self.truncated)[at] = kept_supervised[at] > 0
        short = np.flatnonzero(self.lengths <= room)
        documents, starts, contexts, lengths, supervised = np.array(cut_pieces, dtype=np.int64).reshape(-1, 5).T
        self.piece_document = np.concatenate([short, documents])
        self.piece_start = np.concatenate([np.zeros_like(short), starts]).astype(np.int32)
        self.piece_context = np.concatenate([np.zeros_like(short), contexts]).astype(np.int32)
        self.piece_length = np.concatenate([self.lengths[short], lengths]).astype(np.int32)
        self.piece_supervised = np.concatenate([self.supervised[short], supervised]).astype(np.int32)
        self.kept_tokens, self.kept_supervised = kept_tokens, kept_supervised

    def _pick_validation(self, usable: np.ndarray) -> np.ndarray:
        """The smallest set of contents, or of prompts with two answers, taken in an order that the seed decides, that
        has the wanted share of rows."""
        indices = np.flatnonzero(usable)
        picked = np.zeros(len(usable), dtype=bool)
        contents, inverse, counts = np.unique(self._prompts()[indices], return_inverse=True, return_counts=True)
        if len(contents) < 2:
            return picked
        order = np.argsort(_mixed(contents, self.seed), kind="stable")
        share = self.options.validation
        assert not isinstance(share, tuple)
        target = math.ceil(share * len(indices))
        taken = min(int(np.searchsorted(np.cumsum(counts[order]), target)) + 1, len(contents) - 1)
        chosen = np.zeros(len(contents), dtype=bool)
        chosen[order[:taken]] = True
        picked[indices] = chosen[inverse]
        return picked

    def _mix(self, rows: np.ndarray) -> None:
        """How often each training row is seen per epoch."""
        sources, options = self.sources, self.options
        weights = np.array([source.weight for source in sources.given[: sources.num_train]])
        tokens = np.array([int(self.kept_tokens[rows & (self.source == at)].sum()) for at in range(sources.num_train)])
        if options.mixture == "tokens":
            weights = np.where(tokens > 0, weights, 0)
            if weights.sum() > 0:
                weights = weights / weights.sum() * tokens.sum() / np.maximum(tokens, 1)
        for at, times in enumerate(weights.tolist()):
            whole, fraction = divmod(times, 1.0)
            indices = np.flatnonzero(rows & (self.source == at))
            self.copies[indices] = int(whole)
            if fraction > 1e-9:
                order = np.argsort(_mixed(indices.astype(np.uint64), self.seed + 1), kind="stable")
                self.copies[indices[order[: round(fraction * len(indices))]]] += 1

    def write(self, building: Path, choice: TemplateChoice, shown: dict[str, Any]) -> None:
        train = self._write_packs(building / "train", self.train)
        validation = self._write_packs(building / "validation", self.validation) if self.validation.any() else None
        bad_rows = building / "bad_rows.jsonl"
        kinds: list[Counter[str]] = [Counter() for _ in self.sources.given]
        with bad_rows.open("w", encoding="utf-8") as out:
            for part, row in self.documents.bad_rows():
                file, number = part.where(row.row)
                record = {"file": file, "row": number, "kind": row.kind, "reason": row.reason, "change": row.change}
                record |= {"unread_bytes": row.unread} if row.unread else {}
                out.write(json.dumps(record) + "\n")
                kinds[part.source][row.kind] += 1
        if not any(kinds):
            bad_rows.unlink()
        ends = self.tokenizer.convert_ids_to_tokens(
            [token for token in self.documents.closing if token in self.tokenizer.added_tokens_decoder]
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
        numbers = np.repeat(np.arange(len(self.piece_document)), np.where(rows, self.copies, 0)[self.piece_document])
        if self.options.order == "given":
            numbers = numbers[np.lexsort((self.piece_start[numbers], self.piece_document[numbers]))]
        lengths = self.piece_length[numbers]
        if self.options.pack and self.options.order == "given":
            packs = next_fit(lengths, self.options.max_length)
        elif self.options.pack:
            keys = _mixed(np.arange(len(numbers), dtype=np.uint64), self.seed)
            packs = best_fit(lengths, self.options.max_length, keys)
        else:
            packs = np.arange(len(numbers), dtype=np.int64)
        order = np.argsort(packs, kind="stable")
        num_packs = int(packs.max()) + 1 if len(packs) else 0
        offsets = np.zeros(num_packs + 1, dtype=np.int64)
        np.cumsum(np.bincount(packs, minlength=num_packs), out=offsets[1:])
        numbers = numbers[order]
        is_whole = (self.piece_start[numbers] == 0) & (self.piece_context[numbers] == 0)
        prefixes = np.where(is_whole, self.prefix[self.piece_document[numbers]], np.int16(-1))
        shared, lengths = self.shared[self.piece_document[numbers]], self.piece_length[numbers]
        account = PackAccount(
            packs=num_packs,
            tokens=int(lengths.sum(dtype=np.int64)),
            supervised=int(self.piece_supervised[numbers].sum(dtype=np.int64)),
            documents=len(numbers),
            max_length=self.options.max_length,
        )
        write_packs(
            path,
            f"../../../documents/{self.documents.path.name}",
            {
                "offsets": offsets,
                "documents": self.piece_document[numbers],
                "starts": self.piece_start[numbers],
                "lengths": self.piece_length[numbers],
                **({"contexts": self.piece_context[numbers]} if self.piece_context.any() else {}),
                "prefixes": within(self.common_prefixes, prefixes, np.where(shared > 0, shared, lengths)),
            },
            {
                "num_packs": num_packs,
                "num_documents": len(numbers),
                "num_tokens": account.tokens,
                "supervised_tokens": account.supervised,
                "max_length": self.options.max_length,
                "in_order": self.options.order == "given",
                "pairs": bool(self.shared.any()),
                **({"images": True} if self.documents.has_images else {}),
                "common_prefixes": [[prefix.length, prefix.parent] for prefix in self.common_prefixes],
            },
        )
        return account

    def _account(self, at: int, kinds: Mapping[str, int]) -> SourceAccount:
        in_source = self.source == at
        parts = [part for part in self.documents.parts if part.source == at]
        source = self.sources.given[at]
        files = {file for part in parts for file in part.files}

        def rows(state: np.ndarray) -> int:
            return int(np.count_nonzero(in_source & state))

        return SourceAccount(
            name=shown_name(source.path),
            role="train" if at < self.sources.num_train else "validation",
            format=self.sources.forms[at].format,
            files=len(files),
            commit=self.sources.resolved[at].commit,
            left=self.sources.resolved[at].left,
            bytes=sum(Path(file).stat().st_size for file in files),
            bytes_unread=sum(one.unread_bytes for one in self.half_read if one.source == at),
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
            pieces=int(self.num_pieces[in_source & (self.train | self.validation)].sum()),
            context_tokens=int(self.context[in_source & (self.train | self.validation)].sum()),
            tokens=self._flow(in_source, self.lengths, self.kept_tokens, self.context),
            supervised=self._flow(in_source, self.supervised, self.kept_supervised, np.zeros_like(self.context)),
            turns_without_end=int(self.lost_ends[in_source & (self.train | self.validation)].sum()),
            rows_nothing_supervised=kinds.get("nothing_supervised", 0),
            bad_kinds=dict(sorted(kinds.items())),
            unread=most_first(part.totals.unread for part in parts),
            turns_moved=sum(part.totals.moved for part in parts),
            rows_trimmed=sum(part.totals.trimmed for part in parts),
            rows_without_thoughts=sum(part.totals.thoughts for part in parts),
            rows_tied=sum(part.totals.ties for part in parts),
            rows_desirable=sum(part.totals.desirable for part in parts),
            rows_undesirable=sum(part.totals.undesirable for part in parts),
            rows_with_images=sum(part.totals.with_images for part in parts),
            images=sum(part.totals.images for part in parts),
            image_tokens=sum(part.totals.image_tokens for part in parts),
            rows_with_control_tokens=sum(part.totals.with_controls for part in parts),
            control_tokens=most_first(part.totals.controls for part in parts),
            control_token_rows=_places(parts),
            lengths=Lengths.of(self.lengths[in_source]),
        )

    def _flow(self, in_source: np.ndarray, whole: np.ndarray, remaining: np.ndarray, again: np.ndarray) -> Flow:
        """``again``: tokens of every document that are there a second time, as context."""

        def count(amounts: np.ndarray, state: np.ndarray) -> int:
            return int(amounts[in_source & state].sum(dtype=np.int64))

        in_packs, copies = self.train | self.validation, self.copies.astype(np.int64)
        return Flow(
            read=int(whole[in_source].sum(dtype=np.int64)),
            repeated=count(remaining * (copies - 1) + again * copies, self.train) + count(again, self.validation),
            train=count((remaining + again) * copies, self.train),
            validation=count(remaining + again, self.validation),
            cut=count(whole - remaining, in_packs) + count(whole, self.dropped),
            duplicate=count(whole, self.duplicate_dropped),
            left_out=count(whole, self.left_out),
        )


def _places(parts: Sequence[StoredPart]) -> tuple[str, ...]:
    """The first rows with control tokens in their words."""
    places = [part.where(row) for part in parts for row in part.totals.control_rows]
    return tuple(f"{Path(file).name}:{row}" for file, row in dict.fromkeys(places))[:CONTROL_ROWS]


def most_first(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Sums of counts, the largest first."""
    whole: Counter[str] = Counter()
    for part in counts:
        whole.update(part)
    return dict(whole.most_common())


def _mixed(values: np.ndarray, seed: int) -> np.ndarray:
    """``order.mix`` of every value under a seed: uint64, the same on every machine and version."""
    return mix(values ^ mix(seed & ((1 << 64) - 1)))
