"""What FSDP2 is helped with: packed weights, of which the oldest torch would make parameters that have gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tonnage.parallel import parallelize


def test_parameters_of_whole_numbers_are_frozen_while_a_model_is_sharded() -> None:
    numbers = torch.zeros(2, dtype=torch.uint8)
    with parallelize._frozen_where_whole_numbers():
        assert not nn.Parameter(numbers).requires_grad
        assert nn.Parameter(torch.zeros(2)).requires_grad
        assert not nn.Parameter(torch.zeros(2), requires_grad=False).requires_grad
    with pytest.raises(RuntimeError, match="floating point"):
        nn.Parameter(numbers)
