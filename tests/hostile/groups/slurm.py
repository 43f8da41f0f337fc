"""Names and paths in a job's script, which is written, submitted to a program that stands in for Slurm, and run."""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hostile import mutations
from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock
from hostile.strings import CANARY, LINES, SHELL, recorder

NAMES = ("partition", "account", "qos", "time", "options", "hardware")
WAITS = 3.0
DIRECTIVES = 17
"""Lines for Slurm at most, besides the options."""


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """A run for Slurm with odd names."""
    work = folder / "work"
    launch: dict[str, object] = {"with": "slurm", "workers": 1}
    odd = 0
    for name in (*NAMES, "setup", "python"):
        if chance.randrange(3) == 0:
            launch[name] = _odd(chance)
            odd += name == "options"
    if "setup" in launch:  # which is for the shell on purpose
        launch["setup"] = chance.choice(("module load cuda", "true\ntrue", "echo 'a", "echo ((", "exit 0"))
    launch.setdefault("python", str(folder / "bin" / "python"))
    launch.pop("hardware", None) if chance.randrange(2) else None
    output = _odd(chance) if chance.randrange(2) else "run"
    here = work
    if chance.randrange(3) == 0:
        name = _odd(chance).replace("/", "|").replace("\0", "")[:100]
        if name not in ("", ".", ".."):
            here = work / name
            here.mkdir()
    config = stock.config(launch=launch, output=output)
    (work / "config.yaml").write_text(json.dumps(config))
    programs = folder / "bin"
    recorder(programs / "sbatch", f'cp -- "${{@: -1}}" {programs}/script; echo 7')
    for name in ("srun", "scancel", "python", "module"):
        recorder(programs / name)
    recorder(programs / "scontrol", "echo 'JobId=7 JobState=COMPLETED Reason=None ExitCode=0:0'")

    def runs(ended: Sequence[Ended]) -> str:
        script = programs / "script"
        if not script.exists():
            return ""
        return _run(script.read_text(), folder, here, odd)

    words = [str(work / "config.yaml"), *chance.choice((["--dry-run"], [], []))]
    return Case([["train", *words]], check=runs, before=lambda: os.chdir(here), statuses=(0, 1, 2), may_leave=True)


def _odd(chance: random.Random) -> str:
    return chance.choice((*SHELL, *LINES)) if chance.randrange(4) else mutations.text(chance)[:200]


def _run(script: str, folder: Path, here: Path, options: int) -> str:
    """Run the script where the job would; returns what is wrong."""
    lines = script.split("\n")
    directives = [line for line in lines if line.startswith("#SBATCH")]
    if len(directives) > DIRECTIVES + options:
        return f"{len(directives)} lines for Slurm"
    if any("\n" in one or "\r" in one for one in directives):
        return "a line for Slurm is broken"
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "HOME": str(folder / "home")}
    with suppress(subprocess.TimeoutExpired):  # ``python`` may be anything
        subprocess.run(
            ["bash", "-c", script],
            env=environment,
            cwd=here,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WAITS,
            check=False,
        )
    return "something of the script was carried out" if any(folder.rglob(CANARY)) else ""
