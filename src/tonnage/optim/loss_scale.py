"""The loss scale of fp16: gradients too small for the format are lifted into it, and what overflows is let go.

fp16 has no number between zero and 6e-8. The loss is multiplied by a power of two before the backward pass, and the
gradients are divided by it again, in fp32, before the norm is taken and clipped. A scale that makes gradients overflow
is halved, and that step skipped; after many good steps in a row it is doubled. bf16 and fp32 have the range and need
none: their scale is 1 and stays.

The scale of a step is decided by numbers that are the same on every rank, so every rank has the same scale.
"""

from __future__ import annotations


class LossScale:
    """Dynamic loss scale. ``initial`` of 1 with ``growth_steps`` of 0 is no scaling."""

    def __init__(self, initial: float = 1.0, growth_steps: int = 0) -> None:
        self.value = initial
        self.growth_steps = growth_steps
        """Good steps in a row after which the scale doubles; 0 leaves it as it is for good."""
        self.good_steps = 0

    def after_step(self, *, finite: bool) -> None:
        """Take note of whether the step's loss and gradients were finite."""
        if not self.growth_steps:
            return
        if not finite:
            self.value, self.good_steps = self.value / 2, 0
            return
        self.good_steps += 1
        if self.good_steps == self.growth_steps:
            self.value, self.good_steps = self.value * 2, 0
