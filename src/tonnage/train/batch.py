"""From packs to micro-batches: which packs make a step, which rank takes which, and their tensors.

A step consists of the ``packs_per_step`` packs at the global positions after those of the step before, whatever the
number of ranks. The positions of a step are dealt to the ranks in turn, and each rank takes its share in
micro-batches. Ranks must run the same number of forward passes, or their collectives would not meet; where the packs
do not divide evenly, a rank fills up with a blank: one token, nothing supervised, a loss of exactly zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tonnage.data import Pack, PackedDataset, pack_at
from tonnage.model.products import sizes_matter


@dataclass(frozen=True)
class MicroBatch:
    """One forward-backward: documents side by side in one row."""

    input_ids: Tensor
    """int64 (1, tokens)"""
    lengths: tuple[int, ...]
    """Tokens of each document."""
    positions: Tensor
    """int64 (supervised,): positions in the row from which a supervised token is predicted."""
    targets: Tensor
    """int64 (supervised,): those tokens."""
    weights: Tensor
    """fp32 (supervised,): their weights."""
    documents: tuple[int, ...] = ()
    """Index of each document in the dataset; those of ``lengths`` beyond are no data."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the row."""
        return self.input_ids.shape[1]

    @staticmethod
    def of(packs: Sequence[Pack]) -> MicroBatch:
        """The documents of ``packs`` as one row."""
        ids = torch.from_numpy(np.concatenate([pack.input_ids for pack in packs]).astype(np.int64))
        weights = torch.from_numpy(np.concatenate([pack.weights for pack in packs]).astype(np.float32))
        supervised = weights.nonzero().squeeze(1)
        return MicroBatch(
            input_ids=ids.unsqueeze(0),
            lengths=tuple(int(length) for pack in packs for length in pack.lengths),
            positions=supervised - 1,
            targets=ids[supervised],
            weights=weights[supervised],
            documents=tuple(int(document) for pack in packs for document in pack.documents),
        )

    def rounded(self, to: int) -> MicroBatch:
        """The same with multiples of ``to`` tokens and supervised positions: a last document that is no data fills up
        the row, and positions that weigh nothing are supervised besides."""
        more, few = -self.num_tokens % to, -len(self.positions) % to
        return replace(
            self,
            input_ids=F.pad(self.input_ids, (0, more)),
            lengths=(*self.lengths, more) if more else self.lengths,
            positions=F.pad(self.positions, (0, few)),
            targets=F.pad(self.targets, (0, few)),
            weights=F.pad(self.weights, (0, few)),
        )

    @staticmethod
    def blank() -> MicroBatch:
        """A micro-batch that changes nothing."""
        none = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(torch.zeros(1, 1, dtype=torch.int64), (1,), none, none, torch.zeros(0))


@dataclass(frozen=True)
class Step:
    """What one rank does in one step."""

    number: int
    """From 1."""
    next_position: int
    """Global position of the first pack of the step after this one."""
    micro_batches: tuple[MicroBatch, ...]
    tokens: int
    """Tokens of this rank."""
    supervised_tokens: int
    """Supervised tokens of this rank."""
    weight: float
    """Sum of the weights of this rank's supervised tokens."""


@dataclass(frozen=True)
class Deal:
    """How the packs of a run are dealt to its ranks; those that compute the same packs together count as one."""

    packs_per_step: int
    micro_batch: int
    """Packs per forward."""
    rank: int
    world_size: int
    round_to: int = 1
    """Of which numbers of tokens are multiples (``MicroBatch.rounded``)."""

    def share(self, positions: range) -> list[list[int]]:
        """This rank's micro-batches (lists of positions) of a step; an empty list stands for a blank."""
        mine = list(positions[self.rank :: self.world_size])
        most = -(-len(positions) // self.world_size)
        num_micro_batches = -(-most // self.micro_batch)
        return [mine[i * self.micro_batch : (i + 1) * self.micro_batch] for i in range(num_micro_batches)]


def round_to(row_tokens: int, device: torch.device, dtype: torch.dtype) -> int:
    """Of which numbers of tokens the rows should be multiples: so that there are few sizes where that matters, and rows
    of up to ``row_tokens`` grow by a few percent at most."""
    return max(8, min(64, row_tokens // 512 * 16)) if sizes_matter(device, dtype) else 1


def training_steps(
    dataset: PackedDataset, deal: Deal, *, seed: int, num_packs: int, steps_done: int = 0, position: int = 0
) -> Iterator[Step]:
    """The steps of a run of ``num_packs`` packs in all, after ``steps_done``, from a global ``position`` on."""

    def pack(position: int) -> Pack:
        return dataset.pack(pack_at(position, dataset.num_packs, seed))

    for number, start in enumerate(range(position, num_packs, deal.packs_per_step), start=steps_done + 1):
        yield _step(number, range(start, min(start + deal.packs_per_step, num_packs)), deal, pack)


def evaluation_steps(dataset: PackedDataset, deal: Deal) -> Iterator[Step]:
    """The whole dataset once, in its own order, in steps of the same size."""
    for start in range(0, dataset.num_packs, deal.packs_per_step):
        positions = range(start, min(start + deal.packs_per_step, dataset.num_packs))
        yield _step(start // deal.packs_per_step + 1, positions, deal, dataset.pack)


def _step(number: int, positions: range, deal: Deal, pack: Callable[[int], Pack]) -> Step:
    share = [[pack(position) for position in part] for part in deal.share(positions)]
    micro_batches = [MicroBatch.of(packs).rounded(deal.round_to) if packs else MicroBatch.blank() for packs in share]
    return Step(
        number=number,
        next_position=positions.stop,
        micro_batches=tuple(micro_batches),
        tokens=sum(len(pack.input_ids) for packs in share for pack in packs),
        supervised_tokens=sum(int(batch.weights.count_nonzero()) for batch in micro_batches),
        weight=float(sum(batch.weights.double().sum() for batch in micro_batches)),
    )
