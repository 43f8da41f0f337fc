"""Tasks of lm-evaluation-harness, on data made here, say of our model what they say of its own ``hf`` back end's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config, PreTrainedConfig

import tiny
from tonnage.decide.evaluation import Loading
from tonnage.decide.harness import Likelihood, _packed, _until, as_table, evaluate_tasks
from tonnage.errors import UserError

CONVOLUTIONS: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
MODELS: dict[str, PreTrainedConfig] = {
    "packed": tiny.llama_config(num_hidden_layers=2, initializer_range=0.2, max_position_embeddings=128),
    "padded": Lfm2Config(**CONVOLUTIONS, layer_types=["conv", "full_attention"], bos_token_id=256, eos_token_id=256),
}
TASKS: dict[str, dict[str, Any]] = {
    "chosen": {
        "output_type": "multiple_choice",
        "doc_to_text": "Capitals of {{input}}:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{right}}",
        "num_fewshot": 1,
        "fewshot_split": "train",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolled": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        # A perplexity of random weights would be printed to more digits than fp32 has.
        "metric_list": [{"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "Capitals of {{input}}:",
        "doc_to_target": "{{said}}",
        "generation_kwargs": {"until": ["a", "qq"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def test_what_continuations_have_in_common_is_there_once() -> None:
    requests = [
        [Likelihood(0, (1, 2), (3,)), Likelihood(1, (1, 2), (4, 5, 6)), Likelihood(2, (1, 2), (7, 8))],
        [Likelihood(3, (9,), (10, 11))],
        [Likelihood(4, (12, 13), (14,))],
    ]
    batch = _packed(requests)
    assert batch.input_ids.tolist() == [[1, 2, 4, 5, 7, 9, 10, 12, 13]]
    assert batch.lengths == (2, 2, 1, 2, 2)
    assert [(one.part, one.parts) for one in batch.shared] == [(0, 2)]
    assert batch.positions.tolist() == [1, 1, 2, 3, 1, 4, 5, 6, 8]
    assert batch.targets.tolist() == [3, 4, 5, 6, 7, 8, 10, 11, 14]


def test_answers_that_are_drawn_are_refused() -> None:
    assert _until({"until": "x", "temperature": 0.0, "do_sample": False}) == (("x",), 256)
    assert _until({"max_gen_toks": 9}) == ((), 9)
    for drawn in ({"do_sample": True}, {"temperature": 0.7}, {"num_beams": 4}):
        with pytest.raises(UserError, match="drawn"):
            _until(drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["packed", pytest.param("padded", marks=pytest.mark.matrix)])
def test_tasks_say_what_they_say_of_the_harness_own_back_end(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="needs tonnage[eval]")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    model = tiny.write_model(tmp_path / "model", MODELS[name])
    hf = HFLM(pretrained=str(model), device="cpu", dtype="float32", batch_size=3)
    texts = [row["input"] for row in tiny.alpaca_rows(14)]
    first = lm_eval.simple_evaluate(model=hf, tasks=_tasks(tmp_path, texts, [""] * 14), **_found(TaskManager, tmp_path))
    said = [one["filtered_resps"][0] for one in first["samples"]["written"]]
    assert len(set(said)) > 5
    # Some answers are right, so that a metric of them says something.
    names = _tasks(tmp_path, texts, [one if at % 2 else "x" for at, one in enumerate(said)])
    expected = lm_eval.simple_evaluate(model=hf, tasks=names, **_found(TaskManager, tmp_path))
    found = evaluate_tasks(str(model), names, task_folder=str(tmp_path / "tasks"), loading=Loading("fp32"))
    assert as_table(found) == as_table(expected)
    assert 0 < found["results"]["written"]["exact_match,none"] < 1
    assert 0 < found["results"]["chosen"]["acc,none"] < 1
    together = torchrun(model, names, tmp_path)
    for task, figures in found["results"].items():
        assert {**together[task]} == {key: json.loads(json.dumps(value)) for key, value in figures.items()}
    with pytest.raises(UserError, match="no task nothing_like_it"):
        evaluate_tasks(str(model), ["nothing_like_it"])


def torchrun(model: Path, names: list[str], folder: Path) -> dict[str, Any]:
    """What the command prints on two workers."""
    words = ["eval", str(model), "--tasks", ",".join(names), "--tasks-from", str(folder / "tasks")]
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*run, "-m", "tonnage", *words, "--precision", "fp32", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def _tasks(folder: Path, texts: list[str], said: list[str]) -> list[str]:
    """Write tasks and their rows: some texts are longer than the model's positions."""
    rows = [
        {
            "input": text,
            "choices": [f" {text.upper()}", f" {text[::-1]}", " a", f" {text.upper()[:3]}"],
            "right": at % 3,
            "text": " ".join(texts[at:]) if at < 4 else text,
            "said": answer,
        }
        for at, (text, answer) in enumerate(zip(texts, said, strict=True))
    ]
    (folder / "tasks").mkdir(exist_ok=True)
    number = len(list(folder.glob("rows-*.json")))
    data = folder / f"rows-{number}.json"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, task in TASKS.items():
        files = {"train": str(data), "test": str(data)}
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": files}, "test_split": "test"}
        (folder / "tasks" / f"{name}.yaml").write_text(json.dumps(whole | task))
    return list(TASKS)


def _found(manager: Any, folder: Path) -> dict[str, Any]:
    return {"task_manager": manager(include_path=str(folder / "tasks"))}
