"""The same losses and gradient norms on 1, 2 and 4 workers, in any micro-batch, as a plain loop over padded batches.

The reference is ``plain.plain_loop``.
"""

from __future__ import annotations

import json

import pytest
from plain import metrics, plain_loop

from forked import train
from tiny import alpaca_rows, neox_config, write_model, write_rows
from tonnage.decide.decision import Decision, decide
from tonnage.decide.written import write_run
from tonnage.rundir.directory import RunDirectory

STEPS, PACKS_PER_STEP, MAX_LENGTH = 6, 8, 128
LR, DECAY, CLIP, WARMUP = 3e-3, 0.1, 0.5, 2
FAMILIES = {"neox": neox_config(num_hidden_layers=3)}  # test_engine has a Llama
MICRO_BATCHES = {"neox": (1, 2, 4)}


@pytest.fixture(scope="module")
def decisions(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int, int], Decision]:
    """(family, workers, micro-batch) -> what was decided for that run."""
    folder = tmp_path_factory.mktemp("layouts")
    rows = write_rows(folder / "rows.jsonl", alpaca_rows(300))
    made = {}
    for family, config in FAMILIES.items():
        model = write_model(folder / family, config)
        for workers in (1, 2):  # test_engine has four
            for micro_batch in MICRO_BATCHES[family]:
                text = {
                    "model": str(model),
                    "data": {
                        "train": str(rows),
                        "max_length": MAX_LENGTH,
                        "template": "plain",
                        "cache": str(folder / "cache"),
                    },
                    "batch": {"sequences": PACKS_PER_STEP},
                    "steps": STEPS,
                    "optimizer": {"lr": LR, "weight_decay": DECAY, "clip": CLIP, "warmup": WARMUP},
                    "precision": "fp32",
                    "memory": {"micro_batch": micro_batch},
                    "launch": {"workers": workers, "threads": 1},
                    "track": [],
                    "output": str(folder / f"{family}-{workers}-{micro_batch}"),
                    "seed": 7,
                }
                path = folder / "config.yaml"
                path.write_text(json.dumps(text))
                decision = decide(str(path), [])
                write_run(RunDirectory(decision.config.output), decision)
                made[family, workers, micro_batch] = decision
    return made


@pytest.fixture(scope="module")
def references(decisions: dict[tuple[str, int, int], Decision]) -> dict[str, list[dict[str, float]]]:
    """family -> loss and gradient norm of every step, by the plain loop."""
    return {family: plain_loop(decisions[family, 1, 1])[0] for family in FAMILIES}


@pytest.mark.parametrize("workers", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_every_layout_equals_the_plain_loop(
    workers: int,
    decisions: dict[tuple[str, int, int], Decision],
    references: dict[str, list[dict[str, float]]],
) -> None:
    layouts = [key for key in decisions if key[1] == workers]
    runs = {key: RunDirectory(decisions[key].config.output) for key in layouts}
    train((workers, runs.values()))
    for key, run in runs.items():
        got, want = metrics(run), references[key[0]]
        shares = decisions[key].plan.layout.share_prefixes
        assert shares, "what documents begin with is computed once"
        assert sum(record["computed_tokens"] for record in got) < 0.9 * sum(record["tokens"] for record in got)
        assert len(got) == STEPS
        for ours, plain in zip(got, want, strict=True):
            where = f"{key}, step {ours['step']}"
            assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5), where
            assert ours["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4), where
            assert ours["lr"] == pytest.approx(plain["lr"], rel=1e-12), where
        assert want[-1]["loss"] < want[0]["loss"] - 1.0
        assert any(plain["grad_norm"] > CLIP for plain in want)
