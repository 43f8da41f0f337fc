"""Patterns of what is trained: those of the last or the first blocks name what LLaMA-Factory's freeze does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiny import llama_config, neox_config
from tonnage.errors import UserError
from tonnage.model.adapters import Trains, prepare, trained_names
from tonnage.model.anatomy import dissect
from tonnage.model.build import on_meta


def frozen_but(names: list[str], blocks: range, parts: tuple[str, ...], extra: tuple[str, ...] = ()) -> set[str]:
    """Parameters that LLaMA-Factory leaves trained: those whose names hold one of these texts."""
    texts = [f".{block}.{part}" for block in blocks for part in parts] + list(extra)
    return {name for name in names if any(text in name for text in texts)}


@pytest.mark.parametrize("config", [llama_config(num_hidden_layers=12), neox_config(num_hidden_layers=12)])
@pytest.mark.parametrize(
    ("patterns", "blocks", "parts", "extra"),
    [
        (("blocks[-2:].*",), range(10, 12), ("",), ()),
        (("blocks[:1].*",), range(1), ("",), ()),
        (("blocks[-3:].mlp*", "*embed*"), range(9, 12), ("mlp",), ("embed",)),
        (("blocks[-99:].*",), range(12), ("",), ()),
    ],
)
def test_blocks_from_either_end(config: Any, patterns: Any, blocks: range, parts: Any, extra: Any) -> None:
    model = on_meta(config, torch.float32)
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    expected = frozen_but(names, blocks, parts, extra)
    assert expected
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trained = trained_names(model, dissect(model), Trains(patterns=patterns))
    assert {id(parameters[name]) for name in trained} == {id(parameters[name]) for name in expected}


@pytest.mark.parametrize("pattern", ["blocks[-2:].none*", "blocks[12:].*", "blocks[1:-2]"])
def test_blocks_that_hold_nothing_of_the_kind_are_refused(pattern: str) -> None:
    model = on_meta(llama_config(num_hidden_layers=2), torch.float32)
    with pytest.raises(UserError, match="no parameters"):
        trained_names(model, dissect(model), Trains(patterns=(pattern,)))


def test_a_module_is_told_how_its_parameters_are_named() -> None:
    model = on_meta(llama_config(num_hidden_layers=2), torch.float32)
    with pytest.raises(
        UserError, match=r"model\.embed_tokens\.weight, (.|\n)*model\.layers\.1 is model\.layers\.1\.\*"
    ):
        trained_names(model, dissect(model), Trains(patterns=("model.layers.1",)))


@pytest.mark.parametrize("pattern", ["lm_head.*", "*embed_tokens*"])
def test_either_name_of_a_tied_matrix_trains_it(pattern: str) -> None:
    model = on_meta(llama_config(num_hidden_layers=1, tie_word_embeddings=True), torch.float32)
    anatomy, trains = dissect(model), Trains(patterns=(pattern,))
    assert trained_names(model, anatomy, trains) == {"model.embed_tokens.weight", "lm_head.weight"}
    prepare(model, anatomy, trains, torch.float32)
    assert [name for name, one in model.named_parameters() if one.requires_grad] == ["model.embed_tokens.weight"]
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
