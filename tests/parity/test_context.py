"""Rows whose tokens several ranks divide (``parallel.context``): the same numbers as one rank, in every layout.

Losses and gradient norms are held against one worker's over five steps, of documents of many lengths in a pack, of one
that fills its pack and of such with few targets, for grouped queries, and for a window and capped scores.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from plain import metrics, plain_loop
from ready import Start, ready
from transformers import Gemma2Config, LlamaConfig, PreTrainedConfig

from forked import train
from tiny import alpaca_rows, write_model, write_rows
from tonnage.decide.decision import Decision
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import read_samples

STEPS, SAVED = 5, 2
SHAPE: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "initializer_range": 0.2,
}
"""Four ranks have a head of queries each, and two of them the same one of keys and values."""
FAMILIES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(**SHAPE, sliding_window=9, query_pre_attn_scalar=8),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("context")
    write_rows(folder / "mixed.jsonl", alpaca_rows(200))
    texts = [" ".join(f"{number * place % 97}" for place in range(40 + number)) for number in range(150)]
    (folder / "whole.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    few = [{"prompt": f"{number} " * (10 + number % 12), "completion": "ab"[: 1 + number % 2]} for number in range(90)]
    write_rows(folder / "few.jsonl", few)
    for family, config in FAMILIES.items():
        write_model(folder / family, config)
    return folder


def decided(
    folder: Path, workers: int = 1, context: int = 1, start: Start | None = None, *, name: str = "", **keys: Any
) -> Decision:
    """A run that is ready for its workers; ``start`` is the run and the step that it goes on from."""
    rows, family = keys.pop("rows", "mixed"), keys.pop("family", "llama")
    text: dict[str, Any] = {
        "model": str(folder / family),
        "data": {
            "train": str(folder / f"{rows}.jsonl"),
            "max_length": 101,
            "template": "plain",
            "over_length": "split" if rows == "whole" else "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "clip": 0.5, "warmup": 2},
        "precision": "fp32",
        "memory": {"micro_batch": 1, "zero": 3, "recompute": "none"},
        "parallel": {"context": context},
        "launch": {"workers": workers, "threads": 1},
        "checkpoint": {"keep": 99},
        "track": [],
        "output": str(folder / f"{family}-{rows}-{workers}-{context}-{name}"),
        "seed": 3,
    }
    for key, value in keys.items():
        text[key] = text[key] | value if isinstance(value, dict) and key in text else value
    return ready(folder, text, start)


def run_of(decision: Decision) -> RunDirectory:
    return RunDirectory(decision.config.output)


def assert_same(run: RunDirectory, steps: list[dict[str, Any]], *, after: int = 0, norms: float = 1e-5) -> None:
    got = metrics(run)
    assert [one["step"] for one in got] == [one["step"] for one in steps[after:]]
    for ours, one in zip(got, steps[after:], strict=True):
        where = f"{run.path.name}, step {ours['step']}"
        assert ours["loss"] == pytest.approx(one["loss"], rel=1e-5), where
        assert ours["grad_norm"] == pytest.approx(one["grad_norm"], rel=norms), where
        for same in ("tokens", "supervised_tokens"):
            assert ours[same] == one.get(same, ours[same]), where


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_compute_what_one_does(folder: Path, family: str) -> None:
    decision = decided(folder, 2, 2, name="plain", family=family)
    train((2, [run_of(decision)]))
    steps, _ = plain_loop(decision)
    assert_same(run_of(decision), [one | {"step": at} for at, one in enumerate(steps, 1)], norms=1e-4)


LAYOUTS: dict[str, dict[str, Any]] = {
    "": {},
    "zero-0": {"memory": {"zero": 0}},
    "lora": {"adapter": {"rank": 4, "dropout": 0.1}},
    "full": {"memory": {"recompute": "full", "activation_tier": "host"}},
    "selective": {"memory": {"recompute": "selective", "zero": 2, "micro_batch": 2}},
    "disk": {"memory": {"optimizer_tier": "disk", "parameter_tier": "disk", "gradient_tier": "disk"}},
}


@pytest.mark.matrix
@pytest.mark.parametrize("rows", ["mixed", "whole", "few"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_ranks_computes_what_one_does(folder: Path, rows: str, family: str) -> None:
    def written(workers: int, context: int, name: str, **more: Any) -> Decision:
        keys = LAYOUTS[name.partition("+")[0]] | more
        return decided(folder, workers, context, name=name, rows=rows, family=family, **keys)

    alone = {name: written(1, 1, name) for name in ("", "lora")}
    halves = [written(2, 2, name) for name in LAYOUTS]
    quarters = [written(4, 4, name) for name in ("", "zero-0", "lora", "full")]
    mixed = [
        written(4, 2, "+packs"),
        written(4, 2, "+tensor", parallel={"context": 2, "tensor": 2}),
        written(4, 2, "full+tensor", parallel={"context": 2, "tensor": 2}),
        written(4, 2, "zero-0+pipeline", parallel={"context": 2, "pipeline": 2}),
    ]
    train((1, map(run_of, alone.values())), (2, map(run_of, halves)), (4, map(run_of, [*quarters, *mixed])))
    for decision in [*halves, *quarters, *mixed]:
        run = run_of(decision)
        reference = alone["lora" if decision.config.adapter != "none" else ""]
        assert_same(run, metrics(run_of(reference)))


@pytest.mark.matrix
def test_a_run_goes_on_with_another_number_of_ranks(folder: Path) -> None:
    def written(workers: int, context: int, start: Start | None = None, name: str = "on") -> RunDirectory:
        keys: dict[str, Any] = {"checkpoint": {"every": SAVED}, "memory": {"recompute": "full"}}
        return run_of(decided(folder, workers, context, start, name=name, **keys))

    whole, halves = written(1, 1), written(2, 2)
    others = [written(4, 4, (whole, SAVED), "later"), written(4, 2, (halves, SAVED), "later")]
    alone = written(1, 1, (halves, SAVED), "later")
    train((1, [whole]), (2, [halves]), (4, others), (1, [alone]))
    for run in (*others, alone):
        assert_same(run, metrics(whole), after=SAVED)


def numbers_of(record: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """All numbers of a record, and of those in it, by name."""
    flat: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= numbers_of(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not name.endswith("seconds"):
            flat[f"{prefix}{name}"] = value
    return flat


@pytest.mark.matrix
def test_evaluations_and_answers_are_those_of_one_rank(folder: Path) -> None:
    """Intervals too: they follow from sums over whole documents."""
    keys: dict[str, Any] = {
        "data": {"validation": 0.2},
        "evaluate": {"every": 2, "prompts": 5, "max_new_tokens": 6},
    }
    alone, *others = (run_of(decided(folder, size, size, name="judged", **keys)) for size in (1, 2, 4))
    train((1, [alone]), *((int(run.path.name.split("-")[2]), [run]) for run in others))
    expected = [one for one in alone.read_metrics() if "eval_loss" in one]
    assert len(expected) >= 2
    for run in others:
        evaluated = [one for one in run.read_metrics() if "eval_loss" in one]
        assert len(evaluated) == len(expected)
        for ours, one in zip(evaluated, expected, strict=True):
            assert numbers_of(ours) == pytest.approx(numbers_of(one), rel=1e-4), run.path.name
        assert [one.answer for one in read_samples(run)] == [one.answer for one in read_samples(alone)]
