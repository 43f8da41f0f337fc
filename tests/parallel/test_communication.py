"""Every ZeRO stage communicates what the papers say it must, and no more."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forked import work
from tiny import llama_config, write_model

WORKERS = 2


@pytest.mark.matrix
def test_bytes_of_every_stage(tmp_path: Path) -> None:
    """Bytes gathered and reduced in one step, for P parameters, w bytes each in the forward, M micro-batches.

    The root unit (embedding, norm, head) stays gathered from forward to backward, so under ZeRO 3 it is gathered once
    a micro-batch where blocks are gathered twice. Padding: parameters are cut by rows, so a shard may have a row more.
    """
    # Every dimension divides by the workers, so that nothing is padded.
    model = write_model(tmp_path / "model", llama_config(num_hidden_layers=3, hidden_size=96, intermediate_size=192))
    found = json.loads(work("parallel.count_communication", (WORKERS, [str(model)])))
    assert len(found) == 32
    for case in found:
        zero, m, w = case["zero"], case["micro_batches"], case["compute_bytes"]
        whole, blocks = case["parameters"], case["block_parameters"]
        gathered = {0: 0, 1: w * whole, 2: w * whole, 3: w * m * (whole + blocks)}[zero]
        summed = {0: 4 * whole, 1: 4 * whole, 2: 4 * m * whole, 3: 4 * m * whole}[zero]  # gradients, in fp32
        # On CPUs each rank takes its part of an all-reduce, which is what gloo makes of a reduce-scatter.
        reduced, scattered = (summed, 0) if zero == 0 or case["in_place"] else (0, summed)
        where = f"ZeRO {zero}, {m} micro-batches, {w} bytes"
        got = case["bytes"]
        assert got.get("gather", 0) == pytest.approx(gathered, rel=1e-3), where
        assert got.get("scatter", 0) == pytest.approx(scattered, rel=1e-3), where
        assert got.get("reduce", 0) == pytest.approx(reduced, rel=1e-3), where
        assert case["unknown"] == [], where
