"""A checkpoint of a run as a Hugging Face model: written aside, then published in one step."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.config import Config, read_config
from tonnage.data import Progress, silent
from tonnage.decide.handing import PLAIN, Handing, Wishes, converter_of, finish, only_merged
from tonnage.decide.models import read_files
from tonnage.decide.quantized_export import check_quantized
from tonnage.errors import user_error
from tonnage.files.reading import read_record
from tonnage.planning.plan import Plan
from tonnage.rundir.directory import RunDirectory, complete_checkpoints, step_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.model.adapters import Trains
    from tonnage.model.files import ModelFiles
    from tonnage.model.starts import Origins


@dataclass(frozen=True)
class StopTokens:
    """What ``data.json`` says beside the account of the data."""

    stop_tokens: list[int]


@dataclass(frozen=True)
class _Trained:
    """A run as its files describe it: what was trained, of which model."""

    run: RunDirectory
    config: Config
    plan: Plan
    files: ModelFiles
    model: PreTrainedConfig
    trains: Trains
    is_part: bool
    """Whether only the text model of the files was trained."""
    architecture: str
    """Of the files."""

    @property
    def origins(self) -> Origins | None:
        """Where additions began, if that was a part of the weights. Raises ``UserError`` where that is lost."""
        from tonnage.model.starts import Origins

        adapter = self.trains.adapter
        return None if adapter is None or adapter.init == "zero" else Origins(self.run.start, adapter)

    @property
    def positions(self) -> dict[str, Any]:
        """Keys of the model's configuration that were others in training than in its files, where positions are."""
        from tonnage.model.rope import positions_in

        before = self.files.adapter
        return positions_in(self.model) if self.config.rope or (before and before.positions) else {}

    @staticmethod
    def of(run: RunDirectory) -> _Trained:
        """Raises ``UserError``."""
        from tonnage.model.files import read_whole_config
        from tonnage.training.building import trains_of

        config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
        files, model = read_files(config, untied=plan.weights.untied)
        model.vocab_size = plan.model.vocab_size
        whole = read_whole_config(files, trust_remote_code=config.trust_remote_code)
        is_part = config.init != "random" and type(whole) is not type(model)
        architecture = next(iter((whole if is_part else model).architectures or ()), "")
        return _Trained(run, config, plan, files, model, trains_of(config), is_part, architecture)


def export_checkpoint(
    run: RunDirectory,
    directory: Path,
    progress: Progress = silent,
    wishes: Wishes = PLAIN,
    *,
    step: int | None = None,
    check_content: bool = False,
) -> list[str]:
    """Export the checkpoint of ``run`` that ``step_of_export`` names, or that of ``step``, to ``directory``: of a run
    that trains an adapter the adapter, or with ``wishes.merge`` the whole model.

    ``check_content``: whether the checkpoint's hashes are recomputed first; one that was just written has no need.

    Raises:
        UserError: no such run, no complete checkpoint, a damaged one, ``directory`` is not empty, the program cannot
            read such a model, or what was written is not the run's.
    """
    from tonnage.checkpoint.resume import choose, damaged
    from tonnage.checkpoint.verify import verify

    if not run.is_run():
        raise user_error(found="no run", needed="a run directory", where=str(run.path))
    checkpoint = choose(run.checkpoints, step_of_export(run) if step is None else step)
    if check_content:
        problems = verify(checkpoint, partial(progress, "verify"))
        if problems:
            raise damaged(checkpoint, *problems)
    trained = _Trained.of(run)
    is_adapter = trained.trains.adapter is not None and not wishes.merge
    scores = trained.config.objective.scores
    if scores and wishes.target != "transformers":
        raise user_error(
            where=f"--for {wishes.target}",
            found="a reward model, which scores texts and writes none",
            needed="transformers, whose AutoModelForSequenceClassification reads it",
            change=f"tonnage export {run.path} {directory}",
        )
    if is_adapter and trained.positions and wishes.target != "transformers":
        raise user_error(
            where=f"--for {wishes.target}",
            found="an adapter of a model whose positions are scaled (rope), which its own config.json does not say",
            needed="--merge, which writes the whole model with its positions",
            change=f"tonnage export {run.path} {directory} --merge --for {wishes.target}",
        )
    if is_adapter and wishes.target == "vllm":
        _check_plain(trained, directory)
    converter = converter_of(wishes, run.path, str(directory), trained.architecture, is_adapter=is_adapter)
    scheme = None
    if wishes.quantized:
        is_whole = trained.trains.adapter is None and not trained.is_part and not scores
        scheme = check_quantized(trained.trains.aware, run.path, directory, target=wishes.target, is_whole=is_whole)
    if is_adapter:
        _export_adapter(trained, checkpoint, directory, wishes.dtype, progress)
        return []
    handing = Handing(wishes, converter, max(trained.config.data.max_length, 4096), scores, scheme)
    return _export_model(trained, checkpoint, directory, handing, progress)


def _check_plain(trained: _Trained, directory: Path) -> None:
    """Refuse to hand vLLM an adapter that it does not compute."""
    adapter = trained.config.adapter
    assert not isinstance(adapter, str)
    if unlike := only_merged(adapter, trained.plan.model):
        raise user_error(
            where="--for vllm",
            found=f"an adapter with {' and '.join(unlike)}, which vLLM does not compute",
            needed="--merge, which adds the adapter to its model",
            change=f"tonnage export {trained.run.path} {directory} --merge --for vllm",
        )


def _export_adapter(trained: _Trained, checkpoint: Path, directory: Path, dtype: str, progress: Progress) -> None:
    from tonnage.checkpoint.adapter import Described, export_adapter
    from tonnage.decide.card import model_card

    run, config, files = trained.run, trained.config, trained.files
    assert trained.trains.adapter is not None
    assert not isinstance(config.adapter, str)
    if dtype not in ("auto", "fp32"):
        raise user_error(
            where="--dtype",
            found=f"{dtype}, and an adapter is written in fp32, as it was trained",
            needed="--dtype with --merge, which writes the whole model",
            change=f"tonnage export {run.path} {directory} --merge --dtype {dtype}",
        )
    base = files.adapter.base if files.adapter is not None else config.model
    export_adapter(
        checkpoint,
        directory,
        config=trained.model,
        described=Described(
            trained.trains.adapter,
            config.adapter.alpha,
            config.adapter.scaling == "rank_stabilised",
            base if not Path(base).expanduser().is_dir() else str(Path(base).expanduser().absolute()),
            files.commit or config.revision,
            trained.origins,
            trained.positions,
        ),
        files=files,
        tokenizer=run.tokenizer,
        card=model_card(run, checkpoint, dtype="fp32", is_adapter=True),
        progress=partial(progress, "export"),
    )


def _export_model(
    trained: _Trained, checkpoint: Path, directory: Path, handing: Handing, progress: Progress
) -> list[str]:
    import torch

    from tonnage.checkpoint.description import ExportForm
    from tonnage.checkpoint.export import Start, export
    from tonnage.decide.card import model_card

    run, config, trains, wishes = trained.run, trained.config, trained.trains, handing.wishes
    if wishes.merge and trains.adapter is None:
        raise user_error(
            where="--merge",
            found="a run that trained the model's own weights",
            needed="a run with an adapter",
            change="leave --merge out: the export is the whole model",
        )
    dtype = config.dtype if wishes.dtype == "auto" else wishes.dtype
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    numbers = f"{dtype}, those of the blocks {handing.scheme.name}" if handing.scheme else dtype
    weights = trained.plan.weights
    return export(
        checkpoint,
        directory,
        ExportForm(trained.model, run.tokenizer, read_record(run.data, StopTokens).stop_tokens, dtypes[dtype]),
        Start(
            trained.files.directory,
            config.init != "random",
            weights.carried_digest,
            weights.base_digest,
            trains.adapter,
            trains.quantize,
            trained.origins,
        ),
        shard_bytes=wishes.shard_bytes,
        card=lambda merged: model_card(run, checkpoint, dtype=numbers, is_part=trained.is_part, notes=merged),
        finish=partial(finish, handing, str(directory), dtype),
        progress=partial(progress, "export"),
    )


def step_of_export(run: RunDirectory) -> int:
    """Of which step the export is: the newest that is saved or, with ``checkpoint.best``, the best up to that one.

    Raises:
        UserError: no complete checkpoint, or a damaged one.
    """
    from tonnage.checkpoint.resume import choose
    from tonnage.checkpoint.save import Cursor, read_state

    newest = choose(run.checkpoints)
    best = read_config(run.config, [], check_files=False).checkpoint.best
    cursor = Cursor.of(read_state(newest))
    saved = {step_of(path) for path in complete_checkpoints(run.checkpoints)}
    is_best = best != "none" and cursor.best_figure == best and cursor.best_step in saved
    return cursor.best_step if is_best else step_of(newest)


def export_run(run: RunDirectory, progress: Progress = silent) -> list[str]:
    """Write the newest complete checkpoint of a run, or the best, as its export, in the place of an older export.

    Killed at any instant, it leaves the older one, none, or the new one, whole.
    """
    staging, older = run.staged_exports
    shutil.rmtree(older, ignore_errors=True)
    shutil.rmtree(staging, ignore_errors=True)
    notes = export_checkpoint(run, staging, progress)
    if run.export.exists():
        run.export.rename(older)
    staging.rename(run.export)
    shutil.rmtree(older, ignore_errors=True)
    return notes


def is_exported(run: RunDirectory) -> bool:
    """Whether the export of a run is of the step that it should be of, and not of when it was stopped before."""
    from tonnage.checkpoint.save import checkpoint_path
    from tonnage.checkpoint.verify import exported_from

    if not run.export.exists():
        return False
    return exported_from(run.export) in ("", checkpoint_path(run.checkpoints, step_of_export(run)).name)
