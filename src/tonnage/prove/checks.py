"""Every check, with what it shows and its tolerance. Pieces measure; this table alone says what is good enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """A figure, and between which bounds it should be."""

    shows: str
    unit: str
    least: float | None = None
    most: float | None = None
    """Without bounds the figure is only told."""
    red: bool = False
    """A line that must not be crossed: a claim about speed or memory, and not about numbers."""
    card: str = ""
    """A part of the name of the card for which the bounds are; of any other the figure is only told."""
    gpu_only: bool = False
    """Whether the bounds hold on a GPU only."""
    numeric: bool = True
    """Whether it depends on what the device computes; if not, it also holds on one that computes nothing."""

    @property
    def tolerance(self) -> str:
        if self.least is not None and self.most is not None:
            return f"{number(self.least)} to {number(self.most)}"
        if self.most is not None:
            return "equal" if self.most == 0 else f"at most {number(self.most)}"
        return "" if self.least is None else f"at least {number(self.least)}"

    def holds(self, figure: float) -> bool:
        """Whether a figure is within the bounds; no number is not."""
        return (self.least is None or figure >= self.least) and (self.most is None or figure <= self.most)


def number(value: float) -> str:
    """A figure as people read it."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.4g}" if abs(value) >= 1e-3 else f"{value:.2g}"


FP32, BF16 = 1e-5, 2e-3
"""Of losses: what is allowed between two ways to compute the same in such a precision."""
H100, H200 = "H100 80GB", "H200"
"""As the driver names the cards (the SXM form)."""

CHECKS: Mapping[str, Check] = {
    # The device.
    "products": Check("matrix products of a training's size", "TFLOP/s"),
    "products, bf16": Check("bf16 products, on a card that is known", "TFLOP/s", least=600, card=H100),
    "memory": Check("bytes read plus written on the device", "TB/s"),
    "memory, H100": Check("memory of an H100", "TB/s", least=2.4, card=H100),
    "memory, H200": Check("memory of an H200", "TB/s", least=3.5, card=H200),
    "host copies": Check("copies between pinned memory and the device", "GB/s"),
    "locked copies": Check("copies of memory that we lock, over those of pinned memory", "times", least=0.9),
    "update rate": Check("AdamW's update", "million parameters/s"),
    # One operation at a time.
    "attention": Check("packed attention's error over that of torch's own, both against fp32", "times", most=2),
    "attention, cosine": Check("packed attention beside fp32, document by document", "cosine", least=0.9999),
    "head, fp32": Check("loss and gradients of the chunked head against whole logits, fp32", "relative", most=FP32),
    "head, bf16": Check("loss of the chunked head against whole logits in fp32, bf16", "relative", most=BF16),
    "update": Check("masters after updates, beside the CPU's loops", "ulps", most=1, gpu_only=True),
    "update, torch": Check(
        "the same of torch's operations on a CPU, whose roots may be a last bit off", "ulps", most=4
    ),
    "update, moments": Check("moments after an update that differ from the loops'", "share", most=1e-3),
    "update, bits": Check("numbers of the eager update that differ from the loops'", "count", most=0, gpu_only=True),
    # Training.
    "losses, fp32": Check("losses of 20 steps against the reference", "relative", most=FP32),
    "losses, bf16": Check("losses of 20 steps against the reference", "relative", most=BF16),
    "norms, bf16": Check("gradient norms of steps against the reference", "relative", most=BF16),
    "packed": Check("losses of packed documents against each in a row of its own, fp32", "relative", most=FP32),
    "same bits": Check("steps whose loss or gradient norm is not the very same", "steps", most=0),
    "micro-batch": Check("losses of other micro-batches, fp32", "relative", most=FP32),
    "resumed": Check("steps that differ from the run that was not stopped", "steps", most=0),
    "resumed, export": Check("bytes of the exported weights that differ", "bytes", most=0),
    "session": Check("steps of a Session that differ from the run's", "steps", most=0),
    "graphs": Check("graphs that torch.compile makes of 16 blocks", "graphs", most=4, numeric=False),
    "compiled, fp32": Check("losses of compiled blocks against eager ones, fp32", "relative", most=FP32),
    "compiled, bf16": Check("losses of compiled blocks against eager ones, bf16", "relative", most=BF16),
    "answers": Check("answers that are not the reference's", "answers", most=0),
    "refusals": Check("mistakes that were not refused in a sentence", "mistakes", most=0, numeric=False),
    "out of memory": Check("lacking memory that was not told in a sentence", "mistakes", most=0, numeric=False),
    "waits": Check("waits of the host for the device, a step", "waits", most=1, gpu_only=True, numeric=False),
    "launches": Check("kernels a step launches", "kernels", numeric=False),
    # Memory and speed.
    "peak": Check(
        "the allocator's peak over the planned one", "times", least=1 / 1.05, most=1 / 0.99, red=True, numeric=False
    ),
    "seconds": Check("seconds of a step over the planned ones", "times"),
    "tokens": Check("tokens a second", "tokens/s"),
    "mfu": Check("part of the card's peak that the model needs", "%"),
    "8B full, tokens": Check("8B, all weights, 4,096 tokens", "tokens/s", least=10_471, red=True, card=H200),
    "8B full, mfu": Check("8B, all weights, 4,096 tokens", "%", least=57.8, red=True, card=H200),
    "8B LoRA, tokens": Check("8B, LoRA, 4,096 tokens", "tokens/s", least=12_473, red=True, card=H100),
    "beside": Check("tokens a second over those of the other", "times"),
    "host tiers": Check("tokens a second with states on the host over those without", "times"),
    # Several devices.
    "several, fp32": Check("losses on several devices against one, fp32", "relative", most=FP32),
    "several, bf16": Check("losses on several devices against one, bf16", "relative", most=BF16),
    "fewer": Check("losses of a run that went on with fewer workers, fp32", "relative", most=FP32),
    "scaling": Check("tokens a second over those of one device times their number", "times"),
}
