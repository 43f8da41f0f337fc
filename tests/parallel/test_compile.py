"""Compiled blocks: one is compiled, and the others find its code, whatever our kernels put in the place of layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tiny import llama_config, neox_config
from tonnage.model.adapters import EVERYTHING, AdapterSpec, Trains, prepare
from tonnage.model.anatomy import dissect
from tonnage.model.attention import PackedRow
from tonnage.model.build import allocate, build_on_meta, initialise_randomly
from tonnage.parallel.compile import compile_blocks
from tonnage.parallel.recompute import recompute_blocks

BLOCKS = 10
"""More than Dynamo compiles of one function: the rest would run as they are."""


@pytest.mark.parametrize(
    ("family", "trains", "most", "recomputed"),
    [
        # Two pieces around attention, and two more for a first block, whose input is another.
        pytest.param("llama", EVERYTHING, 4, 0, marks=pytest.mark.slow),
        pytest.param("neox", EVERYTHING, 4, 0, marks=pytest.mark.slow),
        pytest.param("llama", EVERYTHING, 4, BLOCKS // 2, marks=pytest.mark.slow),
        pytest.param("llama", EVERYTHING, 4, BLOCKS, marks=pytest.mark.slow),
        pytest.param("llama", Trains(AdapterSpec(4, 2.0)), 8, 0, marks=pytest.mark.slow),
        pytest.param("llama", Trains(AdapterSpec(4, 2.0, magnitudes=True)), 8, 0, marks=pytest.mark.matrix),
    ],
)
def test_blocks_share_their_code(
    family: str, trains: Trains, most: int, recomputed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some blocks are recomputed, their code is not compiled more often for it, nor that of the others."""
    graphs: list[Any] = []

    def counted(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    config = {"llama": llama_config, "neox": neox_config}[family](num_hidden_layers=BLOCKS)
    model = build_on_meta(config, torch.float32)
    anatomy = dissect(model)
    prepare(model, anatomy, trains, torch.float32)
    allocate(model, torch.device("cpu"))
    initialise_randomly(model, 0)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=counted))
    torch._dynamo.reset()
    compile_blocks(anatomy.blocks)
    recompute_blocks(anatomy.blocks[:recomputed], "full")
    positions = torch.arange(40)[None]
    for _ in range(2):
        output = model(input_ids=positions, position_ids=positions, row=PackedRow((40,)))
        if recomputed:
            output.logits.sum().backward()
    torch._dynamo.reset()
    assert 1 <= len(graphs) <= most
