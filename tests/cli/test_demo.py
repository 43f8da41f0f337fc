"""``tonnage demo`` in short: every command of the story, with three steps of training instead of all."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tonnage.cli import demo
from tonnage.cli.main import COMMANDS, app
from tonnage.errors import UserError
from tonnage.inference.generate import load


@pytest.mark.slow
def test_the_story_from_beginning_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = [
        (heading, sentence, f"{command} steps=3 evaluate.every=0" if command.startswith("train") else command)
        for heading, sentence, command in demo.CHAPTERS
    ]
    monkeypatch.setattr(demo, "CHAPTERS", short)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    folder = tmp_path / "runs" / "demo-1"

    shown = re.findall(r"^ *\$ tonnage (.*)$", result.output, re.MULTILINE)
    assert [line.split()[0] for line in shown] == [command.split()[0] for *_, command in (*short, *demo.NEXT)]
    assert re.search(r"^all +0/200", result.output, re.MULTILINE)
    assert (folder / "exported" / "config.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(folder / "exported").num_parameters() > 5e5

    # The model asked before training is the one that training starts from: with no step taken, the run's export
    # would equal it. Three small steps of warm-up move every weight by less than three learning rates.
    before, after = (load(folder / name).model.state_dict() for name in ("untrained", "run/export"))
    for name, value in before.items():
        assert (after[name] - value).abs().max() < 1e-2, name
        assert value.std() > 0.05 or value.dim() == 1

    with pytest.raises(UserError, match="demo-1 exists"):
        CliRunner().invoke(app, ["demo", "--output", "runs/demo-1"], catch_exceptions=False)


def test_the_story_names_real_commands() -> None:
    known = {name for names in COMMANDS.values() for name in names}
    for *_, command in (*demo.CHAPTERS, *demo.NEXT):
        assert shlex.split(command)[0] in known


def test_both_answers_stand_side_by_side() -> None:
    def rows(right: int) -> list[dict[str, Any]]:
        return [
            {
                "family": "sort",
                "instruction": f"Sort {number}",
                "output": str(number),
                "generated": str(number) if number < right else "\x00\ufffd" * 20,
            }
            for number in range(4)
        ]

    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    demo.show_comparison(rows(0), rows(3), console)
    text = console.export_text()
    assert "✓ 0" in text
    assert "✗ ···" in text
    assert re.search(r"sort +0/4 +0% +3/4 +75%", text)
    assert re.search(r"all +0/4 +0% +3/4 +75%", text)
