"""A process that carries out one ``tonnage`` command line, for ``forked.tonnage``.

It is told a folder: in it lie ``asked.json`` (words, directory and environment) and ``in`` (its standard input), and it
leaves ``out``, ``err`` and ``status`` there.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

import entry

for room in (entry.script.module.rpartition(".")[0], "tonnage.decide"):
    for found in pkgutil.walk_packages(import_module(room).__path__, f"{room}."):
        import_module(found.name)  # with most of what commands import when they need it


def main(told: list[str]) -> None:
    folder = Path(told[0])
    asked = json.loads((folder / "asked.json").read_text())
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["cwd"])
    for descriptor, name, how in ((0, "in", os.O_RDONLY), (1, "out", os.O_WRONLY), (2, "err", os.O_WRONLY)):
        opened = os.open(folder / name, how | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.argv = ["tonnage", *asked["words"]]
    status: str | int | None = 0
    try:
        entry.main()
    except SystemExit as ended:
        status = ended.code
    (folder / "status").write_text(str(int(status or 0)))
