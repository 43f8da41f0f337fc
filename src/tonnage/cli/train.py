"""``tonnage train``: decide, write the run directory, start the workers, follow them, hand back a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.cli.decide import Decision
    from tonnage.rundir import RunDirectory

STOPPED = 3
KEYBOARD = ("SIGINT",)
"""Requests to stop that somebody at a keyboard makes."""


def train(
    config: Annotated[str | None, typer.Argument(metavar="CONFIG", help="A YAML config; none with --resume.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of the config, as optimizer.lr=1e-4."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")] = False,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Go on from a run's newest checkpoint.")
    ] = None,
    step: Annotated[
        int | None, typer.Option("--from", metavar="STEP", help="With --resume: from an earlier checkpoint.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Start although the plan does not fit into memory.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="With --resume: also if the config or the data mean another run.")
    ] = False,
) -> None:
    """Fine-tune a model as CONFIG says, or go on with a run: --resume RUN [KEY=VALUE]..."""
    from rich.console import Console

    from tonnage.cli.data_report import show_account
    from tonnage.cli.decide import decide
    from tonnage.cli.plan import show_plan
    from tonnage.config import check_output
    from tonnage.errors import Problem, UserError
    from tonnage.rundir import RunDirectory

    console = Console(highlight=False)
    if resume is not None:
        words = [*([config] if config is not None else []), *(overrides or [])]
        _resume(RunDirectory(resume), words, console, step=step, allow_changes=allow_changes, dry_run=dry_run)
        return
    if config is None:
        raise UserError(Problem("no config", "a YAML config, or --resume RUN", "tonnage train CONFIG"))
    if step is not None or allow_changes:
        raise UserError(Problem("--from or --allow-changes without --resume", "a run to go on with", "--resume RUN"))
    decision = decide(config, overrides or [], console, fresh_output=not dry_run, force=force)
    show_account(decision.prepared.account, console)
    show_plan(decision.plan, console)
    if dry_run:
        return
    run = RunDirectory(decision.config.output)
    with run.locked() as lock:
        check_output(decision.config)  # nobody was here in the meantime
        write_run(run, decision)
        _work(run, decision, console, lock)


def _resume(
    run: RunDirectory, words: list[str], console: Console, *, step: int | None, allow_changes: bool, dry_run: bool
) -> None:
    """Go on with a run that was interrupted."""
    from tonnage.cli.plan import show_plan
    from tonnage.cli.resume import begin_again, decide_resumption, show_resumption
    from tonnage.errors import Problem, UserError

    if no_override := [word for word in words if "=" not in word]:
        raise UserError(
            Problem(
                found=f"{no_override[0]} beside --resume {run.path}",
                needed="the config is the run's own; only KEY=VALUE can follow",
                change=f"tonnage train --resume {run.path}",
            )
        )
    if not run.is_run():
        raise UserError(Problem("no run", "a run directory", "start one: tonnage train CONFIG", str(run.path)))
    with run.locked() as lock:
        resumption = decide_resumption(run, words, console, step=step, allow_changes=allow_changes)
        show_resumption(resumption, console)
        show_plan(resumption.decision.plan, console)
        if dry_run:
            return
        if not resumption.is_done:
            begin_again(run, resumption, console)
            write_run(run, resumption.decision)
            _work(run, resumption.decision, console, lock)
        elif run.export.exists():
            console.print(f"Nothing is left to train. Model: [bold]{run.export}[/bold]")
        else:
            export_run(run, console)


def _work(run: RunDirectory, decision: Decision, console: Console, lock: int) -> None:
    """Start the workers, follow them to their end, hand back the model."""
    from tonnage.checkpoint.save import complete_checkpoints, step_of
    from tonnage.cli.plan import show_outcome
    from tonnage.cli.progress import RunDisplay, show_memory
    from tonnage.launch.local import run_workers
    from tonnage.plan.space import check_space

    plan = decision.plan
    check_space(decision.config, plan, len(complete_checkpoints(run.checkpoints)))
    with RunDisplay(run, plan.num_steps, num_workers=plan.workers, console=console) as display:
        status = run_workers(run, plan.workers, plan.threads_per_worker, poll=display.poll, keep_open=[lock])
    show_memory(run, console)
    checkpoint = run.checkpoint_to_resume()
    show_outcome(run, plan, console, since=step_of(checkpoint) if checkpoint else 0)
    if status == STOPPED:
        asked = run.stop_asked.read_text()
        if not complete_checkpoints(run.checkpoints):
            console.print("Stopped as asked, before the first step: there is nothing to save.")
            sys.exit(STOPPED)
        if asked in KEYBOARD:  # somebody is waiting for the model; a scheduler is not, and may be about to kill us
            export_run(run, console)
        console.print(f"Stopped as asked ({asked}), and saved. To go on:  tonnage train --resume {run.path}")
        sys.exit(STOPPED)
    export_run(run, console)
    console.print(f"Next:  tonnage chat {run.path}    tonnage eval {run.path} --data FILE")


def write_run(run: RunDirectory, decision: Decision) -> None:
    """Create the run directory with all that workers and later commands need."""
    from tonnage.config import write_config
    from tonnage.rundir import write_json

    run.path.mkdir(parents=True, exist_ok=True)
    write_json(run.data, decision.prepared.account.to_json() | {"stop_tokens": list(decision.prepared.stop_tokens)})
    write_json(run.environment, describe_environment())
    decision.prepared.tokenizer.save_pretrained(run.tokenizer)
    decision.plan.write(run.plan)
    write_config(decision.config, run.config)


def describe_environment() -> dict[str, object]:
    """Versions and hardware, from a list of what may be told; no variables, no names, no paths."""
    import os
    import platform
    from importlib.metadata import version

    packages = ("tonnage", "torch", "transformers", "datasets", "safetensors", "numba", "numpy")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "logical_cpus": os.cpu_count(),
        "packages": {name: version(name) for name in packages},
    }


def export_run(run: RunDirectory, console: Console) -> None:
    """Write the newest complete checkpoint of a run as its export, over an older export."""
    import shutil

    from tonnage.cli.export import export_checkpoint

    staging = run.path / ".export"
    shutil.rmtree(staging, ignore_errors=True)
    export_checkpoint(run, staging, console)
    shutil.rmtree(run.export, ignore_errors=True)
    staging.rename(run.export)
    console.print(f"Model: [bold]{run.export}[/bold]")
