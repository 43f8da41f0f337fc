"""What the page is told of one run, in plain values that JSON can say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tonnage.config import read_config
from tonnage.files.visible import visible
from tonnage.page.watched import Watched
from tonnage.planning.words import size
from tonnage.report.curves import Measured
from tonnage.report.gathered import answered_prompts
from tonnage.report.settings import differences, settings
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of
from tonnage.rundir.samples import read_samples

STRETCHES = 600
"""Of the curves of a run that is looked at."""
MOST_WORKERS = 128
"""Whose places are told."""
MOST_FILES = 10_000
"""Of a checkpoint, that are counted."""


def plain(value: Any) -> Any:
    """The same with all text made safe to show."""
    match value:
        case str():
            return visible(value)
        case dict():
            return {key: inner if key == "run" else plain(inner) for key, inner in value.items()}
        case list() | tuple():
            return [plain(inner) for inner in value]
        case _:
            return value


def first_look(watched: Watched, name: str) -> dict[str, Any]:
    """All that a live view begins with. Raises ``UserError``."""
    look, measured = _look(watched, name)
    curves = measured.thinned(STRETCHES) | {"restarts": watched.restarts(name)}
    return look | {"curves": curves, "time": time.time()}


def further_looks(watched: Watched, name: str, first: dict[str, Any]) -> Callable[[], dict[str, Any] | None]:
    """A function that tells what is new since it was called last, or the ``first`` look; None where nothing is."""
    before = {key: value for key, value in first.items() if key not in ("curves", "time")}

    def look() -> dict[str, Any] | None:
        nonlocal before
        now, measured = _look(watched, name)
        before, since = now, before
        if now == since:
            return None
        steps, news = since["steps"], now | {"since": since["steps"], "time": time.time()}
        if now["version"] == since["version"] and steps < now["steps"] <= steps + STRETCHES:
            news["curves"] = measured.thinned(STRETCHES, steps)
        return news

    return look


def _look(watched: Watched, name: str) -> tuple[dict[str, Any], Measured]:
    """What a run and its workers do now, and its steps. Raises ``UserError``."""
    line, curves = watched.look(name)
    run = RunDirectory(watched.folder.path / name)
    positions = [run.read_position(rank) for rank in range(min(line.workers, MOST_WORKERS))]
    look: dict[str, Any] = plain(
        {
            "row": asdict(line),
            "workers": [asdict(position) for position in positions],
            "steps": curves.measured.num_steps,
            "version": curves.version,
        }
    )
    return look, curves.measured


def beside(watched: Watched, names: Sequence[str]) -> dict[str, Any]:
    """Runs side by side: curves, what is set differently, and what they answered. Raises ``UserError``."""
    runs, looks = [watched.folder.run(name) for name in names], [watched.look(name) for name in names]
    most = min(STRETCHES, 2 * STRETCHES // len(names))
    configs = [settings(read_config(run.config, check_files=False)) for run in runs]
    answers = [answered_prompts(read_samples(run))[0] for run in runs]
    prompts = dict.fromkeys((question.prompt, question.expected) for prompts in answers for question in prompts)
    by_prompt = [
        {(question.prompt, question.expected): question.answers for question in prompts} for prompts in answers
    ]
    return {
        "runs": [
            {"row": asdict(row), "curves": curves.measured.thinned(most) | {"restarts": watched.restarts(name)}}
            for name, (row, curves) in zip(names, looks, strict=True)
        ],
        "differences": differences(configs),
        "samples": [
            {
                "prompt": prompt,
                "expected": expected,
                "answers": [mine.get((prompt, expected), []) for mine in by_prompt],
            }
            for prompt, expected in prompts
        ],
    }


def saved(run: RunDirectory, folder: Path) -> list[dict[str, Any]]:
    """Checkpoints and the export of a run, with what they take."""
    places = [(path, f"checkpoint of step {step_of(path):,}") for path in complete_checkpoints(run.checkpoints)]
    places += [(run.export, "export")] if run.export.is_dir() else []
    lines = []
    for path, kind in places:
        sizes = list(_sizes(path))
        lines.append(
            {
                "path": os.path.relpath(path, folder),
                "kind": kind,
                "bytes": sum(sizes),
                "size": size(sum(sizes)),
                "files": len(sizes),
                "changed": path.stat().st_mtime,
            }
        )
    return lines


def _sizes(path: Path) -> Iterator[int]:
    for number, (folder, _, names) in enumerate(os.walk(path)):
        if number > MOST_FILES:
            return
        for name in names[:MOST_FILES]:
            try:
                yield (Path(folder) / name).lstat().st_size
            except OSError:
                continue
