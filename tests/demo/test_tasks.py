"""The demo's instructions: right answers by a second opinion, and held-out inputs that training never sees."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tonnage.demo.tasks import DAYS, FAMILIES, Example, held_out_examples, training_examples

OPPOSITE_OF = {"hot": "cold", "cold": "hot", "wide": "narrow", "open": "closed", "light": "heavy"}


def quoted(text: str) -> str:
    found = re.search(r'"(\w+)"', text)
    assert found
    return found.group(1)


def about(example: Example) -> str:
    """What an instruction is about, read off its text alone."""
    text = example.instruction
    match example.family:
        case "reverse" | "capitals" | "letters":
            return quoted(text)
        case "nth word":
            return text.partition(": ")[2]
        case "next number":
            return re.sub(r"\D", "", text)
        case "sort":
            return "".join(sorted(re.findall(r"\d", text)))
        case "next day":
            return text.partition(".")[0]
        case "opposite":
            found = re.search(r"The (\w+) is (\w+)\.?", text)
            assert found
            return " ".join(found.groups())
    raise AssertionError(example.family)


def solve(example: Example) -> str | None:
    """The answer, worked out from the text alone; None where this test does not know."""
    text = example.instruction
    match example.family:
        case "reverse":
            return "".join(reversed(quoted(text)))
        case "capitals":
            return quoted(text).upper()
        case "letters":
            return str(len(quoted(text)))
        case "nth word":
            words = about(example).split()
            return {"first": words[0], "second": words[1], "third": words[2], "last": words[-1]}[
                next(word for word in re.findall(r"\w+", text) if word in ("first", "second", "third", "last"))
            ]
        case "next number":
            return str(int(about(example)) + 1)
        case "sort":
            return " ".join(sorted(re.findall(r"\d", text), key=int))
        case "next day":
            day = next(day for day in DAYS if day in text)
            return [*DAYS, "Monday"][DAYS.index(day) + 1]
        case "opposite":
            thing, given = about(example).split()
            return f"The {thing} is {OPPOSITE_OF[given]}." if given in OPPOSITE_OF else None
    raise AssertionError(example.family)


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_inputs_never_occur_in_training(seed: int) -> None:
    train = training_examples(seed)
    for other in (0, 1, 2):
        held_out = held_out_examples(25, other)
        assert {e.instruction for e in train}.isdisjoint(e.instruction for e in held_out)
        for family in FAMILIES:
            learnt = {about(e) for e in train if e.family == family}
            assert learnt.isdisjoint(about(e) for e in held_out if e.family == family)
    # A held-out word is new to all families that spell words.
    spelt = {about(e) for e in train if e.family in ("reverse", "capitals", "letters")}
    assert spelt.isdisjoint(about(e) for e in held_out if e.family in ("reverse", "capitals", "letters"))


def test_answers_are_right() -> None:
    checked: Counter[str] = Counter()
    for example in training_examples(3) + held_out_examples(25, 3):
        answer = solve(example)
        if answer is not None:
            assert example.answer == answer, example
            checked[example.family] += 1
    assert set(checked) == set(FAMILIES)
    assert min(checked.values()) > 100


def test_examples_depend_on_the_seed_alone_and_do_not_repeat() -> None:
    first, again, other = training_examples(5), training_examples(5), training_examples(6)
    assert first == again
    assert first != other
    assert len({example.instruction for example in first}) == len(first)
    assert Counter(example.family for example in first) == {name: number for name, (_, number) in FAMILIES.items()}
    held_out = held_out_examples(25, 5)
    assert len({example.instruction for example in held_out}) == 25 * len(FAMILIES)
    assert Counter(example.family for example in held_out) == dict.fromkeys(FAMILIES, 25)


def test_more_examples_than_there_are_is_an_error() -> None:
    with pytest.raises(ValueError, match="has only about"):
        held_out_examples(500, 0)
