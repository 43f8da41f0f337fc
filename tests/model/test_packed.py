"""Weights that are stored in 8 or 4 bits are read as transformers reads them, and trained and exported in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from golden_stored import GOLDEN, decoded
from stored_models import (
    FORMS,
    Tensors,
    changed,
    check,
    experts_in_4_bits,
    in_8_bits,
    in_form,
    refusal,
    widened,
    write_mixture,
)
from tiny import llama_config, load, write_model
from tonnage.errors import UserError
from tonnage.host.quantized import packed_tensors
from tonnage.kernels.quantized import unpack as unpack_numbers
from tonnage.kernels.quantized import widen
from tonnage.model.adapters import AdapterSpec, Trains, prepare
from tonnage.model.anatomy import dissect
from tonnage.model.build import allocate, on_meta, packed_values
from tonnage.model.dtypes import DTYPES
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import find_places
from tonnage.model.packed import unpack
from tonnage.model.packed_layers import pack_layers
from tonnage.model.packed_views import Packed
from tonnage.model.pretrained import load_pretrained
from tonnage.model.stored import read, read_headers

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
MXFP4 = {"quant_method": "mxfp4"}


def loaded(folder: Path) -> Any:
    files = find_model(str(folder))
    model = on_meta(read_model_config(files), torch.bfloat16)
    allocate(model, torch.device("cpu"))
    load(model, folder)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_8_bit_floats_with_scales_are_read_as_transformers_reads_them(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = llama_config(tie_word_embeddings=False, intermediate_size=208)
    whole = tmp_path / "whole"
    _ = write_model(whole, config, torch.bfloat16) if family == "llama" else write_mixture(whole, family)
    entry = FP8 | {"weight_block_size": [8, 8]}  # into which transformers can divide all of these matrices
    folder = changed(whole, tmp_path / "fp8", lambda t: in_8_bits(t, 8, 8), quantization_config=entry)
    found = check(folder)
    assert found.unpacked == "fp8 (8-bit floats with scales)"
    assert found.once_quantised is None
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.is_accelerate_available", lambda: True)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, value in loaded(folder).named_parameters():
        assert torch.equal(value, theirs.get_parameter(name)), name


def test_4_bit_floats_with_scales_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    folder = changed(
        write_mixture(tmp_path / "whole", "gpt_oss"), tmp_path / "4", experts_in_4_bits, quantization_config=MXFP4
    )
    assert check(folder).unpacked == "mxfp4 (4-bit floats with scales)"
    stored = load_file(folder / "model.safetensors")
    for name, value in loaded(folder).named_parameters():
        if f"{name}_blocks" in stored:
            expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(value, expected), name
        else:
            assert torch.equal(value, stored[name]), name


def of_8_bits(folder: Path, shape: tuple[int, ...], scale: Tensor, block: Any) -> tuple[Tensor, Packed]:
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    save_file({"a.weight": values, "a.weight_scale_inv": scale}, folder / "a.safetensors")
    config = type("Config", (), {"quantization_config": FP8 | {"weight_block_size": block}})
    (packed,) = unpack(read_headers([folder / "a.safetensors"]), config)
    assert isinstance(packed, Packed)
    return values, packed


@pytest.mark.parametrize("shape", [(32, 24), (3, 32, 24)])
def test_a_part_is_the_part_of_the_whole(shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = torch.rand(*shape[:-2], 2, 3)
    values, packed = of_8_bits(tmp_path, shape, scales, [16, 8])
    theirs = Fp8Dequantize(None).convert({"weight": values, "weight_scale_inv": scales})["weight"]
    expected = (theirs[0] if isinstance(theirs, list) else theirs).bfloat16()  # transformers 5.17 gives a list
    ((_, view),) = read([packed])
    regions: list[Any] = [..., slice(0, 1), (slice(1, 3), slice(3, 20)), slice(5, 5), (slice(0, 32), slice(7, 24))]
    for region in regions:
        assert torch.equal(view[region], expected[region]), region


def test_blocks_at_the_edge_are_cut_short_and_one_scale_may_be_for_all(tmp_path: Path) -> None:
    """As in DeepSeek-V3, one of whose matrices has 576 rows in blocks of 128."""
    scales = torch.rand(3, 4)
    values, packed = of_8_bits(tmp_path, (36, 27), scales, [16, 8])
    spread = scales.repeat_interleave(16, 0).repeat_interleave(8, 1)[:36, :27]
    ((_, view),) = read([packed])
    assert torch.equal(view[...], (values.float() * spread).bfloat16())
    assert torch.equal(view[33:36], (values.float() * spread).bfloat16()[33:36])
    for scale in (torch.tensor(0.7), torch.tensor([0.7])):
        values, packed = of_8_bits(tmp_path, (36, 27), scale, None)
        ((_, view),) = read([packed])
        assert torch.equal(view[2:9, 3:5], (values.float() * scale).bfloat16()[2:9, 3:5])


def without_one(ending: str) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        packed = in_8_bits(tensors)
        del packed[next(name for name in packed if name.endswith(ending))]
        return packed

    return change


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (without_one("_scale_inv"), "a quantised checkpoint (fp8): 1 tensors such as"),
        (without_one("q_proj.weight"), "a quantised checkpoint (fp8): 1 tensors such as"),
        (lambda t: in_8_bits(t, 8, 8), "a quantised checkpoint (fp8)"),
        (
            lambda t: {n: v.clamp(0, 9).byte() if "q_proj.weight_" in n else v for n, v in in_8_bits(t).items()},
            "a quantised checkpoint (fp8)",
        ),
    ],
    ids=["a scale is lost", "a weight is lost", "other blocks", "another type of scales"],
)
def test_scales_that_do_not_fit_are_refused(change: Any, told: str, tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole", llama_config(tie_word_embeddings=False), torch.bfloat16)
    folder = changed(whole, tmp_path / "fp8", change, quantization_config=FP8)
    assert told in refusal(folder)


def test_a_model_whose_only_packed_weight_has_no_scale_answers_nothing(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        name = next(name for name in tensors if name.endswith("v_proj.weight"))
        return tensors | {name: tensors[name].to(torch.float8_e4m3fn)}

    whole = write_model(tmp_path / "whole", llama_config(tie_word_embeddings=False), torch.bfloat16)
    folder = changed(whole, tmp_path / "fp8", change, quantization_config=FP8 | {"weight_block_size": [128, 128]})
    with pytest.raises(UserError, match=r"1 quantised weights that transformers cannot unpack, such as model\.layers"):
        load_pretrained(find_model(str(folder)))


def test_scales_are_not_used_unless_the_config_says_what_they_are(tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole", llama_config(tie_word_embeddings=False), torch.bfloat16)
    assert "a quantised checkpoint (fp8 with a scale" in refusal(changed(whole, tmp_path / "fp8", in_8_bits))


def test_a_stage_of_a_packed_model_finds_all_of_it(tmp_path: Path) -> None:
    whole = write_mixture(tmp_path / "whole", "qwen3_moe")
    folder = changed(whole, tmp_path / "fp8", in_8_bits, quantization_config=FP8)
    files = find_model(str(folder))
    found = find_places(on_meta(read_model_config(files), torch.float32), files)
    packed = [one for group in found.groups for one, _ in group.sources]
    assert packed
    assert all(isinstance(one, Packed) for one in packed)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == FP8


def written(folder: Path, tensors: Tensors, entry: dict[str, Any]) -> Packed:
    """The weight that tensors make up, as a configuration describes them."""
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / "a.safetensors")
    config = type("Config", (), {"quantization_config": entry})
    (packed,) = unpack(read_headers([folder / "a.safetensors"]), config)
    assert isinstance(packed, Packed)
    return packed


def assert_reads(packed: Packed, expected: Tensor) -> None:
    """The whole, its parts, and what stays packed, are those of another's numbers."""
    assert packed.shape == tuple(expected.shape)
    assert DTYPES[packed.dtype] == expected.dtype
    ((_, view),) = read([packed])
    regions: list[Any] = [..., slice(0, 1), slice(3, 21), (slice(1, 19), slice(3, 50)), slice(5, 5)]
    for region in regions:
        assert torch.equal(view[region], expected[region]), region
    kept = packed.whole()
    assert torch.equal(unpack_numbers(kept, torch.float32), expected.float())
    part = torch.empty(len(expected), 32)
    widen(kept, part, 0, 32)
    assert torch.equal(part, expected[:, 32:64].float())
    assert {name: (str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in kept.named().items()} == (
        packed_tensors(kept.shape, kept.form)
    )


@pytest.mark.parametrize("case", json.loads(GOLDEN.read_text()), ids=lambda case: case["name"])
def test_numbers_are_those_of_the_libraries_that_write_them(case: dict[str, Any], tmp_path: Path) -> None:
    tensors = {name: decoded(one) for name, one in case["tensors"].items()}
    packed = written(tmp_path, tensors, case["quantization_config"])
    assert packed.can_stay == ("act-order" not in case["name"] or "-1" in case["name"])
    assert_reads(packed, decoded(case["expected"]))


def test_nvfp4_of_modelopt_is_what_torchao_reads(tmp_path: Path) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    weight, number = torch.randn(32, 64), torch.tensor(0.0123)
    theirs = NVFP4Tensor.to_nvfp4(weight.bfloat16(), per_tensor_scale=number)
    tensors = {
        "a.weight": theirs.qdata.view(torch.uint8),
        "a.weight_scale": theirs.scale.view(torch.float8_e4m3fn).reshape(32, 4),
        "a.weight_scale_2": number,
        "a.input_scale": torch.tensor(1.0),
    }
    packed = written(tmp_path, tensors, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert_reads(packed, theirs.dequantize(torch.float32).bfloat16())


def test_groups_in_another_order_than_the_config_says_are_refused(tmp_path: Path) -> None:
    case = next(one for one in json.loads(GOLDEN.read_text()) if "act-order" in one["name"])
    tensors = {name: decoded(one) for name, one in case["tensors"].items()}
    packed = written(tmp_path, tensors, case["quantization_config"] | {"desc_act": False})
    with pytest.raises(UserError, match="columns of groups that are not side by side"):
        packed.whole()


@pytest.mark.parametrize("form", FORMS)
def test_a_model_is_read_and_what_may_stay_is_known(form: str, tmp_path: Path) -> None:
    config = llama_config(tie_word_embeddings=False, intermediate_size=192)
    whole = write_model(tmp_path / "whole", config, torch.bfloat16)
    folder = changed(whole, tmp_path / form, lambda t: in_form(t, form), quantization_config=FORMS[form][1])
    found = check(folder)
    assert form in str(found.unpacked) or form in ("nvfp4", "mxfp4")
    assert len(found.stored) == 14
    numbers = load_file(widened(folder, tmp_path / "widened") / "model.safetensors")
    for name, value in loaded(folder).named_parameters():
        assert torch.equal(value, numbers[name].bfloat16()), name
    if form != "fp8":  # which transformers reads, if accelerate is there
        answering = load_pretrained(find_model(str(folder)))
        assert torch.equal(answering.lm_head.weight.float(), numbers["lm_head.weight"])


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe", "deepseek_v3"])
def test_stacks_of_experts_stay_packed_where_their_rows_are_side_by_side(family: str, tmp_path: Path) -> None:
    """And are, widened, what is read as numbers."""
    whole = write_mixture(tmp_path / "whole", family)
    if family == "gpt_oss":
        folder = changed(whole, tmp_path / "q", experts_in_4_bits, quantization_config=MXFP4)
    else:
        entry = FORMS["fp8"][1]
        folder = changed(whole, tmp_path / "q", lambda t: in_form(t, "fp8"), quantization_config=entry)
    files, stored = find_model(str(folder)), dict(check(folder).stored)
    assert any(name.endswith("experts.down_proj") for name in stored)
    config = read_model_config(files)
    model, plain = on_meta(config, torch.bfloat16), dict(loaded(folder).named_parameters())
    anatomy = dissect(model)
    prepare(model, anatomy, Trains(AdapterSpec(2, 1.0, ("o_proj",)), stored=tuple(stored.items())), torch.float32)
    found = find_places(on_meta(config, torch.bfloat16), files)
    layers = pack_layers(model, anatomy.blocks, None)
    assert {layer.path for layer in layers} == {name for name in stored if ".layers." in name}
    for layer, value in packed_values(found, layers, on_meta(config, torch.bfloat16)):
        numbers = unpack_numbers(layer.packed(value), torch.bfloat16)
        assert torch.equal(numbers.mT if layer.form.endswith("turned") else numbers, plain[layer.path]), layer.path


@pytest.mark.parametrize(
    "entry",
    [
        {"bits": 3},
        {"bits": 4, "group_size": 64},
        {"bits": 4, "checkpoint_format": "marlin"},
        {"bits": 4, "dynamic": {"a": {"bits": 8}}},
    ],
)
def test_what_is_not_known_of_gptq_stays_refused(entry: dict[str, Any], tmp_path: Path) -> None:
    whole = write_model(tmp_path / "whole", llama_config(intermediate_size=192), torch.bfloat16)
    entry = FORMS["gptq"][1] | entry
    folder = changed(whole, tmp_path / "q", lambda t: in_form(t, "gptq"), quantization_config=entry)
    assert "a quantised checkpoint (gptq)" in refusal(folder)
