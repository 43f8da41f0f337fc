"""What other programs' divided rows and products in fp8 become."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from imported_files import AXOLOTL, FACTORY, of_file
from tonnage.migration import import_files

VERSION_1 = "model: tiny/llama\ntrain_dataset: owner/rows\nmicro_batch_size: 1\nglobal_batch_size: 4\n"


@pytest.mark.parametrize(
    "lines",
    [
        f"{AXOLOTL}context_parallel_size: 4\n",
        f"{AXOLOTL}sequence_parallel_degree: 4\nring_attn_func: varlen_llama3\n",
        f"{VERSION_1}cp_size: 4\ncp_mode: ulysses\n",
    ],
)
def test_rows_are_divided_among_as_many_workers(lines: str, tmp_path: Path) -> None:
    found = of_file(lines, tmp_path, workers=8)
    assert not found.lost
    assert found.tree["parallel"]["context"] == 4
    whole = of_file(re.sub(r"(size|degree): 4\n", r"\1: 1\n", lines), tmp_path)
    assert "context" not in whole.tree.get("parallel", {})


def test_workers_that_divide_rows_see_the_same_ones(tmp_path: Path) -> None:
    lines = f"{AXOLOTL}gradient_accumulation_steps: 3\ncontext_parallel_size: 4\n"
    assert of_file(lines, tmp_path, workers=8).tree["batch"] == {"sequences": 2 * 3 * 2}
    swift = "NPROC_PER_NODE=4 swift sft --model a/b --dataset rows.jsonl --tuner_type full --sequence_parallel_size 2"
    found = import_files([f"{swift} --per_device_train_batch_size 1 --gradient_accumulation_steps 3"])
    assert not found.lost
    assert (found.tree["parallel"], found.tree["batch"]) == ({"context": 2}, {"sequences": 6})


@pytest.mark.parametrize("lines", [f"{AXOLOTL}fp8: true\nbf16: true\n", f"{FACTORY}fp8: true\nbf16: true\n"])
def test_products_are_in_fp8(lines: str, tmp_path: Path) -> None:
    found = of_file(lines, tmp_path)
    assert not found.lost
    assert found.tree["precision"] == "fp8"
    assert any("a scale (torchao's rowwise)" in note for note in found.notes)
    assert not any(implied.key == "precision" for implied in found.implied)
    assert all(value != "bf16" for entry in found.entries for _, value in entry.to)
    assert of_file(lines.replace("fp8: true", "fp8: false"), tmp_path).tree["precision"] == "bf16"


def test_products_in_fp8_go_with_bf16(tmp_path: Path) -> None:
    found = of_file(f"{FACTORY}fp8: true\nfp16: true\n", tmp_path)
    assert [entry.setting.shown for entry in found.lost] == ["fp8"]
    assert found.tree["precision"] == "fp16"
