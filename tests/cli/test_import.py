"""``tonnage import`` as a command: what goes where, and exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tonnage.config import read_config

FILES = Path(__file__).parents[1] / "migration" / "files"


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage", "import", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture(scope="module")
def alpaca() -> list[Path]:
    return [FILES / "alpaca_deepspeed.sh", FILES / "alpaca_zero3_offload.json"]


def test_the_config_goes_to_a_new_file_and_the_account_to_standard_error(alpaca: list[Path], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    result = run(*alpaca, "--output", path, "--strict")
    assert result.returncode == 0
    assert result.stdout == ""
    for title in ("Mapped", "Not applicable", "51 keys"):
        assert title in result.stderr
    assert read_config(path, check_files=False).launch.workers == 4

    unknown = tmp_path / "unknown.json"
    settings = json.loads(alpaca[1].read_text())
    unknown.write_text(json.dumps(settings | {"no_such_key": 1}))
    result = run(alpaca[0], unknown, "--output", tmp_path / "another.yaml", "--strict")
    assert result.returncode == 2
    assert "no_such_key" in result.stderr

    before = path.read_text()
    result = run(*alpaca, "--output", path)
    assert result.returncode == 2
    assert "is there already" in result.stderr
    assert path.read_text() == before


def test_standard_output_is_the_config_or_json(alpaca: list[Path], tmp_path: Path) -> None:
    result = run(*alpaca)
    assert result.returncode == 0
    (tmp_path / "config.yaml").write_text(result.stdout)
    assert read_config(tmp_path / "config.yaml", check_files=False).memory.zero == 3

    found = json.loads(run(*alpaca, "--json").stdout)
    assert found["yaml"] == result.stdout
    lists = [found[name] for name in ("mapped", "not_applicable", "not_supported", "unknown")]
    assert sum(map(len, lists)) == 51
    assert found["config"]["batch"] == {"sequences": 128}


def test_strict_is_content_with_what_is_whole() -> None:
    assert run(FILES / "accelerate_fsdp.yaml", "--strict").returncode == 0


AXOLOTL = """\
base_model: a/b
datasets: [{path: rows.jsonl, type: alpaca}]
micro_batch_size: 2
learning_rate: 1e-4
"""


@pytest.mark.slow
def test_what_decides_and_is_lost_stops_it_unless_the_rest_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL + "relora: true\n")
    result = run(tmp_path / "a.yaml", "--output", tmp_path / "config.yaml")
    assert result.returncode == 2
    assert "A configuration of Axolotl" in result.stderr
    assert "without relora it is another run" in result.stderr
    assert not (tmp_path / "config.yaml").exists()
    assert run(tmp_path / "a.yaml").stdout == ""

    found = json.loads(run(tmp_path / "a.yaml", "--json").stdout)
    assert (found["program"], found["lost"]) == ("Axolotl", ["relora"])

    result = run(tmp_path / "a.yaml", "--partial", "--workers", "4", "--output", tmp_path / "config.yaml")
    assert result.returncode == 0
    assert read_config(tmp_path / "config.yaml", check_files=False).packs_per_step == 8


def test_a_command_in_quotes_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(AXOLOTL)
    result = run(f"axolotl train {tmp_path / 'a.yaml'} --learning-rate 5e-5")
    assert result.returncode == 0
    assert "lr: 5.0e-05" in result.stdout


def test_a_model_a_length_and_a_second_machine_are_not_lost() -> None:
    """Of a published command of a tutorial, which lost all three."""
    words = "accelerate launch --num_processes 16 --num_machines 2 train.py --model_name a/70b --dataset_name c/d"
    result = run(f"{words} --max_seq_len 2048 --per_device_train_batch_size 1 --max_steps 500 --packing True")
    assert result.returncode == 0
    for line in ("model: a/70b", "max_length: 2048", "with: slurm", "nodes: 2", "gpus_per_node: 8", "sequences: 16"):
        assert line in result.stdout
