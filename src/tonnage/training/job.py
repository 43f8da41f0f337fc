"""The parts of a running job, as one rank holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from tonnage.checkpoint.save import Cursor
from tonnage.data import PackedDataset
from tonnage.offload.pages import Pages
from tonnage.optim.loss_scale import LossScale
from tonnage.optim.optimizer import ShardedOptimizer
from tonnage.optim.schedule import Schedule
from tonnage.parallel.streaming import over_pages
from tonnage.parallel.world import World
from tonnage.training.batch import Deal, RankStep, training_steps
from tonnage.training.kto import KtoLoss
from tonnage.training.memory import HeapLimit
from tonnage.training.moves import DiskUse, HostUse
from tonnage.training.pipeline import Pipeline
from tonnage.training.preferences import PairLoss, RewardLoss
from tonnage.training.routing import ExpertLoad


@dataclass(frozen=True)
class Job:
    world: World
    pipeline: Pipeline
    """The model, or this rank's stages of it, ending in its loss; what the loop runs."""
    parameters: Mapping[str, nn.Parameter]
    """Of this rank's stages by name, sharded; an evaluation may leave gathered ones in their place there."""
    optimizer: ShardedOptimizer
    schedule: Schedule
    clip: float
    """Largest global gradient norm; 0 is none."""
    train_data: PackedDataset
    validation_data: PackedDataset | None
    deal: Deal
    num_packs: int
    seed: int
    pair_loss: PairLoss | RewardLoss | KtoLoss | None = None
    """The loss of pairs of answers, or of answers good and bad, where that is what is minimised."""
    loss_scale: LossScale = field(default_factory=LossScale)
    skip_limit: int = 0
    """Steps in a row that may be skipped for not being finite."""
    adds_up: bool = True
    """Whether a gradient takes up every micro-batch. Below ZeRO 2 they are summed elsewhere and reduced once."""
    source_names: Mapping[int, str] = field(default_factory=dict)
    """Of the rows of ``validation_data``, by their number."""
    general_data: PackedDataset | None = None
    """Rows that are not trained on, whose loss tells what is forgotten."""
    general_names: Mapping[int, str] = field(default_factory=dict)
    cursor: Cursor = field(default_factory=Cursor)
    """How far the run is: where the loop goes on."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What checkpoints say of the run besides: config, data, layout."""
    reads_late: bool = False
    """Whether loss and norm of a step are read when the passes of the next are asked for (``ending``)."""
    pages: Pages | None = None
    """What the parameters of the blocks rest in on disk."""

    quantizes_after: int = 0
    """Steps that are trained without fake quantisation at first."""
    experts: ExpertLoad | None = None
    """How even a mixture of experts is."""
    disk: DiskUse | None = None
    host: HostUse | None = None
    heap: HeapLimit = field(default_factory=HeapLimit)
    """Of what this process keeps of memory that is free."""
    saved_elsewhere: frozenset[str] = frozenset()
    """Names of parameters that are in another stage too, which saves them."""
    saves_still: bool = False
    """Whether parameters that are not trained are saved too: those that the model itself keeps still, where all the
    others are trained, as some routers' biases."""

    @contextmanager
    def quantized(self, enabled: bool) -> Iterator[None]:
        """Let layers that round what they multiply do so inside, or not."""
        with ExitStack() as stack:
            for stage in self.pipeline.stages:
                if stage.quantizers is not None:
                    stack.enter_context(stage.quantizers.used(enabled))
            yield

    def with_rows(self, changed: Callable[[PackedDataset], PackedDataset]) -> Job:
        """The job with other rows: those trained on, and those of validation."""
        validation = None if self.validation_data is None else changed(self.validation_data)
        return replace(self, train_data=changed(self.train_data), validation_data=validation)

    def tally(self) -> Tensor:
        """Sums over the pairs of this rank's last passes, on the device: ``PreferenceLoss.tally``, or nothing."""
        if self.pair_loss is None:
            return torch.zeros(0, dtype=torch.float64, device=self.world.device)
        tally = self.pair_loss.tally(self.world.device)
        return tally if self.world.speaks else torch.zeros_like(tally)

    def figures(self, tally: Sequence[float]) -> dict[str, float]:
        """What is written down of a step besides, from a ``tally`` over all ranks."""
        return {} if self.pair_loss is None else self.pair_loss.figures(tally)

    def steps(self, cursor: Cursor) -> Iterator[RankStep]:
        return training_steps(
            self.train_data,
            self.deal,
            seed=self.seed,
            num_packs=self.num_packs,
            steps_done=cursor.step,
            position=cursor.position,
        )

    def moved(self) -> dict[str, Any]:
        """What came and went since the last call, for the metrics; nothing if all rests on the device."""
        uses = {"disk": self.disk, "host": self.host}
        return {name: use.take() for name, use in uses.items() if use is not None}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and optimizer state that this rank has a part of in a checkpoint."""
        model: dict[str, Tensor] = {
            name: one
            for name, one in self.parameters.items()
            if (one.requires_grad or self.saves_still) and name not in self.saved_elsewhere
        }
        optimizer = self.optimizer.tensors()
        return model, {name: one for name, one in optimizer.items() if name.rpartition(".")[0] in model}

    def snapshot(self) -> tuple[dict[str, Tensor], dict[str, Tensor], set[str]]:
        """``state``, and the names in a checkpoint of those that are copies as of now."""
        model, optimizer = self.state()
        copies = {f"optimizer.{name}" for name in optimizer} if self.optimizer.tensors_are_copies else set()
        if self.pages is not None and any(name in self.pages for name in model):
            copied = over_pages(self.parameters, self.pages.copy())
            model |= copied
            copies |= {f"model.{name}" for name in copied}
        return model, optimizer, copies
