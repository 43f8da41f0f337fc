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
from safetensors.torch import load_file, save_file

from tonnage.config import Source
from tonnage.errors import UserError
from tonnage.inference.generate import TALK, Decoding, Loaded, encode, generate, load, stream
from tonnage.inference.questions import read_questions
from tonnage.inference.sight import check_images

pytest.importorskip("PIL")
from PIL import Image as Pillow

from visions import FAMILIES, IMAGE_ID, LISTS_ONLY, TEMPLATE, draw_image, gemma3, write_vision

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


def whole_model(directory: Path, dtype: torch.dtype = torch.float32) -> Any:
    return transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=dtype).eval()


def in_transformers(directory: Path, conversation: Sequence[dict[str, Any]], model: Any = None) -> list[int]:
    """Tokens that its own ``generate`` writes of what its own processor makes."""
    processor = transformers.AutoProcessor.from_pretrained(directory)
    model = whole_model(directory) if model is None else model
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
    unknown = ("token_type_ids", "num_soft_tokens_per_image")
    inputs = {name: value for name, value in inputs.items() if name in names or name not in unknown}
    for kind in ("token_type_ids", "mm_token_type_ids"):
        if kind in inputs:  # which its own processor would set, and LLaVA's leaves at 0
            inputs[kind] = (inputs["input_ids"] == IMAGE_ID).long()
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    written = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False, eos_token_id=[256], pad_token_id=257)
    tokens: list[int] = written[0, inputs["input_ids"].shape[1] :].tolist()
    return tokens


def text_of(loaded: Loaded, tokens: Sequence[int]) -> str:
    end = next((at for at, token in enumerate(tokens) if token in loaded.stop_tokens), len(tokens))
    return str(loaded.tokenizer.decode(list(tokens[:end]), skip_special_tokens=True))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in QUICK else pytest.mark.matrix)
        for name in FAMILIES
        if not name.startswith("gemma")
    ],  # Gemma 3 has a test of its own; what stands in for Gemma 4's processor takes images of one size alone
)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = LISTS_ONLY if request.param == "llava" else TEMPLATE
    return write_vision(tmp_path_factory.mktemp("models") / request.param, request.param, template=template)


def test_answers_are_those_of_transformers_alone_and_side_by_side(directory: Path) -> None:
    loaded = load(directory, **TALK)
    # The processor of these here counts tokens of the largest.
    size = SIZES[0] if directory.name in ("mistral3", "pixtral") else SIZES[1]
    conversations = [
        asked(1, draw_image(1)),
        asked(2, draw_image(2, size)),
        asked(1, draw_image(3)),
        [{"role": "user", "content": "No image at all"}],
        asked(3, draw_image(4), draw_image(5)),
        [*asked(1, draw_image(6)), {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Why?"}],
    ]
    model = whole_model(directory)
    tokens = [in_transformers(directory, conversation, model) for conversation in conversations]
    assert tokens[0] != tokens[2], "the image makes the difference"
    expected = [text_of(loaded, written) for written in tokens]
    assert generate(loaded, conversations, Decoding(TOKENS), batch_size=1) == expected
    assert "".join(stream(loaded, conversations[0], Decoding(TOKENS))) == expected[0]
    assert generate(loaded, conversations, Decoding(TOKENS), batch_size=4) == expected


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("model") / "llava", "llava", template=LISTS_ONLY)


def test_the_model_of_text_is_there_once(llava: Path) -> None:
    loaded = load(llava, **TALK)
    assert loaded.sight is not None
    assert "tower" not in vars(loaded.sight), "it is loaded when it is needed"
    generate(loaded, [asked(1, draw_image(1))], Decoding(1))
    shared = {parameter.data_ptr() for parameter in loaded.model.parameters()}
    towers = [name for name, one in loaded.sight.tower.model.named_parameters() if one.data_ptr() not in shared]
    assert towers
    assert all("vision_tower" in name or "projector" in name for name in towers)


@pytest.mark.parametrize("family", ["llava", pytest.param("qwen2_5_vl", marks=pytest.mark.slow)])
def test_an_adapter_answers_as_with_peft(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    directory = write_vision(tmp_path / "model", family)
    torch.manual_seed(3)
    targets = r".*language_model\..*_proj"
    adapted = get_peft_model(whole_model(directory), LoraConfig(r=4, lora_alpha=64, target_modules=targets))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    of_text = {name.replace(".language_model", ""): value for name, value in weights.items()}  # as runs write it
    save_file(of_text, tmp_path / "adapter" / "adapter_model.safetensors")
    conversation = asked(1, draw_image(1))
    plain = in_transformers(directory, conversation)
    expected = in_transformers(directory, conversation, adapted.merge_and_unload())
    assert plain != expected
    loaded = load(tmp_path / "adapter", **TALK)
    assert generate(loaded, [conversation], Decoding(TOKENS)) == [text_of(loaded, expected)]


def test_half_precision_is_that_of_the_files(tmp_path: Path) -> None:
    directory = write_vision(tmp_path / "model", "llava")
    whole_model(directory, torch.bfloat16).save_pretrained(directory)
    loaded = load(directory, **TALK)
    conversation = asked(1, draw_image(1))
    (answer,) = generate(loaded, [conversation], Decoding(TOKENS))
    assert loaded.sight is not None
    assert loaded.sight.tower.dtype == torch.bfloat16
    assert answer == text_of(loaded, in_transformers(directory, conversation, whole_model(directory, torch.bfloat16)))


def test_settings_of_the_model_hold_for_its_answers(tmp_path: Path) -> None:
    directory = write_vision(tmp_path / "model", "llava")
    conversation = asked(1, draw_image(1))
    plain = in_transformers(directory, conversation)
    settings = json.loads((directory / "generation_config.json").read_text())
    (directory / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 3.0}))
    expected = in_transformers(directory, conversation)
    assert plain != expected
    loaded = load(directory, **TALK)
    assert generate(loaded, [conversation], Decoding(TOKENS)) == [text_of(loaded, expected)]


def test_tokens_that_look_ahead_are_answered_by_the_whole_model(tmp_path: Path) -> None:
    """A family on whose images nobody can train here yet."""
    directory = write_vision(tmp_path / "model", "gemma3", make=gemma3)
    loaded = load(directory, **TALK)
    conversation = asked(1, draw_image(1))
    expected = in_transformers(directory, conversation)
    assert generate(loaded, [conversation], Decoding(TOKENS)) == [text_of(loaded, expected)]


def test_control_tokens_in_words_are_words_beside_an_image(llava: Path) -> None:
    loaded = load(llava, **TALK)
    messages = asked(1, draw_image(1))
    messages[0]["content"].append({"type": "text", "text": "<|bot|>"})
    ids = encode(loaded, messages).ids
    assert ids.count(260) == 1, "the opening's"
    assert loaded.tokenizer.convert_ids_to_tokens(260) == "<|bot|>"
    assert loaded.tokenizer.decode(ids).count("<|bot|>") == 2


def test_rows_of_a_file_have_images_in_every_form_and_paths_stay_in_their_folder(llava: Path, tmp_path: Path) -> None:
    content = draw_image(1)
    (tmp_path / "cat.png").write_bytes(content)
    (tmp_path.parent / "outside.png").write_bytes(content)
    part = {"type": "image", "path": "cat.png"}
    rows: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": [part, {"type": "text", "text": "What?"}]}]},
        {
            "messages": [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "A"}],
            "images": [uri(content)],
        },
        {"instruction": "<image>What?", "output": "A", "image": "cat.png"},
        {"messages": [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "A"}]},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = read_questions([Source(path=str(file))], images=True)
    assert [len(question.conversation.images) for question in questions] == [1, 1, 1, 0]
    loaded = load(llava, **TALK)
    first, *others = [encode(loaded, question.conversation).ids for question in questions[:3]]
    assert all(ids == first for ids in others)
    file.write_text(json.dumps(rows[0]).replace("cat.png", "../outside.png"))
    with pytest.raises(UserError, match="leads out of"):
        read_questions([Source(path=str(file))], images=True)
    file.write_text(json.dumps(rows[0]).replace("cat.png", "outside.png"))
    (question,) = read_questions([Source(path=str(file), images=str(tmp_path.parent))], images=True)
    assert question.conversation.images[0].path == str(tmp_path.parent / "outside.png")


def test_images_that_cannot_be_used_are_refused_in_a_sentence(llava: Path) -> None:
    loaded = load(llava, **TALK)
    for content, reason in ((b"hello", "no image of a kind"), (draw_image(1)[:60], "damaged|no image")):
        with pytest.raises(UserError, match=reason):
            generate(loaded, [asked(1, content)], Decoding(1))
    part: dict[str, Any] = {"type": "image", "path": "nowhere.png"}
    with pytest.raises(UserError, match=r"nowhere\.png cannot be read"):
        generate(loaded, [[{"role": "user", "content": [part]}]], Decoding(1))
    part = {"type": "image_url", "image_url": {"url": "https://x.example/cat.png"}}
    with pytest.raises(UserError, match="an image on a network"):
        generate(loaded, [[{"role": "user", "content": [part]}]], Decoding(1))


def test_a_model_of_text_is_shown_none(tmp_path: Path) -> None:
    import tiny

    directory = tiny.write_model(tmp_path / "text", tiny.llama_config(num_hidden_layers=1))
    loaded = load(directory, template="alpaca")
    with pytest.raises(UserError, match="a conversation with images"):
        generate(loaded, [asked(1, draw_image(1))], Decoding(1))
    with pytest.raises(UserError, match="images, and a model that takes none"):
        check_images(directory, trusts=False)
