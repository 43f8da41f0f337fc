"""Text is sent as early as it can be, and never another one than that of the whole answer."""

from __future__ import annotations

import pytest

from stripped import stripping_tokenizer
from tonnage.inference.pieces import Pieces, Token, pieces_of

TOKENIZER = stripping_tokenizer()


def tokens_of(*names: str) -> list[Token]:
    vocabulary = TOKENIZER.get_vocab()
    return [Token(vocabulary[name]) for name in names]


def spelled(*words: str) -> Pieces:
    """Whose tokens are those words."""
    return Pieces(lambda ids: "".join(words[one] for one in ids), ["stop"])


def test_what_may_become_a_stop_word_waits() -> None:
    pieces = spelled("a s", "to", "re st", "op b")
    told = [pieces.add(Token(number))[0] for number in range(4)]
    assert told == ["a ", "", "store ", ""]
    assert (pieces.stopped, pieces.text, pieces.end()[0]) == (True, "a store ", "")
    pieces = spelled("a s", "to")
    told = [pieces.add(Token(number))[0] for number in range(2)]
    assert [*told, pieces.end()[0]] == ["a ", "", "sto"]


def test_tokens_come_with_the_text_that_they_begin() -> None:
    pieces = spelled("a", " s", "to", "p")
    told = [[one.id for one in pieces.add(Token(number))[1]] for number in range(4)]
    assert told == [[0], [1], [], []]


def test_half_a_character_waits_for_the_other_half() -> None:
    parts = [b"a", "é".encode()[:1], "é".encode()[1:], b"\xff"]
    pieces = Pieces(lambda ids: b"".join(parts[one] for one in ids).decode(errors="replace"))
    assert [pieces.add(Token(number))[0] for number in range(4)] == ["a", "", "é", ""]
    assert pieces.end()[0] == "\ufffd"


@pytest.mark.parametrize(
    "names",
    [
        ("A", "<0x0A>", "<0xF0>", "<0x9F>", "▁world", "▁is"),
        ("A", "<0xE2>", "<0x82>", "<0xAC>", "<0xE2>", "▁world", "<0xE2>"),
        ("<0x0A>", "<0xFF>", "▁world"),
    ],
)
def test_bytes_wait_for_those_that_may_make_them_replacements(names: tuple[str, ...]) -> None:
    pieces, tokens = pieces_of(TOKENIZER), tokens_of(*names)
    told = [pieces.add(token) for token in tokens] + [pieces.end()]
    whole = TOKENIZER.decode([token.id for token in tokens], skip_special_tokens=True)
    assert "\ufffd" in whole
    assert pieces.whole == whole
    assert "".join(text for text, _ in told) == whole
    assert [token for _, sent in told for token in sent] == tokens


def test_bytes_are_sent_when_their_run_is_over() -> None:
    names = ("A", "<0x0A>", "B", "<0xC3>", "<0xA9>", "▁is")
    pieces = pieces_of(TOKENIZER)
    assert [pieces.add(token)[0] for token in tokens_of(*names)] == ["A", "", "\nB", "", "", "é is"]


def test_a_decoder_that_changes_what_it_said_is_followed_from_there() -> None:
    texts = ["", "ab", "aXc", "aXcd"]
    pieces = Pieces(lambda ids: texts[len(ids)])
    assert [pieces.add(Token(number))[0] for number in range(3)] == ["ab", "Xc", "d"]
    assert pieces.whole == "aXcd"


def test_a_text_that_goes_on_from_another_keeps_its_space() -> None:
    prompt = TOKENIZER("hello " * 100 + "hello")["input_ids"]
    pieces = pieces_of(TOKENIZER, after=prompt)
    assert [pieces.add(token)[0] for token in tokens_of("▁world", "▁is")] == [" world", " is"]
    alone = pieces_of(TOKENIZER)
    assert [alone.add(token)[0] for token in tokens_of("▁world", "▁is")] == ["world", " is"]
