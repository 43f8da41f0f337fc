"""A loss of one's own: a function of the log-probabilities of targets, of their weights, and of columns of the rows.

    def pushed(logprobs, weights, score):
        return -(weights * score * logprobs).sum()

Each argument is fp32 (targets,): of every supervised token of some documents, one after another, its log-probability
under the model, its weight, and the numbers that go with its document (``data.carry``). The function gives a *sum*, a
scalar: what it gives for two documents together is what it gives for each alone, added. So it does not matter which
documents share a row, a micro-batch or a worker, and the engine divides once, by the weights of the whole step.

Whether it is such a sum is tried on rows of the run, with log-probabilities that are drawn, before a weight is loaded.
Workers import the function anew: the run keeps where it is found and a hash of its source (``rundir.records``).
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tonnage.errors import Problem, UserError
from tonnage.host.locked import sent
from tonnage.rundir.records import LossNote
from tonnage.training.batch import Document, MicroBatch, Packs, documents_of

Loss = Callable[..., Tensor]
"""``loss(logprobs, weights, **columns)``."""
TRIED = 16
"""Documents that a loss is tried on."""
TOLERANCE = 1e-4
"""Of the sizes that are summed, by which a sum in fp32 may differ from the sum of its parts."""


@dataclass(frozen=True)
class OwnLoss:
    """A function, and which of the columns it takes."""

    function: Loss
    columns: tuple[str, ...] = ()

    @staticmethod
    def of(function: Loss, carry: Sequence[str]) -> OwnLoss:
        """The loss that a function is, of rows that ``carry`` some columns.

        Raises:
            UserError: it does not take log-probabilities and weights, or needs a column that is not carried.
        """
        if not callable(function):
            raise UserError(Problem(f"loss is a {type(function).__name__}", "a function", where="loss"))
        parameters = list(inspect.signature(function).parameters.values())
        by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        first, others = parameters[:2], parameters[2:]
        if len(first) < 2 or any(one.kind not in by_place for one in first):
            raise UserError(
                Problem(
                    f"{name_of(function)}{inspect.signature(function)}",
                    "a function of log-probabilities, weights, and columns that data.carry names",
                    f"def {function.__name__ if hasattr(function, '__name__') else 'loss'}(logprobs, weights): ...",
                    "loss",
                )
            )
        named = [one for one in others if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD, one.POSITIONAL_ONLY)]
        lacking = [one.name for one in named if one.default is one.empty and one.name not in carry]
        lacking += [one.name for one in others if one.kind is one.POSITIONAL_ONLY]
        if lacking:
            carried = ", ".join(carry) or "nothing"
            raise UserError(
                Problem(
                    f"{name_of(function)} takes {', '.join(lacking)}, and the rows carry {carried}",
                    "columns of the rows that data.carry names, taken by their names",
                    f'data={{"train": ..., "carry": {[*carry, *lacking]}}}',
                    "loss",
                )
            )
        takes_all = any(one.kind is one.VAR_KEYWORD for one in others)
        names = {one.name for one in named}
        return OwnLoss(function, tuple(name for name in carry if takes_all or name in names))

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch over ``denominator``, an fp32 scalar, and its derivative with respect to each of
        ``logprobs``, fp32 (supervised,); zeros where no gradient is wanted.

        What fills a row up has no weight, and is not shown to the function.
        """
        slopes, there = torch.zeros_like(logprobs), batch.weights.nonzero().squeeze(1)
        if not len(there):
            return logprobs.new_zeros(()), slopes
        columns = {name: sent(batch.columns[name][there], logprobs.device) for name in self.columns}
        weights, there = sent(batch.weights[there], logprobs.device), sent(there, logprobs.device)
        known = logprobs[there].detach().requires_grad_(torch.is_grad_enabled())
        value = self.function(known, weights, **columns)
        if torch.is_grad_enabled():
            slopes[there] = torch.autograd.grad(value, known)[0] / denominator
        return value.detach().float() / denominator, slopes


@dataclass(frozen=True)
class Tried:
    """A document that a loss is tried on."""

    where: str
    """The row that it came from."""
    weights: Tensor
    """fp32 (targets,)"""
    columns: Mapping[str, Tensor]
    """fp32 (targets,) each"""


def rows_of(data: Packs, order: Iterable[int]) -> Iterator[Tried]:
    """Documents of packs, to try a loss on."""
    documents = (document for number in order for document in documents_of(data.pack(number)))
    return (to_try(document, "{}:{}".format(*data.where(document.number))) for document in documents)


def to_try(document: Document, where: str) -> Tried:
    """A document as one to try a loss on."""
    weights = torch.from_numpy(document.weights[document.weights != 0].astype(np.float32))
    return Tried(where, weights, {name: torch.full_like(weights, one) for name, one in document.carried.items()})


def check_sum(loss: OwnLoss, rows: Iterable[Tried]) -> bool:
    """Try a loss on rows, the first ``TRIED`` of them: whether any of them told anything, being not zero.

    Raises:
        UserError: what it gives is no scalar, not finite, has no gradient, or is no sum over documents; names the row.
        And whatever the function raises.
    """
    chance = torch.Generator().manual_seed(0)
    rows = list(islice(rows, TRIED))
    rows = rows * 2 if len(rows) == 1 else rows
    given: list[tuple[Tensor, Tried]] = []
    total = size = 0.0
    for row in rows:
        logprobs = -0.01 - 8 * torch.rand(len(row.weights), generator=chance)
        alone = _value(loss, [(logprobs, row)])
        given.append((logprobs, row))
        total, size = total + alone, size + abs(alone)
        together = _value(loss, given)
        if abs(together - total) > TOLERANCE * size:
            before = given[-2][1].where if len(given) > 1 else row.where
            raise UserError(
                Problem(
                    f"{name_of(loss.function)} gives {together:.6g} for {len(given)} rows together, up to this one, "
                    f"and {total:.6g} in all for each alone",
                    "a sum: f(a and b) = f(a) + f(b), which tonnage divides once, by the weights of the whole step",
                    "give a .sum(), no .mean(); what compares rows can be worked out before, as a column (data.carry)",
                    f"loss, at {row.where}, after {before}",
                )
            )
    return size > 0


def _value(loss: OwnLoss, given: Sequence[tuple[Tensor, Tried]]) -> float:
    """What a loss gives for documents; raises ``UserError``."""
    where, name = f"loss, at {given[-1][1].where}", name_of(loss.function)
    known = torch.cat([logprobs for logprobs, _ in given]).requires_grad_()
    weights = torch.cat([row.weights for _, row in given])
    columns = {name: torch.cat([row.columns[name] for _, row in given]) for name in loss.columns}
    with torch.enable_grad():
        value: Any = loss.function(known, weights, **columns)
    if not isinstance(value, Tensor) or value.shape != () or not value.dtype.is_floating_point:
        shape = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
        needed = "a sum: a scalar tensor, of shape ()"
        change = "end it with .sum()" if isinstance(value, Tensor) else ""
        raise UserError(Problem(f"{name} gives {shape[:200]}", needed, change, where))
    gradient = torch.autograd.grad(value, known, allow_unused=True)[0] if value.requires_grad else None
    if gradient is None:
        needed = "a function of the log-probabilities, which has a gradient with respect to them"
        raise UserError(
            Problem(f"{name} does not depend on logprobs", needed, "leave out detach() and no_grad()", where)
        )
    for what, tensor in (("the loss", value), ("its gradient", gradient)):
        if not tensor.isfinite().all():
            found = f"{name}: {what} is {'nan' if tensor.isnan().any() else 'infinite'}, with log-probabilities "
            raise UserError(Problem(f"{found}from {-8.01} to -0.01", "numbers that are finite", where=where))
    return float(value.detach().double())


def name_of(function: Loss) -> str:
    """What a function is called."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def note_of(function: Loss) -> LossNote:
    """Where workers find a function, and a hash of its source.

    Raises:
        UserError: it cannot be imported: it is a lambda or stands within a function, a notebook or the program itself.
    """
    module, name = getattr(function, "__module__", None) or "", name_of(function)
    found, source = None, ""
    if module and module != "__main__":
        with suppress(ImportError, AttributeError):
            found = _found(module, name)
    if found is function:
        with suppress(OSError, TypeError):
            source = inspect.getsource(function)
    if not source:
        raise UserError(
            Problem(
                f"{name} of {module or 'no module'}, which workers cannot import",
                "a function at the top of a module: workers are processes of their own",
                "write it to a file, losses.py say, and give losses.FUNCTION; a tonnage.Session takes any function",
                "loss",
            )
        )
    file = Path(inspect.getfile(sys.modules[module])).resolve()
    parts = module.count(".") + (file.stem == "__init__")
    digest = hashlib.blake2b(source.encode(), digest_size=16).hexdigest()
    return LossNote(module, name, digest, str(file.parents[parts]))


def loss_of(note: LossNote, where: str) -> Loss:
    """The function that a note tells of.

    Raises:
        UserError: it is not there any more, or another one.
    """
    if note.folder and note.folder not in sys.path:
        sys.path.append(note.folder)
    try:
        function: Loss = _found(note.module, note.name)
        now = note_of(function)
    except (ImportError, AttributeError) as error:
        raise UserError(
            Problem(f"{note.module}.{note.name} cannot be imported ({error})", "the loss of the run", where=where)
        ) from error
    if now.source != note.source:
        found = f"another source of {note.module}.{note.name} than when the run began"
        raise UserError(Problem(found, "the same function", "put its source back as it was", where))
    return function


def _found(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
