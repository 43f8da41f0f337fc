"""An export of what was not trained is what was given, bit for bit, under the same names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from stored_models import MIXTURES, TOWERS, Tensors, changed, check, in_8_bits, same, write_mixture, write_tower
from tiny import llama_config, write_model
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import SHARD_BYTES, Start, export
from tonnage.checkpoint.save import Cursor, Saver, checkpoint_path
from tonnage.errors import UserError
from tonnage.model.build import allocate, load_buffers, load_weights, on_meta
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import check_weights, find_places
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.world import World, join_world
from tonnage.training.building import Blueprint, assemble_model

QUICK = ("mixtral", "deepseek_v3", "gemma3", "qwen3_5_moe")
FAMILIES = [pytest.param(one, marks=[] if one in QUICK else pytest.mark.slow) for one in (*MIXTURES, *TOWERS)]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with join_world() as world:
        yield world


def trained(
    origin: Path,
    folder: Path,
    world: World,
    vocab_size: int = 0,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    from_weights: bool = True,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """The export of a run that was started from ``origin`` and changed nothing but the size of the vocabulary."""
    files = find_model(str(origin))
    config = read_model_config(files)
    weights = check_weights(files, config)
    config.vocab_size = max(vocab_size, config.vocab_size)
    model = on_meta(config, torch.bfloat16)
    found = find_places(model, files)
    allocate(model, torch.device("cpu"))
    load_buffers(model, found)
    load_weights(model, found, seed=0)
    Saver(folder, 1, world).save(Cursor(1, 4, 1), dict(model.named_parameters()), {}, {}, wait=True)
    meanwhile()
    (folder / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / "tokenizer" / name).write_bytes((origin / name).read_bytes())
    form = ExportForm(config, folder / "tokenizer", [], torch.bfloat16)
    start = Start(origin, from_weights, weights.carried_digest)
    export(checkpoint_path(folder, 1), folder / "out", form, start, shard_bytes=shard_bytes)
    return folder / "out"


def tensors(directory: Path) -> Tensors:
    found: Tensors = {}
    for file in directory.glob("*.safetensors"):
        found |= load_file(file)
    return found


def equal(ours: Path, theirs: Path) -> None:
    found, expected = tensors(ours), tensors(theirs)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.dtype == expected[name].dtype, name
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_is_the_model_that_was_given(family: str, shard_bytes: int, tmp_path: Path, world: World) -> None:
    write = write_mixture if family in MIXTURES else write_tower
    origin = write(tmp_path / "origin", family)
    out = trained(origin, tmp_path / "run", world, shard_bytes=shard_bytes)
    assert (len(list(out.glob("*.safetensors"))) > 1) == (shard_bytes < 10**9)
    equal(out, origin)
    before, after = (json.loads((one / "config.json").read_text()) for one in (origin, out))
    assert after["architectures"] == before["architectures"]
    assert after.get("vision_config") == before.get("vision_config")
    kind = getattr(transformers, before["architectures"][0])
    loaded, expected = (kind.from_pretrained(one, dtype=torch.bfloat16) for one in (out, origin))
    same(loaded, expected)


def test_a_stored_head_stays_beside_the_embedding_that_it_is(tmp_path: Path, world: World) -> None:
    written = write_model(tmp_path / "written", llama_config(), torch.bfloat16)
    key = "model.embed_tokens.weight"
    origin = changed(written, tmp_path / "origin", lambda t: t | {"lm_head.weight": t[key]})
    equal(trained(origin, tmp_path / "run", world), origin)
    equal(trained(written, tmp_path / "other", world), written)


@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_fused_experts_stay_fused(family: str, tmp_path: Path, world: World) -> None:
    write = write_mixture if family in MIXTURES else write_tower
    origin = write(tmp_path / "origin", family, save_original_format=False)
    assert any("gate_up_proj" in key for key in tensors(origin))
    equal(trained(origin, tmp_path / "run", world), origin)


def test_without_the_files_of_a_mixture_its_export_has_the_names_of_transformers(tmp_path: Path, world: World) -> None:
    origin = write_mixture(tmp_path / "origin", "mixtral")
    out = trained(origin, tmp_path / "run", world, from_weights=False, shard_bytes=10_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    equal(out, origin)


def test_tensors_that_are_stored_in_one_are_put_together_in_one_file(tmp_path: Path, world: World) -> None:
    """However small the files are, and whether the names are known from the origin or not."""
    for from_weights in (True, False):
        folder = tmp_path / str(from_weights)
        origin = write_mixture(folder / "origin", "hrm_text")
        out = trained(origin, folder / "run", world, from_weights=from_weights, shard_bytes=1)
        equal(out, origin)


def test_what_transformers_leaves_out_is_carried(tmp_path: Path, world: World) -> None:
    """Layers that predict further tokens, which no model of transformers has; in a type of their own."""
    more: Tensors = {"mtp.layers.0.eh_proj.weight": torch.randn(4, 8), "mtp.norm.weight": torch.ones(3).double()}
    origin = changed(write_mixture(tmp_path / "written", "qwen3_next"), tmp_path / "origin", lambda t: t | more)
    (carried,) = check(origin).carried
    assert (carried.part, carried.num_tensors, carried.num_bytes) == ("mtp", 2, 4 * 8 * 4 + 3 * 8)
    equal(trained(origin, tmp_path / "run", world), origin)


@pytest.mark.parametrize(
    ("damage", "told"),
    [("gone", "no weights"), ("another", "other values than the run was started from"), ("text", "of the model's")],
)
def test_towers_that_are_gone_or_changed_are_missed(damage: str, told: str, tmp_path: Path, world: World) -> None:
    origin = write_tower(tmp_path / "origin", "gemma3")
    file = origin / "model.safetensors"
    whole = tensors(origin)
    key = next(one for one in whole if "vision_tower" in one and "layernorm" in one)

    def spoil() -> None:
        if damage == "gone":
            file.unlink()
        else:
            value = whole[key].clone()
            value[0] += 1
            kept = {one: t for one, t in whole.items() if damage == "another" or "language_model" not in one}
            save_file(kept | {key: value}, file)

    with pytest.raises(UserError, match=f"{told}(.|\n)*put them back there"):
        trained(origin, tmp_path / "run", world, meanwhile=spoil)
    assert not (tmp_path / "run" / "out").exists()


def test_a_model_of_images_keeps_its_processors_and_gets_a_larger_vocabulary(tmp_path: Path, world: World) -> None:
    origin = write_tower(tmp_path / "origin", "qwen3_5")
    (origin / "preprocessor_config.json").write_text('{"size": 28}')
    out = trained(origin, tmp_path / "run", world, vocab_size=300)
    assert (out / "preprocessor_config.json").read_text() == '{"size": 28}'
    described = json.loads((out / "config.json").read_text())
    assert described["text_config"]["vocab_size"] == 300
    assert described["dtype"] == described["text_config"]["dtype"] == "bfloat16"
    for kind in (transformers.AutoModelForImageTextToText, transformers.AutoModelForCausalLM):
        model: Any = kind.from_pretrained(out)
        assert model.lm_head.weight.shape == (300, 32)


def test_a_run_that_goes_on_has_what_no_checkpoint_holds(tmp_path: Path, world: World) -> None:
    origin = write_mixture(tmp_path / "origin", "deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    for load in (True, False):
        files = find_model(str(origin), random_weights=not load)
        precision = Precision(torch.bfloat16, torch.bfloat16)
        model = assemble_model(Blueprint(files, read_model_config(files), world, precision, load=load)).model
        assert torch.equal(model.get_buffer(name), tensors(origin)[name].float()), load


@pytest.mark.parametrize("family", ["llama4", "deepseek_v3"])
def test_what_was_packed_is_exported_in_bf16(family: str, tmp_path: Path, world: World) -> None:
    """The same tensors as of a model that is not packed, and no word of scales."""
    write = write_mixture if family in MIXTURES else write_tower
    entry = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
    whole = write(tmp_path / "whole", family)
    origin = changed(whole, tmp_path / "origin", in_8_bits, quantization_config=entry)
    out = trained(origin, tmp_path / "run", world)
    found = tensors(out)
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in tensors(whole).items()}
    assert {value.dtype for value in found.values()} == {torch.bfloat16}
    for name, value in found.items():
        torch.testing.assert_close(value, tensors(whole)[name], rtol=0.07, atol=0.003, msg=name)
    described = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in described
    assert "quantization_config" not in described.get("text_config", {})
    transformers.AutoModelForCausalLM.from_pretrained(out)
