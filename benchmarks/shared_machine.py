"""A step beside other work: tonnage and transformers' Trainer on a machine of which busy processes take their share.

    python -m benchmarks.shared_machine [--shape llama-135m pythia-70m] [--method full lora] [--busy 0 1 2] [--rounds 5]
                                        [--against CHECKOUT] [--only NAME ...] [--output FILE]

Contestants take a step in turn, the same documents each, beside as many busy processes as ``--busy`` says; a busy
process computes in one thread and never waits. What is asked is how many times as long as alone a step takes. Of two
cores, one busy process leaves 1.5 (two processes of which one has two threads) and two leave 2. ``--against`` has the
sources of another version take part: what is gained beside others must not be lost alone.

The Trainer runs in this environment, with peft for LoRA: fp32 weights, bf16 products, as in ``benchmarks.peers``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import Contestant, machine, our_command, write_result
from benchmarks.peers.inputs import SHAPES, write_additions
from benchmarks.peers.training import Field

RANK, ALPHA = 32, 64
BUSY = "while True: pass"
OURS, BEFORE, TRAINER = "tonnage", "tonnage before", "transformers Trainer"


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Processes that compute in one thread each, for as long as the context lasts."""
    with ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-c", BUSY])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


def contestants(field: Field, method: str, names: Sequence[str], against: Path | None) -> dict[str, Contestant]:
    """Who takes part."""
    ours: dict[str, Any] = {"adapter": {"rank": RANK, "alpha": ALPHA}} if method == "lora" else {}
    peer: dict[str, Any] = {"class": "Trainer", "documents": 8}
    if method == "lora":
        start = write_additions(field.folder / "start.safetensors", field.model, RANK)
        peer |= {"dtype": "bfloat16", "adapter": {"rank": RANK, "alpha": ALPHA, "start": str(start)}}
    made = {}
    for name in names:
        if name == TRAINER:
            made[name] = field.peer(name, peer, our_command)
        else:
            made[name] = field.ours(name, ours)
        if name == BEFORE:
            made[name].environment = {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{against}/src{os.pathsep}{against}"}
    return made


def compare(field: Field, method: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one shape and method: seconds for 1,000 tokens of a step of each contestant
    beside each number of processes."""
    names = arguments.only or [OURS, *([BEFORE] if arguments.against else []), TRAINER]
    field_of = contestants(field, method, names, arguments.against)
    seconds: dict[str, dict[int, list[float]]] = {name: {number: [] for number in arguments.busy} for name in field_of}
    with ExitStack() as stack:
        for contestant in field_of.values():
            stack.enter_context(contestant)
            contestant.get_ready()
            contestant.take(1, counts=False)
        for turn in range(arguments.rounds):
            for number in arguments.busy:
                print(f"beside {number}", flush=True)
                order = list(field_of.items())  # no contestant is the first of every turn
                with busy_processes(number):
                    for name, contestant in reversed(order) if turn % 2 else order:
                        if name == TRAINER and turn >= arguments.trainer_rounds:
                            continue
                        contestant.take(1)
                        # Steps differ in their number of tokens; all contestants take the same steps in the same order.
                        seconds[name][number].append(contestant.seconds[-1] * 1000 / contestant.tokens[-1])
    return {name: figures(one) for name, one in seconds.items()}


def figures(seconds: dict[int, list[float]]) -> dict[str, Any]:
    """Medians, each beside the first of them."""
    medians = {number: statistics.median(each) for number, each in seconds.items()}
    alone = next(iter(medians.values()))
    return {
        f"beside {number}": {
            "seconds_per_1000_tokens_median": median,
            "times_alone": median / alone,
            "seconds_per_1000_tokens": [round(one, 3) for one in seconds[number]],
        }
        for number, median in medians.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=SHAPES, default=["llama-135m", "pythia-70m"])
    parser.add_argument("--method", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--busy", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainer-rounds", type=int, default=5, help="of all, those in which the Trainer takes part")
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, about")
    parser.add_argument("--against", type=Path, help="a checkout of another version")
    parser.add_argument("--only", nargs="*", choices=[OURS, BEFORE, TRAINER])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for shape in arguments.shape:
        with tempfile.TemporaryDirectory() as made:
            turns = argparse.Namespace(
                shape=shape,
                tokenizer=None,
                data=None,
                tokens=arguments.tokens,
                rounds=arguments.rounds * len(arguments.busy),
            )
            field = Field(Path(made), turns)
            for method in arguments.method:
                print(f"{shape}, {method}", flush=True)
                results[f"{shape}, {method}"] = compare(field, method, arguments)
    write_result(arguments.output, {"benchmark": "shared_machine", "machine": machine(), "results": results})


if __name__ == "__main__":
    main()
