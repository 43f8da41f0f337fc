"""What a run leaves behind and when: output, checkpoints, evaluations, trackers, seed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tonnage.migration.keys import asks_for_nothing
from tonnage.migration.programs import AXOLOTL_YAML
from tonnage.migration.sheet import Need, Pick, Sheet, flag, number, text, whole
from tonnage.migration.training import steps_of

DEFAULT_SAVE_STEPS = 500
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def evaluates(sheet: Sheet) -> bool:
    """Whether the run evaluates on the way."""
    strategies = sheet.every("eval_strategy", _strategy)
    if not strategies and sheet.default("evaluate.every"):
        return True
    return any(pick.value not in ("no", "none") for pick in strategies) or any(
        pick.value for pick in sheet.every("do_eval", flag)
    )


def _per_epoch(sheet: Sheet, quantity: str) -> tuple[Pick[float], float] | None:
    """What happens so many times an epoch, as a fraction of all steps; of a run counted in steps, as if those were its
    epochs, which is what Axolotl does."""
    pick = sheet.first(quantity, number)
    if pick is None:
        return None
    if pick.value <= 0:
        sheet.drop(pick, "Never.")
        return None
    return pick, 1.0 / (pick.value * _epochs(sheet))


def _epochs(sheet: Sheet) -> float:
    """Passes over the data that are written, also where a number of steps decides."""
    for said in sheet.raw("epochs"):
        with suppress(ValueError):
            if (found := number(said)) > 0:
                return found
    return float(sheet.default("epochs") or 1.0)


def _evaluations_of_an_epoch(sheet: Sheet) -> bool:
    found = _per_epoch(sheet, "evals_per_epoch")
    if found is None:
        return False
    pick, fraction = found
    if "data.validation" not in sheet.tree:
        sheet.drop(pick, "There are no validation rows.")
    elif fraction >= 1:
        sheet.drop(pick, "Validation rows are evaluated at the end.")
    else:
        sheet.put("evaluate.every", round(fraction, 6), pick)
    return True


def evaluation(sheet: Sheet) -> None:
    """Steps between evaluations."""
    if _evaluations_of_an_epoch(sheet):
        for quantity in ("evaluate.every", "eval_strategy"):
            for pick in sheet.every(quantity, lambda value: value):
                sheet.drop(pick, "evals_per_epoch counts.")
    strategy = sheet.first("eval_strategy", _strategy)
    every, asked = sheet.first("evaluate.every", number), sheet.first("do_eval", flag)
    is_enough = sheet.default("evaluate.every") or not sheet.program.counts_workers  # a number by itself
    if every is not None and strategy is None and is_enough:
        _every(sheet, every)
    match strategy.value if strategy is not None else "no":
        case "steps" if strategy is not None and every is not None:
            _every(sheet, every, strategy)
        case "steps" if strategy is not None:
            sheet.leave_open(
                Need("evaluate.every", "steps between evaluations: as often as was logged", "500"), strategy
            )
        case "no" | "none":
            sheet.drop(strategy, "Validation rows, if there are any, are evaluated at the end.")
        case other:
            assert strategy is not None
            sheet.refuse(strategy, f"Every so many steps (evaluate.every), not {other}.")
    sheet.drop(every, "The strategy is not steps.")
    sheet.drop(asked, "Validation rows are evaluated if there are any.")


def _every(sheet: Sheet, every: Pick[float], *others: Pick[str]) -> None:
    """Evaluate after so many steps, or after such a fraction of all of them."""
    value = steps_of(sheet, every.value) or every.value
    if value <= 0:
        sheet.drop(every, "Never.")
    elif "data.validation" in sheet.tree:
        sheet.put("evaluate.every", value, every, *others)
    else:
        need = Need("evaluate.every", "needs data.validation: rows, or a fraction such as 0.02", str(value))
        sheet.leave_open(need, every, *others)


LOSSES = ("loss", "eval_loss", "none")
"""``metric_for_best_model`` of a loss."""


def best_step(sheet: Sheet) -> None:
    """The step that is exported, and after how many evaluations without a better one the run ends.

    transformers counts from the first evaluation after steps, and compares strictly; so does a run here that is not
    evaluated before its first step. Axolotl loads the best step wherever it stops early.
    """
    patience, best = sheet.first("evaluate.patience", whole), sheet.first("checkpoint.best", flag)
    figure = sheet.first("best_figure", lambda value: str(value).lower())
    if best is not None and not best.value:
        sheet.drop(best, "The last step is exported.")
        best = None
    if patience is not None and patience.value <= 0:
        sheet.drop(patience, "Off.")
        patience = None
    picks: list[Pick[Any]] = [one for one in (patience, best) if one is not None]
    asking: tuple[Pick[Any] | None, ...] = (*picks, figure)
    if not picks:
        sheet.drop(figure, "The last step is exported.")
    elif figure is not None and figure.value not in LOSSES:
        for pick in asking:
            sheet.refuse(pick, f"The best step is the one with the least loss (eval_loss), not by {figure.value}.")
    elif "evaluate.every" not in sheet.tree:
        what = "validation rows" if "data.validation" not in sheet.tree else "evaluations between steps"
        for pick in asking:
            sheet.refuse(pick, f"Needs {what}, which nothing asks for: data.validation and evaluate.every.")
    else:
        if patience is not None:
            sheet.put("evaluate.patience", patience.value, patience)
            sheet.imply("evaluate.before", False, "nothing is evaluated before the first step")
        if best is not None or sheet.program is AXOLOTL_YAML:
            sheet.put("checkpoint.best", "eval_loss", *picks, figure)
        sheet.drop(figure, "The loss is what is compared.")


def _strategy(value: Any) -> str:
    return "no" if value in (False, None) else text(value).lower().rpartition(".")[2]


def saving(sheet: Sheet) -> None:
    """Directory of the run, and its checkpoints."""
    sheet.copy("output", text)
    strategy, every = sheet.first("save_strategy", _strategy), sheet.first("checkpoint.every", number)
    if every is None and (found := _per_epoch(sheet, "saves_per_epoch")) is not None:
        if found[1] >= 1:
            sheet.drop(found[0], "A run is saved at its end.")
        elif (value := steps_of(sheet, found[1])) is not None:
            sheet.put("checkpoint.every", value, found[0])
        else:
            sheet.drop(found[0], "A run is saved as often as is worth it (checkpoint.every: auto), and at its end.")
    for pick in sheet.every("saves_per_epoch", number):
        sheet.drop(pick, "save_steps counts.")
    match strategy.value if strategy is not None else "steps":
        case "no":
            assert strategy is not None
            sheet.put("checkpoint.every", 0, strategy)
            sheet.drop(every, "The strategy is no.")
        case "steps" if every is not None:
            value = steps_of(sheet, every.value)
            if value is None:
                sheet.refuse(every, "Steps, not a fraction of all of them.")
            else:
                sheet.put("checkpoint.every", value, every, strategy)
        case "steps":
            if strategy is not None:
                sheet.put("checkpoint.every", DEFAULT_SAVE_STEPS, strategy, note="500 steps by default.")
            else:
                sheet.imply_default("checkpoint.every")
        case other:
            assert strategy is not None
            sheet.refuse(strategy, f"Every so many steps (checkpoint.every), not {other}.")
    sheet.drop(strategy, "Every so many steps.")
    sheet.drop(every, "The strategy is not steps.")
    limit = sheet.first("checkpoint.keep", lambda value: None if value in (None, "None", "null") else whole(value))
    if limit is not None and limit.value is not None:
        sheet.put("checkpoint.keep", limit.value, limit)
    elif limit is not None:
        sheet.drop(limit, "No limit there; here the latest 2 stay unless checkpoint.keep says more.")
    if (
        (limit is None or limit.value is None)
        and sheet.tree.get("checkpoint.every")
        and sheet.default("checkpoint.every")
    ):
        sheet.notes.append(
            "transformers keeps every checkpoint unless save_total_limit is set; checkpoint.keep is 2 by default."
        )


def pushing(sheet: Sheet) -> None:
    """The hub's repository of the saves, where the other program would push to one."""
    sheet.copy("checkpoint.push", text)
    switch, private = sheet.first("hub_switch", flag), sheet.first("checkpoint.public", flag)
    owner, name = sheet.first("hub_owner", text), sheet.first("hub_name", text)
    picks = (switch, owner, name)
    if switch is None or not switch.value:
        for pick in picks:
            sheet.drop(pick, "Without push_to_hub nothing is pushed.")
    else:
        repository = "/".join(pick.value for pick in (owner, name) if pick is not None)
        if "/" in repository:
            sheet.put("checkpoint.push", repository, *picks)
        else:
            reason = "Write checkpoint.push: OWNER/NAME; here no owner follows from who is logged in."
            for pick in picks:
                sheet.drop(pick, reason)
            sheet.notes.append(f"Nothing is pushed to the hub, for it is not said where. {reason}")
    if private is not None and not private.value and "checkpoint.push" in sheet.tree:
        sheet.put("checkpoint.public", True, private)
    elif private is not None:
        sheet.drop(private, "Repositories are private unless checkpoint.public is true.")


def tracking(sheet: Sheet) -> None:
    """The trackers that there are here too; projects and the like are for their own variables to say."""
    report = sheet.first("track", _trackers)
    track = [name for name in TRACKERS if report is not None and name in report.value]
    if report is not None:
        if "all" in report.value and "tensorboard" not in track:
            track.insert(0, "tensorboard")
        others = [name for name in report.value if name not in (*TRACKERS, "all", "none")]
        if others:
            sheet.put("track", track)
            sheet.origins["track"] = [report.givens[0].shown]
            sheet.refuse(report, f"track has no {', '.join(others)}; metrics.jsonl has everything.")
        else:
            sheet.put("track", track, report)
    for name in TRACKERS:
        for pick in sheet.every(name, flag if name == "tensorboard" else _asks):
            if not pick.value:
                sheet.drop(pick, "Off.")
                continue
            track = [one for one in TRACKERS if one in track or one == name]
            sheet.put("track", track, pick)
    for other in sheet.every("other_tracker", lambda value: value):
        if asks_for_nothing(other.value):
            sheet.drop(other, "Off.")
        else:
            sheet.refuse(other)


def _asks(value: Any) -> bool:
    return not asks_for_nothing(value)


def _trackers(value: Any) -> list[str]:
    if value in (None, False):
        return ["none"]
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(name).lower() for name in names] or ["none"]


def seeds(sheet: Sheet) -> None:
    """One seed."""
    seed, order = (
        sheet.copy("seed", whole),
        sheet.first("data_seed", lambda v: None if v in (None, "None") else whole(v)),
    )
    if order is None:
        return
    if order.value is None or (seed is not None and order.value == seed.value):
        sheet.drop(order, "seed decides.")
    else:
        sheet.refuse(order, "One seed decides everything.")
