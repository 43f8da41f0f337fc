"""What a model computes is what it computes in transformers, which sets some rows to zero as it loads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from sweep.families import write_tiny
from tonnage.errors import UserError
from tonnage.model.build import allocate, load_weights, on_meta
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import find_places
from tonnage.model.zeroed import zero_rows, zeroed_rows

PAD = 257


@pytest.mark.parametrize("name", ["youtu", "llama"])
def test_loaded_weights_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    write_tiny(name, tmp_path)
    files = find_model(str(tmp_path))
    config = read_model_config(files)
    model = on_meta(config, torch.float32)
    assert zeroed_rows(model) == ({"model.embed_tokens.weight": range(PAD, PAD + 1)} if name == "youtu" else {})
    found = find_places(model, files)
    allocate(model, torch.device("cpu"))
    load_weights(model, found, seed=0)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = model.state_dict()
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours[key], value), key


def test_asking_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    write_tiny("youtu", tmp_path)
    model = on_meta(read_model_config(find_model(str(tmp_path))), torch.float32)
    before = [vars(one) for one in (*model.parameters(), *model.buffers())]
    zeroed_rows(model)
    assert [vars(one) for one in (*model.parameters(), *model.buffers())] == before
    assert zeroed_rows(model)


def test_a_class_that_draws_loaded_weights_anew_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tiny("llama", tmp_path)
    model = on_meta(read_model_config(find_model(str(tmp_path))), torch.float32)

    def draw_anew(self: torch.nn.Module, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.Embedding):
            module.weight.data[3].normal_()

    monkeypatch.setattr(LlamaPreTrainedModel, "_init_weights", draw_anew)
    with pytest.raises(UserError, match=r"changes model\.embed_tokens\.weight whenever transformers loads it"):
        zeroed_rows(model)


def test_rows_of_a_whole_parameter() -> None:
    parameter = torch.nn.Parameter(torch.ones(5, 2))
    zero_rows(parameter, range(1, 3))
    assert parameter.detach()[:, 0].tolist() == [1, 0, 0, 1, 1]
