"""Keys and values as lines of YAML: what is read back is what was written."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tonnage.config import read_config
from tonnage.config.commented import commented_text, lines_of

TEXTS = [
    "{{- 'x' -}}\n{%- if y -%}\n\n# no comment\n  deep: [\n---\n...\n- z",
    "é\n<｜User｜>",
    "one: two",
    "a\nb\n",
    "\na\nb",
    " a\nb",
    "a\tb\nc",
    "a\r\nb",
    "a\n\x85b",
    "a\n\u2028b",
    "a\x85b",
    "\x85",
    "a\u2028b",
]


def back(text: str) -> str:
    lines = ["section:", *(f"  {line}" for line in lines_of("key", text))]
    found: str = yaml.safe_load("\n".join(lines) + "\n")["section"]["key"]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_back(text: str) -> None:
    assert back(text) == text


@given(st.text(st.sampled_from("a #:{}%'\"\\-|>\n\té\x85\u2028\u2029"), min_size=1, max_size=20))
def test_any_text_is_read_back(text: str) -> None:
    assert back(text) == text


def test_a_template_is_written_line_by_line() -> None:
    assert lines_of("template", "{% for m in x %}\n{{ m }}\n{% endfor %}") == [
        "template: |-",
        "  {% for m in x %}",
        "  {{ m }}",
        "  {% endfor %}",
    ]


def test_a_line_break_of_another_kind_is_written_out_in_values_and_ends_no_comment(tmp_path: Path) -> None:
    """YAML 1.1 takes U+0085 and two more for line breaks, and reads the first as a space in the file."""
    path = tmp_path / "config.yaml"
    path.write_text('model: "a\\x85b"\ndata: {train: "rows\\u2028of.jsonl"}\nepochs: 1\n', encoding="utf-8")
    config = read_config(str(path), [], check_files=False)
    assert config.model == "a\x85b"
    text = commented_text(config, {"model": "one\x85two\u2028three"}, "a\x85heading")
    assert not {"\x85", "\u2028", "\u2029"} & {*text}
    path.write_text(text, encoding="utf-8")
    assert read_config(str(path), [], check_files=False) == config
