"""Small configurations of other programs, and what becomes of them."""

from __future__ import annotations

from pathlib import Path

from tonnage.migration import Import, import_files

AXOLOTL = """\
base_model: tiny/llama
sequence_len: 512
micro_batch_size: 2
datasets: [{path: rows.jsonl, type: alpaca}]
"""
FACTORY = "model_name_or_path: tiny/llama\nstage: sft\nfinetuning_type: full\ncutoff_len: 512\n"
SWIFT = "swift sft --model tiny/llama --dataset rows.jsonl"


def of_file(lines: str, folder: Path, workers: int | None = None) -> Import:
    """What a file of these lines becomes."""
    (folder / "config.yaml").write_text(lines)
    return import_files([folder / "config.yaml"], workers=workers)
