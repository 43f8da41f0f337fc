"""Evaluations on the way: they change no step, are the same in every layout, and runs that overfit keep their best step
and end early, at the same step whether they were interrupted or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plain import metrics
from ready import Start, ready, run_of
from transformers import AutoModelForCausalLM

from forked import train
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import complete_checkpoints, step_of
from tonnage.checkpoint.verify import exported_from
from tonnage.data import PackedDataset
from tonnage.decide.exports import export_run, is_exported, step_of_export
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.figures import Evaluated

STEPS, PATIENCE = 30, 3
OVERFIT: dict[str, Any] = {
    "optimizer": {"lr": 2e-2, "schedule": "constant", "warmup": 0},
    "checkpoint": {"every": 5, "keep": 1, "best": "eval_loss"},
    "steps": STEPS,
}
Record = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judging")
    write_model(folder / "model", llama_config(num_hidden_layers=2, initializer_range=0.2))
    rows = alpaca_rows(60)
    write_rows(folder / "rows.jsonl", rows[:8])
    write_rows(folder / "a.jsonl", rows[20:26])
    write_rows(folder / "b.jsonl", rows[40:45])
    return folder


def written(folder: Path, name: str, start: Start | None = None, **changes: Any) -> RunDirectory:
    text: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": [str(folder / "a.jsonl"), str(folder / "b.jsonl")],
            "max_length": 256,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 2},
        "steps": 4,
        "precision": "fp32",
        "launch": {"workers": 1, "threads": 1},
        "evaluate": {"every": 2},
        "output": str(folder / name),
        "seed": 3,
    }
    return run_of(ready(folder, text | changes, start))


def evaluations(run: RunDirectory) -> dict[int, Record]:
    return {one["step"]: one for one in (run.read_metrics()) if "eval_loss" in one}


def losses(run: RunDirectory) -> dict[int, tuple[float, float]]:
    return {one["step"]: (one["loss"], one["grad_norm"]) for one in metrics(run) if "grad_norm" in one}


def judged_by_transformers(folder: Path, run: RunDirectory) -> dict[str, tuple[float, float]]:
    """Loss and token accuracy of the model as it was before, by file."""
    plain = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    packs = PackedDataset.open(Path(str(Plan.read(run.plan).data.validation_path)))
    sums: dict[str, list[float]] = {}
    for number in range(packs.num_packs):
        pack, at = packs.pack(number), 0
        for document, length in zip(pack.documents.tolist(), pack.lengths.tolist(), strict=True):
            ids = torch.from_numpy(pack.input_ids[at : at + length]).long()
            counts = torch.from_numpy(pack.weights[at : at + length])[1:] > 0
            at += length
            with torch.no_grad():
                logits = plain(input_ids=ids[None]).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[counts]
            right = (logits.argmax(1) == ids[1:])[counts]
            for name in (Path(packs.where(document)[0]).name, "all"):
                one = sums.setdefault(name, [0.0, 0.0, 0.0])
                for place, value in enumerate((loss.sum(), right.sum(), counts.sum())):
                    one[place] += float(value)
    return {name: (loss / tokens, right / tokens) for name, (loss, right, tokens) in sums.items()}


@pytest.mark.matrix
def test_evaluations_tell_what_transformers_does_change_no_step_and_are_alike_in_all_layouts(folder: Path) -> None:
    scored: dict[str, Any] = {"every": 2, "scorer": "contains", "answers": 5, "max_new_tokens": 8}
    scored["general"] = str(folder / "rows.jsonl")
    alone = written(folder, "alone", evaluate=scored)
    without = written(folder, "without", evaluate={"every": 0, "before": False})
    layouts: dict[str, dict[str, Any]] = {
        "shard": {"memory": {"zero": 3}},
        "tensor": {"parallel": {"tensor": 2}},
        "pipeline": {"parallel": {"pipeline": 2}},
    }
    others = [
        written(folder, name, evaluate=scored, launch={"workers": 2, "threads": 1}, **keys)
        for name, keys in layouts.items()
    ]
    train((1, [alone, without]), (2, others))
    assert losses(alone) == losses(without)
    assert list(evaluations(without)) == [4]
    found = evaluations(alone)
    assert list(found) == [0, 2, 4]
    told = Evaluated.of_json(found[0]["evaluation"])
    assert told.rows is not None
    expected = judged_by_transformers(folder, alone)
    for name, rows in {"all": told.rows, **told.sources}.items():
        assert (rows.loss.value, rows.token_accuracy.value) == pytest.approx(expected[name], rel=1e-5)
        assert rows.loss.low < rows.loss.value < rows.loss.high
    assert (told.rows.rows, list(told.sources), told.answers) == (11, ["a.jsonl", "b.jsonl"], 5)
    last = Evaluated.of_json(found[4]["evaluation"])
    assert last.figures(told)["forgets"].value == pytest.approx(found[4]["general_loss"] - found[0]["general_loss"])
    assert set(last.figures(told)) > {"exact_match", "contains", "perplexity"}
    for run in others:
        for step, one in evaluations(run).items():
            for key in ("eval_loss", "token_accuracy", "general_loss", "contains"):
                assert one[key] == pytest.approx(found[step][key], rel=1e-4), (run.path.name, step, key)


@pytest.mark.matrix
def test_a_run_that_overfits_ends_early_exports_its_best_step_and_does_so_again_after_a_kill(folder: Path) -> None:
    whole = written(folder, "whole", **OVERFIT, evaluate={"every": 1})
    patient: dict[str, Any] = {"every": 1, "patience": PATIENCE}
    early = written(folder, "early", **OVERFIT, evaluate=patient)
    two: dict[str, Any] = {"launch": {"workers": 2, "threads": 1}, "memory": {"zero": 3}}
    both = written(folder, "both", **OVERFIT, evaluate=patient, **two)
    train((1, [whole, early]), (2, [both]))

    found = {step: one["eval_loss"] for step, one in evaluations(whole).items() if step}
    assert list(found) == list(range(1, STEPS + 1))
    best = min(found, key=lambda step: found[step])
    ends = next(step for step in found if step - min(range(1, step + 1), key=lambda one: found[one]) == PATIENCE)
    assert 1 < best < STEPS - PATIENCE
    assert found[STEPS] > found[best] + 0.5
    assert [step_of(path) for path in complete_checkpoints(whole.checkpoints)] == [best, STEPS]
    export_run(whole)
    assert exported_from(whole.export) == f"step-{best:08d}"
    assert is_exported(whole)

    stopped = min(range(1, ends + 1), key=lambda step: found[step])
    for run in (early, both):
        assert list(losses(run)) == list(range(1, ends + 1)), run.path.name
        assert step_of_export(run) == stopped
        assert f"stopping early: {PATIENCE} evaluations in a row" in run.log.read_text()
    assert {step: one["eval_loss"] for step, one in evaluations(early).items() if step} == {
        step: found[step] for step in range(1, ends + 1)
    }

    # Killed behind an evaluation that was the best so far, and once more when all is over.
    again = written(folder, "again", (early, stopped), **OVERFIT, evaluate=patient)
    over = written(folder, "over", (early, ends), **OVERFIT, evaluate=patient)
    train((1, [again, over]))
    assert losses(again) == {step: one for step, one in losses(early).items() if step > stopped}
    assert {step: one["eval_loss"] for step, one in evaluations(again).items()} == {
        step: found[step] for step in range(stopped + 1, ends + 1)
    }
    assert not losses(over)
