"""``tonnage doctor`` on what is already measured: the table, the advice, and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from doctor.machines import compute, storage
from tonnage.cli.main import app
from tonnage.doctor.cache import HardwareRecord, calibration_file, remember
from tonnage.doctor.hardware import look, look_at_disk
from tonnage.planning import calibration
from tonnage.planning.machine import Machine


@pytest.fixture(autouse=True)
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    slow = storage(direct=False, date="2026-01-02")
    remember(HardwareRecord(look(), compute(), {look_at_disk(tmp_path).key: slow}), tmp_path / "cache")
    sample = calibration.TimedStep("doctor", "fp32", flops=1e9, attention=0.0, traffic=1e9, besides=0.0, seconds=1.0)
    calibration.add(calibration_file(look()), [sample], "doctor")


def test_a_table_for_people(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--directory", str(tmp_path)])
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    for part in (
        "products bf16 2 TFLOP/s",
        "update, int8 moments 4,000 million parameters/s",
        "between workers 2 GB/s",
        "disk read 3 GB/s, through the page cache",
        "Measured on 2026-01-01 and 2026-01-02; --again measures once more.",
        "takes no transfers past the page cache",
        "change: write output=... and memory.offload_dirs on a local disk",
    ):
        assert part in shown


def test_json_and_nothing_else(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", "--directory", str(tmp_path), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    machine = Machine(**found["machine"])
    assert (machine.source, machine.flops["fp32"], machine.disk_read_bytes_per_second) == ("measured", 1e12, 3e9)
    assert found["hardware"]["processor"] == look().processor
    assert found["measured"]["compute"]["date"] == "2026-01-01"
    assert any("page cache" in advice["found"] for advice in found["advice"])
