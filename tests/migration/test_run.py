"""A command that was imported trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiny import alpaca_rows, llama_config, write_model, write_rows

COMMAND = """\
python train.py --model_name_or_path model --data_path rows.jsonl --output_dir run --model_max_length 512 \\
    --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --max_steps 3 --learning_rate 1e-3 \\
    --lr_scheduler_type constant --save_strategy no --report_to none --bf16
"""


@pytest.mark.slow
def test_an_imported_command_trains(tmp_path: Path) -> None:
    write_model(tmp_path / "model", llama_config(num_hidden_layers=1))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(50))
    (tmp_path / "train.sh").write_text(COMMAND)
    for words in (
        ["import", "train.sh", "--strict", "--output", "config.yaml"],
        ["train", "config.yaml", "launch.threads=1"],
    ):
        command = [sys.executable, "-m", "tonnage", *words]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = [record["lr"] for record in records if "loss" in record]
    assert rates == [1e-3] * 3
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    layout = plan["choice"]["layout"]
    assert (plan["packs_per_step"], layout["micro_batch"], plan["num_packs"]) == (4, 2, 12)
