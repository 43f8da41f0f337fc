"""The longest sequences that the planner finds, beside published ones, as tables of ``docs/long.md``.

    python -m benchmarks.largest_context [--plan] [--check]

``--plan`` plans anew (no weights are needed, and no GPU) and writes ``results/largest_context.json``; without it the
page is written from there. ``--check`` only says whether the page would change.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.table import table

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "largest_context.json", HERE.parent / "docs" / "long.md"
BEGIN, END = "<!-- contexts: written by benchmarks/largest_context.py -->", "<!-- end of contexts -->"

SHAPES: dict[str, dict[str, Any]] = {
    "1B (Llama 3.2)": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
    },
    "8B (Llama 3.1)": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
    "32B (Qwen 3)": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "70B (Llama 3.1)": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
}
HARDWARE = ("RTX4090:128GB", "A100-80GB:512GB", "H100:512GB", "8xH100:2000GB")
"""With the memory of a node."""
ALST = "[ALST](https://arxiv.org/abs/2506.13996), tables 2 and 3"
UNSLOTH = "[Unsloth's benchmarks](https://docs.unsloth.ai/basics/unsloth-benchmarks)"
SWIFT = "[ms-swift's example](https://github.com/modelscope/ms-swift/blob/main/examples/train/sequence_parallel/"
SWIFT += "sequence_parallel_512k.sh)"
NF4, LORA, FULL = "LoRA on 4 bits (nf4)", "LoRA", "full weights"
PUBLISHED: list[tuple[str, str, str, str, int, str, str]] = [
    (
        "8B (Llama 3.1)",
        "H100:512GB",
        FULL,
        "one H100",
        500_000,
        ALST,
        "weights and optimizer on the host, MLP in tiles",
    ),
    ("8B (Llama 3.1)", "8xH100:2000GB", FULL, "eight H100", 3_700_000, ALST, "the sequence divided among all eight"),
    ("8B (Llama 3.1)", "RTX4090:128GB", NF4, "24 GB", 78_475, UNSLOTH, "rank 32"),
    ("8B (Llama 3.1)", "A100-80GB:512GB", NF4, "80 GB", 342_733, UNSLOTH, "rank 32"),
    ("70B (Llama 3.1)", "A100-80GB:512GB", NF4, "A100 of 80 GB", 89_389, UNSLOTH, "Llama 3.3, rank 32"),
    ("32B (Qwen 3)", "8xH100:2000GB", LORA, "eight A100 of 80 GB", 512_000, SWIFT, "QwQ-32B, divided among all eight"),
]
"""Model, hardware and way of the cell that is nearest; their hardware; tokens; where that is written; how."""


def planned() -> dict[str, Any]:
    """All tables, planned now."""
    from importlib.metadata import version

    from tonnage.decide.largest_context import as_json, largest_contexts

    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in SHAPES.items():
            model = Path(folder) / name.partition(" ")[0]
            model.mkdir()
            (model / "config.json").write_text(json.dumps(shape))
            tables[name] = as_json(largest_contexts(str(model), [], HARDWARE)) | {"model": name}
            print(name, file=sys.stderr)
    versions = {package: version(package) for package in ("torch", "transformers")}
    return {"date": datetime.date.today().isoformat(), "versions": versions, "tables": tables}


def published() -> str:
    """What others reach, alone."""
    rows = [
        [model, way, theirs, f"{tokens:,}", f"{source}: {how}"]
        for model, _, way, theirs, tokens, source, how in PUBLISHED
    ]
    return "What others publish, in tokens:\n\n" + table(["model", "trained", "on", "they reach", "source"], rows)


def rendered(result: dict[str, Any] | None) -> str:
    """The part of the page between the marks; nothing planned where there is no result."""
    from tonnage.decide.largest_context import INPUT_TIERS, rounded

    if result is None:
        return published()
    ways = list(dict.fromkeys(cell["way"] for cell in next(iter(result["tables"].values()))["cells"]))
    parts = [
        f"Planned on {result['date']}, with torch {result['versions']['torch']}; nobody has run these plans. A cell: "
        "tokens with the inputs of blocks on the GPU / in the memory of the host; `-`: not even 1,024 fit."
    ]
    best: dict[tuple[str, str, str], int] = {}
    for name, contexts in result["tables"].items():
        cells = {(cell["hardware"], cell["way"], cell["block_inputs"]): cell["tokens"] for cell in contexts["cells"]}
        rows = []
        for hardware in dict.fromkeys(cell["hardware"] for cell in contexts["cells"]):
            shown = []
            for way in ways:
                pair = [cells[hardware, way, tier] for tier in INPUT_TIERS]
                best[name, hardware, way] = max(pair)
                shown.append(" / ".join(map(rounded, pair)))
            rows.append([hardware.replace(":", ", host "), *shown])
        parts.append(table([name, *ways], rows))
    rows = []
    for model, hardware, way, theirs, tokens, source, how in PUBLISHED:
        ours = rounded(best[model, _named(hardware, result), way])
        rows.append([model, way, theirs, f"{tokens:,}", ours, f"{source}: {how}"])
    parts.append("Beside what others publish:")
    heading = ["model", "trained", "on", "they reach", "planned, " + "tokens", "source"]
    return "\n\n".join([*parts, table(heading, rows)])


def _named(hardware: str, result: dict[str, Any]) -> str:
    """Hardware as a table calls it."""
    from tonnage.planning.machine import parse_hardware

    machine = parse_hardware(hardware)
    many = f"{machine.devices_per_node}x" if machine.devices_per_node > 1 else ""
    return f"{many}{machine.name}:{hardware.partition(':')[2]}"


def main() -> int:
    """Write the page; returns 1 if ``--check`` sees that it would change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--check", action="store_true")
    asked = parser.parse_args()
    if asked.plan:
        RESULT.write_text(json.dumps(planned(), indent=1) + "\n")
    result = json.loads(RESULT.read_text()) if RESULT.exists() else None
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    written = f"{before}{BEGIN}\n\n{rendered(result)}\n\n{END}{after}"
    if not asked.check:
        PAGE.write_text(written)
    return int(asked.check and written != page)


if __name__ == "__main__":
    sys.exit(main())
