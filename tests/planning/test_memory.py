"""Instants of a step, counted by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from planning.profiles import MODEL, layout
from tonnage.host.moments import UPDATE_BYTES
from tonnage.kernels import adamw as kernels
from tonnage.kernels.moments import Codec, Moments
from tonnage.model import stored
from tonnage.offload.residency import OPTIMIZER
from tonnage.optim.on_host import StateOnHost
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.planning import states as states_module
from tonnage.planning.memory import MAPPED_BYTES, instants
from tonnage.planning.stages import workers_parts


def test_summed_gradients_leave_unit_by_unit() -> None:
    found = {instant.name: instant.bytes for instant in instants(layout(), MODEL)}
    summed, reduced = 4 * 1_000_000, 4 * 1_000_000 / 2  # whole, and a worker's half of them
    assert found["loss"]["gradients"] == summed
    assert found["reduction outside the blocks"]["gradients"] == reduced
    # The sums, and all of them copied together but for the half that a worker keeps, which is counted as reduced.
    assert found["reduction outside the blocks"]["workspace"] == (4 + 4 - 2) * 200_000
    assert "gathered" not in found["reduction outside the blocks"]
    assert found["update"]["gradients"] == reduced


def test_sums_on_a_cpu_widen_no_more_than_what_is_trained_outside_the_blocks() -> None:
    on_cpu = layout(device="cpu")
    found = {instant.name: instant.bytes for instant in instants(on_cpu, MODEL)}
    head, outside = MODEL.head_parameters, MODEL.trained_outside
    assert found["sums outside the blocks"]["workspace"] == 2 * (outside + head) + 4 * head
    still = replace(MODEL.frozen, parameters=outside, outside=outside, head=True, embedding=True)
    found = {instant.name: instant.bytes for instant in instants(on_cpu, replace(MODEL, frozen=still))}
    assert "workspace" not in found["sums outside the blocks"]


def test_gradients_that_are_reduced_every_time_stay() -> None:
    found = {instant.name: instant.bytes for instant in instants(layout(zero=2), MODEL)}
    assert found["loss"]["gradients"] == found["update"]["gradients"] == 4 * 1_000_000 / 2
    assert found["reduction outside the blocks"]["gathered"] == 2 * 1_000_000  # of all but the last micro-batch


def test_only_the_last_stage_has_the_gradient_of_a_head() -> None:
    pipeline = layout(pipeline=2, stages=(2, 2), zero=3)
    first, last = workers_parts(MODEL, (2, 2), 2)
    assert (first.has_embedding, first.has_head) == (True, False)
    assert (last.has_embedding, last.has_head) == (False, True)
    found = {instant.name: instant.bytes for instant in instants(pipeline, MODEL)}  # of the first, which holds most
    assert "workspace" not in found["gradient of the head"]
    assert found["backward of the embedding"]["workspace"] == 2 * MODEL.head_parameters


def test_the_embedding_s_gradient_is_there_as_it_is_made_and_twice_in_fp32() -> None:
    """Where it is added to what rests in the host's memory. Of other gradients the last few are held, no block's."""
    model = replace(MODEL, largest_matrix=1_000)
    alone = layout(workers=1, device="cuda", gradient_tier="host", micro_batches=2)
    found = {instant.name: instant.bytes for instant in instants(alone, model)}
    assert found["backward of the embedding"]["workspace"] == (2 + 4 + 4) * model.head_parameters
    blocks, last = (found[f"backward of the {name}"]["gradients"] for name in ("first block", "embedding"))
    assert blocks - last == 8 * model.trained_block - 2 * 4 * model.largest_matrix


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("resident", [0, 3, 40])
def test_state_in_host_memory_takes_a_ring_and_what_stays(
    codec: Codec, resident: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the tier itself does, of a model that fills some tiles."""
    monkeypatch.setitem(OPTIMIZER, "host", replace(OPTIMIZER["host"], unit_bytes=64 << 10))
    parameter = nn.Parameter(torch.zeros(400, 512, dtype=torch.bfloat16))
    said: list[str] = []
    stays = resident * (64 << 10)
    host = partial(StateOnHost, device=torch.device("cpu"), resident_bytes=stays, log=said.append)
    adamw = ShardedOptimizer({"w": parameter}, betas=(0.9, 0.95), eps=1e-8, decay=0.0, moments=codec, tier=host)
    assert isinstance(adamw.tier, StateOnHost)
    on_device = sum(room.nbytes for room in adamw.tier._resident.values())
    on_device += sum(slot.memory.nbytes for slot in adamw.tier._ring._free or ())
    model = replace(MODEL, num_parameters=400 * 512)
    cut = layout(workers=1, moments=codec, optimizer_tier="host", optimizer_resident=stays, device="cuda")
    assert states_module.held_states(cut, model).optimizer == pytest.approx(on_device, rel=0.05)
    assert states_module.host_bytes(cut, model) == adamw.state_bytes
    assert states_module.held_states(replace(cut, device="cpu"), model).optimizer == pytest.approx(
        on_device + adamw.state_bytes, rel=0.02
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_an_update_takes_between_its_operations(dtype: torch.dtype) -> None:
    """As torch's own tracker sees it, of the operations that are carried out where the loops of a CPU are not: with
    moments of the form that takes most."""
    number = 1 << 20
    codecs: tuple[Codec, ...] = ("fp32", "bf16", "int8")
    peaks = []
    for codec in codecs:
        with FakeTensorMode():
            weight, gradient = torch.empty(256, 4096, dtype=dtype), torch.empty(number, dtype=dtype)
            low = torch.empty(number, dtype=torch.int16) if dtype == torch.bfloat16 else None
            moments = Moments.zeros(codec, weight.shape, torch.device("cpu"))
            coefficients, scalar = torch.empty(8), torch.empty((), dtype=torch.int32)
            with MemTracker() as tracker:
                kernels.update_tile(weight.view(-1), low, moments, gradient, coefficients, scalar, scalar)
            (peak,) = tracker.get_tracker_snapshot("peak").values()
        peaks.append(peak["Total"] / number)
    assert 0.9 * UPDATE_BYTES <= max(peaks) <= UPDATE_BYTES + 0.01, dict(zip(codecs, peaks, strict=True))


def test_an_update_in_the_background_has_the_next_step_beside_it() -> None:
    """Its first block, all gradients, and what the update makes that is not the loops'."""
    for tier, (device, off) in product(("device", "host", "disk"), (("cpu", ()), ("cpu", ("adamw",)), ("cuda", ()))):
        made = 0 if (device, off) == ("cpu", ()) else UPDATE_BYTES * 1_000_000
        beside = (
            {"workspace": made + 6000 * 1000, "activations": 300 * 1000} if tier != "device" else {"workspace": made}
        )
        cut = layout(workers=1, micro_batches=1, optimizer_tier=tier, device=device, kernels_off=off)
        found = {one.name: one.bytes for one in instants(cut, MODEL)}["update"]
        expected = {"weights": 2e6, "gradients": 2e6} | beside
        assert {key: size for key, size in found.items() if key != "optimizer"} == {
            k: v for k, v in expected.items() if v
        }
    sharded = {one.name: one.bytes for one in instants(layout(optimizer_tier="disk"), MODEL)}["update"]
    assert sharded["gathered"] == 2 * (200_000 + 2 * 200_000)  # what no block holds, and two blocks


def test_loading_maps_no_more_of_a_file_than_is_counted() -> None:
    load, *_, evaluation = instants(layout(micro_batches=1), MODEL, evaluates=True)
    assert (load.name, evaluation.name) == ("load", "evaluation")
    assert set(load.bytes) == {"weights", "workspace"}
    tensor = 2 * 200_000 / 2  # a block's worth of bf16, a worker's half of it
    assert load.bytes["workspace"] == 2 * 1_000_000 + tensor  # of a file this small all is mapped
    assert MAPPED_BYTES == stored.MAPPED_BYTES
