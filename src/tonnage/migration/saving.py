"""What a run leaves behind: its directory, checkpoints, a repository of the hub, trackers."""

from __future__ import annotations

from typing import Any

from tonnage.migration.draft import Draft
from tonnage.migration.keys import asks_for_nothing
from tonnage.migration.training import per_epoch, steps_of
from tonnage.migration.values import flag, number, occasion, text, whole

DEFAULT_SAVE_STEPS = 500
TRACKERS = ("tensorboard", "wandb", "mlflow", "trackio")


def saving(draft: Draft) -> None:
    """Directory of the run, and its checkpoints."""
    draft.copy("output", text)
    strategy, every = draft.first("save_strategy", occasion), draft.first("checkpoint.every", number)
    if every is None and (an_epoch := per_epoch(draft, "saves_per_epoch")) is not None:
        if an_epoch[1] >= 1:
            draft.drop(an_epoch[0], "A run is saved at its end.")
        elif (value := steps_of(draft, an_epoch[1])) is not None:
            draft.put("checkpoint.every", value, an_epoch[0])
        else:
            draft.drop(an_epoch[0], "A run is saved as often as is worth it (checkpoint.every: auto), and at its end.")
    draft.drop(draft.every("saves_per_epoch", number), "save_steps counts.")
    match strategy.value if strategy is not None else "steps":
        case "no":
            assert strategy is not None
            draft.put("checkpoint.every", 0, strategy)
            draft.drop(every, "The strategy is no.")
        case "steps" if every is not None:
            value = steps_of(draft, every.value)
            if value is None:
                draft.refuse(every, "Steps, not a fraction of all of them.")
            else:
                draft.put("checkpoint.every", value, every, strategy)
        case "steps":
            if strategy is not None:
                draft.put("checkpoint.every", DEFAULT_SAVE_STEPS, strategy, note="500 steps by default.")
            else:
                draft.imply_default("checkpoint.every")
        case other:
            assert strategy is not None
            draft.refuse(strategy, f"Every so many steps (checkpoint.every), not {other}.")
    draft.drop(strategy, "Every so many steps.")
    draft.drop(every, "The strategy is not steps.")
    limit = draft.first("checkpoint.keep", lambda value: None if value in (None, "None", "null") else whole(value))
    if limit is not None and limit.value is not None:
        draft.put("checkpoint.keep", limit.value, limit)
    elif limit is not None:
        draft.drop(limit, "No limit there; here the latest 2 stay unless checkpoint.keep says more.")
    is_unlimited = limit is None or limit.value is None
    if is_unlimited and draft.tree.get("checkpoint.every") and draft.default("checkpoint.every"):
        draft.notes.append(
            "transformers keeps every checkpoint unless save_total_limit is set; checkpoint.keep is 2 by default."
        )


def pushing(draft: Draft) -> None:
    """The hub's repository of the saves, where the other program would push to one."""
    draft.copy("checkpoint.push", text)
    switch, private = draft.first("hub_switch", flag), draft.first("checkpoint.public", flag)
    owner, name = draft.first("hub_owner", text), draft.first("hub_name", text)
    picks = (switch, owner, name)
    if switch is None or not switch.value:
        draft.drop(picks, "Without push_to_hub nothing is pushed.")
    else:
        repository = "/".join(pick.value for pick in (owner, name) if pick is not None)
        if "/" in repository:
            draft.put("checkpoint.push", repository, *picks)
        else:
            reason = "Write checkpoint.push: OWNER/NAME; here no owner follows from who is logged in."
            draft.drop(picks, reason)
            draft.notes.append(f"Nothing is pushed to the hub, for it is not said where. {reason}")
    if private is not None and not private.value and "checkpoint.push" in draft.tree:
        draft.put("checkpoint.public", True, private)
    elif private is not None:
        draft.drop(private, "Repositories are private unless checkpoint.public is true.")


def tracking(draft: Draft) -> None:
    """The trackers that there are here too; projects and the like are for their own variables to say."""
    report = draft.first("track", _trackers)
    track = [name for name in TRACKERS if report is not None and name in report.value]
    if report is not None:
        if "all" in report.value and "tensorboard" not in track:
            track.insert(0, "tensorboard")
        others = [name for name in report.value if name not in (*TRACKERS, "all", "none")]
        if others:
            draft.put("track", track)
            draft.origins["track"] = [report.settings[0].shown]
            draft.refuse(report, f"track has no {', '.join(others)}; metrics.jsonl has everything.")
        else:
            draft.put("track", track, report)
    for name in TRACKERS:
        for pick in draft.every(name, flag if name == "tensorboard" else _asks):
            if not pick.value:
                draft.drop(pick, "Off.")
                continue
            track = [tracker for tracker in TRACKERS if tracker in track or tracker == name]
            draft.put("track", track, pick)
    for other in draft.every("other_tracker", lambda value: value):
        if asks_for_nothing(other.value):
            draft.drop(other, "Off.")
        else:
            draft.refuse(other)


def _asks(value: Any) -> bool:
    return not asks_for_nothing(value)


def _trackers(value: Any) -> list[str]:
    if value in (None, False):
        return ["none"]
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(name).lower() for name in names] or ["none"]
