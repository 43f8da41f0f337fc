"""Contradictions between fields, and files that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hostile.strings import inside
from tonnage.config import check_trackers, read_config
from tonnage.errors import Problem, UserError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text("model: owner/small\ndata: {train: owner/rows}\n")
    return file


def found(path: Path, *overrides: str) -> tuple[Problem, ...]:
    try:
        read_config(path, overrides)
    except UserError as error:
        return error.problems
    return ()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["parallel.context=2", "objective=dpo"],
            "parallel.context is 2, and objective.kind is dpo: an answer is worth",
        ),
        (
            ["parallel.context=2", "router_loss=0.01"],
            "parallel.context is 2, and router_loss is 0.01: it is taken over",
        ),
        (
            ["parallel={context: 2, tensor: 2}", "launch.workers=6"],
            "6 workers, parallel.tensor 2, parallel.context 2 and parallel.pipeline 1",
        ),
        (
            ["parallel={context: 2, replicate: 3}", "launch.workers=8"],
            "8 workers cannot form 3 equal groups",
        ),
        (
            ["parallel.context=2", "launch.workers=8", "batch.sequences=3", "batch.tokens=null"],
            "4 groups of 2 workers and only 3 pack(s) in a step",
        ),
        (["data.pack=false", "batch.tokens=4096"], "batch.tokens is 4096 without packing"),
        (["data.overlap=8"], "data.overlap is 8, and data.over_length is error: no document is split"),
        (["data.over_length=drop", "data.split_at=turns"], "data.split_at is turns, and data.over_length is drop"),
        (["data.over_length=split", "data.overlap=1025"], "data.overlap is 1025, of pieces of 2048 tokens"),
        (["rope={type: yarn}"], "rope.type is yarn, and rope.factor is 1: as many positions"),
        (["rope={type: dynamic, factor: 2}"], "rope.type is 'dynamic'"),
        (["rope={type: linear, factor: 2, beta_fast: 3}"], "rope.beta_fast, and rope.type is linear"),
        (
            ["rope={type: llama3, factor: 2, attention_factor: 1.0}"],
            "rope.attention_factor, and rope.type is llama3",
        ),
        (["rope={type: default, factor: 2}"], "rope.type is default, which scales no frequency, and no rope.theta"),
        (["rope={type: yarn, factor: 2, beta_slow: 40}"], "rope.beta_slow is 40, and rope.beta_fast is 32"),
        (["data.train.0.weight=1e5"], "data.train.0.weight is 100000: an epoch would see each row of owner/rows so"),
        (["batch.tokens=1024"], "batch.tokens is 1024, less than a pack of 2048"),
        (["batch={tokens: 1, sequences: 1}"], "both batch.tokens (1) and batch.sequences (1)"),
        (["batch.tokens=null"], "neither batch.tokens nor batch.sequences"),
        (
            ["adapter.rank=8", "train=[lm_head.*]"],
            "train names parameters (lm_head.*), and adapter is additions to the",
        ),
        (["init=random", "train=[lm_head.*]"], "init is random, and train names a part of the parameters: the others"),
        (["adapter=auto", "train=[lm_head.*]"], "train names parameters (lm_head.*), and adapter is auto"),
        (["epochs=null"], "neither epochs nor steps"),
        (["optimizer.warmup=1.5"], "optimizer.warmup is 1.5"),
        (["optimizer.warmup=20", "steps=10"], "a warm-up of 20 steps in a run of 10"),
        (["optimizer.decay=0.2"], "optimizer.decay is 0.2, and optimizer.schedule is cosine"),
        (["optimizer={decay_shape: linear, schedule: linear}"], "optimizer.decay_shape is 'linear', and optimizer.sch"),
        (["optimizer={power: 2, schedule: wsd}"], "optimizer.power is 2.0, and optimizer.schedule is wsd"),
        (["optimizer.cycles=2"], "optimizer.cycles is 2, and optimizer.schedule is cosine"),
        (["optimizer.timescale=100"], "optimizer.timescale is 100, and optimizer.schedule is cosine"),
        (["optimizer={schedule: inverse_sqrt, final: 0.1}"], "optimizer.final is 0.1, and optimizer.schedule is inver"),
        (["optimizer={schedule: wsd, decay: 2.5}"], "optimizer.decay is 2.5"),
        (["optimizer={schedule: wsd, decay: 20}", "steps=10"], "a decay of 20 steps in a run of 10"),
        (["optimizer={schedule: wsd, decay: 8, warmup: 4}", "steps=10"], "optimizer.warmup is 4 and optimizer.decay 8"),
        (["optimizer={schedule: wsd, decay: 0.6, warmup: 0.5}"], "optimizer.warmup is 0.5 and optimizer.decay 0.6: "),
        (["optimizer.groups=[{match: '*embed*'}]"], "optimizer.groups.0 (*embed*) has neither lr nor weight_decay"),
        (
            ["quantize_aware={scheme: mxfp4, group_size: 32}"],
            "quantize_aware.group_size is 32, and quantize_aware.schem",
        ),
        (["quantize_aware={after_steps: 3}"], "quantize_aware.after_steps is 3, and quantize_aware.scheme is none"),
        (["quantize_aware=int4", "objective=dpo"], "quantize_aware is int4, and objective.kind is dpo, which compares"),
        (["quantize_aware=int4", "parallel.tensor=2"], "quantize_aware is int4, and parallel.tensor is 2: a row"),
        (
            ["quantize_aware=int4", "memory.tiles=2"],
            "quantize_aware is int4, and memory.tiles is 2: tiles are computed",
        ),
        (
            ["quantize_aware=int8", "adapter.quantize=nf4"],
            "quantize_aware is int8, and adapter.quantize is nf4: a base",
        ),
        (["quantize_aware=int4", "compile=on"], "quantize_aware is int4, and compile is on: layers quantise again"),
        (["data.min_length=4096", "data.max_length=2048"], "data.min_length is 4096, and data.max_length is 2048"),
        (["quantize_aware=nvfp4", "precision=fp16"], "quantize_aware is nvfp4, and precision is fp16: torchao takes"),
        (["quantize_aware=mxfp4", "precision=fp16"], "quantize_aware is mxfp4, and precision is fp16: torchao takes"),
        (
            ["quantize_aware=int4", "parallel={pipeline: 2, schedule: zero_bubble}"],
            "quantize_aware is int4, and parallel.schedule is zero_bubble: gradients of rounded weights",
        ),
        (["precision=fp8", "parallel.tensor=2"], "precision is fp8, and parallel.tensor is 2: parts of matrices"),
        (["precision=fp8", "compile=on", "memory.recompute=full"], "precision is fp8, and compile is on beside memory"),
        (["precision=fp8", "memory.tiles=2"], "precision is fp8, and memory.tiles is 2: tiles are multiplied"),
        (["precision=fp8", "adapter.quantize=nf4"], "precision is fp8, and adapter.quantize is nf4: a base that"),
        (
            ["precision=fp8", "adapter.kind=dora"],
            "precision is fp8, and adapter.kind is dora: it is computed with weights",
        ),
        (["precision=fp8", "quantize_aware=int8"], "precision is fp8, and quantize_aware is int8: what is rounded"),
        (
            ["precision=fp8-emulated", "parallel={pipeline: 2, schedule: zero_bubble}"],
            "precision is fp8-emulated, and parallel.schedule is zero_bubble: gradients of weights",
        ),
        (["evaluate.prompts=4"], "evaluate.prompts is 4, but there are no validation rows"),
        (["evaluate.prompts=none-such.jsonl"], "evaluate.prompts: no file none-such.jsonl"),
        (["evaluate.prompts=500"], "evaluate.prompts"),
        (["evaluate.every=10"], "evaluate.every is 10, but there are no validation rows"),
        (["launch.workers=4", "batch.sequences=2"], "4 workers and only 2 packs in a step"),
        (["launch.workers=2", "batch.tokens=2048"], "2 workers and only 1 pack in a step"),
        (["launch.workers=3", "parallel.tensor=2"], "3 workers, parallel.tensor 2 and parallel.pipeline 1"),
        (["launch.workers=8", "parallel={tensor: 2, replicate: 3}"], "4 times 2 workers cannot form 3 equal groups"),
        (["launch.workers=8", "parallel.tensor=2", "batch.sequences=3"], "4 groups of 2 workers and only 3 pack(s)"),
        (
            ["memory={sequence_tiles: 8, tiles: 4, zero: 3}", "launch.workers=2"],
            "memory.sequence_tiles is 8, and memory.tiles is 4: every tile of weights would come",
        ),
        (
            [
                "memory.sequence_tiles=8",
                "launch.workers=2",
                "parallel={pipeline: 2, schedule: zero_bubble}",
                "precision=bf16",
            ],
            "parallel.schedule is zero_bubble, and memory.sequence_tiles is 8: gradients of weights come later",
        ),
        (["memory={optimizer_tier: device, optimizer_resident: 1GB}"], "memory.optimizer_resident is 1000000000, and"),
        (["memory.tiles=4", "launch.workers=2", "parallel.tensor=2"], "memory.tiles is 4, and parallel.tensor is 2: "),
        (["memory.tiles=4", "launch.workers=2", "parallel.pipeline=2"], "memory.tiles is 4, and parallel.pipeline is "),
        (
            ["memory.tiles=4", "compile=on"],
            "memory.tiles is 4, and compile is on: a compiled block has its weights whole",
        ),
        (["memory.tiles=4", "adapter={rank: 8}"], "memory.tiles is 4, and adapter is given: what is frozen is not"),
        (["memory.tiles=4", "train=[embeddings]"], "memory.tiles is 4, and train is given: what is frozen is not"),
        (["memory={tiles: 4, zero: 2}", "launch.workers=2"], "memory.tiles is 4, and with memory.zero 2 every worker"),
        (
            ["memory={recompute: none, recompute_blocks: 3}"],
            "memory.recompute_blocks is 3, and memory.recompute is none",
        ),
        (
            ["memory.recompute_blocks=3", "launch.workers=2", "parallel.pipeline=2"],
            "memory.recompute_blocks is 3, and parallel.pipeline is 2: first stages hold more activations than last",
        ),
        (["objective=distil"], "objective.kind is distil, and there is no objective.teacher"),
        (["objective={kind: distil, teacher: t, supervised: 2.0}"], "objective.supervised is 2, and objective.kind is"),
        (["objective={kind: distil, teacher: t}", "data.carry=[score]"], "data.carry is score, and objective.kind is"),
        (["objective={kind: distil, teacher: t, beta: 0.5}"], "objective.beta is 0.5, and objective.kind is distil"),
        (["objective.top_k=3"], "objective.top_k is 3, and objective.kind is supervised"),
        (["objective.teacher=t"], "objective.teacher is 't', and objective.kind is supervised"),
        (["template=x", "data.template=chat/none.jinja"], "unknown key template"),
        (["data.template=none.jinja"], "data.template: no file none.jinja"),
        (
            ["data.image_min_pixels=9", "data.image_max_pixels=8"],
            "data.image_min_pixels is 9, and data.image_max_pixels 8",
        ),
    ],
)
def test_contradictions(path: Path, overrides: list[str], message: str) -> None:
    assert found(path, *overrides)[0].found.startswith(message)


def test_a_teacher_and_a_vocabulary_in_tiles(path: Path) -> None:
    problems = found(path, "objective={kind: distil, teacher: t}", "memory.tiles=4", "launch.workers=2")
    assert any("memory.tiles is 4, and objective.kind is distil" in problem.found for problem in problems)


@pytest.mark.parametrize(
    ("fields", "message", "change"),
    [
        ("workers: 5, nodes: 2", "5 workers on 2 nodes", "set launch.workers to 4 or 6"),
        ("workers: 1, nodes: 2", "1 workers on 2 nodes", "set launch.workers to 2"),
        ("workers: 4, nodes: 2, gpus_per_node: 4", "2 workers and 4 GPUs on a node", "set launch.workers to 8"),
        ("threads: 4, cpus_per_worker: 2", "4 threads on 2 CPU(s)", "set launch.cpus_per_worker to 4"),
        ("time: tomorrow", "launch.time is 'tomorrow'", "write "),
        ("time: 3", "a time limit of 180 s, and 120 s before it to save", "raise launch.time"),
        ("time: 2:00, save_seconds: 60", "a time limit of 120 s", "raise launch.time"),
        ("options: [--ntasks=4]", "--ntasks=4 in launch.options", "use launch.workers"),
        ("options: [-N2]", "-N2 in launch.options", "use launch.nodes"),
        ("options: [mem=4G]", "'mem=4G' in launch.options", "write --mem=4G"),
        ("options: [' ']", "' ' in launch.options", "write one option"),
    ],
)
def test_slurm_fields_that_make_no_sense(path: Path, fields: str, message: str, change: str) -> None:
    (problem,) = found(path, f"launch={{with: slurm, {fields}}}")
    assert problem.found.startswith(message)
    assert problem.change.startswith(change)
    assert problem.where


@pytest.mark.parametrize(
    "text", ["a\nb", "a\rb", "a\x0bb", "a\x85b", "a\u2028b", "a\u2029b", "a\x00b", "a\x1bb", "a\x7fb"]
)
def test_what_no_line_of_a_job_script_can_hold(path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("launch.partition", "launch.account", "launch.qos", "output", "launch.options"):
        name = key.rpartition(".")[2]
        (problem,) = found(path, "launch.with=slurm", f"{key}={json.dumps(f'--{text}' if name == 'options' else text)}")
        assert name in problem.found
        assert problem.needed
    if "\0" not in text:
        assert found(path, f"output={json.dumps(text)}") == ()  # elsewhere a directory may be called as one likes


def test_where_a_job_of_slurm_can_be_started_and_written(path: Path, tmp_path: Path) -> None:
    (problem,) = found(path, "launch.with=slurm", r"output=a\b")
    assert "backslash" in problem.found
    for name in ("a\nb", "a\\b", "a\u2028b"):
        (tmp_path / name).mkdir()
        with inside(tmp_path / name):
            assert found(path) == ()
            (problem,) = found(path, "launch.with=slurm")
            assert "working directory" in problem.found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("['--mem=1G --array=1-3']", "--array"),
        ("['--arr=1-3']", "another option"),
        ("['--comment=two words']", "belongs to none"),
        ("['--comment=\"open']", "not closed"),
        ("['--comment=a\\']", "backslash"),
        ("[' ']", "an option of sbatch"),
        ("['-']", "an option of sbatch"),
        ("['# a comment']", "an option of sbatch"),
        ("['--mem 1G 2G']", "belongs to none"),
    ],
)
def test_options_that_sbatch_would_take_otherwise(path: Path, options: str, message: str) -> None:
    (problem,) = found(path, f"launch={{with: slurm, options: {options}}}")
    assert message in str(problem)


@pytest.mark.parametrize(
    "options",
    [
        "['--mem 64G']",
        "['--mem=64G --exclusive']",
        "[-x node7]",
        "['--comment=\"two words\"']",
        "['-C a100']",
        "['--mem=1G # enough']",
    ],
)
def test_options_that_sbatch_takes(path: Path, options: str) -> None:
    assert found(path, f"launch={{with: slurm, options: {options}}}") == ()


@pytest.mark.parametrize("time", ["30", "3:01", "1:30:00", "2-12", "0-0:04", "1-00:00:00"])
def test_time_limits_as_slurm_writes_them(path: Path, time: str) -> None:
    options = "[--mem=64G, --constraint=a100, -x node7]"
    assert found(path, f"launch={{with: slurm, time: {time}, options: {options}, setup: module load cuda}}") == ()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.pack=false", "batch.sequences=4"],
        ["data.pack=false"],
        ["data.train.0.weight=1e12", "data.mixture=tokens"],
        ["optimizer.warmup=10", "steps=10"],
        ["optimizer={schedule: wsd, decay: 6, warmup: 0.4}", "steps=10"],
        ["optimizer={schedule: wsd, decay: 6, warmup: 0.5}"],
        ["optimizer={schedule: polynomial, power: 2, final: 0.1}"],
        ["evaluate.every=10", "data.validation=0.1"],
        ["launch.workers=2", "batch.sequences=2"],
        ["data.train=name", "model=gpt2"],
        ["data.image_min_pixels=8", "data.image_max_pixels=8"],
    ],
)
def test_what_goes_together(path: Path, overrides: list[str]) -> None:
    assert found(path, *overrides) == ()


def test_a_faulty_value_does_not_cause_a_second_complaint(path: Path) -> None:
    assert len(found(path, "batch.tokens=-5", "data.pack=false")) == 1


def test_the_places_of_all_keys_of_a_contradiction_are_given(path: Path) -> None:
    path.write_text(path.read_text() + "batch:\n  tokens: 4096\n")
    (problem,) = found(path, "data.pack=false")
    assert problem.where == f"{path}:4, data.pack=false"


def test_data_files(path: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text("[]")
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "nothing").mkdir()

    def problem(name: str) -> str:
        return "; ".join(f"{item.found} {item.change}".strip() for item in found(path, f"data.train={tmp_path}/{name}"))

    assert problem("rows.json") == problem("*.json") == problem("") == ""
    assert problem("row.json").endswith(f"did you mean {rows}?")
    assert problem("empty.jsonl").endswith("is empty (0 bytes)")
    assert problem("nothing").endswith("holds no data file")
    assert problem("*.csv").startswith("no file matches")
    assert problem("a/b/rows.json").endswith(f"there is no directory {tmp_path}/a/b")
    held = [item.where for item in found(path, f"data.validation=[{rows}, missing.json]")]
    assert held == [f"data.validation=[{rows}, missing.json]"]


def test_files_need_not_exist_when_a_runs_config_is_read_back(path: Path) -> None:
    read_config(path, ["data.train=gone.json", "model=/gone"], check_files=False)


def test_model_directories(path: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert "no config.json and no weights" in found(path, f"model={model}")[0].found
    (model / "config.json").write_text("{}")
    (problem,) = found(path, f"model={model}")
    assert problem.found.endswith("has no weights (*.safetensors)")
    assert "init: random" in problem.change
    assert found(path, f"model={model}", "init=random") == ()
    (model / "model.safetensors").touch()
    assert found(path, f"model={model}") == ()
    assert "is a file" in found(path, f"model={model / 'config.json'}")[0].found
    (problem,) = found(path, f"model={tmp_path / 'modle'}")
    assert problem.change == f"did you mean {model}?"


def test_directories_that_cannot_be_made(path: Path, tmp_path: Path) -> None:
    for key in ("output", "data.cache", "memory.offload_dirs"):
        assert found(path, f"{key}={path}")[0].found == f"{key} {path} is a file"
        assert f"{path}, in which {path}/a/b would be" in found(path, f"{key}={path}/a/b")[0].found
        (problem,) = found(path, f"{key}={tmp_path}/$NOWHERE/x")
        assert "$NOWHERE" in problem.found
        assert f"give {key}=..." in problem.change
        assert found(path, f"{key}={tmp_path}/new/one") == ()
    (tmp_path / "$NOWHERE").mkdir()
    assert found(path, f"output={tmp_path}/$NOWHERE/x") == ()


def test_variables_are_left_to_shells(path: Path, tmp_path: Path) -> None:
    for key, name in (("data.train", "$DATA/rows.jsonl"), ("model", "${HOME}/model"), ("data.template", "./$T.jinja")):
        variable = name.strip("./").partition("/")[0].removesuffix(".jinja")
        assert found(path, f"{key}={name}")[0].change.startswith(f"{variable} is not put in here")
    (tmp_path / "$rows.jsonl").write_text("{}")
    assert found(path, f"data.train={tmp_path}/$rows.jsonl") == ()


def test_what_is_no_file_to_read(path: Path, tmp_path: Path) -> None:
    pipe, latin = tmp_path / "pipe.jinja", tmp_path / "latin.jinja"
    os.mkfifo(pipe)
    latin.write_bytes(b"{{ messages }} \xe9")
    assert found(path, f"data.train={pipe}")[0].found == f"{pipe} is neither a file nor a directory"
    assert found(path, "data.train=/dev/zero")[0].found == "/dev/zero is neither a file nor a directory"
    for template in (pipe, "/dev/zero", tmp_path):
        assert found(path, f"data.template={template}/" if template == tmp_path else f"data.template={template}")
    assert found(path, f"data.template={latin}")[0].found == f"data.template {latin} is not UTF-8 (byte 15)"


def test_a_path_that_cannot_be_looked_at(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    told = [problem.found for problem in found(path, "data.validation=other/rows")]
    assert "model owner/small cannot be looked at: Permission denied" in told
    assert "data.validation.0.path other/rows cannot be looked at: Permission denied" in told


def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_trackers(read_config(path, ["track=tensorboard"], check_files=False))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(read_config(path, check_files=False))
    with pytest.raises(UserError) as refused:
        check_trackers(read_config(path, ["track=tensorboard"], check_files=False))
    assert refused.value.problems[0].change.startswith("pip install 'tonnage[tensorboard]'")


def test_a_directory_that_a_tracker_left_behind_is_no_package(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb" / "offline-run-1").mkdir(parents=True)
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(UserError, match="wandb, which is not installed"):
        check_trackers(read_config(path, ["track=wandb"], check_files=False))


def test_samples_that_nobody_asks_for_or_is_sent(path: Path) -> None:
    assert found(path, "track_samples=true")[0].change == "name one: track=tensorboard"
    assert found(path, "track_samples=true", "track=mlflow")[0].change == "set evaluate.prompts, to 8 for instance"


def test_a_template_written_out_is_no_file(path: Path) -> None:
    text = "{%- for m in messages -%}{{- '~/[/INST]' + m['content'] + eos_token -}}{%- endfor -%}" + " " * 5000
    config = read_config(path, [f"data.template={json.dumps(text)}"])
    assert config.data.template == text
    with pytest.raises(UserError, match="at most"):
        read_config(path, [f"data.template={json.dumps(text + ' ' * (1 << 18))}"])
