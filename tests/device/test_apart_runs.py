"""Whole runs on a device that is not the CPU: the numbers of the same runs on the CPU, and the same bits wherever
states rest.

Both compute by the same operations, without the loops that are made for CPUs. On the device copies in streams are made
as late as they may, and what does not wait for what it must is found (``apart``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from plain import metrics
from ready import of_families, run_of, updated_by_host
from safetensors.torch import load_file

from device import killed
from forked import work
from tiny import alpaca_rows, llama_config, mixture_config, write_model, write_rows
from tonnage.checkpoint.save import checkpoint_path
from tonnage.planning.states import held_states
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import read_samples

STEPS, CLIP = 3, 0.5
MIXTURE = "qwen3_moe"
HOST = {"optimizer_tier": "host", "gradient_tier": "host"}
ALL_HOST = {**HOST, "recompute": "full", "activation_tier": "host"}
ON_DISK = {"optimizer_tier": "disk", "gradient_tier": "disk"}
MASTERS: list[dict[str, Any]] = [
    {**HOST, "parameter_tier": "host", "recompute": "selective"},
    {**ON_DISK, "parameter_tier": "host", "recompute": "full", "activation_tier": "host"},
    {**ON_DISK, "optimizer_tier": "host"},
    {**ON_DISK, "parameter_tier": "disk", "recompute": "selective"},
]
"""Of what the host updates, as it always does where state or gradients rest on disk."""
LORA = {"adapter": {"rank": 4}}
KINDS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": "bf16"},
    "fp32": {"precision": "fp32"},
    "fp16": {"precision": "fp16"},
    "fp32, moments in 8 bits": {"precision": "fp32", "moments": "int8"},
    "bf16, moments too": {"precision": "bf16", "moments": "bf16"},
    "LoRA": {"precision": "bf16", **LORA},
    "LoRA, fp32": {"precision": "fp32", **LORA},
    "LoRA over 4 bits": {"precision": "bf16", "adapter": {"rank": 4, "quantize": "nf4"}},
    "DoRA over 4 bits": {"precision": "bf16", "adapter": {"rank": 4, "kind": "dora", "quantize": "nf4"}},
    "PiSSA": {"precision": "bf16", "adapter": {"rank": 4, "init": "pissa"}},
    "PiSSA over 4 bits": {"precision": "bf16", "adapter": {"rank": 4, "init": "pissa", "quantize": "nf4"}},
}
TIERS: dict[str, list[dict[str, Any]]] = {
    "bf16": [*MASTERS, {"recompute": "selective", "optimizer_tier": "host"}, ALL_HOST],
    "fp16": [*MASTERS, ALL_HOST],
    "fp32, moments in 8 bits": [{**HOST, "optimizer_resident": 1 << 16}],
    "bf16, moments too": [HOST],
    "LoRA": [
        {"parameter_tier": "disk"},
        {**ON_DISK, "parameter_tier": "disk"},
        ON_DISK,
        {**ALL_HOST, "parameter_tier": "host"},
    ],
    "LoRA over 4 bits": [{"recompute": "selective", "parameter_tier": tier} for tier in ("host", "disk")],
}
"""Of runs on the device, beside one with all on the device and one on the CPU."""


def told(run: RunDirectory, after: int = 0) -> list[dict[str, Any]]:
    return [one for one in metrics(run) if {"loss", "eval_loss"} & one.keys() and one["step"] > after]


def assert_same_bits(run: RunDirectory, reference: RunDirectory, after: int = 0, steps: int = STEPS) -> None:
    """Losses, norms and evaluations after a step, what was answered then, and all that the last checkpoint has."""
    answers, expected = ([one for one in read_samples(each) if one.step > after] for each in (run, reference))
    assert answers == expected
    for ours, theirs in zip(told(run), told(reference, after), strict=True):
        for key in ("step", "loss", "grad_norm", "eval_loss"):
            assert ours.get(key) == theirs.get(key), (ours["step"], key)
    for file in checkpoint_path(reference.checkpoints, steps).glob("*.safetensors"):
        got, want = load_file(checkpoint_path(run.checkpoints, steps) / file.name), load_file(file)
        assert got.keys() == want.keys()
        for key, tensor in want.items():
            assert tensor.equal(got[key]), key


def runs(
    folder: Path,
    tiers: Mapping[str, Sequence[dict[str, Any]]],
    workers: int = 1,
    steps: int = STEPS,
    *,
    clip: float = CLIP,
    mixture: str = "",
    prompts: int = 0,
    **keys: Any,
) -> dict[str, list[RunDirectory]]:
    """Train on the CPU, and on the device in several ways; that which has all there is the first of each kind. The
    model is a ``mixture`` if a family is named, and is asked so many ``prompts``."""
    num_blocks = 4 if workers > 1 else 2
    of_blocks = partial(mixture_config, mixture) if mixture else llama_config
    written = of_families(
        folder,
        lambda _, path: write_model(path, of_blocks(num_hidden_layers=num_blocks)),
        sequences=2 * workers,
        kernels="plain",
        steps=steps,
        optimizer={"lr": 3e-3, "clip": clip},
        data={
            "train": str(folder / "rows.jsonl"),
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
            "validation": 0.1,
        },
        evaluate={"every": steps, "prompts": prompts, "max_new_tokens": 6},
    )

    def run(kind: str, **named: Any) -> RunDirectory:
        run = run_of(written("llama", workers, **{"micro_batch": 1, **keys, **KINDS[kind], **named}))
        moves = {key: tier for key, tier in named.items() if key != "parameter_tier" or "adapter" not in KINDS[kind]}
        return updated_by_host(run) if "disk" in moves.values() else run

    on_cpu = {kind: run(kind) for kind in tiers}
    made = {kind: [run(kind), *(run(kind, **named) for named in every)] for kind, every in tiers.items()}
    kind, (resident, *_, last) = next(iter(made.items()))
    goes_on = run(kind, **tiers[kind][-1], start=(last, 1))
    work("device.by_operations", (workers, [str(one.path) for one in on_cpu.values()]))
    work(
        "device.apart_runs",
        (workers, ["late", *(str(one.path) for every in made.values() for one in every), str(goes_on.path)]),
    )
    for name, (reference, *others) in made.items():
        for one in others:
            assert_same_bits(one, reference, steps=steps)
        within = 1e-6 if KINDS[name]["precision"] == "fp32" else 2e-4
        for ours, theirs in zip(told(reference), told(on_cpu[name]), strict=True):
            key = "loss" if "loss" in theirs else "eval_loss"
            assert ours[key] == pytest.approx(theirs[key], rel=within), (name, ours["step"])
    assert any(one["grad_norm"] > CLIP for one in told(resident) if "loss" in one)
    assert_same_bits(goes_on, resident, after=1, steps=steps)
    return made


@pytest.mark.slow
def test_a_run_with_everything_elsewhere_has_the_bits_of_one_with_nothing_there(tmp_path: Path) -> None:
    disk, *_, host = TIERS["LoRA"]
    (made,) = runs(tmp_path, {"LoRA, fp32": [disk, host]}).values()
    assert "frozen parameters of the blocks in host memory" in made[-1].log.read_text()
    assert "read from the model's own files" in made[1].log.read_text(), "whose type is that of the run"


@pytest.mark.matrix
def test_what_the_host_updates_has_the_bits_of_what_the_device_does(tmp_path: Path) -> None:
    made = runs(tmp_path, {"bf16": MASTERS})
    assert "parameters of the blocks in host memory" in made["bf16"][1].log.read_text()
    assert "optimizer state on disk" in made["bf16"][2].log.read_text()


@pytest.mark.matrix
def test_what_hosts_of_two_workers_update_has_the_bits_of_what_the_devices_do(tmp_path: Path) -> None:
    made = runs(tmp_path, {"bf16": MASTERS}, workers=2, zero=3)
    assert "parameters of the blocks in host memory" in made["bf16"][1].log.read_text()
    assert "optimizer state on disk" in made["bf16"][2].log.read_text()


@pytest.mark.matrix
def test_frozen_shards_of_two_workers_come_and_go_without_a_change_of_bits(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [{"parameter_tier": "host"}, {"parameter_tier": "disk"}]
    made = runs(tmp_path, {"LoRA over 4 bits": [*ways, {**ON_DISK, "parameter_tier": "disk"}]}, workers=2, zero=3)
    _, host, disk, _ = (one.log.read_text() for one in made["LoRA over 4 bits"])
    assert "frozen parameters of the blocks in host memory" in host
    assert "come from disk" in disk
    assert "/packed/" in disk, "read from the cache"


@pytest.mark.matrix
def test_lengths_of_rows_and_parts_of_weights_have_the_same_bits_wherever_they_rest(tmp_path: Path) -> None:
    ways: list[dict[str, Any]] = [{**ALL_HOST, "parameter_tier": "host"}, {**ON_DISK, "parameter_tier": "disk"}]
    kinds = {"DoRA over 4 bits": ways, "PiSSA": ways, "PiSSA over 4 bits": ways[:1]}
    runs(tmp_path, kinds, workers=2, zero=3)


@pytest.mark.matrix
def test_without_clipping_what_hosts_of_two_workers_update_has_the_bits_of_what_the_devices_do(tmp_path: Path) -> None:
    """And what rests in the host's memory, or on disk, is evaluated and answers as what is on the devices."""
    made = runs(tmp_path, {"bf16": [MASTERS[0], MASTERS[3]]}, workers=2, zero=3, clip=0, prompts=2)
    resident, host, disk = made["bf16"]
    assert "parameters of the blocks in host memory" in host.log.read_text()
    assert "come from disk" in disk.log.read_text()
    assert any(one.answer for one in read_samples(resident) if one.step == STEPS)


@pytest.mark.matrix
def test_an_adapter_of_two_workers_over_a_base_of_16_bits_has_the_bits_of_the_devices(tmp_path: Path) -> None:
    """State, gradients and frozen shards in the host's memory, and on disk."""
    ways: list[dict[str, Any]] = [{**ALL_HOST, "parameter_tier": "host"}, {**ON_DISK, "parameter_tier": "disk"}]
    made = runs(tmp_path, {"LoRA": ways}, workers=2, zero=3)
    _, host, disk = (one.log.read_text() for one in made["LoRA"])
    assert "frozen parameters of the blocks in host memory" in host
    assert "optimizer state in host memory" in host
    assert "come from disk" in disk
    assert "optimizer state on disk" in disk


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [1, 2])
def test_a_mixture_has_the_same_bits_wherever_it_rests(workers: int, tmp_path: Path) -> None:
    """In fp32: experts are other products on a device than on a CPU."""
    made = runs(tmp_path, {"fp32": [MASTERS[0], MASTERS[3]]}, workers=workers, zero=3, mixture=MIXTURE)
    assert all("experts" in one for one in told(made["fp32"][0]) if "loss" in one)


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["llama", MIXTURE])
def test_tiles_of_what_the_host_updates_have_the_numbers_of_whole_layers(family: str, tmp_path: Path) -> None:
    """From the host's memory and from disk, with the same bits; answers too."""
    shape = {"tie_word_embeddings": False, "vocab_size": 265}
    config = llama_config(**shape) if family == "llama" else mixture_config(family, **shape)
    written = of_families(
        tmp_path,
        lambda _, path: write_model(path, config),
        sequences=2,
        kernels="plain",
        steps=STEPS,
        optimizer={"lr": 3e-3, "clip": CLIP},
        evaluate={"every": STEPS, "prompts": 2, "max_new_tokens": 6},
        data={
            "train": str(tmp_path / "rows.jsonl"),
            "max_length": 64,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(tmp_path / "cache"),
            "validation": 0.1,
        },
    )

    def run(micro_batch: int = 1, precision: str = "fp32", **memory: Any) -> RunDirectory:
        return run_of(written(family, precision=precision, micro_batch=micro_batch, **memory))

    def pair(**how: Any) -> list[RunDirectory]:
        """From disk, and from the host's memory, which nobody plans on a CPU."""
        on_disk, on_host = (run(**how | ON_DISK, parameter_tier="disk", tiles=5) for _ in range(2))
        return [updated_by_host(on_disk), updated_by_host(on_host, **HOST, parameter_tier="host")]

    whole, pairs = run(), [pair(), pair(micro_batch=2, recompute="full"), pair(precision="bf16")]
    paths = [str(one.path) for one in (whole, *(one for each in pairs for one in each))]
    work("device.apart_runs", (1, ["late", *paths]))
    for disk, host in pairs:
        assert "embedding and head in 5" in host.log.read_text()
        assert "parameters of the blocks in host memory" in host.log.read_text()
        assert "come from disk" in disk.log.read_text()
        assert_same_bits(host, disk)
    for ours in (one for each in pairs[:2] for one in each):
        for got, expected in zip(told(ours), told(whole), strict=True):
            for key in expected.keys() & {"loss", "grad_norm", "eval_loss"}:
                assert got[key] == pytest.approx(expected[key], rel=1e-6), (got["step"], key)
        assert read_samples(ours) == read_samples(whole)


@pytest.mark.matrix
@pytest.mark.parametrize("workers", [1, 2])
def test_a_device_holds_what_is_planned_of_parameters_that_its_host_updates(workers: int, tmp_path: Path) -> None:
    written = of_families(
        tmp_path,
        lambda _, path: write_model(path, llama_config(num_hidden_layers=5)),
        sequences=2 * workers,
        kernels="plain",
        steps=STEPS,
    )
    ways: list[dict[str, Any]] = [{**HOST, "parameter_tier": "host"}, {**ON_DISK, "parameter_tier": "host"}]
    if workers == 1:
        ways.append({**ON_DISK, "parameter_tier": "disk", "tiles": 4})
    found = [written("llama", workers, precision="bf16", zero=3, **way) for way in ways]
    runs = [updated_by_host(run_of(one)) for one in found]
    said = work("device.apart_bytes", (workers, [str(one.path) for one in runs]))
    for decision, seen in zip(found, json.loads(said.splitlines()[-1]), strict=True):
        layout = replace(decision.plan.layout, device="cuda", update_tier="host")
        assert seen == pytest.approx([held_states(layout, decision.plan.model).weights] * workers, rel=0.01)


@pytest.mark.matrix
def test_every_tier_has_the_bits_of_the_device(tmp_path: Path) -> None:
    runs(tmp_path, TIERS)


@pytest.mark.matrix
@pytest.mark.parametrize(("workers", "zero"), [(2, 3), (2, 2), (2, 1), (2, 0), (3, 3)])
@pytest.mark.parametrize("kind", ["bf16", "fp16", "bf16, moments too"])
def test_every_tier_of_several_workers_has_the_bits_of_the_device(
    workers: int, zero: int, kind: str, tmp_path: Path
) -> None:
    """Three divide nothing evenly."""
    runs(tmp_path, {kind: MASTERS if zero == 3 else MASTERS[2:3]}, workers, zero=zero)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["bf16", "fp16"])
def test_thirty_steps_of_two_workers_have_the_bits_of_the_device(kind: str, tmp_path: Path) -> None:
    runs(tmp_path, {kind: [MASTERS[0], MASTERS[3]]}, workers=2, steps=30, zero=3)


@pytest.mark.matrix
def test_replicas_of_shards_have_the_bits_of_the_device(tmp_path: Path) -> None:
    runs(tmp_path, {"bf16": [MASTERS[0], MASTERS[3]]}, workers=4, zero=3, parallel={"replicate": 2})


@pytest.mark.matrix
def test_two_workers_and_one_go_on_from_each_other(tmp_path: Path) -> None:
    """From a checkpoint of two to one worker and back to two, with all elsewhere as with nothing elsewhere."""

    def write(_: str, path: Path) -> None:
        write_model(path, llama_config(num_hidden_layers=4))

    how: dict[str, Any] = {"steps": STEPS, "kernels": "plain", "optimizer": {"lr": 3e-3, "clip": CLIP}}
    written = of_families(tmp_path, write, sequences=4, **how)
    chains = list[list[RunDirectory]]()
    for tiers in ({}, MASTERS[0], MASTERS[3]):
        keys: dict[str, Any] = {"precision": "bf16", "micro_batch": 1, **tiers}
        chain = [run_of(written("llama", 2, zero=3, **keys))]
        for workers, step in ((1, 1), (2, 2)):
            chain.append(run_of(written("llama", workers, start=(chain[-1], step), zero=3, **keys)))
        chains.append([updated_by_host(run) if tiers else run for run in chain])
    for workers, turn in zip((2, 1, 2), zip(*chains, strict=True), strict=True):
        work("device.apart_runs", (workers, ["late", *(str(run.path) for run in turn)]))
    for chain in chains[1:]:
        for run, reference in zip(chain, chains[0], strict=True):
            assert_same_bits(run, reference)


@pytest.mark.matrix
def test_a_run_with_everything_elsewhere_that_is_killed_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    """The full form is ``killed.py --kills 30``; its result is ``benchmarks/results/kills_apart.json``."""
    told = killed.main(2, 3, tmp_path)
    assert (told["kills"], told["wrong"]) == (2, 0)


@pytest.mark.matrix
def test_what_outgrows_a_device_is_evaluated_and_asked_block_by_block(tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_model(model, llama_config(num_hidden_layers=4))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(20))
    said = work("device.apart_asked", (1, [str(model), str(tmp_path / "rows.jsonl")])).splitlines()
    (*there, none), (*away, told) = json.loads(said[-2])
    assert none == []
    assert "no room" in told[0]
    assert there == away
    (answers, _), (answers_away, moved) = json.loads(said[-1])
    assert any(answers)
    assert answers == answers_away
    assert moved
