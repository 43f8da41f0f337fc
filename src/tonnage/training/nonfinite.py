"""Which module, on which rank, in which document made a step's loss or gradient something else than a number.

A step that is not finite changes nothing, so it can be run again, this time with an eye on every module: the output
of each in the forward pass, the gradient of that output in the backward pass. The first one that holds an infinity or
a NaN is named. Documents in a micro-batch never see each other, so the rows that are bad in that tensor say which
documents brought it about; a row of a prefix that documents share says all of these.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from tonnage.checkpoint.save import Cursor
from tonnage.errors import UserError, user_error
from tonnage.kernels.regions import local_part
from tonnage.parallel.units import NAME as UNITS
from tonnage.training.batch import MicroBatch, Packs, RankStep
from tonnage.training.job import Job
from tonnage.training.loss import LossModel
from tonnage.training.pipeline import Pass

SHOWN_DOCUMENTS = 5


@dataclass(frozen=True)
class FirstNonfinite:
    """Where a step first went wrong."""

    rank: int
    micro_batch: int
    """From 1; 0 if it is only their sum that is not finite."""
    what: str
    """What is not finite: an output, a gradient, a weight, the loss."""
    documents: tuple[str, ...]
    """``FILE:ROW`` of the documents in which it is not, at most ``SHOWN_DOCUMENTS`` of them."""
    num_documents: int
    turn: int = 0
    """Place of the pass in the way of a micro-batch through the stages of a pipeline, forward and back."""
    before: int = 0
    """How many tensors of the pass are before it: ranks along ``tensor`` see the same ones, or what comes of them."""

    def __str__(self) -> str:
        if not self.micro_batch:
            return f"{self.what} is not finite (on worker {self.rank}), though all before it is"
        more = self.num_documents - len(self.documents)
        rows = ", ".join(self.documents) + (f" and {more} more" if more > 0 else "")
        return f"{self.what} is not finite, on worker {self.rank} in micro-batch {self.micro_batch}, from {rows}"


def first_nonfinite(job: Job, step: RankStep, denominator: float, source: Packs | None = None) -> FirstNonfinite | None:
    """Run a step again and find where it first goes wrong; every rank calls this and gets the same answer.

    ``denominator`` is what the step's losses were divided by, ``source`` where its packs come from, by default the
    run's data. Gradients are gone afterwards. ``None`` when this time all is finite.
    """
    findings: dict[tuple[int, int], FirstNonfinite] = {}
    job.optimizer.gradients.clear()
    watches: dict[tuple[int, int], _Watch] = {}
    with job.quantized(step.number > job.quantizes_after):
        for turn in job.pipeline.passes(step.micro_batches, denominator):
            key = turn.task.stage, turn.number
            watch = watches.setdefault(key, _Watch(turn.stage, turn.batch))
            with watch:
                turn.run()
            if watch.what and key not in findings:
                findings[key] = _finding(job, turn, watch, source or job.train_data)
    first = min(findings.values(), key=_order, default=None)
    if first is None and (name := _bad_gradient(job)):
        first = FirstNonfinite(job.world.rank, 0, f"the summed gradient of {name}", (), 0)
    job.optimizer.gradients.clear()
    texts = job.world.gather(json.dumps(asdict(first)) if first else "")
    return min((FirstNonfinite(**json.loads(text)) for text in texts if text), key=_order, default=None)


def _order(finding: FirstNonfinite) -> tuple[float, int, int]:
    return finding.micro_batch or math.inf, finding.turn, finding.before


def too_many_skips(cursor: Cursor, last: FirstNonfinite | None) -> UserError:
    """The error that ends a run after too many skipped steps in a row."""
    observed = f"{cursor.skips} steps in a row without a finite loss and gradient, all skipped; in the last, {last}"
    needed = f"at most {cursor.skips - 1} in a row (optimizer.skips)"
    change = "look at the rows named in log.txt, lower optimizer.lr, or use precision: bf16 or fp32"
    return user_error(observed, needed, f"{change}; the last good weights are saved", f"step {cursor.step}")


def _finding(job: Job, turn: Pass, watch: _Watch, source: Packs) -> FirstNonfinite:
    documents = [turn.batch.documents[at] for at in watch.documents if at < len(turn.batch.documents)]
    rows = tuple("{}:{}".format(*source.where(document)) for document in documents[:SHOWN_DOCUMENTS])
    return FirstNonfinite(job.world.rank, turn.number, watch.what, rows, len(documents), turn.turn, watch.before)


def _bad_gradient(job: Job) -> str:
    gradients, bad = job.optimizer.gradients, ""
    for name in gradients.names():
        gradients.turn_to([name])
        if not gradients.local(name).isfinite().all():
            bad = name
            break
    gradients.turn_to([])
    return bad


class _Watch:
    """Notes the first tensor of a micro-batch with a value that is not finite: in the output of any module that runs
    inside this context, or in the gradient of that output, whenever it comes. Of tokens that ranks along ``tensor``
    divide, it sees its own."""

    def __init__(self, root: LossModel, batch: MicroBatch) -> None:
        self.what = ""
        self.before = 0
        self.documents: list[int] = []
        self._root = root
        self._ends, self._owners = list(accumulate(batch.own_lengths)), batch.owners
        self._rows = tuple(batch.input_ids.shape) if batch.is_padded else None
        self._hooks: list[RemovableHandle] = []

    def __enter__(self) -> _Watch:
        self._hooks = [
            module.register_forward_hook(partial(self._after_forward, name.removeprefix("model.")))
            for name, module in self._root.named_modules()
            if not name.startswith(UNITS)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _after_forward(self, name: str, module: nn.Module, _: Any, output: Any) -> None:
        tensors = (leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        for tensor in tensors:
            if self._look(f"the output of {name}" if name else "the loss", tensor):
                weights = (
                    w for w, value in module.named_parameters(recurse=False) if not local_part(value).isfinite().all()
                )
                self.what = next((f"the weight {name}.{weight}" for weight in weights), self.what)
            elif tensor.requires_grad:
                tensor.register_hook(partial(self._after_backward, name))

    def _after_backward(self, name: str, gradient: Tensor) -> None:
        self._look(f"the gradient of the output of {name}" if name else "the gradient of the loss", gradient)

    def _look(self, description: str, tensor: Tensor) -> bool:
        """Whether this is the first tensor that is not finite."""
        if self.what:
            return False
        if tensor.detach().isfinite().all():  # detached, or a recomputed block would save what it did not before
            self.before += 1
            return False
        self.what = description
        if self._rows is not None and tensor.shape[:2] == self._rows:
            are_finite = tensor.detach().isfinite().flatten(1).all(1)
            self.documents = (~are_finite).nonzero().squeeze(1).tolist()
            return True
        axis, first = self._tokens_of(tensor)
        if axis is None:
            self.documents = list(range(self._owners[-1].stop))
            return True
        finite = tensor.detach().movedim(axis, 0).reshape(tensor.shape[axis], -1).isfinite().all(1)
        rows = ((~finite).nonzero().squeeze(1) + first).tolist()
        parts = {next(at for at, end in enumerate(self._ends) if row < end) for row in rows}
        self.documents = sorted({document for part in parts for document in self._owners[part]})
        return True

    def _tokens_of(self, tensor: Tensor) -> tuple[int | None, int]:
        """The axis of its tokens, None where it has none, and which token of the micro-batch is the first there."""
        num_tokens, ranks = self._ends[-1], self._root.token_ranks
        firsts = {num_tokens: 0}
        if ranks is not None:
            own = num_tokens // ranks.size
            firsts[own] = ranks.rank * own
        size = next((size for size in firsts if size in tensor.shape), None)
        return (None, 0) if size is None else (tensor.shape.index(size), firsts[size])
