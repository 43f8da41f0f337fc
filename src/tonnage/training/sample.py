"""Time forward and backward passes of small models: ``python -m tonnage.training.sample THREADS PRECISION...``.

Wide blocks tell how fast training multiplies, narrow ones how fast it does all else (``planning.calibration``), and a
large vocabulary what the head makes of both. The passes are those of a worker, in a process that sets up its heap
as a worker does. Prints samples, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tonnage.host.allocators import choose_allocators

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.planning.calibration import TimedStep

DOCUMENT = 256
LEAST_ROUNDS, MOST_ROUNDS = 3, 12
SECONDS = 6.0
"""For the passes of one type, if the least rounds take no longer."""


def shapes(precision: str) -> Iterator[tuple[PreTrainedConfig, int]]:
    """Models, and tokens of a row; of one family only in fp32, which takes several times as long."""
    from transformers import GPTNeoXConfig, LlamaConfig

    for hidden, blocks, vocabulary, tokens in ((1024, 3, 16384, 512), (320, 3, 16384, 1024), (512, 1, 50304, 1024)):
        common: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": hidden // 64}
        common |= {"num_hidden_layers": blocks, "vocab_size": vocabulary}
        if precision != "fp32":
            yield GPTNeoXConfig(**common, intermediate_size=4 * hidden, architectures=["GPTNeoXForCausalLM"]), tokens
        yield LlamaConfig(**common, intermediate_size=11 * hidden // 4, architectures=["LlamaForCausalLM"]), tokens


def prepare(config: PreTrainedConfig, tokens: int, precision: str) -> tuple[Callable[[], None], TimedStep]:
    """A pass of one model on documents side by side, half of their tokens supervised; its sample, but for the time."""
    import torch

    from tonnage.model.anatomy import dissect
    from tonnage.model.build import allocate, build_on_meta, initialise_randomly
    from tonnage.parallel.parallelize import Precision
    from tonnage.planning.layout import PLAIN
    from tonnage.planning.seconds import Work, calling_seconds, timed_step
    from tonnage.training.batch import MicroBatch
    from tonnage.training.loss import LossModel
    from tonnage.training.weigh import Conditions, weigh

    device = torch.device("cpu")
    conditions = Conditions(precision, DOCUMENT)
    profile = weigh(config, None, conditions, recomputes=("none",))
    model = build_on_meta(config, Precision.of(precision, 1).compute)
    loss_model = LossModel(model, dissect(model))
    allocate(model, device)
    initialise_randomly(model, seed=0)
    ids = torch.arange(tokens).remainder(config.vocab_size).unsqueeze(0)
    positions = torch.arange(0, tokens - 1, 2)
    lengths = (DOCUMENT,) * (tokens // DOCUMENT)
    batch = MicroBatch(ids, lengths, positions, ids[0, positions + 1], torch.ones(len(positions)))

    def run() -> None:
        loss_model(batch, float(len(positions))).backward()
        model.zero_grad()

    layout = replace(
        PLAIN,
        precision=precision,  # type: ignore[arg-type]
        row_tokens=tokens,
        row_supervised=len(positions),
        returns_memory=False,
    )
    work = Work(tokens, len(positions), DOCUMENT)
    return run, timed_step(layout, profile, work, "doctor", calling_seconds(layout, profile), 0.0)


def take(precision: str) -> list[TimedStep]:
    """Time all models in turns, so that what slows the machine meanwhile slows all; the first round does not count."""
    prepared = [prepare(config, tokens, precision) for config, tokens in shapes(precision)]
    seconds: list[list[float]] = [[] for _ in prepared]
    end = time.perf_counter() + SECONDS
    for number in range(MOST_ROUNDS):
        if number >= LEAST_ROUNDS and time.perf_counter() > end:
            break
        for (run, _), taken in zip(prepared, seconds, strict=True):
            began = time.perf_counter()
            run()
            taken.append(time.perf_counter() - began)
    return [
        replace(sample, seconds=statistics.median(taken[1:]))
        for (_, sample), taken in zip(prepared, seconds, strict=True)
    ]


def main(threads: int, *precisions: str) -> None:
    choose_allocators()  # as in a worker, before torch is there

    from tonnage.kernels.threads import use_threads
    from tonnage.training.memory import set_up_heap

    use_threads(threads)
    set_up_heap(returns=False)
    print(json.dumps([asdict(sample) for precision in precisions for sample in take(precision)]))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
