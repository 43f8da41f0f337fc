"""Walk settings on pretended machines, and say what became of each."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import statistics
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from device.stand_in.environments import FOLDER
from device.stand_in.machine import Pretended, Served
from device.stand_in.settings import DONE, Setting

RACES = re.compile(r"race check: (\d+) operations, (\d+) kinds of races")
TRACEBACK = "Traceback (most recent call last)"


@dataclass
class Walked:
    """What became of a setting."""

    name: str
    outcome: str
    """``as expected``, or what was found instead."""
    seconds: float
    told: str = ""
    """The last of what it said, where that was not expected."""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def went_well(self) -> bool:
        """Whether it ended as expected."""
        return self.outcome == "as expected"

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        told = {"told": self.told} if self.told else {}
        return {"outcome": self.outcome, "seconds": round(self.seconds, 1), **self.facts, **told}


def folder_of(work: Path, setting: Setting) -> Path:
    """Where a setting's walk writes, under ``work``."""
    return work / "".join(letter if letter.isalnum() else "-" for letter in setting.name)


def make_models(folder: Path, version: str) -> None:
    """Models and configs for the settings, in ``folder``. Raises ``SystemExit`` where that fails."""
    command = [str(FOLDER / version / "bin" / "python"), "-m", "device.stand_in.models", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(command, env=Pretended(watched_by=()).environment(version), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)


def walk(setting: Setting, served: Served, models: Path, work: Path) -> Walked:
    """Walk one setting; what it writes is under ``work``, anew."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    names = {
        "config": str(models / f"{setting.config}.yaml"),
        "changes": setting.changes,
        "run": str(work / "run"),
        "rows": str(models / "rows.jsonl"),
        "folder": str(work),
        "models": str(models),
    }
    began, status, said = time.monotonic(), 0, ""
    for number, command in enumerate((setting.command, *setting.after)):
        status, said = served.run(
            setting.on,
            shlex.split(command.format(**names)),
            notes=work / f"notes-{number}",
            folder=work,
            seconds=setting.seconds,
            given=setting.given,
        )
        if status:
            break
    outcome = _outcome(setting, setting.expected_of.get(served.version, setting.expected), status, said)
    facts = {**_planned(work / "run"), **_counted(work / "notes-0"), **_raced(work)}
    if facts.get("races"):
        outcome = f"{facts['races']} kinds of races"
    told = "" if outcome == "as expected" else said[-1500:]
    return Walked(setting.name, outcome, time.monotonic() - began, told, facts)


def _outcome(setting: Setting, expected: str, status: int, said: str) -> str:
    if TRACEBACK in said:
        return "a traceback"
    if status == 124:
        return f"not done after {setting.seconds:.0f} s"
    if expected == DONE:
        return "as expected" if status == 0 else f"exit status {status}"
    if status == 0:
        return "done, not refused"
    return "as expected" if expected in " ".join(said.split()) else "refused in other words"


def _planned(run: Path) -> dict[str, Any]:
    """Bytes that the run's plan holds, without what no allocator sees."""
    try:
        choice = json.loads((run / "plan.json").read_text())["choice"]
    except (OSError, ValueError, KeyError):
        return {}
    peak = max(sum(one["bytes"].values()) for one in choice["instants"])
    return {"planned_bytes": round(peak)}


def notes_of(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What looked on has written."""
    return [json.loads(line) for path in sorted(folder.glob(f"{kind}-*.jsonl")) for line in path.open()]


def steps_of(notes: list[dict[str, Any]], rank: int = 0) -> list[dict[str, dict[str, int]]]:
    """What was counted in each step of a rank, by phase: forward, backward, update and so on."""
    steps = list[dict[str, dict[str, int]]]()
    for note in notes:
        if note["rank"] != rank:
            continue
        if note["phase"] == "step":
            steps.append({})
        if not steps or note["phase"] in ("save", "evaluate", "answer"):
            continue
        name = note["phase"].removeprefix("first ")
        found = steps[-1].setdefault(name, Counter())
        for what in ("launches", "synchronisations", "copies", "collectives"):
            found[what] += note[what]
    return [step for step in steps if "update" in step]


def _counted(folder: Path) -> dict[str, Any]:
    """Launches and synchronisations of a step that is neither the first nor the last, and peaks of the allocator."""
    notes = notes_of(folder, "counts")
    if not notes:
        return {}
    facts: dict[str, Any] = {
        "allocated_bytes": max(note["allocated"] for note in notes),
        "reserved_bytes": max(note["reserved"] for note in notes),
    }
    steps = steps_of(notes)[1:]
    if steps:
        for what in ("launches", "synchronisations", "copies", "collectives"):
            totals = [sum(phase[what] for phase in step.values()) for step in steps]
            facts[f"{what}_a_step"] = round(statistics.median(totals))
    return facts


def _raced(work: Path) -> dict[str, Any]:
    found = [RACES.search(path.read_text()) for path in work.glob("run/workers/rank-*.log")]
    checks = [one for one in found if one]
    if not checks:
        return {}
    return {"operations": sum(int(one[1]) for one in checks), "races": sum(int(one[2]) for one in checks)}
