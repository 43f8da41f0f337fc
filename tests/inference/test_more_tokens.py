"""Tokenizers that have a token more than their model has embeddings of."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from tonnage.errors import UserError
from tonnage.inference.generate import Decoding, Loaded, generate, load, stream

TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
MORE = "<image_soft_token>"


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    directory = write_model(tmp_path_factory.mktemp("more"))
    return load(directory)


def write_model(directory: Path) -> Path:
    """A model whose tokenizer has one token more, with which it pads."""
    tiny.write_model(directory, tiny.llama_config(num_hidden_layers=1, initializer_range=0.2))
    tokenizer = tiny.byte_tokenizer()
    tokenizer.add_special_tokens({"pad_token": MORE})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


def test_other_prompts_are_answered(loaded: Loaded) -> None:
    assert loaded.tokenizer.pad_token_id == loaded.model.get_input_embeddings().weight.shape[0]
    chats = [[{"role": "user", "content": text}] for text in ("Say a", "Say something longer than that")]
    alone = [generate(loaded, [chat], Decoding(8))[0] for chat in chats]
    assert generate(loaded, chats, Decoding(8)) == alone
    assert "".join(stream(loaded, chats[0], Decoding(8))) == alone[0]


def test_a_prompt_with_that_token_is_refused(loaded: Loaded) -> None:
    chat = [{"role": "user", "content": f"Say {MORE}"}]
    refusal = rf"{MORE} in a conversation, and the model has no embeddings beyond \d+"
    with pytest.raises(UserError, match=refusal):
        generate(loaded, [chat])
    with pytest.raises(UserError, match=refusal):
        list(stream(loaded, chat))


def test_a_template_that_adds_tokens_is_refused_as_ever(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'chatml' adds <\|im_start\|>"):
        load(write_model(tmp_path), template="chatml")
