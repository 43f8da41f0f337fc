"""Answers about images are those of transformers' own model of text and images, token for token."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tonnage.config import Source
from tonnage.errors import UserError
from tonnage.inference.generate import TALK, Decoding, Loaded, encode, generate, load, stream
from tonnage.inference.questions import read_questions

pytest.importorskip("PIL")
from PIL import Image as Pillow

from visions import FAMILIES, LISTS_ONLY, TEMPLATE, draw_image, gemma3, write_vision

QUICK = ("llava", "qwen2_5_vl")
TOKENS = 12
SIZES = ((40, 30), (64, 33), (30, 50))


def uri(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()


def asked(number: int, *images: bytes) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for image in images:  # with words between them, as Qwen has tokens there
        parts += [{"type": "image_url", "image_url": {"url": uri(image)}}, {"type": "text", "text": "and "}]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": f"What is it, {'abc' * number}?"}]}]


def in_transformers(directory: Path, conversation: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens that its own ``generate`` writes of what its own processor makes."""
    processor = transformers.AutoProcessor.from_pretrained(directory)
    model = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    images = []
    for message in conversation:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image_url":
                content = base64.b64decode(part["image_url"]["url"].split(",")[1])
                images.append(Pillow.open(io.BytesIO(content)).convert("RGB"))
    plain = [
        {**message, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in parts]}
        for message in conversation
        if isinstance(parts := message["content"], list) or (parts := [{"type": "text", "text": parts}])
    ]
    text = processor.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
    inputs = processor(text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False)
    names = model.forward.__code__.co_varnames
    inputs = {name: value for name, value in inputs.items() if name in names or not name.startswith("token_type")}
    written = model.generate(
        **inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=[256], pad_token_id=257
    )
    tokens: list[int] = written[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def text_of(loaded: Loaded, tokens: Sequence[int]) -> str:
    end = next((at for at, token in enumerate(tokens) if token in loaded.stop_tokens), len(tokens))
    return str(loaded.tokenizer.decode(list(tokens[:end]), skip_special_tokens=True))


@pytest.fixture(scope="module", params=[
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAMILIES
])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = LISTS_ONLY if request.param == "llava" else TEMPLATE
    return write_vision(tmp_path_factory.mktemp("models") / request.param, request.param, template=template)


def test_answers_are_those_of_transformers_alone_and_side_by_side(directory: Path) -> None:
    loaded = load(directory, **TALK)
    size = SIZES[0] if directory.name == "mistral3" else SIZES[1]  # its processor here counts tokens of the largest
    conversations = [
        asked(1, draw_image(1)),
        asked(2, draw_image(2, size)),
        asked(1, draw_image(3)),
        [{"role": "user", "content": "No image at all"}],
        asked(3, draw_image(4), draw_image(5)),
        [*asked(1, draw_image(6)), {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}],
    ]
    tokens = [in_transformers(directory, conversation) for conversation in conversations]
    assert tokens[0] != tokens[2], "the image makes the difference"
    expected = [text_of(loaded, written) for written in tokens]
    assert generate(loaded, conversations, Decoding(TOKENS), batch_size=1) == expected
    assert "".join(stream(loaded, conversations[0], Decoding(TOKENS))) == expected[0]
    assert generate(loaded, conversations, Decoding(TOKENS), batch_size=4) == expected
