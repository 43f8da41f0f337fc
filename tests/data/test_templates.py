"""The command that tries templates, over small ones of our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data import templates
from tonnage.data import cache

LOOP = "{% for m in messages %}"
CHATML = (
    LOOP + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system messages here') }}{% endif %}" + CHATML
UNOPENED = LOOP + "{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "synchronise", cache.synchronise)


def counts(line: str) -> list[int]:
    return [int(number) for number in line.split()[-len(templates.COLUMNS) :]]


def test_templates_of_a_directory_are_tried(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    (tmp_path / "model").mkdir()
    several = [{"name": "default", "template": NO_SYSTEM}, {"name": "plain", "template": UNOPENED}]
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert templates.main([str(tmp_path), "--output", str(tmp_path / "table.txt")]) == 0
    table = (tmp_path / "table.txt").read_text()
    assert table == capsys.readouterr().out
    lines = {line.split()[0]: line for line in table.splitlines() if not line.startswith(" ")}
    assert counts(lines["chatml"]) == [6, 0, 7, 0, 0]
    assert counts(lines["model:default"])[:3] == [4, 0, 9]
    right, unsure, _, differs, _ = counts(lines["model:plain"])
    assert (right, differs) == (0, 0)
    assert unsure > 0
    assert "refused system, system-multi, call-words: by the template: no system messages here" in table
    assert counts(lines["3"])[3:] == [0, 0]


def test_a_mask_that_is_not_that_of_the_reference_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chatml.jinja").write_text(CHATML)
    monkeypatch.setattr(templates, "ROWS", {"single": templates.ROWS["single"]})
    monkeypatch.setattr(templates, "trained", lambda *given: ([1], [0.0]))
    assert templates.main([str(tmp_path)]) == 0
    assert "differs single: " in capsys.readouterr().out


def test_what_is_no_refusal_is_a_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object, **more: object) -> None:
        raise KeyError("role")

    (tmp_path / "chatml.jinja").write_text(CHATML)
    monkeypatch.setattr(templates, "ROWS", {"single": templates.ROWS["single"]})
    monkeypatch.setattr(templates, "prepare", fails)
    assert templates.main([str(tmp_path)]) == 1


def test_a_directory_without_templates_is_no_success(tmp_path: Path) -> None:
    assert templates.main([str(tmp_path)]) == 1
