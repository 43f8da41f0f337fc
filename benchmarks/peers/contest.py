"""Contestants in turn: each a few steps, then the next, round after round, so that whatever the machine does besides
happens to all of them. Timed from outside, from the command to the answer.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import ANSWERS, COMMANDS

PEERS_PYTHON = Path(__file__).parent.parent / ".peers" / "venv" / "bin" / "python"
"""Of the environment that ``benchmarks/peers/environment.py`` makes."""


@dataclass
class Contestant:
    """One program, in as many processes as it has ranks. A context: at its end no process of it is left."""

    name: str
    command: Sequence[str]
    log: Path
    ranks: int = 1
    threads: int = 1
    """Of each rank."""
    environment: dict[str, str] = field(default_factory=dict)
    """Besides that of this process."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What it says of itself when it is ready."""
    seconds: list[float] = field(default_factory=list)
    """A step, of every turn."""
    losses: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Tokens a second of every turn."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of all its threads and ranks, a step, of every turn: what is left to compare where others have the CPUs too."""
    peak_bytes: int = 0
    """Largest sum over the ranks of their peaks."""

    def __enter__(self) -> Contestant:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._processes, self._pipes, self._stack = [], [], ExitStack()
        output = self._stack.enter_context(self.log.open("w"))
        # The tools of an environment, such as ninja, are beside its Python.
        environment = {**os.environ, "PATH": f"{Path(self.command[0]).parent}:{os.environ['PATH']}"}
        for rank in range(self.ranks):
            (their_commands, commands), (answers, their_answers) = os.pipe(), os.pipe()
            place: dict[str, object] = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": self.ranks,
                "LOCAL_WORLD_SIZE": self.ranks,
            }
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": self.threads}
            place |= {COMMANDS: their_commands, ANSWERS: their_answers}
            process = subprocess.Popen(
                self.command,
                env=environment | self.environment | {name: str(value) for name, value in place.items()},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(their_commands, their_answers),
            )
            os.close(their_commands)
            os.close(their_answers)
            self._processes.append(process)
            self._pipes.append((os.fdopen(commands, "w"), os.fdopen(answers)))
        return self

    def __exit__(self, *_: object) -> None:
        for commands, answers in self._pipes:
            commands.close()
            answers.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._stack.close()

    def get_ready(self) -> None:
        """Wait until it is built."""
        self.facts = self._answers()[0]["ready"]

    def take(self, steps: int, *, counts: bool = True) -> None:
        """Let it take steps; a turn that does not count warms up."""
        began = time.perf_counter()
        for commands, _ in self._pipes:
            commands.write(json.dumps({"steps": steps}) + "\n")
            commands.flush()
        answers = self._answers()
        seconds = time.perf_counter() - began
        self.losses += answers[0]["losses"]
        self.peak_bytes = max(self.peak_bytes, sum(answer["peak_bytes"] for answer in answers))
        if counts:
            self.seconds.append(seconds / steps)
            self.cpu_seconds.append(sum(answer["cpu_seconds"] for answer in answers) / steps)
            self.tokens += answers[0]["tokens"]
            self.rates.append(sum(answers[0]["tokens"]) / seconds)
        spent = sum(answer["cpu_seconds"] for answer in answers) / steps
        rate = sum(answers[0]["tokens"]) / seconds
        told = f"{seconds / steps:.2f} s a step, {rate:.0f} tokens/s, {spent:.2f} s of CPU"
        print(f"  {self.name:<28} {told}, loss {self.losses[-1]:.4f}", flush=True)

    def _answers(self) -> list[dict[str, Any]]:
        lines = [answers.readline() for _, answers in self._pipes]
        if not all(lines):
            tail = "\n".join(self.log.read_text().splitlines()[-40:])
            raise SystemExit(f"{self.name} has ended:\n{tail}")
        return [json.loads(line) for line in lines]

    def result(self) -> dict[str, Any]:
        """Its figures."""
        return {
            "step_seconds_median": statistics.median(self.seconds),
            "step_seconds": [round(one, 3) for one in self.seconds],
            "cpu_seconds_median": statistics.median(self.cpu_seconds),
            "tokens_per_second_median": statistics.median(self.rates),
            "tokens_per_second_min": min(self.rates),
            "tokens_per_second_max": max(self.rates),
            "peak_bytes": self.peak_bytes,
            "losses": self.losses,
            **self.facts,
        }


def compete(contestants: Sequence[Contestant], rounds: int, steps: int, warm_up: int = 1, settling: int = 0) -> float:
    """``rounds`` turns of ``steps`` for everybody, after ``warm_up`` steps that do not count, nor do the ``settling``
    ones that each turn begins with.

    Returns the part of this machine's CPU time that others had meanwhile: with much of it, only ratios mean something.
    """
    began, busy, ours = time.perf_counter(), _busy_seconds(), _our_seconds()
    _compete(contestants, rounds, steps, warm_up, settling)
    others = (_busy_seconds() - busy) - (_our_seconds() - ours)
    return max(0.0, others / (time.perf_counter() - began) / (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """CPU time that everybody has had, in user and system mode."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:4] if Path("/proc/stat").exists() else ["0"]
    return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK")


def _our_seconds() -> float:
    """CPU time of this process and its children that have ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in found)


def _compete(contestants: Sequence[Contestant], rounds: int, steps: int, warm_up: int, settling: int) -> None:
    with ExitStack() as stack:
        for contestant in contestants:
            stack.enter_context(contestant)
            contestant.get_ready()
            print(f"{contestant.name} is ready: {contestant.facts}", flush=True)
            contestant.take(warm_up, counts=False)
        for number in range(rounds):
            print(f"round {number + 1} of {rounds}", flush=True)
            for contestant in contestants:
                if settling:
                    contestant.take(settling, counts=False)
                contestant.take(steps)


def largest_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The largest relative difference of two loss curves, step by step; infinite if one is not finite."""
    pairs = list(zip(ours, theirs, strict=False))
    if not all(math.isfinite(one) for pair in pairs for one in pair):
        return math.inf
    return max(abs(mine - other) / abs(other) for mine, other in pairs)


def machine() -> dict[str, Any]:
    """Facts about this machine that figures depend on."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    flags = next((line.split(":")[1].split() for line in cpuinfo if line.startswith("flags")), [])
    told = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": next((line.split(":")[1].strip() for line in cpuinfo if line.startswith("model name")), "?"),
        "architecture": platform.machine(),
        "instructions": [name for name in told if name in flags],
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def our_command(*words: str) -> list[str]:
    """A module of this folder, in the environment of tonnage."""
    return [sys.executable, "-m", *words]


def peers_command(*words: str) -> list[str]:
    """A module of this folder, in the peers' environment."""
    if not PEERS_PYTHON.exists():
        raise SystemExit("no environment with the peers: python benchmarks/peers/environment.py makes it")
    return [str(PEERS_PYTHON), "-m", *words]


def write_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Print the result, and write it."""
    print(json.dumps(result, indent=2))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
