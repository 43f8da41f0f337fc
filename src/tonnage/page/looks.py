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


def workers(run: RunDirectory, count: int) -> list[dict[str, Any]]:
    """Where each worker is, and for how long."""
    lines, now = [], time.time()
    for rank in range(min(count, MOST_WORKERS)):
        position = run.read_position(rank)
        lines.append(
            {
                "rank": rank,
                "phase": position.phase if position.seconds else "",
                "step": position.step,
                "micro_batch": position.micro_batch,
                "num_micro_batches": position.num_micro_batches,
                "since": round(now - position.seconds, 1) if position.seconds else None,
                "alive": round(now - position.alive, 1) if position.alive else None,
            }
        )
    return lines


def first_look(watched: Watched, name: str) -> dict[str, Any]:
    """All that a live view begins with. Raises ``UserError``."""
    line, curves = watched.row(name), watched.curves(name)
    look: dict[str, Any] = plain(
        {
            "row": asdict(line),
            "workers": workers(RunDirectory(watched.folder.path / name), line.workers),
            "curves": curves.measured.thinned(STRETCHES) | {"restarts": watched.restarts(name)},
            "steps": curves.measured.num_steps,
            "version": curves.version,
        }
    )
    return look


def further_looks(watched: Watched, name: str) -> Callable[[], dict[str, Any] | None]:
    """A function that tells what is new since it was called last; None where nothing is. Raises ``UserError``."""
    curves = watched.curves(name)
    steps, version, row_before = curves.measured.num_steps, curves.version, watched.row(name)

    def look() -> dict[str, Any] | None:
        nonlocal steps, version, row_before
        line, curves = watched.row(name), watched.curves(name)
        if line == row_before and line.state != "training":
            return None
        news: dict[str, Any] = {
            "row": asdict(line),
            "workers": workers(RunDirectory(watched.folder.path / name), line.workers),
            "version": curves.version,
            "steps": curves.measured.num_steps,
            "since": steps,
        }
        if curves.version == version and steps < curves.measured.num_steps <= steps + STRETCHES:
            news["curves"] = curves.measured.thinned(STRETCHES, steps)
        steps, version, row_before = curves.measured.num_steps, curves.version, line
        shown: dict[str, Any] = plain(news)
        return shown

    return look


def beside(watched: Watched, names: Sequence[str]) -> dict[str, Any]:
    """Runs side by side: curves, what is set differently, and what they answered. Raises ``UserError``."""
    runs = [watched.folder.run(name) for name in names]
    most = min(STRETCHES, 2 * STRETCHES // len(names))
    configs = [settings(read_config(run.config, check_files=False)) for run in runs]
    answers = [answered_prompts(read_samples(run))[0] for run in runs]
    prompts = dict.fromkeys((question.prompt, question.expected) for prompts in answers for question in prompts)
    by_prompt = [
        {(question.prompt, question.expected): question.answers for question in prompts} for prompts in answers
    ]
    return {
        "runs": [
            {
                "row": asdict(watched.row(name)),
                "curves": watched.curves(name).measured.thinned(most) | {"restarts": watched.restarts(name)},
            }
            for name in names
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
