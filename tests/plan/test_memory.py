"""Instants of a step, counted by hand."""

from __future__ import annotations

from plan.profiles import MODEL, layout
from tonnage.model import build
from tonnage.plan.memory import MAPPED_BYTES, instants
from tonnage.plan.stages import workers_parts


def test_summed_gradients_leave_unit_by_unit() -> None:
    found = {instant.name: instant.bytes for instant in instants(layout(), MODEL)}
    summed, reduced = 4 * 1_000_000, 4 * 1_000_000 / 2  # whole, and a worker's half of them
    assert found["loss"]["gradients"] == summed
    assert found["reduction outside the blocks"]["gradients"] == reduced
    # The sums copied together, gloo's own copy, and the last of the sums.
    assert found["reduction outside the blocks"]["workspace"] == 2 * 4 * 200_000 + 4 * MODEL.head_parameters
    assert "gathered" not in found["reduction outside the blocks"]
    assert found["update"]["gradients"] == reduced


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
    assert found["backward of the embedding"]["workspace"] == (2 + 4) * MODEL.head_parameters


def test_loading_maps_no_more_of_a_file_than_is_counted() -> None:
    load, *_, evaluation = instants(layout(micro_batches=1), MODEL, evaluates=True)
    assert (load.name, evaluation.name) == ("load", "evaluation")
    assert set(load.bytes) == {"weights", "workspace"}
    tensor = 2 * 200_000 / 2  # a block's worth of bf16, a worker's half of it
    assert load.bytes["workspace"] == 2 * 1_000_000 + tensor  # of a file this small all is mapped
    assert MAPPED_BYTES == build.MAPPED_BYTES
