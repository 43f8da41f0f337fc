"""Steps that are not finite: skipped on all ranks alike, named, and no more of them in a row than allowed.

One document is poison wherever it is trained on, on whichever rank (``poisoned_runs.py``); where it lies in the packs
says which steps must be skipped, and no others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plain import metrics

from forked import work
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.data import pack_at
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.files.reading import read_json
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory

STEPS, PACKS_PER_STEP, GROWTH, SCALE = 14, 8, 3, 1024.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nonfinite")
    write_rows(folder / "rows.jsonl", alpaca_rows(100))
    write_model(folder / "model", llama_config())
    return folder


def decided(folder: Path, name: str, **changes: Any) -> Decision:
    text = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": PACKS_PER_STEP},
        "steps": STEPS,
        "optimizer": {"lr": 1e-3, "warmup": 2, "loss_scale": SCALE, "loss_scale_growth": GROWTH, "skips": 3},
        "memory": {"micro_batch": 2},
        "launch": {"workers": 2, "threads": 1},
        "track": [],
        "output": str(folder / name),
        "seed": 5,
    } | changes
    path = folder / "config.yaml"
    path.write_text(json.dumps(text))
    decision = decide(str(path), [])
    write_run(RunDirectory(decision.config.output), decision)
    return decision


def poisoned(
    poison: tuple[str, str, str], *decisions: Decision, late: Decision | None = None, workers: int = 2
) -> list[RunDirectory]:
    """``late`` is the last of them, and reads its numbers one step late."""
    runs = [RunDirectory(decision.config.output) for decision in (*decisions, *([late] if late else []))]
    marks = [*("" for _ in decisions), "+"]
    work("poisoned_runs", (workers, [*poison, *(f"{run.path}{mark}" for run, mark in zip(runs, marks, strict=False))]))
    return runs


def steps_with(decision: Decision, document: int) -> list[int]:
    data, seed = decision.prepared.train, decision.config.seed
    found = []
    for step in range(STEPS):
        positions = range(step * PACKS_PER_STEP, (step + 1) * PACKS_PER_STEP)
        packs = [data.pack(pack_at(position, data.num_packs, seed)) for position in positions]
        if any(document in pack.documents for pack in packs):
            found.append(step + 1)
    return found


@pytest.mark.slow
def test_exactly_the_poisoned_steps_are_skipped(folder: Path) -> None:
    decisions = [decided(folder, name, precision=name) for name in ("fp16", "bf16", "fp32")]
    decisions.append(decided(folder, "divided", precision="fp32", parallel={"tensor": 2}))
    away = {f"{key}_tier": "host" for key in ("optimizer", "gradient", "parameter")}
    memory = {"micro_batch": 2, "zero": 3, "recompute": "selective", **away}
    decisions.append(decided(folder, "on the host, recomputed", precision="fp32", memory=memory))
    document = 17
    bad = steps_with(decisions[0], document)
    assert 2 <= len(bad) <= STEPS - 6
    file, row = decisions[0].prepared.train.where(document)
    runs = poisoned((str(document), "model.layers.1.mlp", "output"), *decisions)
    records = [metrics(run) for run in runs]
    scale, good = SCALE, 0
    for number in range(STEPS):
        fp16, bf16, fp32, divided, on_host = (record[number] for record in records)
        assert [r["skipped"] for r in (fp16, bf16, fp32, divided, on_host)] == [number + 1 in bad] * 5
        assert fp16["loss_scale"] == scale
        if number + 1 in bad:
            scale, good = scale / 2, 0
            for record in (fp16, bf16, fp32, divided, on_host):
                assert record["not_finite"].startswith("the output of model.layers.1.mlp is not finite")
                assert record["not_finite"].endswith(f"from {file}:{row}")
        else:
            good += 1
            if good == GROWTH:
                scale, good = scale * 2, 0
            assert fp16["loss"] == pytest.approx(fp32["loss"], rel=1e-2)
            assert bf16["loss"] == pytest.approx(fp32["loss"], rel=1e-2)
            assert divided["loss"] == pytest.approx(fp32["loss"], rel=1e-5)
            assert on_host["loss"] == pytest.approx(fp32["loss"], rel=1e-5)
            assert fp16["grad_norm"] == pytest.approx(fp32["grad_norm"], rel=3e-2)
    assert scale > SCALE / 2 ** len(bad)  # it has recovered
    for rank in (0, 1):
        assert float((runs[0].path / f"scale-{rank}.txt").read_text()) == scale
    assert records[2][-1]["loss"] < records[2][0]["loss"] - 0.3


@pytest.mark.matrix
def test_a_bad_gradient_is_named_and_too_many_end_the_run(folder: Path) -> None:
    decision, other = (decided(folder, name, precision="bf16") for name in ("gradient", "gradient-late"))
    run, late = poisoned(("all", "model.layers.0", "gradient"), decision, late=other)
    records = metrics(run)
    assert told(late) == told(run)
    assert "UserError: step 4: 4 steps in a row" in late.log.read_text()
    assert [record["skipped"] for record in records] == [True] * 4
    for record in records:
        assert record["loss"] == pytest.approx(records[0]["loss"], rel=0.2)
        assert "the gradient of the output of model.layers.0 is not finite" in record["not_finite"]
    log = run.log.read_text()
    assert "UserError: step 4: 4 steps in a row without a finite loss and gradient, all skipped; in the last" in log
    assert "saved step-00000004" in log


@pytest.mark.matrix
def test_numbers_that_are_read_late_change_nothing(folder: Path) -> None:
    """Step 2 is evaluated after, step 4 saved after; the steps after a bad one are run again."""
    how: dict[str, Any] = {"steps": 8, "checkpoint": {"every": 4, "keep": 9}, "evaluate": {"every": 2}}
    how["data"] = {"train": str(folder / "rows.jsonl"), "validation": 0.1, "max_length": 128, "template": "plain"}
    how["data"]["cache"] = str(folder / "cache")
    decisions = [decided(folder, name, precision="bf16", **how) for name in ("at-once", "late")]
    bad = [step for step in steps_with(decisions[0], 17) if step <= 8]
    assert set(bad).difference([2, 4, 6, 8])  # one of which is known late
    run, late = poisoned(("17", "model.layers.1.mlp", "output"), decisions[0], late=decisions[1])
    assert [record["step"] for record in told(run) if record.get("skipped")] == bad
    assert told(late) == told(run)
    states = list(run.checkpoints.rglob("*.safetensors"))
    assert len(states) >= 2
    for path in states:
        assert path.read_bytes() == (late.checkpoints / path.relative_to(run.checkpoints)).read_bytes()


@pytest.mark.matrix
def test_a_bad_step_changes_nothing_that_a_host_updates(folder: Path) -> None:
    """Wherever it rests: the same steps are skipped, and the same numbers follow, as where nothing comes and goes."""
    host = {"parameter_tier": "host", "optimizer_tier": "host", "gradient_tier": "host"}
    disk = {"parameter_tier": "host", "optimizer_tier": "disk", "gradient_tier": "disk"}
    ways: dict[str, dict[str, str]] = {"beside": {}, "host": host, "disk": disk, "all-disk": disk}
    how: dict[str, Any] = {"steps": 8, "launch": {"workers": 1, "threads": 1}, "checkpoint": {"every": 0}}
    made = [
        decided(folder, name, precision="bf16", memory={"micro_batch": 2, **way}, **how) for name, way in ways.items()
    ]
    plan = read_json((on_disk := RunDirectory(made[-1].config.output)).plan)
    plan["choice"]["layout"]["parameter_tier"] = "disk"  # planned for a CPU, which would update all by itself
    write_json(on_disk.plan, plan)
    bad = [step for step in steps_with(made[0], 17) if step <= 8]
    assert 1 <= len(bad) <= 6
    beside, *others = poisoned(("17", "model.layers.1.mlp", "gradient"), *made, workers=1)
    assert [one["step"] for one in told(beside) if one.get("skipped")] == bad
    for run in others:
        assert told(run) == told(beside)
        for path in beside.checkpoints.rglob("*.safetensors"):
            assert path.read_bytes() == (run.checkpoints / path.relative_to(beside.checkpoints)).read_bytes()


def told(run: RunDirectory) -> list[dict[str, Any]]:
    """What was written down, without times and memory, and without that a save is done, which takes its time."""
    lines = map(json.loads, run.metrics.read_text().splitlines())
    timed = ("seconds", "per_second", "core_wait", "memory", "phases", "checkpoint", "disk", "host")
    kept = [{key: one[key] for key in one if not any(word in key for word in timed)} for one in lines]
    return [one for one in kept if one.keys() > {"step"}]


@pytest.mark.matrix
@pytest.mark.parametrize(("what", "module"), [("output", "model.layers.1.mlp"), ("gradient", "model.layers.1.mlp")])
def test_a_stage_that_goes_wrong_is_named(what: str, module: str, folder: Path) -> None:
    """Infinities go on to the other stage, which finds them as well: the stage that had them first is told."""
    changes = {"parallel": {"pipeline": 2}, "precision": "fp32", "memory": {"micro_batch": 1}, "steps": 6}
    decision = decided(folder, f"stages-{what}", **changes)
    document = 17
    (run,) = poisoned((str(document), module, what), decision)
    bad = [step for step in steps_with(decision, document) if step <= 6]
    records = metrics(run)
    assert bad
    assert [record["step"] for record in records if record["skipped"]] == bad
    of = "output" if what == "output" else "gradient of the output"
    for record in records:
        if record["skipped"]:
            assert record["not_finite"].startswith(f"the {of} of {module} is not finite, on worker 1 in micro-batch")
