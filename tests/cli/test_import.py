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
    assert result.returncode == 2  # offload to the host
    assert result.stdout == ""
    for title in ("Mapped", "Not applicable", "Not supported", "51 keys"):
        assert title in result.stderr
    assert read_config(path, check_files=False).launch.workers == 4

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
