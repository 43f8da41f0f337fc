"""A worker like ``train_runs.py`` in which one document is poison; it is told DOCUMENT MODULE WHAT RUN [RUN ...].

Wherever that document is in a micro-batch, its last token comes out of MODULE as infinity (WHAT is ``output``), or the
gradient that comes back to it there is (``gradient``). Document ``all`` poisons every micro-batch. ``RUN+`` reads loss
and norm of a step when the passes of the next are through, as on a GPU.
"""

from dataclasses import replace
from typing import Any

import torch
from train_runs import on_mesh_of, read

from tonnage.errors import UserError
from tonnage.parallel.world import join_world
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble
from tonnage.training.job import Job
from tonnage.training.loop import BetweenSteps, train
from tonnage.training.memory import Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting


class Poison:
    def __init__(self, job: Job, tensor_rank: int, document: str, module: str, what: str) -> None:
        self._document, self._what, self._tensor_rank = document, what, tensor_rank
        self._at: int | None = None
        for stage in job.pipeline.stages:
            if module in dict(stage.model.named_modules()):  # else it is on another worker
                stage.register_forward_pre_hook(self._look)
                stage.model.get_submodule(module).register_forward_hook(self._after)

    def _look(self, module: Any, arguments: tuple[Any, ...]) -> None:
        batch = arguments[0]
        wanted = batch.documents[0] if self._document == "all" and batch.documents else self._document
        self._at, self._row = None, sum(batch.lengths)
        if str(wanted) in map(str, batch.documents):
            place = [str(document) for document in batch.documents].index(str(wanted))
            part = batch.owners.index(range(place, place + 1))
            self._at = sum(batch.lengths[: part + 1]) - 1

    def _after(self, module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor | None:
        length = output.shape[1]
        at = self._at
        if at is not None and self._row > length:  # ranks along ``tensor`` divide its tokens
            at -= self._tensor_rank * length
        if at is None or not 0 <= at < length:
            return None
        factor = torch.ones(length, 1, dtype=output.dtype)
        factor[at] = float("inf")
        if self._what == "output":
            return output * factor
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * factor)
        return None


def main(told: list[str]) -> None:
    document, module, what, *paths = told
    with join_world() as joined:
        for path in paths:
            run = RunDirectory(path.removesuffix("+"))
            config, plan = read(run)
            world = on_mesh_of(joined, plan.layout)
            recorder = Recorder(run, rank=world.rank)
            phases = Phases(PositionFile(run.worker_position(world.rank)))
            job = assemble(WorkerSetting(config, plan, world, recorder.log, phases))
            job = replace(job, reads_late=path.endswith("+"))
            Poison(job, world.mesh.get_local_rank("tensor"), document, module, what)
            every, evaluates = config.checkpoint.steps_between, config.evaluate.steps_between(plan.num_steps)
            between_steps = BetweenSteps(evaluates, every, run.checkpoints, 1)
            try:
                train(job, between_steps, recorder, phases, lambda: False)
            except UserError as error:
                recorder.log(f"UserError: {error}")
            (run.path / f"scale-{world.rank}.txt").write_text(str(job.loss_scale.value))
            recorder.close()
