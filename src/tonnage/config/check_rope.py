"""What ``rope`` may not say: keys that belong to another type, and bounds that are the wrong way round."""

from __future__ import annotations

from collections.abc import Iterator

from tonnage.config.contradiction import Contradiction
from tonnage.config.schema import Rope

KEYS: dict[str, tuple[str, ...]] = {
    "yarn": ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
    "linear": (),
    "llama3": ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "default": (),
}
"""Keys that a type has beside ``factor`` and ``theta``."""
BOUNDS = {"yarn": ("beta_slow", 1.0, "beta_fast", 32.0), "llama3": ("low_freq_factor", 1.0, "high_freq_factor", 4.0)}
"""The lower and the upper bound of the frequencies that a type changes in part, each with its default."""


def check_rope(rope: Rope) -> Iterator[Contradiction]:
    """Keys and values that do not go together."""
    keys = ("type", "factor", "theta", *KEYS[rope.type])
    for key in sorted(rope.parameters.keys() - set(keys)):
        owners = [type for type, others in KEYS.items() if key in others]
        yield Contradiction(
            (f"rope.{key}", "rope.type"),
            f"rope.{key}, and rope.type is {rope.type}",
            f"keys of {rope.type}: {', '.join(keys[1:])}",
            f"leave rope.{key} out, or rope.type={owners[0]}",
        )
    if rope.type != "default" and rope.factor == 1:
        yield Contradiction(
            ("rope.factor",),
            f"rope.type is {rope.type}, and rope.factor is 1: as many positions as before",
            "how many times as many positions there are to be",
            "rope.factor=4 for instance, or leave rope out",
        )
    if rope.type == "default" and rope.theta is None:
        yield Contradiction(
            ("rope.type", "rope.theta"),
            "rope.type is default, which scales no frequency, and no rope.theta",
            "another base of the frequencies, with which more positions are told apart",
            "rope.theta=1000000 for instance, or rope.type=yarn",
        )
    if rope.type in BOUNDS:
        low, lowest, high, highest = BOUNDS[rope.type]
        least, most = getattr(rope, low) or lowest, getattr(rope, high) or highest
        if least >= most:
            yield Contradiction(
                (f"rope.{low}", f"rope.{high}"),
                f"rope.{low} is {least:g}, and rope.{high} is {most:g}",
                f"rope.{low} below rope.{high}",
                f"rope.{low}={lowest:g} rope.{high}={highest:g}, which are the usual ones",
            )
