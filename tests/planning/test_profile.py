"""Costs as lines of the tokens of a row."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.profiles import MODEL
from tonnage.files.reading import parse_record
from tonnage.planning.profile import Envelope, Line, ModelProfile

NUMBERS = st.integers(0, 1000)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=30), st.lists(st.integers(0, 10_000), min_size=1))
def test_an_envelope_is_the_largest_of_its_lines(values: list[tuple[int, int]], tokens: list[int]) -> None:
    few, many = zip(*values, strict=True)
    found = Envelope.over((128, few), (384, many))
    lines = [Line.through((128, a), (384, b)) for a, b in values]
    for number in tokens:
        assert found(number) == pytest.approx(max(line(number) for line in lines), abs=1e-6)
    assert parse_record(json.dumps(asdict(found)), Envelope, "") == found


def test_an_envelope_keeps_what_counts_somewhere() -> None:
    # Level, steep, between the two and below both, and the level one again, lower.
    found = Envelope.over((1, [10, 1, 3, 9]), (2, [10, 3, 4, 9]))
    assert found.lines == (Line(10, 0), Line(-1, 2))


def test_a_profile_that_an_older_version_wrote_is_read() -> None:
    fields = json.loads(json.dumps(asdict(MODEL)))
    assert parse_record(json.dumps(fields), ModelProfile, "") == MODEL
    for cost in fields["blocks"].values():
        del cost["evaluation_peak"], cost["forward_made"], cost["backward_made"]
    for head in ("small_head", "large_head"):
        del fields["outside"][head]["evaluation_peak"], fields["outside"][head]["made"]
    del fields["outside"]["evaluated"]
    found = parse_record(json.dumps(fields), ModelProfile, "")
    assert found.outside is not None
    assert found.blocks["none"].saved == MODEL.blocks["none"].saved
    assert found.outside.evaluated(1000) == 0
