"""What of the disk training waits for: the optimizer's state on disk beside all of it in memory.

    python -m benchmarks.exposed_io [--shape pythia-1b] [--tokens 4096] [--pairs 2] [--steps 3] [--directory DIR]
                                    [--everything GIB] [--output FILE]

Two runs that differ in nothing but ``memory.optimizer_tier`` take turns, one after another, since both do not fit into
memory at once: a step to warm up, then ``--steps`` that count, of full packs of 1,024 tokens in one micro-batch. A turn
ends when the disk has what a step sends there. Losses must be the same, bit for bit. With ``--resident`` so many bytes
of the state stay in memory. ``--everything`` keeps gradients and parameters on disk too, in a memory cgroup of so many
GiB, recomputed whole in both runs; these are there together, so that all their turns are pairs. A turn then begins
with one more step, which does not count, and ends without what the disk still has to do: an update goes on while the
next step begins, so each step that counts pays for one. Beside it stand the floors of such a step: its products at the
rate of a large one, and the bytes that are planned to move at the raw rate of the disk.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.memory_cap import capped, counted, matmul_rate
from benchmarks.offload import RawDisk
from benchmarks.peers.contest import Contestant, compete, machine, our_command, write_result
from benchmarks.peers.inputs import SHAPES, write_model, write_our_run, write_rows

from tonnage.decide.decision import Decision
from tonnage.host.threads import usable_cores
from tonnage.planning.seconds import disk_bytes
from tonnage.planning.states import states

LENGTH = 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="pythia-1b")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--resident", type=int, default=0)
    parser.add_argument("--everything", type=float, metavar="GIB", help="what the run with all on disk may take")
    parser.add_argument("--directory", type=Path, help="on the disk to be used")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    turns = arguments.pairs if arguments.everything else 1  # of a process
    num_steps = turns * (arguments.steps + bool(arguments.everything)) + 2  # one to warm up, and one that nobody takes
    packs = arguments.tokens // LENGTH
    found: dict[str, list[Contestant]] = {"device": [], "disk": []}
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        folder = Path(made)
        config: dict[str, Any] = {
            "model": str(write_model(folder / "model", arguments.shape)),
            "data": {
                "train": str(write_rows(folder / "rows.jsonl", num_steps * packs + 4, least_bytes=LENGTH)),
                "max_length": LENGTH,
                "train_on": "all",
                "over_length": "truncate",
                "max_loss": 1,
                "cache": str(folder / "cache"),
            },
            "batch": {"sequences": packs},
            "steps": num_steps,
            "checkpoint": {"every": 0},
        }
        memory = {"gradient_tier": "device", "parameter_tier": "device", "moments": "fp32", "micro_batch": packs}
        for tier in found:
            where: dict[str, Any] = {"optimizer_tier": tier, "recompute": "none"}
            if arguments.everything:
                where = {f"{what}_tier": tier for what in ("optimizer", "gradient", "parameter")}
                where |= {"recompute": "full"}
            resident = {"optimizer_resident": arguments.resident} if tier == "disk" else {}
            decision = write_our_run(folder / tier, {**config, "memory": {**memory, **where, **resident}})
        floors = _floors(decision, folder) if arguments.everything else {}
        state_bytes = states(decision.plan.layout, decision.plan.model).optimizer
        with capped(int(arguments.everything * 2**30)) if arguments.everything else nullcontext() as group:
            for number in range(arguments.pairs // turns):
                for tier, runs in found.items():
                    (folder / tier / "metrics.jsonl").unlink(missing_ok=True)
                    command = our_command("benchmarks.peers.ours", str(folder / tier))
                    if group is not None and tier == "disk":
                        inside = f"echo $$ > {shlex.quote(str(group / 'cgroup.procs'))}; exec {shlex.join(command)}"
                        command = ["/bin/sh", "-c", inside]
                    runs.append(Contestant(tier, command, folder / f"{tier}-{number}.log", threads=usable_cores()))
                    if not arguments.everything:
                        compete(runs[-1:], rounds=1, steps=arguments.steps)
            if arguments.everything:
                compete([run for runs in found.values() for run in runs], rounds=turns, steps=arguments.steps + 1)
            caps = counted(group) if group is not None else {}
        seconds = {tier: [one for run in runs for one in run.seconds] for tier, runs in found.items()}
        if arguments.everything:
            seconds = {tier: _of_turns(folder / tier / "metrics.jsonl", arguments.steps, turns) for tier in found}
    (losses,) = {tuple(one.losses) for runs in found.values() for one in runs}
    ratios = [here / there for here, there in zip(*seconds.values(), strict=True)]
    result = {
        "benchmark": "exposed_io",
        "machine": machine(),
        "shape": arguments.shape,
        "tokens_per_step": arguments.tokens,
        "state_bytes": state_bytes,
        "resident_bytes": arguments.resident,
        "steps_of_a_turn": arguments.steps,
        "step_seconds": {tier: [round(one, 2) for one in of_turns] for tier, of_turns in seconds.items()},
        "cpu_seconds": {
            tier: [round(one, 2) for run in runs for one in run.cpu_seconds] for tier, runs in found.items()
        },
        "peak_bytes": {tier: max(one.peak_bytes for one in runs) for tier, runs in found.items()},
        "losses": losses,
        "share_of_tokens_per_second_in_memory": [round(ratio, 3) for ratio in ratios],
        "share_median": round(statistics.median(ratios), 3),
        "limit": 1 / 1.15 if arguments.everything else 0.9,
        **({"everything_in_bytes": int(arguments.everything * 2**30), **caps, **floors} if floors else {}),
    }
    write_result(arguments.output, json.loads(json.dumps(result)))


def _of_turns(metrics: Path, steps: int, turns: int) -> list[float]:
    """Seconds of a step, by turns, of those that count."""
    told = [json.loads(line)["step_seconds"] for line in metrics.read_text().splitlines()][1:]
    return [statistics.mean(told[turn * (steps + 1) :][1 : steps + 1]) for turn in range(turns)]


def _floors(decision: Decision, folder: Path) -> dict[str, float]:
    """Seconds that a step with everything on disk takes at least, by its products and by its disk."""
    plan = decision.plan
    moved = disk_bytes(plan.layout, plan.model)
    disk = RawDisk(folder, 4 << 30)
    rate = max(disk.bytes_per_second(threads, 3.0) for threads in (2, 4))
    disk.close()
    products = plan.flops_per_step * 4 / 3 / matmul_rate()  # blocks go forward twice
    return {
        "moved_bytes": moved,
        "disk_bytes_per_second": round(rate),
        "floor_of_disk_seconds": round(moved / rate, 2),
        "floor_of_products_seconds": round(products, 2),
    }


if __name__ == "__main__":
    main()
