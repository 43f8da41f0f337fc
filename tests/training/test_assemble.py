"""What the workers of a run must agree on before a model is built."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from forked import work
from tonnage.errors import UserError
from tonnage.planning.layout import PLAIN
from tonnage.training.resting import check_tiers


def test_products_widen_on_all_workers_or_on_none() -> None:
    """Or ranks that divide a layer would lay out rows in two ways."""
    assert work("training.disagreeing_workers", (2, [])).splitlines() == [
        "torch.bfloat16 ['[True, True]', '[True, True]']",
        "torch.float16 ['[False, False]', '[False, False]']",
    ]


def test_states_on_disk_are_refused_where_a_device_would_update_them() -> None:
    on_disk = replace(PLAIN, optimizer_tier="disk")
    gpu: Any = SimpleNamespace(device=torch.device("cuda"))
    with pytest.raises(UserError, match="disk, with parameters on cuda"):
        check_tiers(on_disk, gpu)
    check_tiers(replace(on_disk, update_tier="host"), gpu)
    check_tiers(on_disk, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
