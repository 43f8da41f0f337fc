"""What Axolotl's ``qat`` becomes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage.migration import import_files

LINES = "base_model: tiny/llama\nsequence_len: 512\nmicro_batch_size: 2\ndatasets: [{path: rows.jsonl, type: alpaca}]\n"


@pytest.mark.parametrize(
    ("qat", "ours"),
    [
        ("{weight_dtype: int4}", {"scheme": "int4", "group_size": 32}),
        (
            "{activation_dtype: int8, weight_dtype: int4, group_size: 64, fake_quant_after_n_steps: 100}",
            {"scheme": "int8-int4", "group_size": 64, "after_steps": 100},
        ),
        ("{weight_dtype: mxfp4, activation_dtype: mxfp4, group_size: 32}", {"scheme": "mxfp4"}),
        ("{weight_dtype: nvfp4, activation_dtype: nvfp4, group_size: 16}", {"scheme": "nvfp4"}),
        ("{weight_dtype: int4, quantize_embedding: false}", {"scheme": "int4", "group_size": 32}),
    ],
)
def test_what_axolotl_rounds_is_rounded_here(qat: str, ours: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(f"{LINES}qat: {qat}\n")
    found = import_files([path])
    assert found.tree["quantize_aware"] == ours
    assert not found.lost


@pytest.mark.parametrize(
    ("qat", "lost"),
    [
        ("{weight_dtype: nvfp4}", {"qat.weight_dtype"}),
        ("{weight_dtype: nvfp4, activation_dtype: nvfp4, group_size: 32}", {"qat.group_size"}),
        ("{weight_dtype: int4, activation_dtype: fp8}", {"qat.weight_dtype", "qat.activation_dtype"}),
        ("{weight_dtype: int4, quantize_embedding: true}", {"qat.quantize_embedding"}),
        ("{weight_dtype: int4, group_size: 16}", {"qat.group_size"}),
    ],
)
def test_what_cannot_be_rounded_is_refused(qat: str, lost: set[str], tmp_path: Path) -> None:
    path = tmp_path / "axolotl.yaml"
    path.write_text(f"{LINES}qat: {qat}\n")
    assert {entry.setting.key.name for entry in import_files([path]).lost if entry.setting.key} == lost
