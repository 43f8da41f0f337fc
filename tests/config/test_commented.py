"""Keys and values as lines of YAML: what is read back is what was written."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tonnage.config.commented import lines_of

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
]


def back(text: str) -> str:
    lines = ["section:", *(f"  {line}" for line in lines_of("key", text))]
    found: str = yaml.safe_load("\n".join(lines) + "\n")["section"]["key"]
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_is_read_back(text: str) -> None:
    assert back(text) == text


@given(st.text(st.sampled_from("a #:{}%'\"\\-|>\n\té"), min_size=1, max_size=20))
def test_any_text_is_read_back(text: str) -> None:
    assert back(text) == text


def test_a_template_is_written_line_by_line() -> None:
    assert lines_of("template", "{% for m in x %}\n{{ m }}\n{% endfor %}") == [
        "template: |-",
        "  {% for m in x %}",
        "  {{ m }}",
        "  {% endfor %}",
    ]
