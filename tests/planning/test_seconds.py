"""What a step's time is made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from planning.profiles import MODEL, layout
from tonnage.planning.calibration import parts_of
from tonnage.planning.machine import of_cpu, parse_hardware
from tonnage.planning.seconds import (
    FILLED_TOKENS,
    Work,
    attention_flops,
    copied_bytes,
    exposed_copies,
    handed_on_bytes,
    host_link_rate,
    host_update_rate,
    inputs_seconds,
    made_bytes,
    step_seconds,
    summed_bytes,
)
from tonnage.planning.states import host_bytes


@pytest.mark.parametrize(
    ("recompute", "recomputed", "passes"),
    [("none", None, 3.5), ("selective", None, 3.5), ("full", None, 4.5), ("full", (1, 4), 3.75)],
)
def test_attention_multiplies_each_query_with_each_key_before_it(
    recompute: str, recomputed: tuple[int, int] | None, passes: float
) -> None:
    weights = {length: np.tri(length).sum() * (1000 / length) for length in (250, 500)}  # of a head, in a row of 1,000
    cut = layout(workers=1, recompute=recompute, recomputed=recomputed, micro_batches=2)
    short, long = (attention_flops(cut, MODEL, Work(1000, 300, length)) for length in weights)
    times = 2 * MODEL.num_blocks * passes * 4 * MODEL.attention_size
    assert long - short == pytest.approx(times * (weights[500] - weights[250]), rel=0.01)


def test_attention_on_a_cpu_goes_at_the_rate_of_fp32_products() -> None:
    cut, work = layout(workers=1), Work(1000, 300, 250)
    seconds = {}
    for times in (1, 2):
        cpu = of_cpu(4, 10**10)
        cpu = replace(cpu, flops={**cpu.flops, "fp32": times * cpu.flops["fp32"]})
        seconds[times] = step_seconds(cut, MODEL, work, cpu).compute
    attention = attention_flops(cut, MODEL, replace(work, document_tokens=250 + FILLED_TOKENS))
    products = parts_of(cpu, "bf16")[0]
    assert seconds[1] - seconds[2] == pytest.approx(attention / cpu.flops["fp32"] / products)
    gpu = parse_hardware("A100-80GB")
    faster = replace(gpu, flops={**gpu.flops, "fp32": 2 * gpu.flops["fp32"]})
    device = replace(cut, device="cuda")
    assert step_seconds(device, MODEL, work, gpu) == step_seconds(device, MODEL, work, faster)


def test_copies_from_host_memory_go_on_beside_the_update_and_the_next_steps_first_pass() -> None:
    """Both ways at once; on a CPU they are copies in its memory."""
    gpu, work = parse_hardware("A100-80GB"), Work(1000, 300, 100)
    cut = layout(workers=1, device="cuda", recompute="none")
    for rate, waits in ((1e9, True), (1e14, False)):
        linked = replace(gpu, host_device_bytes_per_second=rate)
        device = step_seconds(cut, MODEL, work, linked)
        host = step_seconds(replace(cut, optimizer_tier="host"), MODEL, work, linked)
        part = step_seconds(replace(cut, optimizer_tier="host", optimizer_resident=4_000_000), MODEL, work, linked)
        assert (device.host, host.host, part.host) == (0, 10_000_000 / rate, 6_000_000 / rate)
        beside = device.update + device.compute / 3 / cut.micro_batches
        assert host.total - device.total == pytest.approx(host.host - beside if waits else 0)
    cpu = of_cpu(4, 10**10)
    cut = replace(cut, device="cpu")
    more = (
        step_seconds(replace(cut, optimizer_tier="host"), MODEL, work, cpu).total
        - step_seconds(cut, MODEL, work, cpu).total
    )
    assert more == pytest.approx(2 * 2 * 10_000_000 / cpu.memory_bytes_per_second)


def test_only_blocks_that_are_recomputed_take_longer_and_have_inputs_that_leave() -> None:
    gpu, work = parse_hardware("A100-80GB"), Work(1000, 300, 100)
    linked = replace(gpu, host_device_bytes_per_second=1e6)
    whole = layout(workers=1, device="cuda", recompute="full", activation_tier="host")
    quarter, none = replace(whole, recomputed=(1, 4)), replace(whole, recompute="none", activation_tier="device")
    seconds = [step_seconds(cut, MODEL, work, linked) for cut in (none, quarter, whole)]
    assert seconds[1].compute == pytest.approx(0.75 * seconds[0].compute + 0.25 * seconds[2].compute)
    assert seconds[0].host == 0
    assert seconds[1].host == pytest.approx(seconds[2].host / 4)
    assert host_bytes(quarter, MODEL) == host_bytes(whole, MODEL) / 4 > 0
    sums = [summed_bytes(replace(cut, workers=2, tensor=2), MODEL, work) for cut in (none, quarter, whole)]
    assert sums[1] == pytest.approx(0.75 * sums[0] + 0.25 * sums[2])


def test_ranks_that_divide_tokens_send_as_many_bytes_and_keep_a_part_of_inputs() -> None:
    """Each half of a sum is sent by itself: what is gathered is not kept where blocks recompute what is cheap.
    Supervised tokens are sent once more, to whoever has a part of the head."""
    work, divided = Work(1000, 300, 100), replace(MODEL, token_ranks=2)
    cut = layout(workers=2, tensor=2, device="cuda", recompute="full", activation_tier="host")
    picked = cut.micro_batches * cut.width * MODEL.hidden_size * work.row_supervised
    halves = cut.micro_batches * cut.width * MODEL.hidden_size * work.row_tokens * MODEL.num_blocks
    for kind, again in (("none", 0.0), ("selective", halves), ("full", 0.0)):
        of_kind = layout(workers=2, tensor=2, device="cuda", recompute=kind)
        more = summed_bytes(of_kind, divided, work) - summed_bytes(of_kind, MODEL, work)
        assert more == pytest.approx(picked + again)
    gpu = parse_hardware("A100-80GB")
    assert inputs_seconds(cut, divided, work, gpu) == inputs_seconds(cut, MODEL, work, gpu) / 2 > 0
    assert host_bytes(cut, divided) == host_bytes(cut, MODEL) / 2 > 0
    staged = replace(cut, workers=4, pipeline=2, stages=(2, 2))
    assert handed_on_bytes(staged, divided, work) == handed_on_bytes(staged, MODEL, work) / 2 > 0


def test_a_host_updates_beside_the_first_pass_alone() -> None:
    """And what it changed comes to the device in that pass."""
    work = Work(1000, 300, 100)
    gpu = replace(parse_hardware("A100-80GB"), host_device_bytes_per_second=1e15)
    tiers = dict.fromkeys(("optimizer_tier", "gradient_tier", "parameter_tier", "update_tier"), "host")
    there = layout(workers=1, device="cuda", **tiers)
    for times in (1, 8):
        cut = replace(there, micro_batches=times)
        found = step_seconds(cut, MODEL, work, gpu)
        first = found.compute / 3 / times
        assert found.update == pytest.approx(MODEL.num_parameters / host_update_rate(cut, gpu))
        assert found.total == pytest.approx(found.compute + max(0.0, found.update - first), rel=1e-3)
    measured = replace(gpu, host_parameters_per_second={"fp32": 1e9})
    assert host_update_rate(there, measured) == 1e9
    assert host_update_rate(replace(there, precision="fp16"), measured) < 1e9


def test_devices_of_a_node_have_links_of_their_own_and_share_what_their_host_gives() -> None:
    gpus = replace(parse_hardware("8xA100-80GB"), host_device_bytes_per_second=20e9)
    measured = replace(gpus, host_parameters_per_second={"fp32": 1e9})  # 26 bytes each
    tiers = dict.fromkeys(("optimizer_tier", "gradient_tier", "parameter_tier", "update_tier"), "host")
    for workers in (1, 8):
        cut = layout(workers=workers, zero=3, device="cuda", **tiers)
        assert host_link_rate(cut, gpus) == 20e9
        assert host_link_rate(cut, measured) == (20e9 if workers == 1 else 26e9 / 8)
        assert host_update_rate(cut, measured) == 1e9 / workers


def test_inputs_of_blocks_leave_beside_the_forward_pass_and_come_back_beside_the_backward_pass() -> None:
    gpu, work = parse_hardware("A100-80GB"), Work(1000, 300, 100)
    cut = layout(workers=1, device="cuda", recompute="full", micro_batches=2)
    inputs = 2 * MODEL.num_blocks * 2 * MODEL.hidden_size * 1000
    for rate, waits in ((1e6, True), (1e14, False)):
        linked = replace(gpu, host_device_bytes_per_second=rate)
        device = step_seconds(cut, MODEL, work, linked)
        away = step_seconds(replace(cut, activation_tier="host"), MODEL, work, linked)
        both = step_seconds(replace(cut, activation_tier="host", optimizer_tier="host"), MODEL, work, linked)
        assert (device.host, away.host) == (0, inputs / rate)
        assert both.host == pytest.approx((inputs + 10_000_000) / rate)
        assert away.total - device.total == pytest.approx(2 * away.host - away.compute if waits else 0)
        assert both.total - away.total == pytest.approx(10_000_000 / rate - away.update if waits else 0, abs=1e-12)
    cpu, cut = of_cpu(4, 10**10), replace(cut, device="cpu")
    more = (
        step_seconds(replace(cut, activation_tier="host"), MODEL, work, cpu).total
        - step_seconds(cut, MODEL, work, cpu).total
    )
    assert more == pytest.approx(4 * inputs / cpu.memory_bytes_per_second)


@pytest.mark.parametrize(
    ("keys", "copies", "expected"),
    [
        ({"optimizer_tier": "host"}, (9.0, 0.0, 0.0), 9 - 1 - 1),
        ({"optimizer_tier": "host", "gradient_tier": "host"}, (9.0, 3.0, 0.0), 9 + 3 - 1 - 1 + 2 * 3 - 4),
        ({"optimizer_tier": "host", "gradient_tier": "host"}, (0.0, 2.0, 0.0), 0),
        ({"gradient_tier": "host"}, (0.0, 3.0, 0.0), 3 - 1 + 2 * 3 - 4),  # an update that the next pass waits for
        ({"gradient_tier": "host", "activation_tier": "host"}, (0.0, 2.0, 5.0), 2 - 1 + 5 - 2 + 2 + 5 - 4),
        ({"parameter_tier": "host"}, (0.0, 0.0, 0.0, 3.0), 2 * 3 - 2 + 2 * 3 - 4),
        ({"optimizer_tier": "host", "parameter_tier": "host"}, (9.0, 0.0, 0.0, 3.0), 9 + 3 - 1 - 1 + 3 - 1 + 6 - 4),
    ],
)
def test_copies_in_both_directions_go_on_beside_the_passes(
    keys: dict[str, Any], copies: tuple[float, ...], expected: float
) -> None:
    """An update of 1 second, a forward pass of 2 and a backward pass of 4; two micro-batches."""
    state, gradients, inputs, *weights = copies
    here = layout(workers=1, device="cuda", **keys)
    waits = exposed_copies(here, state, gradients, inputs, 1.0, 2.0, 4.0, weights=sum(weights))
    assert waits == pytest.approx(expected)


def test_gradients_of_every_micro_batch_are_copied() -> None:
    gpu, work = replace(parse_hardware("A100-80GB"), host_device_bytes_per_second=1e9), Work(1000, 300, 100)
    cut = layout(workers=1, device="cuda", gradient_tier="host", micro_batches=3)
    assert step_seconds(cut, MODEL, work, gpu).host == pytest.approx(3 * 4e6 / 1e9)
    cpu = of_cpu(4, 10**10)
    here, there = (
        step_seconds(replace(cut, device="cpu", gradient_tier=tier), MODEL, work, cpu).total
        for tier in ("device", "host")
    )
    assert there - here == pytest.approx(4 * 3 * 4e6 / cpu.memory_bytes_per_second)


def test_workers_of_a_cpu_write_what_they_send_to_memory_that_is_new() -> None:
    machine, cut = of_cpu(4, 10**10), layout()
    slow, fast = (
        step_seconds(cut, MODEL, Work(1000, 300, 100), replace(machine, fresh_bytes_per_second=rate))
        for rate in (1e9, 2e9)
    )
    cores = 4 / 2
    saved = copied_bytes(cut, MODEL) / 2 / cores * (1 / 1e9 - 1 / 2e9)
    assert slow.communication - fast.communication == pytest.approx(saved)
    assert slow.total - fast.total == pytest.approx(saved)


def test_what_a_heap_returns_is_made_anew_at_the_machines_rate() -> None:
    machine, returns = of_cpu(4, 10**10), layout(returns_memory=True)
    slow, fast, kept = (
        step_seconds(cut, MODEL, Work(1000, 300, 100), replace(machine, made_bytes_per_second=rate)).compute
        for cut, rate in ((returns, 1e9), (returns, 2e9), (replace(returns, returns_memory=False), 1e9))
    )
    made = made_bytes(returns, MODEL, Work(1000, 300, 100)) / (4 / returns.workers)
    assert slow - kept == pytest.approx(made / 1e9)
    assert fast - kept == pytest.approx(made / 2e9)
