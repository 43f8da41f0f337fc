"""Pairs of answers from Python: the numbers of a run by hand, rows in memory, and what does not go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tonnage
from tiny import llama_config, write_model
from tonnage.errors import UserError

WORDS = ["red", "green", "blue", "one", "two", "three", "sun", "moon"]
ROWS = [
    {"prompt": f"Say {word} and {other}.", "chosen": f"{word} {other}", "rejected": f"{other}, no"}
    for word in WORDS
    for other in WORDS
    if word != other
]


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))
    write_model(tmp_path / "model", llama_config(initializer_range=0.2))
    return {
        "model_or_config": str(tmp_path / "model"),
        "data": {"train": ROWS, "validation": 0.1, "max_length": 160, "template": "plain"},
        "steps": 3,
        "batch": {"sequences": 4},
        "memory": {"micro_batch": 2},
        "optimizer": {"lr": 1e-3},
        "precision": "fp32",
        "compile": "off",
        "launch": {"workers": 1, "threads": 1},
    }


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["dpo", "orpo", "reward"])
def test_steps_by_hand_are_those_of_a_run(settings: dict[str, Any], tmp_path: Path, kind: str) -> None:
    run = tonnage.train(**settings, objective=kind, output=str(tmp_path / "run"))
    with tonnage.Session(**settings, objective=kind, output=str(tmp_path / "hand")) as session:
        for batch in session.batches():
            session.forward_backward(batch)
            session.update()
        assert session.evaluate() == run.evaluations[-1]["eval_loss"]
        by_hand = [step.record for step in session.run.steps]
    for step, other in zip(run.steps, by_hand, strict=True):
        for name in ("loss", "grad_norm", "reward_margin", "reward_accuracy", "logprob_chosen"):
            assert step.record.get(name) == other.get(name), name
        assert ("logprob_chosen" in other) == (kind != "reward")


@pytest.mark.matrix
def test_rows_in_memory_and_what_does_not_go(settings: dict[str, Any], tmp_path: Path) -> None:
    with tonnage.Session(**settings, objective="simpo", output=str(tmp_path / "simpo")) as session:
        before = session.evaluate(ROWS[:8])
        for _ in range(3):
            session.forward_backward(session.batch(ROWS[:8]))
            session.update(lr=3e-3)
        assert session.evaluate(ROWS[:8]) < before
        with pytest.raises(UserError, match="a loss of one's own, and an objective of pairs"):
            session.forward_backward(session.batch(ROWS[:8]), loss=lambda logprobs, weights: -logprobs.sum())
    with (
        tonnage.Session(**settings, objective="dpo", output=str(tmp_path / "dpo")) as session,
        pytest.raises(UserError, match="compares with the model as it was"),
    ):
        session.forward_backward(session.batch(ROWS[:8]))


@pytest.mark.matrix
def test_a_reward_model_learns_margins_of_rows_in_memory_and_writes_nothing(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    with tonnage.Session(**settings, objective="reward", output=str(tmp_path / "reward")) as session:
        plain = session.evaluate(ROWS[:8])
        assert session.evaluate([row | {"margin": 1.0} for row in ROWS[:8]]) > plain
        for _ in range(3):
            session.forward_backward(session.batch(ROWS[:8]))
            session.update(lr=3e-3)
        assert session.evaluate(ROWS[:8]) < plain
        with pytest.raises(UserError, match="whose model scores texts and writes none"):
            session.sample(["Say red."])
