"""``tonnage bench``: a row whose figures are those of the run that it took."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from forked import work
from tonnage.cli.bench import bench
from tonnage.cli.main import app
from tonnage.errors import UserError
from tonnage.prove.bench import COLUMNS, METHODS, SHAPES, processor_named, shape_named
from tonnage.rundir.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
(DOCUMENTED,) = re.findall(r"^tonnage (bench .*)$", (ROOT / "docs" / "performance.md").read_text(), re.MULTILINE)
SMALLEST = ["--shape", "llama-4m", "--steps", "1"]


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the run writes into its metrics. Workers are forked, without their imports."""
    written: list[dict[str, Any]] = []

    def run_workers(
        run: RunDirectory, num_workers: int, threads: int, *, poll: Callable[[], None], command: Sequence[str]
    ) -> int:
        work("profile_runs", (num_workers, [str(run.path), command[-1]]))
        poll()
        written.extend(run.read_metrics())
        return 0

    monkeypatch.setattr("tonnage.launch.local.run_workers", run_workers)
    return written


@pytest.mark.matrix
def test_the_row_is_what_the_metrics_of_its_run_tell(
    records: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(DOCUMENTED)
    app([*words, *SMALLEST], standalone_mode=False)
    heading, _, line = capsys.readouterr().out.splitlines()
    row = dict(zip(cells(heading), cells(line), strict=True))
    result = json.loads((tmp_path / words[-1]).read_text())
    _, timed, *_ = steps = [record for record in records if "loss" in record]  # the first warms up

    assert (result["tokens"], result["supervised_tokens"]) == (timed["tokens"], timed["supervised_tokens"])
    assert result["tokens_per_second"] == pytest.approx(timed["tokens_per_second"], rel=0.05)
    assert result["peak_bytes"] == max(record["memory"]["host_peak"] for record in steps[:2])
    assert result["flops"] == pytest.approx(flops_of_llama(timed), rel=0.03)
    assert result["share_of_floor"] == result["flops"] / result["product_flops_per_second"] / result["step_seconds"]
    assert sum(result["causes"].values()) == pytest.approx(result["step_seconds"], rel=0.05)
    assert row["tokens/s"] == f"{result['tokens_per_second']:,.0f}"
    assert row["peak memory"] == f"{result['peak_bytes'] / 1e9:.2f} GB"
    assert row["share of floor"] == f"{result['share_of_floor']:.0%}"
    assert (row["shape"], row["method"], row["threads"]) == ("llama-4m", "full, bf16", str(result["threads"]))
    assert row["processor"].startswith(processor_named(result["machine"]["processor"], ()))


def flops_of_llama(step: dict[str, Any]) -> float:
    """Six for each weight of a linear layer and token, seven for each pair of tokens that attends and width."""
    shape = SHAPES["llama-4m"]
    hidden, wide, blocks = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    least, most = METHODS["bf16"].document_tokens
    lengths = range(least, most + 1)
    seen = statistics.mean(length**2 for length in lengths) / statistics.mean(lengths) / 2
    linear = blocks * hidden * (2 * hidden + 2 * hidden // 2 + 3 * wide)
    head = hidden * shape["vocab_size"] * step["supervised_tokens"]
    attention = 2 * 3.5 * 2 * blocks * hidden * seen * step["tokens"]
    return float(6 * (linear * step["tokens"] + head) + attention)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(("words", "names"), [({"shape": "pythia-7t"}, [*SHAPES]), ({"method": "muon"}, [*METHODS])])
def test_what_is_not_known_is_refused_with_the_list(words: dict[str, Any], names: list[str]) -> None:
    with pytest.raises(UserError, match=next(iter(words.values()))) as refused:
        bench(**words)
    assert f"needed: one of {', '.join(names)}" in str(refused.value)


def test_a_file_that_is_there_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    (tmp_path / "row.json").write_text("{}")
    with pytest.raises(UserError, match="is there already"):
        bench(output=tmp_path / "row.json")


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_as_many_parameters_as_its_name_says(name: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape_named(name))
    number, unit = re.fullmatch(r".*-(\d+)([mb])", name).groups()  # type: ignore[union-attr]
    assert model.num_parameters() == pytest.approx(int(number) * {"m": 1e6, "b": 1e9}[unit], rel=0.06)


def test_a_processor_is_named_by_what_its_products_use() -> None:
    assert processor_named("Intel(R) Xeon(R) Processor", ("avx2", "avx512f", "amx_bf16")) == "Intel Xeon, AMX"
    assert processor_named("AMD EPYC", ("avx2",)) == "AMD EPYC, AVX2"
    assert processor_named("Apple M4", ()) == "Apple M4"


@pytest.mark.slow
def test_the_table_is_what_the_results_say() -> None:
    script = [sys.executable, "-m", "benchmarks.cpu", "--check"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    table = [line for line in (ROOT / "benchmarks" / "cpu.md").read_text().splitlines() if line.startswith("| ")]
    assert cells(table[0]) == [*COLUMNS]
    assert len(table) >= 24 + 2
