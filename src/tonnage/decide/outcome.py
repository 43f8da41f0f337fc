"""What a run took, beside what was planned: kept with the run, and learnt from for the next plan."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from tonnage.config import read_config
from tonnage.files.writing import write_json
from tonnage.host.core_waits import NOTABLE
from tonnage.planning import calibration
from tonnage.planning.calibration import TimedStep
from tonnage.planning.machine import Machine
from tonnage.planning.plan import Plan
from tonnage.planning.scales import work_of
from tonnage.planning.seconds import seconds_besides, timed_step
from tonnage.rundir.directory import RunDirectory

LEARNT_FROM = 5
"""Steps at least, the first not counted, from which a run's speed is learnt."""


def measure(run: RunDirectory, plan: Plan, since: int = 0) -> dict[str, dict[str, float]] | None:
    """``memory_bytes`` of a worker and ``step_seconds``, ``planned`` and ``measured`` in the steps after ``since``, put
    into the run's directory as well; None where no step was taken."""
    steps = timed_steps(run, plan, since)
    if not steps:
        return None
    tier = _tier(plan)
    # The first step compiles and touches everything for the first time.
    seconds = median(record["step_seconds"] for record in (steps[1:] or steps))
    measured = {"memory_bytes": max(record["memory"][tier] for record in steps), "step_seconds": seconds}
    planned = {"memory_bytes": round(plan.choice.allocated_bytes), "step_seconds": plan.choice.seconds.total}
    outcome = {"planned": planned, "measured": measured}
    write_json(run.outcome, outcome)
    return outcome


def timed_steps(run: RunDirectory, plan: Plan, since: int = 0) -> list[dict[str, Any]]:
    """Records of steps after ``since`` that say what they took."""
    tier = _tier(plan)
    return [record for record in run.read_metrics() if _is_timed_step(record, since) and tier in record["memory"]]


def _tier(plan: Plan) -> str:
    return "device_peak" if plan.layout.device == "cuda" else "host_peak"


def _is_timed_step(record: Mapping[str, Any], since: int) -> bool:
    """Whether a record is of a step after ``since``, with what it took."""
    has_all = all(record.get(name) is not None for name in ("step_seconds", "memory"))
    return has_all and "loss" in record and bool(record["step"] > since)


def learn(run: RunDirectory, plan: Plan, since: int = 0) -> None:
    """Keep how long the steps after ``since`` took on this machine, for its next plan.

    Only a run of one worker on all cores that nothing kept waiting says how fast a step computes, and with all kernels
    on and no products in fp8: other plans are so. Steps that other processes slowed down say nothing, nor do those of
    rows with verdicts, which begin with passes that ``sample_of`` does not count.
    """
    from tonnage.doctor.cache import calibration_file, describe_here, load_machine
    from tonnage.doctor.hardware import look

    layout, hardware = plan.layout, look()
    steps = [record for record in run.read_metrics() if _is_timed_step(record, since + 1)]
    seconds = [record["step_seconds"] for record in steps if (record.get("core_wait") or 0.0) < NOTABLE]
    threads = plan.threads_per_worker if layout.device == "cpu" else hardware.cores
    if len(seconds) < LEARNT_FROM or layout.workers > 1 or layout.tiers_on_disk or threads != hardware.cores:
        return
    if layout.kernels_off or plan.model.in_fp8 or (layout.device != "cpu" and layout.uses_host):
        return
    if read_config(run.config, check_files=False).objective.rows == "verdicts":
        return
    machine = load_machine(run.path) or describe_here(run.path)
    calibration.add(calibration_file(hardware), [sample_of(plan, machine, median(seconds))], "run")


def sample_of(plan: Plan, machine: Machine, seconds: float) -> TimedStep:
    """That a plan's step took ``seconds`` on a machine, by what was planned (``planning.seconds.compute_seconds``)."""
    layout, model, work = plan.layout, plan.model, work_of(plan.layout, plan.data)
    besides = seconds_besides(layout, model, work, machine.made_bytes_per_second * machine.cores)
    return timed_step(layout, model, work, "run", besides + plan.choice.seconds.update, seconds)
