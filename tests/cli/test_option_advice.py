"""Advice of commands that take no config names their options, and no key of one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import entry
import tiny
from tonnage.cli.option_advice import with_options
from tonnage.errors import Problem, UserError

EVAL = {"--data", "--max-length", "--template", "--format", "--allow-unexpected"}
GENERATE = {"--file", "--template", "--allow-unexpected"}


@pytest.mark.parametrize(
    ("change", "of_eval", "of_generate"),
    [
        ("data.max_length=512", "--max-length 512", "shorten the rows, or take them out of the file"),
        (
            "data.max_length: 512, or data.over_length: drop (or truncate, split)",
            "--max-length 512",
            "shorten the rows, or take them out of the file",
        ),
        ("data.over_length: drop (or truncate, split)", *["shorten these rows, or take them out of the file"] * 2),
        ("set eos_token in x, or set data.template: chatml", *["set eos_token in x, or --template chatml"] * 2),
        ("mend them, or set data.on_bad_row: skip (they are counted)", "mend them", "mend them"),
        ("give all, or, to have them initialised, allow_missing: [a.*, b]", "give all", "give all"),
        ("go on, allow_unexpected: [a.*, b]", *["go on, --allow-unexpected 'a.*' --allow-unexpected b"] * 2),
        ("add the weights, or set `init: random` to train from scratch", "add the weights", "add the weights"),
        (
            "data.train: {path: rows.jsonl, format: sharegpt}",
            "--format sharegpt",
            "rename the fields of the rows to those of a form that is known",
        ),
        (
            "learn from both answers: objective: dpo; or data.train: {path: x, format: a, columns: {b: c}}",
            *["write the answers to a file of their own, as prompt and completion"] * 2,
        ),
        ("set split: train for this source", *["download it, and give the file of that split"] * 2),
        ("change its mode, or name another place", *["change its mode, or name another place"] * 2),
    ],
)
def test_keys_become_options(change: str, of_eval: str, of_generate: str) -> None:
    error = UserError(Problem("found", "needed", change, "data.max_length"))
    (evaluated,), (generated,) = (with_options(error, options).problems for options in (EVAL, GENERATE))
    assert (evaluated.change, evaluated.where) == (of_eval, "--max-length")
    assert (generated.change, generated.where) == (of_generate, "--file")


def test_an_evaluation_of_rows_that_are_too_long_names_its_option(tmp_path: Path) -> None:
    model = tiny.write_model(tmp_path / "model", tiny.llama_config())
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * 100, "completion": "b"}])
    words = ["eval", str(model), "--data", str(rows), "--template", "plain", "--exact-match", "0"]
    said = entry.refusal(*words, "--max-length", "64")
    (advised,) = [line.partition("change: ")[2] for line in said.splitlines() if "change: " in line]
    assert "data." not in said
    assert entry.tonnage(*words, *advised.split()).status in (None, 0)


def test_an_evaluation_of_a_run_without_rows_is_an_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps({"model": "x", "data": {"train": "y.jsonl"}}))
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    for more in ([], ["--json"]):
        said = entry.refusal("eval", str(run), *more)
        assert f"tonnage eval {run} --data FILE" in said
    shutil.rmtree(run)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--limit", "3"], "--limit without --tasks"),
        (["--data", "rows.jsonl", "--chat"], "--chat without --tasks"),
        (["--data", "rows.jsonl", "--tasks", "gsm8k"], "--tasks beside --data"),
    ],
)
def test_no_option_of_eval_is_passed_over(words: list[str], found: str) -> None:
    assert found in entry.refusal("eval", "some/model", *words)
