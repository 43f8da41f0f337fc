"""How other programs weigh tokens by what the model makes of them, which rows they leave out, and what they measure."""

from __future__ import annotations

from pathlib import Path

import pytest

from imported_files import AXOLOTL, FACTORY, SWIFT, of_file
from tonnage.migration import import_files


@pytest.mark.parametrize(
    ("lines", "objective"),
    [
        (f"{FACTORY}use_dft_loss: true\n", {"kind": "dft"}),
        (f"{FACTORY}use_eaft_loss: true\neaft_alpha: 2\n", {"kind": "eaft", "power": 2.0}),
        (f"{FACTORY}use_eaft_loss: false\neaft_alpha: 2\n", None),
        (f"{AXOLOTL}use_eaft: true\neaft_alpha: 0.5\neaft_k: 20\n", {"kind": "eaft", "power": 0.5}),
        (f"{AXOLOTL}eaft_k: 10\n", None),
    ],
)
def test_files_say_how_tokens_count(lines: str, objective: dict[str, object] | None, tmp_path: Path) -> None:
    found = of_file(lines, tmp_path)
    assert found.is_whole
    assert found.tree.get("objective") == objective
    assert any("an evaluation tells cross-entropy" in note for note in found.notes) == (objective is not None)


def test_commands_say_how_tokens_count(tmp_path: Path) -> None:
    assert import_files([f"{SWIFT} --enable_dft_loss true"]).tree["objective"] == {"kind": "dft"}
    found = import_files(["trl sft --model_name_or_path tiny/llama --dataset_name owner/rows --loss_type dft"])
    assert found.is_whole
    assert found.tree["objective"] == {"kind": "dft"}


def test_axolotls_weights_are_larger(tmp_path: Path) -> None:
    notes = of_file(f"{AXOLOTL}use_eaft: true\neaft_alpha: 2\n", tmp_path).notes
    assert any("larger by the factor 9:" in note for note in notes)


@pytest.mark.parametrize(
    ("lines", "lost"),
    [
        (f"{AXOLOTL}use_eaft: true\neaft_k: 10\n", ["eaft_k"]),
        (f"{FACTORY}use_asft_loss: true\n", ["use_asft_loss"]),
        (f"{FACTORY}use_eaft_loss: true\neaft_alpha: 0\n", ["eaft_alpha"]),
    ],
)
def test_what_is_not_there_is_refused(lines: str, lost: list[str], tmp_path: Path) -> None:
    assert [entry.setting.shown for entry in of_file(lines, tmp_path).lost] == lost


def test_short_rows_are_left_out(tmp_path: Path) -> None:
    assert of_file(f"{AXOLOTL}min_sample_len: 400\n", tmp_path).tree["data"]["min_length"] == 400
    assert "min_length" not in of_file(f"{AXOLOTL}min_sample_len: 2\n", tmp_path).tree["data"]


@pytest.mark.parametrize(("names", "is_whole"), [("[perplexity]", True), ("[perplexity, ter]", False), ("", False)])
def test_perplexity_is_told_anyway(names: str, is_whole: bool, tmp_path: Path) -> None:
    lines = f"{AXOLOTL}val_set_size: 0.1\neval_steps: 10\ndo_causal_lm_eval: true\n"
    found = of_file(lines + (f"eval_causal_lm_metrics: {names}\n" if names else ""), tmp_path)
    assert (found.is_whole, found.lost) == (is_whole, [])
    assert of_file(lines.replace("lm_eval: true", "lm_eval: false"), tmp_path).is_whole
