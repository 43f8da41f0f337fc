"""Runs whose workers are killed at random instants and go on until they are done.

    python tests/pulse/killing.py --kills 100 [--each 1] [--seed 0] [--tier device|disk] [--directory DIR]

Every run is the same training of a tiny model on two workers, with a checkpoint every few steps. Its workers are killed
with SIGKILL, half of the time at any instant, half of the time while a save is going on: one of them first, as when
memory runs out, or both at once. Now and then SIGTERM is sent instead, and they save what they have. Then it goes on
from its newest complete checkpoint, as ``tonnage train --resume`` does, as often as it takes. In the end its metrics
must be those of a run that nobody killed, bit for bit.

Processes are forked from one that has imported everything, so that a run costs a second or two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint  # noqa: F401  (what workers need, imported once)
from rich.console import Console
from transformers import LlamaForCausalLM  # noqa: F401

from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.save import COMPLETE
from tonnage.cli.decide import decide
from tonnage.cli.resume import begin_again, decide_resumption
from tonnage.cli.train import write_run
from tonnage.rundir import RunDirectory
from tonnage.train import assemble, loop, worker  # noqa: F401

WORKERS, STEPS, SAVE_EVERY = 2, 16, 2
TIMED = ("step_seconds", "tokens_per_second", "memory", "eval_seconds", "disk")
"""What of a record differs from run to run."""


@dataclass
class Tally:
    """What happened to a run."""

    kills: int = 0
    stops: int = 0
    """Times that it was stopped politely."""
    in_saves: int = 0
    """Kills that left an interrupted save behind."""
    attempts: int = 0


def write_config(folder: Path, tier: str) -> Path:
    """The model, the rows and the config that all runs share; ``tier`` is where everything rests."""
    write_model(folder / "model", llama_config(num_hidden_layers=1, hidden_size=48, num_attention_heads=4))
    write_rows(folder / "rows.jsonl", alpaca_rows(120))
    config = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "validation": 0.1,
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3},
        "evaluate": {"every": 5},
        "checkpoint": {"every": SAVE_EVERY, "keep": 2},
        "memory": dict.fromkeys(("optimizer_tier", "gradient_tier", "parameter_tier"), tier),
        "launch": {"workers": WORKERS, "threads": 1},
        "track": [],
        "output": str(folder / "unset"),
    }
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


def forked(work: Callable[[], Any]) -> int:
    """Do something in a process of its own, in a group of its own; its process id."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        status = work() or 0
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(status)


def launched(run: RunDirectory) -> list[int]:
    """The workers of a run that is ready for them."""
    run.workers.mkdir(exist_ok=True)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        port = str(holder.getsockname()[1])

    def work(rank: int) -> int:
        log = os.open(run.worker_log(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
        os.environ.update(places, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        return worker.main(str(run.path))

    return [forked(lambda rank=rank: work(rank)) for rank in range(WORKERS)]  # type: ignore[misc]


def ended(children: list[int], kill_at: Callable[[], bool], polite: bool, chance: random.Random) -> bool:
    """Wait for workers, killing them when ``kill_at`` says so, or asking them; whether all came to their end."""
    running, killed, failed = set(children), False, False
    while running:
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                running.discard(child)
                failed |= status != 0
        if polite and not killed and kill_at():
            killed = True
            for child in running:
                os.kill(child, signal.SIGTERM)
        elif (failed and not polite) or (not killed and kill_at()):
            killed = True
            victims = sorted(running, key=lambda _: chance.random())
            for victim in victims:  # one a little before the other, or both at once
                os.kill(victim, signal.SIGKILL)
                time.sleep(chance.choice([0.0, 0.0, 0.05]))
        time.sleep(0.0005)
    return not failed


def instant(run: RunDirectory, chance: random.Random, expected_seconds: float) -> Callable[[], bool]:
    """When to kill: at any instant, or a moment after a save has begun."""
    if chance.random() < 0.5:
        deadline = time.monotonic() + chance.uniform(0, expected_seconds)
        return lambda: time.monotonic() > deadline
    seen = {path.name for path in run.checkpoints.glob("step-*")}
    to_pass = chance.randrange(6)
    delay = chance.choice([0.0, chance.uniform(0, 0.02), chance.uniform(0, 0.1)])
    due: list[float] = []

    def saving() -> bool:
        nonlocal to_pass
        if due:
            return time.monotonic() > due[0]
        for path in run.checkpoints.glob("step-*"):
            if path.name not in seen:
                seen.add(path.name)
                if to_pass == 0:
                    due.append(time.monotonic() + delay)
                    return delay == 0.0
                to_pass -= 1
        return False

    return saving


def trained(config: Path, output: Path, kills: int, chance: random.Random, expected_seconds: float) -> Tally:
    """One run to its end, killed ``kills`` times on the way."""
    run, tally = RunDirectory(output), Tally()
    quiet = Console(quiet=True)

    def start() -> None:
        write_run(run, decide(str(config), [f"output={output}"], quiet))

    def go_on() -> int:
        with run.locked():
            resumption = decide_resumption(run, [], quiet, step=None, allow_changes=False)
            if resumption.is_done:
                return 9
            begin_again(run, resumption, quiet)
            write_run(run, resumption.decision)
        return 0

    while True:
        has_checkpoint = any(run.checkpoints.glob(f"step-*/{COMPLETE}"))
        if not has_checkpoint and run.config.exists():  # killed before its first checkpoint: a new run
            for path in (run.metrics, run.resume):
                path.unlink(missing_ok=True)
        _, status = os.waitpid(forked(go_on if has_checkpoint else start), 0)
        if os.waitstatus_to_exitcode(status) == 9:
            return tally
        assert status == 0, f"{output.name}: cannot {'go on' if has_checkpoint else 'start'}"
        tally.attempts += 1
        to_kill = tally.kills < kills
        kill_at = instant(run, chance, expected_seconds) if to_kill else lambda: False
        polite = to_kill and chance.random() < 0.2
        if ended(launched(run), kill_at, polite, chance):
            return tally
        assert to_kill, f"{output.name} failed by itself: see {run.workers}"
        tally.stops += polite
        tally.kills += not polite
        tally.in_saves += any(not (path / COMPLETE).exists() for path in run.checkpoints.glob("step-*"))


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
            return f"wrong: {len(found)} records, not {len(expected)}; the first that differs is {theirs}, not {ours}"
    return ""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--each", type=int, default=1, help="kills of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tier", choices=("device", "disk"), default="device")
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = options.directory or Path(tempfile.mkdtemp(prefix="killing-"))
    assert os.waitstatus_to_exitcode(os.waitpid(forked(lambda: write_config(folder, options.tier) and None), 0)[1]) == 0
    config, chance = folder / "config.yaml", random.Random(options.seed)

    trained(config, folder / "warm-up", 0, chance, 0.0)  # compiles the optimizer's loops
    began = time.monotonic()
    trained(config, folder / "whole", 0, chance, 0.0)
    whole, seconds = records(folder / "whole"), time.monotonic() - began
    assert [record["step"] for record in whole if "loss" in record] == list(range(1, STEPS + 1))
    total, wrong, number = Tally(), [], 0
    while total.kills < options.kills:
        number += 1
        kills = min(options.each, options.kills - total.kills)
        tally = trained(config, folder / f"run-{number:03d}", kills, chance, seconds)
        total = Tally(*(a + b for a, b in zip(vars(total).values(), vars(tally).values(), strict=True)))
        difference = first_difference(whole, records(folder / f"run-{number:03d}"))
        if difference:
            wrong.append(number)
        print(f"run {number}: {tally}, {difference or 'the same metrics'}", flush=True)
    result = {"runs": number, **vars(total), "wrong": wrong}
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
