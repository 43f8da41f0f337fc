"""Log-probabilities of all answers under the reference: computed once, before training.

The reference is the model as it was before its first step, with additions that are still zero, or another one that is
given up before training begins (``guest``), so training needs no second model. The workers compute them, of the model
as it was in the run's layout, a chunk of packs at a time (``chunks``). The whole goes into the cache, for every run of
the same model, rows, template and precision, and into the run's own directory.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

from tonnage.config.schema import Objective
from tonnage.data import PackedDataset
from tonnage.errors import UserError, user_error
from tonnage.files.writing import write_whole
from tonnage.host.cachedir import kept, room_for
from tonnage.parallel.world import World
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory
from tonnage.training.batch import MicroBatch, evaluation_steps
from tonnage.training.chunks import array_bytes, make_whole, parts_of
from tonnage.training.guest import Guest, free_memory, load_guest
from tonnage.training.job import Job
from tonnage.training.memory import Phases
from tonnage.training.pipeline import Pipeline
from tonnage.training.setting import StoppedEarly, WorkerSetting

CHUNK_PACKS = 256
"""Packs at least whose scores are written at a time."""
SCORES = "scores.npy"


@dataclass(frozen=True)
class _Pairs:
    """The pairs that a run trains or evaluates."""

    train: PackedDataset
    validation: PackedDataset | None
    plan: Plan
    seed: int

    def chunks(self) -> Iterator[tuple[PackedDataset, np.ndarray]]:
        """Their packs, in the micro-batches in which the run sees them for the first time: what is computed beside
        others there is computed beside the same here, and rounded alike."""
        visited = self.train.first_packs(min(self.plan.num_packs, self.train.num_packs), self.seed)
        scored = [(self.train, visited)]
        if self.validation is not None:
            scored.append((self.validation, np.arange(self.validation.num_packs)))
        size = math.ceil(CHUNK_PACKS / self.plan.packs_per_step) * self.plan.packs_per_step
        for dataset, packs in scored:
            for start in range(0, len(packs), size):
                yield dataset, packs[start : start + size]


def with_reference(job: Job, scores: np.ndarray) -> Job:
    """The job with the reference's log-probabilities beside its rows."""
    return job.with_rows(lambda rows: replace(rows, reference=scores))


def reference_scores(
    setting: WorkerSetting, train: PackedDataset, validation: PackedDataset | None, step: int, job: Job | None
) -> np.ndarray:
    """The reference's log-probabilities of the answers of all pairs, float64 (documents, 2): those of the run, of the
    cache, or new ones, of ``job`` as it is or, without one, of the model that the config names. ``step``: the last one
    that the run has done.

    Raises:
        UserError: a run that goes on has lost those of the model as it was.
        StoppedEarly: a rank was asked to stop while they were computed.
    """
    run, plan, phases, world = RunDirectory(setting.config.output), setting.plan, setting.phases, setting.world
    phases.enter("reference", micro_batch=0, num_micro_batches=0)
    assert plan.data.reference_path is not None
    entry, documents = Path(plan.data.reference_path), len(train.source)
    pairs = _Pairs(train, validation, plan, setting.config.seed)
    own, cached, model = run.reference, entry / SCORES, _name_of(setting.config.objective)
    places = (own, cached) if step else (cached,)  # what an earlier start has left may be of other rows
    files = ((path, _read(path, pairs, model)) for path in places if world.rank == 0)
    place, scores = next((file for file in files if file[1] is not None), (None, None))
    (is_there,) = world.sum(float(scores is not None))
    if not is_there and step and job is not None:
        observed = f"step {step} of a run whose reference log-probabilities are gone"
        needed = "those of the model as it was before the first step, of the same rows and all pairs that the run sees"
        raise user_error(observed, needed, "begin the run anew", str(own))
    if scores is not None:
        setting.log(f"reference: {np.isfinite(scores[:, 0]).sum():,} pairs, read from {place}")
    else:
        scores = np.full((documents, 2), np.nan) if is_there else _computed(pairs, setting, entry, job)
    if world.rank == 0 and place != own:
        write_whole(own, _bytes_of_run(scores, plan, model))
    if world.rank == 0 and place is None:
        with suppress(UserError):  # of a cache that cannot be written: the run has its own
            make_whole(entry, 0, {SCORES: scores})
    scores = _of_rank_0(scores, world)
    phases.end()
    return scores


def _computed(pairs: _Pairs, setting: WorkerSetting, entry: Path, job: Job | None) -> np.ndarray:
    """The scores of all pairs that the run trains or evaluates, complete on rank 0, in chunks that are kept."""
    world, phases, objective = setting.world, setting.phases, setting.config.objective
    scores = np.full((len(pairs.train.source), 2), np.nan)
    model: Job | Guest | None = job
    chunks, parts = list(pairs.chunks()), parts_of(entry)
    done, total = 0, sum(len(packs) for _, packs in chunks)
    setting.log(f"reference: computing the log-probabilities of the answers of {total:,} packs")
    for number, (dataset, packs) in enumerate(chunks):
        path, part = parts / f"{number:06}.npy", None
        if world.rank == 0:
            with suppress(OSError, ValueError):
                part = np.load(path, allow_pickle=False)
            if part is not None and not np.array_equal(part[:, 0], _documents(dataset, packs)):
                part = None  # of a run whose steps are of another size
        is_there, stops = world.sum(float(part is not None), float(setting.stop_requested()))
        if stops:
            raise StoppedEarly
        if not is_there:
            if model is None:
                assert objective.reference is not None
                model = load_guest(setting, objective.reference, objective.reference_revision)
                phases.enter("reference", micro_batch=done, num_micro_batches=total)
            part = _scores_of(model, dataset, packs, phases)
            if world.rank == 0:
                with kept(path, "an interrupted pass begins again"):
                    room_for(path)
                    write_whole(path, array_bytes(part))
        if part is not None:
            scores[part[:, 0].astype(np.int64)] = part[:, 1:]
        done += len(packs)
        phases.advance(done, total)
    del model
    free_memory(world.device)
    return scores


class _LogProbabilities:
    """What log-probabilities the answers of a micro-batch have, taken up in the place of a loss."""

    def __init__(self) -> None:
        self.sums = torch.zeros(0, 2, dtype=torch.float64)
        """Of the last micro-batch, fp64 (pairs, 2)."""

    def value_and_slopes(self, logprobs: Tensor, batch: MicroBatch, denominator: float) -> tuple[Tensor, Tensor]:
        """As ``LikelihoodLoss``; there is nothing to be minimised."""
        of_answers = logprobs.double()[: sum(batch.targets_of)].split(batch.targets_of)
        self.sums = torch.stack([of_answer.sum() for of_answer in of_answers]).view(-1, 2) if of_answers else self.sums
        return logprobs.new_zeros(()), torch.zeros_like(logprobs)


@contextmanager
def _taken_up(pipeline: Pipeline) -> Iterator[_LogProbabilities]:
    """Let forward passes tell log-probabilities, and have no other loss."""
    logprobs, losses = _LogProbabilities(), [stage.own for stage in pipeline.stages]
    for stage in pipeline.stages:
        stage.own = logprobs
    yield logprobs
    for stage, loss in zip(pipeline.stages, losses, strict=True):
        stage.own = loss


@torch.no_grad()
def _scores_of(model: Job | Guest, dataset: PackedDataset, packs: np.ndarray, phases: Phases) -> np.ndarray:
    """Documents of some packs, and the log-probabilities of their answers: float64 (documents, 3), on every rank."""
    documents = _documents(dataset, packs)
    sums, visited = torch.zeros(len(documents), 2, dtype=torch.float64), torch.zeros(len(documents))
    with _taken_up(model.pipeline) as logprobs:
        for step in evaluation_steps(dataset, model.deal, packs.tolist()):
            for turn in model.pipeline.passes(step.micro_batches, 1.0, backward=False):
                if turn.run() and turn.batch.documents and model.world.speaks:
                    places = torch.from_numpy(np.searchsorted(documents, turn.batch.documents[::2]))
                    sums[places], visited[places] = logprobs.sums.cpu(), 1.0  # a pair's copies have one score
            phases.progress()  # a chunk may take longer than a step ever should
    totals = np.array(model.world.sum(*sums.flatten().tolist())).reshape(-1, 2)
    copies = np.array(model.world.sum(*visited.tolist()))
    return np.column_stack([documents, totals / np.maximum(copies, 1)[:, None]])


def _documents(dataset: PackedDataset, packs: np.ndarray) -> np.ndarray:
    """The documents of some packs, each once, in order."""
    documents: np.ndarray = np.unique(np.concatenate([dataset.documents(int(pack)) for pack in packs]))
    return documents


def _name_of(objective: Objective) -> str:
    """The model that is the reference; empty for the one that is trained, as it was."""
    return f"{objective.reference}@{objective.reference_revision or ''}" if objective.reference else ""


def _read(path: Path, pairs: _Pairs, model: str) -> np.ndarray | None:
    """The scores in a file; None where they are of other rows or another ``model``, or not of all pairs that the run
    trains or evaluates."""
    try:
        loaded = np.load(path, allow_pickle=False)
        of_run = path.suffix == ".npz"
        scores: np.ndarray = loaded["scores"] if of_run else loaded
        is_same = not of_run or str(loaded["rows"]) == pairs.plan.data.key
        is_same &= not of_run or "model" not in loaded or str(loaded["model"]) == model  # older files do not say it
    except (OSError, ValueError, KeyError, BadZipFile):
        return None
    documents = [_documents(dataset, packs) for dataset, packs in pairs.chunks()]
    is_same &= scores.shape == (len(pairs.train.source), 2)
    return scores if is_same and np.isfinite(scores[np.concatenate(documents)]).all() else None


def _of_rank_0(scores: np.ndarray, world: World) -> np.ndarray:
    if world.size == 1:
        return scores
    values = torch.from_numpy(scores if world.rank == 0 else np.zeros_like(scores)).nan_to_num(0.0).to(world.device)
    return world.total(values).cpu().numpy()


def _bytes_of_run(scores: np.ndarray, plan: Plan, model: str) -> bytes:
    """The file of a run: scores, the key of its rows, and the model that is the reference."""
    file = io.BytesIO()
    np.savez(file, scores=scores, rows=np.array(plan.data.key), model=np.array(model))
    return file.getvalue()
