"""Gradients of one family in every way to recompute, whole and of an adapter, judged against plain transformers in
fp64: off by no more than some times what plain transformers is in fp32.

Plain transformers computes one document at a time. What its classes compute in fp32 whatever they are given (norms,
softmax, rotary angles) is computed in fp64 too: else the truth would be as rough as what is judged.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import astuple, dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from sweep.families import NoText, NotMade, write_tiny
from tonnage.errors import TonnageError
from tonnage.model.adapters import DOWN, EVERYTHING, AdapterSpec, Trains, find_targets
from tonnage.model.anatomy import dissect
from tonnage.model.files import ModelFiles, find_model, read_model_config
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.recompute import RecomputeMode
from tonnage.parallel.world import World, join_world
from tonnage.planning.layout import PLAIN
from tonnage.training.batch import MicroBatch
from tonnage.training.building import Blueprint, assemble_model
from tonnage.training.isolation import FLOOR, TIMES, InDouble, Isolation, isolation_of, packed_rows, padded_rows

SEEDS = (11, 12)
RECOMPUTES: tuple[RecomputeMode, ...] = ("none", "selective", "full")
NUM_DOCUMENTS, SHORTEST, LONGEST, NUM_TOKENS = 4, 2, 20, 200
RANK, FACTOR, ADDED = 4, 2.0, 0.05
NEARBY, LAST_BIT = 8, 2.0**-23
"""Models that noise is averaged over where one is not enough, and the relative size of a number's last bit in fp32."""
LEAK = 1e-4
"""By how much of itself a token's loss must differ, in the mean, where documents see each other."""


@dataclass(frozen=True)
class Off:
    """By how much a result differs from the truth, relative."""

    loss: float
    norm: float
    gradient: float
    """Norm of the difference of all gradients."""

    def beyond(self, noise: Off) -> bool:
        """Whether it differs by more than some times the ``noise``."""
        pairs = ((self.loss, noise.loss), (self.norm, noise.norm), (self.gradient, noise.gradient))
        return not all(ours <= max(TIMES * theirs, FLOOR) for ours, theirs in pairs)


@dataclass
class Exactness:
    """What became of a family."""

    name: str
    kind: str
    """``exact``, ``different``, ``refused``, ``no text model``, ``not tried`` or ``traceback``."""
    note: str = ""
    rows: str = ""
    """``packed`` or ``padded``."""
    runs: dict[str, dict[str, Off]] = field(default_factory=dict)
    """By seed and what is trained: ``plain fp32`` and each way to recompute."""
    seconds: float = 0.0


@dataclass(frozen=True)
class _Computed:
    loss: float
    gradients: Mapping[str, Tensor]

    def off(self, truth: _Computed) -> Off:
        others = {name: one for name, one in truth.gradients.items() if name not in self.gradients}
        assert not others or _norm(others) == 0.0, f"not trained, and a gradient in plain transformers: {set(others)}"
        differences = {name: one.double() - truth.gradients[name] for name, one in self.gradients.items()}
        norm, of_truth = _norm(self.gradients), _norm(truth.gradients)
        return Off(
            abs(self.loss - truth.loss) / abs(truth.loss),
            abs(norm - of_truth) / of_truth,
            _norm(differences) / of_truth,
        )


def judge(name: str, folder: Path) -> Exactness:
    """Judge a family; whatever happens is the outcome."""
    found, began = Exactness(name, "exact"), time.monotonic()
    try:
        _judge(found, folder)
    except TonnageError as error:
        found.kind, found.note = "refused", str(error).split("\n")[0].replace(f"{folder}/", "")
    except NotMade as error:
        found.kind, found.note = "not tried", str(error).replace("\n", " ")
    except NoText as error:
        found.kind, found.note = "no text model", str(error)
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        found.kind = "traceback"
        found.note += (
            f" {type(error).__name__}: {str(error).strip()[:300]} ({Path(where.filename).name}:{where.lineno})"
        )
    found.seconds = round(time.monotonic() - began, 1)
    return found


def _judge(found: Exactness, folder: Path) -> None:
    isolation: Isolation | None = None
    with join_world() as world:
        for seed in SEEDS:
            write_tiny(found.name, directory := folder / f"model{seed}", seed)
            files = find_model(str(directory))
            isolation = isolation or isolation_of(
                read_model_config(files), device=torch.device("cpu"), long_documents=False
            )
            found.rows = isolation.arrangement
            documents = _documents(seed)
            models = {dtype: _load(directory, dtype) for dtype in (torch.float64, torch.float32)}
            leak = _leak(models[torch.float64], documents)
            assert leak >= LEAK, f"weights that show nothing: {leak}"
            for what, trains in (("whole", EVERYTHING), ("adapter", Trains(AdapterSpec(RANK, FACTOR)))):
                found.note = f"seed {seed}, {what}:"
                try:
                    _judge_training(found, f"seed {seed}, {what}", files, trains, isolation, documents, models, world)
                except TonnageError as error:
                    if trains.all:
                        raise
                    found.runs[f"seed {seed}, {what}: refused: {str(error).splitlines()[0]}"] = {}
    found.note = ""
    for key, runs in found.runs.items():
        for mode, off in runs.items():
            if off.beyond(runs["plain fp32"]):
                found.kind, found.note = "different", f"{found.note} {key}, {mode}".strip()


def _judge_training(
    found: Exactness,
    key: str,
    files: ModelFiles,
    trains: Trains,
    isolation: Isolation,
    documents: list[Tensor],
    models: Mapping[torch.dtype, PreTrainedModel],
    world: World,
) -> None:
    runs: dict[str, Off] = {}
    truth = plain = None
    lay_out: Callable[[list[Tensor]], MicroBatch] = packed_rows if found.rows == "packed" else padded_rows
    for mode in RECOMPUTES:
        if mode in isolation.inexact_recompute:
            continue
        model, ours = _ours(files, trains, isolation, mode, lay_out(documents), world)
        if truth is None:
            additions = {name: one.detach() for name, one in model.named_parameters() if one.requires_grad}
            truth, plain = (
                _plain(models[dtype], documents, {} if trains.all else additions)
                for dtype in (torch.float64, torch.float32)
            )
            runs["plain fp32"] = plain.off(truth)
        runs[mode] = ours.off(truth)
    if any(off.beyond(runs["plain fp32"]) for off in runs.values()):
        runs["plain fp32"] = _noise_nearby(models, documents, {} if trains.all else additions)
    found.runs[key] = runs


@torch.no_grad()
def _noise_nearby(
    models: Mapping[torch.dtype, PreTrainedModel], documents: list[Tensor], additions: Mapping[str, Tensor]
) -> Off:
    """How far plain transformers in fp32 is from fp64: the quadratic mean over models whose weights differ from the
    given ones in the last bit. Of badly conditioned gradients the error in fp32 is ten times as large for one such
    model as for another, so that the error of a single model says little."""
    generator = torch.Generator().manual_seed(2)
    whole = {name: one.clone() for name, one in models[torch.float32].named_parameters()}
    draws: list[Off] = []
    for _ in range(NEARBY):
        for name, one in models[torch.float32].named_parameters():
            one.copy_(whole[name] * (1 + LAST_BIT * torch.randint(-1, 2, one.shape, generator=generator)))
            models[torch.float64].get_parameter(name).copy_(one)
        with torch.enable_grad():
            truth, plain = (_plain(models[dtype], documents, additions) for dtype in (torch.float64, torch.float32))
        draws.append(plain.off(truth))
    for name, weight in whole.items():
        for model in models.values():
            model.get_parameter(name).copy_(weight)
    columns = zip(*map(astuple, draws), strict=True)
    return Off(*(math.sqrt(sum(one * one for one in column) / NEARBY) for column in columns))


def _ours(
    files: ModelFiles, trains: Trains, isolation: Isolation, mode: RecomputeMode, batch: MicroBatch, world: World
) -> tuple[nn.Module, _Computed]:
    layout = replace(PLAIN, recompute=mode, arrangement=isolation.arrangement, attention=isolation.attention)
    precision = Precision(torch.float32, torch.float32)
    blueprint = Blueprint(files, read_model_config(files), world, precision, layout, trains, router_loss=0.0)
    assembled = assemble_model(blueprint)
    if not trains.all:
        _fill_additions(assembled.model)
    loss = assembled.loss_model(batch, float(len(batch.targets)))
    loss.backward()
    return assembled.model, _Computed(float(loss.detach()), _gradients(assembled.model))


@torch.no_grad()
def _fill_additions(model: nn.Module) -> None:
    """An addition that is zero would have no gradient in one of its two matrices."""
    generator = torch.Generator().manual_seed(1)
    for one in model.parameters():
        if one.requires_grad:
            one.copy_(ADDED * torch.randn(one.shape, generator=generator))


def _load(directory: Path, dtype: torch.dtype) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    if dtype == torch.float64:
        model = model.double()
    loaded: PreTrainedModel = model.eval()
    return loaded


def _documents(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(SHORTEST, LONGEST + 1, (NUM_DOCUMENTS,), generator=generator)
    lengths[0] = LONGEST
    lengths = lengths.sort(descending=True).values  # as in padded rows
    return [torch.randint(3, NUM_TOKENS, (length,), generator=generator) for length in lengths.tolist()]


def _plain(model: PreTrainedModel, documents: list[Tensor], additions: Mapping[str, Tensor]) -> _Computed:
    """With ``additions``, of the model whose weights have them added."""
    model.zero_grad(set_to_none=True)
    dtype = next(model.parameters()).dtype
    trained = {name: one.to(dtype, copy=True).requires_grad_() for name, one in additions.items()}
    with InDouble() if dtype == torch.float64 else nullcontext():
        merged = dict(_merged(model, trained)) if trained else {}
        loss = _loss_tensor(model, documents, merged)
        loss.backward()
    gradients = {name: _gradient(one) for name, one in trained.items()} if trained else _gradients(model)
    return _Computed(float(loss.detach()), gradients)


def _merged(model: PreTrainedModel, trained: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    parameters = dict(model.named_parameters())
    for target in find_targets(model, dissect(model), AdapterSpec(RANK, FACTOR).targets):
        down, up = (trained[name] for name in target.names())
        assert DOWN in target.names()[0]
        added = FACTOR * (up @ down)
        yield target.weight, parameters[target.weight].detach() + (added.mT if target.lies_turned else added)


def _leak(model: PreTrainedModel, documents: list[Tensor]) -> float:
    """By how much of itself the loss of a token differs, in the mean, if every document sees those before it."""
    with torch.no_grad(), InDouble():
        apart = [_token_losses(model, document, {}) for document in documents]
        together = _token_losses(model, torch.cat(documents), {})
    starts = [0, *accumulate(map(len, documents))]
    pairs = zip(starts, apart, strict=False)
    differences = [(together[start : start + len(losses)] - losses).abs() for start, losses in pairs]
    return float(torch.cat(differences).mean() / torch.cat(apart).mean())


def _loss_tensor(model: PreTrainedModel, documents: list[Tensor], merged: Mapping[str, Tensor]) -> Tensor:
    """The mean over all tokens but the first of each document."""
    return torch.cat([_token_losses(model, document, merged) for document in documents]).mean()


def _token_losses(model: PreTrainedModel, document: Tensor, merged: Mapping[str, Tensor]) -> Tensor:
    """Of all tokens but the first."""
    ids = document.unsqueeze(0)
    logits = torch.func.functional_call(model, dict(merged), (ids,), {"use_cache": False}).logits[0, :-1]
    return F.cross_entropy(logits, document[1:], reduction="none")


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: _gradient(one) for name, one in model.named_parameters() if one.requires_grad}


def _gradient(parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return float(torch.stack([one.double().square().sum() for one in tensors.values()]).sum().sqrt())
