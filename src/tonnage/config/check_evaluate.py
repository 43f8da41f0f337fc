"""Contradictions between what is evaluated, what is asked of it, and the rows that there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from tonnage.config.bounds import FIGURES, OfPairs, figure_of
from tonnage.config.contradiction import Contradiction
from tonnage.config.schema import Config

ROWS = "set data.validation, to 0.02 for instance"
ALWAYS = ("eval_loss", "perplexity", "token_accuracy")
"""Figures that every evaluation of validation rows has."""


def check_evaluate(config: Config) -> Iterator[Contradiction]:
    """What evaluations are asked for and cannot tell."""
    evaluate, best = config.evaluate, config.checkpoint.best
    has_rows = config.data.validation != 0
    yield from _prompts(config)
    if evaluate.every and not has_rows and not isinstance(evaluate.prompts, str) and evaluate.general is None:
        yield Contradiction(
            ("evaluate.every", "data.validation"),
            f"evaluate.every is {evaluate.every}, but there are no validation rows",
            "rows to evaluate on",
            f"{ROWS}, or leave evaluate.every out",
        )
    if (evaluate.scorer == "regex") != (evaluate.pattern is not None):
        yield Contradiction(
            ("evaluate.pattern", "evaluate.scorer"),
            f"evaluate.scorer is {evaluate.scorer}, and there is {'no' if evaluate.pattern is None else 'a'} pattern",
            "scorer: regex with a pattern, or neither",
            "evaluate.pattern='Answer: (.*)'" if evaluate.pattern is None else "evaluate.scorer=regex",
        )
    needs = {
        "evaluate.scorer": evaluate.scorer != "none",
        "evaluate.patience": evaluate.patience > 0,
        "checkpoint.best": best != "none",
    }
    for key, is_set in needs.items():
        if is_set and not has_rows:
            yield _without_rows(key)
    if evaluate.patience and not evaluate.every:
        yield Contradiction(
            ("evaluate.patience", "evaluate.every"),
            f"evaluate.patience is {evaluate.patience}, and the run is evaluated only at its end",
            "evaluations on the way",
            "evaluate.every=0.05",
        )
    if best in FIGURES and has_rows and best not in computed(config):
        yield _untold("checkpoint.best", best)
    for name in evaluate.gate:
        key = f"evaluate.gate.{name}"
        if name == "forgets":
            if evaluate.general is None:
                change = "evaluate.general=FILE"
                yield Contradiction((key, "evaluate.general"), f"{key}, but no general rows", "rows", change)
            elif not evaluate.before:
                observed, needed = f"{key}, and evaluate.before is false", "the loss of before, from which it rises"
                yield Contradiction((key, "evaluate.before"), observed, needed, "evaluate.before=true")
        elif not has_rows:
            yield _without_rows(key)
        elif name not in computed(config):
            yield _untold(key, name)


def computed(config: Config) -> tuple[str, ...]:
    """Figures that evaluations of a run with validation rows, or pairs, compute."""
    scored = figure_of(config.evaluate.scorer)
    of_rows: dict[str, tuple[str, ...]] = {
        "supervised": ALWAYS,
        "pairs": ("eval_loss", *get_args(OfPairs)),
        "verdicts": ("eval_loss", "eval_reward_margin"),
    }
    always = of_rows[config.objective.rows]
    return (*always, *(dict.fromkeys(["exact_match", scored]) if scored else ()))


def _without_rows(key: str) -> Contradiction:
    return Contradiction((key, "data.validation"), f"{key}, but there are no validation rows", "rows", ROWS)


def _untold(key: str, name: str) -> Contradiction:
    scorer = "MODULE:FUNCTION" if name == "score" else name
    change = "" if name in (*ALWAYS, *get_args(OfPairs)) else f"evaluate.scorer={scorer}"
    return Contradiction(
        (key, "evaluate.scorer"), f"{key}, and nothing tells {name}", "a figure that is computed", change
    )


def _prompts(config: Config) -> Iterator[Contradiction]:
    prompts = config.evaluate.prompts
    if prompts and not isinstance(prompts, str) and config.data.validation == 0:
        yield Contradiction(
            ("evaluate.prompts", "data.validation"),
            f"evaluate.prompts is {prompts}, but there are no validation rows",
            "rows to ask",
            f"{ROWS}, or name a file: evaluate.prompts=FILE",
        )
