"""Largest models by stage and by tier: the publications' own figures, the planner's states, and the page."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from planning.profiles import MODEL, layout
from tiny import llama_config
from tonnage.cli.zero_tables import parameters, show_zero_tables
from tonnage.decide.plans import suppose
from tonnage.planning.machine import parse_hardware
from tonnage.planning.published import DGX_2, MASSIVE, TIERED, ByStage, largest_by_stage
from tonnage.planning.states import frozen_bytes, held_states, host_bytes, states
from tonnage.planning.zero_table import Row, our_bytes, table

PAGE = Path(__file__).parents[2] / "docs" / "zero.md"
# Rajbhandari et al. 2020, table 2: billions of parameters, by degree of model parallelism, for stages 0 to 3.
THEORY = {1: (2, 7.6, 14.4, 128), 2: (4, 15.2, 28.8, 256), 4: (8, 30.4, 57.6, 512),
          8: (16, 60.8, 115.2, 1024), 16: (32, 121.6, 230.4, 2048)}  # fmt: skip
# Rajbhandari et al. 2021, figure 2: trillions of parameters and TiB of model states.
FIGURE_2 = [(0.10, 1.83), (0.50, 9.16), (1.01, 18.31), (10.05, 182.81), (101.47, 1845.70)]
LARGE = replace(
    MODEL,
    num_parameters=10**9,
    embedding_parameters=0,
    outside_parameters=0,
    num_blocks=100,
    block_parameters=10**7,
)
"""So deep that what no block holds, and the blocks that are ahead, are next to nothing."""


def test_table_2_of_zero() -> None:
    for row in largest_by_stage():
        assert [value / 1e9 for value in row.theirs] == pytest.approx(THEORY[row.degree], rel=0.01)
        without, with_stage_1 = row.measured
        assert without < row.theirs[0]
        assert with_stage_1 < row.theirs[1]


def test_figure_2_of_zero_infinity() -> None:
    for model, (trillions, tebibytes) in zip(MASSIVE, FIGURE_2, strict=True):
        assert round(model.parameters / 1e12, 2) == trillions
        assert round(model.their_bytes / 2**40, 2) == tebibytes


def test_what_was_run_fits_what_is_counted() -> None:
    for way in TIERED:
        if way.published is not None:
            assert way.published < way.theirs.largest(DGX_2), way.name
            assert way.published < way.ours.largest(DGX_2), way.name
    assert TIERED[-1].ours.largest(DGX_2) > 1e12


@pytest.mark.parametrize("way", TIERED, ids=lambda way: way.name)
def test_bytes_a_parameter_are_the_planner_s(way: Any) -> None:
    said = dict(re.findall(r"(\w+): (\w+)", way.keys))
    tiers = {key: value for key, value in said.items() if key.endswith("tier")}
    if "parameter_tier" in tiers:
        tiers["update_tier"] = "host"
    zero, devices = int(said["zero"]), DGX_2.devices
    made = layout(
        workers=devices, replicate=devices if zero == 0 else 1, zero=zero, precision="fp16", device="cuda", **tiers
    )
    held = held_states(made, LARGE)
    # Where the optimizer's state is elsewhere it goes through buffers of the device, which are none of it.
    optimizer = 0 if made.optimizer_tier == "host" else held.optimizer
    gradients = 0 if made.gradient_tier == "host" else held.gradients
    there = held.weights + held.gathered + gradients + optimizer
    two_blocks = 0.01 if "update_tier" in tiers else None  # of a hundred, by how much a worker has of each
    assert there / 1e9 == pytest.approx(way.ours.device, rel=0.01, abs=two_blocks)
    if "disk" not in tiers.values():  # what comes from there goes through buffers of the host
        assert devices * host_bytes(made, LARGE) / 1e9 == pytest.approx(way.ours.host, rel=0.01)


def test_all_of_the_states_may_be_elsewhere() -> None:
    made = layout(workers=16, zero=3, precision="fp16", device="cuda")
    whole = states(made, LARGE)
    assert frozen_bytes(made, LARGE) == whole.gathered == 0
    for way in TIERED[-2:]:
        needs = way.ours.host + way.ours.disk
        assert needs * 1e9 / 16 == pytest.approx(whole.weights + whole.gradients + whole.optimizer)
    assert our_bytes(1e9, 16, 3) * 16 == 16e9


def test_the_page_has_what_the_command_prints() -> None:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    of_devices, of_stages, of_massive = (
        [row for row in cells if len(row) == length and re.match(r"[\d,]+$", row[0])] for length in (7, 10, 5)
    )

    def by_stage(row: Row | ByStage) -> list[float]:
        """Theirs and ours from stage 1 on, one after the other."""
        theirs = row.classic if isinstance(row, Row) else row.theirs
        return [one for pair in zip(theirs[1:], row.ours[1:], strict=True) for one in pair]

    in_gb = [[f"{one / 1e9:.3g}" for one in by_stage(row)] for row in table(7.5e9)[1:]]
    assert [row[1:] for row in of_devices] == in_gb
    for said, row in zip(of_stages, largest_by_stage(), strict=True):
        assert said == [str(row.degree), f"{row.devices:,}", *map(parameters, (*row.measured, *by_stage(row)))]
    assert of_massive == [
        [str(one.layers), f"{one.hidden:,}", parameters(one.parameters)]
        + [f"{size / 2**40:,.2f}" for size in (one.their_bytes, one.our_bytes)]
        for one in MASSIVE
    ]
    for way in TIERED:
        run = "-" if way.published is None else parameters(way.published)
        largest = [parameters(needs.largest(DGX_2)) for needs in (way.theirs, way.ours)]
        assert [way.name, run, *largest] in cells


def test_all_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    show_zero_tables("7.5B", Console(width=200))
    said = " ".join(capsys.readouterr().out.split())
    assert "64 120 135 31.4 16.9 16.6 16.9 1.88 1.88" in said
    assert "4 256 8B 7.11B 30.6B 56.9B 57.7B 56.9B 512B 512B 5B 25B" in said
    assert "ZeRO 3, everything on disk 1T 1.4T 1.75T" in said
    assert "128 25,600 1.01T 18.31 14.65" in said


@pytest.mark.matrix
def test_an_8b_model_in_4_bits_takes_no_more_than_torchtune_publishes(tmp_path: Path) -> None:
    """Its README: 7.4 GiB for two rows of 2,048 tokens, by a recipe of rank 8, without what CUDA itself takes."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    llama_config(**sizes, num_attention_heads=32, num_key_value_heads=8).save_pretrained(tmp_path)
    words = ["data.max_length=2048", "batch.sequences=2", "memory.micro_batch=2", "memory.recompute=full"]
    words += [f"memory.{tier}_tier=device" for tier in ("parameter", "optimizer", "gradient", "activation")]
    words.append("adapter={rank: 8, quantize: nf4-double}")
    choice = suppose(str(tmp_path), words, parse_hardware("RTX4090")).choice
    assert choice.peak_bytes - choice.runtime_bytes < 7.4 * 2**30
