"""Seconds follow what was seen: the parts of a machine's rates that training reaches are found from timed steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from planning.profiles import DATA, MACHINE, MODEL, config
from tonnage.planning import calibration
from tonnage.planning.calibration import PRODUCTS, TRAFFIC, TimedStep, calibrated, fit, parts_of
from tonnage.planning.planner import make_plan
from tonnage.planning.scales import Scales

RATE, BANDWIDTH = MACHINE.flops["bf16"], MACHINE.memory_bytes_per_second


def sample(flops: float, traffic: float, products: float, of_copies: float, **changes: object) -> TimedStep:
    """A step on a machine that reaches these parts of its rates, a fifth of whose products are attention's."""
    seconds = flops / (RATE * products) + traffic / (BANDWIDTH * of_copies) + 0.01
    attention = 0.2 * flops / RATE * MACHINE.flops["fp32"]
    return replace(TimedStep("run", "bf16", 0.8 * flops, attention, traffic, besides=0.01, seconds=seconds), **changes)  # type: ignore[arg-type]


def many(products: float, of_copies: float) -> list[TimedStep]:
    work = [(1.0, 0.02), (0.1, 0.2), (0.5, 0.5), (2.0, 0.1)] * 10
    return [sample(p * RATE, t * BANDWIDTH, products, of_copies) for p, t in work]


def test_the_parts_that_samples_were_made_with_are_found() -> None:
    for products, of_copies in ((0.5, 0.3), (0.9, 0.05), (PRODUCTS["cpu"], TRAFFIC["cpu"])):
        assert fit(MACHINE, many(products, of_copies)) == pytest.approx((products, of_copies), rel=0.01)


def test_one_sample_moves_the_parts_its_way_and_no_absurd_one_moves_them_far() -> None:
    slow = sample(RATE, 0.1 * BANDWIDTH, 0.2, 0.14)
    products, of_copies = fit(MACHINE, [slow])
    assert products < 0.5 * PRODUCTS["cpu"]
    assert of_copies <= TRAFFIC["cpu"]
    absurd = fit(MACHINE, [replace(slow, seconds=1e-9, besides=0.0)] * 10)
    assert max(absurd) == pytest.approx(calibration.WITHIN * PRODUCTS["cpu"])


@pytest.mark.parametrize(("products", "of_copies"), [(0.5, 100.0), (100.0, 0.2)])
def test_beside_a_part_at_its_bound_the_other_still_fits_best(products: float, of_copies: float) -> None:
    samples = many(products, of_copies)
    found = fit(MACHINE, samples)

    def squares(products: float, of_copies: float) -> float:
        return sum(
            (sample(one.flops / 0.8, one.traffic, products, of_copies).seconds / one.seconds - 1) ** 2
            for one in samples
        )

    held = int(of_copies < 1.0)
    bound = calibration.WITHIN * (TRAFFIC, PRODUCTS)[held]["cpu"]
    assert found[1 - held] == pytest.approx(bound)
    tried = [n / 500 for n in range(20, 1000)]
    best = min(tried, key=lambda part: squares(part, bound) if held == 0 else squares(bound, part))
    assert found[held] == pytest.approx(best, rel=0.02)


def test_a_precision_without_samples_is_assumed() -> None:
    machine = calibrated(MACHINE, many(0.4, 0.2))
    assert parts_of(machine, "bf16") == pytest.approx((0.4, 0.2), rel=0.01)
    assert parts_of(machine, "fp32") == (PRODUCTS["cpu"], TRAFFIC["cpu"])


def test_what_was_measured_of_single_operations_takes_the_place_of_what_is_assumed() -> None:
    measured = replace(MACHINE, reached={"bf16": (0.8, 0.4), "fp32": (0.8, 0.9)})
    assert parts_of(measured, "fp32") == (0.8, 0.9)
    assert parts_of(calibrated(measured, many(0.4, 0.2)), "fp32") == (0.8, 0.9)
    assert parts_of(calibrated(measured, many(0.4, 0.2)), "bf16") == pytest.approx((0.4, 0.2), rel=0.01)
    absurd = fit(measured, [replace(sample(RATE, BANDWIDTH, 0.2, 0.14), seconds=1e-9, besides=0.0)] * 10)
    assert max(absurd) == pytest.approx(calibration.WITHIN * 0.8)


def test_a_plan_on_a_machine_seen_to_be_slower_takes_longer() -> None:
    known, seen = (
        make_plan(config(), Scales(MODEL, DATA, machine), threads_per_worker=1).choice.seconds.compute
        for machine in (MACHINE, calibrated(MACHINE, many(PRODUCTS["cpu"] / 2, TRAFFIC["cpu"] / 2)))
    )
    assert seen == pytest.approx(2 * known, rel=0.05)


def test_the_doctors_samples_replace_his_older_ones_and_those_of_runs_add_up(tmp_path: Path) -> None:
    path = tmp_path / "calibration" / "machine.json"
    old, new, run = (sample(RATE * n, BANDWIDTH, 0.5, 0.3) for n in (1, 2, 3))
    calibration.add(path, [replace(old, origin="doctor")], "doctor")
    for _ in range(calibration.KEPT + 3):
        calibration.add(path, [run], "run")
    calibration.add(path, [replace(new, origin="doctor")], "doctor")
    found = calibration.read(path)
    assert [one.flops for one in found if one.origin == "doctor"] == [new.flops]
    assert sum(one.origin == "run" for one in found) == calibration.KEPT
    path.write_text("[{]")
    assert calibration.read(path) == []
    calibration.add(path, [run], "run")
    assert calibration.read(path) == [run]
    path.write_text(path.read_text().replace(f'"format": {calibration.FORMAT}', '"format": 1'))
    assert calibration.read(path) == []  # what was counted then was something else
