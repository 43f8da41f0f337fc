"""Why a run does not fit, and what would."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from tonnage.config import Config
from tonnage.errors import Problem
from tonnage.planning.plan import ASSUMED, SAFETY, Budget, Choice
from tonnage.planning.words import describe, needed_and_most, size

KEYS = (
    "micro_batch",
    "recompute",
    "sequence_tiles",
    "activation_tier",
    "zero",
    "optimizer_tier",
    "moments",
    "gradient_tier",
    "parameter_tier",
    "tiles",
)
"""Of ``memory``, which the planner can choose; first those that cost least."""
LIMITS = ("disk", "host")
"""Of ``memory.budget``, which a remedy may lift where the machine has more."""
UNLOCKED = "raise the limit: ulimit -l unlimited, or for a container --ulimit memlock=-1"
"""Where memory must be locked, and may not be."""
LAST_RESORT = (
    "a smaller data.max_length, a smaller model, more memory, or more workers on other machines; --force starts all "
    "the same"
)
"""Where nothing that the planner can choose helps."""


def refusal(config: Config, choices: Sequence[Choice], budget: Budget, fits: Callable[[Config], bool]) -> Problem:
    """What the smallest of ``choices`` holds at its worst moment, and the smallest change with which the run would fit.

    ``fits`` says whether anything that another config allows does.
    """
    if on_device := [choice for choice in choices if choice.peak_bytes <= budget.usable]:
        if on_host := [choice for choice in on_device if budget.host_holds(choice)]:
            smallest = min(on_host, key=lambda choice: choice.disk_bytes + choice.packed_bytes)
            return _disk_refusal(config, smallest, budget, fits)
        smallest = min(on_device, key=lambda choice: choice.host_bytes)
        locks = min(on_device, key=lambda choice: choice.locked_bytes)
        if budget.locked is not None and locks.locked_bytes > budget.locked:
            return _lock_refusal(config, locks, budget.locked, fits)
        return _host_refusal(config, smallest, budget, fits)
    smallest = min(choices, key=lambda choice: choice.peak_bytes)
    peak = smallest.peak
    parts = sorted(peak.bytes.items(), key=lambda item: -item[1])
    held = ", ".join(
        f"{name} {size(num_bytes)}" for name, num_bytes in (*parts[:4], ("runtime", smallest.runtime_bytes))
    )
    return Problem(
        where="a worker's memory" if config.launch.num_workers > 1 else "memory",
        found=f"{size(smallest.peak_bytes)} at the {peak.name} ({held}), with {describe(smallest.layout)}: "
        "the least that the config allows",
        needed=f"{size(budget.usable)}: {SAFETY:.0%} of {size(budget.memory)} ({budget.what})",
        change=_remedy(config, fits),
    )


def _host_refusal(config: Config, smallest: Choice, budget: Budget, fits: Callable[[Config], bool]) -> Problem:
    """Devices have room, their host has not."""
    assert budget.host is not None
    return Problem(
        where="a worker's part of the host's memory",
        found=f"{size(smallest.host_bytes)} for what rests there, with {describe(smallest.layout)}: the least that the "
        "config allows",
        needed=f"{size(SAFETY * budget.host)}: {SAFETY:.0%} of {size(budget.host)}"
        + (f" ({budget.host_what})" if budget.host_what else ""),
        change=_remedy(config, fits),
    )


def _lock_refusal(config: Config, smallest: Choice, most: float, fits: Callable[[Config], bool]) -> Problem:
    """The host may have room, and a worker may not lock as much of it as its device needs."""
    remedy = _remedy(config, fits)
    needed, may = needed_and_most(smallest.locked_bytes, most)
    return Problem(
        where="locked memory",
        found=f"{needed} that a worker locks for its device, with {describe(smallest.layout)}: the least that the "
        "config allows",
        needed=f"{may}: what the system lets a process lock (ulimit -l), to which the driver of this GPU keeps",
        change=UNLOCKED if remedy == LAST_RESORT else f"{remedy}; or {UNLOCKED}",
    )


def _disk_refusal(config: Config, smallest: Choice, budget: Budget, fits: Callable[[Config], bool]) -> Problem:
    """Devices and hosts have room, the disks have not."""
    limit = budget.disk_limit(smallest)
    assert limit is not None
    remedy = _remedy(config, fits)
    if limit.what == "free" and remedy == LAST_RESORT:
        remedy = (
            "make room there, or name larger disks in memory.offload_dirs; otherwise a smaller model, more memory, or "
        )
        remedy += "more workers on other machines"
    needed, most = needed_and_most(limit.needed, limit.most)
    if limit.what == ASSUMED and remedy == LAST_RESORT:
        remedy = f"memory.budget.disk={math.ceil(limit.needed)}, if a machine has so much there"
    return Problem(
        where="a machine's disks",
        found=f"{needed} for what rests there, with {describe(smallest.layout)}: the least that the config allows",
        needed=f"{most} ({'free there' if limit.what == 'free' else limit.what})",
        change=remedy,
    )


def _remedy(config: Config, fits: Callable[[Config], bool]) -> str:
    """Words for the command line with which the run would fit."""
    changes = (*relaxations(config), *alone(config), *lifted(config))
    return next((words for words, changed in changes if fits(changed)), LAST_RESORT)


Relaxed = Iterator[tuple[str, Config]]
"""Words for the command line, and the config that is changed so."""


def relaxations(config: Config) -> Relaxed:
    """What leaves more to the planner, the smallest change first: one key of ``memory``, or all that are said."""
    return _left_open(config, "memory", KEYS)


def lifted(config: Config) -> Relaxed:
    """What lifts a limit that the config sets to a host or its disks, or both."""
    return _left_open(config, "memory.budget", LIMITS)


def _left_open(config: Config, section: str, keys: Sequence[str]) -> Relaxed:
    """What leaves one of the ``keys`` of a section open that are said, or all of them."""
    limited = [key for key in keys if attrgetter(f"{section}.{key}")(config) != "auto"]
    for changed in (*([key] for key in limited), *([limited] if len(limited) > 1 else [])):
        words = " ".join(f"{section}.{key}=auto" for key in changed)
        yield words, config.with_keys(section, dict.fromkeys(changed, "auto"))


def alone(config: Config) -> Relaxed:
    """One worker in place of several, which has no buffers for what several send: where that word alone will do, on
    this machine, of workers that only shard."""
    parallel, launch = config.parallel, config.launch
    if launch.launcher == "local" and launch.num_workers > 1 and parallel.together == parallel.replicate == 1:
        yield "launch.workers=1", config.with_keys("launch", {"workers": 1})
