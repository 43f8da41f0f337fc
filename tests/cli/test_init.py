"""``tonnage init``: rows of six forms become a config that trains as it is, and says of each line why it is so."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

import entry
import forked
from entry import refusal
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.config import read_config
from tonnage.decide.decision import asked
from tonnage.planning.words import run_time, step_time

BUDGET = "memory.budget.device=8GB"
"""What is free on this machine changes from one plan to the next."""
ROWS = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = llama_config(num_hidden_layers=1, max_position_embeddings=1024, initializer_range=0.2)
    return write_model(tmp_path_factory.mktemp("models") / "llama", config)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def turns(row: dict[str, str], who: str, what: str, names: tuple[str, str]) -> list[dict[str, str]]:
    """A conversation of two questions and answers."""
    asked, answered = names
    said = ((asked, row["instruction"]), (answered, "Say what?"), (asked, row["input"]), (answered, row["output"]))
    return [{who: name, what: text} for name, text in said]


def as_parquet(rows: list[dict[str, str]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path := Path("rows.parquet"))
    return path


def as_lines(change: Callable[[dict[str, str]], dict[str, Any]]) -> Callable[[list[dict[str, str]]], Path]:
    return lambda rows: write_rows(Path("rows.jsonl"), [change(row) for row in rows])


FORMS: dict[str, Callable[[list[dict[str, str]]], Path]] = {
    "alpaca": as_lines(dict),
    "messages": as_lines(lambda row: {"messages": turns(row, "role", "content", ("user", "assistant"))}),
    "sharegpt": as_lines(lambda row: {"conversations": turns(row, "from", "value", ("human", "gpt"))}),
    "completion": as_lines(lambda row: {"prompt": row["input"], "completion": row["output"]}),
    "text": as_lines(lambda row: {"text": row["input"] + " " + row["output"]}),
    "parquet": as_parquet,
}


def init(*words: str | Path, **more: Any) -> str:
    """The text of the config that is written."""
    ended = entry.tonnage("init", *map(str, words), **more)
    assert ended.status in (0, None), ended.out + ended.err
    return Path("config.yaml").read_text()


def comments(text: str) -> dict[str, str]:
    """The comment above each key, in one line; the heading is that of nothing."""
    found: dict[str, str] = {}
    block: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#"):
            block.append(line.strip().removeprefix("# "))
            continue
        name = line.strip().split(":")[0]
        section = section if line.startswith(" ") else ""
        if block:
            found[f"{section}{name}"] = " ".join(block)
        block = []
        section = section or f"{name}."
    return found


MARKS: tuple[Any, ...] = ((), pytest.mark.slow, pytest.mark.matrix)


@pytest.mark.slow
@pytest.mark.parametrize("form", [pytest.param(one, marks=MARKS[min(number, 2)]) for number, one in enumerate(FORMS)])
def test_rows_of_any_form_become_a_config_that_trains(form: str, model: Path) -> None:
    rows = FORMS[form](alpaca_rows(ROWS))
    text = init(model, rows, BUDGET)
    said = comments(text)
    config = read_config("config.yaml")

    plan = asked("config.yaml", [], None).plan()
    seconds, tokens, steps = plan.choice.seconds.total, plan.tokens_per_step, plan.num_steps
    data = json.loads(entry.tonnage("inspect", "config.yaml", "--json").out)["account"]

    assert f"{steps:,} steps ({plan.num_packs / plan.data.num_packs:.2f} epochs)" in said["epochs"]
    course = f"{tokens * steps:,} tokens; {step_time(seconds)} a step, {run_time(seconds * steps)} in all"
    assert course in said["epochs"]
    assert f"{tokens:,} tokens a step" in said["batch"]
    assert plan.memory_in_words in said["adapter"]
    assert f"after {plan.warmup_steps:,} steps of warm-up" in said["optimizer.lr"]
    assert f"{plan.model.num_parameters:,} parameters" in said["model"]
    assert plan.machine in said["model"]
    total, source = data["total"], data["sources"][0]
    assert f"{total['rows_read']:,} rows of form {'alpaca' if form == 'parquet' else form}: " in said["data.train"]
    assert f"{total['tokens']['read']:,} tokens, {total['supervised']['read']:,} of them" in said["data.train"]
    assert (
        f"{total['rows_validation']} rows ({data['validation']['tokens']:,} tokens) are set" in said["data.validation"]
    )
    lengths = source["lengths"]
    assert (
        f"at most {lengths['percentiles']['p99']} tokens, the longest has {lengths['longest']}; 0 of"
        in said["data.max_length"]
    )
    assert data["template_reason"] in said["data.template"]
    assert config.data.train_on == {"text": "all"}.get(form, "assistant")

    trained = forked.tonnage("train", "config.yaml", "steps=2")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    assert Path(config.output, "export/model.safetensors").exists()


@pytest.mark.slow
def test_what_is_said_is_kept_and_the_rest_follows(model: Path) -> None:
    rows = FORMS["alpaca"](alpaca_rows(ROWS))
    text = init(model, rows, "data.max_length=400", "batch.sequences=3", "adapter={rank: 4}", "steps=7", "seed=3")
    tree, said = yaml.safe_load(text), comments(text)
    assert (tree["data"]["max_length"], tree["batch"], tree["steps"], tree["seed"]) == (400, {"sequences": 3}, 7, 3)
    assert tree["adapter"] == {"rank": 4}
    assert tree["optimizer"]["lr"] == 2e-4
    assert "epochs" not in tree
    assert all(said[key].startswith("as given") for key in ("data.max_length", "batch", "adapter", "steps"))


@pytest.mark.slow
def test_equal_and_unreadable_rows_are_told(model: Path) -> None:
    rows = alpaca_rows(300)
    write_rows(path := Path("rows.jsonl"), [*rows, *rows[:5], {"instruction": "no answer", "output": ""}])
    text = init(model, path)
    tree, said = yaml.safe_load(text)["data"], comments(text)
    assert (tree["duplicates"], tree["on_bad_row"]) == ("drop", "skip")
    assert re.match(r"[1-9]\d* of 306 rows equal an earlier one", said["data.duplicates"])
    assert "1 of 306 rows cannot be trained on" in said["data.on_bad_row"]
    write_rows(path, [*rows[:20], {"instruction": "no answer", "output": ""}])
    assert "1 of 21 rows are bad" in refusal("init", str(model), str(path), "--output", "other.yaml")
    assert not Path("other.yaml").exists()


@pytest.mark.matrix
def test_what_is_adapted_gets_no_template_of_new_tokens(model: Path) -> None:
    rows = FORMS["messages"](alpaca_rows(ROWS))
    tree = yaml.safe_load(init(model, rows, BUDGET))  # all weights, the embedding among them
    assert tree["data"]["template"] == "auto"
    Path("config.yaml").unlink()
    assert "chatml" in comments(init(model, rows, BUDGET, "--for", "chat"))["data.template"]
    Path("config.yaml").unlink()
    text = init(model, rows, BUDGET, "adapter={rank: 4}")
    assert yaml.safe_load(text)["data"]["template"] == "plain"
    assert comments(text)["data.template"].startswith("others need tokens that the model lacks")


@pytest.mark.slow
def test_few_rows_that_are_much_longer_are_left_out_and_counted(model: Path) -> None:
    rows = alpaca_rows(400)
    for row in rows[:2]:
        row["input"] = "abcd " * 500
    text = init(model, write_rows(Path("rows.jsonl"), rows))
    tree, said = yaml.safe_load(text)["data"], comments(text)
    assert (tree["max_length"], tree["over_length"]) == (512, "drop")
    assert "2 of 400 rows are over 512" in said["data.max_length"]
    assert "2 rows are longer than 512 tokens" in said["data.over_length"]


@pytest.mark.matrix
def test_long_texts_are_split(model: Path) -> None:
    rows = [{"text": row["input"] * 60} for row in alpaca_rows(20)]
    tree = yaml.safe_load(init(model, write_rows(Path("rows.jsonl"), rows)))["data"]
    assert (tree["max_length"], tree["over_length"], tree["train_on"]) == (1024, "split", "all")


@pytest.mark.matrix
def test_what_does_not_fit_whole_is_adapted(tmp_path: Path) -> None:
    wide = llama_config(hidden_size=768, intermediate_size=3072, num_hidden_layers=6, max_position_embeddings=512)
    model = write_model(tmp_path / "wide", wide)
    rows = FORMS["alpaca"](alpaca_rows(ROWS))
    words = ["data.max_length=400", "batch.sequences=1"]

    def adapter(budget: str) -> tuple[Any, str]:
        text = init(model, rows, *words, f"memory.budget.device={budget}")
        Path("config.yaml").unlink()
        return yaml.safe_load(text)["adapter"], comments(text)["adapter"]

    found, said = adapter("8GB")
    assert found == "none"
    assert said.startswith("full weights, for which there is room with fp32 moments and nothing on disk; ")
    found, said = adapter("1060MB")
    assert found == {"rank": 32}
    assert re.match(r"LoRA, as there is no room for full weights \([\d,.]+ [MG]B", said)
    assert " times as long with full weights, if it had room" in said
    found, said = adapter("770MB")
    assert found == {"rank": 32, "quantize": "nf4"}
    assert re.match(
        r"LoRA on 4 bits \(nf4\), as there is no room for full weights \(.*\) and LoRA \([\d,.]+ [MG]B", said
    )
    refused = refusal("init", str(model), str(rows), *words, "memory.budget.device=100MB")
    assert refused.count("the least that the config allows") == 1


@pytest.mark.slow
def test_a_run_takes_no_longer_than_it_may(model: Path) -> None:
    rows = FORMS["alpaca"](alpaca_rows(ROWS))
    enough = comments(init(model, rows, BUDGET, "--time", "9h"))["epochs"]
    assert "9 hours are enough" in enough
    plan = json.loads(entry.tonnage("plan", "config.yaml", "--json").out)
    hours = round(plan["num_steps"] * plan["choice"]["seconds"]["total"] / 2 / 3600, 6)
    Path("config.yaml").unlink()
    text = init(model, rows, BUDGET, "--time", f"{hours:.6f}h")
    steps = yaml.safe_load(text)["steps"]
    assert "epochs" not in yaml.safe_load(text)
    assert f"as many as {hours:g} hours allow" in comments(text)["steps"]
    plan = json.loads(entry.tonnage("plan", "config.yaml", "--json").out)
    assert plan["num_steps"] == steps == int(3600 * hours / plan["choice"]["seconds"]["total"])


@pytest.mark.matrix
def test_it_may_run_elsewhere(model: Path) -> None:
    rows = FORMS["alpaca"](alpaca_rows(200))
    text = init(model, rows, "--hardware", "2x2xV100-16GB", "--output", "config.yaml")
    tree = yaml.safe_load(text)
    launch = {"with": "slurm", "nodes": 2, "workers": "auto", "gpus_per_node": 2, "hardware": "2xV100-16GB"}
    assert tree["launch"] == launch
    assert comments(text)["launch.workers"].startswith("4, one for each GPU")
    assert tree["precision"] == "fp16"
    plan = json.loads(entry.tonnage("plan", "config.yaml", "--json").out)
    assert step_time(plan["choice"]["seconds"]["total"]) in comments(text)["epochs"]
    Path("config.yaml").unlink()
    assert yaml.safe_load(init(model, rows, "--hardware", "4xA100-80GB"))["launch"] == {"workers": "auto"}
    Path("config.yaml").unlink()
    on_cpus = yaml.safe_load(init(model, rows, "--hardware", "2xcpu:8c:16GB"))["launch"]
    assert (on_cpus["nodes"], on_cpus["cpus_per_worker"], on_cpus["hardware"]) == (2, 8, "cpu:8c:16GB")


@pytest.mark.matrix
def test_a_terminal_is_asked_what_nobody_can_see(model: Path) -> None:
    rows = FORMS["messages"](alpaca_rows(ROWS))
    asked_nothing = init(model, rows, BUDGET)
    Path("config.yaml").unlink()
    assert init(model, rows, BUDGET, terminal=True, typed=True, said="\n\n\n") == asked_nothing
    Path("config.yaml").unlink()
    said = "poems\ntext\n4xA100-80GB\nsoon\n9h\n"
    ended = entry.tonnage("init", str(model), str(rows), BUDGET, terminal=True, typed=True, said=said)
    assert ended.status in (0, None), ended.err
    assert ended.out.count("What is it for?") == ended.out.count("How long may it take?") == 2
    assert ended.out.count("Where will it run?") == 1
    tree = yaml.safe_load(Path("config.yaml").read_text())
    assert (tree["data"]["train_on"], tree["data"]["template"]) == ("all", "plain")
    assert tree["launch"]["workers"] == "auto"


def test_no_file_is_overwritten(model: Path) -> None:
    Path("config.yaml").write_text("mine")
    rows = FORMS["alpaca"](alpaca_rows(ROWS))
    assert "is there already" in refusal("init", str(model), str(rows))
    assert Path("config.yaml").read_text() == "mine"
    assert "no directory" in refusal("init", str(model), str(rows), "--output", "nowhere/config.yaml")


@pytest.mark.slow
def test_what_is_to_be_trained_may_be_left_open(model: Path) -> None:
    rows = FORMS["alpaca"](alpaca_rows(ROWS))
    left_open = init(model, rows, BUDGET, "adapter=auto")
    Path("config.yaml").unlink()
    assert left_open == init(model, rows, BUDGET)


def test_mistakes_are_named_by_what_was_written(model: Path) -> None:
    rows = FORMS["alpaca"](alpaca_rows(ROWS))
    assert re.search(r"data\.train=.*nowhere\.jsonl", refusal("init", str(model), "nowhere.jsonl"))
    assert "optimizer.lrr" in refusal("init", str(model), str(rows), "optimizer.lrr=1")
    for twice in ("model=other", "data.train=other.jsonl"):
        assert f"leave {twice.partition('=')[0]}=... out" in refusal("init", str(model), str(rows), twice)
    texts = FORMS["text"](alpaca_rows(ROWS))
    assert "rows of text alone" in refusal("init", str(model), str(texts), "--for", "chat")
    assert "write 2h or 90min" in refusal("init", str(model), str(rows), "--time", "soon")


@pytest.mark.matrix
def test_pairs_of_answers_get_an_objective(model: Path) -> None:
    rows = [
        {"prompt": row["input"], "chosen": row["output"], "rejected": row["output"] + "!"} for row in alpaca_rows(ROWS)
    ]
    write_rows(Path("pairs.jsonl"), rows)
    written = yaml.safe_load(init(model, "pairs.jsonl", BUDGET))
    assert written["objective"] == {"kind": "dpo"}
    assert written["optimizer"]["lr"] == 1e-6
    Path("config.yaml").unlink()
    said = yaml.safe_load(init(model, "pairs.jsonl", BUDGET, "objective=orpo"))
    assert said["objective"] == {"kind": "orpo"}


@pytest.mark.slow
def test_answers_with_a_label_get_an_objective(model: Path) -> None:
    rows = [
        {"prompt": f"What is {number}?", "completion": "A number.", "label": number % 3 > 0} for number in range(200)
    ]
    write_rows(Path("labelled.jsonl"), rows)
    assert yaml.safe_load(init(model, "labelled.jsonl", BUDGET))["objective"] == {"kind": "kto"}
