"""Tiny models of text and images, with processors that the tests make, and images that they draw.

Processors of families that see videos as well need torchvision. Where it is missing, others stand in that do the same
with images.
"""

from __future__ import annotations

import importlib.util
import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from tiny import END, byte_tokenizer

TOKENS = ("<image>", "<|user|>", "<|bot|>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
IMAGE_ID = 258
TEMPLATE = (
    "{% for message in messages %}{{ '<|user|>' if message.role != 'assistant' else '<|bot|>' }}"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text }}{% endfor %}{% endif %}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|bot|>{% endif %}"
)
"""Writes contents that are strings, and lists of parts."""
LISTS_ONLY = TEMPLATE.replace("message.content is string", "false")
"""Writes lists of parts alone, as LLaVA's own does."""
TEXT: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 257,
    "bos_token_id": 256,
    "eos_token_id": 256,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "initializer_range": 0.2,
}
SQUARE = {"height": 28, "width": 28}
HAS_TORCHVISION = importlib.util.find_spec("torchvision") is not None


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end and a padding token, and what stands for images and for turns."""
    made = byte_tokenizer()
    rows = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in (*TOKENS, *rows)])
    assert made.convert_tokens_to_ids("<image>") == IMAGE_ID
    made.chat_template = TEMPLATE
    return made


def _config(kind: str, text: dict[str, Any], vision: dict[str, Any], **more: Any) -> PreTrainedConfig:
    made: PreTrainedConfig = getattr(transformers, f"{kind}Config")(
        text_config=TEXT | text,
        vision_config=vision,
        image_token_id=IMAGE_ID,
        architectures=[f"{kind}ForConditionalGeneration"],
        **({"tie_word_embeddings": False} | more),
    )
    return made


def _clip(**more: Any) -> Any:
    return transformers.CLIPImageProcessorPil(**({"size": {"shortest_edge": 28}, "crop_size": SQUARE} | more))


def tied() -> tuple[PreTrainedConfig, Any]:
    """A LLaVA whose head is the embedding."""
    _, processor = llava()
    vision = VISION | {"model_type": "clip_vision_model"}
    return _config("Llava", {"model_type": "llama"}, vision, tie_word_embeddings=True), processor


def llava() -> tuple[PreTrainedConfig, Any]:
    config = _config("Llava", {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"})
    processor = transformers.LlavaProcessor(
        _clip(),
        _with_image_token(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def llava_next() -> tuple[PreTrainedConfig, Any]:
    grids = [[28, 56], [56, 28], [56, 56]]
    config = _config(
        "LlavaNext",
        {"model_type": "llama"},
        VISION | {"model_type": "clip_vision_model"},
        image_grid_pinpoints=grids,
    )
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=grids
    )
    processor = transformers.LlavaNextProcessor(
        images,
        _with_image_token(),
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    return config, processor


def internvl() -> tuple[PreTrainedConfig, Any]:
    vision = VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [14, 14]}
    config = _config("InternVL", {"model_type": "qwen2"}, vision, image_seq_length=1)
    if not HAS_TORCHVISION:
        return config, transformers.LlavaProcessor(_clip(), _with_image_token(), patch_size=28)
    ends = {
        "start_image_token": "<global-img>",
        "end_image_token": "<end_of_utterance>",
        "video_token": "<row_6_col_6>",
    }
    images = transformers.GotOcr2ImageProcessor(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4)
    made = _with_image_token(context_image_token="<image>", **ends)
    return config, transformers.InternVLProcessor(images, made, transformers.InternVLVideoProcessor(), 1)


def mistral3() -> tuple[PreTrainedConfig, Any]:
    vision = VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 84}
    config = _config("Mistral3", {"model_type": "mistral", "head_dim": 16, "sliding_window": None}, vision)
    return config, _pixtral(28)


def pixtral() -> tuple[PreTrainedConfig, Any]:
    vision = VISION | {"model_type": "pixtral", "head_dim": 8, "image_size": 84}
    text = {"model_type": "mistral", "head_dim": 16, "sliding_window": None}
    strategy = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1}
    return _config("Llava", text, vision, **strategy), _pixtral(14)


def _pixtral(patch: int) -> Any:
    """Its own has a token behind each line of an image; what stands in for it takes images of one shape."""
    images = transformers.PixtralImageProcessorPil(
        size={"longest_edge": 84}, patch_size={"height": patch, "width": patch}, do_convert_rgb=True
    )
    if not HAS_TORCHVISION:
        return transformers.LlavaProcessor(images, _with_image_token(), patch_size=patch)
    tokens = {
        "image_token": "<image>",
        "image_break_token": "<global-img>",
        "image_end_token": "<end_of_utterance>",
    }
    sizes: dict[str, Any] = {"patch_size": 14, "spatial_merge_size": patch // 14}
    return transformers.PixtralProcessor(images, _with_image_token(), **(sizes | tokens))


def idefics3() -> tuple[PreTrainedConfig, Any]:
    vision = VISION | {"model_type": "idefics3_vision"}
    config = _config("Idefics3", {"model_type": "llama"}, vision, scale_factor=2)
    images = transformers.Idefics3ImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    return config, transformers.Idefics3Processor(images, _with_image_token(), image_seq_len=1)


def smolvlm() -> tuple[PreTrainedConfig, Any]:
    vision = VISION | {"model_type": "smolvlm_vision"}
    config = _config("SmolVLM", {"model_type": "llama"}, vision, scale_factor=2)
    images = transformers.SmolVLMImageProcessorPil(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    if not HAS_TORCHVISION:
        return config, transformers.Idefics3Processor(images, _with_image_token(), image_seq_len=1)
    videos = transformers.SmolVLMVideoProcessor()
    return config, transformers.SmolVLMProcessor(images, _with_image_token(), videos, image_seq_len=1)


def llava_onevision() -> tuple[PreTrainedConfig, Any]:
    """Of images that are cut into tiles where a row has one alone, as no other processor does it."""
    grids = [[28, 56], [56, 28], [56, 56]]
    vision, text = VISION | {"model_type": "siglip_vision_model"}, {"model_type": "qwen2"}
    how = {"vision_feature_select_strategy": "full", "vision_feature_layer": -1, "image_grid_pinpoints": grids}
    config = _config("LlavaOnevision", text, vision, video_token_id=300, **how)
    images = transformers.LlavaOnevisionImageProcessorPil(size=SQUARE, image_grid_pinpoints=grids)
    how = {"vision_feature_select_strategy": "full"}
    videos = transformers.LlavaOnevisionVideoProcessor(size=SQUARE)
    return config, transformers.LlavaOnevisionProcessor(images, _with_image_token(), videos, 4, **how)


def qwen2_5_vl() -> tuple[PreTrainedConfig, Any]:
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 10000.0}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": 0.2,
    }
    config = _config("Qwen2_5_VL", {"rope_parameters": rope}, vision, video_token_id=300, vision_start_token_id=301)
    return config, _qwen("Qwen2_5_VL", "Qwen2VL")


def _qwen(kind: str, of_videos: str) -> Any:
    images = transformers.Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=28 * 28 * 9)
    if not HAS_TORCHVISION:
        return transformers.PaddleOCRVLProcessor(images, _with_image_token())
    more = {
        "video_token": "<row_6_col_6>",
        "vision_start_token": "<global-img>",
        "vision_end_token": "<end_of_utterance>",
    }
    videos = getattr(transformers, f"{of_videos}VideoProcessor")()
    return getattr(transformers, f"{kind}Processor")(images, _with_image_token(**more), videos)


def qwen3_5() -> tuple[PreTrainedConfig, Any]:
    """Of layers that go through a document token by token, so that rows are padded; positions have three dimensions."""
    text = {
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "default",
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
            "partial_rotary_factor": 0.5,
            "rope_theta": 10000.0,
        },
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.2,
    }
    config = _config("Qwen3_5", text, vision, video_token_id=300, vision_start_token_id=301, vision_end_token_id=302)
    return config, _qwen("Qwen3VL", "Qwen3VL")


def qwen3_vl() -> tuple[PreTrainedConfig, Any]:
    """Of features that are added behind blocks as well, more of them than the first stage of a pipeline has."""
    rope = {"rope_type": "default", "mrope_section": [4, 2, 2], "mrope_interleaved": True, "rope_theta": 10000.0}
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_heads": 4,
        "out_hidden_size": 64,
        "patch_size": 14,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": 0.2,
    }
    text = {"head_dim": 16, "rope_parameters": rope}
    config = _config("Qwen3VL", text, vision, video_token_id=300, vision_start_token_id=301, vision_end_token_id=302)
    return config, _qwen("Qwen3VL", "Qwen3VL")


def qwen3_vl_moe() -> tuple[PreTrainedConfig, Any]:
    config, processor = qwen3_vl()
    text, vision = config.text_config.to_dict(), config.vision_config.to_dict()
    text |= {"model_type": "qwen3_vl_moe_text", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    text |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    vision |= {"model_type": "qwen3_vl_moe_vision"}
    more = {"video_token_id": 300, "vision_start_token_id": 301, "vision_end_token_id": 302}
    return _config("Qwen3VLMoe", text, vision, **more), processor


def gemma3() -> tuple[PreTrainedConfig, Any]:
    """Of tokens that see those after them in their image, also farther than a window is wide."""
    text = {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = VISION | {"model_type": "siglip_vision_model", "image_size": 56}
    config = _config("Gemma3", text, vision, mm_tokens_per_image=16)
    size = {"height": 56, "width": 56}
    images = transformers.Gemma3ImageProcessorPil(size=size, do_pan_and_scan=False)
    made = _with_image_token(boi_token="<global-img>", eoi_token="<end_of_utterance>")
    return config, transformers.Gemma3Processor(images, made, image_seq_length=16)


def gemma4(**more: Any) -> tuple[PreTrainedConfig, Any]:
    """Of tokens that see those after them in their image in layers with a window alone. What stands in for its own
    processor takes images of one shape."""
    text = {
        "head_dim": 16,
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "sliding_window": 6,
        "use_bidirectional_attention": "vision",
        "layer_types": ["sliding_attention", "full_attention"],
        **more,
    }
    vision = {
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 64,
        "initializer_range": 0.2,
    }
    config = _config("Gemma4", text, vision, vision_soft_tokens_per_image=70, audio_config=None)
    images = transformers.Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    if not HAS_TORCHVISION:
        return config, transformers.DeepseekVLProcessor(images, _with_image_token(), num_image_tokens=63)
    ends = {"boi_token": "<global-img>", "eoi_token": "<end_of_utterance>"}
    sounds = {"audio_token": "<row_6_col_6>", "boa_token": "<row_6_col_5>", "eoa_token": "<row_6_col_4>"}
    videos, hears = transformers.Gemma4VideoProcessor(), transformers.Gemma4AudioFeatureExtractor()
    return config, transformers.Gemma4Processor(hears, images, _with_image_token(**ends, **sounds), videos)


def gemma4_small() -> tuple[PreTrainedConfig, Any]:
    """Of blocks that have embeddings of their own, and tokens that look at none after them."""
    more = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 304, "use_bidirectional_attention": None}
    return gemma4(**more)


MADE = (
    *(
        llava,
        tied,
        llava_next,
        *((llava_onevision,) if HAS_TORCHVISION else ()),
        pixtral,
        mistral3,
        internvl,
        idefics3,
        smolvlm,
    ),
    *(qwen2_5_vl, qwen3_5, qwen3_vl, qwen3_vl_moe, gemma3, gemma4, gemma4_small),
)


def paligemma() -> tuple[PreTrainedConfig, Any]:
    """Of prompts whose tokens all see each other."""
    text = {"model_type": "gemma", "head_dim": 16}
    config = _config("PaliGemma", text, VISION | {"model_type": "siglip_vision_model"}, projection_dim=64)
    return config, transformers.DeepseekVLProcessor(_clip(), _with_image_token(), num_image_tokens=4)


OF_ONE_SHAPE = () if HAS_TORCHVISION else ("pixtral", "mistral3", "gemma4", "gemma4_small")
"""Those whose images here have all the same."""
FAMILIES: dict[str, Callable[[], tuple[PreTrainedConfig, Any]]] = {make.__name__: make for make in MADE}
"""Models in which an image is its features, in the places of its tokens."""


def _with_image_token(**more: str) -> PreTrainedTokenizerFast:
    made = tokenizer()
    names: dict[str, Any] = {"image_token": "<image>", **more}
    made.init_kwargs["extra_special_tokens"] = names
    made._set_model_specific_special_tokens(names)
    return made


def write_vision(
    directory: Path, family: str, *, template: str = TEMPLATE, seed: int = 0, make: Callable[[], Any] | None = None
) -> Path:
    """A randomly initialised model directory with tokenizer and processor."""
    config, processor = (make or FAMILIES[family])()
    torch.manual_seed(seed)
    assert config.architectures
    model = getattr(transformers, config.architectures[0])(config)
    model.save_pretrained(directory)
    template = template.replace("'<image>'", f"'{processor.image_token}'")
    processor.tokenizer.chat_template = template
    processor.chat_template = template
    processor.save_pretrained(directory)
    processor.tokenizer.save_pretrained(directory)
    return directory


def draw_image(seed: int, size: tuple[int, int] = (40, 30), kind: str = "PNG") -> bytes:
    """The bytes of an image of coloured blocks."""
    from PIL import Image, ImageDraw

    chance = random.Random(seed)
    image = Image.new("RGB", size, tuple(chance.choices(range(256), k=3)))
    pen = ImageDraw.Draw(image)
    for _ in range(6):
        x, y = chance.randrange(size[0]), chance.randrange(size[1])
        pen.rectangle(
            (x, y, x + chance.randrange(4, 20), y + chance.randrange(4, 20)), tuple(chance.choices(range(256), k=3))
        )
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


__all__ = [
    "END",
    "FAMILIES",
    "IMAGE_ID",
    "LISTS_ONLY",
    "OF_ONE_SHAPE",
    "TEMPLATE",
    "draw_image",
    "paligemma",
    "tokenizer",
    "write_vision",
]
