"""Control tokens in the words of rows: characters that the tokenizer takes for the template's marks, but are words.

A user may write ``<|im_end|>``, or ``<s>`` in a page of HTML. In a rendered text nothing tells these from the tokens
that the template wrote. So such a conversation, and only such a one, is rendered a second time with a character inside
of every control token of its own: where that character comes out in the text, the words of the row are. To train them
as words, every other control token of the text is replaced by a stand-in, as long as itself, that no text holds, and a
tokenizer is asked that knows the stand-ins in the place of the tokens, with the same ids. It takes the words for words,
and all else is its usual work: the same pieces, the same places, the same proofs of borders.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tonnage.data.text.shape import TurnShape
from tonnage.data.text.thoughts import TAGS
from tonnage.data.tokens.encoder import Encoder
from tonnage.forms.conversation import Message, RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAID = frozenset(
    (
        *(tag for tags in TAGS for tag in tags),
        *("<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "[TOOL_CALLS]", "<|python_tag|>"),
        *("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", "[ARGS]", "[CALL_ID]"),
    )
)
"""Tokens around thoughts and calls of tools: in the assistant's words they are what it says."""
KEPT = "kept_control_tokens"
"""The tokenizer setting that names those that stay tokens in the words of prompts."""

_BRACKETED = re.compile(r"[^\w\s].*[^\w\s]", re.DOTALL)
"""Fits plain tokens that look like marks; others are line breaks or words."""
_BREAK = "\U0010fffd"
_FIRST_STAND_IN = 0x100000
"""Of a plane of Unicode that is for private use."""


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    added = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return tuple(dict.fromkeys([*map(str, tokenizer.all_special_tokens), *added]))


def control_tokens(
    tokenizer: PreTrainedTokenizerBase, shapes: Sequence[TurnShape], asked_for: Sequence[str] = ()
) -> tuple[str, ...]:
    """A tokenizer's special tokens, and those that are not special by which a template's turns are told apart; without
    those that rows are ``asked_for`` to hold, unless they tell turns apart."""
    special, frame = frozenset(special_tokens(tokenizer)), "".join(shape.frame for shape in shapes)
    texts = []
    for token in tokenizer.added_tokens_decoder.values():
        marks_turns = token.content in frame and token.content not in SAID and _BRACKETED.fullmatch(token.content)
        is_plain = token.content not in special or token.content in asked_for
        if token.content.strip() and not token.single_word and (marks_turns or not is_plain):
            texts.append(token.content)
    return tuple(sorted(texts))


def settings_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Keys of ``data`` by which the same tokens stay tokens in the words of rows as when this tokenizer was saved."""
    kept_tokens = tokenizer.init_kwargs.get(KEPT, ())
    if not kept_tokens:
        return {}
    all_are = set(control_tokens(tokenizer, [])) <= set(kept_tokens)
    return {"added_tokens": list(kept_tokens)} | ({"control_tokens": "keep"} if all_are else {})


class ControlTokens:
    """Finds control tokens in the words of conversations, and makes words of them."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._encoder: tuple[str, Encoder] | None = None
        ordered = sorted(tokens, key=lambda token: (-len(token), token))
        self._stand_ins = {token: chr(_FIRST_STAND_IN + at) * len(token) for at, token in enumerate(ordered)}
        self._firsts = frozenset(token[0] for token in tokens)
        self._any = _pattern(ordered)
        self._of_others = _pattern([token for token in ordered if token not in SAID])

    def in_words(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None) -> tuple[str, ...]:
        """The control tokens that messages and tools hold, each once, in order."""
        if self._any is None:
            return ()
        tokens: dict[str, None] = {}
        for value, pattern in [*((message, self._pattern_of(message)) for message in messages), (tools, self._any)]:
            for text in _texts(value):
                if pattern is not None and any(first in text for first in self._firsts):
                    tokens |= dict.fromkeys(pattern.findall(text))
        return tuple(tokens)

    def broken(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Message], list[dict[str, Any]] | None]:
        """Messages and tools with a character inside of every control token that they hold."""
        return [_broken(message, self._pattern_of(message)) for message in messages], _broken(tools, self._any)

    def words(self, whole: str, broken: str) -> str:
        """The text ``whole`` with stand-ins for its control tokens, except those that are words, for ``encoder``. Text
        ``broken``, rendered from messages that the method of this name made, shows which are. Raises ``RowError``."""
        assert self._any is not None
        pieces = broken.split(_BREAK)
        if "".join(pieces) != whole or max(whole, default="") >= chr(_FIRST_STAND_IN):
            raise RowError(
                "control_token",
                "the template does not take the control tokens in its words for words like others",
                "data.control_tokens: keep (they stay tokens), or take them out of the row",
            )
        segments: list[str] = []
        at = first = 0
        for piece in pieces[:-1]:
            first += len(piece)
            token = self._any.match(whole, first - 1)
            if token is not None and token.start() >= at:
                segments += [self.stood_in(whole[at : token.start()]), token[0]]
                at = token.end()
        return "".join([*segments, self.stood_in(whole[at:])])

    def encoder(self, tokenizer_json: str) -> Encoder:
        """The encoder of texts with stand-ins."""
        if self._encoder is None or self._encoder[0] != tokenizer_json:
            ids = {token["content"]: token["id"] for token in json.loads(tokenizer_json)["added_tokens"]}
            encoder = Encoder(with_stand_ins(tokenizer_json, self._stand_ins))
            if moved := [
                token for token, stand_in in self._stand_ins.items() if encoder.token_id(stand_in) != ids[token]
            ]:
                raise RuntimeError(f"control tokens get other ids when they are renamed: {moved[:3]}")
            encoder.names = {stand_in: token for token, stand_in in self._stand_ins.items()}
            self._encoder = tokenizer_json, encoder
        return self._encoder[1]

    def _pattern_of(self, message: Message) -> re.Pattern[str] | None:
        return self._of_others if message.get("role") == "assistant" else self._any

    def stood_in(self, text: str) -> str:
        """A text of the template's with stand-ins for its control tokens."""
        assert self._any is not None
        return self._any.sub(lambda token: self._stand_ins[token[0]], text)


def refused(tokens: Sequence[str]) -> RowError:
    """Why a row is bad where rows may hold no control tokens."""
    return RowError(
        "control_token",
        f"its own words hold {', '.join(tokens)}, which the tokenizer takes for control tokens",
        "data.control_tokens: text (they are trained as words) or keep (as tokens), or take them out of the row",
    )


def with_stand_ins(tokenizer_json: str, stand_ins: Mapping[str, str]) -> str:
    """A tokenizer that knows stand-ins in the place of tokens, with the same ids, and cannot make these tokens of words
    (a vocabulary may hold them as pieces too)."""
    value = json.loads(tokenizer_json)
    value["post_processor"] = None
    for token in value["added_tokens"]:
        token["content"] = stand_ins.get(token["content"], token["content"])
    model = value["model"]
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        model["vocab"] = {stand_ins.get(piece, piece): number for piece, number in vocabulary.items()}
    elif isinstance(vocabulary, list):
        model["vocab"] = [[stand_ins.get(piece, piece), score] for piece, score in vocabulary]
    if model.get("unk_token") in stand_ins:
        model["unk_token"] = stand_ins[model["unk_token"]]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if stand_ins.keys().isdisjoint((*pair, "".join(pair)))]
    return json.dumps(value)


def _pattern(ordered: Sequence[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _texts(value: object) -> Iterator[str]:
    """All texts of plain values, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, held in value.items():
            yield from _texts(name)
            yield from _texts(held)
    elif isinstance(value, list):
        for held in value:
            yield from _texts(held)


def _broken(value: Any, pattern: re.Pattern[str] | None) -> Any:
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(lambda token: token[0][0] + _BREAK + token[0][1:], value)
    if isinstance(value, dict):
        return {_broken(name, pattern): _broken(held, pattern) for name, held in value.items()}
    if isinstance(value, list):
        return [_broken(held, pattern) for held in value]
    return value
