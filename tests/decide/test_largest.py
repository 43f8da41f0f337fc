"""``--largest`` on a tiny model: what is found fits, the next step does not, and trying all values agrees."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tiny import llama_config, write_config
from tonnage.decide.decision import asked
from tonnage.decide.largest import largest
from tonnage.decide.plans import PlanQuestion, supposed
from tonnage.errors import UserError
from tonnage.planning import scales
from tonnage.planning.machine import parse_hardware
from tonnage.planning.plan import SAFETY

HERE = parse_hardware("cpu:2c:24GB")
EXACT = ["memory.moments=fp32", "memory.optimizer_tier=device", "memory.gradient_tier=device"]
EXACT += ["memory.parameter_tier=device"]


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter weighs nothing here: it would outweigh the model."""
    monkeypatch.setitem(scales.RUNTIME_BYTES, "cpu", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration alone: no weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    llama_config(max_position_embeddings=256).save_pretrained(folder)
    return str(folder)


def ask(model: str, *words: str) -> PlanQuestion:
    """Rows stay whole, as they do in what a plan needs at least where nothing fits."""
    return supposed(model, ["memory.sequence_tiles=1", *words], HERE)


def least(model: str, *words: str) -> float:
    """What a plan takes at least without giving anything up."""
    question = ask(model, *EXACT, *words, "memory.budget.device=1")
    return question.planned(question.config, True).choice.peak_bytes


def budget(num_bytes: float) -> str:
    return f"memory.budget.device={math.ceil(num_bytes / SAFETY) + 2}"


CASES: dict[str, tuple[str, list[str], list[int]]] = {
    "micro_batch": ("memory.micro_batch", ["data.max_length=128", "batch.sequences=9"], list(range(1, 10))),
    "max_length": ("data.max_length", ["batch.sequences=2"], [64, 128, 192, 256]),
    "rank": ("adapter.rank", ["adapter.targets=q_proj", "data.max_length=128", "batch.sequences=2"], [32, 64, 96]),
}


STEPS = {"micro_batch": 1, "max_length": 64, "rank": 8}


@pytest.mark.parametrize(
    "word",
    [
        "micro_batch",
        pytest.param("max_length", marks=pytest.mark.matrix),
        pytest.param("rank", marks=pytest.mark.matrix),
    ],
)
def test_it_fits_and_the_next_one_does_not(word: str, model: str) -> None:
    key, words, values = CASES[word]
    needs = [least(model, *words, f"{key}={value}") for value in values]
    expected = values[len(values) // 2]
    room = budget(needs[len(values) // 2])
    assert max(value for value, need in zip(values, needs, strict=True) if need <= needs[len(values) // 2]) == expected
    found = largest(ask(model, *words, room), word)
    assert (found.key, found.value, found.limit) == (key, expected, values[-1])
    assert found.override == f"{key}={expected}"
    assert found.plan.fits
    assert (found.plan.layout.moments, found.plan.layout.tiers_on_disk) == ("fp32", [])
    assert found.next_value == expected + STEPS[word]
    assert found.next_plan is not None
    assert not found.next_plan.fits
    assert found.next_plan.choice.peak_bytes <= needs[values.index(expected) + 1]
    again = ask(model, *words, room, found.override)
    assert again.plan().choice.layout == found.plan.choice.layout, "the override makes the plan that was told"


def test_a_step_in_one_pass_may_fit_where_two_passes_do_not(model: str) -> None:
    words = ["data.max_length=128", "batch.sequences=9"]
    two, one = (least(model, *words, f"memory.micro_batch={value}") for value in (8, 9))
    assert one < two, "as no sum of gradients waits for a second pass"
    assert largest(ask(model, *words, budget(one)), "micro_batch").value == 9


def test_what_the_config_gives_up_may_be_given_up(model: str) -> None:
    words = ["data.max_length=128", "batch.sequences=9"]
    room = budget(least(model, *words, "memory.micro_batch=2"))
    exact = largest(ask(model, *words, room), "micro_batch")
    rounded = largest(ask(model, *words, room, "memory.moments=int8"), "micro_batch")
    assert exact.plan.layout.moments == "fp32"
    assert rounded.plan.layout.moments == "int8"
    assert rounded.value > exact.value


@pytest.mark.matrix
def test_where_all_fits_the_limit_is_told(model: str) -> None:
    words = ["data.max_length=128", "batch.sequences=4", "adapter={rank: 8, targets: k_proj}"]
    found = {word: largest(ask(model, *words), word) for word in CASES}
    assert [(one.value, one.next_value, one.next_plan) for one in found.values()] == [
        (4, None, None),
        (256, None, None),
        (32, None, None),
    ]
    assert "k_proj is a matrix of 32 x 96" in found["rank"].whose_limit
    assert "positions" in found["max_length"].whose_limit
    assert "packs" in found["micro_batch"].whose_limit
    short = largest(ask(model, "data.max_length=128", "batch.tokens=200"), "data.max_length")
    assert (short.value, short.limit) == (192, 192), "a step has a pack"
    assert "batch.tokens" in short.whose_limit


@pytest.mark.matrix
def test_a_right_guess_weighs_two_lengths(model: str) -> None:
    room = budget(least(model, "batch.sequences=2", "data.max_length=192"))
    found = largest(ask(model, "batch.sequences=2", "data.max_length=64", room), "max_length")
    assert found.evaluations <= 3


def refused(question: PlanQuestion, word: str) -> Any:
    with pytest.raises(UserError) as told:
        largest(question, word)
    return told.value.problems[0]


def test_what_cannot_be_solved_for_is_refused_with_what_can(model: str) -> None:
    assert "rank, max_length, micro_batch" in refused(ask(model), "lr").needed
    assert refused(ask(model), "rank").change.startswith("adapter.rank=32, or adapter.quantize=nf4")
    assert "multiples" in refused(ask(model, "data.max_length=32", "batch.tokens=32"), "max_length").needed


@pytest.mark.slow
def test_where_not_even_the_smallest_fits_what_would_is_told(model: str) -> None:
    words = ["data.max_length=128", "batch.sequences=4", "adapter.rank=8"]
    nearly = least(model, *words, "memory.micro_batch=1")
    problem = refused(ask(model, *words, budget(nearly), "memory.recompute=none"), "micro_batch")
    assert "with memory.micro_batch=1, the smallest value" in problem.found
    assert problem.change == "memory.recompute=auto"
    assert largest(ask(model, *words, budget(nearly), problem.change), "micro_batch").value >= 1


@pytest.mark.matrix
def test_lengths_of_a_config_are_planned_as_full_rows(tmp_path: Path) -> None:
    path = str(write_config(tmp_path, 60, launch={"workers": 1, "threads": 1}))
    room = budget(least_of_full_rows(asked(path, [*EXACT, "memory.budget.device=1"], HERE), 192))
    found = largest(asked(path, [room], HERE), "max_length")
    assert found.value == 192, "though the packs of the data have 128"
    assert found.plan.layout.row_tokens % 192 == 0
    assert found.next_plan is not None
    assert found.next_plan.layout.row_tokens % 256 == 0


def least_of_full_rows(question: PlanQuestion, length: int) -> float:
    data = question.config.data.model_copy(update={"max_length": length})
    return question.at_length(question.config.model_copy(update={"data": data}), True, length).choice.peak_bytes
