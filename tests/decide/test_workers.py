"""``launch.workers: auto``: as many workers as there are GPUs, whoever asks, and one where there are none."""

from __future__ import annotations

import json
from contextlib import nullcontext
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import tonnage
from pretended import pretend_gpus
from tiny import write_config
from tonnage.api import run as api_run
from tonnage.api import starting
from tonnage.api.run import Running
from tonnage.checkpoint.save import Cursor, Saver
from tonnage.cli import train
from tonnage.config import Config, RayLaunch, SlurmLaunch, as_json, read_config
from tonnage.decide.decision import Decision, asked, decide
from tonnage.decide.plans import suppose
from tonnage.decide.resumption import decide_resumption
from tonnage.decide.written import write_run
from tonnage.errors import UserError
from tonnage.launch.slurm import batch_script
from tonnage.parallel.world import join_world
from tonnage.planning.machine import parse_hardware
from tonnage.planning.workers import decided, decided_for_pods
from tonnage.rundir.directory import RunDirectory

OPEN: dict[str, Any] = {"launch": {"threads": 1}, "batch": {"sequences": 16}, "steps": 40}


@pytest.fixture
def config(tmp_path: Path) -> str:
    return str(write_config(tmp_path, 60, **OPEN, output=str(tmp_path / "run")))


def written(decision: Decision) -> tuple[int, int, object]:
    """Workers of the plan and of the environment that a run has, and what its config says of them."""
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    plan, environment = (json.loads(path.read_text()) for path in (run.plan, run.environment))
    return plan["choice"]["layout"]["workers"], environment["workers"], read_config(run.config).launch.workers


def refused(path: str, *words: str) -> tuple[str, str, str]:
    """What a run is refused for, where, and what is to be changed."""
    with pytest.raises(UserError) as caught:
        decide(path, words)
    (problem,) = caught.value.problems
    return problem.found, problem.where, problem.change


def test_on_a_cpu_there_is_one(config: str) -> None:
    decision = decide(config)
    assert (decision.plan.workers, decision.plan.layout.device) == (1, "cpu")
    assert written(decision) == (1, 1, "auto")


def test_every_gpu_that_is_seen_has_one(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 2)
    decision = decide(config)
    assert (decision.plan.workers, decision.plan.layout.device) == (2, "cuda")
    assert written(decision) == (2, 2, "auto")
    assert decision.launch == decision.config.launch.model_copy(update={"workers": 2})


@pytest.mark.matrix
def test_a_plan_for_hardware_has_as_many_as_a_run_there(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hardware, model = parse_hardware("8xH100"), read_config(config).model
    assert asked(config, [], hardware).plan().workers == 8
    assert suppose(model, ["data.max_length=128"], hardware).workers == 8
    assert asked(config, [], parse_hardware("2x4xH100")).plan().workers == 8
    assert asked(config, [], parse_hardware("4xcpu:16c:64GB")).plan().workers == 4
    assert suppose(model, ["data.max_length=128"], parse_hardware("2xcpu:16c:64GB")).threads_per_worker == 16
    two = ["data.max_length=128", "launch.workers=2"]
    assert suppose(model, two, parse_hardware("cpu:16c:64GB")).threads_per_worker == 8
    assert suppose(model, [*two, "launch.threads=3"], parse_hardware("cpu:16c:64GB")).threads_per_worker == 3
    assert suppose(model, two, hardware).threads_per_worker == hardware.cores // 2
    pretend_gpus(monkeypatch, 8)
    assert decide(config).plan.workers == 8
    assert asked(config, [], None).plan().workers == 8
    assert suppose(model, ["data.max_length=128"]).workers == 8


def test_a_plan_computes_with_as_many_cores_as_its_workers_have_threads(config: str) -> None:
    model, machine = read_config(config).model, parse_hardware("cpu:16c:64GB")

    def seconds(*words: str) -> float:
        layout = ["data.max_length=128", "batch.sequences=64", "memory.micro_batch=64", "checkpoint.every=0"]
        return suppose(model, [*layout, *words], machine).choice.seconds.compute

    assert seconds() == seconds("launch.threads=16") == seconds("launch.threads=32")
    assert 12 * seconds() < seconds("launch.threads=1") < 16.1 * seconds()  # calls take what they take
    slurm = "launch={with: slurm, hardware: 'cpu:16c:64GB', cpus_per_worker: %d}"
    words = ["data.max_length=128", "batch.sequences=64", "memory.micro_batch=64", "checkpoint.every=0"]
    alone, whole = (suppose(model, [*words, slurm % cores]) for cores in (1, 16))
    assert (alone.threads_per_worker, whole.threads_per_worker) == (1, 16)
    assert alone.choice.seconds.compute > 8 * whole.choice.seconds.compute


@pytest.mark.slow
def test_a_number_that_is_said_is_kept_everywhere(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (text := json.loads(Path(config).read_text()))["launch"]["workers"] = 2
    said = Path(config).with_name("said.json")
    said.write_text(json.dumps(text))
    assert asked(str(said), [], parse_hardware("8xH100")).plan().workers == 2
    pretend_gpus(monkeypatch, 4)
    assert written(decide(str(said))) == (2, 2, 2)
    assert decide(config, ["launch.workers=1"]).plan.workers == 1
    found, _, change = refused(config, "launch.workers=5")
    assert found == "5 workers on a machine with 4 GPUs"
    assert change == "launch.workers=4"


def test_what_does_not_go_with_so_many_is_refused_before_the_rows_are_read(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 8)
    monkeypatch.setattr("tonnage.decide.decision.prepare_data", lambda *_: pytest.fail("read"))
    found, where, change = refused(config, "batch.sequences=4")
    assert found == "8 workers and only 4 packs in a step"
    assert (where, change) == ("launch.workers (auto: 8)", "set launch.workers=4, or enlarge the batch")
    found, _, change = refused(config, "parallel.tensor=3")
    assert found == "8 workers, parallel.tensor 3 and parallel.pipeline 1"
    assert change == "set launch.workers=6 or launch.workers=9"
    assert "cannot form 3 equal groups" in refused(config, "parallel.replicate=3")[0]


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["parameter_tier=host", "parameter_tier=disk", "optimizer_tier=disk"])
def test_several_workers_let_rest_elsewhere_what_one_does(
    config: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 2)
    for workers in (1, 2):
        plan = decide(config, [f"memory.{tier}", "precision=fp32", f"launch.workers={workers}"]).plan
        assert (plan.workers, plan.layout.update_tier) == (workers, "host")


@pytest.mark.slow
def test_nothing_that_fits_on_several_names_one_that_does(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker has no buffers for what several send, and alone may keep parameters in the host's memory."""
    pretend_gpus(monkeypatch, 2)
    least = decide(config, ["launch.workers=1", "memory.budget.device=1MB"], force=True).plan.choice.peak_bytes
    both = decide(config, ["memory.budget.device=1MB"], force=True).plan.choice.peak_bytes
    assert least < 0.99 * both
    words = [f"memory.budget.device={round((least + both) / 2 / 0.92)}"]
    assert refused(config, *words)[2] == "launch.workers=1"
    assert decide(config, [*words, "launch.workers=1"]).plan.workers == 1


@pytest.mark.slow
def test_a_run_goes_on_with_as_many_as_there_are_then(
    config: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_gpus(monkeypatch, 4)
    decision = decide(config)
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    facts = {**decision.plan.facts(), "config": as_json(decision.config)}
    with join_world() as world:
        Saver(run.checkpoints, 9, world).save(Cursor(10, 160, 10), {"w": torch.zeros(3)}, {}, facts, wait=True)
    same = decide_resumption(run, [])
    assert (same.decision.plan.layout, same.changes) == (decision.plan.layout, ())
    train._show_resumption(same, Console(width=200))
    assert "changed" not in capsys.readouterr().out
    for number in (2, 0):
        pretend_gpus(monkeypatch, number)
        resumption = decide_resumption(run, [])
        assert resumption.decision.plan.workers == max(1, number)
        assert resumption.decision.config.launch.workers == "auto"
        assert resumption.decision.plan.layout == decide(config).plan.layout, "nothing of the layout of four is kept"
        assert resumption.changes == ()
        train._show_resumption(resumption, Console(width=200))
        assert f"changed  4 -> {max(1, number)} workers" in capsys.readouterr().out
    news = decide_resumption(run, ["evaluate.every=0"]).news
    assert news[-1] == "changed  4 -> 1 workers, as many as there are now (launch.workers: auto)"
    pretend_gpus(monkeypatch, 4)
    said = decide_resumption(run, ["launch.workers=3"])
    assert (said.decision.plan.workers, [str(change) for change in said.changes]) == (3, ["launch.workers: auto -> 3"])


def test_python_is_told_of_other_workers_as_the_command_is(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    decision = decide(config)
    run = RunDirectory(decision.config.output)
    write_run(run, decision)
    facts = {**decision.plan.facts(), "config": as_json(decision.config)}
    with join_world() as world:
        Saver(run.checkpoints, 9, world).save(Cursor(10, 160, 10), {"w": torch.zeros(3)}, {}, facts, wait=True)
    pretend_gpus(monkeypatch, 0)
    at_work = SimpleNamespace(look=lambda: 0)
    monkeypatch.setattr(starting, "forkserver_for", lambda *_, **__: nullcontext())
    monkeypatch.setattr("tonnage.api.starting.local.started", lambda *_, **__: nullcontext(at_work))
    said = "changed  4 -> 1 workers, as many as there are now (launch.workers: auto)"
    for is_terminal in (True, False):
        written = StringIO()
        console = Console(file=written, width=200, force_terminal=is_terminal)
        monkeypatch.setattr(api_run, "terminal", lambda console=console: console)
        monkeypatch.setattr(Running, "wait", lambda running, *_: running._started.closing.close())
        tonnage.open_run(run.path).resume()
        assert (said in written.getvalue()) is is_terminal


def test_a_session_is_one(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_gpus(monkeypatch, 4)
    monkeypatch.setattr("tonnage.training.ready.ready_job", lambda *_: nullcontext(SimpleNamespace()))
    with tonnage.Session(config) as session:
        assert session.plan.workers == 1
        assert session.plan.layout.device == "cuda"
    with pytest.raises(UserError, match="1: a session is one worker"):
        tonnage.Session(config, launch={"workers": 4})


def test_a_job_of_slurm_has_one_for_each_gpu_of_its_nodes(config: str, tmp_path: Path) -> None:
    words = ["launch={with: slurm, nodes: 2, gpus_per_node: 8, hardware: 8xH100}", "batch.sequences=16"]
    decision = decide(config, words)
    assert (decision.plan.workers, decision.config.launch.workers) == (16, "auto")
    assert isinstance(decision.launch, SlurmLaunch)
    script = batch_script(decision.launch, RunDirectory(tmp_path / "run"))
    assert "#SBATCH --ntasks=16\n#SBATCH --ntasks-per-node=8\n" in script
    assert decide(config, ["launch={with: slurm, nodes: 3}"]).plan.workers == 3


def test_a_node_of_slurm_that_is_not_like_this_machine_is_to_be_named(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_gpus(monkeypatch, 1, "NVIDIA A100-SXM4-80GB")
    words = ["launch={with: slurm, gpus_per_node: 4}"]
    found, _, change = refused(config, *words)
    assert found == "4 workers on a machine with 1 GPU"
    assert change == "say what a node has, as launch.hardware=4xA100-80GB"
    assert decide(config, [*words, "launch.hardware=4xA100-80GB"]).plan.workers == 4


def test_workers_of_ray_are_as_many_as_the_gpus_they_reserve() -> None:
    def number(hardware: str, **launch: Any) -> int:
        fields = {"model": "m", "data": {"train": "rows"}, "launch": {"with": "ray", "address": "auto"} | launch}
        return decided(Config.model_validate(fields), parse_hardware(hardware)).launch.num_workers

    assert number("8xH100", gpus_per_worker=1, nodes=2) == 16
    assert number("8xH100", gpus_per_worker=1, nodes=2, least=4) == 16
    assert number("8xH100", nodes=2) == 16
    assert number("8xH100", gpus_per_worker=0, nodes=2) == number("cpu:16c:64GB", nodes=2) == 2
    with pytest.raises(UserError, match="at least 9 workers and at most 8"):
        number("8xH100", gpus_per_worker=1, least=9)


@pytest.mark.slow
def test_workers_of_ray_reserve_the_gpus_that_they_are_planned_for(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray hides all GPUs from a worker that reserves none, so a plan for GPUs is not carried out by such."""

    def gpus(*words: str) -> int:
        launch = (decision := decide(config, ["launch.with=ray", *words])).launch
        assert isinstance(launch, RayLaunch)
        assert launch.num_gpus == (decision.plan.layout.device == "cuda")
        assert launch.num_workers == decision.plan.workers
        return launch.num_workers * launch.num_gpus

    assert gpus() == 0
    pretend_gpus(monkeypatch, 4)
    assert gpus() == 4
    kept = decide(config, ["launch.with=ray"]).config.launch
    assert isinstance(kept, RayLaunch)
    assert (kept.workers, kept.gpus_per_worker) == ("auto", "auto"), "whoever goes on with it may have other nodes"
    found, _, change = refused(config, "launch.with=ray", "launch.gpus_per_worker=0")
    assert found.startswith("launch.gpus_per_worker is 0, and a plan for")
    one, other = change.removesuffix(" to train on processors").split(", or ")
    assert (gpus(one), gpus("launch.gpus_per_worker=0", other)) == (4, 0)
    assert gpus("launch.hardware=cpu:2c:8GB") == 0
    none = ["launch.with=ray", "launch.gpus_per_worker=0"]
    with pytest.raises(UserError, match="or --hardware cpu:") as caught:
        asked(config, none, parse_hardware("4xH100")).plan()
    hardware = caught.value.problems[0].change.split(" to train")[0].rpartition(" ")[2]
    assert asked(config, none, parse_hardware(hardware)).plan().layout.device == "cpu"


def test_a_shorthand_may_leave_the_most_open(config: str) -> None:
    launch = read_config(config, ["launch={with: ray, address: auto, workers: [2, auto]}"]).launch
    assert isinstance(launch, RayLaunch)
    assert (launch.least, launch.workers) == (2, "auto")


def test_pods_have_what_the_config_says_of_them(config: str) -> None:
    def number(launch: str) -> int:
        return decided_for_pods(read_config(config, [f"launch={launch}"])).launch.num_workers

    assert number("{with: local}") == 1
    assert number("{with: slurm, nodes: 2, gpus_per_node: 4}") == 8
    assert number("{with: ray, address: auto, nodes: 2, gpus_per_worker: 1, hardware: 4xH100}") == 8
    with pytest.raises(UserError, match=r"how many GPUs a node has(.|\n)*launch.hardware=8xH100"):
        number("{with: ray, address: auto, gpus_per_worker: 1}")
    assert number("{with: ray, address: auto, nodes: 2, hardware: 4xH100}") == 8
    assert number("{with: ray, address: auto, nodes: 2}") == 2
