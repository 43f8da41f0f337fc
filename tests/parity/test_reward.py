"""Reward models: TRL's numbers in every step, the same in every layout, and transformers' scores of the export."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from plain import final_weights, metrics
from ready import Start, ready, run_of
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from forked import train
from tiny import byte_tokenizer, llama_config, mixture_config, write_model, write_rows
from tonnage.decide.decision import Decision
from tonnage.decide.exports import export_checkpoint
from tonnage.decide.handing import Wishes, next_of, serving
from tonnage.errors import UserError
from tonnage.inference.generate import load
from tonnage.model.build import allocate, initialise_randomly, on_meta
from tonnage.rundir.directory import RunDirectory

STEPS, PAIRS, SEED = 10, 4, 5
WORDS = ["red", "green", "blue", "one", "two", "three", "sun", "moon", "cat", "dog", "house", "tree"]
Make = Callable[..., Decision]


def reward_rows(number: int) -> list[dict[str, Any]]:
    """Pairs, every other one with a margin."""
    chance = random.Random(7)

    def words(least: int, most: int) -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(least, most)))

    rows: list[dict[str, Any]] = [
        {"prompt": words(3, 9), "chosen": words(2, 6), "rejected": words(1, 7)} for _ in range(number)
    ]
    for row in rows[::2]:
        row["margin"] = chance.randint(0, 3) / 2
    return rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pairs")
    write_rows(directory / "rows.jsonl", reward_rows(60))
    write_model(directory / "model", llama_config(initializer_range=0.2))
    return directory


@pytest.fixture(scope="module")
def make(folder: Path) -> Make:
    """Makes runs of one tiny model on the same pairs."""
    number = count()

    def made(workers: int = 1, start: Start | None = None, **keys: Any) -> Decision:
        data = {"train": str(folder / "rows.jsonl"), "max_length": 192, "template": "plain", "pack": False}
        memory = {"micro_batch": PAIRS // workers} | keys.pop("memory", {})
        text = {
            "model": str(folder / "model"),
            "data": data | {"cache": str(folder / "cache")} | keys.pop("data", {}),
            "objective": {"kind": "reward", "center": 0.01},
            "batch": {"sequences": PAIRS},
            "steps": STEPS,
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0},
            "precision": "fp32",
            "compile": "off",
            "memory": memory,
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": 5, "keep": 99},
            "output": str(folder / f"run-{next(number)}"),
            "seed": SEED,
        }
        return ready(folder, text | keys, start)

    return made


def steps_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if "grad_norm" in record]


def pairs_of(decision: Decision, positions: range) -> list[dict[str, Any]]:
    """The pairs of a run at some positions, as TRL takes them."""
    data, rows = decision.prepared.train, []
    for position in positions:
        pack = data.pack(data.pack_at(position, decision.config.seed))
        assert pack.forks is not None
        ids, (shared, second) = pack.input_ids.tolist(), pack.forks[0].tolist()
        margin = float(pack.carried["margin"][0])
        rows.append({"chosen_ids": ids[:second], "rejected_ids": ids[:shared] + ids[second:], "margin": margin})
    return rows


def new_head(decision: Decision) -> Tensor:
    """The head of scores as the run begins with it."""
    model = on_meta(copy.deepcopy(decision.model.config), torch.float32)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, SEED, names=["score.weight"])
    return model.get_parameter("score.weight").detach()


def in_trl(decision: Decision) -> list[dict[str, float]]:
    """What TRL's trainer makes of the same pairs and order, from the same head."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from torch.utils.data import SequentialSampler

    records: list[dict[str, float]] = []

    class Trainer(trl.RewardTrainer):  # type: ignore[name-defined, misc]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

        def compute_loss(self, *arguments: Any, **named: Any) -> Any:
            loss = super().compute_loss(*arguments, **named)
            figures = self._metrics["train"]
            records.append({"loss": float(loss.detach()), "reward_margin": figures["margin"][-1]})
            records[-1]["reward_accuracy"] = figures["accuracy"][-1]
            return loss

        def log(self, logs: dict[str, float], *more: Any) -> None:
            if "grad_norm" in logs:
                records[-1]["grad_norm"] = logs["grad_norm"]
            super().log(logs, *more)

    optimizer = decision.config.optimizer
    arguments = trl.RewardConfig(
        output_dir=str(Path(decision.config.output) / "trl"),
        per_device_train_batch_size=PAIRS,
        max_steps=STEPS,
        learning_rate=optimizer.lr,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        max_grad_norm=optimizer.clip,
        center_rewards_coefficient=decision.config.objective.center,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    adapter = decision.model.files.adapter
    base = decision.config.model if adapter is None else adapter.base
    model: Any = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
    if adapter is None:
        with torch.no_grad():
            model.score.weight.copy_(new_head(decision))
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, decision.config.model, is_trainable=True)
    rows = Dataset.from_list(pairs_of(decision, range(STEPS * PAIRS)))
    Trainer(model, args=arguments, train_dataset=rows, processing_class=byte_tokenizer()).train()
    return records


@pytest.mark.slow
def test_every_step_is_that_of_trl(make: Make) -> None:
    decision = make(optimizer={"lr": 2e-4, "schedule": "constant", "warmup": 0})
    notes = " ".join(decision.plan.weights.notes())
    assert decision.plan.weights.missing == ("score.weight",)
    assert "a new head of scores" in notes
    assert {row["margin"] for row in pairs_of(decision, range(STEPS * PAIRS))} > {0.0}
    train((1, [run_of(decision)]))
    assert_as_in_trl(decision)


def assert_as_in_trl(decision: Decision) -> None:
    steps, expected = steps_of(run_of(decision)), in_trl(decision)
    assert len(steps) == len(expected) == STEPS
    for step, figures in zip(steps, expected, strict=True):
        for name, value in figures.items():
            assert step[name] == pytest.approx(value, rel=1e-5, abs=1e-5), (step["step"], name)


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batches of one": {"memory": {"micro_batch": 1}},
    "prompts twice": {"data": {"share_prefixes": False}},
    "recompute": {"memory": {"recompute": "full"}},
    "on disk": {"memory": {"optimizer_tier": "disk", "gradient_tier": "disk"}},
    "parameters on disk": {"memory": {"parameter_tier": "disk"}},
    "2 workers, zero 0": {"workers": 2, "memory": {"zero": 0}},
    "2 workers, zero 1": {"workers": 2, "memory": {"zero": 1, "micro_batch": 1}},
    "2 workers, zero 2": {"workers": 2, "memory": {"zero": 2, "micro_batch": 1}},
    "2 workers, zero 3": {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}},
}
"""Ways to train that change no number."""
ADAPTER: dict[str, Any] = {
    "adapter": {"rank": 4, "alpha": 8},
    "optimizer": {"lr": 2e-3, "schedule": "constant", "warmup": 0},
}
QUICK = ("micro-batches of one", "prompts twice", "recompute", "2 workers, zero 0", "2 workers, zero 3")
FIGURES_SAME = ("loss", "grad_norm", "reward_chosen", "reward_rejected", "tokens", "supervised_tokens")


@pytest.mark.parametrize("trained", [{}, ADAPTER], ids=["full", "adapter"])
@pytest.mark.matrix
def test_every_layout_gives_the_same_steps(make: Make, trained: dict[str, Any]) -> None:
    assert_alike(make, trained, [*LAYOUTS])


@pytest.mark.matrix
def test_some_layouts_give_the_same_steps(make: Make) -> None:
    assert_alike(make, {}, QUICK)


@pytest.mark.matrix
def test_an_adapter_gives_the_same_steps_in_some_layouts(make: Make) -> None:
    assert_alike(make, ADAPTER, ("micro-batches of one", "2 workers, zero 3"))


def assert_alike(make: Make, keys: dict[str, Any], names: Any) -> None:
    """Losses, norms and figures of every step are those of one worker to 1e-5, final weights too."""
    layouts: dict[str, dict[str, Any]] = {"plain": {}} | {name: LAYOUTS[name] for name in names}
    made = {name: make(**copy.deepcopy(keys | more)) for name, more in layouts.items()}
    runs = {name: run_of(decision) for name, decision in made.items()}
    for workers in sorted({decision.plan.workers for decision in made.values()}):
        train((workers, [runs[name] for name, decision in made.items() if decision.plan.workers == workers]))
    steps, weights = steps_of(runs["plain"]), final_weights(runs["plain"], STEPS)
    assert len(steps) == STEPS
    assert "score.weight" in weights
    for name, run in runs.items():
        for step, other in zip(steps, steps_of(run), strict=True):
            for figure in FIGURES_SAME:
                assert other[figure] == pytest.approx(step[figure], rel=1e-5, abs=2e-5), (name, step["step"], figure)
        for parameter, value in final_weights(run, STEPS).items():
            assert float((value - weights[parameter]).norm() / weights[parameter].norm()) < 1e-4, (name, parameter)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits(make: Make) -> None:
    whole = make()
    train((1, [run_of(whole)]))
    later = make(start=(run_of(whole), 5))
    train((1, [run_of(later)]))
    expected = {record["step"]: record["loss"] for record in steps_of(run_of(whole))}
    for record in steps_of(run_of(later)):
        assert record["step"] > 5
        assert record["loss"] == expected[record["step"]]
    weights = final_weights(run_of(whole), STEPS)
    for name, value in final_weights(run_of(later), STEPS).items():
        assert torch.equal(value, weights[name]), name


@torch.no_grad()
def rounding_of(decision: Decision) -> float:
    """How far transformers' own bf16 moves the differences of scores in the first step, on average: a loss of pairs
    moves by no more."""
    model: Any = AutoModelForSequenceClassification.from_pretrained(decision.config.model, num_labels=1)
    model.score.weight.copy_(new_head(decision))
    rows = pairs_of(decision, range(PAIRS))
    exact, rounded = (torch.tensor(scores_of(model.to(dtype), rows)) for dtype in (torch.float32, torch.bfloat16))
    moved = (exact - rounded).diff(dim=1).abs().mean()
    return float(moved)


@pytest.mark.matrix
def test_bf16_begins_near_and_learns(make: Make) -> None:
    """Later steps drift apart, as rounded weights do."""
    plain, *others = (
        make(),
        make(precision="bf16"),
        make(precision="bf16", workers=2, memory={"zero": 3, "micro_batch": 1}),
    )
    train((1, [run_of(plain), run_of(others[0])]), (2, [run_of(others[1])]))
    expected = steps_of(run_of(plain))
    for decision in others:
        steps = steps_of(run_of(decision))
        assert abs(steps[0]["loss"] - expected[0]["loss"]) < 2 * rounding_of(plain)
        assert not any(step["skipped"] for step in steps)
        mean, other = (sum(step["loss"] for step in those) / STEPS for those in (steps, expected))
        assert mean == pytest.approx(other, rel=0.05)


@torch.no_grad()
def scores_of(model: Any, rows: list[dict[str, Any]]) -> list[list[float]]:
    """Of every pair both scores, each answer by itself."""
    return [
        [float(model(input_ids=torch.tensor([row[name]])).logits[0, 0]) for name in ("chosen_ids", "rejected_ids")]
        for row in rows
    ]


@pytest.mark.matrix
def test_what_evaluations_tell_is_what_transformers_scores_with_the_export(make: Make, folder: Path) -> None:
    """Loss, accuracy and margin of the validation rows, from the export alone; and such an export trains on."""
    decision = make(data={"validation": 0.2}, evaluate={"every": 5}, checkpoint={"best": "eval_reward_accuracy"})
    run, out = run_of(decision), folder / "exported"
    train((1, [run]))
    last = [record for record in run.read_metrics() if "eval_loss" in record][-1]
    export_checkpoint(run, out, wishes=Wishes(compares=True), step=STEPS)
    described = json.loads((out / "config.json").read_text())
    assert described["architectures"] == ["LlamaForSequenceClassification"]
    assert described["id2label"] == {"0": "LABEL_0"}
    assert described["pad_token_id"] == 257
    assert not (out / "generation_config.json").exists()
    assert "AutoModelForSequenceClassification" in (out / "README.md").read_text()
    assert "tonnage serve" not in (out / "README.md").read_text()
    assert serving(run, str(out), "transformers", "auto", merge=False) == []
    assert "AutoModelForSequenceClassification" in next_of(run)
    model, report = AutoModelForSequenceClassification.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert model.config.num_labels == 1

    data = decision.prepared.validation
    assert data is not None
    total, right, margins = 0.0, 0.0, 0.0
    for number in range(data.num_packs):
        pack = data.pack(number)
        assert pack.forks is not None
        ids, (shared, second) = pack.input_ids.tolist(), pack.forks[0].tolist()
        row = {"chosen_ids": ids[:second], "rejected_ids": ids[:shared] + ids[second:]}
        ((chosen, rejected),) = scores_of(model, [row])
        difference = torch.tensor(chosen - rejected - float(pack.carried["margin"][0]))
        total += float(-torch.nn.functional.logsigmoid(difference)) + 0.01 * (chosen + rejected) ** 2
        right, margins = right + (chosen > rejected), margins + chosen - rejected
    assert last["eval_loss"] == pytest.approx(total / data.num_packs, rel=1e-5)
    assert last["eval_reward_accuracy"] == pytest.approx(right / data.num_packs)
    assert last["eval_reward_margin"] == pytest.approx(margins / data.num_packs, rel=1e-4, abs=1e-5)

    rows = pairs_of(decision, range(3))
    tokenizer = AutoTokenizer.from_pretrained(out)
    together = tokenizer.pad({"input_ids": [row["chosen_ids"] for row in rows]}, return_tensors="pt")
    with torch.no_grad():
        padded = model(**together).logits[:, 0].tolist()
    assert padded == pytest.approx([chosen for chosen, _ in scores_of(model, rows)], rel=1e-5, abs=1e-5)

    again = make(model=str(out))
    assert again.plan.weights.missing == ()
    assert again.plan.weights.left_out == ()
    with pytest.raises(UserError, match="a LlamaForSequenceClassification, which scores texts and writes none"):
        make(model=str(out), objective="supervised")
    with pytest.raises(UserError, match="which scores texts and writes none"):
        load(out)
    with pytest.raises(UserError, match="a reward model, which scores texts and writes none"):
        export_checkpoint(run, folder / "gguf", wishes=Wishes(target="gguf"), step=STEPS)


@pytest.mark.matrix
def test_an_adapter_scores_in_peft_as_it_does_merged_and_goes_on_as_in_trl(make: Make, folder: Path) -> None:
    from peft import AutoPeftModelForSequenceClassification

    decision = make(**ADAPTER)
    run = run_of(decision)
    train((1, [run]))
    export_checkpoint(run, folder / "adapter")
    export_checkpoint(run, folder / "merged", wishes=Wishes(merge=True))
    described = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert described["task_type"] == "SEQ_CLS"
    assert described["modules_to_save"] == ["score"]
    adapted = AutoPeftModelForSequenceClassification.from_pretrained(
        folder / "adapter", num_labels=1, dtype=torch.float32
    ).eval()
    merged = AutoModelForSequenceClassification.from_pretrained(folder / "merged", dtype=torch.float32)
    rows = pairs_of(decision, range(4))
    for ours, theirs in zip(scores_of(merged, rows), scores_of(adapted, rows), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-5)
    again = make(model=str(folder / "adapter"), optimizer={"lr": 2e-4, "schedule": "constant", "warmup": 0})
    assert again.config.adapter.also == ("head",)  # type: ignore[union-attr]
    train((1, [run_of(again)]))
    assert_as_in_trl(again)
    with pytest.raises(UserError, match="an adapter of a reward model"):
        load(folder / "adapter")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"workers": 2, "parallel": {"tensor": 2}}, "parallel.tensor is 2, and objective.kind is reward"),
    "pipeline": ({"workers": 2, "parallel": {"pipeline": 2}}, "parallel.pipeline is 2, and objective.kind is reward"),
    "tiles": ({"memory": {"tiles": 2}}, "memory.tiles is 2, and objective.kind is reward"),
    "prompts": ({"evaluate": {"prompts": 2}, "data": {"validation": 0.2}}, "evaluate.prompts, and objective.kind"),
    "scorer": ({"evaluate": {"scorer": "number"}, "data": {"validation": 0.2}}, "evaluate.scorer, and objective.kind"),
    "code": ({"trust_remote_code": True}, "trust_remote_code, and objective.kind is reward"),
    "beta": ({"objective": {"kind": "reward", "beta": 0.5}}, "objective.beta is 0.5, and objective.kind is reward"),
    "center": ({"objective": {"kind": "dpo", "center": 0.5}}, "objective.center is 0.5, and objective.kind is dpo"),
    "part": ({"train": ["model.layers.1.*"]}, "patterns that leave out score.weight"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(make: Make, name: str) -> None:
    keys, message = REFUSED[name]
    with pytest.raises(UserError, match=message):
        make(**keys)


@pytest.mark.matrix
def test_a_part_is_trained_with_the_head(make: Make, folder: Path) -> None:
    decision = make(train=["model.layers.1.*", "score.*"])
    run, out = run_of(decision), folder / "part"
    train((1, [run]))
    assert {name.startswith(("model.layers.1.", "score.")) for name in final_weights(run, STEPS)} == {True}
    export_checkpoint(run, out, wishes=Wishes(compares=True))
    before = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    after = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32).state_dict()
    assert set(before) - set(after) == {"lm_head.weight"}
    changed = {name for name, value in after.items() if name not in before or not torch.equal(value, before[name])}
    assert changed == set(final_weights(run, STEPS))


@pytest.mark.matrix
def test_a_mixture_is_exported_under_the_names_of_its_files(make: Make, folder: Path) -> None:
    """With its routers' loss beside that of the pairs."""
    write_model(folder / "mixture", mixture_config("qwen3_moe"))
    decision = make(model=str(folder / "mixture"), steps=2, router_loss=0.01)
    run, out = run_of(decision), folder / "mixture-scores"
    train((1, [run]))
    export_checkpoint(run, out, wishes=Wishes(compares=True))
    before, after = (set(load_file(place / "model.safetensors")) for place in (folder / "mixture", out))
    assert before - after == {"lm_head.weight"}
    assert after - before == {"score.weight"}


def test_a_family_without_scores_is_refused(make: Make, folder: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 258}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    write_model(folder / "granite", CONFIG_MAPPING["granite"](**sizes))
    with pytest.raises(UserError, match="has no AutoModelForSequenceClassification"):
        make(model=str(folder / "granite"))


def test_margins_that_are_no_numbers_are_refused(make: Make, folder: Path) -> None:
    rows = reward_rows(8)
    rows[3]["margin"] = "much"
    write_rows(folder / "odd.jsonl", rows)
    with pytest.raises(UserError, match="'margin' is a string, and objective: reward takes numbers"):
        make(data={"train": str(folder / "odd.jsonl")})
