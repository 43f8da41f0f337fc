"""What a training script trains, by its name: supervised rows, something else, or nobody knows.

The arguments of TRL's scripts for preferences, rewards and distillation are those of its supervised one but for a few
that may all be silent, so the script's name alone tells them apart. Names are those of TRL 1.16 (``trl/scripts``,
``examples/scripts``) and of its earlier versions, of transformers' examples, and the words people make names of.
"""

from __future__ import annotations

import re
from pathlib import PurePath

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.programs import AXOLOTL_YAML, LLAMA_FACTORY_1, LLAMA_FACTORY_YAML
from tonnage.migration.yaml_files import read_data

_TABLE = read_data("scripts")
_OTHERS = {word: kind for kind, words in _TABLE["others"].items() for word in words.split()}
_SUPERVISED, _JOINED = _TABLE["supervised"].split(), _TABLE["joined"].split()
SUPPOSED = "Taken for supervised training, as its name says. What else the script does is not known here."


def objective(script: str) -> tuple[str, bool]:
    """The word in a script's name that says what it trains, and whether that is supervised rows; no word if none does.

    ``trl/scripts/dpo.py`` and ``trl.scripts.dpo`` are a file and a module. A folder counts for what is not supervised
    alone: ``dpo/train.py`` is no supervised training, while whatever is in ``training/`` need be no training.
    """
    path = PurePath(script.strip().replace("\\", "/"))
    parts = path.parts if "/" in str(path) or path.suffix in (".py", ".sh") else tuple(script.strip().split("."))
    names = [_words(PurePath(part).stem if part.endswith((".py", ".sh")) else part) for part in parts[-2:]]
    for word in [word for name in reversed(names) for word in name]:
        joined = next((other for other in _JOINED if _ends_in(word, other)), "")
        other = word if word in _OTHERS else joined
        if other:
            return other, False
    own = names[-1] if names else []
    word = next((word for word in own if any(_ends_in(word, supervised) for supervised in _SUPERVISED)), "")
    return word, bool(word)


def _ends_in(word: str, other: str) -> bool:
    return word.startswith(other) or word.endswith(other)


def _words(name: str) -> list[str]:
    """``runRewardModel_v2`` as ``run``, ``reward``, ``model``, ``v``; ``seq2seq`` stays one word."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return [word if word in _OTHERS else word.strip("0123456789") for word in re.split(r"[^a-z0-9]+", parted)]


def supervised(draft: Draft) -> None:
    """Refuse a script that trains something else, and one of which nobody knows what it trains."""
    for setting in draft.files.settings:
        if setting.name != "script":
            continue
        pick = Pick(str(setting.value), (setting,))
        word, is_supervised = objective(pick.value)
        if draft.program in (AXOLOTL_YAML, LLAMA_FACTORY_YAML, LLAMA_FACTORY_1):
            draft.drop(pick, "What is trained, its configuration says.")
        elif word and is_supervised:
            draft.drop(pick, SUPPOSED)
        elif word:
            draft.refuse(pick, f"By its name ({word}) it trains on {_OTHERS[word]}: supervised fine-tuning only.")
        else:
            draft.refuse(
                pick,
                "Nobody here knows what it trains, and its name does not say (sft, train, finetune). If these are "
                "arguments of supervised training, --partial writes the config.",
            )
