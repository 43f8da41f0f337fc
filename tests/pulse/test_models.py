"""Strangers' models from end to end, as a user meets them: real processes, standard input full of yes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig

import stored_models
import tiny
from tonnage.files.reading import read_json
from tonnage.rundir.directory import RunDirectory

CONFIGURATION = """
from transformers import LlamaConfig

class MineConfig(LlamaConfig):
    model_type = "mine"
"""
MODELING = """
from transformers import LlamaForCausalLM
from .configuration_mine import MineConfig

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""
AUTO_MAP = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
OWN = {"do_sample": True, "temperature": 0.7, "eos_token_id": [256, 9]}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def tonnage(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tonnage", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, input="y\n" * 99)


def strange(folder: Path, change: Any = lambda tensors: tensors, **entries: Any) -> Path:
    """A model with other tensors and entries, and a config that trains it for two steps."""
    model = tiny.write_model(folder / "model", tiny.llama_config(num_hidden_layers=1))
    described = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(described | entries))
    (model / "generation_config.json").write_text(json.dumps(OWN))
    tensors = change(load_file(model / "model.safetensors"))
    save_file({name: value.clone() for name, value in tensors.items()}, model / "model.safetensors")
    data = {
        "train": str(tiny.write_rows(folder / "rows.jsonl", tiny.alpaca_rows(40))),
        "max_length": 128,
        "template": "plain",
        "cache": str(folder / "cache"),
    }
    config = {"model": str(model), "data": data, "batch": {"sequences": 2}, "steps": 2, "launch": {"threads": 1}}
    path = folder / "config.yaml"
    path.write_text(json.dumps(config | {"output": str(folder / "run"), "optimizer": {"lr": 1e-3, "warmup": 0}}))
    return path


@pytest.mark.matrix
def test_weights_that_are_no_numbers_end_a_run_before_its_first_step(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = float("nan")
        return tensors

    result = tonnage("train", strange(tmp_path, spoil), "launch.workers=2")
    assert result.returncode == 2, result.stdout + result.stderr
    assert "model.layers.0.mlp.up_proj.weight: 1 of the values that were read are not finite" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert RunDirectory(tmp_path / "run").read_metrics() == []


@pytest.mark.matrix
def test_a_model_with_code_is_trained_exported_and_asked_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = strange(tmp_path, model_type="mine", auto_map=AUTO_MAP, architectures=["MineForCausalLM"])
    (tmp_path / "model" / "configuration_mine.py").write_text(CONFIGURATION)
    (tmp_path / "model" / "modeling_mine.py").write_text(MODELING)
    refused = tonnage("train", config)
    assert refused.returncode == 2
    assert "code of its own" in refused.stderr
    assert "[y/N]" not in refused.stdout + refused.stderr
    trained = tonnage("train", config, "trust_remote_code=true")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    export = tmp_path / "run" / "export"
    assert read_json(export / "config.json")["auto_map"] == AUTO_MAP
    assert (export / "modeling_mine.py").is_file()
    asked = tonnage("generate", tmp_path / "run", "--prompt", "abc", "--max-new-tokens", "4")
    assert asked.returncode == 0, asked.stderr  # a run knows that its code may run
    elsewhere = tonnage("generate", export, "--prompt", "abc", "--max-new-tokens", "4")
    assert elsewhere.returncode == 2
    assert "--trust-remote-code" in elsewhere.stderr
    assert tonnage("verify", export).returncode == 0


@pytest.mark.matrix
def test_a_head_of_its_own_is_trained_and_exported_beside_the_embedding(tmp_path: Path) -> None:
    """Of two workers, from tensors under a wrapper's prefix, with what quantised it long ago in config.json."""
    kept: dict[str, torch.Tensor] = {}

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        kept.update(tensors | {HEAD: tensors[EMBEDDING] + 0.01})
        return {f"_orig_mod.{name}": value for name, value in kept.items()}

    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    trained = tonnage("train", strange(tmp_path, change, quantization_config=entry), "launch.workers=2")
    assert trained.returncode == 0, trained.stdout + trained.stderr
    export = tmp_path / "run" / "export"
    written = load_file(export / "model.safetensors")
    assert written.keys() == kept.keys()
    for name in (HEAD, EMBEDDING):
        assert not torch.equal(written[name], kept[name].bfloat16())
        assert (written[name].float() - kept[name]).abs().max() < 0.02
    described = read_json(export / "config.json")
    assert described["tie_word_embeddings"] is False
    assert "quantization_config" not in described
    loaded = AutoModelForCausalLM.from_pretrained(export)
    assert loaded.lm_head.weight is not loaded.model.embed_tokens.weight
    decoding = GenerationConfig.from_pretrained(export)
    assert (decoding.temperature, decoding.eos_token_id) == (0.7, [256, 9])
    resumed = tonnage("train", "--resume", tmp_path / "run", "steps=3", "--allow-changes")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("family", "workers"),
    [pytest.param("mistral3", 1, marks=pytest.mark.slow), pytest.param("deepseek_v3", 2, marks=pytest.mark.matrix)],
)
def test_what_a_run_does_not_train_is_planned_carried_and_asked(family: str, workers: int, tmp_path: Path) -> None:
    """A model of text and images, and a mixture whose experts are stored one by one and whose router has a bias."""
    config = strange(tmp_path)
    model = stored_models.TOWERS.get(family)
    write = stored_models.write_mixture if model is None else stored_models.write_tower
    origin = write(tmp_path / "origin", family)
    result = tonnage("train", config, f"model={origin}", f"launch.workers={workers}")
    assert result.returncode == 0, result.stdout + result.stderr
    of_tower = sum("vision_tower" in name for name in load_file(origin / "model.safetensors"))
    carried = "e_score_correction_bias: 1 tensor" if model is None else f"vision tower: {of_tower} tensors"
    assert f"{carried}, " in " ".join(result.stdout.split())
    before, after = (load_file(one / "model.safetensors") for one in (origin, tmp_path / "run" / "export"))
    assert {name: value.shape for name, value in after.items()} == {name: v.shape for name, v in before.items()}
    same = {name for name, value in after.items() if torch.equal(value, before[name])}
    assert same >= {name for name in before if "vision" in name or "projector" in name or "correction" in name}
    assert not any(
        "lm_head" in name or ("norm" in name and "vision" not in name and "projector" not in name) for name in same
    )
    card = (tmp_path / "run" / "export" / "README.md").read_text()
    assert (
        ("AutoModelForImageTextToText" in card) == ("every parameter of its text model" in card) == (model is not None)
    )
    asked = tonnage("generate", tmp_path / "run", "--prompt", "Say it.", "--max-new-tokens", "3")
    assert asked.returncode == 0, asked.stderr
