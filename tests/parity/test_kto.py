"""Answers that are each good or bad: TRL's numbers in every step, and the same numbers in every layout."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from plain import final_weights, metrics
from ready import ready, run_of

from forked import train
from tiny import byte_tokenizer, llama_config, write_model, write_rows
from tonnage.decide.decision import Decision
from tonnage.rundir.directory import RunDirectory

STEPS, ROWS = 10, 4
WORDS = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "cat", "dog", "house", "tree"]
Make = Callable[..., Decision]


def rows_with_labels(number: int) -> list[dict[str, Any]]:
    chance = random.Random(7)

    def words(least: int, most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))

    return [{"prompt": words(3, 9), "completion": words(1, 7), "label": chance.random() < 0.7} for _ in range(number)]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes runs of one tiny model on the same rows."""
    folder, number = tmp_path_factory.mktemp("kto"), count()
    write_rows(folder / "rows.jsonl", rows_with_labels(60))
    write_model(folder / "model", llama_config(initializer_range=0.2))

    def made(workers: int = 1, **keys: Any) -> Decision:
        data = {"train": str(folder / "rows.jsonl"), "max_length": 192, "template": "plain", "pack": False}
        memory = {"micro_batch": ROWS // workers} | keys.pop("memory", {})
        text = {
            "model": str(folder / "model"),
            "data": data | {"cache": str(folder / "cache")} | keys.pop("data", {}),
            "objective": {"kind": "kto", "beta": 0.3, "desirable": 1.2, "undesirable": 0.7},
            "batch": {"sequences": ROWS},
            "steps": STEPS,
            "optimizer": {"lr": 2e-4, "schedule": "constant", "warmup": 0},
            "precision": "fp32",
            "compile": "off",
            "memory": memory,
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": STEPS, "keep": 99},
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        return ready(folder, text | keys, None)

    return made


def steps_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if "grad_norm" in record]


NAMES = {
    "reward_chosen": "rewards/chosen",
    "reward_rejected": "rewards/rejected",
    "logprob_chosen": "logps/chosen",
    "logprob_rejected": "logps/rejected",
    "kl": "kl",
}
"""Our figures -> TRL's."""


def in_trl(decision: Decision, **settings: Any) -> list[dict[str, float]]:
    """What TRL's trainer makes of the same rows, mates, tokens and order, in one micro-batch a step."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from torch.utils.data import SequentialSampler
    from transformers import AutoModelForCausalLM

    data, seed = decision.prepared.train, decision.config.seed
    rows = []
    for position in range(STEPS * ROWS):
        pack = data.pack(data.pack_at(position, seed))
        assert pack.forks is not None
        ids, (shared, second) = pack.input_ids.tolist(), pack.forks[0].tolist()
        own = {"prompt_ids": ids[:shared], "completion_ids": ids[shared:second]}
        rows.append(own | {"KL_completion_ids": ids[second:], "label": bool(pack.carried["desirable"][0])})
    records: list[dict[str, float]] = []

    class Trainer(trl.KTOTrainer):  # type: ignore[name-defined, misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            figures = self._metrics["train"]
            known = {ours: figures[name][-1] for ours, name in NAMES.items() if figures.get(name)}
            records.append({"loss": float(loss.detach()), **known})
            return loss

        def log(self, logs: dict[str, float], *more: Any) -> None:
            if "grad_norm" in logs:
                records[-1]["grad_norm"] = logs["grad_norm"]
            super().log(logs, *more)

    optimizer, objective = decision.config.optimizer, decision.config.objective
    arguments = trl.KTOConfig(
        output_dir=str(Path(decision.config.output) / "trl"),
        beta=objective.beta,
        desirable_weight=objective.desirable,
        undesirable_weight=objective.undesirable,
        per_device_train_batch_size=ROWS,
        gradient_accumulation_steps=1,
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
    import torch

    model: Any = AutoModelForCausalLM.from_pretrained(decision.config.model, dtype=torch.float32)
    tokenizer = byte_tokenizer()
    Trainer(model, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer).train()
    return records


@pytest.mark.slow
def test_every_step_is_that_of_trl(make: Make) -> None:
    decision = make()
    train((1, [run_of(decision)]))
    steps, expected = steps_of(run_of(decision)), in_trl(decision)
    assert len(steps) == len(expected) == STEPS
    assert sum(figures["kl"] > 1e-3 for figures in expected) > 2  # else nothing is known of it
    for step, figures in zip(steps, expected, strict=True):
        for name in NAMES:
            assert (name in step) == (name in figures), (step["step"], name)
        for name, value in figures.items():
            size = 1.0
            if name.startswith("reward"):  # a difference of log-probabilities, times beta
                size = abs(step[name.replace("reward", "logprob")]) * decision.config.objective.beta
            elif name == "kl":
                size = 10.0
            assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-5 * size), (step["step"], name)


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batches of one": {"memory": {"micro_batch": 1}},
    "prompts twice": {"data": {"share_prefixes": False}},
    "2 workers, zero 3": {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}},
    "pipeline 2": {"workers": 2, "parallel": {"pipeline": 2}, "memory": {"micro_batch": 1}},
}
"""Ways to train that change no number."""
MORE: dict[str, dict[str, Any]] = {
    "recompute": {"memory": {"recompute": "full"}},
    "2 workers, zero 0": {"workers": 2, "memory": {"zero": 0}},
    "tensor 2": {"workers": 2, "parallel": {"tensor": 2}, "memory": {"micro_batch": 2}},
    "4 workers, zero 3": {"workers": 4, "memory": {"zero": 3}},
}
ADAPTER = {"adapter": {"rank": 4, "alpha": 8}, "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup": 0}}


@pytest.mark.matrix
def test_layouts_give_the_same_steps(make: Make) -> None:
    assert_alike(make, {}, LAYOUTS)


@pytest.mark.matrix
def test_more_layouts_give_the_same_steps(make: Make) -> None:
    assert_alike(make, {}, MORE)


@pytest.mark.matrix
def test_layouts_give_the_same_steps_of_an_adapter(make: Make) -> None:
    assert_alike(make, ADAPTER, {name: LAYOUTS[name] for name in ("micro-batches of one", "2 workers, zero 3")})


def assert_alike(make: Make, keys: dict[str, Any], layouts: dict[str, dict[str, Any]]) -> None:
    """Losses, norms and figures of every step and evaluation are those of one worker to 1e-5, final weights too."""
    same = copy.deepcopy(keys) | {"evaluate": {"every": 5}}
    made = {
        name: make(
            **same | {key: value for key, value in copy.deepcopy(more).items() if key != "data"},
            data={"validation": 0.3} | more.get("data", {}),
        )
        for name, more in {"plain": {}, **layouts}.items()
    }
    runs = {name: run_of(decision) for name, decision in made.items()}
    for workers in sorted({decision.plan.workers for decision in made.values()}):
        train((workers, [runs[name] for name, decision in made.items() if decision.plan.workers == workers]))
    weights = final_weights(runs["plain"], STEPS)
    records = told_by(runs["plain"])
    assert sum("eval_reward_margin" in record for record in records) == 3  # before the first step as well
    assert max(record.get("kl", 0.0) for record in records) > 1e-3
    for name, run in runs.items():
        for record, other in zip(records, told_by(run), strict=True):
            assert other == pytest.approx(record, rel=1e-5, abs=2e-5), name
        for parameter, value in final_weights(run, STEPS).items():
            assert float((value - weights[parameter]).norm() / weights[parameter].norm()) < 1e-4, (name, parameter)


def told_by(run: RunDirectory) -> list[dict[str, float]]:
    """Figures of steps and evaluations that no layout changes."""
    names = ("step", "loss", "grad_norm", *NAMES, "reward_margin", "tokens", "supervised_tokens", "eval_loss")
    return [
        {name: value for name, value in record.items() if name in names or name.startswith("eval_reward")}
        for record in run.read_metrics()
        if {"loss", "eval_loss"} & record.keys()
    ]
