"""Workers that evaluate a model together; each prints what it found."""

from __future__ import annotations

import json

from tonnage.decide.evaluation import evaluate_model


def main(words: list[str]) -> None:
    """``words``: the JSON of what ``evaluate_model`` is called with."""
    (asked,) = words
    found = evaluate_model(**json.loads(asked))
    figures = found.figures() | {"evaluation": found.evaluated.to_json()}
    print(json.dumps(figures) + "\n", end="")  # at once: both write to one file
