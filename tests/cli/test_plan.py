"""``tonnage plan``: of a config, of a model alone, for other hardware; and what is said after a run."""

from __future__ import annotations

import io
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import LlamaConfig

import entry
from doctor.machines import install_smi
from planning.profiles import DATA, MACHINE, MODEL, config
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.cli.plan import plan, show_instants, show_outcome, show_plan
from tonnage.config import Config
from tonnage.decide.hardware import degrees
from tonnage.errors import UserError
from tonnage.planning.ladder import LADDER
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import SAFETY
from tonnage.planning.planner import make_plan
from tonnage.planning.scales import Scales
from tonnage.planning.words import size
from tonnage.rundir.directory import RunDirectory


def test_the_zero_table(capsys: pytest.CaptureFixture[str]) -> None:
    plan(None, zero_table="7.5B, 1T")
    said = capsys.readouterr().out
    assert "31.4" in said
    assert "1T parameters" in said


@pytest.mark.matrix
def test_a_model_alone_for_other_hardware(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llama_config().save_pretrained(tmp_path)  # no weights, no tokenizer, no data
    words = ["data.max_length=128", "batch.sequences=64"]
    plan(str(tmp_path), words, hardware="8xH100", json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["choice"]["layout"]["workers"] == 8
    assert "catalogue" in found["machine"]
    plan(str(tmp_path), [*words, "launch.workers=2"], hardware="2xRTX4090", json=True)
    assert json.loads(capsys.readouterr().out)["choice"]["layout"]["workers"] == 2


@pytest.mark.slow
def test_rows_beside_a_model_are_planned_with_and_not_supposed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "model", llama_config())
    write_rows(tmp_path / "rows.jsonl", list(alpaca_rows(30)))
    words = ["data={train: rows.jsonl, template: plain, max_length: 128}", "epochs=1"]
    plan("model", words, json=True)
    found = json.loads(capsys.readouterr().out)["data"]
    assert found["train_path"]
    assert 0 < found["num_tokens"] < 30 * 128
    with pytest.raises(UserError, match=r"missing\.jsonl"):
        plan("model", ["data.train=missing.jsonl"])


@pytest.mark.parametrize(
    ("words", "hardware", "found", "change"),
    [
        (["launch.workers=3"], "2xRTX4090", "3 workers on a machine with 2 GPUs", "launch.workers=2"),
        (["launch.workers=2"], "RTX4090", "2 workers on a machine with 1 GPU", "launch.workers=1"),
        (
            ["launch.workers=2", "parallel.tensor=2"],
            "RTX4090",
            "2 workers on a machine with 1 GPU",
            "parallel.tensor=1 launch.workers=1",
        ),
        (
            ["launch.workers=3", "parallel.context=3"],
            "2xRTX4090",
            "3 workers on a machine with 2 GPUs",
            "parallel.context=1 launch.workers=2",
        ),
        (
            ["launch={with: slurm, nodes: 2, workers: 8, hardware: 2xH100}"],
            None,
            "4 workers on a machine with 2 GPUs",
            "launch.workers=4, or more in launch.nodes",
        ),
        (
            ["launch={with: slurm, nodes: 2, workers: 8, gpus_per_node: 4}"],
            None,
            "launch.gpus_per_node is 4, and a plan for ",
            "launch.hardware=4xH100",
        ),
        (
            ["launch={with: ray, workers: 2, gpus_per_worker: 1}"],
            None,
            "gpus_per_worker is 1",
            "launch.hardware=2xH100",
        ),
    ],
)
def test_a_worker_has_a_device_of_its_own(
    tmp_path: Path, words: list[str], hardware: str | None, found: str, change: str
) -> None:
    llama_config().save_pretrained(tmp_path)
    with pytest.raises(UserError) as caught:
        plan(str(tmp_path), ["data.max_length=128", "batch.sequences=64", *words], hardware=hardware)
    (problem,) = caught.value.problems
    assert found in problem.found
    assert problem.change is not None
    assert change in problem.change


@pytest.mark.parametrize(
    ("words", "hardware"),
    [
        (["memory.budget.host=1GB"], "cpu:4c:8GB"),
        (["memory.budget.host=1GB", "memory.budget.device=1GB"], "cpu:4c:8GB"),
        (["launch.workers=2", "parallel.pipeline=2"], "RTX4090"),
        (["optimizer.kind=muon", "memory.gradient_tier=disk"], "RTX4090"),
        (["optimizer.kind=muon", "memory.parameter_tier=host"], "RTX4090"),
    ],
)
def test_advice_that_is_taken_ends_the_refusal(tmp_path: Path, words: list[str], hardware: str) -> None:
    llama_config(num_hidden_layers=1).save_pretrained(tmp_path)
    words = ["data.max_length=128", "batch.sequences=64", *words]
    with pytest.raises(UserError) as caught:
        plan(str(tmp_path), words, hardware=hardware)
    (problem,) = caught.value.problems
    assert problem.change is not None
    plan(str(tmp_path), [*words, *problem.change.partition(",")[0].split()], hardware=hardware)


@pytest.mark.slow
def test_what_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"(?s)least that the config allows.*92% of 100 MB"):
        plan(str(tmp_path), ["data.max_length=128", "memory.budget.device=100MB", "adapter=none"])


@pytest.mark.matrix
def test_what_is_free_on_the_devices_now_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tonnage.doctor.cache.load_machine", lambda directory: parse_hardware("4xRTX4090"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    free = 64 << 30  # of the host's memory
    monkeypatch.setattr("tonnage.host.control_groups.free_memory", lambda: free)
    llama_config().save_pretrained(tmp_path)
    words = ["data.max_length=128", "launch.workers=2"]

    def budget() -> dict[str, Any]:
        plan(str(tmp_path), words, json=True)
        return dict(json.loads(capsys.readouterr().out)["budget"])

    assert "RTX4090" in budget()["what"]  # nobody knows
    install_smi(tmp_path / "bin", free_mib={"0": 20000, "1": 9000, "2": 100, "3": 24000})
    told = {"memory": 9000 << 20, "what": "9.44 GB free now", "host": free / 2, "locked": None, "disk": None}
    told["host_what"] = "free now: 68.7 GB, shared by 2 workers"
    assert told.items() <= budget().items()
    install_smi(tmp_path / "bin", free_mib={"0": 300, "1": 9000})
    with pytest.raises(UserError, match="315 MB free now"):
        plan(str(tmp_path), words)


@pytest.mark.matrix
def test_a_model_alone_is_shown_in_three_ways_to_train_it(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    words = ("plan", str(tmp_path), "data.max_length=128", "batch.sequences=8", "--hardware", "cpu:2c:24GB")
    ended = entry.tonnage(*words)
    assert ended.status in (None, 0), ended.err
    table = ended.out.split("Ways to train it")[1].split("Memory through the run")[0]
    rows = [line for line in table.splitlines() if line.startswith(("full weights", "LoRA"))]
    assert [row.split("  ")[0] for row in rows] == ["full weights", "LoRA", "LoRA on 4 bits (nf4)"]
    assert all("micro-batch" in row for row in rows)
    told = json.loads(entry.tonnage(*words, "--json").out)
    full, lora, nf4 = told["ways"]
    assert [one["override"] for one in told["ways"]] == ["adapter=none", "adapter.rank=32", "adapter.quantize=nf4"]
    assert full["layout"] == told["choice"]["layout"]
    assert full["step_seconds"] == told["choice"]["seconds"]["total"]
    assert nf4["tokens_per_second"] == pytest.approx(told["tokens_per_step"] / nf4["step_seconds"])
    for one in (lora, nf4):  # what the override makes of it
        alone = json.loads(entry.tonnage(*words, one["override"], "--json").out)
        assert "ways" not in alone, "what is trained was said"
        assert one["layout"] == alone["choice"]["layout"]
        assert one["step_seconds"] == alone["choice"]["seconds"]["total"]
    assert "Ways to train it" not in entry.tonnage(*words, "adapter.rank=8").out
    assert "Ways to train it" not in entry.tonnage(*words, "train=[model.layers.1.*]").out


@pytest.mark.matrix
def test_where_full_weights_do_not_fit_the_ways_say_what_does(tmp_path: Path) -> None:
    wide: dict[str, Any] = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8}
    llama_config(**wide).save_pretrained(tmp_path)
    words = ["plan", str(tmp_path), "data.max_length=128", "batch.sequences=8", "--hardware", "cpu:2c:24GB"]
    exact = ["memory.moments=fp32", *(f"memory.{tier}_tier=device" for tier in ("optimizer", "gradient", "parameter"))]
    words += [*exact, "memory.budget.device=1.1GB"]
    ended = entry.tonnage(*words)
    assert ended.status == 2
    (row,) = (line for line in ended.out.splitlines() if line.startswith("full weights"))
    assert re.search(r"does not fit: 1\.\d+ GB of 1\.01", row)
    assert "change: adapter.rank=32: LoRA fits, with " in ended.err
    assert entry.tonnage(*words, "adapter.rank=32").status in (None, 0)


@pytest.mark.matrix
def test_why_prints_the_ladder(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    words = ["plan", str(tmp_path), "data.max_length=128", "batch.sequences=6", "--hardware", "cpu:2c:24GB"]
    words += ["adapter=none", "--why"]
    table = entry.tonnage(*words).out.partition("What is given up for memory")[2]
    rows = [next(line for line in table.splitlines() if line.startswith(rung.name)) for rung in LADDER]
    assert "chosen: " in rows[0]
    assert "not to be had" in rows[1], "a CPU's host is its device"
    told = json.loads(entry.tonnage(*words, "--json").out)
    assert [row["rung"] for row in told["ladder"][: len(LADDER)]] == [rung.name for rung in LADDER]
    (chosen,) = (row for row in told["ladder"] if row["chosen"])
    assert chosen["step_seconds"] == told["choice"]["seconds"]["total"]


@pytest.mark.slow
def test_the_largest_is_solved_for_and_printed(tmp_path: Path) -> None:
    llama_config().save_pretrained(tmp_path)
    words = ["plan", str(tmp_path), "data.max_length=128", "batch.sequences=6", "--hardware", "cpu:2c:24GB"]
    ended = entry.tonnage(*words, "--largest", "micro_batch")
    assert ended.out.startswith("memory.micro_batch=6 is the largest that fits:"), ended.err
    assert "more is not to be had: the packs of a step" in ended.out
    one, two = (
        json.loads(entry.tonnage(*words, f"memory.micro_batch={number}", "adapter=none", "--json").out)["choice"]
        for number in (1, 2)
    )
    between = sum(max(sum(at["bytes"].values()) for at in choice["instants"]) for choice in (one, two)) / 2
    room = (between + one["runtime_bytes"]) / SAFETY
    pinned = ["memory.recompute=none", f"memory.budget.device={round(room)}"]
    told = json.loads(entry.tonnage(*words, *pinned, "--largest", "micro_batch", "--json").out)
    assert (told["key"], told["value"], told["limit"]) == ("memory.micro_batch", 1, 6)
    assert told["peak_bytes"] <= told["usable_bytes"] < told["next"]["peak_bytes"]
    assert told["next"]["value"] == 2
    said = entry.tonnage(*words, *pinned, "--largest", "micro_batch").out
    assert re.search(r"memory\.micro_batch=2 would take [\d.]+ MB of [\d.]+ MB", said)
    refusal = entry.refusal(*words, "--largest", "lr")
    assert "rank, max_length, micro_batch" in refusal


def test_nothing_to_plan_is_said() -> None:
    with pytest.raises(UserError, match=r"tonnage plan CONFIG\|MODEL"):
        plan(None)


def shown(show: Any, *arguments: Any) -> str:
    out = io.StringIO()
    show(*arguments, Console(width=160, file=out))
    return out.getvalue()


def test_a_plan_shows_its_peak_as_a_bar_as_wide_as_the_budget() -> None:
    made = make_plan(config(launch={"workers": 2}), Scales(MODEL, DATA, MACHINE), threads_per_worker=1)
    said = shown(show_plan, made)
    (bar,) = (line.strip() for line in said.splitlines() if "█" in line)
    assert len(bar) == 60
    share = made.choice.peak_bytes / made.budget.memory
    assert bar.count("█") == pytest.approx(60 * share, abs=1)
    assert f"at the {made.choice.peak.name}" in said
    assert "ZeRO" in said


def test_kernels_that_are_off_are_told_with_what_the_seconds_are_worth() -> None:
    def told(hardware: Machine, **changes: Any) -> str:
        return shown(show_plan, make_plan(config(**changes), Scales(MODEL, DATA, hardware), threads_per_worker=1))

    assert "kernels" not in told(MACHINE)
    said = " ".join(told(MACHINE, kernels={"norms": "off", "adamw": "off"}).split())
    assert "kernels norms, adamw off: torch's own instead." in said
    assert "rates were measured with all kernels on" in said
    on_gpu = " ".join(told(parse_hardware("A100-80GB"), kernels={"norms": "off"}).split())
    assert "norms off: torch's own instead, of those that a GPU has; seconds are counted" in on_gpu


def test_every_instant_of_a_run_is_a_bar() -> None:
    made = make_plan(config(launch={"workers": 2}), Scales(MODEL, DATA, MACHINE), threads_per_worker=1)
    lines = shown(show_instants, made.choice).splitlines()[1:]
    assert [line.split("  ")[0].strip() for line in lines] == [instant.name for instant in made.choice.instants]
    longest = max(lines, key=lambda line: line.count("█"))
    assert longest.count("█") == 60
    assert longest.strip().startswith(made.choice.peak.name)
    assert size(made.choice.peak_bytes) in longest
    assert lines[0].count("█") < 60
    assert lines[0].strip().startswith("load")


def test_a_price_makes_a_cost() -> None:
    made = make_plan(config(epochs=2), Scales(MODEL, DATA, MACHINE), threads_per_worker=1)
    hours = made.choice.seconds.total * made.num_steps / 3600
    assert f"{1e6 * hours:,.2f} in all, {5e5 * hours:,.2f} an epoch" in shown(partial(show_plan, price=1e6), made)
    assert "an epoch, at" not in shown(show_plan, made)


def test_an_outcome_is_compared_with_its_plan(tmp_path: Path) -> None:
    made = make_plan(config(), Scales(MODEL, DATA, MACHINE), threads_per_worker=1)
    run = RunDirectory(tmp_path)
    planned = made.choice.peak_bytes
    records = [
        {"step": step, "loss": 1.0, "step_seconds": seconds, "memory": {"host_peak": round(planned * 1.25)}}
        for step, seconds in ((1, 99.0), (2, 99.0), (3, 2.0), (4, 4.0), (5, 3.0))
    ]
    run.metrics.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 6, "lo')
    said = shown(partial(show_outcome, since=2), run, made)
    assert "(+25%)" in said
    outcome = json.loads((tmp_path / "outcome.json").read_text())
    assert outcome["measured"]["step_seconds"] == 3.5  # the median without the first
    assert outcome["planned"]["memory_bytes"] == round(planned)
    assert "disk" not in said


def test_what_went_over_the_disk_is_shown_beside_what_it_can_do(tmp_path: Path) -> None:
    made = make_plan(config(memory={"optimizer_tier": "disk"}), Scales(MODEL, DATA, MACHINE), threads_per_worker=1)
    run = RunDirectory(tmp_path)
    moved = {"read_bytes": 3_000_000, "written_bytes": 5_000_000, "waited_seconds": 0.5}
    record = {"loss": 1.0, "step_seconds": 4.0, "memory": {"host_peak": 1}, "disk": moved}
    run.metrics.write_text("".join(json.dumps(record | {"step": step}) + "\n" for step in (1, 2)))
    said = shown(show_outcome, run, made)
    rate = MACHINE.disk_mixed_bytes_per_second
    assert f"3 MB read and 5 MB written a step and worker, 2 MB a second of the {size(rate)}" in said
    assert "waited 500 ms" in said


def test_only_tensor_axes_that_divide_a_node_are_weighed() -> None:
    parallel = {"parallel": {"tensor": "auto"}, "launch": {"workers": 8}, "batch": {"sequences": 8}, "steps": 1}
    fields = {"model": "m", "data": {"train": "rows.jsonl", "max_length": 8}, "output": "run"} | parallel
    heads: dict[str, Any] = {
        "num_attention_heads": 24,
        "num_key_value_heads": 24,
        "hidden_size": 24 * 64,
        "intermediate_size": 4608,
    }
    found = degrees(Config.model_validate(fields), LlamaConfig(**heads), parse_hardware("8xA100-80GB"))
    assert found == [1, 2, 4, 8]  # of 1, 2, 3, 4, 6, 8
