"""Names and paths in manifests, whose scripts are run with programs that stand in for others."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from hostile import mutations
from hostile.case import Case
from hostile.forking import Ended
from hostile.stock import Stock
from hostile.strings import CANARY, LINES, SHELL, recorder

WAITS = 1.0


def make(chance: random.Random, folder: Path, stock: Stock) -> Case:
    """Manifests of a run with odd names."""
    work = folder / "work"

    def odd(usual: str, often: int = 3) -> str:
        if chance.randrange(often):
            return usual
        found = chance.choice((*SHELL, *LINES)) if chance.randrange(4) else mutations.text(chance)[:300]
        return found.replace("\0", "") or "x"

    launch = chance.choice(
        ({}, {"with": "ray", "workers": [1, 2]}, {"with": "ray", "runtime_env": {"pip": [odd("x")]}})
    )
    config = stock.config(output=odd("run", 2), model=odd("models/x"), launch=launch)
    (work / "config.yaml").write_text(json.dumps(config))
    words = [
        "launch",
        "kube",
        "config.yaml",
        "--to",
        "manifests",
        f"--image={odd('registry/x:1', 4)}",
        f"--claim={odd('c', 4)}",
    ]
    for name, usual in (("mount", "/shared"), ("memory", "64Gi"), ("namespace", "n")):
        if chance.randrange(3) == 0:
            words.append(f"--{name}={odd(usual, 2)}")
    programs = folder / "bin"
    for name in ("torchrun", "tonnage", "ray", "python", "python3"):
        recorder(programs / name)

    def runs(ended: Sequence[Ended]) -> str:
        for path in sorted((work / "manifests").glob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text()):
                for script in _scripts(document):
                    if wrong := _run(script, folder):
                        return wrong
        return ""

    return Case([words], check=runs)


def _scripts(given: Any) -> Iterator[list[str]]:
    """Every command of a manifest, and every file that it holds and that is a script."""
    if isinstance(given, dict):
        for key, inner in given.items():
            if key == "command" and isinstance(inner, list):
                yield [str(word) for word in inner]
            elif key == "entrypoint" and isinstance(inner, str):
                yield ["bash", "-c", inner]
            else:
                yield from _scripts(inner)
    elif isinstance(given, list):
        for inner in given:
            yield from _scripts(inner)


def _run(command: list[str], folder: Path) -> str:
    command = [word.replace("$$", "$") for word in command]  # as Kubernetes does it
    environment = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "JOB_COMPLETION_INDEX": "0", "HOME": str(folder / "home")}
    try:
        subprocess.run(
            command,
            env=environment,
            cwd=folder / "work",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=WAITS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pass  # some wait for another pod
    except OSError as error:
        return f"a command cannot be run: {error}"
    return "something of a manifest was carried out" if any(folder.rglob(CANARY)) else ""
