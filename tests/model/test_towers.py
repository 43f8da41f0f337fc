"""Of a model of more than text, the text model is trained, and the rest is known and left alone."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

from stored_models import TOWERS, check, write_tower
from tonnage.errors import UserError
from tonnage.model.build import allocate, load_buffers, load_weights, on_meta
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import find_places
from tonnage.model.pretrained import load_pretrained
from tonnage.model.stored import read_headers

QUICK = ("gemma3", "qwen3_5_moe", "llama4")
FAMILIES = [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in TOWERS]


def loaded(folder: Path) -> Any:
    files = find_model(str(folder))
    model = on_meta(read_model_config(files), torch.float32)
    found = find_places(model, files)
    allocate(model, torch.device("cpu"))
    load_buffers(model, found)
    load_weights(model, found, seed=0)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_model_is_loaded_as_transformers_loads_the_whole(family: str, tmp_path: Path) -> None:
    folder = write_tower(tmp_path, family)
    found = check(folder)
    assert not found.missing
    assert not found.left_out
    assert found.carried
    ours = loaded(folder)
    whole: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    text = next((one for one in whole.modules() if type(one) is type(ours.base_model)), nn.Module())
    expected, held = text.state_dict(), ours.base_model.state_dict()
    assert held.keys() == expected.keys()
    for name, value in held.items():
        assert torch.equal(value, expected[name]), name
    assert torch.equal(ours.get_output_embeddings().weight, whole.get_output_embeddings().weight)
    keys = [one.key for one in read_headers(find_model(str(folder)).weights)]
    beside = len([name for name, _ in text.named_buffers() if name in held])
    of_towers = [key for key in keys if "language_model" not in key and "lm_head" not in key]
    assert sum(one.num_tensors for one in found.carried) == len(of_towers) + beside


def test_a_tower_that_cannot_be_built_is_refused_in_a_sentence(tmp_path: Path) -> None:
    folder = write_tower(tmp_path, "gemma3")
    described = json.loads((folder / "config.json").read_text())
    described["vision_config"]["patch_size"] = 0
    (folder / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match=r"no Gemma3ForConditionalGeneration can be built as config\.json says"):
        check(folder)


def test_without_the_name_of_its_class_a_model_of_images_is_the_usual_one(tmp_path: Path) -> None:
    folder = write_tower(tmp_path, "gemma3")
    described = json.loads((folder / "config.json").read_text())
    del described["architectures"]
    (folder / "config.json").write_text(json.dumps(described))
    assert {one.part for one in check(folder).carried} == {"vision tower", "multi modal projector"}
    described["architectures"] = ["Trainer", "LlamaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(described))
    assert read_model_config(find_model(str(folder))).model_type == "gemma3"
    described["architectures"].append(3)
    (folder / "config.json").write_text(json.dumps(described))
    looks_inside = int(version("huggingface-hub").split(".")[0]) < 2
    with pytest.raises(UserError, match="'architectures'") if looks_inside else nullcontext():
        assert read_model_config(find_model(str(folder))).model_type == "gemma3"


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_come_from_the_text_model(family: str, tmp_path: Path) -> None:
    folder = write_tower(tmp_path, family)
    model = load_pretrained(find_model(str(folder)))
    expected = loaded(folder)
    assert type(model) is type(expected)
    for name, value in expected.named_parameters():
        assert torch.equal(model.get_parameter(name).float(), value), name
