"""``tonnage plan``: what a run would do, before it does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from tonnage.plan.plan import Plan


def plan(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A YAML config.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Change keys of the config.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
) -> None:
    """Show what CONFIG would do: steps, tokens, and the bytes of the model's states."""
    from rich.console import Console

    from tonnage.cli.decide import decide

    console = Console(highlight=False, stderr=json)
    decision = decide(config, overrides or [], console)
    if json:
        print(decision.plan.to_json())
    else:
        show_plan(decision.plan, console)


def show_plan(plan: Plan, console: Console) -> None:
    """Print a plan as a table."""
    from rich.table import Table

    from tonnage.plan.space import held_bytes, resting_bytes

    held = held_bytes(plan)
    states = {
        "weights": (plan.weight_bytes_per_worker, plan.parameter_tier),
        "gradients": (plan.gradient_bytes_per_worker, plan.gradient_tier),
        "optimizer": (plan.optimizer_bytes_per_worker, plan.optimizer_tier),
    }
    per_worker = " a worker" if plan.workers > 1 else ""
    table = Table(title="Plan", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("model", f"{plan.model.model_type}, {plan.model.num_parameters:,} parameters, {plan.precision}")
    table.add_row(
        "run",
        f"{plan.num_steps:,} steps ({plan.num_packs / plan.data.num_packs:.2f} epochs), "
        f"{plan.tokens_per_step * plan.num_steps:,} tokens",
    )
    table.add_row(
        "step",
        f"{plan.packs_per_step} packs, {plan.tokens_per_step:,} tokens, {plan.micro_batches_per_step} micro-batches of "
        f"{plan.micro_batch}{per_worker}, {plan.flops_per_step / 1e12:.3g} TFLOP",
    )
    sharing = f", ZeRO {plan.zero}" + (f" in {plan.replicate} groups" if 1 < plan.replicate < plan.workers else "")
    table.add_row(
        "workers",
        f"{plan.workers} of {plan.threads_per_worker} threads{sharing if plan.workers > 1 else ''}, "
        f"recompute {plan.recompute}",
    )
    shown = (
        f"{name} {_size(held[name])}{f' (of {_size(size)} on disk)' if tier == 'disk' else ''}"
        for name, (size, tier) in states.items()
    )
    total = _size(sum(held.values()))
    table.add_row("states", f"{total}{per_worker}: {', '.join(shown)} ({plan.moments} moments)")
    if resting := resting_bytes(plan):
        table.add_row("disk", f"{_size(resting)}{per_worker}, copies for checkpoints included")
    console.print(table)


def _size(num_bytes: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"
