"""Everything the demo needs, written into one folder:

train.jsonl      instructions to learn from, in the Alpaca form, and the family of each
held-out.jsonl   instructions whose inputs are in no row of train.jsonl
model/           config.json and the tokenizer; no weights
config.yaml      how to train: the ordinary schema, with this folder's paths
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from tonnage.demo.model import write_model
from tonnage.demo.tasks import Example, held_out_examples, training_examples

NUM_HELD_OUT_EACH = 25
SEED = 0
_FOLDER_IN_CONFIG = "runs/demo/"


class Folder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.train = path / "train.jsonl"
        self.held_out = path / "held-out.jsonl"
        self.model = path / "model"
        self.config = path / "config.yaml"
        self.run = path / "run"
        """Where the config puts the run."""


def free_folder(parent: Path) -> Path:
    """The first of ``demo-1``, ``demo-2``... in ``parent`` that does not exist yet."""
    number = 1
    while (parent / f"demo-{number}").exists():
        number += 1
    return parent / f"demo-{number}"


def write_folder(path: Path) -> Folder:
    """Write the demo into a new folder. Raises ``FileExistsError`` if there is anything at ``path``."""
    path.mkdir(parents=True)
    folder = Folder(path)
    held_out = held_out_examples(NUM_HELD_OUT_EACH, SEED)
    random.Random(SEED).shuffle(held_out)
    _write_rows(folder.train, training_examples(SEED))
    _write_rows(folder.held_out, held_out)
    write_model(folder.model)
    config = files("tonnage.demo").joinpath("config.yaml").read_text(encoding="utf-8")
    folder.config.write_text(config.replace(_FOLDER_IN_CONFIG, f"{path.as_posix()}/"), encoding="utf-8")
    return folder


def _write_rows(path: Path, examples: Iterable[Example]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for example in examples:
            row = {"instruction": example.instruction, "output": example.answer, "family": example.family}
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
