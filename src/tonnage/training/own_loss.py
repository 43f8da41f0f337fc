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
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tonnage.errors import user_error
from tonnage.host.locked import sent
from tonnage.rundir.records import LossNote
from tonnage.training.batch import MicroBatch, Packs, documents_of

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
            raise user_error(f"loss is a {type(function).__name__}", "a function", where="loss")
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        first, others = parameters[:2], parameters[2:]
        by_place = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
        by_name = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        if len(first) < 2 or any(parameter.kind not in by_place for parameter in first):
            needed = "a function of log-probabilities, weights, and columns that data.carry names"
            change = f"def {getattr(function, '__name__', 'loss')}(logprobs, weights): ..."
            raise user_error(f"{name_of(function)}{signature}", needed, change, "loss")
        named = {parameter.name: parameter for parameter in others if parameter.kind in by_name}
        lacking = [name for name in named if named[name].default is Parameter.empty and name not in carry]
        lacking += [parameter.name for parameter in others if parameter.kind is Parameter.POSITIONAL_ONLY]
        if lacking:
            carried = ", ".join(carry) or "nothing"
            observed = f"{name_of(function)} takes {', '.join(lacking)}, and the rows carry {carried}"
            needed = "columns of the rows that data.carry names, taken by their names"
            change = f'data={{"train": ..., "carry": {[*carry, *lacking]}}}'
            raise user_error(observed, needed, change, "loss")
        takes_all = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in others)
        return OwnLoss(function, tuple(name for name in carry if takes_all or name in named))

    @staticmethod
    def check_documents(context: int) -> None:
        """Refuse workers that divide documents. Raises ``UserError``."""
        if context > 1:
            observed = f"a loss of one's own, and {context} workers that divide the tokens of rows"
            needed = "documents that a worker has whole: the function may look at all tokens of one"
            raise user_error(observed, needed, "parallel.context=1", "parallel.context")

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """The loss of a micro-batch over ``denominator``, an fp32 scalar, and its derivative with respect to each of
        ``logprobs``, fp32 (supervised,); zeros where no gradient is wanted.

        What fills a row up has no weight, and is not shown to the function.
        """
        device, slopes, places = logprobs.device, torch.zeros_like(logprobs), batch.weights.nonzero().squeeze(1)
        if not len(places):
            return logprobs.new_zeros(()), slopes
        columns = {name: sent(batch.columns[name][places], device) for name in self.columns}
        weights, places = sent(batch.weights[places], device), sent(places, device)
        inputs = logprobs[places].detach().requires_grad_(torch.is_grad_enabled())
        value = self.function(inputs, weights, **columns)
        if torch.is_grad_enabled():
            slopes[places] = torch.autograd.grad(value, inputs)[0] / denominator
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
    for document in (document for number in order for document in documents_of(data.pack(number))):
        weights = torch.from_numpy(document.weights[document.weights != 0].astype(np.float32))
        columns = {name: torch.full_like(weights, value) for name, value in document.carried.items()}
        yield Tried("{}:{}".format(*data.where(document.number)), weights, columns)


def check_sum(loss: OwnLoss, rows: Iterable[Tried]) -> bool:
    """Try a loss on rows, the first ``TRIED`` of them: whether any of them told anything, being not zero.

    Raises:
        UserError: what it gives is no scalar, not finite, has no gradient, or is no sum over documents; names the row.
        And whatever the function raises.
    """
    chance = torch.Generator().manual_seed(0)
    rows = list(islice(rows, TRIED))
    rows = rows * 2 if len(rows) == 1 else rows
    tried: list[tuple[Tensor, Tried]] = []
    total = size = 0.0
    for row in rows:
        logprobs = -0.01 - 8 * torch.rand(len(row.weights), generator=chance)
        alone = _value(loss, [(logprobs, row)])
        tried.append((logprobs, row))
        total, size = total + alone, size + abs(alone)
        together = _value(loss, tried)
        if abs(together - total) > TOLERANCE * size:
            observed = f"{name_of(loss.function)} gives {together:.6g} for {len(tried)} rows together, up to this one, "
            observed += f"and {total:.6g} in all for each alone"
            needed = "a sum: f(a and b) = f(a) + f(b), which tonnage divides once, by the weights of the whole step"
            change = "give a .sum(), no .mean(); what compares rows can be worked out before, as a column (data.carry)"
            before = tried[-2][1].where if len(tried) > 1 else row.where
            raise user_error(observed, needed, change, f"loss, at {row.where}, after {before}")
    return size > 0


def _value(loss: OwnLoss, tried: Sequence[tuple[Tensor, Tried]]) -> float:
    """What a loss gives for documents; raises ``UserError``."""
    where, name = f"loss, at {tried[-1][1].where}", name_of(loss.function)
    inputs = torch.cat([logprobs for logprobs, _ in tried]).requires_grad_()
    weights = torch.cat([row.weights for _, row in tried])
    columns = {column: torch.cat([row.columns[column] for _, row in tried]) for column in loss.columns}
    with torch.enable_grad():
        value: Any = loss.function(inputs, weights, **columns)
    if not isinstance(value, Tensor) or value.shape != () or not value.dtype.is_floating_point:
        shape = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)
        needed = "a sum: a scalar tensor, of shape ()"
        change = "end it with .sum()" if isinstance(value, Tensor) else ""
        raise user_error(f"{name} gives {shape[:200]}", needed, change, where)
    gradient = torch.autograd.grad(value, inputs, allow_unused=True)[0] if value.requires_grad else None
    if gradient is None:
        needed = "a function of the log-probabilities, which has a gradient with respect to them"
        change = "leave out detach() and no_grad()"
        raise user_error(f"{name} does not depend on logprobs", needed, change, where)
    for part, tensor in (("the loss", value), ("its gradient", gradient)):
        if not tensor.isfinite().all():
            kind = "nan" if tensor.isnan().any() else "infinite"
            observed = f"{name}: {part} is {kind}, with log-probabilities from -8.01 to -0.01"
            raise user_error(observed, "numbers that are finite", where=where)
    return float(value.detach().double())


def name_of(function: Loss) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def note_of(function: Loss) -> LossNote:
    """Where workers find a function, and a hash of its source.

    Raises:
        UserError: it cannot be imported: it is a lambda or stands within a function, a notebook or the program itself.
    """
    module, name = getattr(function, "__module__", None) or "", name_of(function)
    importable, source = None, ""
    if module and module != "__main__":
        with suppress(ImportError, AttributeError):
            importable = attrgetter(name)(import_module(module))
    if importable is function:
        with suppress(OSError, TypeError):
            source = inspect.getsource(function)
    if not source:
        observed = f"{name} of {module or 'no module'}, which workers cannot import"
        needed = "a function at the top of a module: workers are processes of their own"
        change = "write it to a file, losses.py say, and give losses.FUNCTION; a tonnage.Session takes any function"
        raise user_error(observed, needed, change, "loss")
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
        function: Loss = attrgetter(note.name)(import_module(note.module))
        now = note_of(function)
    except (ImportError, AttributeError) as error:
        observed = f"{note.module}.{note.name} cannot be imported ({error})"
        raise user_error(observed, "the loss of the run", where=where) from error
    if now.source != note.source:
        observed = f"another source of {note.module}.{note.name} than when the run began"
        raise user_error(observed, "the same function", "put its source back as it was", where)
    return function
