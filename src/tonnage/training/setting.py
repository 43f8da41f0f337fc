"""What a worker is given, and what follows from it at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tonnage.config import Config
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.world import World
from tonnage.planning.layout import Layout
from tonnage.planning.plan import Plan
from tonnage.planning.space import offload_directories
from tonnage.training.batch import round_to
from tonnage.training.memory import Phases


class StoppedEarly(Exception):
    """A stop was asked for before the first step, when there is nothing yet to save."""


@dataclass(frozen=True)
class WorkerSetting:
    """A config, its plan, this rank among the others, whom to tell, and who may ask it to stop."""

    config: Config
    plan: Plan
    world: World
    log: Callable[[str], None]
    phases: Phases
    stop_requested: Callable[[], bool] = lambda: False

    @property
    def layout(self) -> Layout:
        return self.plan.layout

    @cached_property
    def precision(self) -> Precision:
        """Types of numbers in storage, in products and in sums."""
        return Precision.of(self.config.dtype, self.world.data_size)

    @cached_property
    def multiple(self) -> int:
        """Tokens of a row are filled up to a multiple of so many."""
        few = round_to(self.layout.row_tokens, self.world.device, self.precision.compute)
        return math.lcm(few, self.layout.tensor)  # ranks of the tensor axis divide them

    @cached_property
    def directories(self) -> Sequence[Path]:
        """Where this rank may let something rest on disk."""
        return offload_directories(self.config, self.world.rank)

    @property
    def takes_passes_apart(self) -> bool:
        """Whether gradients of weights are computed later than those of activations."""
        return self.layout.pipeline > 1 and self.layout.schedule == "zero_bubble"
