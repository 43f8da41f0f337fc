"""Workers that evaluate a model together; each prints what it found."""

from __future__ import annotations

import json

from tonnage.decide.evaluation import Answers, Loading, evaluate_model


def main(words: list[str]) -> None:
    """``words``: the JSON of what ``evaluate_model`` is called with."""
    (asked,) = words
    keys = json.loads(asked)
    sources = [{"path": path} for path in keys.pop("data")]
    answers, loading = Answers(**keys.pop("answers")), Loading(**keys.pop("loading"))
    found = evaluate_model(sources=sources, answers=answers, loading=loading, **keys)
    figures = found.figures() | {"evaluation": found.evaluated.to_json()}
    print(json.dumps(figures) + "\n", end="")  # at once: both write to one file
