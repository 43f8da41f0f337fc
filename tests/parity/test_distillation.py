"""Distillation: the numbers of a plain loop with full logits of both models, in every layout; and what is refused."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import final_weights, metrics, split_documents
from ready import Start, ready, run_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from forked import train
from tiny import VOCAB_SIZE, alpaca_rows, byte_tokenizer, llama_config, neox_config, write_model, write_rows
from tonnage.data import PackedDataset
from tonnage.decide.decision import Decision
from tonnage.errors import UserError
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory

STEPS, SEQUENCES = 5, 4
Make = Callable[..., Decision]
OBJECTIVE = {"kind": "distil", "top_k": 16, "temperature": 2.0, "supervised": 0.3}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes runs of one tiny model whose teacher is of another family, and has rows of padding in its vocabulary."""
    folder, number = tmp_path_factory.mktemp("distillation"), count()
    write_rows(folder / "rows.jsonl", alpaca_rows(60))
    write_model(folder / "model", llama_config(initializer_range=0.2))
    write_model(folder / "teacher", neox_config(initializer_range=0.2, vocab_size=VOCAB_SIZE + 6), seed=1)

    def made(workers: int = 1, start: Start | None = None, **keys: Any) -> Decision:
        text = {
            "model": str(folder / "model"),
            "data": {
                "train": str(folder / "rows.jsonl"),
                "max_length": 96,
                "template": "plain",
                "over_length": "drop",
                "max_loss": 1.0,
                "cache": str(folder / "cache"),
            },
            "objective": OBJECTIVE | {"teacher": str(folder / "teacher")} | keys.pop("objective", {}),
            "batch": {"sequences": SEQUENCES},
            "steps": STEPS,
            # With a larger eps no weight moves by the rounding of a gradient that is nothing else.
            "optimizer": {"lr": 1e-3, "schedule": "constant", "warmup": 0, "eps": 1e-6},
            "precision": "fp32",
            "compile": "off",
            "memory": {"micro_batch": SEQUENCES // workers} | keys.pop("memory", {}),
            "launch": {"workers": workers, "threads": 1},
            "checkpoint": {"every": 3, "keep": 99},
            "output": str(folder / f"run-{next(number)}"),
            "seed": 5,
        }
        text["data"] |= keys.pop("data", {})
        return ready(folder, text | keys, start)

    return made


def steps_of(run: RunDirectory) -> list[dict[str, Any]]:
    return [record for record in metrics(run) if "grad_norm" in record]


def sums_of(
    student: Any, teacher: Any, documents: Sequence[tuple[Tensor, Tensor]], objective: Any
) -> tuple[Tensor, Tensor, int]:
    """Cross-entropy and divergence, T^2 left out, summed over supervised tokens, and how many these are."""
    loss = divergence = torch.zeros(())
    number, temperature = 0, objective.temperature
    for ids, supervised in documents:
        targets = supervised[1:]
        logits = student(input_ids=ids[None]).logits[0, :-1][targets]
        with torch.no_grad():
            expected = teacher(input_ids=ids[None]).logits[0, :-1][targets][:, :VOCAB_SIZE]
        likeliest = expected.topk(objective.top_k)
        p = F.softmax(likeliest.values / temperature, 1)
        log_q = F.log_softmax(logits / temperature, 1).gather(1, likeliest.indices)
        loss = loss + F.cross_entropy(logits, ids[1:][targets], reduction="sum")
        divergence = divergence + F.kl_div(log_q, p, reduction="sum")
        number += int(targets.sum())
    return loss, divergence, number


def models_of(decision: Decision) -> tuple[Any, Any]:
    paths = (decision.config.model, str(decision.config.objective.teacher))
    student, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in paths)
    return student, teacher


def in_plain_torch(decision: Decision) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Loss and gradient norm of every step, and the final weights, with full logits of models of transformers."""
    config, data = decision.config, decision.prepared.train
    objective, settings = config.objective, config.optimizer
    student, teacher = models_of(decision)
    optimizer = torch.optim.AdamW(
        student.parameters(), lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=0.0
    )
    records = []
    for step in range(STEPS):
        positions = range(step * SEQUENCES, (step + 1) * SEQUENCES)
        documents = [one for at in positions for one in split_documents(data, data.pack_at(at, config.seed))]
        loss, divergence, number = sums_of(student, teacher, documents, objective)
        share = objective.supervised
        total = (share * loss + (1 - share) * objective.temperature**2 * divergence) / number
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(student.parameters(), settings.clip)
        optimizer.step()
        records.append({"loss": total.item(), "grad_norm": norm.item()})
    return records, {name: parameter.detach() for name, parameter in student.named_parameters()}


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param({}, id="both", marks=pytest.mark.matrix),
        pytest.param({"temperature": 1.0}, id="at 1", marks=pytest.mark.matrix),
        pytest.param({"supervised": 0.0, "temperature": 1.0, "top_k": VOCAB_SIZE}, id="exact", marks=pytest.mark.slow),
        pytest.param({"supervised": 0.0}, id="teacher alone", marks=pytest.mark.matrix),
    ],
)
def test_every_step_is_that_of_a_plain_loop(make: Make, objective: dict[str, Any]) -> None:
    """With all tokens of the vocabulary the divergence is that of the whole distributions."""
    decision = make(objective=objective)
    train((1, [run_of(decision)]))
    expected, weights = in_plain_torch(decision)
    steps = steps_of(run_of(decision))
    assert len(steps) == STEPS
    for step, record in zip(steps, expected, strict=True):
        for figure, value in record.items():
            assert step[figure] == pytest.approx(value, rel=1e-5, abs=1e-6), (step["step"], figure)
    for name, trained in final_weights(run_of(decision), STEPS).items():
        assert float((trained - weights[name]).norm() / weights[name].norm()) < 1e-5, name


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batches of one": {"memory": {"micro_batch": 1}},
    "prefixes twice": {"data": {"share_prefixes": False}},
    "2 workers, zero 0": {"workers": 2, "memory": {"zero": 0}},
    "2 workers, zero 3": {"workers": 2, "memory": {"zero": 3, "micro_batch": 1}},
    "pipeline 2": {"workers": 2, "parallel": {"pipeline": 2}, "memory": {"micro_batch": 1}},
    "tensor 2": {"workers": 2, "parallel": {"tensor": 2}, "memory": {"micro_batch": 2}},
}
"""Ways to train that change no number."""


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "adapter"])
@pytest.mark.matrix
def test_every_layout_gives_the_same_steps(make: Make, adapter: bool) -> None:
    """The teacher is asked anew in each: nothing of another run is there."""
    keys: dict[str, Any] = {"adapter": {"rank": 4, "alpha": 8}} if adapter else {}
    names = ("2 workers, zero 3", "pipeline 2") if adapter else tuple(LAYOUTS)
    layouts = {"plain": {}, **{name: copy.deepcopy(LAYOUTS[name]) for name in names}}
    made = {name: make(seed=20 + adapter, **keys, **layout) for name, layout in layouts.items()}
    for decision in made.values():
        shutil.rmtree(entry_of(decision), ignore_errors=True)
        train((decision.plan.workers, [run_of(decision)]))
        shutil.rmtree(entry_of(decision))
    steps, weights = steps_of(run_of(made["plain"])), final_weights(run_of(made["plain"]), STEPS)
    assert len(steps) == STEPS
    for name, decision in made.items():
        for step, other in zip(steps, steps_of(run_of(decision)), strict=True):
            for figure in ("loss", "grad_norm", "tokens", "supervised_tokens"):
                assert other[figure] == pytest.approx(step[figure], rel=1e-5, abs=1e-6), (name, step["step"], figure)
        for parameter, value in final_weights(run_of(decision), STEPS).items():
            assert float((value - weights[parameter]).norm() / weights[parameter].norm()) < 1e-4, (name, parameter)


def entry_of(decision: Decision) -> Path:
    return Path(str(decision.plan.data.teacher_path))


@pytest.mark.matrix
def test_evaluations_tell_cross_entropy_and_the_divergence(make: Make) -> None:
    decision = make(data={"validation": 0.2}, objective={"temperature": 1.5}, steps=1)
    train((1, [run_of(decision)]))
    first = next(record for record in run_of(decision).read_metrics() if "eval_loss" in record and record["step"] == 0)
    validation = decision.prepared.validation
    assert isinstance(validation, PackedDataset)
    documents = [one for pack in range(validation.num_packs) for one in split_documents(validation, pack)]
    with torch.no_grad():
        loss, divergence, number = sums_of(*models_of(decision), documents, decision.config.objective)
    assert first["eval_loss"] == pytest.approx(float(loss) / number, rel=1e-5)
    assert first["eval_kl"] == pytest.approx(float(divergence) / number, rel=1e-5)
    assert first["evaluation"]["rows"]["divergence"][0] == pytest.approx(float(divergence) / number, rel=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_with_the_same_bits_and_without_the_cache(make: Make) -> None:
    whole = make(seed=31)
    train((1, [run_of(whole)]))
    later = make(start=(run_of(whole), 3), seed=31)
    assert "the cache has them" in later.plan.reasons["objective.teacher"]
    shutil.copytree(run_of(whole).teacher, run_of(later).teacher)
    shutil.rmtree(entry_of(whole))
    train((1, [run_of(later)]))
    assert not entry_of(whole).exists()
    expected = {record["step"]: record["loss"] for record in steps_of(run_of(whole))}
    steps = steps_of(run_of(later))
    assert [record["step"] for record in steps] == [4, 5]
    for record in steps:
        assert record["loss"] == expected[record["step"]]
    weights = final_weights(run_of(whole), STEPS)
    for name, value in final_weights(run_of(later), STEPS).items():
        assert torch.equal(value, weights[name]), name


@pytest.mark.matrix
def test_an_interrupted_pass_goes_on_and_another_run_finds_it_done(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks lie beside the cache's entry until all are there; another temperature needs no other ones."""
    from tonnage.training import teacher

    monkeypatch.setattr(teacher, "CHUNK_TOKENS", 3 * 96)
    decision = make(seed=32)
    computed, whole = list[int](), teacher._expected

    def interrupted(guest: Any, dataset: Any, chunk: Any, *more: Any) -> Tensor:
        if len(computed) == 2:
            raise KeyboardInterrupt
        computed.append(len(chunk))
        return whole(guest, dataset, chunk, *more)

    monkeypatch.setattr(teacher, "_expected", interrupted)
    with pytest.raises(KeyboardInterrupt):
        assembled(decision)
    parts = teacher.parts_of(entry_of(decision))
    assert len(list(parts.glob("*.npy"))) == 2
    assert not run_of(decision).teacher.exists()
    computed.append(0)  # no more interruptions
    job = assembled(decision)
    packs = len(np.unique(decision.prepared.train.first_packs(STEPS * SEQUENCES, 32)))
    assert sum(computed) == min(packs, decision.prepared.train.num_packs)
    assert computed[:2] == [3, 3]
    assert entry_of(decision).is_dir()
    assert not parts.exists()
    (own,) = run_of(decision).teacher.iterdir()
    assert all(file.samefile(entry_of(decision) / file.name) for file in own.iterdir())

    computed.clear()
    other = make(seed=32, objective={"temperature": 1.0, "supervised": 0.9})
    assert entry_of(other) == entry_of(decision)
    assert "has them from an earlier run" in other.plan.reasons["objective.teacher"]
    again = assembled(other)
    assert not computed
    pack = int(job.train_data.pack_at(0, 32))
    assert job.train_data.pack(pack).taught.tobytes() == again.train_data.pack(pack).taught.tobytes()


def assembled(decision: Decision) -> Any:
    """A job in this process."""
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
            return assemble(WorkerSetting(decision.config, decision.plan, world, lambda line: None, phases))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.matrix
def test_another_teacher_number_of_tokens_or_precision_is_another_entry(make: Make, tmp_path: Path) -> None:
    write_model(tmp_path / "other", neox_config(initializer_range=0.2), seed=2)
    settings: dict[str, dict[str, Any]] = {
        "same": {},
        "again": {"optimizer": {"lr": 1e-6}},
        "temperature": {"objective": {"temperature": 7.0}},
        "teacher": {"objective": {"teacher": str(tmp_path / "other")}},
        "tokens": {"objective": {"top_k": 17}},
        "precision": {"precision": "bf16"},
        "length": {"data": {"max_length": 90}},
        "fewer steps": {"steps": 1},
    }
    entries = {name: entry_of(make(**keys)) for name, keys in settings.items()}
    assert entries["again"] == entries["temperature"] == entries["same"]
    assert len(set(entries.values())) == len(entries) - 2


def test_another_vocabulary_is_refused(make: Make, tmp_path: Path) -> None:
    write_model(tmp_path / "other", llama_config(vocab_size=VOCAB_SIZE + 1))
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<tool>"])
    tokenizer.save_pretrained(tmp_path / "other")
    with pytest.raises(
        UserError, match="another vocabulary: 1 tokens differ; '<tool>' is no token of the model and 258"
    ):
        make(objective={"teacher": str(tmp_path / "other")})


def test_more_tokens_than_the_vocabulary_has_are_refused(make: Make) -> None:
    with pytest.raises(UserError, match=f"top_k is {VOCAB_SIZE + 1}, and the vocabulary has {VOCAB_SIZE} tokens"):
        make(objective={"top_k": VOCAB_SIZE + 1})


def test_a_teacher_that_is_not_there_is_refused(make: Make, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective\.teacher"):
        make(objective={"teacher": str(tmp_path / "none")})


def test_new_tokens_are_refused(make: Make) -> None:
    with pytest.raises(UserError, match="tokens that are new to the vocabulary"):
        make(data={"added_tokens": ["<tool>"]})


@pytest.mark.slow
def test_what_a_run_has_and_is_damaged_is_refused(make: Make) -> None:
    decision = make(seed=33)
    own = run_of(decision).teacher / entry_of(decision).name
    own.mkdir(parents=True)
    write_json(own / "index.json", {})
    with pytest.raises(UserError, match="what the teacher expects"):
        assembled(decision)


@pytest.mark.matrix
def test_half_precision_is_kept_in_half_precision(make: Make) -> None:
    """A step in bf16 learns from log-probabilities in fp16."""
    decision = make(seed=34, precision="bf16", steps=1)
    train((1, [run_of(decision)]))
    (own,) = run_of(decision).teacher.iterdir()
    rows = np.load(own / "000000.npy", allow_pickle=False)
    assert rows.dtype["logprobs"].base == np.float16
    assert rows.dtype.itemsize == 16 * 6
    assert (np.diff(rows["logprobs"].astype(np.float32), axis=1) <= 0).all()
    (step,) = steps_of(run_of(decision))
    expected, _ = in_plain_torch_of_one_step(decision)
    assert step["loss"] == pytest.approx(expected, rel=2e-2)


def in_plain_torch_of_one_step(decision: Decision) -> tuple[float, int]:
    data, objective = decision.prepared.train, decision.config.objective
    positions = range(SEQUENCES)
    documents = [one for at in positions for one in split_documents(data, data.pack_at(at, decision.config.seed))]
    with torch.no_grad():
        loss, divergence, number = sums_of(*models_of(decision), documents, objective)
    share = objective.supervised
    total = (share * loss + (1 - share) * objective.temperature**2 * divergence) / number
    return float(total), number
