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
from tonnage.model.matching import Weights, check_weights

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


def check(directory: Path, **allowed: Any) -> Weights:
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
