"""Matrices that ranks divide, family by family: the loss and every gradient of the whole model, in fp64."""

from __future__ import annotations

import json

import pytest

from forked import work

SOME = {
    "apertus": True,  # an activation that is trained
    "gemma4_text": False,  # an embedding of every token for every block
    'gemma4_text {"hidden_size_per_layer_input": 0}': True,
    "olmo": True,  # norms without a weight
}
"""Families, and whether ranks divide the tokens of a row as well."""
OTHERS = [
    "arcee",
    "cohere",
    "cohere2",
    "cwm",
    "ernie4_5",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gpt_neox",
    "granite",
    "helium",
    "hrm_text",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "llama",
    "ministral",
    "ministral3",
    "mistral",
    "nanochat",
    "nemotron",
    "phi",
    "qwen2",
    "qwen3",
    "seed_oss",
    "smollm3",
    "starcoder2",
    "vaultgemma",
]


@pytest.mark.matrix
@pytest.mark.parametrize("families", [SOME, dict.fromkeys(OTHERS, True) | {"flint": False}])
def test_loss_and_gradients_are_those_of_the_whole_model(families: dict[str, bool]) -> None:
    found = json.loads(work("parallel.tensor_families", (2, list(families))))
    assert found.keys() == families.keys()
    for family, (divides, loss, gradient) in found.items():
        assert divides == families[family], family
        assert loss < 1e-6, family
        assert gradient < 1e-6, family
