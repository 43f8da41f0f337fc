"""Whether what workers tell each other is hidden behind computing: tokens a second of several beside one."""

from __future__ import annotations

from typing import Any

import tonnage
from tonnage.prove.material import SHAPES, bare_shape, data_of, full_rows
from tonnage.prove.proof import Proof

STEPS, BLOCKS = 8, 4


def prove(proof: Proof) -> None:
    """ZeRO 3 and ZeRO 1 on all workers; per worker the same packs."""
    name, length = ("1B", 4096) if proof.on_gpu else ("small", 256)
    shape = {**SHAPES[name], "num_hidden_layers": BLOCKS}
    model, packs = bare_shape(proof.folder / "shape", **shape), 4 if proof.on_gpu else 2
    file = full_rows(proof.folder, packs * STEPS * proof.gpus, length, shape["vocab_size"])

    def rate(case: str, workers: int, **memory: Any) -> float:
        run = tonnage.train(
            model,
            data_of(file, length),
            init="random",
            steps=STEPS,
            batch={"sequences": packs * workers},
            memory=memory,
            launch={"workers": workers},
            checkpoint={"every": 0},
            output=str(proof.folder / case),
        )
        rates = sorted(step.tokens_per_second for step in run.steps[2:])
        proof.more[case] = rates
        return rates[len(rates) // 2]

    alone = rate("one", 1)
    for stage in (3, 1):
        several = rate(f"zero-{stage}", proof.gpus, zero=stage)
        proof.found("tokens", f"{name}, {BLOCKS} blocks, ZeRO {stage}, {proof.gpus} workers", several)
        proof.found("scaling", f"ZeRO {stage}, {proof.gpus} workers", several / (proof.gpus * alone))
