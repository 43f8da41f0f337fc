"""What other programs' scaled positions become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from imported_files import AXOLOTL, FACTORY, SWIFT, of_file
from tonnage.migration import import_files


@pytest.mark.parametrize(
    ("lines", "rope"),
    [
        ("overrides_of_model_config: {rope_scaling: {type: linear, factor: 2}}", {"type": "linear", "factor": 2.0}),
        (
            "model_config: {rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 8192}}",
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192},
        ),
    ],
)
def test_axolotls_model_config_scales_positions(lines: str, rope: dict[str, Any], tmp_path: Path) -> None:
    found = of_file(f"{AXOLOTL}{lines}\n", tmp_path)
    assert found.is_whole
    assert not any(need.key.startswith("rope") for need in found.needs)
    assert found.tree["rope"] == rope


def test_swift_writes_json() -> None:
    found = import_files([SWIFT + """ --rope_scaling '{"type": "yarn", "factor": 4.0}' --max_model_len 131072"""])
    assert found.is_whole
    assert found.tree["rope"] == {"type": "yarn", "factor": 4.0}


def test_a_factor_that_follows_from_the_models_files_is_asked_for(tmp_path: Path) -> None:
    by_command = import_files([f"{SWIFT} --rope_scaling linear --max_model_len 65536"])
    for found in (of_file(f"{FACTORY}rope_scaling: yarn\n", tmp_path), by_command):
        assert not found.lost
        assert "rope.factor" in {need.key for need in found.needs}


@pytest.mark.parametrize(
    ("command", "lost"),
    [
        (f"{SWIFT} --rope_scaling dynamic", ["--rope_scaling"]),
        (f"{SWIFT} --max_model_len 8192", ["--max_model_len"]),
        (SWIFT + """ --rope_scaling '{"type": "yarn", "factor": 2, "mscale": 1}'""", ["--rope_scaling mscale"]),
    ],
)
def test_what_is_not_there_is_refused(command: str, lost: list[str]) -> None:
    assert [entry.setting.shown for entry in import_files([command]).lost] == lost
