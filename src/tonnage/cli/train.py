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


def train(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML config.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of the config, as optimizer.lr=1e-4."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop after the plan.")] = False,
) -> None:
    """Fine-tune a model as CONFIG says."""
    from rich.console import Console

    from tonnage.checkpoint.save import complete_checkpoints
    from tonnage.cli.data_report import show_account
    from tonnage.cli.decide import decide
    from tonnage.cli.plan import show_plan
    from tonnage.cli.progress import RunDisplay
    from tonnage.launch.local import run_workers
    from tonnage.rundir import RunDirectory

    console = Console(highlight=False)
    decision = decide(config, overrides or [], console, fresh_output=not dry_run)
    show_account(decision.prepared.account, console)
    show_plan(decision.plan, console)
    if dry_run:
        return

    run, plan = RunDirectory(decision.config.output), decision.plan
    write_run(run, decision)
    with RunDisplay(run, plan.num_steps, num_workers=plan.workers, console=console) as display:
        status = run_workers(run, plan.workers, plan.threads_per_worker, poll=display.poll)
    if status == STOPPED and not complete_checkpoints(run.checkpoints):
        console.print("Stopped as asked, before the first step: there is nothing to save.")
        sys.exit(STOPPED)
    export_run(run, console)
    if status == STOPPED:
        console.print(f"Stopped as asked. The model as it was at the last step is in [bold]{run.export}[/bold].")
        console.print(f"To go on from it:  tonnage train {config} model={run.export} init=pretrained output=NEW")
        sys.exit(STOPPED)
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
