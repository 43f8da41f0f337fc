"""What a config says of memory and disks beside what is free of them, looked at when a run is decided."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import entry
from tiny import llama_config, write_config
from tonnage.decide.decision import decide
from tonnage.decide.largest import largest
from tonnage.decide.plans import suppose, supposed
from tonnage.errors import UserError
from tonnage.planning import scales
from tonnage.planning.machine import parse_hardware
from tonnage.planning.space import resting_bytes

ON_DISK = ["memory.optimizer_tier=disk", "memory.moments=fp32", "memory.optimizer_resident=0"]


@pytest.fixture
def config(tmp_path: Path) -> str:
    keys: dict[str, Any] = {"launch": {"workers": 1, "threads": 1}, "batch": {"sequences": 4}, "steps": 4}
    return str(write_config(tmp_path, 60, **keys, output=str(tmp_path / "run")))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration alone: no weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    llama_config(max_position_embeddings=256).save_pretrained(folder)
    return str(folder)


def refused(path: str, *words: str) -> Any:
    with pytest.raises(UserError) as caught:
        decide(path, words)
    (problem,) = caught.value.problems
    return problem


@pytest.mark.slow
def test_a_full_disk_is_known_before_anything_starts(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = resting_bytes(decide(config, ON_DISK).plan)
    assert needed > 0

    def with_free(free: int) -> Any:
        return lambda path: SimpleNamespace(f_bavail=free, f_bfree=free, f_blocks=free, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", with_free(needed))
    assert decide(config, ON_DISK).plan.budget.disk_free == needed
    monkeypatch.setattr(os, "statvfs", with_free(needed - 1))
    problem = refused(config, *ON_DISK)
    assert problem.where == "a machine's disks"
    assert problem.needed.endswith("(free there)")
    assert "=auto" in problem.change
    changed = [word for word in ON_DISK if word.partition("=")[0] not in problem.change]
    assert decide(config, [*changed, *problem.change.split()]).plan.fits


@pytest.mark.slow
def test_a_budget_of_disks_is_obeyed_by_whoever_plans(config: str, model: str) -> None:
    needed = resting_bytes(decide(config, ON_DISK).plan)
    assert decide(config, [*ON_DISK, f"memory.budget.disk={needed}"]).plan.fits
    assert refused(config, *ON_DISK, f"memory.budget.disk={needed - 1}").needed.endswith("(memory.budget.disk)")
    nothing = ["data.max_length=128", "memory.budget.disk=0"]
    assert suppose(model, nothing).layout.tiers_on_disk == []
    found = largest(supposed(model, [*nothing, "batch.sequences=8"], parse_hardware("cpu:2c:24GB")), "micro_batch")
    assert found.value == 8
    assert found.plan.layout.tiers_on_disk == []


@pytest.mark.slow
def test_other_hardware_has_a_disk_that_it_is_taken_to_have(model: str, tmp_path: Path) -> None:
    hardware = parse_hardware("cpu:2c:24GB")

    def limits(*words: str) -> tuple[float | None, float | None]:
        budget = suppose(model, ["data.max_length=128", *words], hardware).budget
        return budget.disk, budget.disk_free

    assert limits() == (None, hardware.disk_bytes)
    with pytest.raises(UserError, match="assumed of such a machine"):
        suppose(model, ["data.max_length=128", *ON_DISK], replace(hardware, disk_bytes=10_000))
    assert limits("memory.budget.disk=30TB") == (30e12, None)
    assert limits(f"memory.offload_dirs={tmp_path}") == (None, None)


def test_a_budget_of_memory_that_is_not_free_is_refused(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)
    roomy = decide(config, ["memory.budget.device=64GB"]).plan.choice.peak_bytes
    monkeypatch.setattr("tonnage.host.control_groups.free_memory", lambda: 0.9 * roomy)
    problem = refused(config, "memory.budget.device=64GB")
    assert problem.where == "memory.budget.device"
    assert re.fullmatch(r"[\d.]+ MB free now, and a plan of [\d.]+ MB, for which .* has room \(64 GB\)", problem.found)
    assert decide(config, [problem.change.partition(",")[0]]).plan.fits
    assert decide(config, ["memory.budget.device=64GB"], force=True).plan.fits
    monkeypatch.setattr("tonnage.host.control_groups.free_memory", lambda: 1e3)
    problem = refused(config, "memory.budget.device=64GB")
    assert "(1 kB free now)" in problem.needed, "nothing fits: why is what a plan without that budget says"


def test_the_command_shows_what_disks_have_and_may_give(model: str) -> None:
    words = ("plan", model, "adapter=none", "data.max_length=128", "batch.sequences=8", "--hardware", "cpu:2c:24GB")
    shown = entry.tonnage(*words, *ON_DISK, "memory.budget.disk=1GB")
    assert "(memory.budget.disk)" in shown.out
    shown = entry.tonnage(*words, "memory.budget.disk=0")
    assert "nothing rests there (memory.budget.disk is 0)" in " ".join(shown.out.split())
    told = json.loads(entry.tonnage(*words, *ON_DISK, "--json").out)
    assert told["choice"]["disk_bytes"] > 0
    refusal = entry.refusal(*words, *ON_DISK, "memory.budget.disk=0")
    assert "memory.budget.disk is 0, and memory.optimizer_tier is disk" in refusal
