"""What a teacher expects after every supervised token: its likeliest tokens, computed once, before training.

The workers load the teacher before the model that is trained, shared by all of them whatever the run's own layout is,
and give it up again. They compute a chunk of packs at a time (``chunks``), for every run of the same teacher, rows,
precision and number of tokens. Log-probabilities are kept as they are at a temperature of 1: those at any other one,
renormalised over the tokens that are kept, follow from them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tonnage.data import PackedDataset
from tonnage.data.packs.features import INDEX, chunk_name
from tonnage.data.packs.taught import Taught, row_type
from tonnage.errors import refusals, user_error
from tonnage.files.writing import write_whole
from tonnage.host.cachedir import room_for
from tonnage.rundir.directory import RunDirectory
from tonnage.training.batch import documents_of, evaluation_steps
from tonnage.training.chunks import array_bytes, holds, make_whole, provide, visited_packs
from tonnage.training.chunks import parts_of as parts_of
from tonnage.training.guest import Guest, free_memory, load_guest
from tonnage.training.job import Job
from tonnage.training.setting import StoppedEarly, WorkerSetting

CHUNK_TOKENS = 1 << 16
"""Tokens of packs whose rows are written at a time, about; whatever the layout, so that a chunk is a chunk."""
WHAT = "what the teacher expects"


@dataclass(frozen=True)
class Question:
    """The packs of a run that a teacher is asked about."""

    datasets: tuple[PackedDataset, ...]
    """Trained on, and validation if there is one."""
    packs: tuple[tuple[int, int], ...]
    """Data set and pack, in the order of the chunks."""

    @staticmethod
    def of(train: PackedDataset, validation: PackedDataset | None, num_packs: int, seed: int) -> Question:
        """Those that a run of ``num_packs`` packs sees."""
        visited = enumerate(visited_packs(train, validation, num_packs, seed))
        packs = tuple((number, pack) for number, of_set in visited for pack in of_set.tolist())
        return Question((train,) if validation is None else (train, validation), packs)

    def chunks(self) -> Iterator[list[tuple[int, int]]]:
        """Packs whose rows are written together; of one data set."""
        size = max(1, CHUNK_TOKENS // self.datasets[0].max_length)
        for number in range(len(self.datasets)):
            packs = [pack for pack in self.packs if pack[0] == number]
            yield from (packs[start : start + size] for start in range(0, len(packs), size))

    def count(self, pack: tuple[int, int]) -> int:
        return int(np.count_nonzero(self.datasets[pack[0]].pack(pack[1]).weights))


def ask_teacher(setting: WorkerSetting, train: PackedDataset, validation: PackedDataset | None) -> None:
    """See to it that the run's own directory has what its teacher expects: from before, from the cache, or new.

    Raises:
        UserError: the teacher's files are gone, or there is no room.
        StoppedEarly: a rank was asked to stop while the teacher was asked.
    """
    plan = setting.plan
    assert plan.data.teacher_path is not None
    entry = Path(plan.data.teacher_path)

    def compute() -> None:
        _compute(setting, Question.of(train, validation, plan.num_packs, setting.config.seed), entry)

    provide(setting, "teacher", WHAT, entry, own_directory(setting), compute)


def with_teacher(job: Job, setting: WorkerSetting) -> Job:
    """The job with what the teacher expects beside its rows. Raises ``UserError`` where the files are damaged."""
    own = own_directory(setting)
    try:
        train, validation = job.train_data, job.validation_data
        train = replace(train, taught=Taught.open(own, 0, train.num_packs))
        if validation is not None:
            validation = replace(validation, taught=Taught.open(own, 1, validation.num_packs))
    except (OSError, ValueError, IndexError) as error:
        change = "remove that directory: the teacher is asked again, or the cache has it"
        raise user_error(f"a damaged file ({error})", WHAT, change, str(own)) from error
    return replace(job, train_data=train, validation_data=validation)


def own_directory(setting: WorkerSetting) -> Path:
    """Where the run has what its teacher expects."""
    assert setting.plan.data.teacher_path is not None
    return RunDirectory(setting.config.output).teacher / Path(setting.plan.data.teacher_path).name


def _compute(setting: WorkerSetting, question: Question, entry: Path) -> None:
    """Ask the teacher about all chunks that are not there yet, and make the cache's entry of them."""
    world, phases, parts, objective = setting.world, setting.phases, parts_of(entry), setting.config.objective
    teacher: Guest | None = None
    index: list[tuple[int, ...]] = []
    setting.log(f"teacher: computing the likeliest tokens after those of {len(question.packs):,} packs")
    done = 0
    for number, chunk in enumerate(question.chunks()):
        counts = [question.count(pack) for pack in chunk]
        starts = np.cumsum([0, *counts])[:-1].tolist()
        index += [(*pack, number, *place) for pack, place in zip(chunk, zip(starts, counts, strict=True), strict=True)]
        path = parts / chunk_name(number)
        is_whole = world.rank == 0 and holds(path, sum(counts))
        is_there, stops = world.sum(float(is_whole), float(setting.stop_requested()))
        if stops:
            raise StoppedEarly
        if not is_there:
            if teacher is None:
                assert objective.teacher is not None
                teacher = load_guest(setting, objective.teacher, objective.teacher_revision)
                phases.enter("teacher", micro_batch=done, num_micro_batches=len(question.packs))
            top = objective.top_k, min(teacher.vocab_size, setting.plan.model.vocab_size)
            expected = _expected(teacher, question.datasets[chunk[0][0]], chunk, counts, top)
            if world.rank == 0:
                rows = np.empty(expected.shape[1], dtype=row_type(objective.top_k, setting.config.precision))
                rows["logprobs"], rows["tokens"] = expected.numpy()
                with refusals(f"{WHAT} could not be written", path):
                    room_for(path)
                    write_whole(path, array_bytes(rows))
        done += len(chunk)
        phases.advance(done, len(question.packs))
    del teacher
    free_memory(world.device)
    if world.rank == 0:
        make_whole(entry, index[-1][2] + 1, {INDEX: np.array(index, dtype=np.int64)})
    world.barrier()


@torch.no_grad()
def _expected(
    teacher: Guest,
    dataset: PackedDataset,
    chunk: Sequence[tuple[int, int]],
    counts: Sequence[int],
    top: tuple[int, int],
) -> Tensor:
    """What a teacher expects of the supervised tokens of packs, which have so many, one after another: fp32 (2,
    supervised, k), log-probabilities and tokens, on every rank. ``top``: k, and the tokens that it chooses from."""
    world, packs, firsts = teacher.world, [pack for _, pack in chunk], np.cumsum([0, *counts]).tolist()
    of_all = torch.zeros(2, firsts[-1], top[0])
    places = defaultdict[tuple[int, int], list[int]](list)
    for number in range(world.data_rank, len(packs), world.data_size):
        first = firsts[number]
        for document in documents_of(dataset.pack(packs[number])):
            places[document.number, document.start].append(first)
            first += int(np.count_nonzero(document.weights))
    for step in evaluation_steps(dataset, replace(teacher.deal, packs_per_step=len(packs)), packs):
        batches = [replace(batch, top=top) for batch in step.micro_batches]
        for turn in teacher.pipeline.passes(batches, 1.0, backward=False):
            batch, (rows,) = turn.batch, turn.run()
            teacher.progress()
            if batch.documents:
                by_document = rows[:, : sum(batch.targets_of)].float().cpu().split(batch.targets_of, 1)
                pieces = zip(batch.documents, batch.starts, strict=True)
                for piece, of_document in zip(pieces, by_document, strict=True):
                    first = places[piece].pop()
                    of_all[:, first : first + of_document.shape[1]] = of_document
    return world.total(of_all.to(world.device)).cpu()
