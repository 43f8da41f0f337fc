"""Runs that are killed at random instants and go on until they are done; they must end as if nobody had killed them.

    python tests/pulse/killing.py --kills 200 [--seed 0] [--jobs 2] [--tier device|disk] [--only 17] [--result FILE]
    python tests/pulse/killing.py --kills 20 --adapter '{"rank": 4, "quantize": "nf4", "dropout": 0.1}'

Every run is ``tonnage train`` of a tiny model on one or two workers, with a checkpoint every other step. Something of
it is killed with SIGKILL: its launcher, one of its workers, the launcher's process group, everything at once, or the
launcher and its guardian, so that nobody is left to end the workers. That happens in a phase that is drawn (while data
are prepared, while the run starts, in a step, in a save, in the export at the end), at a random instant of it: some
time after the first file of the phase has appeared. In which phase it was is read from what lies there afterwards, and
counted. Then ``tonnage train --resume``, at once or when all is quiet, with as many workers or the other number of
them; it may be killed as well. Where there is nothing to go on from yet, the same command is given again.

What must hold in the end, for every run:

* Every record of a step and of an evaluation, every file of the export (the card, which tells times, apart), every
  tensor of the last checkpoint with those of the optimizer, and the cursor are those of a run that nobody killed: bit
  for bit. For a run that went on with another number of workers that is one that did so after the same steps.
* Nothing of what was killed runs ``ORPHANS_SECONDS`` later.
* The run directory, the directory around it, the cache, TMPDIR and /dev/shm hold what they hold after a run that nobody
  killed, and, if it went on, ``resume.json`` and ``metrics.cut.jsonl``. Every checkpoint and the export verify.

Launchers are forked from a process that has imported everything, and so are their workers (a process of the launcher's
that waits for its work instead of a new interpreter), so that a run costs a second or two. ``--commands`` says how many
runs are real commands in every respect.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint  # what launchers and workers need, imported once
from transformers import LlamaForCausalLM  # noqa: F401

import entry
import tonnage.checkpoint.export
import tonnage.data
import tonnage.decide.exports
import tonnage.decide.resumption
import tonnage.decide.written
import tonnage.planning.space  # noqa: F401
from pretended import pretend_measured
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import interrupted_saves
from tonnage.checkpoint.verify import verify
from tonnage.config import read_config
from tonnage.data.building import processes
from tonnage.doctor import hardware  # noqa: F401
from tonnage.host.processor import processor
from tonnage.launch import guardian
from tonnage.rundir.directory import COMPLETE, ORPHANS_SECONDS, RunDirectory, complete_checkpoints, step_of
from tonnage.training import (
    assemble,  # noqa: F401
    external,  # noqa: F401
    loop,  # noqa: F401
    watchdog,  # noqa: F401
)

STEPS, SAVE_EVERY = 12, 2
TIMED = ("step_seconds", "core_wait", "tokens_per_second", "memory", "eval_seconds", "disk", "host")
"""What of a record differs from run to run."""
PATIENCE_SECONDS = 300.0
"""For any command to end: others may use this machine."""
PHASES = ("preparation", "start", "training", "save", "export")
AIMS = (*PHASES, "training")
"""In turn. A step is short, and saves go on beside steps: what was aimed at one often hits the other."""
VICTIMS = {
    "preparation": ("launcher", "group", "everything"),
    "start": ("launcher", "forkserver", "worker", "group", "everything", "launcher and guardian"),
    "training": ("launcher", "forkserver", "worker", "group", "everything", "launcher and guardian"),
    "save": ("launcher", "worker", "group", "everything", "launcher and guardian"),
    "export": ("launcher", "group", "everything"),
}
AFTER_A_RESUME = {"resume.json", "metrics.cut.jsonl"}
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
TRACED = {"README.md", "checksums.json"}
"""Of an export: what tells times, and the list that has the hash of that."""


@dataclass
class Kill:
    """One kill: what was killed, and when."""

    victim: str
    workers: int
    aimed_at: str
    phase: str = ""
    """In which it was, as far as can be seen from what lies there."""
    after: str = ""
    """How far the run was."""
    quiet_seconds: float = 0.0
    """Until nothing of what was there ran any more."""


@dataclass
class Story:
    """A run from its first command to its end."""

    number: int
    real: bool
    kills: list[Kill] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Place:
    """The directories of one run, which nobody else has."""

    folder: Path

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "out" / "run")

    def made(self, shared: Path, keys: Mapping[str, Any]) -> Place:
        """Make them, with a config in them, ``keys`` of it; ``shared`` has the model and the rows."""
        for name in ("out", "tmp"):
            (self.folder / name).mkdir(parents=True)
        shutil.copytree(shared / "measured", self.folder / "home")
        config = {
            "model": str(shared / "model"),
            "data": {
                "train": str(shared / "rows.jsonl"),
                "validation": 0.1,
                "max_length": 128,
                "template": "plain",
                "cache": str(self.folder / "cache"),
            },
            "batch": {"sequences": 4},
            "steps": STEPS,
            "optimizer": {"lr": 3e-3},
            "evaluate": {"every": 5},
            "checkpoint": {"every": SAVE_EVERY, "keep": 2},
            "launch": {"workers": 1, "threads": 1},
            "track": [],
            "output": str(self.run.path),
        }
        (self.folder / "config.yaml").write_text(json.dumps({**config, **keys}))
        return self

    def files(self) -> set[str]:
        """What lies in all of them; checkpoints by name, and no directory for what rests on disk, of which there is one
        for every worker that the run ever had."""
        found = set()
        for name in ("out", "cache", "tmp", "home"):
            for path in (self.folder / name).rglob("*"):
                relative = path.relative_to(self.folder)
                if relative.parts[2:3] == ("offload",) and path.is_dir():
                    continue
                if relative.parts[2:3] != ("checkpoints",) or len(relative.parts) <= 4:
                    found.add(str(relative))
        return found


# Processes


def call_itself(name: str) -> None:
    """The name of this process, by which it is found."""
    ctypes.CDLL(None).prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def adopt_orphans() -> None:
    """Be the parent of whatever descends from this process when its own is gone."""
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def descendants(of: int) -> dict[int, str]:
    """The processes that descend from one and run, with what they are: name and command line."""
    children: dict[int, list[int]] = {}
    alive: dict[int, str] = {}
    for path in Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        with suppress(OSError):
            name, _, rest = (path / "stat").read_text().partition("(")[2].rpartition(")")
            state, parent = rest.split()[:2]
            children.setdefault(int(parent), []).append(int(path.name))
            if state not in "ZX":
                alive[int(path.name)] = f"{name} {(path / 'cmdline').read_bytes().replace(bytes(1), b' ').decode()}"
    found, waiting = {}, [of]
    while waiting:
        for child in children.get(waiting.pop(), []):
            waiting.append(child)
            if child in alive:
                found[child] = alive[child]
    return found


def forked(work: Callable[[], int], said: Path | None = None) -> int:
    """Do something in a process of its own, in a group of its own; its process id."""
    sys.stdout.flush()
    if child := os.fork():
        with suppress(OSError):
            os.setpgid(child, child)
        return child
    status = 1
    try:
        with suppress(OSError):
            os.setpgid(0, 0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if said is not None:
            descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
        status = work()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def environment_of(place: Place) -> dict[str, str]:
    """The variables of a command at a place."""
    return {"TMPDIR": str(place.folder / "tmp"), "TONNAGE_CACHE": str(place.folder / "home"), "COLUMNS": "200"}


def launched(place: Place, words: Sequence[str], said: Path, *, real: bool, shared_out: bool) -> int:
    """Start ``tonnage train`` with ``words``; its process id.

    ``shared_out``: the data are prepared by processes of their own, however few they are.
    """
    if real:
        with said.open("ab") as output:
            command = [sys.executable, "-m", "tonnage", "train", *words]
            environment = os.environ | environment_of(place)
            null = subprocess.DEVNULL
            process = subprocess.Popen(
                command, env=environment, stdin=null, stdout=output, stderr=subprocess.STDOUT, process_group=0
            )
            process.returncode = 0  # it is waited for here, with all others
            return process.pid

    def work() -> int:
        call_itself("killing-launch")
        os.environ.update(environment_of(place))
        tempfile.tempdir = None
        if shared_out:
            processes.SMALL_BYTES = 0
        sys.argv = ["tonnage", "train", *words]
        entry.main()
        return 0

    return forked(work, said)


class Command:
    """A command that runs, or ran; what it started is looked after as well."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.status: int | None = None

    def is_over(self) -> bool:
        """Whether it has ended; takes leave of everything else that has."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self) -> int:
        """Its exit status."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self.is_over():
            assert time.monotonic() < deadline, f"a command did not end in {PATIENCE_SECONDS:.0f} s"
            time.sleep(0.005)
        assert self.status is not None
        return self.status

    def workers(self) -> list[int]:
        """The workers that it has."""
        known = ("tonnage rank", "tonnage.training.worker")
        return [pid for pid, what in descendants(self.pid).items() if any(name in what for name in known)]

    def kill(self, victim: str, chance: random.Random) -> set[int]:
        """Kill a part of it; the processes that there were. Nothing of it may be there any more."""
        there = descendants(self.pid)
        everything = [self.pid, *there]
        if victim == "worker":
            chosen = sorted(self.workers(), key=lambda _: chance.random())[:1]
        elif victim == "everything":
            chosen = everything
        elif victim == "forkserver":
            chosen = [pid for pid, what in there.items() if what.startswith("tonnage forker")]
        elif victim == "launcher and guardian":
            chosen = [pid for pid, what in there.items() if Path(guardian.__file__).name in what] + [self.pid]
        else:
            chosen = [self.pid]
        with suppress(ProcessLookupError):
            if victim == "group":
                os.killpg(self.pid, signal.SIGKILL)
        for pid in chosen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return set(everything) if chosen else set()


# Instants


def lines_of(path: Path) -> int:
    """Whole lines of a file that may not be there."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def is_finished(run: RunDirectory) -> bool:
    """Whether the last step is saved."""
    return (run.checkpoints / f"step-{STEPS:08d}" / COMPLETE).exists()


def staging_of(run: RunDirectory) -> list[Path]:
    """An export that is being written."""
    return list(run.path.glob(".*export*"))


def instant(phase: str, place: Place, chance: random.Random, seconds: dict[str, float]) -> Callable[[], bool]:
    """When to kill: some time after ``phase`` was seen to begin; ``seconds`` is how long each one takes."""
    run = place.run
    short = chance.choice([0.0, chance.uniform(0, 0.02), chance.uniform(0, 0.1)])
    any_time = chance.uniform(0, 1.1 * seconds[phase])
    known_lines, known_saves = lines_of(run.metrics), {path.name for path in run.checkpoints.glob("step-*")}
    to_pass = chance.randrange(5)
    begun: Callable[[], bool]

    if phase == "preparation":
        if chance.random() < 0.5:
            begun, delay = (lambda: True), any_time
        else:
            begun, delay = (lambda: bool(list((place.folder / "cache").glob("*/.*.*.*")))), short
    elif phase == "start":
        begun, delay = run.lock.exists, any_time
    elif phase == "training":
        begun, delay = (lambda: lines_of(run.metrics) > known_lines), any_time
    elif phase == "save":
        seen = set(known_saves)

        def saving() -> bool:  # older ones are removed meanwhile
            seen.update(path.name for path in run.checkpoints.glob("step-*"))
            return len(seen) > len(known_saves) + to_pass

        begun, delay = saving, short
    elif chance.random() < 0.5:
        begun, delay = (lambda: is_finished(run)), any_time
    else:
        begun, delay = (lambda: bool(staging_of(run))), short

    due: list[float] = []

    def now() -> bool:
        if not due and begun():
            due.append(time.monotonic() + delay)
        return bool(due) and time.monotonic() >= due[0]

    return now


@dataclass(frozen=True)
class Before:
    """What was there when a command began."""

    records: int
    saves: frozenset[str]

    @staticmethod
    def of(run: RunDirectory) -> Before:
        return Before(lines_of(run.metrics), frozenset(path.name for path in interrupted_saves(run.checkpoints)))


def phase_of(run: RunDirectory, before: Before) -> str:
    """In which phase a kill was, from what lies there."""
    if not run.config.exists():
        return "preparation"
    if is_finished(run):
        return "export"
    if {path.name for path in interrupted_saves(run.checkpoints)} - before.saves:
        return "save"
    return "training" if lines_of(run.metrics) > before.records else "start"


# What must hold


def records(run: Path) -> list[dict[str, Any]]:
    """What must not differ: every record of steps and evaluations, without times and memory."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in record.items() if key not in TIMED}
        for record in found
        if "loss" in record or "eval_loss" in record
    ]


def first_difference(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> str:
    """Where two accounts part, and how; empty where they do not."""
    for ours, theirs in zip_longest(expected, found):
        if ours != theirs:
            return f"{len(found)} records, not {len(expected)}; the first that differs is {theirs}, not {ours}"
    return ""


def results(run: RunDirectory) -> dict[str, Any]:
    """What a run ends with, but for its records: hashes of the export's files, of the tensors, and the cursor."""
    checkpoint = complete_checkpoints(run.checkpoints)[-1]
    listed = json.loads((checkpoint / COMPLETE).read_text())["files"]
    state = json.loads((checkpoint / "state.json").read_text())
    exported = json.loads((run.export / "checksums.json").read_text())["files"]
    cursor = ("step", "position", "num_updates", "skips", "loss_scale", "good_steps")
    return {
        **{f"export/{name}": entry for name, entry in exported.items() if name not in TRACED},
        **{name: entry for name, entry in listed.items() if name != "state.json"},
        **{name: state[name] for name in cursor},
    }


def differences(place: Place, reference: Place, whole: Place, *, resumed: bool) -> Iterator[str]:
    """What of a run is not as of the one that nobody killed, or lies there and does not after a ``whole`` one."""
    run, undisturbed = place.run, reference.run
    if said := first_difference(records(undisturbed.path), records(run.path)):
        yield said
    expected, found = results(undisturbed), results(run)
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            yield f"{name} is {found.get(name)}, not {expected.get(name)}"
    files, as_ever = place.files(), whole.files()
    if resumed:
        files -= {f"out/run/{name}" for name in AFTER_A_RESUME}
    yield from (f"left over: {name}" for name in sorted(files - as_ever))
    yield from (f"missing: {name}" for name in sorted(as_ever - files))
    for directory in (*complete_checkpoints(run.checkpoints), run.export):
        for problem in verify(directory):
            yield f"{directory.name}: {problem.where}: {problem.found}"


@dataclass
class Bench:
    """What all runs of a process share."""

    folder: Path
    keys: Mapping[str, Any]
    """Of every run's config, besides those that all have."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each phase of an undisturbed run takes."""

    @property
    def shared(self) -> Path:
        return self.folder / "shared"

    def whole(self, workers: int) -> Place:
        """The run that nobody kills."""
        return Place(self.folder / f"whole-{workers}")

    def write(self) -> int:
        """The model, the rows, and that this machine was measured."""
        self.shared.mkdir(parents=True, exist_ok=True)
        write_model(self.shared / "model", llama_config(num_hidden_layers=1, hidden_size=48, num_attention_heads=4))
        write_rows(self.shared / "rows.jsonl", alpaca_rows(120))
        os.environ["TONNAGE_CACHE"] = str(self.shared / "measured")
        pretend_measured()
        return 0

    def carried_out(self, place: Place, words: Sequence[str], name: str) -> None:
        """A command that nobody kills."""
        said = place.folder / f"{name}.txt"
        status = Command(launched(place, words, said, real=False, shared_out=False)).wait()
        assert status == 0, said.read_text()

    def prepare(self) -> None:
        """Everything, and the runs that others are compared with."""
        assert os.waitstatus_to_exitcode(os.waitpid(forked(self.write), 0)[1]) == 0
        warm = Place(self.folder / "warm").made(self.shared, self.keys)  # compiles loops, measures products
        self.carried_out(warm, [str(warm.folder / "config.yaml")], "first")
        shutil.rmtree(self.shared / "measured")
        shutil.copytree(warm.folder / "home", self.shared / "measured")
        for workers in (1, 2):
            place = self.whole(workers).made(self.shared, self.keys)
            self._time(place, [str(place.folder / "config.yaml"), f"launch.workers={workers}"])
            assert [one["step"] for one in records(place.run.path) if "loss" in one] == list(range(1, STEPS + 1))
            many = Place(self.folder / f"kept-{workers}").made(self.shared, self.keys)
            words = [str(many.folder / "config.yaml"), f"launch.workers={workers}", "checkpoint.keep=99"]
            self.carried_out(many, words, "first")

    def _time(self, place: Place, words: Sequence[str]) -> None:
        """An undisturbed run, and how long its phases take."""
        run, said = place.run, place.folder / "first.txt"
        began = time.monotonic()
        seen: dict[str, float] = {}
        command = Command(launched(place, words, said, real=False, shared_out=False))
        signs: dict[str, Callable[[], bool]] = {
            "start": run.lock.exists,
            "training": lambda: lines_of(run.metrics) > 0,
            "export": lambda: is_finished(run),
        }
        while not command.is_over():
            for phase, sign in signs.items():
                if phase not in seen and sign():
                    seen[phase] = time.monotonic()
            time.sleep(0.002)
        assert command.status == 0, said.read_text()
        ends = [began, *seen.values(), time.monotonic()]
        for phase, first, last in zip(("preparation", *signs), ends[:-1], ends[1:], strict=True):
            self.seconds[phase] = max(self.seconds.get(phase, 0.0), last - first)
        self.seconds["save"] = 0.1

    def expected(self, history: Sequence[tuple[int, int]], job: int) -> Place:
        """The run that was never killed, and had numbers of workers from steps on as ``history`` says."""
        place = self.whole(history[0][1])
        name = f"from-{history[0][1]}"
        before = Place(self.folder / f"kept-{history[0][1]}")
        for step, workers in history[1:]:
            name += f"-{step}-{workers}"
            place = Place(self.folder / f"job-{job}" / name)
            if not place.folder.exists():
                place.made(self.shared, self.keys)
                shutil.copytree(before.run.path, place.run.path)
                words = ["--resume", str(place.run.path), "--from", str(step), f"launch.workers={workers}"]
                self.carried_out(place, words, "changed")
                for path in place.run.checkpoints.glob("aside-*"):
                    shutil.rmtree(path)
            before = place
        return place


def told(bench: Bench, number: int, seed: int, job: int, *, real: bool) -> Story:
    """One run to its end, killed on the way, and what is wrong with it."""
    chance = random.Random(f"{seed}-{number}")
    story, began = Story(number, real), time.monotonic()
    place = Place(bench.folder / f"run-{number:04d}")
    try:
        place.made(bench.shared, bench.keys)
        shm = set(Path("/dev/shm").iterdir())
        history, resumed = _to_its_end(bench, place, story, chance)
        story.wrong += differences(place, bench.expected(history, job), bench.whole(history[-1][1]), resumed=resumed)
        deadline = time.monotonic() + ORPHANS_SECONDS
        while descendants(os.getpid()) and time.monotonic() < deadline:
            time.sleep(0.01)
        story.wrong += [f"left over: {path}" for path in set(Path("/dev/shm").iterdir()) - shm]
        story.wrong += [f"still runs: {what}" for what in descendants(os.getpid()).values()]
    except Exception:
        story.wrong.append(traceback.format_exc())
        for pid in descendants(os.getpid()):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    story.seconds = round(time.monotonic() - began, 1)
    if not story.wrong:
        shutil.rmtree(place.folder)
    return story


def _to_its_end(bench: Bench, place: Place, story: Story, chance: random.Random) -> tuple[list[tuple[int, int]], bool]:
    """Kill it and go on until it is done; from which steps on it had how many workers, and whether it went on."""
    run, kills = place.run, chance.choice([1, 1, 2, 3])
    workers = chance.choice([1, 2])
    first = [str(place.folder / "config.yaml"), f"launch.workers={workers}"]
    words, history, resumed = first, [(0, workers)], False
    seconds = {phase: value * (4 if story.real else 1) for phase, value in bench.seconds.items()}
    while True:
        aimed_at = AIMS[(story.number + len(story.kills)) % len(AIMS)]
        if story.real and "--resume" not in words and aimed_at == "preparation":
            seconds["preparation"] = 6.0
        victim = chance.choice(VICTIMS[aimed_at])
        due = instant(aimed_at, place, chance, seconds) if len(story.kills) < kills else lambda: False
        before, said = Before.of(run), place.folder / f"command-{len(story.commands) + 1}.txt"
        story.commands.append(" ".join(words).replace(str(bench.folder), "."))
        shared_out = chance.random() < 0.25 and aimed_at == "preparation"
        command = Command(launched(place, words, said, real=story.real, shared_out=shared_out))
        there, deadline = set[int](), time.monotonic() + PATIENCE_SECONDS
        while not command.is_over() and not there:
            assert time.monotonic() < deadline, f"a command did not end in {PATIENCE_SECONDS:.0f} s"
            if due() and (victim != "worker" or command.workers()):
                there = command.kill(victim, chance)
            time.sleep(0.001)
        if there:
            kill = Kill(victim, workers, aimed_at)
            story.kills.append(kill)
            kill.phase = phase_of(run, before)
            _wait_for_end(command, kill, there, story, chance)
            saved = complete_checkpoints(run.checkpoints)
            kill.after = f"{lines_of(run.metrics)} records, {saved[-1].name if saved else 'no checkpoint'}"
        text = said.read_text()
        if "Traceback" in text:
            story.wrong.append(f"a traceback in {said}")
        if not there or command.status == 0:
            if command.status != 0:
                raise AssertionError(f"{story.commands[-1]} ended by itself with {command.status}: {text[-2000:]}")
            return history, resumed
        if victim == "worker" and not is_finished(run) and "killed by SIGKILL" not in text:
            story.wrong.append(f"a worker was killed, and the command said {text[-300:]!r}")
        words, changed = _next_words(place, first, story, chance)
        if words is first:
            history, workers, resumed = history[:1], history[0][1], False
            continue
        resumed = True
        step = step_of(complete_checkpoints(run.checkpoints)[-1])
        workers = changed or workers_of(run)
        if step < STEPS:
            history = [pair for pair in history if pair[0] < step]
            if history[-1][1] != workers:
                history.append((step, workers))


def workers_of(run: RunDirectory) -> int:
    """How many workers a run is to have if it goes on and nobody says another number."""
    found = read_config(run.config, [], check_files=False).launch.workers
    assert isinstance(found, int)
    return found


def _wait_for_end(command: Command, kill: Kill, there: set[int], story: Story, chance: random.Random) -> None:
    """See that what was killed, and what belonged to it, ends in time; or do not wait for it, where nobody has to."""
    began = time.monotonic()
    command.wait()
    if kill.victim == "launcher" and chance.random() < 0.3:
        return  # who goes on finds the last of them, and waits
    while left := there & descendants(os.getpid()).keys():
        command.is_over()
        if time.monotonic() - began > ORPHANS_SECONDS:
            names = descendants(os.getpid())
            story.wrong.append(
                f"{ORPHANS_SECONDS:.0f} s after a kill: {', '.join(names.get(pid, str(pid)) for pid in left)}"
            )
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.01)
    kill.quiet_seconds = round(time.monotonic() - began, 2)


def _next_words(place: Place, first: list[str], story: Story, chance: random.Random) -> tuple[list[str], int | None]:
    """What to say to go on, and with how many workers if that was said."""
    run = place.run
    if not run.is_run():
        return first, None
    if not complete_checkpoints(run.checkpoints):
        said = place.folder / f"command-{len(story.commands) + 1}.txt"
        words = ["--resume", str(run.path)]
        story.commands.append(" ".join(words[:1]))
        status = Command(launched(place, words, said, real=False, shared_out=False)).wait()
        if status != 2 or not any(known in said.read_text() for known in ("no complete checkpoint", "no run")):
            story.wrong.append(f"nothing to go on from, and --resume ended with {status}: {said.read_text()[-2000:]}")
        shutil.rmtree(run.path)
        return first, None
    words = ["--resume", str(run.path)]
    if chance.random() < 0.25:
        changed = chance.choice([1, 2])
        return [*words, f"launch.workers={changed}"], changed
    return words, None


# All of them


def job(bench: Bench, number: int, jobs: int, options: argparse.Namespace, out: Path) -> int:
    """A process's share of the kills, a story on every line of ``out``."""
    adopt_orphans()
    call_itself("killing-job")
    kills, share, run = 0, options.kills // jobs + (number < options.kills % jobs), number
    while kills < share:
        real = options.commands > 0 and run % max(1, options.kills // 2 // options.commands) == 0
        story = told(bench, run, options.seed, number, real=real)
        kills += len(story.kills)
        with out.open("a") as file:
            file.write(json.dumps(asdict(story)) + "\n")
        run += jobs
        told_kills = "; ".join(f"{kill.victim} ({kill.workers}) in {kill.phase}" for kill in story.kills)
        print(f"run {story.number}: {told_kills}: {story.wrong or 'the same'} ({story.seconds} s)", flush=True)
    return 0


def summary(stories: Sequence[dict[str, Any]], options: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """The result in figures."""
    kills = [kill for story in stories for kill in story["kills"]]
    resumes = [words for story in stories for words in story["commands"] if words.startswith("--resume ")]

    def counted(key: str) -> dict[str, int]:
        return dict(sorted(Counter(str(kill[key]) for kill in kills).items()))

    quiet = [kill["quiet_seconds"] for kill in kills]
    return {
        "command": f"python tests/pulse/killing.py --kills {options.kills} --seed {options.seed} --jobs {options.jobs} "
        f"--commands {options.commands} --tier {options.tier} --adapter {shlex.quote(json.dumps(options.adapter))}",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": processor(),
        "logical_cpus": os.cpu_count(),
        "torch": torch.__version__,
        "seed": options.seed,
        "tier": options.tier,
        "adapter": options.adapter,
        "seconds": round(seconds),
        "runs": len(stories),
        "real_commands": sum(story["real"] for story in stories),
        "commands": sum(len(story["commands"]) for story in stories),
        "resumes": len(resumes),
        "resumes_that_say_a_number_of_workers": sum("launch.workers" in words for words in resumes),
        "kills": len(kills),
        "by_phase": counted("phase"),
        "by_victim": counted("victim"),
        "by_workers": counted("workers"),
        "longest_until_quiet_seconds": max(quiet, default=0.0),
        "wrong": {story["number"]: story["wrong"] for story in stories if story["wrong"]},
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="in all, at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--commands", type=int, default=0, help="runs, about, that are real commands")
    parser.add_argument("--tier", choices=("device", "disk"), default="device")
    parser.add_argument("--adapter", type=json.loads, default='"none"', help="of the config, in JSON")
    parser.add_argument("--only", type=int, help="one run, by its number")
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--result", type=Path, help="where to write the figures")
    options = parser.parse_args(arguments)
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    began = time.monotonic()
    folder = (options.directory or Path(tempfile.mkdtemp(prefix="killing-"))).resolve()
    tiers = dict.fromkeys(("optimizer_tier", "gradient_tier", "parameter_tier"), options.tier)
    bench = Bench(folder, {"memory": tiers, "adapter": options.adapter})
    gc.collect()
    gc.freeze()
    adopt_orphans()
    bench.prepare()
    if options.only is not None:
        story = told(bench, options.only, options.seed, 0, real=options.commands > 0)
        print(json.dumps(asdict(story), indent=1))
        return 1 if story.wrong else 0
    outs = [folder / f"stories-{number}.jsonl" for number in range(options.jobs)]
    children = [
        forked(lambda number=number: job(bench, number, options.jobs, options, outs[number]))  # type: ignore[misc]
        for number in range(options.jobs)
    ]
    failed = [os.waitpid(child, 0)[1] for child in children]
    stories = [json.loads(line) for out in outs if out.exists() for line in out.read_text().splitlines()]
    result = summary(stories, options, time.monotonic() - began)
    text = json.dumps(result, indent=1) + "\n"
    if options.result is not None:
        options.result.write_text(text)
    print(json.dumps(result))
    if not result["wrong"] and options.directory is None:
        shutil.rmtree(folder)
    return 1 if result["wrong"] or any(failed) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
