"""What ``optimizer`` may not say: keys of other schedules than the chosen one, and lengths that do not fit."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.contradiction import Contradiction, of_idle_items, of_other_kinds
from tonnage.config.schema import Config, Optimizer

ENDING = ("cosine", "linear", "constant", "wsd", "polynomial", "cosine_with_restarts")
ONLY_OF: dict[str, tuple[str, ...]] = {
    "final": ENDING,
    "decay": ("wsd",),
    "decay_shape": ("wsd",),
    "power": ("polynomial",),
    "cycles": ("cosine_with_restarts",),
    "timescale": ("inverse_sqrt",),
}
"""Keys of ``optimizer`` -> the schedules that know them."""
OF_MUON: dict[str, tuple[str, ...]] = dict.fromkeys(("momentum", "adjust_lr", "adamw_lr"), ("muon",))
"""Keys of ``optimizer`` that only Muon knows."""


def check_optimizer(config: Config) -> Iterator[Contradiction]:
    """Keys that do not go with each other."""
    optimizer, defaults = config.optimizer, Optimizer()
    yield from of_other_kinds("optimizer", optimizer, defaults, ONLY_OF, "schedule")
    yield from of_other_kinds("optimizer", optimizer, defaults, OF_MUON)
    yield from _lengths(config)
    yield from of_idle_items("optimizer.groups", optimizer.groups, ("lr", "weight_decay"), "parameters")


def _lengths(config: Config) -> Iterator[Contradiction]:
    """Lengths of warm-up and decay."""
    optimizer = config.optimizer
    lengths = {"warmup": "a warm-up"} | ({"decay": "a decay"} if optimizer.schedule == "wsd" else {})
    for name, words in lengths.items():
        key, length = f"optimizer.{name}", getattr(optimizer, name)
        if length >= 1 and length != int(length):
            needed = "a fraction of all steps below 1, or a whole number of steps"
            yield Contradiction((key,), f"{key} is {length!r}", needed)
        if config.steps is not None and length > config.steps:
            yield Contradiction(
                (key, "steps"),
                f"{words} of {length:g} steps in a run of {config.steps}",
                f"at most {config.steps}",
                f"lower {key}, or write it as a fraction",
            )
    if len(lengths) == 2 and (parts := _parts(config)) is not None and sum(parts) > 1:
        yield Contradiction(
            ("optimizer.warmup", "optimizer.decay"),
            f"optimizer.warmup is {optimizer.warmup:g} and optimizer.decay {optimizer.decay:g}: "
            "together more than the run",
            "a warm-up and a decay that fit into the run one after the other",
            "lower one of them",
        )


def _parts(config: Config) -> tuple[float, float] | None:
    """Which parts of a run its warm-up and its decay are; None where that takes the number of all steps."""
    lengths = config.optimizer.warmup, config.optimizer.decay
    if config.steps is None and max(lengths) >= 1:
        return None
    first, second = (length / (config.steps or 1) if length >= 1 else length for length in lengths)
    return (first, second) if max(first, second) <= 1 else None
