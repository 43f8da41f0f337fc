"""What a model answers while it is trained is what transformers' own ``generate`` says of the same weights, in every
layout and tier; and to ask changes no loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import final_weights, metrics
from ready import ready, run_of
from transformers import AutoModelForCausalLM, AutoTokenizer, Lfm2Config

from forked import train
from tiny import alpaca_rows, llama_config, mixture_config, write_model, write_rows
from tonnage.decide.decision import Decision
from tonnage.files.reading import read_record
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.samples import Prompts, Sample, read_samples

STEPS, ROOM = 6, 12
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "disk": {"memory": {"parameter_tier": "disk", "optimizer_tier": "disk", "gradient_tier": "disk"}},
    "zero 1": {"launch": {"workers": 2, "threads": 1}, "memory": {"zero": 1}},
    "zero 2": {"launch": {"workers": 2, "threads": 1}, "memory": {"zero": 2}},
    "zero 3": {"launch": {"workers": 2, "threads": 1}, "memory": {"zero": 3}},
    "tensor": {"launch": {"workers": 2, "threads": 1}, "parallel": {"tensor": 2}},
    "pipeline": {"launch": {"workers": 2, "threads": 1}, "parallel": {"pipeline": 2}},
    "interleaved": {"launch": {"workers": 2, "threads": 1}, "parallel": {"pipeline": 2, "schedule": "interleaved"}},
    "pipeline x shard": {"launch": {"workers": 4, "threads": 1}, "parallel": {"pipeline": 2}},
}


def written(
    folder: Path, layout: str, prompts: int | str, model: str = "model", **changes: Any
) -> tuple[RunDirectory, Decision]:
    keys = LAYOUTS[layout] | changes
    text = {
        "model": str(folder / model),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": 0.2,
            "max_length": 96,
            "template": "plain",
            "over_length": "drop",
            "max_loss": 1.0,
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3},
        "precision": "fp32",
        "launch": {"workers": 1, "threads": 1},
        "evaluate": {"every": 3, "prompts": prompts, "max_new_tokens": ROOM},
        "output": str(folder / f"{model}-{layout.replace(' ', '')}-{Path(str(prompts)).stem}"),
        "seed": 7,
    } | keys
    decision = ready(folder, text, None)
    return run_of(decision), decision


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answers")
    write_model(folder / "model", llama_config(num_hidden_layers=4, initializer_range=0.4))
    shape: dict[str, Any] = {"vocab_size": 258, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    convolutions = Lfm2Config(
        **shape,
        num_hidden_layers=3,
        num_key_value_heads=2,
        layer_types=["conv", "full_attention", "conv"],
        initializer_range=0.3,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=257,
    )
    write_model(folder / "lfm2", convolutions)
    write_model(folder / "mixtral", mixture_config("mixtral", vocab_size=258))
    write_rows(folder / "rows.jsonl", alpaca_rows(60))
    return folder


def answered_by_transformers(model: Any, prompts: Prompts, tokenizer: Any) -> list[str]:
    found = []
    for prompt in prompts.prompts:
        ids = torch.tensor([prompt.ids])
        mask = torch.ones_like(ids)
        ends = prompts.stop_tokens
        whole = model.generate(
            ids, attention_mask=mask, max_new_tokens=prompt.room, do_sample=False, eos_token_id=ends, pad_token_id=257
        )
        tokens = [token for token in whole[0, ids.shape[1] :].tolist() if token not in ends]
        found.append(tokenizer.decode(tokens, skip_special_tokens=True))
    return found


def check(folder: Path, layout: str, run: RunDirectory, without: RunDirectory, model: str = "model") -> None:
    assert [one["loss"] for one in metrics(run)] == [one["loss"] for one in metrics(without)]
    assert not without.samples.exists()
    prompts, samples = read_record(run.prompts, Prompts), read_samples(run)
    assert [(one.step, one.number) for one in samples] == [(step, n) for step in (0, 3, 6) for n in range(1, 8)]
    tokenizer = AutoTokenizer.from_pretrained(folder / model)
    plain = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32)
    before = answered_by_transformers(plain, prompts, tokenizer)
    assert [one.answer for one in samples[:7]] == before, layout
    plain.load_state_dict(final_weights(run), strict=False)
    after = answered_by_transformers(plain, prompts, tokenizer)
    assert [one.answer for one in samples[-7:]] == after, layout
    assert len(set(after)) > 3
    assert after != before


@pytest.mark.matrix
def test_answers_are_those_of_transformers_and_change_no_loss(folder: Path) -> None:
    (run, _), (without, _) = written(folder, "one", 7), written(folder, "one", 0)
    train((1, [run, without]))
    check(folder, "one", run, without)
    expected = [prompt.expected for prompt in read_record(run.prompts, Prompts).prompts]
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    assert set(expected) <= {row["output"] for row in rows}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=() if name == "zero 3" else pytest.mark.matrix) for name in LAYOUTS if name != "one"],
)
def test_in_every_layout_and_tier(folder: Path, layout: str) -> None:
    (run, decision), (without, _) = written(folder, layout, 7), written(folder, layout, 0)
    train((decision.plan.workers, [run, without]))
    check(folder, layout, run, without)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "layout"), [("lfm2", "one"), ("lfm2", "zero 3"), ("mixtral", "zero 2")])
def test_padded_rows_and_mixtures(folder: Path, model: str, layout: str) -> None:
    (run, decision), (without, _) = written(folder, layout, 7, model), written(folder, layout, 0, model)
    assert decision.plan.layout.arrangement == ("padded" if model == "lfm2" else "packed")
    train((decision.plan.workers, [run, without]))
    check(folder, layout, run, without, model)


@pytest.mark.matrix
def test_rows_of_a_file_are_asked(folder: Path) -> None:
    rows = [{"instruction": "Say in capitals.", "input": word} for word in ("abc", "hg")]
    write_rows(folder / "asked.jsonl", [*rows, {"prompt": "x", "completion": "y"}])
    run, _ = written(folder, "one", str(folder / "asked.jsonl"))
    train((1, [run]))
    samples = read_samples(run)
    assert [(one.step, one.number, one.expected) for one in samples[:3]] == [(0, 1, None), (0, 2, None), (0, 3, "y")]
    assert "abc" in samples[0].prompt
    assert isinstance(samples[-1], Sample)
