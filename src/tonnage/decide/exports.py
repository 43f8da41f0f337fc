"""A checkpoint of a run as a Hugging Face model: written aside, then published in one step."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.data.progress import silent
from tonnage.errors import Problem, UserError

if TYPE_CHECKING:
    from tonnage.data import Progress
    from tonnage.rundir.directory import RunDirectory

SHARD_BYTES = 4 * 10**9


def export_checkpoint(
    run: RunDirectory,
    directory: Path,
    progress: Progress = silent,
    *,
    dtype: str = "auto",
    shard_bytes: int = SHARD_BYTES,
    step: int | None = None,
    merge: bool = False,
    check_content: bool = False,
    target: str = "transformers",
    converter: str | None = None,
    compares: bool = False,
) -> list[str]:
    """Export the checkpoint of ``run`` that ``step_of_export`` names, or that of ``step``, to ``directory``: of a run
    that trains an adapter the adapter, or with ``merge`` the whole model.

    ``check_content``: whether the checkpoint's hashes are recomputed first; one that was just written has no need.
    ``target`` is the program that it is for, ``converter`` what writes GGUF; ``compares``: whether its logits are
    compared with the run's.

    Raises:
        UserError: no such run, no complete checkpoint, a damaged one, ``directory`` is not empty, the program cannot
            read such a model, or what was written is not the run's.
    """
    import torch

    from tonnage.checkpoint.adapter import Described, export_adapter
    from tonnage.checkpoint.card import DataForm, model_card
    from tonnage.checkpoint.export import export as write_model
    from tonnage.checkpoint.resume import choose, damaged
    from tonnage.checkpoint.verify import verify
    from tonnage.config import read_config
    from tonnage.decide.handing import finisher, prepared
    from tonnage.files.reading import read_record
    from tonnage.model.files import read_model, read_whole_config
    from tonnage.planning.plan import Plan
    from tonnage.training.building import trains_of

    if not run.is_run():
        raise UserError(Problem(found="no run", needed="a run directory", where=str(run.path)))
    checkpoint = choose(run.checkpoints, step_of_export(run) if step is None else step)
    if check_content:
        problems = verify(checkpoint, lambda done, total: progress("verify", done, total))
        if problems:
            raise damaged(checkpoint, *problems)
    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    files, model_config = read_model(
        config.model,
        revision=config.revision,
        random_weights=True,
        tokenizer=False,
        trust_remote_code=config.trust_remote_code,
        untied=plan.weights.untied,
    )
    model_config.vocab_size = plan.model.vocab_size
    trains = trains_of(config)
    adapter = trains.adapter
    whole = read_whole_config(files, trust_remote_code=config.trust_remote_code)
    is_part = config.init != "random" and type(whole) is not type(model_config)
    handing = prepared(
        target,
        run=run.path,
        directory=str(directory),
        architecture=next(iter((whole if is_part else model_config).architectures or ()), ""),
        is_adapter=adapter is not None and not merge,
        converter=converter,
        compares=compares,
        shard_bytes=shard_bytes if shard_bytes != SHARD_BYTES else None,
        context=max(config.data.max_length, 4096),
    )
    if adapter is not None and not merge:
        assert not isinstance(config.adapter, str)
        if dtype not in ("auto", "fp32"):
            raise UserError(
                Problem(
                    where="--dtype",
                    found=f"{dtype}, and an adapter is written in fp32, as it was trained",
                    needed="--dtype with --merge, which writes the whole model",
                    change=f"tonnage export {run.path} {directory} --merge --dtype {dtype}",
                )
            )
        described = Described(
            adapter,
            config.adapter.alpha,
            config.adapter.scaling == "rank_stabilised",
            files.adapter.base if files.adapter is not None else config.model,
            files.commit or config.revision,
        )
        return export_adapter(
            checkpoint,
            directory,
            config=model_config,
            described=described,
            tokenizer=run.tokenizer,
            card=model_card(run, checkpoint, dtype="fp32", is_adapter=True),
            progress=lambda done, total: progress("export", done, total),
        )
    if merge and adapter is None:
        raise UserError(
            Problem(
                where="--merge",
                found="a run that trained the model's own weights",
                needed="a run with an adapter",
                change="leave --merge out: the export is the whole model",
            )
        )
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    chosen = config.precision if dtype == "auto" else dtype
    return write_model(
        checkpoint,
        directory,
        config=model_config,
        tokenizer=run.tokenizer,
        stop_tokens=read_record(run.data, DataForm).stop_tokens,
        dtype=dtypes[chosen],
        origin=files.directory,
        from_weights=config.init != "random",
        carried_digest=plan.weights.carried_digest,
        base_digest=plan.weights.base_digest,
        adapter=adapter,
        quantize=trains.quantize,
        shard_bytes=shard_bytes,
        card=lambda said: model_card(run, checkpoint, dtype=chosen, is_part=is_part, said=said),
        finish=finisher(handing, directory=str(directory), dtype=chosen),
        progress=lambda done, total: progress("export", done, total),
    )


def step_of_export(run: RunDirectory) -> int:
    """Of which step the export is: the newest that is saved or, with ``checkpoint.best``, the best up to that one.

    Raises:
        UserError: no complete checkpoint, or a damaged one.
    """
    from tonnage.checkpoint.resume import choose
    from tonnage.checkpoint.save import Cursor, read_state
    from tonnage.config import read_config
    from tonnage.rundir.directory import complete_checkpoints, step_of

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
