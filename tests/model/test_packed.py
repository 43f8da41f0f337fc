"""Weights that are stored in 8 or 4 bits are read as transformers reads them, and trained and exported in bf16."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from stored_models import Tensors, changed, check, in_8_bits, refusal, write_mixture
from tiny import llama_config, load, write_model
from tonnage.errors import UserError
from tonnage.model.build import allocate, on_meta
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import find_places
from tonnage.model.packed import PackedPair, unpack
from tonnage.model.pretrained import load_pretrained
from tonnage.model.stored import read, read_headers

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 8]}
MXFP4 = {"quant_method": "mxfp4"}


def in_4_bits(tensors: Tensors) -> Tensors:
    """The experts of a gpt-oss in pairs of 4-bit floats."""
    packed: Tensors = {}
    for name, value in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, rows = value.shape
            packed[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            packed[f"{name}_scales"] = torch.randint(120, 130, (experts, rows, width // 32), dtype=torch.uint8)
        else:
            packed[name] = value
    return packed


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
    folder = changed(write_mixture(tmp_path / "whole", "gpt_oss"), tmp_path / "4", in_4_bits, quantization_config=MXFP4)
    assert check(folder).unpacked == "mxfp4 (4-bit floats with scales)"
    stored = load_file(folder / "model.safetensors")
    for name, value in loaded(folder).named_parameters():
        if f"{name}_blocks" in stored:
            expected = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(value, expected), name
        else:
            assert torch.equal(value, stored[name]), name


def of_8_bits(folder: Path, shape: tuple[int, ...], scale: Tensor, block: Any) -> tuple[Tensor, PackedPair]:
    values = torch.randn(shape).to(torch.float8_e4m3fn)
    from safetensors.torch import save_file

    save_file({"a.weight": values, "a.weight_scale_inv": scale}, folder / "a.safetensors")
    config = type("Config", (), {"quantization_config": FP8 | {"weight_block_size": block}})
    (packed,) = unpack(read_headers([folder / "a.safetensors"]), config)
    assert isinstance(packed, PackedPair)
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
    assert all(isinstance(one, PackedPair) for one in packed)
    assert json.loads((folder / "config.json").read_text())["quantization_config"] == FP8
