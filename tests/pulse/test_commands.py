"""Every command on a tiny model, as a user runs it: real processes, real files.

Those whose imports are not what a test is about are forked (``forked.tonnage``).
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from forked import tonnage
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.data import PackedDataset
from tonnage.files.reading import read_json


def write_config(folder: Path, **changes: Any) -> Path:
    config: dict[str, Any] = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": 0.1,
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 8},
        "steps": 12,
        "optimizer": {"lr": 3e-3},
        "evaluate": {"every": 6},
        "launch": {"threads": 1},
        "output": str(folder / "run"),
    }
    path = folder / f"config-{len(list(folder.glob('config-*')))}.yaml"
    path.write_text(yaml.safe_dump(config | changes))
    return path


def records(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pulse")
    write_model(folder / "model", llama_config())
    write_rows(folder / "rows.jsonl", alpaca_rows(300))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    """A finished run on two workers in bf16."""
    config = write_config(folder, launch={"workers": 2, "threads": 1}, track="tensorboard")
    result = tonnage("train", config)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "run"


def test_train_leaves_a_whole_run_directory(run: Path) -> None:
    for name in (
        "config.yaml",
        "plan.json",
        "data.json",
        "environment.json",
        "metrics.jsonl",
        "log.txt",
        "rows.json",
        "report.html",
    ):
        assert (run / name).is_file(), name
    assert any((run / "tensorboard").iterdir())
    steps = [record for record in records(run) if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    keys = {"epoch", "grad_norm", "lr", "tokens", "supervised_tokens", "tokens_per_second", "step_seconds", "memory"}
    assert keys <= set(steps[0])
    assert [record["step"] for record in records(run) if "eval_loss" in record] == [0, 6, 12]
    (phases,) = (record["memory_phases"] for record in records(run) if "memory_phases" in record)
    peaks = {phase["phase"]: phase["host"] for phase in phases}
    assert {"build", "load", "optimizer", "first forward", "forward", "backward", "update", "evaluate", "save"} <= set(
        peaks
    )
    assert all(len(peak) == 2 for peak in peaks.values())
    assert peaks["join"] < peaks["optimizer"] < peaks["backward"]
    assert max(steps[-1]["memory"].values()) <= max(max(peak) for peak in peaks.values())
    assert "first forward" in (run / "log.txt").read_text()
    everything = " ".join(path.read_text() for path in run.glob("*.*") if path.suffix != ".bin")
    assert os.environ.get("HOME", "/root") + "/.netrc" not in everything


def test_the_export_is_a_plain_model_with_the_loss_of_the_run(run: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(run / "export")
    assert model.dtype == torch.bfloat16
    assert model.config.use_cache
    assert AutoTokenizer.from_pretrained(run / "export").chat_template
    assert model.generation_config.eos_token_id == 256

    # The last eval_loss, recomputed document by document in plain transformers.
    data = PackedDataset.open(Path(read_json(run / "plan.json")["data"]["validation_path"]))
    total = count = 0.0
    for index in range(data.num_packs):
        pack = data.pack(index)
        start = 0
        for length in pack.lengths.tolist():
            ids = torch.from_numpy(pack.input_ids[start : start + length].astype("int64"))
            supervised = torch.from_numpy(pack.weights[start : start + length].astype("float32"))[1:]
            with torch.no_grad():
                logits = model(ids.unsqueeze(0)).logits[0, :-1].float()
            nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
            total += float((nll * supervised).sum())
            count += float(supervised.sum())
            start += length
    last = [record["eval_loss"] for record in records(run) if "eval_loss" in record][-1]
    assert total / count == pytest.approx(last, abs=5e-3)  # attention is rounded to bf16 in another order


def test_eval_agrees_with_the_last_evaluation(run: Path, folder: Path) -> None:
    data = PackedDataset.open(Path(read_json(run / "plan.json")["data"]["validation_path"]))
    all_rows = (folder / "rows.jsonl").read_text().splitlines()
    documents = [int(document) for index in range(data.num_packs) for document in data.pack(index).documents]
    rows = [all_rows[data.where(document)[1] - 1] for document in documents]
    held_out = folder / "held_out.jsonl"
    held_out.write_text("\n".join(rows) + "\n")
    arguments = ("--data", held_out, "--max-length", "128", "--exact-match", "4", "--max-new-tokens", "8", "--json")
    result = tonnage("eval", run, *arguments)
    assert result.returncode == 0, result.stderr
    figures = json.loads(result.stdout)
    last = [record["eval_loss"] for record in records(run) if "eval_loss" in record][-1]
    assert figures["supervised_tokens"] == data.supervised_tokens
    assert figures["loss"] == pytest.approx(last, abs=1e-4)
    assert figures["perplexity"] == pytest.approx(math.exp(figures["loss"]))
    assert figures["answers"] == 4


def test_plan_and_inspect_and_dry_run_write_nothing(folder: Path) -> None:
    config = write_config(folder, output=str(folder / "never"))
    commands: list[list[str | Path]] = [
        ["plan", config],
        ["plan", config, "--json"],
        ["inspect", config],
        ["train", config, "--dry-run"],
    ]
    for command in commands:
        result = tonnage(*command)
        assert result.returncode == 0, result.stderr
    assert not (folder / "never").exists()
    plan = json.loads(tonnage("plan", config, "steps=3", "--json").stdout)
    assert plan["num_steps"] == 3


def test_generate_chat_and_export_work_on_a_run(run: Path, folder: Path) -> None:
    result = tonnage("generate", run, "--prompt", "Say in capitals.", "--max-new-tokens", "4")
    assert result.returncode == 0, result.stderr
    result = tonnage("export", run, folder / "exported", "--dtype", "fp32")
    assert result.returncode == 0, result.stderr
    wide = AutoModelForCausalLM.from_pretrained(folder / "exported")
    assert wide.dtype == torch.float32
    narrow = AutoModelForCausalLM.from_pretrained(run / "export")
    for (name, a), b in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name
    result = tonnage("export", run, folder / "exported")
    assert result.returncode == 2
    assert "not empty" in result.stderr


def test_a_second_run_into_the_same_directory_is_refused(run: Path, folder: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    result = tonnage("train", write_config(folder))
    assert result.returncode == 2
    assert str(run) in result.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_ctrl_c_saves_a_model_and_says_how_to_go_on(folder: Path) -> None:
    output = folder / "interrupted"
    config = write_config(folder, output=str(output), steps=5000)
    process = subprocess.Popen(
        [sys.executable, "-m", "tonnage", "train", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not (output / "metrics.jsonl").exists() or len(records(output)) < 3:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 3, err
    assert f"tonnage train --resume {output}" in out.replace("\n", "")
    assert "Traceback" not in err
    AutoModelForCausalLM.from_pretrained(output / "export")
    steps = [record["step"] for record in records(output) if "loss" in record]
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == [f"step-{steps[-1]:08d}"]


def test_bad_input_is_refused_with_every_problem_before_any_weight(folder: Path) -> None:
    broken = folder / "broken"
    write_model(broken, llama_config())
    (broken / "model.safetensors").unlink()
    config = write_config(folder, model=str(broken), output=str(folder / "refused"))
    result = tonnage("train", config, "data.max_length=4096", "batch.sequences=64")
    assert result.returncode == 2
    assert "no weights" in result.stderr
    assert "Traceback" not in result.stderr

    config = write_config(folder, output=str(folder / "refused"))
    result = tonnage("train", config, "data.max_length=4096")
    assert result.returncode == 2
    assert "4096" in result.stderr
    assert "512" in result.stderr

    result = tonnage("train", config, "optimiser.lr=1", "stepz=3", "data.train=nowhere.jsonl")
    assert result.returncode == 2
    for expected in ("optimizer", "steps", "nowhere.jsonl"):
        assert expected in result.stderr

    result = tonnage(
        "train", config, "launch.workers=400", "batch.sequences=400", "data.validation=0", "evaluate.every=0"
    )
    assert result.returncode == 2
    assert "400 workers" in result.stderr

    empty = folder / "empty.jsonl"
    empty.write_text("")
    silent = write_rows(folder / "silent.jsonl", [{"instruction": "Say", "input": "", "output": ""}] * 5)
    for rows in (empty, silent):
        result = tonnage("train", config, f"data.train={rows}")
        assert result.returncode == 2, result.stdout
        assert "Traceback" not in result.stderr
        assert rows.name in result.stderr
    assert not (folder / "refused").exists()


def test_vocabulary_mismatch_is_refused(folder: Path) -> None:
    small = folder / "small"
    write_model(small, llama_config(vocab_size=100))
    result = tonnage("train", write_config(folder, model=str(small), output=str(folder / "refused")))
    assert result.returncode == 2
    assert "257" in result.stderr
    assert "100" in result.stderr
