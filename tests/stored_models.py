"""Model directories of families whose tensors are not stored as the model holds them, and of changed tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tiny import byte_tokenizer
from tonnage.errors import UserError
from tonnage.model.files import find_model, read_model_config
from tonnage.model.matching import check_weights
from tonnage.model.packed import unpack
from tonnage.model.stored import read, read_headers
from tonnage.rundir.weights import WeightFacts

Tensors = dict[str, Tensor]

SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "eos_token_id": 256,
    "bos_token_id": 256,
    "pad_token_id": 257,
}


def _of(family: str, **changes: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, family)(**(SHAPE | changes))


ROUTED = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
LINEAR: dict[str, Any] = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MIXTURES: dict[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": _of("MixtralConfig", num_local_experts=3),
    "qwen3_moe": _of("Qwen3MoeConfig", num_experts=5, head_dim=8, **ROUTED),
    "deepseek_v3": _of(
        "DeepseekV3Config",
        n_routed_experts=4,
        first_k_dense_replace=1,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        num_key_value_heads=4,
        **ROUTED,
    ),
    "gpt_oss": _of("GptOssConfig", intermediate_size=64, num_local_experts=4, head_dim=8, num_experts_per_tok=2),
    "hrm_text": _of("HrmTextConfig"),
    "apertus": _of("ApertusConfig"),
    "hunyuan_v1_moe": _of("HunYuanMoEV1Config", num_experts=4, moe_topk=2, head_dim=8),
    "lfm2_moe": _of(
        "Lfm2MoeConfig", num_experts=4, num_dense_layers=1, layer_types=["conv", "full_attention"], **ROUTED
    ),
    "granitemoe": _of("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": _of("Qwen2MoeConfig", num_experts=4, shared_expert_intermediate_size=24, **ROUTED),
    "jamba": _of(
        "JambaConfig",
        num_experts=4,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "olmoe": _of("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "phimoe": _of("PhimoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "llama4_text": _of("Llama4TextConfig", num_local_experts=4, intermediate_size_mlp=40, head_dim=8),
    "qwen3_next": _of("Qwen3NextConfig", num_experts=4, shared_expert_intermediate_size=24, **ROUTED, **LINEAR),
    "qwen3_5_moe_text": _of(
        "Qwen3_5MoeTextConfig", num_experts=4, shared_expert_intermediate_size=24, **ROUTED, **LINEAR
    ),
}


TEXT = {
    key: SHAPE[key]
    for key in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "initializer_range",
    )
} | {"head_dim": 8}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}


def _with_tower(family: str, text: dict[str, Any], vision: dict[str, Any], **changes: Any) -> Callable[[], Any]:
    named = {"architectures": [f"{family}ForConditionalGeneration"]}
    return lambda: getattr(transformers, f"{family}Config")(
        text_config=TEXT | text, vision_config=vision, **named, **changes
    )


TOWERS: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma3": _with_tower("Gemma3", {}, VISION),
    "gemma4": _with_tower("Gemma4", {"hidden_size_per_layer_input": 0}, VISION | {"head_dim": 8}, audio_config=None),
    "mistral3": _with_tower(
        "Mistral3",
        {"model_type": "mistral"},
        VISION | {"model_type": "pixtral", "head_dim": 8},
        tie_word_embeddings=False,
    ),
    "ministral3": _with_tower(
        "Mistral3", {"model_type": "ministral3"}, VISION | {"model_type": "pixtral", "head_dim": 8}
    ),
    "qwen3_5": _with_tower("Qwen3_5", LINEAR, QWEN),
    "qwen3_5_moe": _with_tower(
        "Qwen3_5Moe", LINEAR | ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 24}, QWEN
    ),
    "llama4": _with_tower(
        "Llama4",
        {"num_local_experts": 4, "intermediate_size_mlp": 40},
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
}
"""Models of text and images."""


def write_tower(directory: Path, family: str, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
    """A model directory of one of the ``TOWERS``, as ``write_mixture`` writes one."""
    config = TOWERS[family]()
    kind = getattr(transformers, (config.architectures or [""])[0])
    return _write(directory, lambda: kind._from_config(config, dtype=dtype), **how)


def write_mixture(directory: Path, family: str, dtype: torch.dtype = torch.bfloat16, **how: Any) -> Path:
    """A model directory of one of the ``MIXTURES`` as transformers saves it, ``how`` it is told to; no value of it is
    as it is initialised."""
    return _write(directory, lambda: AutoModelForCausalLM.from_config(MIXTURES[family](), dtype=dtype), **how)


def _write(directory: Path, make: Callable[[], PreTrainedModel], **how: Any) -> Path:
    torch.manual_seed(0)
    model = make()
    saved = model.state_dict()
    with torch.no_grad():
        for tensor in saved.values():
            tensor.copy_(torch.randn(tensor.shape) * 0.3)
    model.save_pretrained(directory, **how)
    byte_tokenizer().save_pretrained(directory)
    return directory


def changed(directory: Path, folder: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    """A copy of a model directory with other tensors, and other entries in config.json."""
    folder.mkdir(exist_ok=True)
    for path in directory.iterdir():
        if path.suffix == ".json":
            (folder / path.name).write_bytes(path.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | config))
    tensors = change(dict(load_file(directory / "model.safetensors")))
    save_file({name: value.clone().contiguous() for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def in_8_bits(tensors: Tensors, rows: int = 16, columns: int = 8) -> Tensors:
    """Every matrix of a layer in 8-bit floats, with a scale for a block of ``rows`` and ``columns``."""
    packed = dict(tensors)
    for name, value in tensors.items():
        if value.dim() == 2 and ".layers." in name and "norm" not in name and "gate.weight" not in name:
            grid = -(-value.shape[0] // rows), -(-value.shape[1] // columns)
            scales = torch.rand(grid) + 0.5
            spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: value.shape[0], : value.shape[1]]
            packed[name] = (value.float() / spread).to(torch.float8_e4m3fn)
            packed[f"{name}_scale_inv"] = scales
    return packed


def without(key: str) -> Callable[[Tensors], Tensors]:
    """What takes one tensor away."""
    return lambda tensors: {name: value for name, value in tensors.items() if name != key}


def check(directory: Path, **allowed: Any) -> WeightFacts:
    files = find_model(str(directory))
    return check_weights(files, read_model_config(files), **allowed)


def refusal(directory: Path, **allowed: Any) -> str:
    with pytest.raises(UserError) as caught:
        check(directory, **allowed)
    return str(caught.value)


def same(ours: PreTrainedModel, theirs: Any) -> None:
    expected = dict(theirs.named_parameters())
    found = dict(ours.named_parameters())
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name
    for name, value in theirs.named_buffers():
        assert torch.equal(ours.get_buffer(name), value), name


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape).to(torch.int32)


def _gptq(rows: int, columns: int, group: int = 32) -> Tensors:
    return {
        "qweight": _words(columns // 8, rows),
        "qzeros": torch.full((columns // group, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": (torch.rand(columns // group, rows) * 0.06 + 0.01).half(),
        "g_idx": (torch.arange(columns) // group).to(torch.int32),
    }


def _awq(rows: int, columns: int) -> Tensors:
    zeros = torch.full((columns // 32, rows // 8), 0x77777777, dtype=torch.int32)
    return {
        "qweight": _words(columns, rows // 8),
        "qzeros": zeros,
        "scales": (torch.rand(columns // 32, rows) * 0.06 + 0.01).half(),
    }


def _nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": (torch.rand(rows, columns // 16) * 300 + 100).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([3731.0]),
    }


def _mxfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8),
        "weight_scale": torch.randint(122, 125, (rows, columns // 32), dtype=torch.uint8),
    }


def _fp8(rows: int, columns: int) -> Tensors:
    grid = -(-rows // 16), -(-columns // 32)
    return {
        "weight": torch.randn(rows, columns).to(torch.float8_e4m3fn),
        "weight_scale_inv": torch.rand(grid) * 0.2 + 0.1,
    }


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
_COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
FORMS: dict[str, tuple[Callable[[int, int], Tensors], dict[str, Any]]] = {
    "gptq": (_gptq, _GPTQ | {"checkpoint_format": "gptq"}),
    "awq": (_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
    "nvfp4": (_nvfp4, _COMPRESSED | {"format": "nvfp4-pack-quantized"}),
    "mxfp4": (_mxfp4, _COMPRESSED | {"format": "mxfp4-pack-quantized"}),
    "fp8": (_fp8, {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 32]}),
}
"""Of a form, random numbers of a matrix in it, and what configurations say."""


def in_form(tensors: Tensors, form: str) -> Tensors:
    """A model whose matrices in layers are random numbers in a form, but for routers."""
    make = FORMS[form][0]
    packed: Tensors = {}
    for name, value in tensors.items():
        if value.dim() == 2 and ".layers." in name and not name.endswith((".gate.weight", "router.weight")):
            layer = name.removesuffix(".weight")
            packed |= {f"{layer}.{part}": one for part, one in make(*value.shape).items()}
        else:
            packed[name] = value
    return packed


def experts_in_4_bits(tensors: Tensors) -> Tensors:
    """A gpt-oss whose experts are random numbers in mxfp4."""
    packed: Tensors = {}
    for name, value in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, width, rows = value.shape
            packed[f"{name}_blocks"] = torch.randint(0, 256, (experts, rows, width // 32, 16), dtype=torch.uint8)
            packed[f"{name}_scales"] = torch.randint(122, 125, (experts, rows, width // 32), dtype=torch.uint8)
        else:
            packed[name] = value
    return packed


def widened(folder: Path, target: Path) -> Path:
    """The same model in fp32, its numbers those that are read."""
    files = find_model(str(folder), tokenizer=False)
    config = read_model_config(files)
    stored = unpack(read_headers(files.weights), config)
    target.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (target / path.name).write_bytes(path.read_bytes())
    described = json.loads((folder / "config.json").read_text())
    del described["quantization_config"]
    (target / "config.json").write_text(json.dumps(described))
    numbers = {one.key: view[...].float().contiguous() for one, view in read(stored)}
    save_file(numbers, target / "model.safetensors", metadata={"format": "pt"})
    return target
