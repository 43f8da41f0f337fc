"""From a config, a model's profile, the data's numbers and a machine to a Plan. Arithmetic: nothing is measured here.

What the config leaves open (``auto``) is searched: every combination is weighed (``memory``) and timed (``seconds``),
those that do not fit the budget fall out, and the fastest that is left is the plan. What the config says is kept. Where
nothing fits, large weights are taken in tiles, as few as help. On a
CPU each is weighed with a heap that keeps the places of what is freed, which is faster, and with one that gives them
back. Moments of less than fp32 and what rests on disk are taken only where nothing else fits: the first rounds, the
second wears a drive. But 8-bit moments that stay on a GPU come before exact ones that travel, where a step is much
faster. Of optimizer state that does not rest on the device, what the budget has room for stays there.
Where blocks must be recomputed whole, as few are as fit. Between GPUs two blocks are gathered ahead of the one that
runs, where there is room, else one.
Where a run is saved before its end, training waits for a copy or, if there is no room for one, until it is written.
Where nothing fits, the run is refused (``refusal``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, Literal

from tonnage.config import Config
from tonnage.errors import Problem, UserError
from tonnage.host.moments import BLOCK
from tonnage.offload.residency import OPTIMIZER
from tonnage.planning.batch import resolved, warnings
from tonnage.planning.catalogue import COMPILE_SECONDS
from tonnage.planning.layout import MOST_AHEAD, PACKED, Layout
from tonnage.planning.machine import Machine
from tonnage.planning.memory import CUBLAS_BYTES, LOADING, instants
from tonnage.planning.plan import Budget, Choice, DataProfile, Plan, Rows, RowSizes, Steps
from tonnage.planning.profile import ModelProfile
from tonnage.planning.recomputed import check_recomputed, said_blocks, with_fewest_blocks
from tonnage.planning.refusal import check_precision, check_sharding, packed_form, refusal, shards_packed
from tonnage.planning.saving import MOST_LOST_SECONDS, saving_of
from tonnage.planning.seconds import Seconds, Work, stages_of, step_seconds
from tonnage.planning.states import (
    fullest_states,
    host_bytes,
    is_packed,
    locked_bytes,
    packed_on_disk,
    resting_on_disk,
    states,
)
from tonnage.planning.tiers import TIERS, check_tiers, check_tiles, may_be_tiled, no_layout, open_tiers, update_tier
from tonnage.planning.words import kernels_in_words, size

MICRO_BATCH_TOKENS = {"cpu": 4096, "cuda": 16384}
"""Tokens of a forward with which a machine's matrix units are busy, and on a GPU whoever launches its kernels is ahead
of it; ``micro_batch: auto`` goes no further."""
WORTH_ROUNDING = 1.25
"""So many times as fast a step with 8-bit moments that stay on the device must be, or exact ones travel."""
WORTH_MOVING = 1.25
"""So many times as fast a step must be for the host to make its update, where nobody has measured how fast it does
that."""
RUNTIME_BYTES = {"cpu": 0.585e9, "cuda": 0.8e9}
"""Of one worker, whatever the model: interpreter and libraries (0.535 GB with a model that weighs nothing) and what the
heap keeps of small things, or a CUDA context. cuBLAS's memory is counted apart (``CUBLAS_BYTES``)."""
COMMUNICATOR_BYTES = 0.5e9
"""On CUDA, of the first communicator; 0.5 to 1.6 GB were reported (NVIDIA/nccl issue 864)."""
FULL = 0.9
"""Part of what a plan may take that state which could rest on disk fills up: the page cache is worth memory too."""
TILES = (2, 4, 8, 16, 32, 64)
"""Numbers of tiles worth trying where weights do not fit whole."""
NEARLY = 1.002
"""What takes so much longer at most counts as equally fast; then less memory decides."""


def make_plan(
    config: Config,
    model: ModelProfile,
    data: DataProfile,
    machine: Machine,
    *,
    threads_per_worker: int,
    memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    disk_free_bytes: float | None = None,
    disks_are_assumed: bool = False,
    lockable_bytes: float | None = None,
    parts: Mapping[int, ModelProfile] | None = None,
    rows: Rows | None = None,
    before: Layout | None = None,
    force: bool = False,
) -> Plan:
    """Decide what the run will do.

    ``rows`` tells how full rows will be; without it they are taken to be full.

    ``parts`` is what one rank has and computes of the model, by sizes of the tensor axis that it allows.

    ``memory_bytes`` is what all workers of a node may use on a CPU, or each on its device, ``host_memory_bytes`` what
    all of a node may use of its host's memory, where that is another; by default the machine's. ``disk_free_bytes`` is
    what is free for all of a node on the disks where states rest, or assumed to be, ``lockable_bytes`` what one may
    lock of its host's memory; by default nobody knows.
    ``before`` is the layout of a run that goes on: what is ``auto`` stays as it was, if that fits. With ``force`` a
    plan that does not fit is made all the same.

    Raises:
        UserError: the data is too small for the workers, nothing that the config allows fits, the devices have no bf16
            and the config says it, its tiers do not go together on them, or they are none and the config has a budget
            of host memory.
    """
    config, why_so_many = resolved(config, data.num_packs)
    num_packs = _num_packs(config, data, config.packs_per_step)
    _check_workers(config, data)
    _check_stages(config, model)
    check_recomputed(config.memory, model)
    check_tiers(config, machine)
    check_tiles(config, machine)
    check_sharding(config)
    if not force:
        check_precision(config, machine)
    packs_per_step = config.packs_per_step
    packs_per_step = min(packs_per_step, num_packs)
    num_steps = math.ceil(num_packs / packs_per_step)
    tokens_per_step = round(data.num_tokens / data.num_packs * packs_per_step)
    room = partial(
        budget_of,
        machine=machine,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        disk_free_bytes=disk_free_bytes,
        disks_are_assumed=disks_are_assumed,
        lockable_bytes=lockable_bytes,
    )
    budget = room(config)

    parts = {1: model} | dict(parts or {})
    _check_blocks(config, parts)

    def weighed(config: Config, before: Layout | None = None) -> list[Choice]:
        budget = room(config)

        def less_on_disk(choices: list[Choice]) -> list[Choice]:
            return [
                _less_on_disk(choice, config, parts[choice.layout.tensor], data, machine, budget) for choice in choices
            ]

        found: list[Choice] = []
        for last_resort in (False, True):
            if not any(map(budget.holds, found)):
                ways = candidates(config, packs_per_step, parts, data, machine, rows, before, budget, last_resort)
                found += less_on_disk(ways)
        if config.memory.tiles != "auto" or before is not None or any(map(budget.holds, found)):
            return found

        # Tiles cost time: they are taken where nothing else fits, and as few as fit.
        def in_tiles(number: int) -> list[Choice]:
            return less_on_disk(_in_tiles(config, packs_per_step, parts, data, machine, rows, budget, number))

        if not any(map(budget.holds, smallest := in_tiles(TILES[-1]))):
            return found + smallest
        return next(choices for number in TILES if any(map(budget.holds, choices := in_tiles(number))))

    def fits(changed: Config) -> bool:
        return any(map(room(changed).holds, weighed(changed)))

    choices = weighed(config, before)
    if before is not None and not any(map(budget.holds, choices)):  # chosen where there was more, or for other keys
        choices, before = weighed(config), None
    if not choices:
        raise UserError(no_layout(config))
    fitting = list(filter(budget.holds, choices))
    if not fitting and not force:
        raise UserError(refusal(config, choices, budget, fits))
    if before is None and config.memory.recompute == config.memory.recompute_blocks == "auto":
        fitting += _with_fewest_blocks(fitting, config, parts, data, machine, budget)
    if config.memory.optimizer_tier == config.memory.optimizer_resident == "auto":
        fitting = [_filled(choice, config, parts[choice.layout.tensor], data, machine, budget) for choice in fitting]
    worth_moving = 1.0 if machine.host_parameters_per_second else WORTH_MOVING
    chosen = best(fitting, worth_moving) if fitting else _nearest(choices, budget)
    mean_tokens = data.num_tokens / data.num_packs * chosen.layout.micro_batch
    if chosen.layout.arrangement == "padded":
        mean_tokens = chosen.layout.mean_row_tokens * (1 - chosen.layout.padding)
    reasons = {"batch": why_so_many, "kernels": kernels_in_words(chosen.layout)}
    if machine.kind != "cpu" and config.compile == "auto":
        few = f"blocks are not: that would save less than the {COMPILE_SECONDS:.0f} s that it may take"
        reasons["compile"] = f"auto: {'each block' if chosen.layout.compiled else few}"
    plan = Plan(
        choice=chosen,
        threads_per_worker=threads_per_worker,
        packs_per_step=packs_per_step,
        num_packs=num_packs,
        num_steps=num_steps,
        warmup_steps=(warmup_steps := warmup_of(config.optimizer.warmup, num_steps)),
        tokens_per_step=tokens_per_step,
        flops_per_step=tokens_per_step / mean_tokens * _flops(model, work_of(chosen.layout, data)),
        machine=machine.describe(),
        budget=budget,
        frontier=frontier([*choices, chosen], chosen),
        model=model,
        data=data,
        reasons={key: why for key, why in reasons.items() if why},
        warnings=(
            *warnings(
                config,
                packs_in_data=data.num_packs,
                packs_in_run=num_packs,
                num_steps=num_steps,
                warmup_steps=warmup_steps,
            ),
            *_warnings_of_saving(config, chosen, num_steps),
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


def candidates(
    config: Config,
    packs_per_step: int,
    parts: Mapping[int, ModelProfile],
    data: DataProfile,
    machine: Machine,
    rows: Rows | None = None,
    before: Layout | None = None,
    budget: Budget | None = None,
    last_resort: bool = False,
) -> list[Choice]:
    """Every way that the config allows, weighed and timed, whether it fits or not; each in every way to save it.

    Where workers divide the model, states rest elsewhere only in ways that do not fit the ``budget`` otherwise, and on
    disk only as a ``last_resort``, which is these ways alone: there are more of them the more axes are open.
    """
    padded = parts[1].arrangement == "padded"
    share = config.data.share_prefixes and parts[1].shares_prefixes and machine.kind == "cpu" and not padded
    steps = Steps(_num_packs(config, data, packs_per_step), packs_per_step, share, padded, parts[1].chunk)
    rows, num_steps = cache(rows or data.full_rows), math.ceil(steps.num_packs / steps.packs)
    found: list[Choice] = []
    for tensor, pipeline in _divisions(config, packs_per_step, parts, machine, before):
        divided, model, roomy = _divided(config, tensor, pipeline), parts[tensor], set[Layout]()
        divides = tensor * pipeline > 1
        if last_resort and not divides:
            continue
        for layout in layouts(divided, steps, rows, machine, before, parts[1].attention, parts[1].num_blocks):
            if divides and (bool(layout.tiers_on_disk) is not last_resort or _in_memory(layout) in roomy):
                continue
            if layout.moments == "int8" and not model.keeps_blocks:
                continue
            if layout.recompute not in model.blocks:  # it would change gradients
                continue
            choice = _weighed(layout, config.stages_per_worker, model, data, machine)
            choice = _gathering_ahead(choice, model, data, machine, budget)
            choice = _compiled_where_worth(choice, config, model, data, machine, num_steps)
            saved = _saved(choice, config, model, data, machine, num_steps)
            resident = all(getattr(layout, key) == "device" for key in TIERS)
            if budget is not None and resident and all(map(budget.holds, saved)):
                roomy.add(_in_memory(layout))
            found += saved
    return found


def _in_tiles(
    config: Config,
    packs_per_step: int,
    parts: Mapping[int, ModelProfile],
    data: DataProfile,
    machine: Machine,
    rows: Rows | None,
    budget: Budget,
    number: int,
) -> list[Choice]:
    """Every way that the config allows with the largest weight in so many tiles."""
    tiled = config.model_copy(update={"memory": config.memory.model_copy(update={"tiles": number})})
    return candidates(tiled, packs_per_step, parts, data, machine, rows, None, budget)


def _in_memory(layout: Layout) -> Layout:
    """A layout as it would be with all states on the device: no slower, if there is room. Whether blocks are compiled
    follows from that."""
    return replace(
        layout,
        optimizer_tier="device",
        gradient_tier="device",
        parameter_tier="device",
        update_tier="device",
        optimizer_resident=0,
        compiled=False,
    )


def _gathering_ahead(
    choice: Choice, model: ModelProfile, data: DataProfile, machine: Machine, budget: Budget | None
) -> Choice:
    """A choice whose blocks are gathered as early as may be, if that fits the ``budget``. Steps are timed alike."""
    if not choice.layout.may_gather_ahead:
        return choice
    ahead = _held(replace(choice.layout, blocks_ahead=MOST_AHEAD), model, data, machine, choice.seconds)
    return ahead if budget is None or budget.holds(ahead) else choice


def _compiled_where_worth(
    choice: Choice, config: Config, model: ModelProfile, data: DataProfile, machine: Machine, num_steps: int
) -> Choice:
    """A choice whose blocks are compiled only if the config says so, or the run is long enough to gain by it."""
    if not choice.layout.compiled or config.compile == "on":
        return choice
    layout = replace(choice.layout, compiled=False)
    seconds = step_seconds(layout, model, work_of(layout, data), machine)
    saved = num_steps * (seconds.total - choice.seconds.total)
    return choice if saved > COMPILE_SECONDS else replace(choice, layout=layout, seconds=seconds)


def _saved(
    choice: Choice, config: Config, model: ModelProfile, data: DataProfile, machine: Machine, num_steps: int
) -> list[Choice]:
    """A choice whose run is saved at its end alone, or with each of the ways to save it before."""
    found = []
    for beside in (True, False):
        layout = replace(choice.layout, saves_beside=beside)
        saving = saving_of(config.checkpoint.every, layout, model, machine, choice.seconds.total, num_steps)
        if not saving.every:
            return [choice]
        found.append(replace(_held(layout, model, data, machine, choice.seconds), saving=saving))
    return found


def layouts(
    config: Config,
    steps: Steps,
    rows: Rows,
    machine: Machine,
    before: Layout | None = None,
    attention: str = PACKED,
    blocks: int = 0,
) -> Iterator[Layout]:
    """Every way to cut up the steps of a model of so many ``blocks`` that the config allows, computed with an
    ``attention``."""
    memory, parallel, workers = config.memory, config.parallel, config.data_workers
    assert parallel.tensor != "auto"
    assert parallel.pipeline != "auto"
    packs_per_worker = math.ceil(steps.packs / workers)

    def allowed(key: str, otherwise: Sequence[Any]) -> Sequence[Any]:
        said = getattr(memory, key)
        if said != "auto":
            return (said,)
        return (getattr(before, key),) if before is not None else otherwise

    stages: tuple[int, ...] = (
        (3,) if workers == 1 else (0, 1, 2, 3) if parallel.replicate in (1, workers) else (1, 2, 3)
    )
    if workers > 1 and packed_form(config) and not shards_packed():
        stages = stages[:-1]
    on_cpu = machine.kind == "cpu"
    for_states, for_parameters = open_tiers(config, machine)
    (tiles,) = allowed("tiles", (1,))
    apart = parallel.schedule == "zero_bubble" and parallel.pipeline > 1
    compiles = not on_cpu and config.compile != "off" and not apart
    most_tokens = parallel.tensor * MICRO_BATCH_TOKENS[machine.kind]
    kept = [  # inputs leave where they are all that is kept
        (recompute, tier)
        for recompute, tier in product(
            allowed("recompute", ("none", "selective", "full")) if memory.recompute_blocks == "auto" else ("full",),
            allowed("activation_tier", ("device",) if on_cpu else ("device", "host")),
        )
        if tier == "device" or (recompute == "full" and parallel.pipeline == 1)
        if recompute != "selective" or config.compile != "on"
    ]
    for zero, (
        recompute,
        activation_tier,
    ), moments, optimizer_tier, gradient_tier, parameter_tier, micro_batch, returns in product(
        allowed("zero", stages),
        kept,
        allowed("moments", ("fp32", "int8") if parallel.tensor == 1 else ("fp32", "bf16")),
        allowed("optimizer_tier", for_states),
        allowed("gradient_tier", for_states),
        allowed("parameter_tier", for_parameters),
        allowed("micro_batch", _micro_batches(packs_per_worker, partial(rows, steps, workers), most_tokens)),
        (False, True) if on_cpu else (False,),
    ):
        if parameter_tier != "device" and workers > 1 and zero != 3:
            continue
        rests = {"optimizer_tier": optimizer_tier, "gradient_tier": gradient_tier, "parameter_tier": parameter_tier}
        if (update := update_tier(config, machine, rests)) is None:
            continue
        if tiles > 1 and not may_be_tiled(config, machine, zero, parameter_tier, update):
            continue
        stays = memory.optimizer_resident if optimizer_tier != "device" else 0
        in_one = min(micro_batch, packs_per_worker)
        sizes = rows(steps, workers, in_one)
        yield Layout(
            workers=config.launch.num_workers,
            replicate=workers if zero == 0 else parallel.replicate,
            tensor=parallel.tensor,
            pipeline=parallel.pipeline,
            schedule=parallel.schedule,
            zero=zero,
            recompute=recompute,
            recomputed=said_blocks(memory, before, blocks) if recompute == "full" else None,
            activation_tier=activation_tier,
            precision=config.precision,
            moments=moments,
            optimizer_tier=optimizer_tier,
            optimizer_resident=0 if stays == "auto" or (update == "host" and optimizer_tier == "host") else stays,
            update_tier=update,
            gradient_tier=gradient_tier,
            parameter_tier=parameter_tier,
            tiles=tiles,
            micro_batch=in_one,
            micro_batches=math.ceil(sizes.forwards or packs_per_worker / in_one),
            row_tokens=sizes.most_tokens,
            row_supervised=sizes.most_supervised,
            mean_row_tokens=sizes.mean_tokens,
            share_prefixes=steps.share_prefixes,
            spared_tokens=max(0.0, 1 - sizes.mean_tokens / sizes.mean_document_tokens),
            arrangement="padded" if steps.padded else "packed",
            attention=attention,
            padding=max(0.0, 1 - sizes.mean_document_tokens / sizes.mean_tokens),
            device=machine.kind,
            returns_memory=returns,
            # Blocks whose parameters come and go are not, nor those whose operations are kept or computed again.
            compiled=compiles and parameter_tier == "device" and tiles == 1 and recompute != "selective",
            kernels_off=config.kernels_off,
        )


def _divisions(
    config: Config, packs_per_step: int, parts: Mapping[int, ModelProfile], machine: Machine, before: Layout | None
) -> list[tuple[int, int]]:
    """Sizes of the tensor and the pipeline axis that the config allows.

    Where it leaves them open: a tensor axis stays inside a node, for its ranks talk all the time; a pipeline has two to
    the power of something workers, each with a block at least; every group of workers has a pack.
    """
    workers, parallel = config.launch.num_workers, config.parallel
    per_node = math.ceil(workers / machine.nodes)

    def sizes(axis: str, otherwise: Iterable[int]) -> list[int]:
        said = getattr(parallel, axis)
        if said != "auto":
            return [said]
        return [getattr(before, axis)] if before is not None else list(otherwise)

    def works(tensor: int, pipeline: int) -> bool:
        if parallel.pipeline == "auto" and parallel.schedule == "zero_bubble" and pipeline > 1:
            alone = tensor == 1 and pipeline == workers  # as ``config.check`` has it
            return alone and config.precision != "fp16" and config.compile != "on"
        return workers % (tensor * pipeline * parallel.replicate) == 0

    most = parts[1].num_blocks // config.stages_per_worker
    tensors = sizes("tensor", (degree for degree in parts if per_node % degree == 0))
    pipelines = sizes("pipeline", (2**power for power in range(most.bit_length()) if 2**power <= most))
    fitting = [(tensor, pipeline) for tensor, pipeline in product(tensors, pipelines) if works(tensor, pipeline)]
    enough = [(tensor, pipeline) for tensor, pipeline in fitting if workers // (tensor * pipeline) <= packs_per_step]
    return enough or fitting[-1:]


def _divided(config: Config, tensor: int, pipeline: int) -> Config:
    parallel = config.parallel.model_copy(update={"tensor": tensor, "pipeline": pipeline})
    return config.model_copy(update={"parallel": parallel})


def _micro_batches(packs_per_worker: int, rows: Callable[[int], RowSizes], most_tokens: int) -> list[int]:
    """Sizes worth trying: powers of two, up to the tokens that keep the machine busy.

    ``rows`` tells the sizes of rows of so many packs.
    """
    found = [1]
    while found[-1] < packs_per_worker:
        larger = min(2 * found[-1], packs_per_worker)
        tokens = rows(larger).mean_tokens
        if tokens > most_tokens:
            fits = int(larger * most_tokens / tokens)
            return [*found, fits] if fits > found[-1] else found
        found.append(larger)
    return found


def _weighed(
    layout: Layout, stages_per_worker: int, model: ModelProfile, data: DataProfile, machine: Machine
) -> Choice:
    if layout.pipeline > 1:
        layout = replace(layout, stages=stages_of(layout, model, work_of(layout, data), machine, stages_per_worker))
    return _held(layout, model, data, machine, step_seconds(layout, model, work_of(layout, data), machine))


def _held(layout: Layout, model: ModelProfile, data: DataProfile, machine: Machine, seconds: Seconds) -> Choice:
    """A layout whose steps take so long, and what it holds."""
    runtime = RUNTIME_BYTES[machine.kind]
    if machine.kind == "cuda" and layout.workers > 1:
        runtime += COMMUNICATOR_BYTES
    moments = instants(layout, model, evaluates=(data.validation_path or data.general_path) is not None)
    if machine.kind == "cuda":
        moments = [one if one.name == LOADING else one.with_workspace(CUBLAS_BYTES) for one in moments]
    divided = layout.tiers_on_disk and layout.tensor * layout.pipeline > 1
    there = fullest_states(layout, model) if divided else None
    on_disk = resting_on_disk(layout, model, there or states(layout, model), caches=True)
    return Choice(
        layout,
        tuple(moments),
        runtime,
        seconds,
        host_bytes(layout, model),
        locked_bytes(layout, model),
        math.ceil(layout.workers / machine.nodes) * on_disk,
        packed_on_disk(model) if is_packed(layout, model) else 0.0,
        states=there,
    )


def work_of(layout: Layout, data: DataProfile) -> Work:
    """What a worker's rows hold, on average."""
    tokens, supervised = (
        number / data.num_packs * layout.micro_batch for number in (data.num_tokens, data.supervised_tokens)
    )
    return Work(layout.mean_row_tokens or tokens, supervised, data.document_tokens)


def best(fitting: Sequence[Choice], worth_moving: float = WORTH_MOVING) -> Choice:
    """The fastest of those that give up least for memory.

    Exact moments that travel are given up for others that stay, where that is much faster. The host updates only where
    that makes a step ``worth_moving`` times as fast, or nothing else fits.
    """
    least = min(map(_sacrifices, fitting))
    staying = [
        choice for choice in fitting if choice.layout.optimizer_tier == "device" and not choice.layout.tiers_on_disk
    ]
    fitting = [choice for choice in fitting if _sacrifices(choice) == least]
    here = [choice for choice in fitting if choice.layout.update_tier == "device"]
    if here and _fastest(here) <= worth_moving * _fastest(fitting):
        fitting = here
    if staying and all(choice.layout.optimizer_tier == "host" for choice in fitting):
        fitting = staying if _fastest(fitting) > WORTH_ROUNDING * _fastest(staying) else fitting
    fastest = _fastest(fitting)
    return min(
        (choice for choice in fitting if choice.seconds_with_saves <= NEARLY * fastest),
        key=lambda choice: (_detours(choice), choice.peak_bytes),
    )


def _fastest(choices: Sequence[Choice]) -> float:
    return min(choice.seconds_with_saves for choice in choices)


def _nearest(choices: Sequence[Choice], budget: Budget) -> Choice:
    """Of ways that all need too much, the one that needs least: of the host, where devices have room, and of the disks,
    where hosts have it too."""
    if on_device := [choice for choice in choices if choice.peak_bytes <= budget.usable]:
        if on_host := [choice for choice in on_device if budget.host_holds(choice)]:
            return min(on_host, key=lambda choice: (choice.disk_bytes + choice.packed_bytes, choice.peak_bytes))
        return min(on_device, key=lambda choice: (choice.host_bytes, choice.peak_bytes))
    return min(choices, key=lambda choice: choice.peak_bytes)


def _detours(choice: Choice) -> int:
    """What is done for memory to what a step computes, and between steps."""
    layout, saving = choice.layout, choice.saving
    between_steps = saving.every > 0 and not layout.saves_beside
    on_host = [layout.activation_tier, layout.gradient_tier, layout.parameter_tier].count("host")
    gathers_late = layout.device != "cpu" and layout.shards > 1 and layout.blocks_ahead < MOST_AHEAD
    return (layout.recompute != "none") + on_host + between_steps + gathers_late


def _with_fewest_blocks(
    fitting: Sequence[Choice],
    config: Config,
    parts: Mapping[int, ModelProfile],
    data: DataProfile,
    machine: Machine,
    budget: Budget,
) -> list[Choice]:
    """The choices that recompute all blocks, each with as few of them recomputed as fit; those left out that fit with
    none, and a pipeline's."""
    found, fits = [], {choice.layout for choice in fitting}
    for choice in fitting:
        whole = choice.layout.recompute == "full" and choice.layout.pipeline == 1
        if not whole or replace(choice.layout, recompute="none", activation_tier="device") in fits:
            continue
        model = parts[choice.layout.tensor]
        weighed = partial(_held, model=model, data=data, machine=machine, seconds=choice.seconds)
        layout = with_fewest_blocks(choice, model, budget, weighed)
        if layout.recomputed is not None:
            found.append(_cut_anew(choice, layout, config, model, data, machine))
    return found


def _filled(
    choice: Choice, config: Config, model: ModelProfile, data: DataProfile, machine: Machine, budget: Budget
) -> Choice:
    """The choice, with as much of the state that it has elsewhere on its device as the budget leaves room for."""
    layout, room = choice.layout, round(FULL * budget.usable - choice.peak_bytes)
    if layout.optimizer_tier == "device" or layout.update_tier == "host" or layout.optimizer_resident:
        return choice
    if room < (tile := OPTIMIZER[layout.optimizer_tier].unit_bytes):
        return choice
    resident = min(room, states(layout, model).optimizer) // tile * tile
    layout = replace(layout, optimizer_resident=resident)
    return _cut_anew(choice, layout, config, model, data, machine)


def _less_on_disk(
    choice: Choice, config: Config, model: ModelProfile, data: DataProfile, machine: Machine, budget: Budget
) -> Choice:
    """A choice for which disks alone have too little room, with as much of its state in memory as there is room for:
    that need not be on disk."""
    memory = config.memory
    if memory.optimizer_tier != "auto" or memory.optimizer_resident != "auto" or budget.disk_holds(choice):
        return choice
    fits_else = choice.peak_bytes <= budget.usable and budget.host_holds(choice)
    return _filled(choice, config, model, data, machine, budget) if fits_else else choice


def _cut_anew(
    choice: Choice, layout: Layout, config: Config, model: ModelProfile, data: DataProfile, machine: Machine
) -> Choice:
    """Another layout in place of a choice's, saved as often."""
    anew = _weighed(layout, config.stages_per_worker, model, data, machine)
    steps = choice.saving.every
    return replace(anew, saving=saving_of(steps, layout, model, machine, anew.seconds.total, steps + 1))


def _sacrifices(choice: Choice) -> int:
    """How much is given up for memory: exact moments, and every kind of state that rests on disk."""
    return (choice.layout.moments != "fp32") + len(choice.layout.tiers_on_disk)


def frontier(choices: Sequence[Choice], chosen: Choice, most: int = 4) -> tuple[Choice, ...]:
    """The ways of which none is both faster and smaller: some that need more than ``chosen``, and some less."""
    found: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds_with_saves, choice.peak_bytes)):
        if not found or choice.peak_bytes < 0.97 * found[-1].peak_bytes:
            found.append(choice)
    larger = [choice for choice in found if choice.peak_bytes > chosen.peak_bytes * 1.01]
    smaller = [choice for choice in found if choice.peak_bytes < chosen.peak_bytes * 0.99]
    return (*larger[-most // 2 :], *smaller[:most])


def budget_of(
    config: Config,
    machine: Machine,
    memory_bytes: float | None = None,
    host_memory_bytes: float | None = None,
    disk_free_bytes: float | None = None,
    disks_are_assumed: bool = False,
    lockable_bytes: float | None = None,
) -> Budget:
    """What one worker may use, and all of a machine on its disks, and why."""
    on_cpu = machine.kind == "cpu"
    per_node = math.ceil(config.launch.num_workers / machine.nodes)
    whole = float(machine.device_bytes) if memory_bytes is None else memory_bytes
    what = "free now" if memory_bytes is not None else f"of {machine.name}"
    if config.memory.budget.device != "auto":
        whole, what = float(config.memory.budget.device), "memory.budget.device"
    of_host, of_disk = config.memory.budget.host, config.memory.budget.disk
    disk = None if of_disk == "auto" else float(of_disk)
    shared = f", shared by {per_node} workers" if per_node > 1 else ""
    if not on_cpu:
        host, whose = _host_memory(of_host, machine, host_memory_bytes)
        whose += f": {size(host)}{shared}" if whose and shared else ""
        of_device = f"{size(whole)} {what}"
        return Budget(
            whole, of_device, host / per_node, whose, lockable_bytes, disk, disk_free_bytes, disks_are_assumed
        )
    if of_host != "auto":
        found, needed = f"memory.budget.host={of_host} on {machine.name}", "GPUs, beside whose memory there is another"
        raise UserError(Problem(found, needed, f"memory.budget.device={of_host}", "memory.budget.host"))
    of_worker, each = f"{size(whole)} {what}{shared}", whole / per_node
    return Budget(each, of_worker, disk=disk, disk_free=disk_free_bytes, disks_are_assumed=disks_are_assumed)


def _host_memory(said: int | Literal["auto"], machine: Machine, free: float | None) -> tuple[float, str]:
    """What all workers of a node may use of its host's memory beside their devices, never more than is free; and
    where that comes from, in words."""
    if said == "auto":
        return (float(machine.host_bytes), "") if free is None else (free, "free now")
    if free is not None and free < said:
        return free, "free now, less than memory.budget.host"
    return float(said), "memory.budget.host"


def _check_workers(config: Config, data: DataProfile) -> None:
    workers, together = config.data_workers, config.parallel.together
    if data.num_packs < workers and not config.parallel.is_open:
        groups = "workers" if together == 1 else f"groups of {together} workers"
        raise UserError(
            Problem(
                where="launch.workers",
                found=f"{workers} {groups}, {data.num_packs} packs of training data",
                needed=f"at least one pack for each {'worker' if together == 1 else 'group'}",
                change=f"launch.workers={data.num_packs * together}, or a smaller data.max_length",
            )
        )


def _check_stages(config: Config, model: ModelProfile) -> None:
    pipeline = config.parallel.pipeline
    if not isinstance(pipeline, int) or pipeline == 1:
        return
    num_stages = pipeline * config.stages_per_worker
    if num_stages > model.num_blocks:
        most = model.num_blocks // config.stages_per_worker
        raise UserError(
            Problem(
                where="parallel.pipeline",
                found=f"{num_stages} stages, {model.num_blocks} blocks in the model",
                needed="at least one block for each stage",
                change=f"parallel.pipeline={most}" if most else "parallel.schedule=1f1b",
            )
        )


def _check_blocks(config: Config, parts: Mapping[int, ModelProfile]) -> None:
    tensor = config.parallel.tensor
    if config.memory.moments != "int8" or tensor == "auto" or parts[tensor].keeps_blocks:
        return
    raise UserError(
        Problem(
            where="memory.moments, parallel.tensor",
            found=f"int8, and rows of matrices that {tensor} workers would cut through blocks of numbers that share a "
            "scale",
            needed=f"rows of a multiple of {tensor * BLOCK} numbers in the layers that are divided by inputs",
            change="memory.moments=bf16, or parallel.tensor=1",
        )
    )


def _num_packs(config: Config, data: DataProfile, packs_per_step: int) -> int:
    if config.steps is not None:
        return config.steps * packs_per_step
    assert config.epochs is not None
    return max(1, round(config.epochs * data.num_packs))


def warmup_of(warmup: float, num_steps: int) -> int:
    """Steps of a warm-up that is a fraction of all or, from 1 on, a number of steps."""
    return round(warmup * num_steps) if warmup < 1 else int(warmup)


def _flops(model: ModelProfile, work: Work) -> float:
    """Products of one forward and its backward pass, attention and recompute left out; of a mixture's experts, those
    that a token goes through."""
    block = model.blocks["none"]
    blocks = model.num_blocks * (block.forward_flops(work.row_tokens) + block.backward_flops(work.row_tokens))
    head = 6.0 if model.trains_head else 4.0
    return blocks + head * model.head_parameters * work.row_supervised
