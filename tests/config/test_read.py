"""Reading configs: values and overrides arrive as written, and every mistake is reported with its line."""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tonnage.config import (
    Batch,
    Config,
    LocalLaunch,
    RayLaunch,
    SlurmLaunch,
    Source,
    as_json,
    check_output,
    config_text,
    keys,
    read_config,
    write_config,
)
from tonnage.config.schema import KERNELS
from tonnage.errors import Problem, UserError
from tonnage.rundir.directory import RunDirectory

MINIMAL = "model: owner/small\ndata: {train: owner/rows}\n"


def write(directory: Path, text: str, name: str = "config.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def problems(path: Path, *overrides: str) -> tuple[Problem, ...]:
    with pytest.raises(UserError) as caught:
        read_config(path, overrides)
    return caught.value.problems


def only_problem(path: Path, *overrides: str) -> Problem:
    found = problems(path, *overrides)
    assert len(found) == 1, "\n".join(map(str, found))
    return found[0]


def test_a_minimal_config_has_the_documented_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL))
    assert config.data.train == (Source(path="owner/rows"),)
    assert (config.batch, config.checkpoint.every) == ("auto", "auto")
    assert (config.epochs, config.steps) == (3.0, None)
    assert config.optimizer.lr == 2e-5
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.output == "runs/small-rows"


def test_the_example_of_the_documentation_is_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "config.md").read_text()
    config = read_config(write(tmp_path, page.split("```yaml\n")[1].split("```")[0]), check_files=False)
    assert config.optimizer.lr == 1e-4
    assert config.output == "runs/pythia-160m-rows"


def test_each_launcher_has_its_own_keys(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "launch:\n  with: slurm\n  nodes: 2\n  workers: 4\n  time: 12:00:00\n")
    launch = read_config(path).launch
    assert isinstance(launch, SlurmLaunch)
    assert (launch.nodes, launch.workers, launch.time) == (2, 4, "12:00:00")
    assert read_config(path, ["launch.time=90"]).launch == launch.model_copy(update={"time": "90"})
    local = read_config(path, ["launch.with=local"]).launch  # as when a run of a cluster goes on here
    assert local == LocalLaunch(workers=4)
    assert only_problem(path, "launch.with=local", "launch.nodes=3").where == "launch.nodes=3"
    assert isinstance(read_config(write(tmp_path, MINIMAL + "launch: {workers: 2}\n")).launch, LocalLaunch)

    problem = only_problem(write(tmp_path, MINIMAL + "launch:\n  nodes: 2\n"))
    assert problem.found == "launch.nodes without launch.with: slurm or ray"
    assert problem.where.endswith(":4")
    problem = only_problem(write(tmp_path, MINIMAL), "launch.with=slrum")
    assert (problem.found, problem.needed) == ("launch.with is 'slrum'", "one of local, slurm, ray")
    assert problem.change == "did you mean slurm?"
    problem = only_problem(write(tmp_path, MINIMAL), "launch={with: slurm, partiton: gpu}")
    assert problem.change == "did you mean launch.partition?"


def test_the_example_of_a_slurm_job_is_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "launching.md").read_text()
    launch = read_config(write(tmp_path, MINIMAL + page.split("```yaml\n")[1].split("```")[0])).launch
    assert isinstance(launch, SlurmLaunch)
    assert launch.options == ("--mem=500G", "--constraint=h100")


def test_the_example_of_a_run_with_ray_is_read(tmp_path: Path) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "launching.md").read_text()
    text = page.split("## With Ray")[1].split("```yaml\n")[1].split("```")[0]
    config = read_config(write(tmp_path, MINIMAL + text))
    assert isinstance(config.launch, RayLaunch)
    assert (config.launch.fewest_workers, config.launch.workers, config.launch.hardware) == (4, 16, "8xH100")
    write_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml") == config
    problem = only_problem(write(tmp_path, MINIMAL), "launch={workers: [1, 2]}")
    assert (problem.found, problem.needed) == ("launch.workers is [1, 2]", "a whole number of at least 1 or auto")


@pytest.mark.parametrize("written", ["1e-5", "1E-5", "1.0e-05", ".1e-4", "0.00001", "1e-05"])
def test_scientific_notation_is_a_number(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, MINIMAL + f"optimizer: {{lr: {written}}}\n")
    assert read_config(path).optimizer.lr == 1e-5
    assert read_config(path, [f"optimizer.eps={written}"]).optimizer.eps == 1e-5


def test_what_yaml_would_make_something_else_of_stays_text(tmp_path: Path) -> None:
    path = write(tmp_path, "model: 'no'\ndata: {train: [{path: a/b, columns: {output: no, prompt: 2024-01-01x}}]}\n")
    config = read_config(path)
    assert config.model == "no"
    assert config.data.train[0].columns == {"output": "no", "prompt": "2024-01-01x"}


def test_shorthand_for_sources(tmp_path: Path) -> None:
    text = "model: m\ndata: {train: [a/one, {path: a/two, weight: 2}], validation: {path: a/held, split: test}}\n"
    data = read_config(write(tmp_path, text)).data
    assert data.train == (Source(path="a/one"), Source(path="a/two", weight=2.0))
    assert data.validation == (Source(path="a/held", split="test"),)
    assert read_config(write(tmp_path, MINIMAL), ["data.validation=a/b"]).data.validation == (Source(path="a/b"),)


@pytest.mark.parametrize("written", ["0", "none", "null", "off"])
def test_clipping_can_be_turned_off(tmp_path: Path, written: str) -> None:
    assert read_config(write(tmp_path, MINIMAL), [f"optimizer.clip={written}"]).optimizer.clip == 0.0


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("steps=", "write steps=null"),
        ("steps=  ", "write steps=null"),
        ("output=", "leave it out"),
        ("seed=# 3", "leave"),
    ],
)
def test_an_override_without_a_value_is_refused_by_name(tmp_path: Path, override: str, change: str) -> None:
    with pytest.raises(UserError) as caught:
        read_config(write(tmp_path, MINIMAL), [override])
    (problem,) = caught.value.problems
    assert problem.found == f"{override.partition('=')[0]} without a value"
    assert problem.change.startswith(change)


@pytest.mark.parametrize("written", ["[]", "[0.9]", "[0.9, 0.95, 0.99]"])
def test_of_a_list_of_a_certain_length_the_number_of_values_is_told(tmp_path: Path, written: str) -> None:
    number = len(yaml.safe_load(written))
    with pytest.raises(UserError, match=rf"optimizer\.betas has {number} value(.|\n)*needed: 2 values: "):
        read_config(write(tmp_path, MINIMAL), [f"optimizer.betas={written}"])


def test_a_link_in_a_circle_is_not_its_own_nearest_name(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    for key in ("model", "data.train"):
        with pytest.raises(UserError) as caught:
            read_config(write(tmp_path, MINIMAL), [f"{key}={loop}"])
        changes = [problem.change for problem in caught.value.problems if str(loop) in problem.found]
        assert changes == [f"{loop} is a link to loop, where nothing is: mend the link"]


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL + "optimizer:\n  # lr: 1\nbatch:\n"))
    assert config.optimizer.lr == 2e-5
    assert config.batch == read_config(write(tmp_path, MINIMAL + "batch: {}\n")).batch == "auto"


def test_overrides(tmp_path: Path) -> None:
    config = read_config(
        write(tmp_path, MINIMAL + "epochs: 2\n"),
        ["optimizer.lr=1e-4", "data.train.0.weight=2", "optimizer.betas=[0.8, 0.9]", "model=other/name", "steps=20"],
    )
    assert config.optimizer.lr == 1e-4
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.data.train == (Source(path="owner/rows", weight=2.0),)
    assert config.model == "other/name"
    assert (config.steps, config.epochs) == (20, None)


def test_an_override_of_an_alternative_replaces_the_other(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "steps: 5\nbatch: {tokens: 4096}\n")
    config = read_config(path, ["epochs=2", "batch.sequences=8"])
    assert (config.steps, config.epochs) == (None, 2.0)
    assert config.batch == Batch(sequences=8)
    path = write(tmp_path, MINIMAL + "batch: auto\n")
    assert read_config(path, ["batch.tokens=4096"]).batch == Batch(tokens=4096)
    assert read_config(write(tmp_path, MINIMAL + "batch: {tokens: 4096}\n"), ["batch=auto"]).batch == "auto"
    assert only_problem(path, "batch=lots").needed == "a section of keys or auto"
    assert "both" in only_problem(path, "epochs=2", "steps=3").found


@pytest.mark.parametrize(
    ("written", "overrides", "off", "resolved"),
    [
        ("", [], (), "auto"),
        ("kernels: auto\n", ["kernels.norms=off"], ("norms",), {"norms": "off"}),
        ("kernels: {norms: off, sums: on, adamw: false}\n", [], ("norms", "adamw"), {"norms": "off", "adamw": "off"}),
        ("kernels: {norms: off}\n", ["kernels.norms=true"], (), "auto"),
        ("kernels: {norms: off}\n", ["kernels=plain"], KERNELS, "plain"),
        ("kernels: plain\n", ["kernels.sums=on"], tuple(one for one in KERNELS if one != "sums"), None),
    ],
)
def test_kernels_are_a_word_or_switches(
    tmp_path: Path, written: str, overrides: list[str], off: tuple[str, ...], resolved: object
) -> None:
    config = read_config(write(tmp_path, MINIMAL + written), overrides, check_files=False)
    assert config.kernels_off == off
    found = as_json(config)["kernels"]
    assert found == (resolved or dict.fromkeys(off, "off"))
    write_config(config, tmp_path / "again.yaml")
    assert read_config(tmp_path / "again.yaml", check_files=False).kernels_off == off


def test_an_unknown_kernel_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    problem = only_problem(write(tmp_path, MINIMAL + "kernels: {norm: off}\n"))
    assert problem.found == "unknown key kernels.norm"
    assert problem.needed == f"a known key of kernels: {', '.join(KERNELS)}"
    assert problem.change == "did you mean kernels.norms?"
    assert only_problem(write(tmp_path, MINIMAL), "kernels.norms=perhaps").needed == "on or off"


def test_an_override_can_add_a_source(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    config = read_config(path, ["data.train.1.path=owner/more", "data.train.0.split=test"])
    assert [(source.path, source.split) for source in config.data.train] == [
        ("owner/rows", "test"),
        ("owner/more", "train"),
    ]
    assert "list of 1" in only_problem(path, "data.train.0.split=test", "data.train.5.path=x").found


def test_an_override_enters_the_only_source_by_its_key(tmp_path: Path) -> None:
    for text in (
        MINIMAL,
        "model: a/b\ndata: {train: {path: owner/rows}}\n",
        "model: a/b\ndata: {train: [owner/rows]}\n",
    ):
        config = read_config(write(tmp_path, text), ["data.train.columns={output: response}", "data.train.name=main"])
        (source,) = config.data.train
        assert (source.path, source.columns, source.name) == ("owner/rows", {"output": "response"}, "main")
    two = write(tmp_path, "model: a/b\ndata: {train: [owner/rows, owner/more]}\n")
    assert "list of 2" in only_problem(two, "data.train.name=main").found
    assert only_problem(write(tmp_path, MINIMAL), "data.train.nmae=main").change == "did you mean data.train.name?"


def test_all_problems_come_together_with_their_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """\
modell: owner/small
model: owner/small
data:
  train: rows/that/are/missing.json
  max_lenght: 512
  pack: yes
optimizer:
  lr: fast
  betas: [0.9, 1.5]
  schedule: cosin
epochs: 3
steps: 10
""",
    )
    found = problems(path, "optimizer.warmup=-1", "launch.workers=0")
    lines = {problem.where: problem for problem in found}
    assert set(lines) == {
        *(f"{path}:{line}" for line in (1, 4, 5, 6, 8, 9, 10)),
        f"{path}:11, {path}:12",
        "optimizer.warmup=-1",
        "launch.workers=0",
    }
    assert lines[f"{path}:1"].change == "did you mean model?"
    assert lines[f"{path}:4"].found == "no such file: rows/that/are/missing.json"
    assert lines[f"{path}:5"].change == "did you mean data.max_length?"
    assert lines[f"{path}:6"].change == "write true"
    assert lines[f"{path}:8"].found == "optimizer.lr is 'fast'"
    assert lines[f"{path}:8"].needed == "a number above 0 and at most 1"
    assert "below 1" in lines[f"{path}:9"].needed
    assert lines[f"{path}:10"].change == "did you mean cosine?"


@pytest.mark.parametrize(
    ("override", "near"),
    [
        ("lr=1", "optimizer.lr"),
        ("optimiser={lr: 1}", "optimizer"),
        ("optimizer.learn=1", "optimizer.lr"),
        ("data.traim=x", "data.train"),
        ("data.train.0.wieght=2", "data.train.0.weight"),
        ("num_workers=2", "launch.workers"),
        ("batch.seqences=2", "batch.sequences"),
        ("launch.launcher=local", None),
        ("zzz=1", None),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(tmp_path: Path, override: str, near: str | None) -> None:
    problem = only_problem(write(tmp_path, MINIMAL), override)
    assert problem.found == f"unknown key {override.partition('=')[0]}"
    assert problem.change == (f"did you mean {near}?" if near else "")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("learning_rate=1", "write optimizer.lr instead"),
        ("optimizer.learning_rate=1", "write optimizer.lr instead"),
        ("data.max-seq-length=1", "write data.max_length instead"),
        ("output_dir=x", "write output instead"),
        ("per_device_train_batch_size=2", "batch.sequences counts a whole step: sequences of a device"),
        ("launch.nproc_per_node=2", "write launch.workers instead"),
        ("logging_steps=1", "nothing: every step is written"),
    ],
)
def test_names_of_other_programs_are_known(tmp_path: Path, override: str, hint: str) -> None:
    problem = only_problem(write(tmp_path, MINIMAL), override)
    assert problem.found == f"unknown key {override.partition('=')[0]}"
    assert problem.change.startswith(hint)
    assert problem.change.endswith("(tonnage import FILE converts whole configurations)")
    both = problems(write(tmp_path, MINIMAL), override, "num_train_epochs=3")
    assert sum("tonnage import" in problem.change for problem in both) == 1


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("optimizer: {lr: '2e-5'}", "write 2e-5 without quotes"),
        ("optimizer: {lr: ' .5 '}", "write .5 without quotes"),
        ("steps: '1_000'", "write 1_000 without quotes"),
        ("memory: {micro_batch: '4'}", "write 4 without quotes"),
        ("steps: 1,024", "write 1024"),
        ("optimizer: {lr: 1,024.5}", ""),
        ("steps: 2.56e2", "write 256"),
        ("steps: 1.5", ""),
        ("steps: 1,02", ""),
        ("steps: many", ""),
    ],
)
def test_numbers_that_are_written_as_something_else(tmp_path: Path, text: str, change: str) -> None:
    assert change in problems(write(tmp_path, MINIMAL + text + "\n"))[-1].change
    assert bool(problems(write(tmp_path, MINIMAL + text + "\n"))[-1].change) == bool(change)


def test_a_comma_within_braces_begins_another_key(tmp_path: Path) -> None:
    found = problems(write(tmp_path, "model: a/b\ndata: {train: a/b, max_length: 1,024}\n"))
    assert [problem.change for problem in found] == ["", "write max_length: 1024: a comma ends a value"]
    advised = write(tmp_path, "model: a/b\ndata: {train: a/b, max_length: 1024}\n")
    assert read_config(advised).data.max_length == 1024
    assert only_problem(advised, "data.024=3").change == ""


def test_a_home_directory_is_written_out_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    text = """\
model: ~/m
tokenizer: ~/t
data: {train: [~/a.jsonl, {path: ~/b.jsonl}], validation: ~/c.jsonl, template: ~/t.jinja, cache: ~/cache}
memory: {offload_dirs: [~/one, ~/two]}
launch: {with: slurm, python: ~/bin/python}
output: ~/runs/x
"""
    config = read_config(write(tmp_path, text), ["data.train.1.path=~/over.jsonl"], check_files=False)
    home = str(tmp_path / "home")
    assert config.model == f"{home}/m"
    assert [source.path for source in config.data.train] == [f"{home}/a.jsonl", f"{home}/over.jsonl"]
    assert config.data.validation == (Source(path=f"{home}/c.jsonl"),)
    assert (config.data.template, config.data.cache) == (f"{home}/t.jinja", f"{home}/cache")
    assert config.memory.offload_dirs == (f"{home}/one", f"{home}/two")
    assert isinstance(config.launch, SlurmLaunch)
    assert (config.launch.python, config.output) == (f"{home}/bin/python", f"{home}/runs/x")
    assert "~" not in config_text(config)
    assert read_config(write(tmp_path, text), ["output=./~/x"], check_files=False).output == "./~/x"
    problem = only_problem(write(tmp_path, MINIMAL), "output=~nobody-of-that-name/x")
    assert "'~nobody-of-that-name'" in problem.needed
    assert read_config(write(tmp_path, MINIMAL), ["output=./~nobody-of-that-name/x"]).output.endswith("name/x")


def test_every_path_of_the_schema_is_one_for_tilde() -> None:
    """A key whose sentence speaks of a file or directory takes a path, or says why not."""
    others = {"data.template", "data.train.files", "data.train.split", "data.train.documents"}
    others |= {"data.max_loss"}
    speaking = {
        key.name for key in keys.all_keys() if re.search(r"\b(file|directory|directories)\b", key.sentence, re.I)
    }
    paths = {key.name for key in keys.all_keys() if "path" in key.takes}
    assert speaking - others <= paths
    assert paths == {"model", "tokenizer", "data.train", "data.validation", "data.train.path", "data.train.images",
                     "data.cache", "output", "memory.offload_dirs", "launch.python", "evaluate.prompts",
                     "objective.teacher", "objective.reference"}  # fmt: skip


def test_messages_repeat_no_more_than_a_beginning(tmp_path: Path) -> None:
    long = "x" * 70_000
    for override in (
        f"model={long}",
        f"{long}=1",
        f"data.{long}=1",
        long,
        f"optimizer.lr={long}",
        f"data.train={long}",
    ):
        assert len(str(UserError(*problems(write(tmp_path, MINIMAL), override)))) < 1500


def test_values_of_unknown_keys_are_not_repeated(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "hub_token: hf_SECRET\n")
    for overrides in ([], ["token=hf_SECRET"], ["data.token=[hf_SECRET"]):
        with pytest.raises(UserError) as caught:
            read_config(path, overrides)
        assert "SECRET" not in str(caught.value)
    with pytest.raises(UserError) as caught:
        read_config(write(tmp_path, MINIMAL + "hub_token: [hf_SECRET\n"))
    assert "SECRET" not in str(caught.value)


def test_required_keys(tmp_path: Path) -> None:
    found = problems(write(tmp_path, ""))
    assert [problem.found for problem in found] == ["model is missing", "data is missing"]
    assert only_problem(write(tmp_path, "model: a/b\ndata:\n")).found == "data.train is missing"
    assert only_problem(write(tmp_path, "model: a/b\ndata: {train: []}\n")).found == "data.train is []"


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("model: a\n\tdata: b\n", 2, "a tab where YAML allows only spaces"),
        ("model: a\ndata: [1, 2\n", 3, "not YAML"),
        ("model: a: b\n", 1, "not YAML: model: a: b"),
        ("model: a\ndata: *x\n", 2, "an alias; write the value out"),
        ("seed: 1\nmodel: &x a\ndata: *x\n", 2, "an anchor (&); write values out"),
        ("seed: &x\n", 1, "an anchor (&)"),
        ("&x seed: 1\n", 1, "an anchor (&)"),
        ("model: a\ntrack: &x [tensorboard]\n", 2, "an anchor (&)"),
        ("track: [" + "a, " * 30_000 + "a]", 1, "more than 20,000 keys and items"),
        ("model: !!python/object:os.system a\n", 1, "a tag, tag:yaml.org,2002:python/object:os.system"),
        ("model: a\nmodel: b\n", 2, "model is written twice"),
        ("---\nmodel: a\n---\nmodel: b\n", 3, "not YAML"),
        ("? [a, b]\n: c\n", 1, "a key that is not text"),
        ('model: "a\\udc80"\n', 1, "half a character"),
        ('"a\\udc80": 1\n', 1, "half a character"),
        ("model: a\x00b\n", 1, "a character that YAML does not allow: special characters are not allowed"),
        ("a: " + "[" * 5000, 1, "brackets in brackets, too deep"),
        ("seed: " + "9" * 5000, 1, "a number too long"),
    ],
)
def test_what_is_not_yaml_is_refused_with_its_line(tmp_path: Path, text: str, line: int, found: str) -> None:
    path = write(tmp_path, text)
    first = problems(path)[0]
    assert first.where == f"{path}:{line}"
    assert first.found.startswith(found)


def seconds_of(read: Callable[[], object]) -> float:
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        read()
    assert len(str(caught.value)) < 40_000
    return time.monotonic() - began


@pytest.mark.parametrize(
    "text",
    [
        MINIMAL + "".join(f"key{i}: 1\n" for i in range(9000)),
        MINIMAL + "".join(f"seed: {i}\n" for i in range(9000)),
        "model: a/b\ndata:\n  train:\n" + "".join(f"  - rows{i}.jsonl\n" for i in range(10_000)),
        "model: a/b\ndata:\n  train:\n" + "".join(f"  - {{path: a/b, formt: {i}}}\n" for i in range(3000)),
        MINIMAL + "? " + "x" * 200_000 + "\n: 1\n",
        MINIMAL + "#" * (300 << 10),
        "- " * 100_000,
        "".join(" " * i + "a:\n" for i in range(600)),
    ],
    ids=["keys", "keys twice", "sources", "sources with keys", "a long key", "bytes", "lists", "levels"],
)
def test_a_config_of_any_size_is_refused_soon_and_in_few_words(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, text)
    assert seconds_of(lambda: read_config(path)) < 10  # 2 on a machine that does nothing else


def test_only_regular_files_and_pipes_that_are_written_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, message in (
        (Path("/dev/zero"), "a device"), (tmp_path / "pipe", "into which nobody writes"), (Path("a\0b"), "null (b|c)"),
        (Path("/proc/self/mem"), "cannot be read"), (tmp_path / ("x" * 300), "cannot be read"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=message):
            read_config(path)
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=(MINIMAL,))
    writer.start()
    assert read_config(tmp_path / "pipe").model == read_config(write(tmp_path, MINIMAL)).model
    writer.join()


@pytest.mark.parametrize(("text", "kind"), [("- a\n- b\n", "a list"), ("just words\n", "only text"), ("3\n", "only 3")])
def test_a_file_that_holds_no_keys(tmp_path: Path, text: str, kind: str) -> None:
    assert only_problem(write(tmp_path, text)).found == f"the file holds {kind}"


def test_files_that_cannot_be_a_config(tmp_path: Path) -> None:
    near = write(tmp_path, MINIMAL, "alpaca.yaml")
    assert only_problem(tmp_path / "alpaca.yml").change == f"did you mean {near}?"
    assert only_problem(tmp_path / "alpacca.yaml").change == f"did you mean {near}?"
    assert "is a directory" in only_problem(tmp_path).found
    assert only_problem(tmp_path / "nowhere" / "a.yaml").change == f"there is no directory {tmp_path / 'nowhere'}"
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"model: \xff\xfe")
    assert "not UTF-8" in only_problem(binary).found


@pytest.mark.parametrize("override", ["steps", "=3", "optimizer..lr=1", "--steps=3x="])
def test_what_is_not_an_override(tmp_path: Path, override: str) -> None:
    assert only_problem(write(tmp_path, MINIMAL), override).found in ("not an override", "unknown key --steps")


def test_an_override_through_a_plain_value(tmp_path: Path) -> None:
    assert "which has no x in it" in only_problem(write(tmp_path, MINIMAL), "model.x=1").found


@pytest.mark.parametrize("value", ["3.0", "'3'", "true", "1.5", ".nan", "[1]", "{a: 1}", "null"])
def test_types_are_not_guessed(tmp_path: Path, value: str) -> None:
    problem = only_problem(write(tmp_path, MINIMAL), f"seed={value}")
    assert problem.needed == "a whole number of at least 0 and below 4294967296"


@pytest.mark.parametrize("value", [".inf", ".nan", "true", "text", "-1.0"])
def test_numbers_are_finite(tmp_path: Path, value: str) -> None:
    assert (
        "a number"
        in only_problem(
            write(tmp_path, MINIMAL), f"data.validation={value}" if value == "-1.0" else f"optimizer.eps={value}"
        ).needed
    )


def test_a_resolved_config_reads_back_the_same(tmp_path: Path) -> None:
    config = read_config(
        write(tmp_path, MINIMAL), ["steps=7", "data.validation=0.1", "optimizer.lr=3.3333333333333335e-07"]
    )
    write_config(config, tmp_path / "run" / "config.yaml")
    assert read_config(tmp_path / "run" / "config.yaml") == config
    assert "epochs" not in config_text(config)
    assert yaml.safe_load(config_text(config))["optimizer"]["lr"] == config.optimizer.lr


NAMES = sorted({part for key in keys.all_keys() for part in key.name.split(".")} | {"unknown", "fraction", "0"})

texts = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=20) | st.sampled_from(
    [
        "1e5",
        "1_0",
        "no",
        "~",
        "null",
        "0x1",
        "1:30",
        "2024-01-01",
        "=",
        "<<",
        " a ",
        "#x",
        "- a",
        "a: b",
        "*x",
        "!t",
        "\u2028",
    ]
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    model=texts.filter(lambda text: not text.startswith("~") or text == "~"),  # no user of that name
    path=texts.filter(lambda text: not text.startswith("~") or text == "~"),
    columns=st.dictionaries(texts, texts, max_size=2),
    lr=st.floats(1e-300, 1.0, exclude_min=True),
    betas=st.tuples(st.floats(0, 0.999), st.floats(0, 0.999)),
    seed=st.integers(0, 2**32 - 1),
    steps=st.none() | st.integers(1, 10**12),
)
def test_any_config_reads_back_the_same(
    tmp_path: Path,
    model: str,
    path: str,
    columns: dict[str, str],
    lr: float,
    betas: tuple[float, float],
    seed: int,
    steps: int | None,
) -> None:
    value = {
        "model": model,
        "data": {"train": [{"path": path, "columns": columns}]},
        "optimizer": {"lr": lr, "betas": betas},
        "seed": seed,
        **({} if steps is None else {"steps": steps}),
    }
    config = Config.model_validate(value)
    write_config(config, tmp_path / "round.yaml")
    assert read_config(tmp_path / "round.yaml", check_files=False) == config


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.sampled_from("model:data{}[],-'\"&*!|>#%@`\t\n 1e.~?<"), max_size=60))
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    path = write(tmp_path, MINIMAL + text)
    with contextlib.suppress(UserError):
        read_config(path)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("auto"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


def test_a_key_that_is_called_like_its_kind_is_unknown(tmp_path: Path) -> None:
    for section, name in (("batch", "batch"), ("launch", "local"), ("validation", "sources")):
        inner = f"{{{name}: {{0: 1}}, 0: null}}"
        inner = f"{{train: a.jsonl, validation: {inner}}}" if section == "validation" else inner
        path = write(tmp_path, f"model: a\n{'data' if section == 'validation' else section}: {inner}\n")
        with pytest.raises(UserError) as refused:
            read_config(path, check_files=False)
        found = [problem.found for problem in refused.value.problems]
        assert any(said.startswith("unknown key") and said.endswith(f".{name}") for said in found), found


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(NAMES), values, max_size=5))
def test_any_tree_is_read_or_refused_with_places(tmp_path: Path, tree: dict[str, object]) -> None:
    path = write(tmp_path, yaml.safe_dump(tree))
    try:
        read_config(path)
    except UserError as error:
        unplaced = [problem for problem in error.problems if not problem.where.startswith(str(path))]
    else:
        unplaced = []
    assert not unplaced


def test_an_output_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, MINIMAL), [f"output={tmp_path / 'run'}"])
    check_output(config)
    run = RunDirectory(config.output)
    write_config(config, run.config)
    with pytest.raises(UserError, match=r"not empty: it holds config\.yaml"):  # which may be anybody's
        check_output(config)
    run.plan.touch()
    with pytest.raises(UserError, match="already holds a run"):
        check_output(config)


SHORT = {
    "a path": "train: rows.jsonl",
    "one source": "train: {path: rows.jsonl}",
    "a path in a list": "train: [rows.jsonl]",
    "one source in a list": "train: [{path: rows.jsonl}]",
    "a path in a file of dotted keys": "train.path: rows.jsonl",
}


@pytest.mark.parametrize("source", ["train", "validation"])
@pytest.mark.parametrize("key", ["columns.output={}", "format={}", "split={}", "0.name={}"])
@pytest.mark.parametrize("short", SHORT)
def test_an_override_enters_what_is_written_short(tmp_path: Path, short: str, key: str, source: str) -> None:
    written = SHORT[short].replace("train", source)
    text = f"model: a/b\ndata: {{{written}{', train: other' if source != 'train' else ''}}}\n"
    value = "alpaca"
    config = read_config(write(tmp_path, text), [f"data.{source}.{key.format(value)}"], check_files=False)
    (found,) = config.data.train if source == "train" else config.data.validation  # type: ignore[misc]
    assert found.path == "rows.jsonl"
    assert value in (found.format, found.split, found.name, found.columns.get("output"))


def test_an_override_enters_an_item_of_what_is_written_as_one(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "memory: {offload_dirs: /a}\nallow_missing: lm_head.*\n")
    config = read_config(path, ["memory.offload_dirs.1=/b", "allow_missing.0=embed.*"], check_files=False)
    assert config.memory.offload_dirs == ("/a", "/b")
    assert config.allow_missing == ("embed.*",)


def test_an_override_enters_a_section_of_which_there_is_a_word(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "objective: simpo\nquantize_aware: int4\n")
    config = read_config(path, ["objective.margin=0.5", "quantize_aware.group_size=64"], check_files=False)
    assert (config.objective.kind, config.objective.margin) == ("simpo", 0.5)
    assert (config.quantize_aware.scheme, config.quantize_aware.group_size) == ("int4", 64)


def test_an_override_that_could_be_for_several_sources_is_refused_with_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, "model: a/b\ndata: {train: [a/one, {path: a/two}]}\n")
    problem = only_problem(path, "data.train.format=alpaca")
    assert problem.found == "data.train is a list of 2: 0 is a/one, 1 is a/two"
    assert problem.change == "write data.train.0.format=... for the first"
    config = read_config(path, ["data.train.0.format=alpaca", "data.train.1.split=test"], check_files=False)
    assert config.data.train == (Source(path="a/one", format="alpaca"), Source(path="a/two", split="test"))


def test_a_fraction_has_no_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "model: a/b\ndata: {train: c/d, validation: 0.1}\n")
    assert only_problem(path, "data.validation.split=x").found == "data.validation is 0.1, which has no split in it"


def test_dotted_keys_of_a_file_are_those_of_sections(tmp_path: Path) -> None:
    dotted = """\
data.train.columns: {output: a.b}
memory.budget.device: 6GB
model: owner/small
data.train: owner/rows
data:
  max_length: 512
  validation.path: owner/other
batch.tokens: 4096
launch.with: slurm
launch: {options: --mem=1G}
"""
    nested = """\
model: owner/small
data:
  train: [{path: owner/rows, columns: {output: a.b}}]
  max_length: 512
  validation: [owner/other]
memory: {budget: {device: 6GB}}
batch: {tokens: 4096}
launch: {with: slurm, options: [--mem=1G]}
"""
    assert read_config(write(tmp_path, dotted)) == read_config(write(tmp_path, nested))
    path = write(tmp_path, dotted + "optimizer.lr: fast\n")
    assert only_problem(path).where == f"{path}:11"
    assert read_config(path, ["optimizer.lr=1e-5"]).optimizer.lr == 1e-5


def test_names_with_dots_are_the_users_own_in_mappings_of_theirs(tmp_path: Path) -> None:
    text = "model: a/b\ndata: {train: {path: c/d, columns: {output: x.y}, roles: {a.b: user}}}\n"
    assert read_config(write(tmp_path, text)).data.train[0].roles == {"a.b": "user"}
    text = MINIMAL + "launch: {with: ray, runtime_env: {env_vars: {a.b: c}}}\n"
    launch = read_config(write(tmp_path, text)).launch
    assert isinstance(launch, RayLaunch)
    assert launch.runtime_env == {"env_vars": {"a.b": "c"}}


@pytest.mark.parametrize(
    ("text", "found", "line"),
    [
        ("data.max_length: 8\n", "data.max_length is written twice", 3),
        ("data.train.path: x\n", "data.train.path is written twice", 3),
        ("data.train.0.split: x\n", "data.train.0.split is written twice", 3),
        ("data.train: x\n", "data.train is written twice", 3),
        ("data.max_length.x: 8\n", "data.max_length is 4, which has no x in it", 3),
        ("seed: 1\nseed.x: 2\n", "seed is 1, which has no x in it", 4),
        ("batch: auto\nbatch.tokens: 9\n", "batch is auto, which has no tokens in it", 4),
        ("data.seed: 2\n", "unknown key data.seed", 3),
        ("foo.bar: 2\n", "unknown key foo.bar", 3),
    ],
)
def test_a_dotted_key_that_clashes_is_refused(tmp_path: Path, text: str, found: str, line: int) -> None:
    start = "model: a/b\ndata: {train: {path: c/d, split: y}, max_length: 4}\n"
    problem = only_problem(path := write(tmp_path, start + text))
    assert problem.found.startswith(found)
    assert problem.where == f"{path}:{line}"


def test_an_override_as_a_file_has_it(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    config = read_config(path, ["data.max_length: 512", 'data.train: {path: c/d, columns: {output: "a=b: c"}}'])
    assert config.data.max_length == 512
    assert config.data.train == (Source(path="c/d", columns={"output": "a=b: c"}),)
    assert read_config(path, ["output=a:b"]).output == "a:b"
    for text, change in {
        "data.max_length:": "write data.max_length=VALUE, in one word",
        "data.max_length:512": "write data.max_length=512, in one word",
        "nonsense:512": "",
    }.items():
        problem = only_problem(path, text)
        assert (problem.found, problem.change) == ("not an override", change)


def test_dotted_keys_without_end_are_read_soon(tmp_path: Path) -> None:
    text = MINIMAL + "".join(f"data.k{number}.x: 1\n" for number in range(9_000))
    started = time.monotonic()
    assert problems(write(tmp_path, text))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(("written", "steps"), [("0", 0), ("25", 25), ("0.25", 10), ("0.33", 14), ("0.001", 1)])
def test_evaluations_are_counted_in_steps_or_as_a_fraction_of_all(written: str, steps: int, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: m\ndata: {{train: a.jsonl, validation: 0.1}}\nevaluate: {{every: {written}}}\n")
    assert read_config(path, check_files=False).evaluate.steps_between(40) == steps


@pytest.mark.parametrize(
    ("written", "override", "epochs", "steps"),
    [("epochs: 1", "steps=null", 1, None), ("steps: 100", "epochs=null", None, 100), ("epochs: 1", "steps=9", None, 9)],
)
def test_an_override_that_sets_nothing_leaves_what_the_file_says(
    tmp_path: Path, written: str, override: str, epochs: float | None, steps: int | None
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: a/b\ndata: {{train: rows.jsonl}}\n{written}\n")
    config = read_config(path, [override], check_files=False)
    assert (config.epochs, config.steps) == (epochs, steps)
