"""Whole runs of models that workers divide (``parallel.tensor``, ``parallel.pipeline``) on a device that is not the
CPU: the same bits wherever a rank's part of state, gradients and parameters rests, and the bytes that are planned.

As in ``test_apart_runs``, copies in streams are made as late as they may, and what does not wait for what it must is
found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ready import of_families, run_of, updated_by_host
from transformers import AutoConfig

from device.test_apart_runs import CLIP, HOST, KINDS, ON_DISK, STEPS, assert_same_bits, told
from forked import work
from tiny import byte_tokenizer, llama_config, write_model
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start, export
from tonnage.checkpoint.save import complete_checkpoints
from tonnage.decide.decision import Decision
from tonnage.planning.stages import workers_parts
from tonnage.planning.states import held_states
from tonnage.rundir.directory import RunDirectory
from tonnage.training.weigh import Conditions, weigh

BLOCKS = 5
AXES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tensor": (2, {"tensor": 2}),
    "pipeline": (2, {"pipeline": 2}),
    "interleaved": (2, {"pipeline": 2, "schedule": "interleaved"}),
    "zero bubble": (2, {"pipeline": 2, "schedule": "zero_bubble"}),
    "tensor x pipeline": (4, {"tensor": 2, "pipeline": 2}),
    "tensor x shard": (4, {"tensor": 2}),
    "pipeline x shard": (4, {"pipeline": 2}),
}
"""Workers, and keys of ``parallel``."""
WAYS: dict[str, dict[str, Any]] = {
    "state and gradients on the host": HOST,
    "state and gradients on disk": ON_DISK,
    "state on disk": {**ON_DISK, "gradient_tier": "host"},
    "all on the host": {**HOST, "parameter_tier": "host", "recompute": "selective"},
    "parameters on the host": {**ON_DISK, "parameter_tier": "host", "recompute": "full"},
    "all on disk": {**ON_DISK, "parameter_tier": "disk"},
}
FROZEN: dict[str, dict[str, Any]] = {
    "state and gradients on disk": ON_DISK,
    "blocks on the host": {"parameter_tier": "host"},
    "all on the host": {**HOST, "parameter_tier": "host", "recompute": "full"},
    "all on disk": {**ON_DISK, "parameter_tier": "disk"},
}
"""Beside an adapter: what rests elsewhere of the parameters is frozen."""
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
"""Of which half a row is a multiple of what shares a scale in 4 bits."""


def compared(
    folder: Path,
    axes: str,
    kind: str,
    ways: Mapping[str, dict[str, Any]],
    steps: int = STEPS,
    sizes: Mapping[str, int] | None = None,
    **keys: Any,
) -> dict[str, RunDirectory]:
    """Runs that have all on the device, and a part elsewhere in several ``ways``: the same bits."""
    workers, parallel = AXES[axes]
    written = decided(folder, steps, **(sizes or (WIDE if "4 bits" in kind else {})))
    keys = {"micro_batch": 1, "zero": 3, "parallel": parallel, **KINDS[kind], **keys}
    resident = run_of(written("llama", workers, **keys))
    made = {name: away(written("llama", workers, **keys, **way), way, kind) for name, way in ways.items()}
    work("device.apart_runs", (workers, ["late", *(str(run.path) for run in (resident, *made.values()))]))
    assert any(one["grad_norm"] > CLIP for one in told(resident))
    for run in made.values():
        assert_same_bits(run, resident, steps=steps)
    return {"resident": resident, **made}


def decided(folder: Path, steps: int = STEPS, blocks: int = BLOCKS, **sizes: int) -> Callable[..., Decision]:
    """Makes runs of a tied model ready, which a pipeline has the embedding of twice."""
    return of_families(
        folder,
        lambda _, path: write_model(path, llama_config(num_hidden_layers=blocks, vocab_size=259, **sizes)),
        sequences=4,
        kernels="plain",
        steps=steps,
        optimizer={"lr": 3e-3, "clip": CLIP},
    )


def away(decision: Decision, way: Mapping[str, Any], kind: str = "") -> RunDirectory:
    """A run that was planned for a CPU, as it would be beside a GPU."""
    frozen = "adapter" in KINDS.get(kind, {})
    moves = {tier for key, tier in way.items() if key.endswith("_tier") and not (frozen and key == "parameter_tier")}
    return updated_by_host(run_of(decision)) if "disk" in moves else run_of(decision)


def assert_log(run: RunDirectory, *said: str) -> None:
    log = run.log.read_text()
    for one in said:
        assert one in log, (run.path.name, one)


@pytest.mark.matrix
def test_a_stage_has_its_part_of_everything_on_disk(tmp_path: Path) -> None:
    """The short one of these tests, for every day."""
    made = compared(tmp_path, "pipeline", "bf16", {"all": WAYS["all on disk"]}, steps=2)
    assert_log(made["all"], "come from disk", "optimizer state on disk")


@pytest.mark.matrix
@pytest.mark.parametrize("axes", ["tensor", "pipeline"])
def test_parts_of_two_workers_have_the_bits_of_the_device(axes: str, tmp_path: Path) -> None:
    made = compared(tmp_path, axes, "bf16", WAYS)
    assert_log(made["all on the host"], "parameters of the blocks in host memory", "gradients in host memory")
    assert_log(made["state on disk"], "parameters that are updated in host memory", "optimizer state on disk")
    assert_log(made["all on disk"], "come from disk")


@pytest.mark.matrix
@pytest.mark.parametrize("axes", [pytest.param("tensor", marks=pytest.mark.matrix), "pipeline"])
def test_frozen_parts_in_4_bits_come_and_go(axes: str, tmp_path: Path) -> None:
    made = compared(tmp_path, axes, "LoRA over 4 bits", FROZEN, steps=2)
    assert_log(made["blocks on the host"], "frozen parameters of the blocks in host memory")
    assert_log(made["all on disk"], "come from disk")


@pytest.mark.matrix
@pytest.mark.parametrize("axes", list(AXES)[3:])
@pytest.mark.parametrize("kind", ["bf16", "fp32"])
def test_every_way_with_every_axis(axes: str, kind: str, tmp_path: Path) -> None:
    compared(tmp_path, axes, kind, WAYS)


@pytest.mark.matrix
@pytest.mark.parametrize("axes", ["tensor", "pipeline", "interleaved", "tensor x pipeline", "tensor x shard"])
@pytest.mark.parametrize("kind", ["LoRA", "LoRA over 4 bits"])
def test_frozen_parts_with_every_axis(axes: str, kind: str, tmp_path: Path) -> None:
    compared(tmp_path, axes, kind, FROZEN)


@pytest.mark.matrix
@pytest.mark.parametrize("axes", ["tensor", "pipeline", "tensor x pipeline"])
@pytest.mark.parametrize("kind", ["fp32", "fp16", "bf16, moments too"])
def test_other_numbers_of_two_workers(axes: str, kind: str, tmp_path: Path) -> None:
    compared(tmp_path, axes, kind, WAYS)


@pytest.mark.matrix
@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("axes", ["tensor x shard", "pipeline x shard"])
def test_shards_of_parts_below_zero_3(axes: str, zero: int, tmp_path: Path) -> None:
    ways = {name: way for name, way in WAYS.items() if "parameter_tier" not in way}
    compared(tmp_path, axes, "bf16", ways, zero=zero)


@pytest.mark.matrix
@pytest.mark.parametrize("axes", ["tensor", "tensor x pipeline"])
def test_moments_in_8_bits_beside_a_tensor_axis(axes: str, tmp_path: Path) -> None:
    """Rows of 512 numbers, which two workers cut between those that share a scale."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    ways = {name: WAYS[name] for name in ("state and gradients on the host", "all on the host", "all on disk")}
    compared(tmp_path, axes, "fp32, moments in 8 bits", ways, steps=2, sizes=sizes)


@pytest.mark.matrix
def test_divided_runs_go_on_from_each_other(tmp_path: Path) -> None:
    """From two workers that divide matrices to two stages, to both, to one worker, with all elsewhere as with nothing
    elsewhere; what is exported in the end is the same."""
    written, chains = decided(tmp_path, steps=STEPS + 1), list[list[RunDirectory]]()
    order = ("tensor", "pipeline", "tensor x pipeline", "one")
    for way in ({}, WAYS["all on the host"], WAYS["all on disk"]):
        chain = list[RunDirectory]()
        for step, axes in enumerate(order):
            workers, parallel = AXES[axes]
            start = (chain[-1], step) if chain else None
            keys: dict[str, Any] = {"micro_batch": 1, "zero": 3, "parallel": parallel, **KINDS["bf16"], **way}
            chain.append(away(written("llama", workers, start=start, **keys), way))
        chains.append(chain)
    for axes, turn in zip(order, zip(*chains, strict=True), strict=True):
        work("device.apart_runs", (AXES[axes][0], ["late", *(str(run.path) for run in turn)]))
    exported = set[bytes]()
    for chain in chains:
        for run, reference in zip(chain, chains[0], strict=True):
            assert_same_bits(run, reference, steps=STEPS + 1)
        exported.add(export_of(tmp_path, chain[-1]))
    assert len(exported) == 1


def export_of(folder: Path, run: RunDirectory) -> bytes:
    """The weights of a run as they are exported."""
    byte_tokenizer().save_pretrained(folder / "tokenizer")
    export(
        complete_checkpoints(run.checkpoints)[-1],
        run.path / "exported",
        ExportForm(AutoConfig.from_pretrained(folder / "llama"), folder / "tokenizer", [256], torch.float32),
        Start(folder / "llama"),
    )
    return (run.path / "exported" / "model.safetensors").read_bytes()


@pytest.mark.matrix
@pytest.mark.parametrize("axes", ["interleaved", "tensor", "pipeline"])
def test_each_device_holds_what_is_planned_of_its_part(axes: str, tmp_path: Path) -> None:
    """Each worker's part of what its host updates: two blocks of each stage, and what no block holds."""
    workers, parallel = AXES[axes]
    written = decided(tmp_path, blocks=9)
    ways = [WAYS["state and gradients on disk"], WAYS["all on the host"], WAYS["parameters on the host"]]
    found = [written("llama", workers, precision="bf16", parallel=parallel, **way) for way in ways]
    paths = [str(updated_by_host(run_of(one)).path) for one in found]
    said = json.loads(work("device.apart_bytes", (workers, paths)).splitlines()[-1])
    for decision, seen in zip(found, said, strict=True):
        layout = replace(decision.plan.layout, device="cuda", update_tier="host")
        asked = AutoConfig.from_pretrained(tmp_path / "llama")
        model = weigh(asked, decision.plan.model.vocab_size, Conditions(tensor=layout.tensor))
        parts = workers_parts(model, layout.stages, layout.pipeline)
        planned = [held_states(layout, part).weights for part in parts] * layout.tensor
        assert seen == pytest.approx(planned, rel=0.01), layout
