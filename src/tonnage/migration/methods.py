"""What a run learns, by a word: from supervised rows, from preferences, something else, or nobody knows.

Programs have a word for it (TRL's commands, Axolotl's ``rl``, LLaMA-Factory's ``stage``). The arguments of TRL's
scripts for preferences, rewards and distillation are those of its supervised one but for a few that may all be silent,
so there the script's name alone says it. Names are those of TRL 1.16 (``trl/scripts``, ``examples/scripts``) and of its
earlier versions, of alignment-handbook, of transformers' examples, and the words people make names of.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal

from tonnage.migration.yaml_files import read_data

_TABLE = read_data("methods")
Method = Literal["supervised", "pairs", "kto", "reward"]
"""From what is learned, or what: answers as they are, pairs of them, answers with a label, a model that scores."""
PREFERENCES: tuple[Method, ...] = ("pairs", "kto", "reward")
WORDS: dict[str, dict[str, Method]] = {
    quantity: {
        word: method for method in PREFERENCES for word in _TABLE["preferences"][method].get(quantity, "").split()
    }
    for quantity in ("trl", "script", "rl", "reward_model", "stage", "swift")
}
"""Words for learning from preferences that are carried over, by the quantity that says them."""
_OTHERS = {word: does for does, words in _TABLE["others"].items() for word in words.split()}
_SUPERVISED, _JOINED = _TABLE["supervised"].split(), _TABLE["joined"].split()


def refusal(word: str) -> str:
    if word in _OTHERS:
        return f"By its name ({word}) it {_OTHERS[word]}."
    return f"Nobody here knows {word[:60]}: supervised rows are trained on, and preferences (objective.kind)."


def method_of(script: str) -> tuple[str, str]:
    """The word in a script's name that says what it trains, and what that is: a ``Method`` or ``other``; two empty ones
    if no word does, or words for several methods.

    ``trl/scripts/dpo.py`` and ``trl.scripts.dpo`` are a file and a module. A folder counts for what is not supervised
    alone: ``dpo/train.py`` is no supervised training, while whatever is in ``training/`` need be no training. A word
    for something else counts before one for preferences: ``dpo_online.py`` makes its pairs itself.
    """
    path = PurePath(script.strip().replace("\\", "/"))
    parts = path.parts if "/" in str(path) or path.suffix in (".py", ".sh") else tuple(script.strip().split("."))
    names = [_words(PurePath(part).stem if part.endswith((".py", ".sh")) else part) for part in parts[-2:]]
    words = [_known(word) for name in reversed(names) for word in name]
    if other := next((word for word in words if word in _OTHERS), ""):
        return other, "other"
    for name in reversed(names):
        methods = {WORDS["script"][word]: word for word in map(_known, reversed(name)) if word in WORDS["script"]}
        if len(methods) > 1:
            return "", ""
        if methods:
            ((method, word),) = methods.items()
            return word, method
    own = names[-1] if names else []
    word = next((word for word in own if any(_ends_in(word, supervised) for supervised in _SUPERVISED)), "")
    return word, "supervised" if word else ""


def _known(word: str) -> str:
    """The word that another one is written together with, if it is no known one itself."""
    if word in _OTHERS or word in WORDS["script"]:
        return word
    return next((other for other in _JOINED if _ends_in(word, other)), word)


def _ends_in(word: str, other: str) -> bool:
    return word.startswith(other) or word.endswith(other)


def _words(name: str) -> list[str]:
    """``runRewardModel_v2`` as ``run``, ``reward``, ``model``, ``v``; ``seq2seq`` stays one word."""
    parted = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    return [word if word in _OTHERS else word.strip("0123456789") for word in re.split(r"[^a-z0-9]+", parted)]
