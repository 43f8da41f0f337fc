"""Steps of one's own: to the bit those of a run on the same rows; what is not as planned, or no sum, is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Lfm2Config

from forked import work
from selected import arguments_that_run
from tiny import alpaca_rows, llama_config, write_model, write_rows

pytestmark = pytest.mark.slow
PADDED = Lfm2Config(
    vocab_size=264,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_hidden_layers=2,
    layer_types=["conv", "full_attention"],
    max_position_embeddings=512,
    initializer_range=0.2,
    pad_token_id=257,
    bos_token_id=256,
    eos_token_id=256,
)
"""Convolutions would look over the border between documents of a row."""
RUNS = ["packed", "bf16", "adapter", "disk", "padded"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("sessions")
    write_model(folder / "model", llama_config(initializer_range=0.3))
    write_model(folder / "padded", PADDED)
    write_rows(folder / "rows.jsonl", alpaca_rows(60))
    names = [name for (name,) in arguments_that_run(request, "name") if name in [*RUNS, "aware"]]
    said: dict[str, Any] = json.loads(work("api.by_hand", (1, [str(folder), *names])).splitlines()[-1])
    return said


@pytest.mark.parametrize("name", [*RUNS, "aware"])
def test_stepping_by_hand_gives_the_losses_of_a_run_to_the_bit(name: str, found: dict[str, Any]) -> None:
    one = found["runs"][name]
    assert len(one["run"]) == 5
    assert one["session"] == one["run"]
    assert one["evaluations"][0] == one["evaluations"][1]
    assert one["same"]
    assert one["arrangement"] == ("padded" if name == "padded" else "packed")


@pytest.mark.parametrize("name", RUNS)
def test_what_is_sampled_is_what_transformers_would_say(name: str, found: dict[str, Any]) -> None:
    ours, theirs = found["runs"][name]["greedy"]
    assert ours == theirs
    assert ours


def test_batches_of_an_update_count_as_one(found: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["parts"], found["whole"], rtol=1e-5)
    assert found["step"][0] == 1
    assert found["step"][1] == found["step"][2]


def test_a_loss_of_ones_own_that_is_ours_gives_the_same(found: dict[str, Any]) -> None:
    np.testing.assert_allclose(found["own"], found["whole"], rtol=1e-6)


def test_a_batch_that_was_cut_short_leaves_no_gradients(found: dict[str, Any]) -> None:
    calls, *broken = found["broken"]
    assert calls == 3
    np.testing.assert_allclose(broken, found["whole"], rtol=1e-5)


def test_the_program_is_left_as_it_was(found: dict[str, Any]) -> None:
    assert found["as_before"] == [True, True]
    assert found["drawn"] == [True, True]
    assert found["repeats"]


def test_another_model_in_the_process_does_not_change_the_kernels_of_a_session(found: dict[str, Any]) -> None:
    assert found["on_between"]
    assert not found["seen_on"]


def test_what_is_sampled_can_be_trained_token_by_token(found: dict[str, Any]) -> None:
    assert found["trains"]
    assert found["batch"] == [True, True]


def test_a_step_that_is_not_finite_changes_nothing_and_names_the_row(found: dict[str, Any]) -> None:
    skipped, why = found["skipped"]
    assert skipped
    assert not found["turned"]
    assert "the loss is not finite" in why
    assert "from rows in memory:" in why
    assert found["good"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("second", "a process that has joined others"),
        ("nothing", "a forward_backward before each update"),
        ("long", "rows in memory:1: "),
        ("row", "rows in memory:1: no 'score', which data.carry names"),
        ("form", "fields a"),
        ("text", "sample([prompt])"),
        ("mean", "rows in memory:"),
        ("nan", "at rows in memory:0: "),
        ("column", "takes reward, and the rows carry score"),
        ("resume", "with a tonnage.Session"),
        ("stop", "end that program"),
        ("workers", "1: a session is one worker"),
        ("more", "micro-batches before an update, and the plan of this session has one"),
    ],
)
def test_what_cannot_be_is_refused(name: str, said: str, found: dict[str, Any]) -> None:
    assert said in found["said"][name]
