"""From a config, a model's profile, the data's numbers and a machine to a Plan. Arithmetic: nothing is measured here.

    config, machine ─► settings (axes, rules) ─┐
    model, data ─────► Scales ─────────────────┼─► climb ─► choices ─► refine ─► choose (LADDER) ─► Plan
    budget ────────────────────────────────────┘     └─ nothing fits ─► refusal ─► relaxations

What the config says is kept; what it leaves open (``auto``) is searched. Every combination that no rule forbids is
weighed and timed, what does not fit falls out, and the ladder says which of those that are left is the plan: the
fastest that gives up least for memory. On a CPU each is weighed with a heap that keeps the places of what is freed,
which is faster, and with one that gives them back. Where nothing fits, the run is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tonnage.config import Config
from tonnage.errors import UserError
from tonnage.planning.batch import resolved, steps_of, warnings
from tonnage.planning.budgets import UNKNOWN, Free, budget_of
from tonnage.planning.catalogue import COMPILE_SECONDS
from tonnage.planning.ladder import Cost, choose, climb, costs, frontier, nearest
from tonnage.planning.layout import Layout
from tonnage.planning.plan import Choice, Plan
from tonnage.planning.profile import ModelProfile
from tonnage.planning.refusal import refusal
from tonnage.planning.rules import check, check_blocks, check_slices, no_layout
from tonnage.planning.saving import MOST_LOST_SECONDS
from tonnage.planning.scales import Scales, work_of
from tonnage.planning.search import Search, refine
from tonnage.planning.seconds import Work
from tonnage.planning.words import kernels_in_words


def make_plan(
    config: Config,
    scales: Scales,
    *,
    threads_per_worker: int,
    free: Free = UNKNOWN,
    before: Layout | None = None,
    force: bool = False,
) -> Plan:
    """Decide what the run will do.

    ``before`` is the layout of a run that goes on: what is ``auto`` stays as it was, if that fits. With ``force`` a
    plan that does not fit is made all the same.

    Raises:
        UserError: the data is too small for the workers, nothing that the config allows fits, the devices have no bf16
            and the config says it, its tiers do not go together on them, or they are none and the config has a budget
            of host memory.
    """
    config, why_so_many = resolved(config, scales.data.num_packs)
    search, choices = _climbed(config, scales, free, before, force=force)
    assert search.budget is not None
    fitting = list(filter(search.holds, choices))
    if not fitting and not force:
        raise UserError(refusal(config, choices, search.budget, lambda changed: _fits(changed, scales, free)))
    chosen = choose(refine(fitting, search), scales.machine) if fitting else nearest(choices, search.budget)
    reasons = {"batch": why_so_many, "kernels": kernels_in_words(chosen.layout), "fp8": scales.model.in_fp8}
    return _written(search, chosen, choices, threads_per_worker, reasons)


def explain(config: Config, scales: Scales, chosen: Choice, free: Free = UNKNOWN) -> list[Cost]:
    """What every rung of the ladder would have cost, beside the choice of a plan that was made of the same."""
    config, _ = resolved(config, scales.data.num_packs)
    return costs(Search(config, scales, budget_of(config, scales.machine, free)), chosen)


def _climbed(
    config: Config, scales: Scales, free: Free, before: Layout | None, *, force: bool
) -> tuple[Search, list[Choice]]:
    """The ways to run the step that were weighed, and in what they were searched: not as the run was ``before``, where
    that does not fit now, as there was more then, or for other keys."""
    check(config, scales.model, scales.data, scales.machine, force=force)
    search = Search(config, scales, budget_of(config, scales.machine, free), before)
    check_blocks(config, scales.models)
    check_slices(config, scales.models)
    choices = climb(search)
    if before is not None and not any(map(search.holds, choices)):
        search = replace(search, before=None)
        choices = climb(search)
    if not choices:
        raise UserError(no_layout(config))
    return search, choices


def _fits(config: Config, scales: Scales, free: Free) -> bool:
    """Whether anything that a config allows fits."""
    search = Search(config, scales, budget_of(config, scales.machine, free))
    return any(map(search.holds, climb(search)))


def _written(
    search: Search, chosen: Choice, choices: Sequence[Choice], threads_per_worker: int, reasons: dict[str, str]
) -> Plan:
    """The plan that a choice among others comes to."""
    config, data, machine, steps = search.config, search.scales.data, search.scales.machine, search.steps
    assert search.budget is not None
    num_steps = search.num_steps
    warmup_steps = steps_of(config.optimizer.warmup, num_steps)
    tokens_per_step = round(data.num_tokens / data.num_packs * steps.packs)
    mean_tokens = data.num_tokens / data.num_packs * chosen.layout.micro_batch / chosen.layout.context
    if chosen.layout.arrangement == "padded":
        mean_tokens = chosen.layout.mean_row_tokens * (1 - chosen.layout.padding)
    if machine.kind != "cpu" and config.compile == "auto":
        few = f"blocks are not: that would save less than the {COMPILE_SECONDS:.0f} s that it may take"
        reasons["compile"] = f"auto: {'each block' if chosen.layout.compiled else few}"
    flops = _flops(search.scales.model, work_of(chosen.layout, data))
    if (tower := search.scales.model.tower) is not None:
        flops += chosen.layout.mean_image_tokens * (tower.forward_flops + tower.backward_flops)
    numbers = {"packs_in_data": data.num_packs, "packs_in_run": steps.num_packs}
    plan = Plan(
        choice=chosen,
        threads_per_worker=threads_per_worker,
        packs_per_step=steps.packs,
        num_packs=steps.num_packs,
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        tokens_per_step=tokens_per_step,
        flops_per_step=tokens_per_step / mean_tokens * flops,
        machine=machine.describe(),
        budget=search.budget,
        frontier=frontier([*choices, chosen], chosen),
        model=search.scales.model_of(replace(chosen.layout, tensor=1)),
        data=data,
        reasons={key: why for key, why in reasons.items() if why},
        warnings=(
            *warnings(config, **numbers, num_steps=num_steps, warmup_steps=warmup_steps),
            *_warnings_of_saving(config, chosen, num_steps),
            *_warnings_of_fp8(config, chosen),
        ),
    )
    if config.checkpoint.every != "auto":
        return plan
    return replace(plan, reasons=plan.reasons | {"checkpoint.every": f"auto: {plan.saves}"})


def _warnings_of_saving(config: Config, chosen: Choice, num_steps: int) -> list[str]:
    """That much would be lost, where the config asks for no more."""
    seconds, saving = chosen.seconds.total, chosen.saving
    lost = saving.lost_seconds(seconds, num_steps)
    if config.checkpoint.every == "auto" or lost <= MOST_LOST_SECONDS:
        return []
    when = f"every {saving.every:,} steps" if saving.every else "at its end alone"
    return [
        f"the run is saved {when}: if it dies, up to {lost / 3600:.1f} hours are lost. Set checkpoint.every=auto for "
        f"{MOST_LOST_SECONDS / 60:.0f} minutes at most"
    ]


def _warnings_of_fp8(config: Config, chosen: Choice) -> list[str]:
    """Where it is slower than bf16."""
    if config.precision == "fp8-emulated":
        return ["fp8 is emulated: slower than precision=bf16, and for tests alone"]
    if config.precision == "fp8" and not chosen.layout.compiled:
        return [
            "blocks are not compiled, and without that rounding to fp8 takes longer than its products save. Set "
            "compile=on, or precision=bf16"
        ]
    return []


def _flops(model: ModelProfile, work: Work) -> float:
    """Products of one forward and its backward pass, attention and recompute left out; of a mixture's experts, those
    that a token goes through."""
    block = model.blocks["none"]
    blocks = model.num_blocks * (block.forward_flops(work.row_tokens) + block.backward_flops(work.row_tokens))
    head = 6.0 if model.trains_head else 4.0
    return blocks + head * model.head_parameters * work.row_supervised
