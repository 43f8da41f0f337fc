"""A tiny model of the very architecture that a configuration describes.

Sizes are shrunk, nothing else: which layers there are, what they consist of, how positions and scores are made stays.
Windows, chunks and scan blocks are made shorter than a document of a dozen tokens, so that what happens at their
borders happens. The model itself is nobody's: its weights are drawn (``draw``), so large that a token changes what
comes after it by far more than rounding does.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

VOCABULARY = 96
WIDTH, HEADS, GROUPS, HEAD_SIZE = 64, 4, 2, 16
"""Of hidden states; heads of queries, of keys and values, and their size. Heads times their size is the width, as many
families take for granted."""
WINDOW = 4
"""Tokens of whatever has a length: windows, chunks, blocks of scans."""
POSITIONS = 256
LAYERS = 4
MOST_LAYERS = 8
SHORT = 8
"""Tokens from which on positions are computed in another way, where a family does so for long documents."""

HEAD_COUNTS = re.compile(
    r"^(num_|n_|swa_num_|encoder_|decoder_|num_encoder_|num_decoder_)?(attention_)?heads?$|^index_n_heads$"
)
GROUP_COUNTS = re.compile(r"^(swa_)?num_(key_value_heads|kv_heads|query_groups)$|^num_global_key_value_heads$")
HEAD_SIZES = re.compile(
    r"^(swa_|global_|attention_|linear_|linear_key_|linear_value_|v_|qk_rope_|qk_nope_|index_)?head_(dim|size)$"
    r"|^(dim_head|d_head|d_kv|kv_channels|attention_head_dim|query_pre_attn_scalar|rotary_dim)$"
)
WIDTHS = re.compile(
    r"^(hidden_size|d_model|n_embd|embedding_size|word_embed_proj_dim|emb_dim|embedding_dim|lru_width|dim_model_base"
    r"|attention_hidden_size|input_embedding_size|output_embedding_size|router_hidden_size)$"
)
INNER_WIDTHS = re.compile(
    r"(intermediate_size(_mlp)?|ffn_dim|ffn_hidden_size|dim_ff|dff|d_inner|n_inner|feed_forward_size|mamba_d_ssm)$"
)
SMALL = {
    # Ranks and states.
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "ple_embed_dim"), 16),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size"), 16),
    **dict.fromkeys(("laurel_rank", "adapter_rank", "gated_norm_rank", "hc_lowrank"), 8),
    **dict.fromkeys(("mamba_dt_rank", "time_step_rank", "hidden_size_per_layer_input"), 8),
    # Heads of what is not attention: as many, of such a size, that they make up twice the width.
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 2 * HEADS),
    "n_mamba_heads": 2,
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "mamba_headdim"), HEAD_SIZE),
    "linear_num_key_heads": GROUPS,
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), HEADS),
    # Experts.
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "zero_expert_num"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "topk_group"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    # Which layers are of another kind.
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers"), 1),
    **dict.fromkeys(("expert_layer_offset", "attn_layer_offset"), 1),
    **dict.fromkeys(("expert_layer_period", "attn_layer_period", "moe_layer_interval"), 2),
    **dict.fromkeys(("decoder_sparse_step", "interleave_moe_layer_step", "layer_group_size"), 2),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers"), 2),
    **dict.fromkeys(("no_rope_layer_interval", "n_layers_per_attn_res_block", "num_layers_per_stack"), 2),
    "num_nextn_predict_layers": 0,
    # Lengths.
    **dict.fromkeys(("sliding_window", "sliding_window_size", "window_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("attention_chunk_size", "chunk_size", "mamba_chunk_size", "block_size"), WINDOW),
    **dict.fromkeys(("keep_window_size", "index_topk", "floor_scale", "log_scaling_n_floor", "rel_extent"), WINDOW),
    "local_attention": 2 * WINDOW,
    **dict.fromkeys(("index_block_size", "index_topk_blocks", "split_ngram_parts"), 2),
    **dict.fromkeys(("block_multiple_of", "ffn_round_up_to_multiple_of", "make_ngram_vocab_size_divisible_by"), 8),
    "ngram_vocab_size_base": VOCABULARY,
}
"""What keys of a configuration become if they are larger."""
LAYER_COUNTS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "num_decoder_layers",
    "num_blocks",
)
SHARING_LAYERS = "num_kv_shared_layers"
"""The key for how many layers, the last ones, have the keys and values of others."""
BY_LAYER = re.compile("layer|pattern|block_type|intermediate_size")
"""Keys whose lists may hold a value for each layer."""
LAYER_NUMBERS = ("moe_layers", "mlp_only_layers", "full_attn_idxs", "hybrid_layer_ids", "cross_attention_layers")
"""Keys whose lists hold the numbers of layers, and not a value for each."""
POSITION_COUNTS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_target_positions",
    "context_length",
    "model_max_length",
)
TOKENS = re.compile(r"_token_ids?$|_token_index$|^(unk|mask|lang)_i(d|ndex)$")
NO_PART = (
    "quantization_config",
    "dtype",
    "torch_dtype",
    "_name_or_path",
    "transformers_version",
    "id2label",
    "label2id",
)
"""Of the architecture."""


def shrink(config: PreTrainedConfig, *, long_documents: bool = True) -> PreTrainedConfig:
    """The configuration of a tiny model of the same architecture; ``config`` is one of a text model.

    ``long_documents`` says whether documents are longer than what positions were first trained for, where a family
    computes those of longer ones in another way.

    Raises:
        Exception: of any kind, where the family's class does not take what comes out.
    """
    whole, layers, numbers = _architecture(config)
    small = {key: _smaller(key, value, numbers, layers) for key, value in whole.items()}
    _mend(small, whole)
    first_positions = SHORT if long_documents else POSITIONS
    if isinstance(small.get("original_max_position_embeddings"), int):
        small["original_max_position_embeddings"] = first_positions
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(small.get(key), Mapping):
            small[key] = _rope(small[key], small, whole, first_positions)
    return type(config).from_dict(small)


def shorten(config: PreTrainedConfig) -> PreTrainedConfig:
    """The same with its own widths: fewer layers and tokens, shorter windows. For families whose sizes hang together
    in ways that ``shrink`` does not know."""
    whole, layers, numbers = _architecture(config)
    lengths = {key for key, value in SMALL.items() if value == WINDOW or "window" in key}
    small: dict[str, Any] = {
        key: _smaller(key, value, numbers, layers)
        if key in lengths
        or key in LAYER_COUNTS
        or key in POSITION_COUNTS
        or key in ("vocab_size", SHARING_LAYERS)
        or TOKENS.search(key)
        or isinstance(value, list)
        else value
        for key, value in whole.items()
    }
    if overrides := whole.get("per_layer_config"):
        small["per_layer_config"] = overrides_of(overrides, numbers)
    return type(config).from_dict(small)


def _architecture(config: PreTrainedConfig) -> tuple[dict[str, Any], int, list[int]]:
    """What a configuration says of the architecture, the number of its layers, and which of these stay."""
    whole = {key: value for key, value in config.to_dict().items() if key not in NO_PART}
    _, layers = count_layers(whole)
    return whole, layers, _layers_kept(whole, layers)


def count_layers(described: Mapping[str, Any]) -> tuple[str, int]:
    """The key under which a configuration has the number of its layers, and that number; the key is empty where the
    length of a list tells it."""
    for key in LAYER_COUNTS:
        if isinstance(described.get(key), int):
            return key, described[key]
    return "", next((len(one) for key, one in described.items() if isinstance(one, list) and BY_LAYER.search(key)), 0)


def is_by_layer(key: str, value: Any, layers: int) -> bool:
    """Whether a key of a configuration has a value for each of so many layers."""
    is_one = isinstance(value, list) and len(value) == layers and key not in LAYER_NUMBERS
    return is_one and BY_LAYER.search(key) is not None


def overrides_of(overrides: Mapping[Any, Any], layers: Sequence[int]) -> dict[int | str, dict[str, Any]]:
    """``per_layer_config`` of a model that has these ``layers`` of another, in this order."""
    by_layer = {int(layer): values for layer, values in overrides.items()}
    return {place: dict(by_layer[layer]) for place, layer in enumerate(layers) if layer in by_layer}


def _layers_kept(whole: Mapping[str, Any], layers: int) -> list[int]:
    """Numbers of the layers that stay: of every kind the first two, in order."""
    lists = [value for key, value in whole.items() if is_by_layer(key, value, layers)]
    numbers = [set(whole[key]) for key in LAYER_NUMBERS if isinstance(whole.get(key), list)]
    if sharing := whole.get(SHARING_LAYERS):
        numbers.append(set(range(layers - sharing, layers)))
    of_kind = Counter[str]()
    chosen: list[int] = []
    for layer in range(layers):
        kind = repr([value[layer] for value in lists] + [layer in those for those in numbers])
        of_kind[kind] += 1
        if of_kind[kind] <= 2 and len(chosen) < MOST_LAYERS:
            chosen.append(layer)
    more = [layer for layer in range(layers) if layer not in chosen]
    return sorted(chosen + more[: max(0, LAYERS - len(chosen))])


def _smaller(key: str, value: Any, numbers: list[int], layers: int) -> Any:
    if key == "per_layer_config" and isinstance(value, Mapping):
        return {
            place: {name: _smaller(name, one, numbers, 0) for name, one in overrides.items()}
            for place, overrides in overrides_of(value, numbers).items()
        }
    if isinstance(value, list) and key in LAYER_NUMBERS:
        return [place for place, layer in enumerate(numbers) if layer in value]
    if layers and is_by_layer(key, value, layers):
        return [_smaller(key, value[layer], numbers, 0) for layer in numbers]
    if key == "compress_rates" and isinstance(value, Mapping):
        return {name: min(rate, WINDOW // 2) for name, rate in value.items()}
    if isinstance(value, Mapping):
        if key in ("rope_parameters", "rope_scaling"):
            return dict(value)
        return {name: _smaller(str(name), one, numbers, layers) for name, one in value.items()}
    if TOKENS.search(key):
        return None if not isinstance(value, int) else min(value, VOCABULARY - 1)
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if key in LAYER_COUNTS:
        return len(numbers)
    if key == SHARING_LAYERS:
        return sum(layer >= layers - value for layer in numbers)
    if key in POSITION_COUNTS:
        return min(value, POSITIONS)
    return min(value, _size(key, value))


def _size(key: str, value: int) -> int:
    if "vocab" in key:
        return VOCABULARY if key in ("vocab_size", "vocab_size_per_layer_input", "decoder_vocab_size") else value
    if (size := SMALL.get(key)) is not None:
        return size
    rules: tuple[tuple[re.Pattern[str], int], ...] = (
        (HEAD_COUNTS, HEADS),
        (GROUP_COUNTS, GROUPS),
        (HEAD_SIZES, HEAD_SIZE),
        (WIDTHS, WIDTH),
        (INNER_WIDTHS, 2 * WIDTH),
    )
    return next((size for pattern, size in rules if pattern.search(key)), value)


def _mend(small: dict[str, Any], whole: Mapping[str, Any]) -> None:
    """Adjust values that depend on those that were shrunk."""
    heads = next((key for key in whole if HEAD_COUNTS.search(key) and isinstance(whole[key], int)), None)
    groups = next((key for key in whole if GROUP_COUNTS.search(key) and isinstance(whole[key], int)), None)
    if heads and groups and whole[heads] == whole[groups]:
        small[groups] = small[heads]
    for key, least in (("num_experts", "n_group"), ("n_routed_experts", "n_group")):
        if isinstance(small.get(key), int) and isinstance(small.get(least), int) and whole[least] == 1:
            small[least], small["topk_group"] = 1, 1
    if isinstance(small.get("qk_head_dim"), int) and isinstance(small.get("qk_rope_head_dim"), int):
        small["qk_head_dim"] = small["qk_rope_head_dim"] + small["qk_nope_head_dim"]
    if isinstance(small.get("moe_layer_end_index"), int):
        small["moe_layer_end_index"] = LAYERS - 1
    if whole.get("mamba_expand") == 1 or whole.get("expand") == 1:
        for key in ("mamba_n_heads", "mamba_num_heads", "num_heads"):
            if key in small:
                small[key] = HEADS
    if "expand" in whole and "num_heads" in whole:  # Mamba 2
        small["num_heads"], small["head_dim"] = whole["expand"] * WIDTH // HEAD_SIZE, HEAD_SIZE
    if isinstance(small.get("mamba_d_ssm"), int):
        small["mamba_n_heads"] = small["mamba_d_ssm"] // small["mamba_d_head"]
    if isinstance(small.get("n_groups"), int):
        small["n_groups"] = min(small["n_groups"], GROUPS)


def _rope(
    rope: Mapping[str, Any], small: Mapping[str, Any], whole: Mapping[str, Any], first_positions: int
) -> dict[str, Any]:
    if any(isinstance(value, Mapping) for value in rope.values()):  # a set for every kind of layer
        return {
            key: _rope(value, small, whole, first_positions) if isinstance(value, Mapping) else value
            for key, value in rope.items()
        }
    changed = dict(rope)
    share = float(rope.get("partial_rotary_factor", whole.get("partial_rotary_factor") or 1.0))
    size = small.get("qk_rope_head_dim") or small.get("head_dim") or HEAD_SIZE
    rotated = int(int(size) * share) // 2
    for key in ("short_factor", "long_factor"):
        if isinstance(rope.get(key), list):
            changed[key] = (rope[key] * rotated)[:rotated]
    if isinstance(rope.get("mrope_section"), list):
        parts = len(rope["mrope_section"])
        changed["mrope_section"] = [rotated - (parts - 1) * (rotated // parts), *[rotated // parts] * (parts - 1)]
    if isinstance(rope.get("original_max_position_embeddings"), int):
        changed["original_max_position_embeddings"] = first_positions
    return changed


@torch.no_grad()
def draw(model: nn.Module, gain: float, seed: int = 0) -> None:
    """Give a model's parameters values with which its tokens have much to say to each other.

    Matrices keep the size of what goes through them, times ``gain``; vectors stay near what the model's own
    initialisation gave them.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() < 2:
            parameter.add_(0.1 * noise)
        elif "embed" in name or "wte" in name or "wpe" in name:
            parameter.copy_(noise)
        else:
            parameter.copy_(noise * gain / math.sqrt(parameter.shape[-1]))
