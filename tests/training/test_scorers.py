"""Scores of answers, and what cannot be scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.errors import UserError
from tonnage.training.scorers import check_expected, scorer_of

CASES: list[tuple[str, str, str, float]] = [
    ("exact_match", " two\n", "two", 1),
    ("exact_match", "two.", "two", 0),
    ("number", "He has 3 and 4, so 7.\n#### 7", "... #### 7", 1),
    ("number", "3 + 4 makes $1,007.00", "#### 1007", 1),
    ("number", "#### 7\nor 8", "7", 1),
    ("number", "none", "#### 7", 0),
    ("number", "-7", "#### 7", 0),
    ("number", "It is -7", "#### -7", 1),
    ("number", "from 2020-2021", "2021", 1),
    ("number", "-.5", "-0.5", 1),
    ("choice", "B", "B", 1),
    ("choice", "(b) Paris", "B. Paris", 1),
    ("choice", "A good question. The answer is C.", "C", 1),
    ("choice", "I say D", "(D)", 1),
    ("choice", "It must be C, I guess", "C", 1),
    ("choice", "Bananas", "B", 0),
    ("contains", "It is  PARIS, of course", "Paris", 1),
    ("contains", "Lyon", "Paris", 0),
    ("json", 'Here: ```json\n{"b": [1, 2], "a": null}\n```', '{"a": null, "b": [1, 2]}', 1),
    ("json", 'so {"a": 1} it is', '{"a": 1}', 1),
    ("json", '{"a": true}', '{"a": 1}', 0),
    ("json", '{"a": 1', '{"a": 1}', 0),
]


@pytest.mark.parametrize(("name", "answer", "expected", "score"), CASES)
def test_scores(name: str, answer: str, expected: str, score: float) -> None:
    assert scorer_of(name)(answer, expected) == score


def test_a_pattern_compares_its_group_and_its_last_match() -> None:
    score = scorer_of("regex", r"x=(\d+)")
    assert (score("x=1 then x=2", "so x=2"), score("x=1", "x=2"), score("2", "x=2")) == (1, 0, 0)
    assert scorer_of("regex", r"\d+")("a 5", "5 b") == 1


def test_rows_without_anything_to_compare_are_refused() -> None:
    check_expected("number", None, [("a:1", "#### 5")])
    with pytest.raises(UserError, match="an answer without a number: 'five'"):
        check_expected("number", None, [("a:1", "#### 5"), ("a:2", "five")])


def test_a_function_is_checked_and_so_is_what_it_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_scorer.py").write_text(
        "def half(answer, expected): return 0.5\ndef much(answer, expected): return 7\ndef other(a, b): return 1\n"
    )
    monkeypatch.chdir(tmp_path)
    assert scorer_of("own_scorer:half")("a", "b") == 0.5
    with pytest.raises(UserError, match="gave 7"):
        scorer_of("own_scorer:much")("a", "b")
    for name in ("own_scorer:other", "os:system", "own_scorer:none", "no_such_module:x"):
        with pytest.raises(UserError):
            scorer_of(name)
