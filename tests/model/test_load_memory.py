"""Loading a model on four ranks: no rank ever holds more than its quarter, while plain transformers holds it whole."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPTNeoXConfig

from tiny import byte_tokenizer
from tonnage.launch.local import run_workers
from tonnage.rundir.directory import RunDirectory

RANKS = 4
SLACK = 200e6


@pytest.fixture(scope="module")
def half_a_pythia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half the blocks of pythia-1b in bf16, 1.2 GB; every value is 2^-10, so their sum tells that all were read."""
    folder = tmp_path_factory.mktemp("half-a-pythia")
    config = GPTNeoXConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=8,
        num_attention_heads=8,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    weights = {
        name: torch.full(parameter.shape, 2.0**-10, dtype=torch.bfloat16)
        for name, parameter in model.named_parameters()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(how: str, model: Path, folder: Path, ranks: int) -> list[dict[str, float]]:
    out = folder / how
    command = [sys.executable, str(Path(__file__).with_name("loading.py")), how, str(model), str(out)]
    run_workers(RunDirectory(folder / "run"), ranks, 1, command=command)
    return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]


@pytest.mark.matrix
def test_no_rank_holds_more_than_its_part(half_a_pythia: Path, tmp_path: Path) -> None:
    bytes_in_bf16 = (half_a_pythia / "model.safetensors").stat().st_size
    parameters = bytes_in_bf16 / 2
    risen = {how: load(how, half_a_pythia, tmp_path, ranks) for how, ranks in (("bf16", RANKS), ("plain", 1))}
    print("bf16", [f"{rank['risen'] / 1e6:,.0f} MB" for rank in risen["bf16"]])
    assert sum(rank["sum"] for rank in risen["bf16"]) == pytest.approx(parameters * 2**-10, rel=1e-3)
    for rank in risen["bf16"]:
        assert rank["risen"] <= bytes_in_bf16 / RANKS + SLACK
    print("plain", [f"{rank['risen'] / 1e6:,.0f} MB" for rank in risen["plain"]])
    for rank in risen["plain"]:
        assert rank["risen"] >= 0.95 * bytes_in_bf16
