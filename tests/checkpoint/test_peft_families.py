"""Over every family that transformers builds: peft finds the additions that we export, and adapts the same layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

import entry
import tiny
from sweep import families
from tonnage.checkpoint.adapter import Described, adapter_config
from tonnage.errors import UserError
from tonnage.model import adapters, peft
from tonnage.model.adapters import AdapterSpec, Trains, find_targets, prepare
from tonnage.model.anatomy import dissect
from tonnage.model.packed_layers import is_linear

FEW = ("deepseek_v3", "falcon", "falcon_h1", "gemma3n_text", "gpt2", "qwen3_5_text")
LEFT = [
    pytest.param(name, marks=pytest.mark.matrix if number % 8 else pytest.mark.slow)
    for number, name in enumerate(families.NAMES)
    if name not in FEW
]
OTHERS = {
    "afmoe": {"gate"},
    "deepseek_v4": {"o_a_proj"},
    "jamba": {"dt_proj"},
    "phimoe": {"router"},
}
"""Layers that one of the two adapts and the other does not: routers, layers in groups, with whose outputs peft's
addition fails, and one that is never called."""


@pytest.mark.parametrize("name", [*FEW, *LEFT])
def test_peft_finds_every_addition_and_adapts_the_same_layers(name: str) -> None:
    model = families.built(name)
    try:
        targets = find_targets(model, dissect(model), "all-linear")
    except UserError as error:
        pytest.skip(str(error))
    described = Described(AdapterSpec(4, 2.0), 8, rank_stabilised=False, base="x", revision=None)
    fields = ("r", "lora_alpha", "target_modules", "target_parameters", "fan_in_fan_out")
    said = adapter_config(model, targets, [], described)
    theirs = get_peft_model(model, LoraConfig(**{key: said[key] for key in fields if key in said}))
    names = {one.replace(".default", "") for one, _ in theirs.named_parameters() if "lora_" in one}
    assert names == set(peft.peft_names(targets, [], described.adapter).values())
    if "out_proj" in adapters.not_adapted(families.built(name)):
        return  # peft refuses its own all-linear there
    adapted: Any = get_peft_model(families.built(name), LoraConfig(r=4, target_modules="all-linear"))
    differ = set(adapted.base_model.targeted_module_names) ^ {one.path for one in targets if not one.experts}
    assert {one.rpartition(".")[2] for one in differ} == OTHERS.get(name, set())


@pytest.mark.parametrize(
    ("name", "layer", "why"),
    [
        ("falcon_h1", "out_proj", "peft could not load"),
        ("mamba", "out_proj", "peft could not load"),
        ("deepseek_v3", "gate_proj", "peft could not load"),
        ("mamba", "dt_proj", "the model reads its weight"),
        ("jamba", "dt_proj", "the model reads its weight"),
    ],
)
def test_layers_that_take_no_addition_are_refused_by_name(name: str, layer: str, why: str) -> None:
    model = families.built(name)
    with pytest.raises(UserError, match=rf"{layer} cannot be adapted \({why}"):
        find_targets(model, dissect(model), [layer])


@pytest.mark.parametrize(
    ("name", "targets", "counts"),
    [
        ("llama", "all-linear", {"attention": (16, 16), "MLPs": (12, 12)}),
        ("llama", ["q_proj"], {"attention": (4, 16), "MLPs": (0, 12)}),
        ("qwen3_moe", ["q_proj"], {"attention": (4, 16), "experts": (0, 32)}),
        ("gpt2", "all-linear", {"attention": (8, 8), "MLPs": (8, 8)}),
    ],
)
def test_an_account_says_how_many_matrices_of_which_kind_are_adapted(
    name: str, targets: Any, counts: dict[str, tuple[int, int]]
) -> None:
    model = families.built(name)
    anatomy = dissect(model)
    counted = adapters.count_adapted(model, anatomy, find_targets(model, anatomy, targets))
    assert {kind: tuple(numbers) for kind, *numbers in counted} == counts


def test_an_account_knows_state_spaces() -> None:
    for name in ("mamba", "nemotron_h", "jamba", "falcon_h1"):
        model = families.built(name)
        anatomy = dissect(model)
        counted = adapters.count_adapted(model, anatomy, find_targets(model, anatomy, "all-linear"))
        numbers = {kind: (adapted, whole) for kind, adapted, whole in counted}
        adapted, whole = numbers["state-space layers and convolutions"]
        assert 0 < adapted < whole, (name, counted)  # peft could not load an addition to some
        assert "other layers" not in numbers, (name, counted)


@pytest.mark.parametrize("name", [*FEW, "jamba", "mamba"])
def test_every_layer_with_an_addition_is_called(name: str) -> None:
    model = families.built(name).eval()
    layers = [one for one in find_targets(model, dissect(model), "all-linear") if not one.experts]
    called = set[str]()
    for layer in layers:
        layer.owner.register_forward_hook(lambda *_, path=layer.path: called.add(path))
    with torch.no_grad():
        model.to_empty(device="cpu")(torch.arange(40)[None], use_cache=False)
    assert called == {layer.path for layer in layers}


def test_what_is_made_of_a_linear_layer_is_one_if_it_computes_as_one() -> None:
    class Doubled(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(inputs)

    class Renamed(nn.Linear):
        pass

    assert [is_linear(one) for one in (nn.Linear(5, 4), Renamed(5, 4, bias=False), Doubled(5, 4))] == [
        True,
        True,
        False,
    ]


def test_a_rank_may_be_larger_than_a_layer() -> None:
    """As in peft: Qwen 3.5 has layers of as many outputs as heads."""
    model = families.built("qwen3_5_text")
    targets = prepare(model, dissect(model), Trains(AdapterSpec(32, 2.0)), torch.float32)
    small = [one for one in targets if one.path.endswith(("in_proj_a", "in_proj_b"))]
    assert small
    assert all(min(one.shape) < 32 for one in small)
    assert {model.get_parameter(one.names()[0]).shape[0] for one in targets} == {32}


@pytest.mark.matrix
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("falcon_h1", marks=pytest.mark.slow),
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("falcon", "gemma3n_text", "qwen3_5_text")),
    ],
)
def test_peft_computes_with_an_export_as_we_do(name: str, tmp_path: Path) -> None:
    """The default rank, over layers of a few outputs; against the merged model."""
    families.write_tiny(name, tmp_path / "model")
    config = {
        "model": str(tmp_path / "model"),
        "data": {
            "train": str(tiny.write_rows(tmp_path / "rows.jsonl", tiny.alpaca_rows(20))),
            "max_length": 250,
            "template": "plain",
            "cache": str(tmp_path / "cache"),
        },
        "steps": 2,
        "batch": {"sequences": 2},
        "optimizer": {"lr": 1e-2, "warmup": 0},
        "precision": "fp32",
        "adapter": {"rank": 32},
        "launch": {"threads": 1},
        "track": [],
        "output": str(tmp_path / "run"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    trained = entry.tonnage("train", str(tmp_path / "config.yaml"))
    assert trained.status in (None, 0), trained.err
    merged = entry.tonnage("export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge", "--dtype", "fp32")
    assert merged.status in (None, 0), merged.err
    ids = torch.arange(40)[None]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    with torch.no_grad():
        before = base(ids).logits
        found = PeftModel.from_pretrained(base, str(tmp_path / "run" / "export")).eval()(ids).logits
        wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(ids).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
    assert not torch.allclose(before, wanted, rtol=1e-3)
