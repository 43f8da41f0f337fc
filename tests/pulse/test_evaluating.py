"""The page about evaluation: its config trains, tells what it says it tells, and fails its gate with a status."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import entry
from forked import tonnage
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage import open_run
from tonnage.config.bounds import SCORERS
from tonnage.files.reading import read_json

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluating.md").read_text()


@pytest.mark.matrix
def test_the_run_of_the_page_tells_and_fails_its_gate(tmp_path: Path) -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    config: dict[str, Any] = yaml.safe_load(text)
    write_model(tmp_path / config["model"], llama_config(max_position_embeddings=1024))
    rows = [row | {"output": f"{row['output']}\n#### {number}"} for number, row in enumerate(alpaca_rows(100))]
    write_rows(tmp_path / "gsm8k_train.json", rows[:80])
    write_rows(tmp_path / "general.jsonl", [{"text": "Nobody trains on this. " * 9}, {"text": "Nor on that."}])
    write_rows(tmp_path / "gsm8k_test.json", rows[80:])
    config["evaluate"] |= {"every": 2, "answers": 3, "max_new_tokens": 4}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    shorter = ["steps=4", "batch={tokens: 2048}", "launch.threads=1", "optimizer.lr=3e-3"]
    done = tonnage("train", "config.yaml", *shorter, cwd=tmp_path)
    assert done.returncode == 4, done.stdout + done.stderr
    run = tmp_path / "runs/gsm8k"
    assert (run / "export" / "model.safetensors").exists()
    (table,) = re.findall(r"```\n(rows .*?)```", PAGE, re.DOTALL)
    for line in table.splitlines()[1:]:
        rows_named, figure = re.split(r"\s{2,}", line)[:2]
        shown = re.compile(f"^{re.escape(rows_named.replace('100 answers', '3 answers'))} +{figure} ", re.MULTILINE)
        assert shown.search(done.stdout), (line, done.stdout)
    assert "gate: number >= 0.3 FAILS: it is" in done.stdout
    assert re.search(r"gate: forgets <= 0.05 (holds|FAILS)", done.stdout)
    told = read_json(run / "evaluation.json")
    assert told["passed"] is False
    assert told["figures"]["number"] == told["after"]["scores"]["number"][0]
    comparison = open_run(run).comparison
    assert comparison.to_json() == told
    assert "<h2>Evaluation</h2>" in (run / "report.html").read_text()

    again = entry.tonnage("eval", str(run))
    assert (again.status, "gate: number >= 0.3 FAILS" in again.out) == (4, True)
    settled = yaml.safe_load((run / "config.yaml").read_text())
    settled["evaluate"]["gate"] = {"perplexity": "< 1e9"}
    (run / "config.yaml").write_text(yaml.safe_dump(settled))
    passed = tonnage("train", "--resume", str(run), cwd=tmp_path)
    assert (passed.returncode, "gate: perplexity < 1e+09 holds" in passed.stdout) == (0, True), passed.stdout
    (command,) = re.findall(r"^    tonnage (eval runs/.* --data .*)$", PAGE, re.MULTILINE)
    other = tonnage(*command.replace("256", "4").split(), cwd=tmp_path)
    assert (other.returncode, "token accuracy" in other.stdout) == (0, True), other.stderr
    (words,) = re.findall(r"^    torchrun (.*)$", PAGE, re.MULTILINE)
    launched = [sys.executable, "-m", "torch.distributed.run", *words.split(), "--max-new-tokens", "4"]
    several = subprocess.run(launched, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (several.returncode, several.stdout) == (0, other.stdout), several.stderr


def test_the_page_names_every_scorer() -> None:
    listed = re.findall(r"^\| `([\w:]+)` \|", PAGE, re.MULTILINE)
    assert listed == [*SCORERS[1:], "module:function"]


def test_a_model_without_rows_is_told_what_to_write(tmp_path: Path) -> None:
    said = entry.tonnage("eval", str(tmp_path))
    assert said.status == 2
    assert f"tonnage eval {tmp_path} --data FILE" in said.err
