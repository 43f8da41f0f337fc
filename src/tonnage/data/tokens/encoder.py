"""From texts with borders to tokens with weights, and the proof that the borders fall between tokens.

A text is tokenised once, whole. A border at character b is sound when the text before b, tokenised alone, gives
exactly the tokens that the whole has before b: then a model that is given the beginning at inference sees what it was
trained on. Tokenising every beginning again would double the work; where the tokenizer works word by word (``words``
says when, and why that is enough) a few words before the border are looked at again instead:

    Most texts are cut into words here, and the tokenizer is asked once for every different word. The words before a
    border, found with and without the text after it, must be the same.

    A text that cannot be cut goes to the tokenizer whole. The last ``WINDOW_WORDS`` words before b, tokenised alone,
    must give the same tokens; those windows are mostly the template's own headers, so they are remembered.

Every other tokenizer, and every text that a normaliser changes, takes the full comparison (what it leaves alone whole,
it leaves alone in part). In all cases a border that does not hold refuses the row and names the place.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tonnage.data.text.masks import Marked, Span
from tonnage.data.tokens.long_texts import LONG, ids_in_pieces, may_be_cut
from tonnage.data.tokens.words import WINDOW_WORDS, Scanner, split_pattern
from tonnage.forms.conversation import RowError, as_row_error

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

VOCABULARY_CHARACTERS = 1 << 21
"""Different words are remembered until they have so many characters in all: about a quarter of a million of them."""
KNOWN_WINDOWS = 50_000
LONGEST_TAKEN = 32
"""Characters of a header that a first token may take along."""


def plain_json(tokenizer: Tokenizer) -> str:
    """A tokenizer's JSON, the same however it was set to truncate and pad."""
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        tokenizer = type(tokenizer).from_str(tokenizer.to_str())
        tokenizer.no_truncation()
        tokenizer.no_padding()
    text: str = tokenizer.to_str()
    return text


def _plain(tokenizer_json: str) -> Tokenizer:
    """The tokenizer without what must not touch training text: truncation, padding, dropout, added ends, trimmed
    offsets."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.post_processor = None
    if getattr(tokenizer.model, "dropout", None):
        tokenizer.model.dropout = None
    return tokenizer


class Fork(NamedTuple):
    """Where a document that is a pair of answers parts: ``prompt | first answer | second answer``."""

    shared: int
    """Tokens that both answers go on from; 0 of a document that is no pair."""
    second: int
    """The first token of the second answer."""


NO_FORK = Fork(0, 0)


@dataclass(slots=True)
class Document:
    """One document: its tokens, and the spans of them that are trained on."""

    tokens: np.ndarray
    """int32 (num_tokens,)"""
    spans: list[Span]
    """In tokens: first, one past the last, weight. The document's first token is in none of them."""
    moved: int = 0
    """Spans whose first token begins before them in the text."""
    carried: Sequence[float] = ()
    """Numbers of the row that go with it."""
    fork: Fork = NO_FORK
    has_mate: bool = False
    """Whether its second answer is that of another row."""
    images: Sequence[int] = ()
    """Numbers of its images in the table of its part, in the order in which they stand in it."""
    image_digests: Sequence[str] = ()
    image_tokens: int = 0
    """Tokens in whose places features of images go."""

    @property
    def supervised(self) -> int:
        """Tokens with a weight above zero."""
        return sum(stop - start for start, stop, weight in self.spans if weight > 0)


class _Vocabulary(dict[str, bytes]):
    """Different words in the order in which they came up: word -> its number, as the bytes of an int32."""

    def __init__(self) -> None:
        self.new: list[str] = []
        self.size = 0
        """Characters in all words."""
        self._tokens = np.zeros(0, dtype=np.int32)
        self._starts = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0, dtype=np.int64)

    def __missing__(self, word: str) -> bytes:
        number = self[word] = len(self).to_bytes(4, sys.byteorder)
        self.new.append(word)
        self.size += len(word)
        return number

    def learn(self, encodings: Sequence[Encoding]) -> None:
        ids = [encoding.ids for encoding in encodings]
        counts = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
        self._starts = np.append(self._starts, len(self._tokens) + np.cumsum(counts) - counts)
        self._counts = np.append(self._counts, counts)
        flat = np.fromiter(itertools.chain.from_iterable(ids), dtype=np.int32, count=int(counts.sum()))
        self._tokens = np.append(self._tokens, flat)

    def tokens(self, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of words, given by number: int32 (num_tokens,); and how many there are before each word and in all:
        int64 (num_words + 1,)."""
        counts = self._counts[words]
        before = np.zeros(len(words) + 1, dtype=np.int64)
        np.cumsum(counts, out=before[1:])
        at = np.arange(before[-1]) + np.repeat(self._starts[words] - before[:-1], counts)
        return self._tokens[at], before


@dataclass(slots=True)
class TextBatch:
    """Texts on their way to documents."""

    texts: Sequence[Marked]
    borders: list[list[int]]
    """Of every text, in characters: its beginning, where spans begin and end inside of it, its end."""
    by_word: list[bool]
    """Whether a text was cut into words; if not, it goes to the tokenizer whole."""
    vocabulary: _Vocabulary
    words: list[bytes]
    """The numbers of the words between borders, of all texts that were cut."""
    new: list[str]
    """Words that the tokenizer has not been asked for yet."""
    known: list[Encoding] = field(default_factory=list)
    """Their encodings."""
    whole: list[Encoding | np.ndarray | RowError] = field(default_factory=list)
    """Encodings of the texts that were not cut; of very long ones, their tokens alone."""


class Encoder:
    """Tokenises texts with borders, batch by batch: ``begin``, ``run``, ``documents``.

    Batches may overlap if each step takes them in order; ``run`` may be called on a thread of its own.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = _plain(tokenizer_json)
        self.names: Mapping[str, str] = {}
        """Names of tokens in messages, where they differ from the tokens themselves."""
        self._by_word = split_pattern(self._tokenizer) is not None
        self._normalizer = self._tokenizer.normalizer
        self._in_pieces = self._by_word and may_be_cut(self._tokenizer)
        self._windows: dict[str, list[int]] = {}
        self._vocabulary = _Vocabulary()
        self._scanner = Scanner.of(self._tokenizer)
        if self._scanner is not None and not self._scans_as_the_tokenizer():
            self._scanner = None

    def _scans_as_the_tokenizer(self) -> bool:
        """Whether words found here give the tokenizer's tokens, on a text in which every kind of character stands
        beside every other, and the added tokens whole and cut short: a tokenizer with something in it that we do not
        know of encodes its texts whole."""
        pieces = ["a", "s", "7", " ", "\n", "'", ".", "é", "\u3000", "日"]
        added = [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]
        pieces = [
            *map("".join, itertools.product(pieces, repeat=3)),
            *(f"{token} a{token}{token[:-1]}" for token in added),
        ]
        probe = "".join(pieces)
        batch = self.begin([Marked(probe, [(0, len(probe), 1.0)])])
        self.run(batch)
        document = next(self.documents(batch))
        return batch.by_word[0] and isinstance(document, Document) and document.tokens.tolist() == self.ids(probe)

    def begin(self, texts: Sequence[Marked]) -> TextBatch:
        """Cut into words what can be."""
        if self._vocabulary.size > VOCABULARY_CHARACTERS:
            self._vocabulary = _Vocabulary()
        number = self._vocabulary.__getitem__
        batch = TextBatch(texts, [], [], self._vocabulary, [], [])
        for text, spans in texts:
            inside = {border for start, stop, _ in spans for border in (start, stop) if 0 < border < len(text)}
            borders = sorted(inside)
            stretches = self._scanner.cut(text, borders) if self._scanner is not None else None
            batch.borders.append([0, *borders, len(text)])
            batch.by_word.append(stretches is not None)
            batch.words += [b"".join(map(number, words)) for words in stretches or ()]
        batch.new, self._vocabulary.new = self._vocabulary.new, []
        return batch

    def run(self, batch: TextBatch) -> None:
        """What the tokenizer has to do for a batch: it does it on all cores and lets other threads go on."""
        batch.known = self._tokenizer.encode_batch(batch.new, add_special_tokens=False)
        uncut = [
            (text, ends)
            for (text, _), ends, cut in zip(batch.texts, batch.borders, batch.by_word, strict=True)
            if not cut
        ]
        of_long = [self._ids_of_long(text, ends) for text, ends in uncut]
        others = iter(self._encode([text for (text, _), ids in zip(uncut, of_long, strict=True) if ids is None]))
        batch.whole = [next(others) if ids is None else ids for ids in of_long]

    def documents(self, batch: TextBatch) -> Iterator[Document | RowError]:
        """The documents of a batch that was run, or why there is none, in the order of its texts."""
        batch.vocabulary.learn(batch.known)
        tokens, before = batch.vocabulary.tokens(np.frombuffer(b"".join(batch.words), dtype=np.int32))
        ends = before[list(itertools.accumulate(len(words) // 4 for words in batch.words))].tolist()
        whole = iter(batch.whole)
        first = at = 0
        for (text, spans), borders, cut in zip(batch.texts, batch.borders, batch.by_word, strict=True):
            if cut:
                stop = at + len(borders) - 1
                places = dict(zip(borders, [0, *(end - first for end in ends[at:stop])], strict=True))
                at, last = stop, ends[stop - 1]
                yield Document(tokens[first:last], _in_tokens(spans, places))
                first = last
                continue
            encoding = next(whole)
            try:
                if isinstance(encoding, RowError):
                    raise encoding
                if isinstance(encoding, np.ndarray):
                    yield Document(encoding, _in_tokens(spans, {0: 0, len(text): len(encoding)}))
                    continue
                yield self._place(text, encoding, spans)
            except Exception as error:
                yield as_row_error(error)

    def _ids_of_long(self, text: str, borders: Sequence[int]) -> np.ndarray | None:
        """Tokens of a very long text without borders inside; None of any other, and of one that cannot be cut."""
        if len(text) < LONG or len(borders) > 2 or not self._in_pieces:
            return None
        try:
            return ids_in_pieces(text, self.ids)
        except Exception:  # the whole says why
            return None

    def _encode(self, texts: list[str]) -> list[Encoding | RowError]:
        """Encodings of whole texts; a text that is not valid Unicode gives a ``RowError`` in its place."""
        try:
            return list(self._tokenizer.encode_batch(texts, add_special_tokens=False))
        except Exception:
            return [self._one(text) for text in texts]

    def _one(self, text: str) -> Encoding | RowError:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            return RowError(
                "invalid_utf8", f"character {error.start} of the text is not valid Unicode ({text[error.start]!r})"
            )
        try:
            return self._tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:  # such as of a vocabulary that lacks a character, and has no token for what it lacks
            return RowError("tokenizer", f"the tokenizer does not take the text ({error})")

    def document(self, text: Marked) -> Document | RowError:
        """The document of one text, or why there is none."""
        batch = self.begin([text])
        self.run(batch)
        return next(self.documents(batch))

    def ids(self, text: str) -> list[int]:
        found: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return found

    def _place(self, text: str, encoding: Encoding, spans: Sequence[Span]) -> Document:
        """Spans of characters as spans of tokens, each border proven. Raises ``RowError``."""
        ids: list[int] = encoding.ids
        local = self._by_word and (self._normalizer is None or self._normalizer.normalize_str(text) == text)
        places = {0: 0, len(text): len(ids)}
        moved = 0
        inside = {start for start, _, _ in spans} & {stop for _, stop, _ in spans}
        for start, _, _ in spans:
            if start not in places:
                places[start], was_moved = self._border(text, encoding, ids, start, local, inside=start in inside)
                moved += was_moved
        for _, stop, _ in spans:
            if stop not in places:
                # A closing token may take the white space after it along; it ends the span all the same.
                token = encoding.char_to_token(stop - 1)
                places[stop] = token + 1 if token is not None else self._border(text, encoding, ids, stop, local)[0]
        return Document(np.array(ids, dtype=np.int32), _in_tokens(spans, places), moved)

    def _border(
        self, text: str, encoding: Encoding, ids: list[int], at: int, local: bool, *, inside: bool = False
    ) -> tuple[int, bool]:
        """Number of tokens before character ``at``, and whether one that begins before it had to be taken along.

        A token that holds the end of the template's header and the beginning of what is said belongs to what is said:
        given the header alone, a model has to write it. ``local``: whether a few words before the border are enough to
        prove it. ``inside``: between two parts of one message, where only white space may change sides.
        """
        token = encoding.char_to_token(at) if at < len(text) else len(ids)
        if token is not None and local and self._window_holds(text, encoding, ids, at, token):
            return token, False
        alone = self.ids(text[:at])
        if ids[: len(alone)] == alone:
            return len(alone), False
        parted = next(
            (n for n, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids))
        )
        place = encoding.token_to_chars(parted)
        where = place[0] if place else at
        taken = text[where:at]
        if where <= at and len(taken) <= LONGEST_TAKEN and not (inside and taken.strip()):
            return parted, True
        reason = (
            "two parts of a message meet inside of a token"
            if inside
            else ("the text before the answer, tokenised alone, is not how the whole begins")
        )
        raise RowError(
            "border",
            f"{reason}: they part at token {parted} (character {where}): "
            f"{self._show(alone, parted)} alone, {self._show(ids, parted)} in the whole",
        )

    @property
    def num_tokens(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def _show(self, ids: list[int], at: int) -> str:
        tokens = [str(self._tokenizer.id_to_token(token)) for token in ids[at : at + 3]]
        return repr([self.names.get(token, token) for token in tokens])

    def token_id(self, token: str) -> int | None:
        """The id of a token; ``None`` if there is none."""
        number: int | None = self._tokenizer.token_to_id(token)
        return number

    def _window_holds(self, text: str, encoding: Encoding, ids: list[int], at: int, token: int) -> bool:
        if token < len(ids):
            place = encoding.token_to_chars(token)
            if place is None or place[0] != at:
                return False
        first, words = token, 0
        while first > 0 and words < WINDOW_WORDS:
            first -= 1
            while first > 0 and encoding.token_to_word(first) == encoding.token_to_word(first - 1):
                first -= 1
            words += 1
        place = encoding.token_to_chars(first) if first < len(ids) else None
        if first and place is None:
            return False
        window = text[place[0] if first and place else 0 : at]
        window_ids = self._windows.get(window)
        if window_ids is None:
            if len(self._windows) > KNOWN_WINDOWS:
                self._windows.clear()
            window_ids = self._windows[window] = self.ids(window)
        return ids[first:token] == window_ids


def _in_tokens(spans: Sequence[Span], places: dict[int, int]) -> list[Span]:
    """Spans of characters as spans of tokens, given the number of tokens before each border."""
    placed = [(max(places[start], 1), places[stop], weight) for start, stop, weight in spans]
    return [span for span in placed if span[0] < span[1] and span[2] > 0]


def content_key(
    tokens: np.ndarray, spans: Sequence[Span], carried: Sequence[float] = (), images: Sequence[str] = ()
) -> int:
    """64 bits that stand for a document's tokens and weights, the numbers that go with it and the digests of its
    images: equal for equal documents."""
    state = hashlib.blake2b(tokens.tobytes(), digest_size=8)
    state.update(repr(spans).encode())
    if carried:
        state.update(repr(list(carried)).encode())
    if images:
        state.update(repr(list(images)).encode())
    return int.from_bytes(state.digest(), "little")


def paired(chosen: Document, rejected: Document) -> Document:
    """Two documents that begin alike as one, in which what they share is there once.

    They part at the first token that differs, and no later than the first that is trained on.

    Raises:
        RowError: they are equal, or have no token in common.
    """
    if np.array_equal(chosen.tokens, rejected.tokens):
        raise RowError("equal_answers", "both answers have the same tokens: neither can be preferred")
    length = min(len(chosen.tokens), len(rejected.tokens))
    differ = np.flatnonzero(chosen.tokens[:length] != rejected.tokens[:length])
    begins = (start for document in (chosen, rejected) for start, _, weight in document.spans if weight > 0)
    shared = min(int(differ[0]) if len(differ) else length, *begins)
    if shared == 0:
        raise RowError("no_prompt", "the two answers have no token before them in common")
    fork = Fork(shared, len(chosen.tokens))
    shift = fork.second - shared
    spans = [*chosen.spans, *((start + shift, stop + shift, weight) for start, stop, weight in rejected.spans)]
    tokens = np.concatenate([chosen.tokens, rejected.tokens[shared:]])
    return Document(tokens, spans, chosen.moved + rejected.moved, chosen.carried, fork)
