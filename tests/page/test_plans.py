"""What the page makes of plans: a choice that is clicked is pinned, and with its pins the same is planned."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import tiny
from tonnage.data.progress import silent
from tonnage.decide.plans import supposed
from tonnage.page.plans import hardware, pins, planned
from tonnage.planning.machine import parse_hardware


def plans_of(model: Path, name: str, words: list[str]) -> dict[str, Any]:
    """As ``tonnage plan --json`` gives it to the page."""
    plan = supposed(str(model), words, parse_hardware(name), silent).plan()
    return planned(json.dumps(asdict(plan)).encode())


@pytest.mark.matrix
@pytest.mark.parametrize("name", ["RTX4090"])
def test_a_clicked_choice_is_what_the_command_line_plans_with_its_pins(tmp_path: Path, name: str) -> None:
    config = tiny.llama_config(
        hidden_size=1024,
        num_attention_heads=16,
        num_key_value_heads=16,
        intermediate_size=4096,
        num_hidden_layers=4,
        vocab_size=4096,
    )
    model = tmp_path / "model"
    model.mkdir()
    config.save_pretrained(model)
    words = ["adapter=none", "data.max_length=4096", "batch.sequences=16"]
    first = plans_of(model, name, words)
    choices = first["choices"]
    assert len(choices) > 2
    for choice in choices:
        again = plans_of(model, name, [*words, *choice["words"]])["choices"]
        assert again[0]["peak_bytes"] == pytest.approx(choice["peak_bytes"], rel=1e-6), choice["in_words"]
        assert again[0]["step_seconds"] == pytest.approx(choice["step_seconds"], rel=1e-6)


def test_every_device_of_the_catalogue_is_a_name_that_is_understood() -> None:
    for name in hardware():
        parse_hardware(f"2x{name}")


def test_what_is_drawn_adds_up(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", tiny.llama_config(num_hidden_layers=1))
    plan = supposed(str(model), ["adapter=none"], parse_hardware("H100"), silent).plan()
    shown = planned(json.dumps(asdict(plan)).encode())
    peak = next(instant for instant in shown["instants"] if instant["peak"])
    assert sum(peak["parts"].values()) == pytest.approx(plan.choice.peak_bytes)
    assert shown["choices"][0]["peak_bytes"] == plan.choice.peak_bytes
    assert shown["choices"][0]["words"] == pins(plan.layout)
