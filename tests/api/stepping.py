"""Runs step by step, in a process of their own: what a loop sees, and what is left when it is left.

Prints a JSON object for ``test_running``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tonnage
from tonnage.rundir.directory import complete_checkpoints

SETTINGS: dict[str, Any] = {"launch": {"workers": 1, "threads": 1}}


def main(told: list[str]) -> None:
    folder = Path(told[0])
    os.chdir(folder)
    mask = os.umask(0o002)
    found: dict[str, Any] = {}
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    section = {"train": rows, "max_length": 128, "template": "plain"}
    keys: dict[str, Any] = {"batch": {"sequences": 4}, "steps": 6, "evaluate": {"every": 3, "prompts": 2}}
    section["validation"] = 0.2

    plain = tonnage.start("model", section, output="plain", **keys, **SETTINGS)
    found["plain"] = [step.loss for step in plain]  # no context, to its end
    found["over"] = [plain.is_over, list(plain), plain.run.export.exists()]
    found["evaluations"] = [record["step"] for record in plain.run.evaluations]
    found["name"] = json.loads(Path("plain/data.json").read_text())["sources"][0]["name"]
    found["html"] = plain.run._repr_html_()
    found["summary"] = plain.run.summary()

    file = {**section, "train": "rows.jsonl"}
    left = tonnage.start("model", file, output="left", **keys, **SETTINGS)
    try:
        with left:
            for step in left:
                if step.step == 2:
                    raise ZeroDivisionError
    except ZeroDivisionError:
        found["left"] = [left.is_over, left.run.export.exists(), left.run.is_working]
    before = len(left.run.steps)
    found["samples"] = [[sample.step, sample.answer] for sample in plain.run.samples]
    found["resumed"] = [step.loss for step in left.run.resume().steps]
    found["before"] = before
    found["samples again"] = [[sample.step, sample.answer] for sample in left.run.samples]
    found["again"] = [step.loss for step in left.run.resume().steps]  # nothing is left to train
    found["export"] = left.run.export.exists()

    try:
        tonnage.start("model", file, output="left", **keys, **SETTINGS)
    except tonnage.UserError as error:
        found["refused"] = str(error)
    try:
        left.run.stop()
    except tonnage.UserError as error:
        found["idle"] = str(error)

    often = {**keys, "steps": 5000, "checkpoint": {"every": 1}}
    running = tonnage.start("model", file, output="two", **often, **SETTINGS)
    while not complete_checkpoints(Path("two/checkpoints")):
        next(running)
    others: dict[str, Callable[[], object]] = {
        "second": lambda: tonnage.start("model", file, output="two", **keys, **SETTINGS),
        "resumed meanwhile": lambda: tonnage.open_run("two").resume(),
    }
    for name, begin in others.items():
        try:
            begin()
        except tonnage.UserError as error:
            found[name] = str(error)
    running.run.stop()  # by this very process: it does not wait for itself
    list(running)
    found["stopped"] = running.run.steps[-1].step < 5000
    found["asked"] = Path("two/workers/stop-asked").read_text()
    found["mask"] = os.umask(mask)
    print(json.dumps(found))
