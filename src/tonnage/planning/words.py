"""Sizes, times and layouts in words."""

from __future__ import annotations

from tonnage.config.rules import TIER_KEYS
from tonnage.planning.layout import Layout


def size(num_bytes: float, digits: int = 3) -> str:
    """Bytes for people."""
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.{digits}g} {unit}"
    return f"{num_bytes / 1e3:.{digits}g} kB"


def too_much(num_bytes: float, most: float) -> str:
    """Bytes that are more than there may be, with as many digits as it takes to see that."""
    return " of ".join(needed_and_most(num_bytes, most))


def needed_and_most(num_bytes: float, most: float) -> tuple[str, str]:
    """The two apart, with as many digits."""
    digits = next((digits for digits in range(3, 15) if size(num_bytes, digits) != size(most, digits)), 15)
    return size(num_bytes, digits), size(most, digits)


def step_time(seconds: float) -> str:
    """Seconds of a step for people."""
    if seconds >= 120:
        return f"{seconds / 60:.3g} min"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def run_time(seconds: float) -> str:
    """Seconds of a run for people."""
    hours = seconds / 3600
    if hours >= 1:
        return f"{hours:.1f} hours"
    minutes = round(60 * hours)
    return f"{minutes} minute{'s' if minutes > 1 else ''}" if seconds >= 60 else step_time(seconds)


def describe(layout: Layout) -> str:
    """A layout in words, without what is ordinary."""
    words = [f"micro-batch {layout.micro_batch}"]
    if layout.workers > 1:
        groups = f" in {layout.replicate} groups" if 1 < layout.replicate < layout.data_workers else ""
        words.insert(0, f"ZeRO {layout.zero}{groups}")
    words += [f"{axis} {degree}" for axis in ("tensor", "context", "pipeline") if (degree := getattr(layout, axis)) > 1]
    if layout.pipeline > 1:
        words.append(f"{layout.schedule}, stages of {', '.join(map(str, layout.stages))} blocks")
    if layout.recompute != "none":
        some = " in {} of {} blocks".format(*layout.recomputed) if layout.recomputed else ""
        words.append(f"recompute {layout.recompute}{some}")
    if layout.sequence_tiles > 1:
        words.append(f"MLPs over the sequence in {layout.sequence_tiles} tiles")
    if layout.tiles > 1:
        words.append(f"large weights in tiles, the largest in {layout.tiles}")
    if layout.blocks_ahead == 1 and layout.may_gather_ahead:
        words.append("one block gathered ahead")
    if layout.activation_tier == "host":
        words.append("inputs of blocks in host memory")
    if layout.moments != "fp32":
        words.append(f"{layout.moments} moments")
    for tier, place in (("disk", "on disk"), ("host", "in host memory")):
        if names := [key.removesuffix("_tier") for key in TIER_KEYS if getattr(layout, key) == tier]:
            words.append(f"{' and '.join(names)} tier {place}")
    if layout.update_tier == "host":
        words.append("updates by the host")
    if layout.optimizer_resident:
        where = "in memory" if layout.device == "cpu" else "on the device"
        words.append(f"{size(layout.optimizer_resident)} of the optimizer {where}")
    if layout.device == "cpu" and layout.returns_memory:
        words.append("freed memory given back")
    return ", ".join(words)


def kernels_in_words(layout: Layout) -> str:
    """Which kernels are switched off, and what that means for a plan; empty where none is."""
    off = ", ".join(layout.kernels_off)
    if not off:
        return ""
    if layout.device != "cpu":
        return f"{off} off: torch's own instead, of those that a GPU has; seconds are counted as with all kernels on"
    return (
        f"{off} off: torch's own instead. Bytes are counted so; seconds are not quite, as rates were measured with all "
        "kernels on: steps may take several times as long"
    )
