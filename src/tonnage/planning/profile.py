"""What a model weighs and costs, as numbers: measured without its weights (``training.weigh``), used by the planner."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tonnage.planning.layout import PACKED, Arrangement


@dataclass(frozen=True)
class Line:
    """A quantity of a row of tokens: ``fixed + per_token * tokens``."""

    fixed: float
    per_token: float

    def __call__(self, tokens: float) -> float:
        return self.fixed + self.per_token * tokens

    def __mul__(self, factor: float) -> Line:
        return Line(self.fixed * factor, self.per_token * factor)

    @staticmethod
    def through(first: tuple[float, float], second: tuple[float, float]) -> Line:
        """The line through two points, each (tokens, value)."""
        slope = (second[1] - first[1]) / (second[0] - first[0])
        return Line(first[1] - slope * first[0], slope)


@dataclass(frozen=True)
class Envelope:
    """The largest of some quantities of a row, each a line: for short rows it is another one than for long ones."""

    lines: tuple[Line, ...]

    def __call__(self, tokens: float) -> float:
        return max(line(tokens) for line in self.lines)

    @staticmethod
    def over(first: tuple[float, Sequence[float]], second: tuple[float, Sequence[float]]) -> Envelope:
        """Of the quantities that have the given values at two numbers of tokens, each (tokens, values)."""
        return Envelope.of_all(
            [Line.through((first[0], a), (second[0], b)) for a, b in zip(first[1], second[1], strict=True)]
        )

    @staticmethod
    def of_all(found: Sequence[Line]) -> Envelope:
        """Of quantities that are lines themselves."""
        largest: list[Line] = []  # from no tokens to many, each where it is above all others
        for line in sorted(set(found), key=lambda line: (line.per_token, line.fixed)):
            while largest and line.fixed >= largest[-1].fixed:
                largest.pop()
            while len(largest) > 1 and _meet(largest[-2], line) <= _meet(largest[-2], largest[-1]):
                largest.pop()
            largest.append(line)
        return Envelope(tuple(largest))


def _meet(lower: Line, steeper: Line) -> float:
    """The tokens from which on the steeper line is above the other."""
    return (lower.fixed - steeper.fixed) / (steeper.per_token - lower.per_token)


UNKNOWN, UNKNOWN_PEAK = Line(0.0, 0.0), Envelope((Line(0.0, 0.0),))
"""In the plan of a run that an older version made."""


@dataclass(frozen=True)
class BlockCost:
    """What one block costs on a row, with one kind of recompute; bytes, floating-point operations of products, and
    bytes that everything else reads and writes."""

    saved: Line
    """Bytes kept from its forward to its backward pass: its input is not counted, its output is."""
    forward_peak: Envelope
    """Most bytes in its forward pass above those at its start."""
    backward_peak: Envelope
    """Most bytes in its backward pass above those at its start; gradients of its parameters stay, and are counted."""
    backward_bare_peak: Envelope
    """The same where a parameter's gradient is gone as soon as it is whole."""
    forward_flops: Line
    backward_flops: Line
    forward_traffic: Line
    backward_traffic: Line
    evaluation_peak: Envelope = UNKNOWN_PEAK
    """Most bytes in its forward pass where no backward pass follows, above those at the start of the first block."""
    forward_made: Line = UNKNOWN
    """Bytes of all tensors that its forward pass makes, whether they stay or go."""
    backward_made: Line = UNKNOWN
    fp8_flops: Line = UNKNOWN
    """Of its products, forward and backward, those in fp8."""
    fp8_numbers: Line = UNKNOWN
    """Numbers that are rounded to fp8 for them."""
    held: Line = UNKNOWN
    """Bytes of inputs of blocks that their callers hold to the end of a forward pass, whatever blocks keep."""


HEAD_CHUNK = 1024
"""Supervised tokens whose logits exist at a time (``training.loss``), at most."""
LEAST_CHUNK, HEAD_NUMBERS = 128, 1 << 26
"""Where the head is frozen, so many at least; and logits, at most."""
HEAD_PIECE = 1 << 21
"""Numbers of the gradient of the head's weight that are computed at a time where they are added to others."""


@dataclass(frozen=True)
class HeadCost:
    """What head and loss cost, forward and backward, by supervised tokens."""

    peak: Line
    """Most bytes while the loss is computed, above those at its start."""
    flops: Line
    traffic: Line
    saved: Line = UNKNOWN
    """Bytes kept for the backward pass, which makes the gradient of the weight if there is one chunk."""
    evaluation_peak: Line = UNKNOWN
    """Most bytes while it runs where no gradient is wanted, above those at its start."""
    made: Line = UNKNOWN
    """Bytes of all tensors that are made."""

    def scoring_first(self) -> HeadCost:
        """That of a loss which needs the log-probabilities of all answers before it has a gradient: four passes over
        the weight instead of three."""
        return replace(self, flops=self.flops * (4 / 3), traffic=self.traffic * (4 / 3), made=self.made * (4 / 3))


def head_chunk(vocabulary: int, *, trains: bool, more: int = 0) -> int:
    """How many supervised tokens at most have logits at a time. Chunks of a head that is frozen cost nothing, and have
    ``HEAD_NUMBERS`` logits at most. Several chunks of a head that is trained add up its gradient in fp32; one chunk
    needs no such sum. ``more``: tokens whose logits fit in the memory that the sum would take."""
    return HEAD_CHUNK + more if trains else max(LEAST_CHUNK, min(HEAD_CHUNK, HEAD_NUMBERS // vocabulary))


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
    evaluated: Line = UNKNOWN
    """Bytes from the last block's end to the loss where no backward pass follows."""
    chunk: int = HEAD_CHUNK
    """Supervised tokens of a chunk, at most."""
    final_forward: Envelope = UNKNOWN_PEAK
    """Most bytes in the forward pass of the final norm above those at the last block's end."""
    final_backward: Envelope = UNKNOWN_PEAK
    """Most bytes in its backward pass above those at its end, where its output is held, too."""

    def head(self, supervised: float) -> HeadCost:
        """Cost of head and loss for a number of supervised tokens."""
        return self.small_head if supervised <= self.chunk else self.large_head

    def scoring_first(self) -> OutsideCost:
        """With heads as ``HeadCost.scoring_first``."""
        return replace(self, small_head=self.small_head.scoring_first(), large_head=self.large_head.scoring_first())


@dataclass(frozen=True)
class TowerCost:
    """What a vision tower costs that looks at images while a model is trained, and how much of it there is. Rows of a
    micro-batch are looked at one after another; what that takes is told by the tokens that stand for images."""

    trained: int
    """Parameters that are trained, additions among them."""
    frozen: int
    frozen_bytes: int
    tokens: int
    """Of the fullest row, which was looked at."""
    saved: float
    """Bytes for a token that stay from the forward to the backward pass, features included."""
    forward: float
    """Most bytes in the forward pass of that row above those at its start."""
    backward: float
    """Most bytes in its backward pass above those at its start, gradients of its parameters included."""
    bare_backward: float
    """The same where a parameter's gradient is gone as soon as it is whole."""
    evaluated: float
    """As ``forward``, where no backward pass follows."""
    input_bytes: float
    """Bytes for a token of what the processor makes of images."""
    forward_flops: float
    """For a token."""
    backward_flops: float

    def most(self, peak: float, tokens: float, *, saves: float = 0.0) -> float:
        """Most bytes while they are looked at, the fullest last; of each before it there is what it ``saves``."""
        return peak + saves * max(0.0, tokens - self.tokens)


@dataclass(frozen=True)
class Heads:
    """Heads of attention that a worker has in a block."""

    queries: int
    keys: int
    """Of keys and values."""
    size: int
    """Of queries and keys."""
    of_values: int

    def copies(self, context: int) -> int:
        """How often each of keys and values is sent to workers that divide rows (``model.context``)."""
        return context // math.gcd(context, self.keys)


Rows = tuple[tuple[int, int], ...]
"""How many rows the tensors of blocks have, and how much there is of all that have so many. A shard has whole rows."""


@dataclass(frozen=True)
class Matrices:
    """Weights of one shape."""

    rows: int
    columns: int
    """Numbers in a row."""
    number: int
    stacked: bool
    """Whether a row is a matrix of its own, an expert's."""

    @property
    def size(self) -> int:
        """Parameters of each."""
        return self.rows * self.columns


@lru_cache(1024)
def share_of(rows: Rows, shards: int) -> float:
    """The part of tensors that the first of ``shards`` has: more than others where their rows do not divide."""
    whole = sum(size for _, size in rows)
    return sum(-(-number // shards) * size / number for number, size in rows) / whole if whole else 1 / shards


@dataclass(frozen=True)
class Frozen:
    """What of a model is not trained: numbers of parameters, and bytes at rest, in which they are gathered too."""

    parameters: int
    outside: int
    """Of everything but the blocks."""
    block: int
    """Of the largest block."""
    num_bytes: int
    outside_bytes: int
    block_bytes: int
    head: bool
    """Whether the vocabulary projection is among it."""
    embedding: bool
    rows: Rows = ()
    """In bytes."""

    def part(self, shards: int) -> int:
        """Bytes of it that the fullest of ``shards`` has."""
        blocks = self.num_bytes - self.outside_bytes
        return math.ceil(blocks * share_of(self.rows, shards) + self.outside_bytes / shards)


NOTHING_FROZEN = Frozen(0, 0, 0, 0, 0, 0, head=False, embedding=False)


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
    scores: bool = False
    """Whether the head gives one number, and no logits."""
    shares_prefixes: bool = False
    """Whether its attention can let documents of a row share what they begin with."""
    arrangement: Arrangement = "packed"
    """How documents are laid out so that they keep to themselves (``training.isolation``)."""
    chunk: int = 1
    """Of how many tokens a padded document costs a multiple, in blocks that go through it in chunks."""
    attention: str = PACKED
    """Name of the attention function in transformers' registry."""
    attending_blocks: int | None = None
    """Blocks that have attention; None is all."""
    frozen: Frozen = NOTHING_FROZEN
    largest_matrix: int = 0
    """Numbers of the largest tensor of a block; 0 in the plan of a run that an older version made."""
    adapted_matrices: tuple[tuple[str, int, int], ...] = ()
    """Of each kind of matrices (``attention``, ``MLPs``, ...), how many have additions, and how many there are."""
    adapted: tuple[str, ...] = ()
    """Last parts of the names of layers that have additions."""
    adapts_experts: bool = False
    embedding_additions: int = 0
    """Parameters of low-rank additions to embeddings."""
    rows: Rows = ()
    """Of what is trained, in parameters; nothing in the plan of a run that an older version made."""
    large_weights: tuple[Matrices, ...] = ()
    """Of trained linear layers and experts of blocks, which may come in tiles; nothing in the plan of a run that an
    older version made."""
    large_weights_of_block: tuple[Matrices, ...] = ()
    """Of them, those of the largest block."""
    matrix_share: float = 0.0
    """The part of what is trained in blocks that is matrices, which Muon updates whole."""
    orthogonal_flops: float = 0.0
    """Products of their update, for each of their parameters."""
    orthogonal_width: int = 2
    """Bytes of the numbers that are multiplied there."""
    keeps_blocks: bool = True
    """Whether a part that a rank of a tensor axis has of rows cuts no block of int8 moments."""
    token_ranks: int = 1
    """Ranks that divide the tokens of a row where they do not divide a matrix (``parallel.tensor``)."""
    in_fp8: str = ""
    """What of the blocks is multiplied in fp8, and what is not, in words; nothing where all is in 16 bits."""
    tokenwise_blocks: int = 0
    """Blocks whose MLPs may go through rows in tiles of tokens (``model.anatomy.mlps_of``)."""
    tower: TowerCost | None = None
    """What looks at images while the model is trained, where something does; its parameters are among those outside of
    blocks."""
    heads: tuple[Heads, ...] = ()
    """Of the kinds of attention that it has; none where workers cannot divide the tokens of rows."""

    def __hash__(self) -> int:
        """Of a few numbers, as the maps have no hash: results are cached by profile."""
        return hash((self.num_parameters, self.num_blocks, self.hidden_size, self.frozen.parameters, self.has_head))

    def seeing(self, tower: TowerCost) -> ModelProfile:
        """The same with a tower."""
        frozen, number = self.frozen, tower.trained + tower.frozen
        return replace(
            self,
            num_parameters=self.num_parameters + number,
            outside_parameters=self.outside_parameters + number,
            frozen=replace(
                frozen,
                parameters=frozen.parameters + tower.frozen,
                outside=frozen.outside + tower.frozen,
                num_bytes=frozen.num_bytes + tower.frozen_bytes,
                outside_bytes=frozen.outside_bytes + tower.frozen_bytes,
            ),
            tower=tower,
        )

    def matrices_part(self, shards: int) -> float:
        """Of all matrices that Muon updates, parameters that the fullest of ``shards`` has."""
        return self.matrix_share * (self.trained_parameters - self.trained_outside) * self.share(shards)

    def share(self, shards: int) -> float:
        """The part of what is trained in blocks that the fullest of ``shards`` has."""
        return share_of(self.rows, shards)

    def part(self, shards: int) -> int:
        """Of all that is trained, parameters that the fullest of ``shards`` has."""
        blocks = self.trained_parameters - self.trained_outside
        return math.ceil(blocks * self.share(shards) + self.trained_outside / shards)

    @property
    def trained_parameters(self) -> int:
        """Of all, those that are trained."""
        return self.num_parameters - self.frozen.parameters

    @property
    def trained_outside(self) -> int:
        """Of everything but the blocks, those that are trained."""
        return self.outside_parameters - self.frozen.outside

    @property
    def trained_block(self) -> int:
        """Of the largest block, those that are trained."""
        return self.block_parameters - self.frozen.block

    @property
    def mean_trained_block(self) -> float:
        """Of a block on average, those that are trained."""
        return (self.trained_parameters - self.trained_outside) / self.num_blocks if self.num_blocks else 0.0

    @property
    def mean_frozen_block_bytes(self) -> float:
        """Of a block on average, what is frozen."""
        return (self.frozen.num_bytes - self.frozen.outside_bytes) / self.num_blocks if self.num_blocks else 0.0

    @property
    def trains_head(self) -> bool:
        """Whether the vocabulary projection is here, and trained."""
        return self.has_head and not self.frozen.head

    @property
    def trains_embedding(self) -> bool:
        """Whether the embedding is here, and trained."""
        return self.has_embedding and not self.frozen.embedding

    @property
    def own_hidden(self) -> float:
        """Of the numbers that go from block to block for a token, those that a rank has on average."""
        return self.hidden_size / self.token_ranks

    @property
    def num_attending(self) -> int:
        return self.num_blocks if self.attending_blocks is None else self.attending_blocks

    @property
    def is_tied(self) -> bool:
        """Whether embedding and head are here, and one."""
        return self.has_embedding and self.has_head and not self.embedding_parameters

    @property
    def share_of_blocks(self) -> float:
        """Of all parameters, those in blocks."""
        return 1 - self.outside_parameters / self.num_parameters

    @property
    def head_parameters(self) -> int:
        """Of the vocabulary projection, whether or not it is the embedding too, or of the head of scores."""
        return self.hidden_size if self.scores else self.vocabulary_parameters

    @property
    def vocabulary_parameters(self) -> int:
        """Of a matrix that has a row for each token."""
        return self.vocab_size * self.hidden_size
