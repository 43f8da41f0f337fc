"""What a config leaves open is decided once, said, and written into the run; and no plan guesses at its machine."""

from __future__ import annotations

import datetime
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import NemotronConfig

from doctor.machines import compute
from tiny import llama_config, write_config, write_model
from tonnage.cli.plan import show_plan
from tonnage.cli.train import train
from tonnage.config import Adapter, Batch, read_config
from tonnage.decide.decision import Decision, asked, decide, decide_on
from tonnage.decide.plans import suppose
from tonnage.decide.written import write_run
from tonnage.doctor import measure
from tonnage.doctor.cache import load_machine
from tonnage.errors import UserError
from tonnage.host.cachedir import default_directory
from tonnage.planning import saving, space
from tonnage.planning.plan import SAFETY
from tonnage.rundir.directory import RunDirectory
from tonnage.training import isolation

QUIET = Console(quiet=True)
EXACT = ["memory.moments=fp32", *(f"memory.{tier}_tier=device" for tier in ("optimizer", "gradient", "parameter"))]
OPEN: dict[str, Any] = {"batch": "auto", "launch": {"workers": 1, "threads": 1}}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_config(tmp_path_factory.mktemp("decide"), 400, **OPEN))


@pytest.fixture
def saves_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of milliseconds are long enough to be saved on the way."""
    monkeypatch.setattr(saving, "USUAL_SECONDS", 0.02)


def shown(decision: Decision) -> str:
    out = io.StringIO()
    show_plan(decision.plan, Console(width=160, file=out))
    return out.getvalue()


def test_a_batch_that_is_open_is_written_down(config: str, tmp_path: Path) -> None:
    decision = decide(config, [f"output={tmp_path / 'run'}"])
    num_packs = decision.prepared.train.num_packs
    packs = num_packs // 20
    assert packs > 1
    assert decision.plan.packs_per_step == packs
    assert decision.config.batch == Batch(tokens=packs * 128)
    assert decision.config.packs_per_step == packs
    write_run(RunDirectory(tmp_path / "run"), decision)
    assert read_config(tmp_path / "run" / "config.yaml") == decision.config
    assert f"auto: {packs} packs, the most for 20 steps in an epoch" in shown(decision)
    apart = decide(config, ["data.pack=false"])
    assert apart.config.batch == Batch(sequences=400 // 20)
    assert apart.plan.packs_per_step == 20
    said = decide(config, ["batch.sequences=3"])
    assert (said.config.batch, said.plan.packs_per_step) == (Batch(sequences=3), 3)
    assert "auto: " not in shown(said).split("saves")[0]


WIDE: dict[str, Any] = {"hidden_size": 480, "intermediate_size": 1024, "num_hidden_layers": 4}


@pytest.mark.matrix
def test_what_is_trained_is_written_down_where_it_is_open(tmp_path: Path) -> None:
    words = OPEN | {"adapter": "auto", "batch": {"sequences": 4}, "steps": 4}
    path = str(write_config(tmp_path, 60, **words))
    write_model(tmp_path / "model", llama_config(**WIDE))
    plenty = decide(path, ["memory.budget.device=64GB", f"output={tmp_path / 'all'}"])
    assert (plenty.config.adapter, plenty.config.optimizer.lr) == ("none", 2e-5)
    assert plenty.plan.weights.base_digest == "", "nothing of the model stays as it is"
    told = (
        "adapter auto: full weights, for which there is room with fp32 moments and nothing on disk; a step would take"
    )
    assert told in " ".join(shown(plenty).split())
    full = decide(path, ["adapter=none", *EXACT, "memory.budget.device=1MB"], force=True).plan.choice.peak_bytes
    lora = decide(path, ["adapter.rank=32", *EXACT, "memory.budget.device=1MB"], force=True).plan.choice.peak_bytes
    assert lora < 0.98 * full
    short = f"memory.budget.device={round((full + lora) / 2 / SAFETY)}"
    decision = decide(path, [short, f"output={tmp_path / 'run'}"])
    assert decision.config.adapter == Adapter()
    assert decision.config.optimizer.lr == 2e-4
    assert decision.plan.weights.base_digest
    assert decision.plan.model.adapted
    assert (decision.plan.layout.moments, decision.plan.layout.tiers_on_disk) == ("fp32", [])
    assert "optimizer.lr is 0.0002, 10 times that of full weights" in decision.plan.reasons["adapter"]
    write_run(RunDirectory(tmp_path / "run"), decision)
    kept = read_config(tmp_path / "run" / "config.yaml")
    assert kept == decision.config
    assert "adapter" not in decide_on(kept).plan.reasons, "what was chosen once is said from then on"
    assert decide(path, [short, "optimizer.lr=1e-3"]).config.optimizer.lr == 1e-3
    assert asked(path, [short], None).plan().reasons["adapter"] == decision.plan.reasons["adapter"]


def test_what_a_template_was_told_is_written_down(config: str, tmp_path: Path) -> None:
    dated = tmp_path / "dated.jinja"
    dated.write_text(
        "{{ strftime_now('%Y') + style }}{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' }}"
        "{% endfor %}"
    )
    told = [f"data.template={dated}", "data.template_arguments={style: short}", "data.over_length=drop"]
    told += ["data.max_loss=1"]
    decision = decide(config, [*told, f"output={tmp_path / 'run'}"])
    assert read_config(config, told).data.date == "auto"
    today = datetime.date.today().isoformat()
    run = RunDirectory(tmp_path / "run")
    write_run(run, decision)
    kept = read_config(run.config).data
    assert (kept.date, kept.template_arguments) == (today, {"style": "short"}), "a resume on another day tells the same"
    options = json.loads(run.data.read_text())["options"]
    assert (options["date"], options["template_arguments"]) == (today, {"style": "short"})
    assert decide(config, [*told, "data.date=2020-02-29"]).config.data.date == "2020-02-29"
    assert decide(config, ["data.date=2020-02-29"]).config.data.date == "2020-02-29", "though no template asks"


def test_checkpoints_that_are_open_are_written_down(config: str, saves_soon: None) -> None:
    decision = decide(config, [])
    every = decision.config.checkpoint.every
    assert every == decision.plan.choice.saving.every > 0
    assert decision.plan.layout.saves_beside
    often = "every step" if every == 1 else f"every {every} steps"
    assert f"auto: {often} (about 0 s), training waits" in shown(decision)
    again = decide(config, [f"checkpoint.every={every}"])
    assert again.config.checkpoint == decision.config.checkpoint
    assert again.plan.choice == decision.plan.choice
    assert decide(config, ["steps=1"]).config.checkpoint.every == 0


@pytest.mark.slow
def test_a_disk_that_holds_one_checkpoint_is_no_reason_to_refuse(
    config: str, saves_soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = space.checkpoint_bytes(decide(config, []).plan)
    monkeypatch.setattr(space, "_too_small", lambda needs: sum(need.num_bytes for need in needs) > 1.5 * one)
    decision = decide(config, [])
    assert (decision.config.checkpoint.every, decision.plan.choice.saving.every) == (0, 0)
    assert not decision.plan.layout.saves_beside
    assert "warning the run is saved at its end alone: the disk has no room" in shown(decision)
    assert "checkpoint.every=auto" not in shown(decision)
    assert "the disk has no room for 3 checkpoints" in decision.plan.reasons["checkpoint.every"]
    assert decide(config, ["checkpoint.every=2"]).config.checkpoint.every == 2  # what is said stays


@pytest.mark.slow
def test_an_elastic_run_saves_as_often_as_its_slowest_size_needs(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["launch={with: ray, workers: [1, 3], address: 'auto', threads: 1}", "batch.sequences=3"]
    monkeypatch.setattr("tonnage.decide.rows.prepare_data", _prepared_here(config))
    monkeypatch.setattr(saving, "USUAL_SECONDS", 0.02)
    decision = decide(config, words)
    sizes = (decision.plan, *decision.others)
    assert [plan.workers for plan in sizes] == [3, 2, 1]
    every = decision.config.checkpoint.every
    assert {plan.choice.saving.every for plan in sizes} == {every}
    alone = decide(config, ["batch.sequences=3"]).config.checkpoint.every
    assert every != "auto"
    assert alone != "auto"
    assert 0 < every <= alone
    said = "every step" if every == 1 else f"every {every} steps"
    assert decision.plan.reasons["checkpoint.every"].startswith(f"auto: {said}")


def _prepared_here(path: str) -> Any:
    prepared = decide(path, []).prepared
    return lambda *_: prepared


def test_few_steps_are_said_before_training(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    train(config, ["batch.sequences=64", "epochs=1"], dry_run=True)
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(
        r"warning \d steps in the whole run: hardly anything is learnt in so few\. Set batch\.tokens=", said
    )
    train(config, ["epochs=1"], dry_run=True)
    assert "warning" not in capsys.readouterr().out


@pytest.fixture
def measured(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A cache without machines, and a machine that is measured in no time; what it was measured for."""
    decide(config, [])
    for known in ("profiles", "isolation"):
        shutil.copytree(default_directory() / known, tmp_path / "cache" / known)
    monkeypatch.setenv("TONNAGE_CACHE", str(tmp_path / "cache"))
    done: list[float] = []

    def probe(*_: Any, **__: Any) -> Any:
        done.append(0.0)
        return compute(quick=True, glance=True)

    monkeypatch.setattr(measure, "_probed", probe)
    return done


def test_the_first_plan_measures_the_machine(config: str, measured: list[float]) -> None:
    first = decide(config, [])
    assert len(measured) == 1
    assert "measured now, in 0.0 s; tonnage doctor measures longer" in shown(first)
    assert "(measured)" in first.plan.machine
    again = decide(config, [])
    assert len(measured) == 1
    assert "measured now" not in shown(again)
    assert again.plan.choice.seconds == first.plan.choice.seconds
    assert load_machine() is not None


@pytest.mark.slow
def test_other_hardware_is_not_measured(config: str, measured: list[float]) -> None:
    from tonnage.planning.machine import parse_hardware

    suppose(read_config(config).model, ["data.max_length=128"], parse_hardware("8xH100"))
    assert measured == []
    suppose(read_config(config).model, ["data.max_length=128"])
    assert len(measured) == 1


def test_a_cache_that_cannot_be_written_costs_the_measurement(
    config: str, measured: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tonnage.doctor import cache

    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(cache, "write_json", refuse)
    for number in (1, 2):
        assert "measured now" in shown(decide(config, []))
        assert len(measured) == number


@pytest.mark.slow
def test_documents_that_would_meet_in_one_row_have_rows_of_their_own(tmp_path: Path) -> None:
    NemotronConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    ).save_pretrained(tmp_path)
    plan = suppose(str(tmp_path), ["data.max_length=64", "init=random"])
    assert (plan.layout.arrangement, plan.layout.share_prefixes) == ("padded", False)
    assert plan.reasons["rows"].startswith("padded: documents would not keep to themselves in one row (")


def test_prefixes_are_shared_only_where_the_trial_allows_it(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = isolation.isolation_of
    assert decide(config, []).plan.layout.share_prefixes

    def without(*given: Any, **named: Any) -> isolation.Isolation:
        return replace(asked(*given, **named), shares_prefixes=False)

    monkeypatch.setattr(isolation, "isolation_of", without)
    assert not decide(config, []).plan.layout.share_prefixes


def test_recompute_that_changes_gradients_is_never_planned(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = isolation.isolation_of

    def inexact(*given: Any, **named: Any) -> isolation.Isolation:
        return replace(asked(*given, **named), inexact_recompute={"selective": "the gradient of x is off by 27.0%"})

    monkeypatch.setattr(isolation, "isolation_of", inexact)
    with pytest.raises(UserError) as refused:
        decide(config, ["memory.recompute=selective"])
    message = str(refused.value)
    assert "memory.recompute" in message
    assert "other gradients with selective recompute than without" in message
    assert "the gradient of x is off by 27.0%" in message
    assert "memory.recompute=full or memory.recompute=none" in message
    for override in ([], ["memory.recompute=full"], ["memory.recompute_blocks=1"]):
        assert decide(config, override).plan.layout.recompute != "selective"
