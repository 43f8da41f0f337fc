"""Layers with dropout draw for the tokens of the micro-batch that runs, and for no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tonnage.errors import UserError
from tonnage.kernels.dropout import token_keys
from tonnage.model.dropout import Drawn, LayerDropout


def test_a_layer_draws_while_a_micro_batch_runs_and_only_for_its_tokens() -> None:
    drawn = Drawn()
    layer = LayerDropout("model.layers.0.mlp.up_proj", 0.25, drawn)
    keys = token_keys(1, np.zeros(6, int), np.arange(6))
    assert layer.mask(torch.zeros(2, 3, 8)) is None
    with drawn.for_tokens(keys):
        mask = layer.mask(torch.zeros(2, 3, 8), 16)
        assert mask is not None
        assert torch.equal(mask.keys, keys)
        assert (mask.first, mask.threshold) == (16, 16384)
        with pytest.raises(UserError, match=r"(?s)up_proj is given 5 rows for 6 tokens.*adapter\.dropout=0"):
            layer.mask(torch.zeros(5, 8))
    assert layer.mask(torch.zeros(2, 3, 8)) is None
