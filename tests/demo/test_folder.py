"""The demo's folder: the ordinary readers accept all of it, and its tokenizer takes any text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tonnage.config import Data, Source, read_config
from tonnage.data import encode_prompt, prepare, stop_tokens
from tonnage.demo.folder import Folder, free_folder, write_folder
from tonnage.demo.model import END, build_tokenizer
from tonnage.demo.tasks import THINGS, WORDS, held_out_examples

TOKENIZER = build_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return write_folder(tmp_path_factory.mktemp("runs") / "demo")


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_the_tokenizer(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids) == text
    assert max(ids, default=0) < len(TOKENIZER)


def test_quoted_words_are_spelt_and_phrases_are_not() -> None:
    for word in WORDS:
        if word not in THINGS:
            assert TOKENIZER.tokenize(f'Reverse the word "{word}"')[5:-1] == list(word)
    assert len(TOKENIZER.tokenize("What day comes next?")) == 5


def test_the_tokenizer_survives_saving(folder: Folder) -> None:
    loaded = AutoTokenizer.from_pretrained(folder.model)
    for example in held_out_examples(5, 0):
        chat = [{"role": "user", "content": example.instruction}]
        assert loaded(example.instruction)["input_ids"] == TOKENIZER(example.instruction)["input_ids"]
        assert encode_prompt(chat, loaded) == encode_prompt(chat, TOKENIZER)
    assert stop_tokens(loaded) == (TOKENIZER.convert_tokens_to_ids(END),)


def test_supervised_tokens_are_the_answer_and_its_end(folder: Folder, tmp_path: Path) -> None:
    """The data room's mask, the template's own marks, and the rows agree."""
    options = Data(train=(Source(path=str(folder.held_out)),), max_length=256)
    prepared = prepare(options, AutoTokenizer.from_pretrained(folder.model), cache=tmp_path)
    rows = [json.loads(line) for line in folder.held_out.read_text().splitlines()]
    seen = 0
    for index in range(prepared.train.num_packs):
        pack = prepared.train.pack(index)
        borders = np.cumsum([0, *pack.lengths])
        for start, stop, document in zip(borders[:-1], borders[1:], pack.documents, strict=True):
            row = rows[prepared.train.where(int(document))[1] - 1]
            ids, weights = pack.input_ids[start:stop], pack.weights[start:stop]
            assert TOKENIZER.decode(ids[weights > 0]) == row["output"] + END
            marked: Any = TOKENIZER.apply_chat_template(
                [{"role": "user", "content": row["instruction"]}, {"role": "assistant", "content": row["output"]}],
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            assert marked["input_ids"] == ids.tolist()
            assert marked["assistant_masks"] == (weights > 0).astype(int).tolist()
            seen += 1
    assert seen == len(rows)


def test_the_config_is_read_and_names_this_folder(folder: Folder) -> None:
    config = read_config(str(folder.config), [])
    assert config.model == str(folder.model)
    assert config.init == "random"
    assert [source.path for source in config.data.train] == [str(folder.train)]
    assert config.output == str(folder.run)
    model_config = AutoConfig.from_pretrained(folder.model)
    assert config.data.max_length <= model_config.max_position_embeddings
    assert model_config.vocab_size == len(TOKENIZER)
    model = AutoModelForCausalLM.from_config(model_config)
    assert sum(parameter.numel() for parameter in model.parameters()) < 1e6
    assert not list(folder.model.glob("*.safetensors"))


def test_no_folder_is_written_twice(tmp_path: Path) -> None:
    assert free_folder(tmp_path) == tmp_path / "demo-1"
    (tmp_path / "demo-1").mkdir()
    (tmp_path / "demo-2").write_text("")
    assert free_folder(tmp_path) == tmp_path / "demo-3"
    with pytest.raises(FileExistsError):
        write_folder(tmp_path / "demo-1")


def test_equal_seeds_give_equal_folders(folder: Folder, tmp_path: Path) -> None:
    again = write_folder(tmp_path / "again")
    assert again.train.read_bytes() == folder.train.read_bytes()
    assert again.held_out.read_bytes() == folder.held_out.read_bytes()
