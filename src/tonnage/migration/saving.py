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
    word = strategy.value if strategy is not None else "steps"
    if word not in ("no", "steps"):
        draft.refuse(strategy, f"Every so many steps (checkpoint.every), not {word}.")
    elif word == "no":
        draft.put("checkpoint.every", 0, strategy)
        draft.drop(every, "The strategy is no.")
    elif every is not None and (value := steps_of(draft, every.value)) is None:
        draft.refuse(every, "Steps, not a fraction of all of them.")
    elif every is not None:
        draft.put("checkpoint.every", value, every, strategy)
    elif strategy is not None:
        draft.put("checkpoint.every", DEFAULT_SAVE_STEPS, strategy, note="500 steps by default.")
    else:
        draft.imply_default("checkpoint.every")
    draft.drop(strategy, "Every so many steps.")
    draft.drop(every, "The strategy is not steps.")
    limit = draft.copy(
        "checkpoint.keep",
        lambda value: None if value in (None, "None", "null") else whole(value),
        reason="No limit there; here the latest 2 stay unless checkpoint.keep says more.",
    )
    is_unlimited = limit is None or limit.value is None
    if is_unlimited and draft.tree.get("checkpoint.every") and draft.default("checkpoint.every"):
        draft.note("every checkpoint")


def pushing(draft: Draft) -> None:
    """The hub's repository of the saves, where the other program would push to one."""
    draft.copy("checkpoint.push", text)
    switch, private = draft.first("hub_switch", flag), draft.first("checkpoint.public", flag)
    owner, name = draft.first("hub_owner", text), draft.first("hub_name", text)
    picks = (switch, owner, name)
    repository = "/".join(pick.value for pick in (owner, name) if pick is not None)
    if switch is None or not switch.value:
        draft.drop(picks, "Without push_to_hub nothing is pushed.")
    elif "/" in repository:
        draft.put("checkpoint.push", repository, *picks)
    else:
        reason = "Write checkpoint.push: OWNER/NAME; here no owner follows from who is logged in."
        draft.drop(picks, reason)
        draft.note("pushed nowhere", reason=reason)
    if private is not None and not private.value and "checkpoint.push" in draft.tree:
        draft.put("checkpoint.public", True, private)
    draft.drop(private, "Repositories are private unless checkpoint.public is true.")


def tracking(draft: Draft) -> None:
    """The trackers that there are here too; projects and the like are for their own variables to say."""
    report = draft.first("track", _trackers)
    track = [name for name in TRACKERS if report is not None and name in report.value]
    if report is not None:
        if "all" in report.value and "tensorboard" not in track:
            track.insert(0, "tensorboard")
        unknown = [name for name in report.value if name not in (*TRACKERS, "all", "none")]
        if unknown:
            draft.put("track", track)
            draft.origins["track"] = [report.settings[0].shown]
            draft.refuse(report, f"track has no {', '.join(unknown)}; metrics.jsonl has everything.")
        else:
            draft.put("track", track, report)
    for name in TRACKERS:
        for pick in draft.every(name, flag if name == "tensorboard" else _asks):
            if pick.value:
                track = [tracker for tracker in TRACKERS if tracker in track or tracker == name]
                draft.put("track", track, pick)
            draft.drop(pick, "Off.")
    others = draft.every("other_tracker", _asks)
    draft.refuse(other for other in others if other.value)
    draft.drop(others, "Off.")


def _asks(value: Any) -> bool:
    return not asks_for_nothing(value)


def _trackers(value: Any) -> list[str]:
    if value in (None, False):
        return ["none"]
    names = value if isinstance(value, list) else str(value).replace(",", " ").split()
    return [str(name).lower() for name in names] or ["none"]
