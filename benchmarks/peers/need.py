"""How much memory peers need to train an adapter that ours trains inside a cap (``benchmarks/memory_cap.py``).

    python -m benchmarks.peers.need --size 1b [--bits4] [--rank 16] [--tokens 2048] [--length 2048] [--gib 2]
                                    [--capped-alone] [--steps 2] [--output FILE]

The same random bf16 weights in files, the same rows, TRL + peft and Trainer + peft with gradient checkpointing and one
document in a micro-batch, which is how they need least: first without a cap (which takes hours for the largest: leave
it out with ``--capped-alone``), then, with ``--gib``, inside a cgroup of so much. What counts is what the kernel
counted for the whole process, less the page cache: the largest resident size; and whether the kernel killed it. Needs
the right to make a cgroup, and the environment of ``environment.py``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.memory_cap import SHAPES, capped, counted, write_inputs
from benchmarks.peers.contest import Contestant, machine, peers_command
from benchmarks.peers.inputs import write_additions, write_our_run, write_steps
from benchmarks.peers.training import BETAS, CLIP, EPS, LR
from transformers import AutoTokenizer

from tonnage.host.threads import usable_cores

PEERS = {"TRL + peft": "SFTTrainer", "Trainer + peft": "Trainer"}
ENTER = 'echo $$ > "$0" && exec "$@"'
"""A shell enters a cgroup, and becomes the command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1b")
    parser.add_argument("--bits4", action="store_true")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="of a step, about")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--gib", type=float, default=0.0)
    parser.add_argument("--capped-alone", action="store_true")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--output", type=Path)
    said = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=said.directory) as made:
        folder = Path(made)
        write_inputs(folder, said.size, 40 + (said.steps + 1) * said.tokens // 200, stored=True)
        fill_up(folder / "model")
        start = write_additions(folder / "start.safetensors", folder / "model", said.rank)
        sequences = 8 * max(1, said.tokens // 8 // 300)
        config = {
            "model": str(folder / "model"),
            "data": {"train": str(folder / "rows.jsonl"), "max_length": said.length, "cache": str(folder / "cache")}
            | {"pack": False},
            "adapter": {"rank": said.rank},
            "batch": {"sequences": sequences},
            "steps": said.steps + 1,
        }
        write_steps(folder / "steps.json", write_our_run(folder / "order", config), said.steps + 1)
        rows = [
            attempt(folder, name, gib, said, start)
            for name in said.only
            for gib in ([] if said.capped_alone else [0.0]) + ([said.gib] if said.gib else [])
        ]
    result = {
        "benchmark": "peers/need",
        "machine": machine(),
        "model": said.size,
        "bits4": said.bits4,
        "rank": said.rank,
        "documents_per_step": sequences,
        "rows": rows,
    }
    print(json.dumps(result, indent=1))
    if said.output:
        earlier = json.loads(said.output.read_text()) if said.output.exists() else []
        said.output.write_text(json.dumps([*earlier, result], indent=1) + "\n")


def fill_up(model: Path) -> None:
    """Name a token that fills up rows, which the Trainer asks for."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(model)


def attempt(folder: Path, name: str, gib: float, said: argparse.Namespace, start: Path) -> dict[str, Any]:
    """A peer's few steps inside a cap of ``gib``, or none if that is 0."""
    spec = {
        "class": PEERS[name],
        "model": str(folder / "model"),
        "steps": str(folder / "steps.json"),
        "lr": LR,
        "betas": BETAS,
        "eps": EPS,
        "clip": CLIP,
        "documents": 1,
        "dtype": "bfloat16",
        "bits4": said.bits4,
        "arguments": {"gradient_checkpointing": True},
        "adapter": {"rank": said.rank, "alpha": 2 * said.rank, "start": str(start)},
    }
    path = folder / "spec.json"
    path.write_text(json.dumps(spec))
    error, losses = "", list[float]()
    with capped(int((gib or 1024) * 2**30)) as group:
        enter = ["bash", "-c", ENTER, str(group / "cgroup.procs")]
        command = [*enter, *peers_command("benchmarks.peers.trainer_worker", str(path))]
        one = Contestant(name, command, folder / "log", threads=usable_cores())
        try:
            with one:
                one.get_ready()
                one.take(said.steps)
                losses = one.losses
        except SystemExit as ended:
            error = str(ended).splitlines()[-1]
        found = counted(group)
    return {
        "peer": name,
        "cap_bytes": int(gib * 2**30),
        "killed": found.get("killed_by_the_kernel", 0) > 0,
        "error": error,
        "peak_bytes": one.peak_bytes or None,
        "peak_with_page_cache": found.get("peak_with_page_cache"),
        "losses": losses,
        **{key: one.facts[key] for key in ("torch", "transformers", "peft", "trl", "bitsandbytes") if key in one.facts},
    }


if __name__ == "__main__":
    main()
