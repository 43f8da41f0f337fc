"""Run a command as if this machine had GPUs."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from device.stand_in.build import BUILT, COMPILER, LIBRARY
from device.stand_in.cards import CARDS
from device.stand_in.environments import FOLDER, HERE, ROOT


@dataclass(frozen=True)
class Pretended:
    """A machine that is not there."""

    card: str = "H100"
    devices: int = 1
    host_gb: int = 0
    """Memory of the host that plans count with; 0 is what this machine has."""
    watched_by: tuple[str, ...] = ("counts",)
    """Modules of ``hook/`` that look on."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Other variables of the environment."""

    def environment(self, version: str, notes: Path | None = None) -> dict[str, str]:
        """Variables with which a program sees the machine, and runs on a version of torch. What looks on writes into
        the directory ``notes``."""
        tonnage = Path(os.environ.get("STAND_IN_SOURCES", ROOT / "src"))
        cache = BUILT / "cache" / f"{version}-{self.card}"
        cache.mkdir(parents=True, exist_ok=True)
        return {
            **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
            "LD_PRELOAD": f"{COMPILER} {LIBRARY}",
            "LD_LIBRARY_PATH": str(BUILT),
            "TRITON_LIBCUDA_PATH": str(BUILT),
            "PATH": os.pathsep.join([str(HERE / "hook"), str(FOLDER / version / "bin"), os.environ["PATH"]]),
            "PYTHONPATH": os.pathsep.join(map(str, (HERE / "hook", tonnage, ROOT / "tests"))),
            "TONNAGE_CACHE": str(cache),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
            "STAND_IN_DEVICES": str(self.devices),
            "STAND_IN_HOST_GB": str(self.host_gb or ""),
            "STAND_IN_WATCHED_BY": " ".join(self.watched_by),
            "STAND_IN_NOTES": "" if notes is None else str(notes),
            **CARDS[self.card].settings(),
            **self.more,
        }


class Served:
    """Commands of tonnage that are carried out on pretended machines, on a version of torch, one after another.

    A context: on leaving it the process that carries them out ends.
    """

    def __init__(self, version: str, python: str = "") -> None:
        self.version = version
        self._server = subprocess.Popen(
            [python or str(FOLDER / version / "bin" / "python"), str(HERE / "hook" / "server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=self.environment(Pretended(watched_by=())),
        )

    def environment(self, on: Pretended, notes: Path | None = None) -> dict[str, str]:
        """Variables of a command on a machine; what looks on writes into the directory ``notes``."""
        return on.environment(self.version, notes)

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def run(
        self, on: Pretended, words: Sequence[str], *, notes: Path, folder: Path, seconds: float, given: str = ""
    ) -> tuple[int, str]:
        """Exit status and all output of ``tonnage WORDS`` in a ``folder``; 124 where it took longer than ``seconds``.

        ``given`` is its input; what looks on writes into ``notes``.
        """
        notes.mkdir(parents=True, exist_ok=True)
        (notes / "given").write_text(given)
        asked = {
            "words": list(words),
            "directory": str(folder),
            "environment": self.environment(on, notes),
            "given": str(notes / "given"),
            "output": str(notes / "said"),
            "seconds": seconds,
        }
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        assert answer, "the process that carries out commands has ended"
        return int(answer), (notes / "said").read_text(errors="replace")
