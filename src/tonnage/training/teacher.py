"""What a teacher expects after every supervised token: its likeliest tokens, computed once, before training.

The workers load the teacher before the model that is trained, shared by all of them whatever the run's own layout is,
and give it up again. They compute a chunk of packs at a time, and rank 0 writes each chunk beside the cache's entry
(``KEY.parts``) as soon as it is there: whoever is interrupted goes on behind the last one. The whole goes into the
cache, for every run of the same teacher, rows, precision and number of tokens, and as links into the run's own
directory, from which it trains. Log-probabilities are kept as they are at a temperature of 1: those at any other one,
renormalised over the tokens that are kept, follow from them.
"""

from __future__ import annotations

import gc
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tonnage.data import PackedDataset
from tonnage.data import cache as store
from tonnage.data.packs.taught import INDEX, Taught, chunk_name, row_type
from tonnage.errors import refusals, user_error
from tonnage.files.writing import write_whole
from tonnage.host.cachedir import default_directory, room_for
from tonnage.model.files import read_model
from tonnage.model.matching import check_weights
from tonnage.parallel.parallelize import Precision
from tonnage.parallel.world import World, device_mesh
from tonnage.planning.layout import PLAIN
from tonnage.rundir.directory import RunDirectory
from tonnage.training.batch import Deal, documents_of, evaluation_steps, round_to
from tonnage.training.building import Blueprint, assemble_model, trains_of_files
from tonnage.training.chunks import array_bytes, holds, link, link_whole
from tonnage.training.chunks import parts_of as parts_of
from tonnage.training.isolation import isolation_of, outgrows
from tonnage.training.job import Job
from tonnage.training.pipeline import Pipeline
from tonnage.training.setting import WorkerSetting

CHUNK_TOKENS = 1 << 16
"""Tokens of packs whose rows are written at a time, about; whatever the layout, so that a chunk is a chunk."""


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
        visited = np.arange(train.num_packs)
        if num_packs < train.num_packs:
            visited = np.unique(train.first_packs(num_packs, seed))
        packs = [(0, pack) for pack in visited.tolist()]
        if validation is None:
            return Question((train,), tuple(packs))
        return Question((train, validation), (*packs, *((1, pack) for pack in range(validation.num_packs))))

    def chunks(self) -> Iterator[list[tuple[int, int]]]:
        """Packs whose rows are written together; of one data set."""
        size = max(1, CHUNK_TOKENS // self.datasets[0].max_length)
        for number in range(len(self.datasets)):
            packs = [pack for pack in self.packs if pack[0] == number]
            yield from (packs[start : start + size] for start in range(0, len(packs), size))

    def count(self, pack: tuple[int, int]) -> int:
        """Supervised tokens of a pack."""
        return int(np.count_nonzero(self.datasets[pack[0]].pack(pack[1]).weights))


def ask_teacher(setting: WorkerSetting, train: PackedDataset, validation: PackedDataset | None) -> None:
    """See to it that the run's own directory has what its teacher expects: from before, from the cache, or new.

    Raises:
        UserError: the teacher's files are gone, or there is no room.
    """
    plan, world, phases = setting.plan, setting.world, setting.phases
    assert plan.data.teacher_path is not None
    phases.enter("teacher", micro_batch=0, num_micro_batches=0)
    entry, own = Path(plan.data.teacher_path), own_directory(setting)
    places = [own.exists(), entry.exists()] if world.rank == 0 else [False, False]
    is_own, is_cached = world.sum(*map(float, places))
    if not is_own and not is_cached:
        _compute(setting, Question.of(train, validation, plan.num_packs, setting.config.seed), entry)
    if world.rank == 0 and not is_own:
        link_whole(entry, own, "what the teacher expects")
    setting.log(f"teacher: what it expects is read from {own}{'' if is_own else f', links to {entry}'}")
    world.barrier()
    phases.end()


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
        raise user_error(f"a damaged file ({error})", "what the teacher expects", change, str(own)) from error
    return replace(job, train_data=train, validation_data=validation)


def own_directory(setting: WorkerSetting) -> Path:
    """Where the run has what its teacher expects."""
    assert setting.plan.data.teacher_path is not None
    return RunDirectory(setting.config.output).teacher / Path(setting.plan.data.teacher_path).name


def _compute(setting: WorkerSetting, question: Question, entry: Path) -> None:
    """Ask the teacher about all chunks that are not there yet, and make the cache's entry of them."""
    world, phases, parts = setting.world, setting.phases, parts_of(entry)
    teacher: _Teacher | None = None
    index: list[tuple[int, ...]] = []
    setting.log(f"teacher: computing the likeliest tokens after those of {len(question.packs):,} packs")
    done = 0
    for number, chunk in enumerate(question.chunks()):
        counts = [question.count(pack) for pack in chunk]
        starts = np.cumsum([0, *counts])[:-1].tolist()
        index += [(*pack, number, *place) for pack, place in zip(chunk, zip(starts, counts, strict=True), strict=True)]
        path = parts / chunk_name(number)
        (is_there,) = world.sum(float(world.rank == 0 and holds(path, sum(counts))))
        if not is_there:
            if teacher is None:
                teacher = _Teacher.load(setting)
                phases.enter("teacher", micro_batch=done, num_micro_batches=len(question.packs))
            rows = teacher.expects(question.datasets[chunk[0][0]], chunk, counts, phases.progress)
            if world.rank == 0:
                with refusals("what the teacher expects could not be written", path):
                    room_for(path)
                    write_whole(path, array_bytes(rows))
        done += len(chunk)
        phases.advance(done, len(question.packs))
    del teacher
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if world.rank == 0:
        store.entry(entry, lambda building: _make_whole(building, parts, np.array(index, dtype=np.int64)))
        shutil.rmtree(parts, ignore_errors=True)
    world.barrier()


@dataclass(frozen=True)
class _Teacher:
    """A teacher with its weights, which all workers share."""

    pipeline: Pipeline
    world: World
    """The same ranks, each of which takes packs of its own."""
    deal: Deal
    """How these are dealt; of a chunk, whatever its size."""
    top: tuple[int, int]
    """How many tokens are kept, and of which they are the likeliest."""
    rows: np.dtype[np.void]

    @staticmethod
    def load(setting: WorkerSetting) -> _Teacher:
        """Build and fill it. Raises ``UserError`` where its files are gone or do not fit."""
        config, plan = setting.config, setting.plan
        objective, max_length = config.objective, plan.data.max_length
        assert objective.teacher is not None
        whole = setting.world
        world = replace(whole, mesh=device_mesh(whole.device, whole.size, 1))
        files, model_config = read_model(
            objective.teacher,
            revision=objective.teacher_revision,
            tokenizer=False,
            trust_remote_code=config.trust_remote_code,
        )
        check_weights(files, model_config, allow_unexpected=config.allow_unexpected)  # which may untie the head
        isolation = isolation_of(
            model_config,
            device=world.device,
            long_documents=outgrows(model_config, max_length),
            cache=default_directory(),
        )
        dtypes = Precision.of(config.precision, world.data_size)
        blueprint = Blueprint(
            files,
            model_config,
            world,
            dtypes,
            replace(PLAIN, arrangement=isolation.arrangement, attention=isolation.attention),
            trains_of_files(files, model_config),
            evaluates=True,
            allow_unexpected=config.allow_unexpected,
            log=setting.log,
            phases=setting.phases,
        )
        most_tokens = max_length * plan.layout.micro_batch
        deal = Deal(
            1,
            plan.layout.micro_batch,
            world.data_rank,
            world.data_size,
            round_to=round_to(most_tokens, world.device, dtypes.compute),
            padded_tokens=most_tokens if isolation.arrangement == "padded" else 0,
        )
        pipeline = Pipeline({0: assemble_model(blueprint).loss_model}, world, dtypes.compute)
        top = objective.top_k, min(model_config.vocab_size, plan.model.vocab_size)
        return _Teacher(pipeline, world, deal, top, row_type(objective.top_k, config.precision))

    @torch.no_grad()
    def expects(
        self,
        dataset: PackedDataset,
        chunk: Sequence[tuple[int, int]],
        counts: Sequence[int],
        progress: Callable[[], None],
    ) -> np.ndarray:
        """Rows of the supervised tokens of packs, which have so many, one after another: on every rank. ``progress`` is
        called after each forward."""
        world, packs, firsts = self.world, [pack for _, pack in chunk], np.cumsum([0, *counts]).tolist()
        of_all = torch.zeros(2, firsts[-1], self.top[0])
        places = defaultdict[tuple[int, int], list[int]](list)
        for number in range(world.data_rank, len(packs), world.data_size):
            first = firsts[number]
            for document in documents_of(dataset.pack(packs[number])):
                places[document.number, document.start].append(first)
                first += int(np.count_nonzero(document.weights))
        for step in evaluation_steps(dataset, replace(self.deal, packs_per_step=len(packs)), packs):
            batches = [replace(batch, top=self.top) for batch in step.micro_batches]
            for turn in self.pipeline.passes(batches, 1.0, backward=False):
                batch, (rows,) = turn.batch, turn.run()
                progress()
                if batch.documents:
                    by_document = rows[:, : sum(batch.targets_of)].float().cpu().split(batch.targets_of, 1)
                    pieces = zip(batch.documents, batch.starts, strict=True)
                    for piece, of_document in zip(pieces, by_document, strict=True):
                        first = places[piece].pop()
                        of_all[:, first : first + of_document.shape[1]] = of_document
        of_all = world.total(of_all.to(world.device)).cpu()
        rows_of_all = np.empty(of_all.shape[1], dtype=self.rows)
        rows_of_all["logprobs"], rows_of_all["tokens"] = of_all.numpy()
        return rows_of_all


def _make_whole(building: Path, parts: Path, index: np.ndarray) -> None:
    """Chunks as an entry, without a copy where links are possible."""
    for number in range(int(index[:, 2].max()) + 1):
        link(parts / chunk_name(number), building / chunk_name(number))
    write_whole(building / INDEX, array_bytes(index))
