"""When a run saves: often enough that little is lost, seldom enough that training hardly waits.

    step step step ─┬─ step step step step ...          beside: training waits for a copy in memory
                    └ copy ┬ write ............ whole
    step step step ─── write ─── step step ...          between steps: it waits for the disk, and needs no copy

What is lost when a run dies is at most what was trained since the last save began that is whole by then: the steps
between two saves, and the time that one takes until it is whole. ``checkpoint.every: auto`` saves about every
``USUAL_SECONDS``, which leaves room for plans that are too fast; less often where training would wait for more than
``MOST_WAITING`` of its time, but not so seldom that more than ``MOST_LOST_SECONDS`` could be lost. Where both cannot be
had, the latter holds, and the plan says what it costs. A run that is over before the first save is saved at its end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine
from tonnage.planning.profile import ModelProfile
from tonnage.planning.stages import different_parts
from tonnage.planning.states import frozen_bytes, saved_bytes, states

USUAL_SECONDS = 900.0
MOST_LOST_SECONDS = 1800.0
MOST_WAITING = 0.02
"""Of a run's time."""


@dataclass(frozen=True)
class Saving:
    """How a run is saved before its end."""

    every: int = 0
    """Steps between checkpoints; 0 is none before the end."""
    stop_seconds: float = 0.0
    """Training stands still for each."""
    whole_seconds: float = 0.0
    """From then on until it is whole, at the earliest."""

    def waiting(self, step_seconds: float) -> float:
        """Part of its time in which training waits for saves; a save waits for the one before it."""
        between = self.every * step_seconds
        waits = self.stop_seconds + max(0.0, self.whole_seconds - self.stop_seconds - between)
        return waits / (between + waits) if between else 0.0

    def lost_seconds(self, step_seconds: float, num_steps: int) -> float:
        """Most that is lost when the run dies."""
        whole = num_steps * step_seconds
        return min(whole, self.every * step_seconds + self.whole_seconds) if self.every else whole


def saving_of(
    every: int | Literal["auto"],
    layout: Layout,
    model: ModelProfile,
    machine: Machine,
    step_seconds: float,
    num_steps: int,
) -> Saving:
    """How a run of a layout is saved, beside training or not as that says (``Layout.saves_beside``).

    ``every`` is what the config says, in steps.
    """
    resting = Resting.of(layout, model)
    copy, write = copy_seconds(layout, resting, machine), write_seconds(layout, resting, machine)
    stop, whole = copy if layout.saves_beside else copy + write, copy + write
    if every == "auto":
        every = steps_between(stop, whole, step_seconds, num_steps)
    return Saving(every, stop, whole) if every else Saving()


def steps_between(stop_seconds: float, whole_seconds: float, step_seconds: float, num_steps: int) -> int:
    """``checkpoint.every: auto``: 0 where a run is over before it would save."""
    if num_steps * step_seconds <= USUAL_SECONDS:
        return 0
    longest = max(USUAL_SECONDS, stop_seconds * (1 / MOST_WAITING - 1), whole_seconds)
    most = max(1, math.floor((MOST_LOST_SECONDS - whole_seconds) / step_seconds))
    every = min(math.ceil(longest / step_seconds), most)
    return every if every < num_steps else 0


class Resting(NamedTuple):
    """Bytes that a worker saves, which every copy of the states is dealt for."""

    in_memory: int
    on_disk: int

    @staticmethod
    def of(layout: Layout, model: ModelProfile) -> Resting:
        """Of the worker that saves most."""
        part = max(different_parts(model, layout.stages, layout.pipeline), key=lambda part: saved_bytes(layout, part))
        whole = states(layout, part)
        weights = whole.weights - frozen_bytes(layout, part)
        where = "device" if part.frozen.parameters else layout.parameter_tier
        kinds = ((weights, where), (whole.optimizer, layout.optimizer_tier))
        in_memory, on_disk = (
            sum(size for size, tier in kinds if (tier == "disk") == is_on_disk) // layout.replicate
            for is_on_disk in (False, True)
        )
        return Resting(in_memory, on_disk)


def copy_seconds(layout: Layout, resting: Resting, machine: Machine) -> float:
    """How long training stands still until its state is out of the way. What rests on disk is copied there, out of its
    tiles; beside training the rest is copied to memory of the host, which comes anew for the first save."""
    per_node, share = machine.workers_on_node(layout.workers), machine.share(layout.workers)
    in_memory, on_disk = resting
    seconds = 2 * on_disk / (machine.disk_mixed_bytes_per_second / per_node)
    if not layout.saves_beside:
        return seconds
    if machine.kind == "cpu":
        fresh = in_memory / (machine.fresh_bytes_per_second * machine.cores * share)
        return seconds + fresh + 2 * in_memory / (machine.memory_bytes_per_second * share)
    return seconds + in_memory / machine.host_device_bytes_per_second


def write_seconds(layout: Layout, resting: Resting, machine: Machine) -> float:
    """How long a checkpoint takes from memory to the disk, each node writing the parts of its workers."""
    return layout.workers / machine.nodes * sum(resting) / machine.disk_write_bytes_per_second


def in_words(saving: Saving, *, beside: bool, step_seconds: float, num_steps: int) -> str:
    """When a run is saved, and what that costs it."""
    if not saving.every:
        return f"at its end alone: it takes about {_duration(num_steps * step_seconds)}"
    waiting = saving.waiting(step_seconds)
    steps = "every step" if saving.every == 1 else f"every {saving.every:,} steps"
    words = f"{steps} (about {_duration(saving.every * step_seconds)}), training waits {waiting:.1%} of its time"
    if not beside:
        words += " while they are written: there is no memory for a copy to write from"
    if waiting > MOST_WAITING:
        words += f"; if the run dies, {_duration(saving.lost_seconds(step_seconds, num_steps))} are lost"
    return words


def _duration(seconds: float) -> str:
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} hours"
    return f"{seconds / 60:.0f} minutes" if seconds >= 90 else f"{seconds:.0f} s"
