"""What is learnt from a run: one that took what was planned changes no later plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planning.profiles import DATA, MODEL, config
from tiny import llama_config
from tonnage.config import write_config
from tonnage.decide.outcome import learn, measure, sample_of
from tonnage.decide.plans import suppose
from tonnage.planning.calibration import calibrated, parts_of
from tonnage.planning.machine import parse_hardware
from tonnage.planning.planner import make_plan
from tonnage.planning.scales import Scales
from tonnage.rundir.directory import RunDirectory


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["cpu:16c:64GB", "RTX4090", "H100"])
def test_a_run_that_took_as_long_as_planned_changes_nothing(hardware: str, tmp_path: Path) -> None:
    large = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "vocab_size": 32000}
    llama_config(**large, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=4096).save_pretrained(
        tmp_path
    )
    machine = parse_hardware(hardware)
    words = ["data.max_length=4096", "batch.sequences=4", "memory.optimizer_tier=device", "memory.gradient_tier=device"]
    plan = suppose(str(tmp_path), [*words, "memory.activation_tier=device"], machine)
    sample = sample_of(plan, machine, plan.choice.seconds.total)
    found = parts_of(calibrated(machine, [sample] * 20), sample.precision)
    assert found == pytest.approx(parts_of(machine, sample.precision), rel=0.02)


@pytest.mark.parametrize(("hardware", "besides"), [("cpu:16c:64GB", False), ("H100", True)])
def test_what_is_planned_is_what_is_measured(hardware: str, besides: bool, tmp_path: Path) -> None:
    """A GPU's allocator does not see the context, which the plan counts."""
    plan = make_plan(config(), Scales(MODEL, DATA, parse_hardware(hardware)), threads_per_worker=1)
    memory = {"host_peak": 3e9, "device_peak": 1e9}
    run = RunDirectory(tmp_path)
    run.metrics.write_text(json.dumps({"step": 1, "loss": 1.0, "step_seconds": 1.0, "memory": memory}) + "\n")
    found = measure(run, plan)
    assert found is not None
    context = plan.choice.runtime_bytes if besides else 0.0
    assert found["planned"]["memory_bytes"] == round(plan.choice.peak_bytes - context)
    assert found["measured"]["memory_bytes"] == memory["device_peak" if besides else "host_peak"]


def test_steps_that_others_slowed_down_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llama_config().save_pretrained(tmp_path)
    machine = parse_hardware("RTX4090")
    plan = suppose(str(tmp_path), ["data.max_length=128", "batch.sequences=4"], machine)
    run, samples = RunDirectory(tmp_path), list[Any]()
    write_config(config(), run.config)
    step = {"loss": 1.0, "memory": {"device_peak": 1e9}}
    quiet = [step | {"step": number, "step_seconds": 1.0, "core_wait": 0.01} for number in range(1, 8)]
    slow = [step | {"step": number, "step_seconds": 5.0, "core_wait": 0.4} for number in range(8, 20)]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in [*quiet, *slow]))
    monkeypatch.setattr("tonnage.doctor.cache.load_machine", lambda directory: machine)
    monkeypatch.setattr("tonnage.planning.calibration.add", lambda path, some, origin: samples.extend(some))
    learn(run, plan)
    assert [sample.seconds for sample in samples] == [1.0]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in slow))
    learn(run, plan)
    assert len(samples) == 1


@pytest.mark.parametrize(("tier", "learnt"), [("device", 1), ("host", 0)])
def test_a_gpu_that_its_host_keeps_waiting_teaches_nothing(
    tier: str, learnt: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes long may be the link, and is no speed of the device."""
    llama_config().save_pretrained(tmp_path)
    machine = parse_hardware("RTX4090")
    tiers = [f"memory.{key}={tier}" for key in ("optimizer_tier", "gradient_tier")]
    plan = suppose(str(tmp_path), ["data.max_length=128", "batch.sequences=4", *tiers], machine)
    run = RunDirectory(tmp_path)
    steps = [{"step": step, "loss": 1.0, "step_seconds": 1.0, "memory": {"device_peak": 1e9}} for step in range(1, 9)]
    run.metrics.write_text("".join(json.dumps(step) + "\n" for step in steps))
    write_config(config(), run.config)
    samples = list[Any]()
    monkeypatch.setattr("tonnage.doctor.cache.load_machine", lambda directory: machine)
    monkeypatch.setattr("tonnage.planning.calibration.add", lambda path, some, origin: samples.extend(some))
    learn(run, plan)
    assert len(samples) == learnt
    write_config(config(objective="kto"), run.config)  # whose steps have passes that nobody counts
    learn(run, plan)
    assert len(samples) == learnt
