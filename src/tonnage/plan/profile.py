"""What a model weighs and costs, as numbers: measured without its weights (``train.weigh``), used by the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Line:
    """A quantity of a row of tokens: ``fixed + per_token * tokens``."""

    fixed: float
    per_token: float

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    @staticmethod
    def through(first: tuple[float, float], second: tuple[float, float]) -> Line:
        """The line through two points, each (tokens, value)."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return Line(first[1] - slope * first[0], slope)

    @staticmethod
    def parse(fields: dict[str, float]) -> Line:
        """From its JSON form."""
        return Line(**fields)


@dataclass(frozen=True)
class BlockCost:
    """What one block costs on a row, with one kind of recompute; bytes, floating-point operations of products, and
    bytes that everything else reads and writes."""

    saved: Line
    """Bytes kept from its forward to its backward pass: its input is not counted, its output is."""
    forward_peak: Line
    """Most bytes in its forward pass above those at its start."""
    backward_peak: Line
    """Most bytes in its backward pass above those at its start; gradients of its parameters stay, and are counted."""
    backward_bare_peak: Line
    """The same where a parameter's gradient is gone as soon as it is whole."""
    forward_flops: Line
    backward_flops: Line
    forward_traffic: Line
    backward_traffic: Line

    @staticmethod
    def parse(fields: dict[str, Any]) -> BlockCost:
        """From its JSON form."""
        return BlockCost(**{name: Line.parse(line) for name, line in fields.items()})


HEAD_CHUNK = 1024
"""Supervised tokens whose logits exist at a time (``train.loss``)."""


@dataclass(frozen=True)
class HeadCost:
    """What head and loss cost, by supervised tokens; forward and backward are one pass."""

    peak: Line
    """Most bytes while it runs, above those at its start."""
    flops: Line
    traffic: Line

    @staticmethod
    def parse(fields: dict[str, Any]) -> HeadCost:
        """From its JSON form."""
        return HeadCost(**{name: Line.parse(line) for name, line in fields.items()})


@dataclass(frozen=True)
class OutsideCost:
    """What a row costs outside the blocks: embedding and final norm by tokens, head and loss by supervised tokens."""

    embedded: Line
    """Bytes at the start of the first block: its input, positions, rotary tables."""
    final: Line
    """Bytes kept from the last block's end to the loss: the final norm, and what it saves."""
    small_head: HeadCost
    """Where one chunk takes all supervised tokens of the row."""
    large_head: HeadCost
    """Where there are several chunks."""

    def head(self, supervised: float) -> HeadCost:
        """Cost of head and loss for a number of supervised tokens."""
        return self.small_head if supervised <= HEAD_CHUNK else self.large_head

    @staticmethod
    def parse(fields: dict[str, Any]) -> OutsideCost:
        """From its JSON form."""
        embedded, final = (Line.parse(fields[name]) for name in ("embedded", "final"))
        small, large = (HeadCost.parse(fields[name]) for name in ("small_head", "large_head"))
        return OutsideCost(embedded, final, small, large)


@dataclass(frozen=True)
class ModelProfile:
    """A model weighed without its weights."""

    model_type: str
    num_parameters: int
    embedding_parameters: int
    """Parameters of the token embedding that are not also the head's: looked up, not multiplied."""
    outside_parameters: int
    """Of everything but the blocks: embedding, final norm, head."""
    num_blocks: int
    block_parameters: int
    """Of the largest block."""
    hidden_size: int
    attention_size: int
    """Heads times their size."""
    vocab_size: int
    blocks: dict[str, BlockCost]
    """By kind of recompute; empty if only counted."""
    outside: OutsideCost | None
    has_embedding: bool = True
    has_head: bool = True
    """Of the part of a pipeline's worker, whether it has these."""

    @property
    def share_of_blocks(self) -> float:
        """Of all parameters, those in blocks."""
        return 1 - self.outside_parameters / self.num_parameters

    @property
    def head_parameters(self) -> int:
        """Of the vocabulary projection, whether or not it is the embedding too."""
        return self.vocab_size * self.hidden_size

    @staticmethod
    def parse(fields: dict[str, Any]) -> ModelProfile:
        """From its JSON form."""
        blocks = {kind: BlockCost.parse(cost) for kind, cost in fields.pop("blocks").items()}
        outside = fields.pop("outside")
        return ModelProfile(**fields, blocks=blocks, outside=None if outside is None else OutsideCost.parse(outside))
