"""What is evaluated and when, and what follows from it: the best step, and an early end."""

from __future__ import annotations

from typing import Any

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.programs import AXOLOTL_YAML
from tonnage.migration.training import per_epoch, steps_of
from tonnage.migration.values import flag, number, occasion, whole, words


def evaluates(draft: Draft) -> bool:
    strategies = draft.every("eval_strategy", occasion)
    if not strategies and draft.default("evaluate.every"):
        return True
    return any(pick.value not in ("no", "none") for pick in strategies) or any(
        pick.value for pick in draft.every("do_eval", flag)
    )


def validation_fraction(draft: Draft) -> None:
    """A part of the rows that is held out, where a program lists data sets."""
    pick = draft.first("validation_fraction", number)
    if pick is None:
        return
    if pick.value == 0:
        draft.drop(pick, "No validation rows.")
    elif "data.validation" in draft.tree:
        draft.drop(pick, "Other rows are evaluated.")
    elif pick.value < 1:
        draft.put("data.validation", pick.value, pick)
    else:
        draft.refuse(pick, "A fraction of the rows, below 1.")


MEASURED = {"perplexity"}
"""What every evaluation tells beside the loss."""


def measures(draft: Draft) -> None:
    """What Axolotl measures in an evaluation beside the loss."""
    switch, names = draft.first("measures", flag), draft.first("measured", words)
    is_told = names is not None and set(names.value) <= MEASURED
    is_off = switch is None or not switch.value
    draft.drop(switch if is_off else None, "Off.")
    draft.drop(switch if is_told else None, "Every evaluation tells perplexity: of whole rows, there of windows.")
    draft.refuse(switch)
    draft.drop(
        names,
        "Nothing is measured."
        if is_off
        else "Every evaluation tells it."
        if is_told
        else "Belongs to do_causal_lm_eval.",
    )


def evaluation(draft: Draft) -> None:
    """Steps between evaluations."""
    measures(draft)
    if _evaluations_of_an_epoch(draft):
        draft.drop_every("evals_per_epoch counts.", "evaluate.every", "eval_strategy")
    strategy = draft.first("eval_strategy", occasion)
    every, do_eval = draft.first("evaluate.every", number), draft.first("do_eval", flag)
    is_enough = draft.default("evaluate.every") or not draft.program.counts_workers  # a number by itself
    if every is not None and strategy is None and is_enough:
        _every(draft, every)
    word = strategy.value if strategy is not None else "no"
    if word == "steps" and every is not None:
        _every(draft, every, strategy)
    elif word == "steps":
        sentence = "steps between evaluations: as often as was logged"
        draft.leave_open("evaluate.every", sentence, strategy, example="500")
    elif word in ("no", "none"):
        draft.drop(strategy, "Validation rows, if there are any, are evaluated at the end.")
    else:
        draft.refuse(strategy, f"Every so many steps (evaluate.every), not {word}.")
    draft.drop(every, "The strategy is not steps.")
    draft.drop(do_eval, "Validation rows are evaluated if there are any.")


def _evaluations_of_an_epoch(draft: Draft) -> bool:
    of_an_epoch = per_epoch(draft, "evals_per_epoch")
    if of_an_epoch is None:
        return False
    pick, fraction = of_an_epoch
    if "data.validation" not in draft.tree:
        draft.drop(pick, "There are no validation rows.")
    elif fraction >= 1:
        draft.drop(pick, "Validation rows are evaluated at the end.")
    else:
        draft.put("evaluate.every", round(fraction, 6), pick)
    return True


def _every(draft: Draft, every: Pick[float], *others: Pick[str] | None) -> None:
    """Evaluate after so many steps, or after such a fraction of all of them."""
    value = steps_of(draft, every.value) or every.value
    if value <= 0:
        draft.drop(every, "Never.")
    elif "data.validation" in draft.tree:
        draft.put("evaluate.every", value, every, *others)
    else:
        sentence = "needs data.validation: rows, or a fraction such as 0.02"
        draft.leave_open("evaluate.every", sentence, every, *others, example=str(value))


LOSSES = ("loss", "eval_loss", "none")
"""``metric_for_best_model`` of a loss."""


def best_step(draft: Draft) -> None:
    """The step that is exported, and after how many evaluations without a better one the run ends.

    transformers counts from the first evaluation after steps, and compares strictly; so does a run here that is not
    evaluated before its first step. Axolotl loads the best step wherever it stops early.
    """
    patience, best = draft.first("evaluate.patience", whole), draft.first("checkpoint.best", flag)
    figure = draft.first("best_figure", lambda value: str(value).lower())
    picks: list[Pick[Any]] = [pick for pick in (patience, best) if pick is not None and pick.value > 0]
    if not picks:
        draft.drop(figure, "The last step is exported.")
    elif figure is not None and figure.value not in LOSSES:
        reason = f"The best step is the one with the least loss (eval_loss), not by {figure.value}."
        draft.refuse((*picks, figure), reason)
    elif "evaluate.every" not in draft.tree:
        missing = "validation rows" if "data.validation" not in draft.tree else "evaluations between steps"
        reason = f"Needs {missing}, which nothing asks for: data.validation and evaluate.every."
        draft.refuse((*picks, figure), reason)
    else:
        if patience is not None and patience in picks:
            draft.put("evaluate.patience", patience.value, patience)
            draft.imply("evaluate.before", False, "nothing is evaluated before the first step")
        if best in picks or draft.program is AXOLOTL_YAML:
            draft.put("checkpoint.best", "eval_loss", *picks, figure)
    draft.drop(patience, "Off.")
    draft.drop(best, "The last step is exported.")
    draft.drop(figure, "The loss is what is compared.")
