"""``--largest-context``: every cell is what the planner says, a little longer does not fit, and rows are numbers of
GPUs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import entry
from tiny import llama_config
from tonnage.cli.context_table import lines
from tonnage.decide.largest_context import MOST, STEP, Contexts, as_json, largest_contexts, rounded
from tonnage.decide.plans import supposed
from tonnage.errors import UserError
from tonnage.planning.machine import parse_hardware
from tonnage.planning.ways import FULL, LORA, LORA_NF4, without_sacrifices

WIDE = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 8, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A configuration alone: no weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    llama_config(**WIDE, max_position_embeddings=4096).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def contexts(model: str) -> Contexts:
    return largest_contexts(model, [], ["2xT4:16GB"])


@pytest.mark.matrix
def test_rows_and_columns(contexts: Contexts) -> None:
    assert contexts.positions == 4096
    assert list(dict.fromkeys(cell.hardware for cell in contexts.cells)) == ["T4-16GB:16GB", "2xT4-16GB:16GB"]
    assert [cell.num_devices for cell in contexts.cells] == [1] * 6 + [2] * 6
    assert {cell.way for cell in contexts.cells} == {FULL.name, LORA.name, LORA_NF4.name}
    assert all(cell.tokens % STEP == 0 and 4096 < cell.tokens < MOST for cell in contexts.cells)
    by_place = {(cell.num_devices, cell.way, cell.inputs): cell.tokens for cell in contexts.cells}
    for way in (FULL, LORA):
        assert by_place[1, way.name, "host"] > by_place[1, way.name, "device"]


@pytest.mark.matrix
@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_cell_is_what_the_planner_says(contexts: Contexts, model: str, tier: str) -> None:
    (cell,) = (one for one in contexts.cells if (one.num_devices, one.way, one.inputs) == (1, LORA.name, tier))
    words = ["batch.sequences=1", "memory.micro_batch=1", f"memory.activation_tier={tier}"]

    def fits(length: int) -> bool:
        asked = supposed(model, [*words, f"data.max_length={length}"], parse_hardware("T4:16GB"))
        return asked.planned(without_sacrifices(LORA.taken(asked.config), "cuda"), True).fits

    assert fits(int(cell.tokens * 0.97))
    assert not fits(int(cell.tokens * 1.03) + STEP)


def test_words_that_the_table_varies_are_refused(model: str) -> None:
    for word in ("data.max_length=9", "adapter.rank=4", "memory.activation_tier=host", "launch.workers=2"):
        with pytest.raises(UserError, match="which the table varies itself"):
            largest_contexts(model, [word], ["T4"])


@pytest.mark.matrix
def test_numbers_and_json(contexts: Contexts) -> None:
    assert [rounded(number) for number in (0, 1024, 99_999, 999_999, 1_048_576, 3_799_999)] == [
        *("-", "1K", "99K", "999K", "1M"),
        "3.7M",
    ]
    described = json.loads(json.dumps(as_json(contexts)))
    assert len(described["cells"]) == 12
    assert {"peak_bytes", "host_bytes", "in_words", "tokens"} <= set(described["cells"][0])
    assert len(lines(contexts)) == 2
    assert all(len(line) == 7 for line in lines(contexts))


@pytest.mark.matrix
def test_the_command(model: str) -> None:
    ended = entry.tonnage("plan", model, "--largest-context", "--hardware", "T4:16GB")
    assert ended.status in (None, 0), ended.err
    assert "T4-16GB:16GB" in ended.out
    assert "the model has 4,096 positions" in ended.out
    refused = entry.tonnage("plan", "config.yaml", "--largest-context")
    assert refused.status == 2
    assert "--largest max_length" in refused.err


def test_the_page_is_what_the_script_writes() -> None:
    script = [sys.executable, "-m", "benchmarks.largest_context", "--check"]
    assert subprocess.run(script, cwd=Path(__file__).parents[2], check=False).returncode == 0
