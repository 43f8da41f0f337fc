"""Rows as arguments of the Trainer and of TRL name them become sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tonnage.migration.draft import Draft, Pick
from tonnage.migration.programs import TRL, TUTORIAL
from tonnage.migration.values import number, text, texts, words

USUAL_TEXT_COLUMN = "text"


def rows(draft: Draft, *, evaluates: bool) -> None:
    """Sources to train on and to evaluate on."""
    column = draft.first("text_column", text)
    columns: dict[str, Any] = {}
    if column is not None and column.value != USUAL_TEXT_COLUMN:
        columns = {"columns": {USUAL_TEXT_COLUMN: column.value}}
    both = draft.first("splits", _splits)
    split = draft.first("train_split", text) or (None if both is None else Pick(both.value[0], both.settings))
    hub, files = draft.first("dataset", text), draft.first("train_file", texts)
    subset = draft.first("subset", text)
    named = {"name": subset.value} if subset is not None and hub is not None else {}
    mixer, mixture = _mixer(draft, evaluates=evaluates), _mixture(draft)
    if mixer and mixture:
        draft.drop(mixture[1], "dataset_mixer counts.")
    mixture = mixer or mixture
    sources: list[dict[str, Any]] = []
    picks: Sequence[Pick[Any] | None] = ()
    if mixture:
        sources, picks = mixture
        draft.drop(hub, "TRL ignores it where datasets are listed.")
    elif hub is not None:
        part = {"split": split.value} if split is not None and split.value != "train" else {}
        sources = [{"path": hub.value} | part | named]
        picks = [hub, split, subset]
    elif files is not None:
        sources, picks = [{"path": path} for path in files.value], [files]
    if sources:
        used = column if columns else None
        draft.put("data.train", _short([source | columns for source in sources]), *picks, used)
        draft.drop(files, "A data set of the hub is named.")
    draft.drop((split, subset), "No data set of the hub is named.")
    draft.drop(column, "The usual name." if not columns else "No rows are named.")
    second = Pick(both.value[1], both.settings) if both is not None and len(both.value) > 1 else None
    _validation(draft, hub, named, columns, second, evaluates=evaluates)
    draft.drop(both, "No data set of the hub is named, or others are evaluated.")


def _splits(value: Any) -> list[str]:
    names = words(value)
    if not 1 <= len(names) <= 2:
        raise ValueError("is neither a split to train on nor two, the second to evaluate on")
    return names


def _short(sources: list[dict[str, Any]]) -> Any:
    """One source that is no more than its path, as the path."""
    return sources[0]["path"] if len(sources) == 1 and set(sources[0]) == {"path"} else sources


def _mixture(draft: Draft) -> tuple[list[dict[str, Any]], list[Pick[Any]]] | None:
    """TRL's list of data sets, and alignment-handbook's."""
    picks: list[Pick[Any]] = []
    sources: dict[str, dict[str, Any]] = {}
    for quantity, ours, parse in (
        ("mixture_path", "path", text),
        ("mixture_name", "name", text),
        ("mixture_split", "split", text),
        ("mixture_weight", "weight", number),
    ):
        for pick in draft.every(quantity, parse):
            place = next((part for part in pick.settings[0].name.split(".") if part.isdecimal()), "0")
            sources.setdefault(place, {})[ours] = pick.value
            picks.append(pick)
    whole_ones = [source for source in sources.values() if "path" in source]
    shares = draft.every("mixture_fraction", number)
    if len(whole_ones) < 2:
        draft.drop(shares, "A share of one data set is all of it.")
    draft.refuse(
        shares,
        "A share of the mixture's rows, so what it takes of a data set follows from how many rows each has: write "
        "weight for each source (0.5 is half of its rows).",
    )
    if not whole_ones:
        draft.drop(picks, "No data set is named.")
        return None
    return whole_ones, picks


def _mixer(draft: Draft, *, evaluates: bool) -> tuple[list[dict[str, Any]], list[Pick[Any]]] | None:
    """alignment-handbook's earlier list: a part of the rows of each data set, and splits by what their names say."""
    parts = draft.every("mixer", number)
    splits, names = draft.first("mixer_splits", texts), draft.first("mixer_names", texts)
    if names is not None and len(names.value) != len(parts):
        draft.refuse(names, f"One for each of the {len(parts)} data sets.")
        names = None
    if refused := [part for part in parts if not 0 < part.value <= 1]:
        draft.refuse(refused, "A part of the rows, up to 1.")
    read = splits.value if splits is not None else ["train", "test"]
    uses = [next((use for use in ("train", "test") if use in split), "") for split in read]
    if refused or not parts or uses.count("train") != 1 or "" in uses:
        draft.drop(None if parts else (splits, names), "No data sets are named in dataset_mixer.")
        draft.refuse((*parts, splits, names), "Of each data set one split is trained on, with train in its name.")
        return None
    by_use: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for at, part in enumerate(parts):
        name: dict[str, Any] = {} if names is None else {"name": names.value[at]}
        for split, use in zip(read, uses, strict=True):
            source = {"path": part.settings[0].name.removeprefix("dataset_mixer."), **name}
            source |= {"split": split} if split != "train" else {}
            by_use[use].append(source | ({"first": part.value} if use == "train" and part.value < 1 else {}))
    if evaluates and by_use["test"]:
        draft.put("data.validation", by_use["test"], *parts, splits, names)
    return by_use["train"], [pick for pick in (*parts, splits, names) if pick is not None]


def _validation(
    draft: Draft,
    hub: Pick[str] | None,
    named: Mapping[str, str],
    columns: Mapping[str, Any],
    second: Pick[str] | None,
    *,
    evaluates: bool,
) -> None:
    files = draft.first("validation_file", texts)
    fraction, percentage = draft.first("validation_fraction", number), draft.first("validation_percentage", number)
    split = draft.first("test_split", text) or second
    if files is not None:
        draft.put("data.validation", _short([{"path": path, **columns} for path in files.value]), files)
    elif fraction is not None and fraction.value < 1:
        draft.put("data.validation", fraction.value, fraction)
    elif percentage is not None:
        draft.put("data.validation", percentage.value / 100, percentage)
    elif evaluates and hub is not None and split is not None:
        draft.put("data.validation", [{"path": hub.value, "split": split.value, **named, **columns}], split)
    elif evaluates and hub is not None and draft.program in (TRL, TUTORIAL):
        source = [{"path": hub.value, "split": "test", **named, **columns}]
        because = "dataset_test_split test by default" if draft.program is TRL else "the script evaluates split test"
        draft.imply("data.validation", source, because)
    if fraction is not None and fraction.value > 1 and fraction.value == int(fraction.value):
        sentence = f"{fraction.value:g} rows as a fraction of all: {fraction.value:g} / their number"
        draft.leave_open("data.validation", sentence, fraction, example="0.01")
    draft.refuse(fraction, "A fraction of the rows, below 1.")
    are_others = "data.validation" in draft.tree
    draft.drop((percentage, split), "Other rows are evaluated." if are_others else "Nothing is evaluated.")
