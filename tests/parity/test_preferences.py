"""Pairs of answers: TRL's numbers in every step, and the same numbers in every layout, tier and arrangement."""

from __future__ import annotations

import copy
import math
import random
import shutil
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plain import final_weights, metrics
from ready import Start, ready, run_of

from forked import train
from tiny import byte_tokenizer, llama_config, write_model, write_rows
from tonnage.decide.decision import Decision
from tonnage.errors import UserError
from tonnage.rundir.directory import RunDirectory

STEPS, PAIRS = 10, 4
WORDS = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "cat", "dog", "house", "tree"]
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
"""Halves of which are whole blocks of nf4."""
Make = Callable[..., Decision]


def pair_rows(number: int) -> list[dict[str, str]]:
    chance = random.Random(7)

    def words(least: int, most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))

    return [{"prompt": words(3, 9), "chosen": words(2, 6), "rejected": words(1, 7)} for _ in range(number)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes runs of one tiny model on the same pairs."""
    folder, number = tmp_path_factory.mktemp("pairs"), count()
    write_rows(folder / "rows.jsonl", pair_rows(60))
    write_model(folder / "model", llama_config(initializer_range=0.2, **WIDE))

    def made(objective: Any, workers: int = 1, start: Start | None = None, **keys: Any) -> Decision:
        data = {"train": str(folder / "rows.jsonl"), "max_length": 192, "template": "plain", "pack": False}
        memory = {"micro_batch": PAIRS // workers} | keys.pop("memory", {})
        text = {
            "model": str(folder / "model"),
            "data": data | {"cache": str(folder / "cache")} | keys.pop("data", {}),
            "objective": objective,
            "batch": {"sequences": PAIRS},
            "steps": STEPS,
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
            "precision": "fp32",
            "compile": "off",
            "memory": memory,
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": 5, "keep": 99},
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        return ready(folder, text | keys, start)

    return made


def steps_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if "grad_norm" in record]


NAMES = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "logprob_chosen": "logps/chosen",
    "logprob_rejected": "logps/rejected",
}
"""Our figures -> TRL's."""


def in_trl(decision: Decision, accumulate: int = 1, **settings: Any) -> list[dict[str, float]]:
    """What TRL's trainer makes of the same pairs, tokens and order, in so many micro-batches a step."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM

    data, seed = decision.prepared.train, decision.config.seed
    rows = []
    for position in range(STEPS * PAIRS):
        pack = data.pack(data.pack_at(position, seed))
        assert pack.forks is not None
        ids, (shared, second) = pack.input_ids.tolist(), pack.forks[0].tolist()
        rows.append({"prompt_ids": ids[:shared], "chosen_ids": ids[shared:second], "rejected_ids": ids[second:]})
    records: list[dict[str, float]] = []

    class Trainer(trl.DPOTrainer):  # type: ignore[name-defined, misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            figures = self._metrics["train"]
            records.append({"loss": float(loss.detach()), **{ours: figures[name][-1] for ours, name in NAMES.items()}})
            return loss

        def log(self, logs: dict[str, float], *more: Any) -> None:
            if "grad_norm" in logs:
                records[-1]["grad_norm"] = logs["grad_norm"]
            super().log(logs, *more)

    optimizer = decision.config.optimizer
    arguments = trl.DPOConfig(
        output_dir=str(Path(decision.config.output) / "trl"),
        per_device_train_batch_size=PAIRS // accumulate,
        gradient_accumulation_steps=accumulate,
        max_steps=STEPS,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.clip,
        gradient_checkpointing=False,
        disable_dropout=True,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
        **settings,
    )
    rows_of_trl = Dataset.from_list(rows)
    model: Any = AutoModelForCausalLM.from_pretrained(base_of(decision), dtype=torch.float32)
    if decision.model.files.adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, decision.config.model, is_trainable=True)
    reference = decision.config.objective.reference
    of_reference = None if reference is None else AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32)
    Trainer(
        model, ref_model=of_reference, args=arguments, train_dataset=rows_of_trl, processing_class=byte_tokenizer()
    ).train()
    steps = [records[at : at + accumulate] for at in range(0, len(records), accumulate)]
    names = ("loss", *NAMES)
    return [
        {name: sum(record[name] for record in step) / accumulate for name in names}
        | {"grad_norm": step[-1]["grad_norm"]}
        for step in steps
    ]


def base_of(decision: Decision) -> str:
    adapter = decision.model.files.adapter
    return decision.config.model if adapter is None else adapter.base


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sigmoid": ({"kind": "dpo", "beta": 0.3}, {"beta": 0.3}),
    "ipo": ({"kind": "ipo"}, {"loss_type": ["ipo"]}),
    "hinge": ({"kind": "hinge", "beta": 0.2}, {"loss_type": ["hinge"], "beta": 0.2}),
    "sigmoid_norm": ({"kind": "dpo", "beta": 1.5, "per_token": True}, {"loss_type": ["sigmoid_norm"], "beta": 1.5}),
    "supervised": (
        {"kind": "dpo", "supervised": 0.5},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5], "accumulate": PAIRS},
    ),
}


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        pytest.param(
            name, adapter, marks=pytest.mark.matrix if name != "sigmoid" else () if adapter else pytest.mark.slow
        )
        for name, adapter in product(SAME, [False, True])
    ],
)
def test_every_step_is_that_of_trl(make: Make, adapted: Path, name: str, adapter: bool) -> None:
    """TRL's own term of supervised loss is a mean over the tokens of a micro-batch: there with one pair in each."""
    ours, theirs = SAME[name]
    optimizer = {"lr": 2e-4, "schedule": "constant", "warmup": 0}
    decision = make(ours, optimizer=optimizer, **({"model": str(adapted)} if adapter else {}))
    train((1, [run_of(decision)]))
    assert_as_in_trl(decision, **theirs)


def assert_as_in_trl(decision: Decision, **theirs: Any) -> None:
    steps, expected = steps_of(run_of(decision)), in_trl(decision, **theirs)
    assert len(steps) == len(expected) == STEPS
    for step, figures in zip(steps, expected, strict=True):
        for name, value in figures.items():
            if name.startswith("reward"):  # a difference of log-probabilities, times beta
                if not decision.config.objective.per_token:  # which TRL's rewards are not
                    size = abs(step[name.replace("reward", "logprob")]) * decision.config.objective.beta
                    assert step[name] == pytest.approx(value, abs=1e-5 * size), (step["step"], name)
            else:
                assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (step["step"], name)


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of the model, with additions that are not zero, as peft writes it."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("adapter")
    write_model(folder / "base", llama_config(initializer_range=0.2, **WIDE))
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32), config)
    model.save_pretrained(str(folder / "adapter"))
    byte_tokenizer().save_pretrained(folder / "adapter")
    return folder / "adapter"


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batches of one": {"memory": {"micro_batch": 1}},
    "prompts twice": {"data": {"share_prefixes": False}},
    "recompute": {"memory": {"recompute": "full"}},
    "on disk": {"memory": {"optimizer_tier": "disk", "gradient_tier": "disk"}},
    "2 workers, zero 0": {"workers": 2, "memory": {"zero": 0}},
    "2 workers, zero 3": {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}},
    "tensor 2": {"workers": 2, "parallel": {"tensor": 2}, "memory": {"micro_batch": 2}},
    "pipeline 2": {"workers": 2, "parallel": {"pipeline": 2}, "memory": {"micro_batch": 1}},
    "4 workers, zero 0": {"workers": 4, "memory": {"zero": 0}},
    "4 workers, zero 3": {"workers": 4, "memory": {"zero": 3}},
}
"""Ways to train that change no number."""
GRID: dict[str, dict[str, Any]] = {
    f"{workers} workers, zero {zero}, micro-batches of {size}": {
        "workers": workers,
        "memory": {"zero": zero, "micro_batch": size},
    }
    for workers in (2, 4)
    for zero in (0, 3)
    for size in (1, 4)
}
TRAINED: dict[str, dict[str, Any]] = {
    "full": {},
    "adapter": {"adapter": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup": 0}},
    "nf4": {"adapter": {"rank": 4, "quantize": "nf4"}, "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup": 0}},
}
QUICK = ("micro-batches of one", "prompts twice", "2 workers, zero 3")
SOME = [pytest.param(name, marks=[] if name == "nf4" else pytest.mark.matrix) for name in TRAINED]


@pytest.mark.parametrize("trained", SOME)
@pytest.mark.matrix
def test_every_layout_gives_the_same_steps(make: Make, trained: str) -> None:
    assert_alike(make, TRAINED[trained], LAYOUTS)


@pytest.mark.parametrize("trained", SOME)
@pytest.mark.matrix
def test_workers_stages_and_micro_batches_change_no_step(make: Make, trained: str) -> None:
    """As many pairs a step as four workers have in micro-batches of four. At the rate of the other tests, weights of a
    model that is trained whole drift apart by as much as 2e-5 in ten such steps."""
    keys = {"optimizer": {"lr": 2e-4, "schedule": "constant", "warmup": 0}} | TRAINED[trained]
    assert_alike(make, keys | {"batch": {"sequences": 4 * PAIRS}}, GRID)


@pytest.mark.matrix
def test_some_layouts_give_the_same_steps(make: Make) -> None:
    assert_alike(make, {}, {name: LAYOUTS[name] for name in QUICK})


def assert_alike(make: Make, keys: dict[str, Any], layouts: dict[str, dict[str, Any]]) -> None:
    """Losses, norms and figures of every step are those of one worker to 1e-5, final weights too."""
    made = {name: make("dpo", **copy.deepcopy(keys | more)) for name, more in {"plain": {}, **layouts}.items()}
    runs = {name: run_of(decision) for name, decision in made.items()}
    for workers in sorted({decision.plan.workers for decision in made.values()}):
        train((workers, [runs[name] for name, decision in made.items() if decision.plan.workers == workers]))
    steps, weights = steps_of(runs["plain"]), final_weights(runs["plain"], STEPS)
    assert len(steps) == STEPS
    assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[-1]["loss"] != pytest.approx(math.log(2), abs=1e-2)
    for name, run in runs.items():
        for step, other in zip(steps, steps_of(run), strict=True):
            for figure in FIGURES_SAME:
                assert other[figure] == pytest.approx(step[figure], rel=1e-5, abs=2e-5), (name, step["step"], figure)
        for parameter, value in final_weights(run, STEPS).items():
            assert float((value - weights[parameter]).norm() / weights[parameter].norm()) < 1e-4, (name, parameter)


FIGURES_SAME = (
    "loss",
    "grad_norm",
    "reward_chosen",
    "reward_rejected",
    "logprob_chosen",
    "tokens",
    "supervised_tokens",
)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(make: Make) -> None:
    """From a checkpoint, with the reference of the model as it was at the start."""
    whole = make("dpo")
    train((1, [run_of(whole)]))
    later = make("dpo", start=(run_of(whole), 5))
    shutil.copy(run_of(whole).reference, run_of(later).reference)
    train((1, [run_of(later)]))
    expected = {record["step"]: record["loss"] for record in steps_of(run_of(whole))}
    for record in steps_of(run_of(later)):
        assert record["step"] > 5
        assert record["loss"] == expected[record["step"]]
    weights = final_weights(run_of(whole), STEPS)
    for name, value in final_weights(run_of(later), STEPS).items():
        assert torch.equal(value, weights[name]), name


def test_a_run_that_goes_on_without_its_reference_is_refused(make: Make) -> None:
    whole = make("dpo", seed=11)
    train((1, [run_of(whole)]))
    later = make("dpo", start=(run_of(whole), 5), seed=11)
    entry = Path(str(later.plan.data.reference_path))
    assert entry.is_dir()
    shutil.rmtree(entry)
    with pytest.raises(AssertionError, match="whose reference log-probabilities are gone"):
        train((1, [run_of(later)]))


@pytest.mark.matrix
def test_what_nothing_was_learned_from_is_as_likely_as_it_was(make: Make) -> None:
    """In bf16 too: the pass computes answers in the micro-batches in which they are trained first, to the bit."""
    runs = []
    for keys in ({}, {"memory": {"micro_batch": 2, "recompute": "full"}}, {"data": {"share_prefixes": False}}):
        decision = make("dpo", precision="bf16", optimizer={"lr": 1e-30, "warmup": 0}, seed=14, **copy.deepcopy(keys))
        shutil.rmtree(str(decision.plan.data.reference_path), ignore_errors=True)
        runs.append(run_of(decision))
        train((1, runs[-1:]))
    for run in runs:
        for step in steps_of(run):
            assert step["reward_chosen"] == step["reward_rejected"] == 0
            assert step["reward_accuracy"] == 0.5


def scores_of(run: RunDirectory) -> np.ndarray:
    scores: np.ndarray = np.load(run.reference, allow_pickle=False)["scores"]
    return scores


@pytest.mark.matrix
def test_the_reference_is_computed_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read from the cache by the next run, to the bit; another layout computes it to 1e-5, another model anew."""
    first = make("dpo", seed=12)
    assert "computed once" in first.plan.reasons["objective.reference"]
    train((1, [run_of(first)]))
    again = make({"kind": "ipo", "beta": 0.3}, seed=12)
    assert "has them from an earlier run" in again.plan.reasons["objective.reference"]
    assert again.plan.data.reference_path == first.plan.data.reference_path
    train((1, [run_of(again)]))
    assert "read from" in run_of(again).log.read_text()
    assert np.array_equal(scores_of(run_of(again)), scores_of(run_of(first)), equal_nan=True)
    assert np.isfinite(scores_of(run_of(first))[:, 0]).sum() == STEPS * PAIRS  # those that the run sees

    shutil.rmtree(str(first.plan.data.reference_path))
    apart = make("dpo", workers=2, seed=12, data={"share_prefixes": False}, memory={"zero": 3, "micro_batch": 1})
    assert apart.plan.data.reference_path == first.plan.data.reference_path
    train((2, [run_of(apart)]))
    np.testing.assert_allclose(scores_of(run_of(apart)), scores_of(run_of(first)), rtol=1e-5)


@pytest.mark.matrix
def test_a_reference_of_another_model(make: Make, tmp_path: Path) -> None:
    """TRL's numbers with a reference of its own: the model before something else was learned."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(make("orpo").config.model)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "reference")
    byte_tokenizer().save_pretrained(tmp_path / "reference")
    optimizer = {"lr": 2e-4, "schedule": "constant", "warmup": 0}
    decision = make({"kind": "dpo", "reference": str(tmp_path / "reference")}, seed=21, optimizer=optimizer)
    assert str(tmp_path / "reference") in decision.plan.reasons["objective.reference"]
    assert decision.plan.data.reference_path != make("dpo", seed=21).plan.data.reference_path
    train((1, [run_of(decision)]))
    assert abs(steps_of(run_of(decision))[0]["reward_chosen"]) > 0.01
    assert_as_in_trl(decision)


@pytest.mark.matrix
def test_workers_share_the_weights_of_a_reference(make: Make, tmp_path: Path) -> None:
    """Of another shape than the model that is trained."""
    config = llama_config(initializer_range=0.25, hidden_size=48, num_hidden_layers=3)
    write_model(tmp_path / "reference", config, seed=9)
    objective = {"kind": "ipo", "reference": str(tmp_path / "reference")}
    whole, scores = make(objective, seed=21), list[np.ndarray]()
    apart = make(objective, workers=2, seed=21, memory={"zero": 3, "micro_batch": 1})
    for decision in (whole, apart):
        train((decision.plan.workers, [run_of(decision)]))
        scores.append(scores_of(run_of(decision)))
        shutil.rmtree(str(decision.plan.data.reference_path))
    np.testing.assert_allclose(scores[1], scores[0], rtol=1e-5)


def test_a_reference_of_another_vocabulary_is_refused(make: Make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    write_model(tmp_path / "model", llama_config(vocab_size=300))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match="has another vocabulary: 1 tokens differ; '<new>' is"):
        make({"kind": "dpo", "reference": str(tmp_path / "model")})


def test_pairs_are_no_rows_of_whose_answers_a_loss_is_told(make: Make) -> None:
    """What is advised names the key, and no objective that the run has anyway."""
    rows = make("dpo").config.data.train[0].path
    with pytest.raises(UserError, match="preferences, of which one answer is chosen") as error:
        make("dpo", evaluate={"general": rows})
    assert "evaluate.general: {path:" in str(error.value)
    assert "objective: dpo" not in str(error.value)


def test_a_stop_is_heard_while_the_reference_is_computed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed until then is kept."""
    from tonnage.training import reference
    from tonnage.training.setting import StoppedEarly

    monkeypatch.setattr(reference, "CHUNK_PACKS", 4)
    decision = make("dpo", seed=22)
    asked = iter([False, False, True])
    with pytest.raises(StoppedEarly):
        assembled(decision, lambda: next(asked))
    entry = Path(str(decision.plan.data.reference_path))
    assert len(list(entry.with_name(f"{entry.name}.parts").glob("*.npy"))) == 2


@pytest.mark.matrix
def test_another_model_template_or_precision_has_another_reference(make: Make, adapted: Path) -> None:
    settings: dict[str, dict[str, Any]] = {
        "same": {},
        "again": {"optimizer": {"lr": 1e-6}},
        "model": {"model": str(adapted)},
        "its base": {"model": str(adapted.with_name("base"))},
        "template": {"data": {"template": "chatml"}},
        "length": {"data": {"max_length": 160}},
        "precision": {"precision": "bf16"},
        "in 4 bits": {"adapter": {"rank": 4, "quantize": "nf4"}},
        "validation": {"data": {"validation": 0.2}},
    }
    paths = {name: make("dpo", **keys).plan.data.reference_path for name, keys in settings.items()}
    assert paths["again"] == paths["its base"] == paths["same"]  # where a model lies says nothing of what it is
    assert len(set(paths.values())) == len(paths) - 2
    assert make("orpo").plan.data.reference_path is None


def test_what_an_interrupted_pass_has_written_is_not_computed_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks lie beside the cache's entry until all are there."""
    from tonnage.training import reference

    monkeypatch.setattr(reference, "CHUNK_PACKS", 4)
    decision = make("dpo", seed=13)
    run, computed = run_of(decision), list[int]()
    whole = reference._scores_of

    def interrupted(job: Any, dataset: Any, packs: np.ndarray, phases: Any) -> np.ndarray:
        if len(computed) == 6:
            raise KeyboardInterrupt
        computed.append(len(packs))
        return whole(job, dataset, packs, phases)

    monkeypatch.setattr(reference, "_scores_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assembled(decision)
    assert not run.reference.exists()
    entry = Path(str(decision.plan.data.reference_path))
    parts = entry.with_name(f"{entry.name}.parts")
    assert len(list(parts.glob("*.npy"))) == 6
    computed.append(0)  # no more interruptions
    assembled(decision)
    assert computed == [4] * 6 + [0] + [4] * 4
    assert (entry / reference.SCORES).exists()
    assert not parts.exists()
    monkeypatch.undo()
    shutil.rmtree(entry)
    scores = scores_of(run)
    run.reference.unlink()
    assembled(decision)
    assert np.array_equal(scores_of(run), scores, equal_nan=True)


def test_a_cache_that_cannot_be_written_ends_no_run(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.errors import user_error
    from tonnage.training import reference

    def refuse(*_: Any) -> None:
        raise user_error("the cache could not be written", "a disk that takes it")

    def fail(path: Path) -> None:
        raise OSError(30, "Read-only file system", str(path))

    decision = make("dpo", seed=17)
    monkeypatch.setattr("tonnage.data.cache.entry", refuse)
    monkeypatch.setattr(reference, "room_for", fail)
    assembled(decision)
    assert np.isfinite(scores_of(run_of(decision))[:, 0]).sum() == STEPS * PAIRS


def test_parts_of_steps_of_another_size_leave_no_holes(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from tonnage.training import reference

    monkeypatch.setattr(reference, "CHUNK_PACKS", 4)
    decision = make("dpo", seed=15)
    entry = Path(str(decision.plan.data.reference_path))
    parts = entry.with_name(f"{entry.name}.parts")
    parts.mkdir(parents=True)
    for number in range(3):  # as a run with other chunks would have left them
        np.save(parts / f"{number:06}.npy", np.array([[number, -1.0, -1.0]]))
    assembled(decision)
    scores = scores_of(run_of(decision))
    assert np.isfinite(scores[:, 0]).sum() == STEPS * PAIRS
    assert not (scores == -1.0).any()


@pytest.mark.parametrize("change", ["fewer pairs", "other rows", "damaged"])
def test_a_run_that_goes_on_with_another_reference_is_refused(make: Make, change: str) -> None:
    whole = make("dpo", seed=16)
    train((1, [run_of(whole)]))
    later = make("dpo", start=(run_of(whole), 5), seed=16)
    scores, rows = scores_of(run_of(whole)), later.plan.data.key
    if change == "fewer pairs":
        scores[np.flatnonzero(np.isfinite(scores[:, 0]))[0]] = np.nan
    np.savez(run_of(later).reference, scores=scores, rows="another" if change == "other rows" else rows)
    if change == "damaged":
        run_of(later).reference.write_bytes(run_of(later).reference.read_bytes()[:200])
    shutil.rmtree(str(later.plan.data.reference_path))
    with pytest.raises(AssertionError, match="of the same rows and all pairs"):
        train((1, [run_of(later)]))


@pytest.mark.slow
def test_a_run_that_goes_on_with_a_named_reference_has_its_numbers(make: Make, tmp_path: Path) -> None:
    """Not those that it began with: they are computed anew, or read from the cache."""
    write_model(tmp_path / "reference", llama_config(initializer_range=0.25, num_hidden_layers=1), seed=9)
    named = {"kind": "dpo", "reference": str(tmp_path / "reference")}
    whole, anew = make("dpo", seed=16), make(named, seed=16)
    train((1, [run_of(whole)]))
    train((1, [run_of(anew)]))
    shutil.rmtree(str(anew.plan.data.reference_path))
    later = make(named, start=(run_of(whole), 5), seed=16)
    shutil.copy(run_of(whole).reference, run_of(later).reference)
    train((1, [run_of(later)]))
    assert not np.array_equal(scores_of(run_of(later)), scores_of(run_of(whole)), equal_nan=True)
    np.testing.assert_array_equal(scores_of(run_of(later)), scores_of(run_of(anew)))


def assembled(decision: Decision, stop_requested: Callable[[], bool] = lambda: False) -> Any:
    """A job in this process, with its reference."""
    from tonnage.parallel.world import join_world
    from tonnage.rundir.positions import PositionFile
    from tonnage.training.assemble import assemble
    from tonnage.training.memory import Phases
    from tonnage.training.setting import WorkerSetting

    run = run_of(decision)
    run.workers.mkdir(exist_ok=True)
    threads = torch.get_num_threads()
    try:
        with join_world() as world:
            phases = Phases(PositionFile(run.worker_position(0)))
            config, plan = decision.config, decision.plan
            return assemble(WorkerSetting(config, plan, world, lambda line: None, phases, stop_requested))
    finally:
        torch.set_num_threads(threads)
