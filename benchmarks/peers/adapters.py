"""Low-rank additions on this machine: tonnage beside TRL and transformers' Trainer with peft, and bitsandbytes' 4 bits.

    python -m benchmarks.peers.adapters [--shape llama-135m] [--data FILE [--tokenizer FILE]] [--tokens 8192]
                                        [--rounds 4] [--only NAME ...] [--output FILE]

As ``benchmarks.peers.training``: the same documents between two updates, a step in turn, losses compared. Everybody
adds matrices of rank 32 to all linear layers, which begin alike, over weights in bf16 or in nf4. A peer is compared
with ours over the same weights, and our own steps with each other: full weights, LoRA, LoRA on 4 bits. Where a
processor computes faster in fp32, the rows "fp32" are the ones to look at.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers.contest import compete, machine, write_result
from benchmarks.peers.inputs import write_additions
from benchmarks.peers.training import Field, add_arguments, beside

RANK, ALPHA = 32, 64
FULL, PLAIN, PACKED = "tonnage, full weights", "tonnage, LoRA", "tonnage, LoRA on 4 bits"
PLAIN_IN_EIGHTS, PACKED_IN_EIGHTS = (f"{name}, 8 documents at a time" for name in (PLAIN, PACKED))
LOW_RANK: dict[str, Any] = {"rank": RANK, "alpha": ALPHA}
OURS: dict[str, dict[str, Any]] = {
    PLAIN: {"adapter": LOW_RANK},
    PACKED: {"adapter": LOW_RANK | {"quantize": "nf4"}},
    FULL: {},
    PLAIN_IN_EIGHTS: {"adapter": LOW_RANK, "memory": {"micro_batch": 8}},
    PACKED_IN_EIGHTS: {"adapter": LOW_RANK | {"quantize": "nf4"}, "memory": {"micro_batch": 8}},
}
BF16, FP32 = {"documents": 8, "dtype": "bfloat16"}, {"documents": 8, "arguments": {"bf16": False}}
PEERS: dict[str, dict[str, Any]] = {
    "TRL + peft": {"class": "SFTTrainer", **BF16},
    "Trainer + peft": {"class": "Trainer", **BF16},
    "TRL + peft, fp32": {"class": "SFTTrainer", **FP32},
    "Trainer + peft, fp32": {"class": "Trainer", **FP32},
    "TRL + peft, 4 bits": {"class": "SFTTrainer", "bits4": True, **BF16},
    "Trainer + peft, 4 bits": {"class": "Trainer", "bits4": True, **BF16},
}
DEFAULT = (PLAIN, PACKED, FULL, *(name for name in PEERS if "fp32" not in name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", nargs="*", choices=[*OURS, *PEERS], default=DEFAULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as made:
        field = Field(Path(made), arguments)
        start = write_additions(field.folder / "start.safetensors", field.model, RANK)
        adapter = {"adapter": {"rank": RANK, "alpha": ALPHA, "start": str(start)}}
        field_of = {
            name: field.ours(name, OURS[name]) if name in OURS else field.peer(name, PEERS[name] | adapter)
            for name in arguments.only
        }
        others = compete([*field_of.values()], arguments.rounds, 1)
    results = {name: one.result() for name, one in field_of.items()}
    for name, one in field_of.items():
        ours = PACKED if "4 bits" in name else PLAIN
        if name in PEERS and ours in field_of:
            results[name] |= {"compared_with": ours} | beside(field_of[ours], one)
        alike = PACKED_IN_EIGHTS if "4 bits" in name else PLAIN_IN_EIGHTS
        if name in PEERS and alike in field_of:
            results[name] |= {"beside_ours_in_eights": beside(field_of[alike], one)}

    def share(of: str, one: str) -> dict[str, float]:
        if not {of, one} <= field_of.keys():
            return {}
        pairs = zip(field_of[one].seconds, field_of[of].seconds, strict=True)
        return {f"step of {one} over {of}": statistics.median(mine / other for mine, other in pairs)}

    some = next(iter(field_of.values()))
    result = {
        "benchmark": "peers/adapters",
        "machine": machine(),
        "share_of_cpu_that_others_had": others,
        "shape": arguments.shape,
        "data": arguments.data.name if arguments.data else "made by the benchmark",
        "rank": RANK,
        "documents_per_step": field.sequences,
        "tokens_per_step_mean": sum(some.tokens) / len(some.tokens),
        "contestants": results,
        **share(FULL, PLAIN),
        **share(PLAIN, PACKED),
    }
    write_result(arguments.output, result)


if __name__ == "__main__":
    main()
