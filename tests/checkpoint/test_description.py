"""An export's small files say what the model's own said, in words that transformers 4.57 and 5 both read.

That 4.57 does is measured by ``scripts/check_transformers_4.py`` in an environment of its own; here, that nothing is
lost on the way and that the words are those of before 5.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    Gemma3TextConfig,
    GenerationConfig,
    GlmConfig,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
)

from tiny import END, byte_tokenizer, llama_config
from tonnage.checkpoint.description import (
    ExportForm,
    _write_tokenizer_config,
    add_stop_tokens,
    describe,
    older_names,
    repair,
)
from tonnage.checkpoint.verify import CHECKSUMS, verify
from tonnage.errors import UserError
from tonnage.files.writing import write_json
from tonnage.model.build import on_meta
from tonnage.model.scorer import make_scorer

SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 257,
}
YARN = {"rope_type": "yarn", "rope_theta": 4321.0, "factor": 4.0, "original_max_position_embeddings": 128}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 4321.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
    "original_max_position_embeddings": 128,
}
TWO = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 99.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 4321.0, "factor": 8.0},
}
PART = {"rope_type": "default", "rope_theta": 4321.0, "partial_rotary_factor": 0.5}
ONE = {"sliding_attention": TWO["sliding_attention"] | {"rope_theta": 4321.0}, "full_attention": YARN}
CONFIGS: dict[str, tuple[PreTrainedConfig, dict[str, Any]]] = {
    "plain": (LlamaConfig(**SHAPE, rope_parameters={"rope_type": "default", "rope_theta": 4321.0}), {}),
    "yarn": (LlamaConfig(**SHAPE, rope_parameters=YARN), {"rope_scaling": YARN}),
    "a part": (GlmConfig(**SHAPE, head_dim=16, rope_parameters=PART), {"partial_rotary_factor": 0.5}),
    "neox": (GPTNeoXConfig(**SHAPE, rope_parameters=PART), {"rotary_pct": 0.5, "rotary_emb_base": 4321.0}),
    "phi3, long": (
        Phi3Config(**SHAPE, rope_parameters=LONG, original_max_position_embeddings=128),
        {"rope_scaling": {name: LONG[name] for name in ("short_factor", "long_factor")} | {"type": "longrope"}},
    ),
    "gemma3": (Gemma3TextConfig(**SHAPE, head_dim=16, rope_parameters=TWO), {"rope_local_base_freq": 99.0}),
    "olmo3": (Olmo3Config(**SHAPE, rope_parameters=ONE), {"rope_scaling": YARN}),
}


def described(
    folder: Path,
    config: PreTrainedConfig,
    own: dict[str, Any] | str | None = None,
    stop_tokens: Sequence[int] = (256,),
    tokenizer: Path | None = None,
) -> tuple[Path, list[str]]:
    """The small files of an export of a model with its ``own`` generation configuration, and what was said of them."""
    origin = folder / "origin"
    origin.mkdir()
    if own is not None:
        text = own if isinstance(own, str) else json.dumps(own)
        (origin / "generation_config.json").write_text(text)
    if tokenizer is None:
        tokenizer = folder / "tokenizer"
        byte_tokenizer().save_pretrained(tokenizer)
    (folder / "out").mkdir()
    model = on_meta(copy.deepcopy(config), torch.bfloat16)
    notes = describe(folder / "out", model, ExportForm(config, tokenizer, stop_tokens, torch.bfloat16), origin)
    return folder / "out", notes


@pytest.mark.parametrize("which", CONFIGS)
def test_rope_is_said_in_the_words_of_before_5_and_nothing_is_lost(which: str, tmp_path: Path) -> None:
    config, words = CONFIGS[which]
    out, _ = described(tmp_path, copy.deepcopy(config))
    written = json.loads((out / "config.json").read_text())
    assert written["rope_theta"] == 4321.0
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    for name, value in words.items():
        said = {key: written[name][key] for key in value if key != "rope_theta"} if isinstance(value, dict) else None
        expected = {key: item for key, item in value.items() if key != "rope_theta"} if said is not None else value
        assert (written[name] if said is None else said) == expected, name
    again = AutoConfig.from_pretrained(out)
    assert without_type(again.rope_parameters) == config.rope_parameters
    if which != "olmo3":  # of whose files from before 5 transformers 5 reads the base of one kind of layers alone
        old = {name: value for name, value in written.items() if name != "rope_parameters"}
        assert without_type(type(config).from_dict(old).rope_parameters) == config.rope_parameters
    lost = {"architectures", "dtype", "torch_dtype", "use_cache", "transformers_version", "rope_parameters"}
    lost |= {"_name_or_path"}
    before, after = config.to_dict(), again.to_dict()
    assert {name for name in before if before[name] != after.get(name)} <= lost


def without_type(rope: dict[str, Any]) -> dict[str, Any]:
    """Phi 3 wants ``type`` beside ``rope_type``, which is the same."""
    return {name: value for name, value in rope.items() if name != "type"}


def test_rope_that_has_no_words_of_before_5_is_said_in_those_of_5_alone(tmp_path: Path) -> None:
    config = Phi3Config(**SHAPE, rope_parameters=LONG | {"attention_factor": 1.5}, original_max_position_embeddings=128)
    out, notes = described(tmp_path, copy.deepcopy(config))
    assert AutoConfig.from_pretrained(out).rope_parameters == config.rope_parameters
    assert "rope_scaling" not in json.loads((out / "config.json").read_text())
    assert "transformers 4" in notes[0]


def test_a_config_without_rope_is_left_alone() -> None:
    assert older_names(PreTrainedConfig(), {"dtype": "float32"}) == {"torch_dtype": "float32"}
    assert older_names(PreTrainedConfig(), {"rope_parameters": None}) == {}


OWN = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.05, "bos_token_id": 256}


def test_the_models_own_decoding_is_kept_and_our_stop_tokens_added(tmp_path: Path) -> None:
    out, notes = described(tmp_path, llama_config(), OWN | {"eos_token_id": [256, 9]}, stop_tokens=[256, 5])
    assert json.loads((out / "generation_config.json").read_text()) == OWN | {"eos_token_id": [256, 9, 5]}
    assert notes == ["eos_token_id of generation_config.json: 5 added, which ends a turn"]
    assert AutoConfig.from_pretrained(out).eos_token_id == [256, 5]
    assert GenerationConfig.from_pretrained(out).temperature == 0.6


@pytest.mark.parametrize("broken", ["<|end|>", [], 9999, [256, -1]])
def test_an_end_of_text_that_is_no_token_is_not_replaced_without_a_word(tmp_path: Path, broken: Any) -> None:
    out, notes = described(tmp_path, llama_config(), OWN | {"eos_token_id": broken}, stop_tokens=[5])
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [256, 5]
    assert [str(broken) in note and "which is not token ids" in note for note in notes] == [True]


@pytest.mark.parametrize(
    ("own", "config", "stops", "expected", "in_config"),
    [
        (7, 256, [256], [7, 256], 256),
        ([7], [8, 9], [], 7, [8, 9]),
        (None, 256, [5], [256, 5], [256, 5]),
        (None, None, [5, 5], 5, 5),
        (None, None, [], None, None),
        ("eos", True, [5], 5, 5),
    ],
)
def test_stop_tokens_join_those_that_are_there(
    own: Any, config: Any, stops: list[int], expected: Any, in_config: Any
) -> None:
    generation, model = {} if own is None else {"eos_token_id": own}, PreTrainedConfig()
    model.eos_token_id = config
    add_stop_tokens(generation, model, stops)
    assert generation.get("eos_token_id") == expected
    assert model.eos_token_id == in_config


@pytest.mark.parametrize(
    ("own", "repaired"),
    [
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.6, "top_p": 0.9, "do_sample": True}),
        ({"top_k": 3}, {"top_k": 3, "do_sample": True}),
        ({"temperature": 0.6, "do_sample": False, "max_length": 9}, {"do_sample": False, "max_length": 9}),
        ({"temperature": 0.0, "top_p": 0.9, "top_k": 1}, {}),
        ({"early_stopping": "perhaps", "top_p": 1.0}, {"top_p": 1.0}),
        ({"num_return_sequences": 3, "length_penalty": 2.0}, {}),
        ({"max_new_tokens": -1, "pad_token_id": 5}, {"pad_token_id": 5}),
        ({"temperature": [], "do_sample": "x"}, None),
        ({"cache_implementation": "of mine"}, {}),
        ({"streamer": 5, "top_p": 1.0}, {"top_p": 1.0}),
        ({"watermarking_config": 5, "eos_token_id": 3}, {"eos_token_id": 3}),
        ({"self": 1, "eos_token_id": 3}, {"eos_token_id": 3}),
        (OWN, OWN),
    ],
)
def test_what_transformers_refuses_to_save_is_repaired_and_said(
    own: dict[str, Any], repaired: dict[str, Any] | None, tmp_path: Path
) -> None:
    generation = copy.deepcopy(own)
    notes = repair(generation)
    assert repaired is None or generation == repaired
    assert bool(notes) == (generation != own)
    GenerationConfig(**generation).save_pretrained(tmp_path)


def test_decoding_is_repaired_in_an_export(tmp_path: Path) -> None:
    out, notes = described(tmp_path, llama_config(), {"temperature": 0.6})
    assert notes == ["generation_config.json: do_sample is true now, for the sake of temperature"]
    assert json.loads((out / "generation_config.json").read_text())["do_sample"] is True


def test_decoding_that_cannot_be_read_is_made_anew_and_said(tmp_path: Path) -> None:
    out, notes = described(tmp_path, llama_config(), "[" * 100_000)
    assert "cannot be read" in notes[0]
    assert GenerationConfig.from_pretrained(out).eos_token_id == 256


def test_decoding_in_config_json_moves_to_its_own_file(tmp_path: Path) -> None:
    config = llama_config()
    config.temperature, config.do_sample = 0.5, True
    out, notes = described(tmp_path, config)
    assert "now in generation_config.json" in notes[0]
    assert GenerationConfig.from_pretrained(out).temperature == 0.5
    assert "temperature" not in json.loads((out / "config.json").read_text())


def test_an_export_does_not_say_that_it_is_quantised(tmp_path: Path) -> None:
    config = llama_config()
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    out, _ = described(tmp_path, config)
    assert "quantization_config" not in json.loads((out / "config.json").read_text())


def test_a_tokenizer_is_said_in_words_that_both_versions_know(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|user|>", "<|tool|>"]})
    tokenizer.chat_template = {"default": "one {{ messages }}", "tool_use": "two {{ messages }}"}
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    out, _ = described(tmp_path, llama_config(), tokenizer=tmp_path / "tokenizer")
    written = json.loads((out / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<|user|>", "<|tool|>"]
    assert written["model_input_names"] == ["input_ids", "attention_mask"]
    assert not {"extra_special_tokens", "backend", "is_local", "local_files_only"} & written.keys()
    again = AutoTokenizer.from_pretrained(out)
    text = f"a<|user|>b{END}"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again.chat_template == tokenizer.chat_template
    assert (out / "additional_chat_templates" / "tool_use.jinja").read_text() == "two {{ messages }}"


@pytest.mark.parametrize(
    ("tokens", "padding"),
    [
        ({}, "<|pad|>"),
        ({"pad_token": END, "unk_token": "<|pad|>"}, "<|pad|>"),
        ({"pad_token": END}, None),
    ],
    ids=["its own", "another", "none"],
)
def test_a_scorer_pads_with_what_ends_no_answer(tmp_path: Path, tokens: dict[str, Any], padding: str | None) -> None:
    """transformers scores the last token that is not padding."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(tokens)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    config = llama_config(pad_token_id=256)
    make_scorer(config)
    model = on_meta(config, torch.float32)
    (out := tmp_path / "out").mkdir()
    notes = describe(out, model, ExportForm(config, tmp_path / "tokenizer", [256], torch.float32), tmp_path / "origin")
    written = AutoConfig.from_pretrained(out)
    assert written.pad_token_id == (None if padding is None else 257)
    assert written.num_labels == 1
    assert padding is None or AutoTokenizer.from_pretrained(out).pad_token == padding
    assert any("one at a time" in note for note in notes) == (padding is None)
    assert not (out / "generation_config.json").exists()


def test_a_tokenizer_without_tokenizer_json_keeps_its_class(tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "MineTokenizer"}))
    (folder / "tokenizer.model").write_bytes(b"x")
    out, _ = described(tmp_path, llama_config(), tokenizer=folder)
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "MineTokenizer"
    assert (out / "tokenizer.model").read_bytes() == b"x"


def test_directories_of_an_export_are_verified_too(tmp_path: Path) -> None:
    templates = tmp_path / "additional_chat_templates"
    templates.mkdir()
    file = templates / "tool_use.jinja"
    file.write_text("two")
    from tonnage.checkpoint.shards import hash_file

    listed = {"additional_chat_templates/tool_use.jinja": {"sha256": hash_file(file, "sha256"), "bytes": 3}}
    write_json(tmp_path / CHECKSUMS, {"files": listed})
    assert verify(tmp_path) == []
    (tmp_path / ".cache" / "deep").mkdir(parents=True)
    (templates / ".DS_Store").write_bytes(b"of a file manager")
    assert verify(tmp_path) == []
    (templates / "more.jinja").write_text("x")
    (tmp_path / "other").mkdir()
    assert [os.path.relpath(problem.where, tmp_path) for problem in verify(tmp_path)] == [
        "additional_chat_templates/more.jinja",
        "other",
    ]
    file.write_text("one")
    assert any("content that has changed" in problem.found for problem in verify(tmp_path))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_a_run_s_tokenizer_that_was_damaged_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"tokenizer_config\.json"):
        _write_tokenizer_config(tmp_path)
