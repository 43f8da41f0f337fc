"""The plan of a run: the model weighed, the machine looked at, and the planner asked."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tonnage.config import Config, as_overrides, overridden_key, read_config
from tonnage.data import Prepared, Progress, silent
from tonnage.decide.handing import only_merged
from tonnage.decide.hardware import Where, counted, degrees, free_now, where
from tonnage.decide.images import as_seen, is_better_computed, looks
from tonnage.decide.models import check_division, read_files
from tonnage.decide.reference import with_reference
from tonnage.decide.rows import rows_of
from tonnage.decide.towers import tower_cost, trained_apart
from tonnage.errors import Problem, UserError, user_error
from tonnage.host.cachedir import default_directory
from tonnage.host.lockable import lockable_bytes
from tonnage.host.threads import threads_per_worker
from tonnage.planning.batch import resolved
from tonnage.planning.budgets import Free
from tonnage.planning.ladder import Cost
from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine
from tonnage.planning.plan import DataProfile, Plan, Rows
from tonnage.planning.planner import explain, make_plan
from tonnage.planning.profile import ModelProfile
from tonnage.planning.rules import check_fp8, check_precision
from tonnage.planning.scales import Scales
from tonnage.planning.space import free_for_states, no_room_for_saves, packed_base
from tonnage.planning.ways import WAYS, Compared, choose, compare
from tonnage.planning.words import size

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from tonnage.decide.models import ModelFound
    from tonnage.model.adapters import Trains
    from tonnage.model.files import ModelFiles
    from tonnage.training.isolation import Isolation
    from tonnage.training.weigh import Conditions


@dataclass(frozen=True)
class PlanQuestion:
    """What a plan is asked for: a config, which may leave open what is trained, the model it names, and a place."""

    config: Config
    model_config: PreTrainedConfig
    place: Where
    planned: Callable[[Config, bool], Plan]
    """The plan of a config that is this one but for what is chosen, searched or compared; with the second argument, of
    one that does not fit, too."""
    at_length: Callable[[Config, bool, int], Plan]
    """The same with rows taken to be full, of whatever ``data.max_length``; the model is weighed in rows of so many
    tokens."""
    ladder: Callable[[Config, Plan], list[Cost]]
    """What every rung of the ladder would have cost, beside the plan of a config."""

    @property
    def device(self) -> str:
        """Kind of the devices that are planned for."""
        return self.place.machine.kind

    def settled(self, *, force: bool = False) -> tuple[Config, str]:
        """The config with what is trained written out, and why it is that; empty where the config says it. With
        ``force`` that need not fit.

        Raises:
            UserError: no way to train fits.
        """
        if self.config.adapter != "auto":
            return self.config, ""
        return choose(self.config, lambda config, anyway: [self.planned(config, anyway)], self.device, force=force)

    def why(self, plan: Plan) -> list[Cost]:
        """What every rung of the ladder would have cost, beside the question's plan."""
        return self.ladder(self.settled()[0], plan)

    def plan(self) -> Plan:
        """The plan. Raises ``UserError`` where nothing that the config allows fits."""
        config, why = self.settled()
        plan = self.planned(config, False)
        return replace(plan, reasons=plan.reasons | {"adapter": why}) if why else plan


def suppose(name: str, overrides: Sequence[str], machine: Machine | None = None, progress: Progress = silent) -> Plan:
    """The plan of a model that is trained on full packs of which half is supervised. No weights or data are needed.

    Raises:
        UserError: no such model, or nothing that the overrides allow fits.
    """
    return supposed(name, overrides, machine, progress).plan()


def supposed(
    name: str, overrides: Sequence[str], machine: Machine | None = None, progress: Progress = silent
) -> PlanQuestion:
    """What ``suppose`` plans. Raises ``UserError`` where there is no such model."""
    supposed = as_overrides({"model": name, "data": {"train": "rows.jsonl"}})
    keys = [*supposed, *overrides]
    if not {"steps", "epochs"} & {*map(overridden_key, overrides)}:
        keys.append("steps=1000")
    config = counted(read_config(None, keys, check_files=False), machine)
    _, model_config = read_files(config)
    check_division(config, model_config)
    place = where(config, machine, progress)

    def subject(config: Config, weighed: int) -> _Subject:
        length, packs = config.data.max_length, config.packs_per_step * 1000
        tokens, pairs = packs * length, config.objective.is_preference
        data = DataProfile("", None, packs, tokens, tokens // 2, length, length / 4, pairs=pairs)
        return _Subject(model_config, None, data, weighed)

    def at_length(config: Config, force: bool, weighed: int) -> Plan:
        config, why_so_many = resolved(config, None)
        plan = _plan_of(config, subject(config, weighed), place, force=force)
        return replace(plan, reasons=({"batch": why_so_many} if why_so_many else {}) | plan.reasons)

    def planned(config: Config, force: bool) -> Plan:
        return at_length(config, force, config.data.max_length)

    def ladder(config: Config, plan: Plan) -> list[Cost]:
        config, _ = resolved(config, None)
        return _costs(config, subject(config, config.data.max_length), place, plan)

    return PlanQuestion(config, model_config, place, planned, at_length, ladder)


def says_what_is_trained(overrides: Sequence[str]) -> bool:
    """Whether overrides leave no choice of what is trained."""
    return any(overridden_key(one).partition(".")[0] in ("adapter", "train") for one in overrides)


def compared(question: PlanQuestion, progress: Progress = silent) -> tuple[Compared, ...]:
    """All ways to train the model of a question, each in its best layout, whether it fits or not.

    Raises:
        UserError: the devices do not have the precision.
    """
    check_precision(question.config, question.place.machine)
    done = 0

    def planned(config: Config, anyway: bool) -> list[Plan]:
        nonlocal done
        progress("planning the ways to train it", done, len(WAYS))
        done += 1
        return [question.planned(config, anyway)]

    ways = compare(question.config, planned)
    progress("", 1, 1)
    return ways


def offering_ways(error: UserError, ways: Sequence[Compared]) -> UserError:
    """What refuses a plan, with the first of other ways to train the model that does fit, where there is one."""
    fitting = next((one for one in ways if one.fits), None)
    if fitting is None or fitting.plan is None:
        return error
    first, *others = error.problems
    change = f"{fitting.way.override}: {fitting.way.name} fits, with {size(fitting.plan.choice.peak_bytes)}"
    return UserError(replace(first, change=f"{change}; or {first.change}" if first.change else change), *others)


def asked_of(config: Config, model: ModelFound, prepared: Prepared, place: Where) -> PlanQuestion:
    """The question whose answer is the plan of ``plan_run``."""

    def planned(config: Config, force: bool) -> Plan:
        return plan_run(config, model, prepared, place, None, force=force)

    def at_length(config: Config, force: bool, weighed: int) -> Plan:
        data, length = _data_of(prepared), config.data.max_length
        packs = math.ceil(data.num_tokens / length) if config.data.pack else data.num_packs
        data = replace(data, num_packs=packs, max_length=length, document_tokens=min(data.document_tokens, length))
        vocab_size = _checked_vocabulary(config, model, prepared)
        data = replace(data, sees=looks(config, model, prepared))
        config = as_seen(config, prepared, sees=data.sees)
        subject = _Subject(model.config, vocab_size, data, weighed, files=model.files, prepared=prepared)
        return _plan_of(config, subject, place, force=force)

    def ladder(config: Config, plan: Plan) -> list[Cost]:
        return _costs(config, _subject_of(config, model, prepared), place, plan)

    return PlanQuestion(config, model.config, place, planned, at_length, ladder)


def other_plans(
    config: Config, model: ModelFound, prepared: Prepared, place: Where, *, force: bool
) -> tuple[Plan, ...]:
    """Plans of all numbers of workers from the most to the least, the most left out: a run must fit with each."""
    launch, plans = config.launch, []
    most, fewest = launch.num_workers, launch.fewest_workers
    for workers in range(most - 1, fewest - 1, -1):
        nodes = math.ceil(workers / math.ceil(most / launch.num_nodes))
        fewer = config.with_keys("launch", {"workers": workers, "least": None, "nodes": nodes})
        try:
            plans.append(plan_run(fewer, model, prepared, place, None, force=force))
        except UserError as error:
            raise UserError(
                Problem(
                    found=f"the run does not fit on {workers} of its {fewest} to {most} workers:",
                    needed="a plan for every number of workers that it may have",
                    change=f"write launch.workers: [{workers + 1}, {most}]",
                    where="launch.workers",
                ),
                *error.problems,
            ) from error
    return tuple(plans)


def plan_run(
    config: Config,
    model: ModelFound,
    prepared: Prepared,
    place: Where,
    before: Layout | None,
    *,
    force: bool,
) -> Plan:
    """The plan of a config whose model is found and whose rows are prepared; ``before`` as for ``decide_on``."""
    subject = _subject_of(config, model, prepared)
    config = as_seen(config, prepared, sees=subject.data.sees)
    plan = _plan_of(config, subject, place, before, force=force)
    if not subject.data.sees and is_better_computed(config, model, plan, prepared, place.machine):
        computed = config.with_keys("data", {"image_features": "computed"})
        return plan_run(computed, model, prepared, place, before, force=force)
    plan = replace(plan, weights=model.weights)
    if config.objective.has_reference:
        plan = with_reference(plan, name=config.objective.reference)
    if base := what_is_packed(config, plan, place):
        plan = replace(plan, reasons=plan.reasons | {"base": base})
    return plan


@dataclass(frozen=True)
class _Subject:
    """What is planned."""

    model_config: PreTrainedConfig
    vocab_size: int | None
    """Tokens that the embedding must have."""
    data: DataProfile
    document_tokens: int
    """How long documents are with which the model is weighed."""
    rows: Rows | None = None
    files: ModelFiles | None = None
    """Of the model, where there are some."""
    prepared: Prepared | None = None
    """The rows, where there are some."""
    stored: tuple[tuple[str, str], ...] = ()
    """Weights in forms of their own, by their paths."""

    def trains(self, config: Config) -> Trains:
        """What a config trains of the model, with what is the tower's set apart."""
        from tonnage.training.building import keeping

        return keeping(trained_apart(config, self.model_config, self.files), config, self.stored)


def _subject_of(config: Config, model: ModelFound, prepared: Prepared) -> _Subject:
    """A model, and rows that are prepared."""
    others = [one for one in (prepared.validation, prepared.general) if one is not None]
    vocab_size, rows = _checked_vocabulary(config, model, prepared), rows_of(prepared.train, others, config.seed)
    data = replace(_data_of(prepared), sees=looks(config, model, prepared))
    return _Subject(model.config, vocab_size, data, data.max_length, rows, model.files, prepared, model.weights.stored)


def _data_of(prepared: Prepared) -> DataProfile:
    train, validation = prepared.train, prepared.validation
    return DataProfile(
        train_path=str(train.path.resolve()),
        validation_path=None if validation is None else str(validation.path.resolve()),
        num_packs=train.num_packs,
        num_tokens=train.num_tokens,
        supervised_tokens=train.supervised_tokens,
        max_length=train.max_length,
        document_tokens=train.document_tokens,
        general_path=None if prepared.general is None else str(prepared.general.path.resolve()),
        pairs=train.pairs,
        image_tokens=int(train.source.column("image_tokens").sum()) if train.images else 0,
    )


def _checked_vocabulary(config: Config, model: ModelFound, prepared: Prepared) -> int:
    """Tokens that the embedding must have. Raises ``UserError`` where it would have to grow, and is not trained."""
    vocab_size = max(prepared.tokenizer.get_vocab().values()) + 1
    is_frozen = config.adapter != "none" or bool(config.train)
    if vocab_size > model.config.vocab_size and is_frozen and not _trains_vocabulary(config, model):
        adds_tokens = bool(config.data.added_tokens or config.data.eos_token)
        trains = "adapter.also=[embeddings,head]" if config.adapter != "none" else "train=[]"
        if config.adapter == "auto":
            trains = "adapter=none"
        alternative = "another data.eos_token and data.added_tokens" if adds_tokens else "data.template=plain"
        raise user_error(
            where="data.added_tokens" if adds_tokens else "data.template",
            found=f"{'tokens' if adds_tokens else 'a template'} that {'need' if adds_tokens else 'needs'} "
            f"{vocab_size - model.config.vocab_size} more rows than the model has, and a model whose embedding and "
            "head are not trained as a whole",
            needed="tokens that the model has, or training of both",
            change=f"{trains}, or {alternative}",
        )
    return vocab_size


def _trains_vocabulary(config: Config, model: ModelFound) -> bool:
    """Whether the embedding and the head are trained as a whole, beside an adapter or as ``train`` says."""
    from tonnage.model.adapters import trained_names
    from tonnage.model.build import dissected

    if config.adapter == "auto":
        return False
    text, anatomy = dissected(model.config)
    names = trained_names(text, anatomy, trained_apart(config, model.config, model.files))
    trained = {id(one) for name, one in text.named_parameters(remove_duplicate=False) if name in names}
    return {id(anatomy.embedding.weight), id(anatomy.head.weight)} <= trained


@dataclass(frozen=True)
class _Weighed:
    """A subject on the scales, and what there is for it."""

    scales: Scales
    free: Free
    isolation: Isolation
    drops: bool
    """Whether an adapter's dropout keeps attention from sharing prefixes that could be shared."""


def _weighed(config: Config, subject: _Subject, place: Where) -> _Weighed:
    """The model weighed, the machine looked at. Raises ``UserError`` where recompute would change gradients."""
    import torch

    from tonnage.training.isolation import isolation_for
    from tonnage.training.weigh import Conditions

    model_config, data, machine, objective = subject.model_config, subject.data, place.machine, config.objective
    check_fp8(config, machine)
    if _is_elsewhere(config, place):  # on nodes that are taken to be like this one, where the config has no others
        machine = replace(machine, nodes=config.launch.num_nodes)
    machine = replace(machine, threads_of_worker=_threads(config, machine, place))
    device = torch.device("cuda" if machine.kind == "cuda" and torch.cuda.is_available() else "cpu")
    isolation = isolation_for(model_config, device, data.max_length)
    _check_recompute(config, model_config, isolation)
    conditions = Conditions(
        config.dtype,
        subject.document_tokens,
        machine.kind,
        arrangement=isolation.arrangement,
        attention=isolation.attention,
        trains=subject.trains(config),
        teacher=(objective.top_k, objective.supervised, objective.temperature) if objective.distils else None,
    )
    weighed = _weigher(
        config, subject, conditions, isolation, can_divide=not _why_undivided(config, model_config, isolation)
    )
    drops = not isinstance(config.adapter, str) and config.adapter.dropout > 0

    def trained(part: ModelProfile) -> ModelProfile:
        return replace(part, shares_prefixes=False) if drops else part

    parts = {degree: weighed(degree, 1) for degree in degrees(config, model_config, machine)}
    could_share = config.data.share_prefixes and parts[1].shares_prefixes
    parts = {degree: trained(part) for degree, part in parts.items()}
    scales = Scales(
        parts[1],
        data,
        machine,
        parts,
        subject.rows,
        tiled=lambda tensor, number: trained(weighed(tensor, number)),
        looks_first=config.objective.rows == "verdicts",
    )
    return _Weighed(scales, _free(config, machine, place), isolation, drops and could_share)


def _weigher(
    config: Config, subject: _Subject, conditions: Conditions, isolation: Isolation, *, can_divide: bool
) -> Callable[[int, int], ModelProfile]:
    """What weighs the model, divided along a tensor axis, with MLPs in a number of tiles of the sequence; of a model
    that ``can_divide`` rows among workers, heads of attention are told."""
    from tonnage.training.weigh import weigh_once

    tower = None
    if subject.data.sees:
        assert subject.files is not None
        assert subject.prepared is not None
        tower = tower_cost(config, subject.model_config, subject.files, subject.prepared)
    cache, kernels_off = default_directory(), config.kernels_off

    def weighed(tensor: int, sequence_tiles: int) -> ModelProfile:
        under = replace(conditions, tensor=tensor, sequence_tiles=sequence_tiles)
        part = weigh_once(subject.model_config, subject.vocab_size, under, cache=cache, kernels_off=kernels_off)
        for mode in isolation.inexact_recompute:
            part.blocks.pop(mode, None)
        if config.objective.scores_first:
            part = replace(part, outside=part.outside and part.outside.scoring_first())
        part = replace(part, shares_prefixes=part.shares_prefixes and isolation.shares_prefixes)
        part = part if can_divide else replace(part, heads=())
        return part if tower is None else part.seeing(tower)

    return weighed


def _is_elsewhere(config: Config, place: Where) -> bool:
    """Whether a plan that is made here is for other machines all the same."""
    return place.here and config.launch.is_elsewhere


def _free(config: Config, machine: Machine, place: Where) -> Free:
    """What is free where the plan is for."""
    from tonnage.host.control_groups import free_memory

    looks = place.here and not _is_elsewhere(config, place)
    return Free(
        memory=free_now(config, machine) if looks else None,
        host=free_memory() if looks else None,
        disk=_free_on_disks(config, machine, is_here=looks),
        disks_are_assumed=not looks,
        lockable=lockable_bytes() if looks and machine.counts_locked else None,
    )


def _threads(config: Config, machine: Machine, place: Where) -> int:
    launch = config.launch
    if launch.threads == "auto" and launch.reserved_cpus != "auto":
        return launch.reserved_cpus
    cores = None if place.here else machine.cores * machine.nodes
    return threads_per_worker(launch.threads, launch.num_workers, cores)


def _costs(config: Config, subject: _Subject, place: Where, plan: Plan) -> list[Cost]:
    """What every rung of the ladder would have cost."""
    weighed = _weighed(config, subject, place)
    return explain(config, weighed.scales, plan.choice, weighed.free)


def _plan_of(config: Config, subject: _Subject, place: Where, before: Layout | None = None, *, force: bool) -> Plan:
    """The plan of a run on rows of such data."""
    weighed = _weighed(config, subject, place)
    scales, free, machine = weighed.scales, weighed.free, weighed.scales.machine
    threads = machine.threads_of_worker
    planned = partial(make_plan, scales=scales, threads_per_worker=threads, free=free, before=before, force=force)
    plan = planned(config)
    if free.memory is not None and not force:
        _check_free(config, plan, free.memory, planned)
    workers_here = machine.workers_on_node(plan.workers)
    is_open = place.here and config.checkpoint.every == "auto"
    if is_open and (why_not := no_room_for_saves(config, plan, workers_here)):
        earlier_warnings = plan.warnings
        plan = planned(config.with_keys("checkpoint", {"every": 0}))
        reasons = plan.reasons | {"checkpoint.every": f"auto: {why_not}"}
        plan = replace(plan, reasons=reasons, warnings=(*earlier_warnings, f"the run is saved {why_not}"))
    return replace(plan, reasons=plan.reasons | _reasons(config, plan, weighed, place))


def _reasons(config: Config, plan: Plan, weighed: _Weighed, place: Where) -> dict[str, str]:
    """What is to be said of a plan besides, for the sake of the model and the place."""
    reasons, isolation, machine = {}, weighed.isolation, weighed.scales.machine
    if trained := what_is_trained(config, plan.model):
        reasons["trains"] = trained
    if plan.layout.arrangement == "padded":
        reasons["rows"] = (
            f"padded: documents would not keep to themselves in one row ({isolation.why_not_packed}), so each has its "
            f"own; {plan.layout.padding:.1%} of the computed tokens are padding"
        )
    if isolation.asked_on != machine.kind:
        reasons["rows"] = reasons.get("rows", "packed") + f"; found on this machine's {isolation.asked_on.upper()}"
    if weighed.drops and machine.kind == "cpu":
        reasons["prefixes"] = "computed for each document that begins with one: adapter.dropout drops others in each"
    if place.how:
        reasons["machine"] = place.how
    return reasons


def _check_recompute(config: Config, model_config: PreTrainedConfig, isolation: Isolation) -> None:
    """Refuse a way to recompute that changes gradients. Raises ``UserError``."""
    from tonnage.training.isolation import RECOMPUTES, inexact_recompute

    memory = config.memory
    asked = "full" if memory.recompute_blocks != "auto" else memory.recompute
    for mode in RECOMPUTES:
        if mode == asked and mode in isolation.inexact_recompute:
            raise UserError(inexact_recompute("memory.recompute", mode, model_config, isolation))


def _why_undivided(config: Config, model_config: PreTrainedConfig, isolation: Isolation) -> str:
    """Why workers cannot divide the tokens of rows of a model; empty if they can. Raises ``UserError`` where the config
    says that they do."""
    import torch

    from tonnage.model.build import on_meta
    from tonnage.training.routing import weight_of_router_loss

    context = config.parallel.context
    if context == 1:
        return ""
    if isolation.why_undivided and context != "auto":
        raise user_error(
            where="parallel.context",
            found=f"{context}, and a {model_config.model_type} model, whose tokens other things than attention "
            f"connect, in a tiny model of it ({isolation.why_undivided})",
            needed="tokens that only attention connects: of other workers' tokens it alone knows",
            change="parallel.context=1",
        )
    if not isolation.why_undivided:
        model = on_meta(copy.deepcopy(model_config), torch.float32)
        try:
            weight_of_router_loss(config.router_loss, model, context=2 if context == "auto" else context)
        except UserError as error:
            if context != "auto":
                raise
            return error.problems[0].found
    return isolation.why_undivided


def _check_free(config: Config, plan: Plan, free: float, planned: Callable[[Config], Plan]) -> None:
    """Refuse a plan of ``memory.budget.device`` for which less is ``free`` now: on each device or, on a CPU, for all
    workers. Raises ``UserError``, with what is refused without that budget where nothing fits then either."""
    on_cpu = plan.layout.device == "cpu"
    needed = plan.choice.peak_bytes * (plan.workers if on_cpu else 1)
    if config.memory.budget.device == "auto" or needed <= free:
        return
    planned(config.with_keys("memory.budget", {"device": "auto"}))
    raise user_error(
        where="memory.budget.device",
        found=f"{size(free)} free now{'' if on_cpu else ' on a GPU'}, and a plan of {size(needed)}, for which "
        f"memory.budget.device has room ({size(config.memory.budget.device)})",
        needed="a plan for what is free",
        change="memory.budget.device=auto, or end what takes the rest; --force starts all the same",
    )


def _free_on_disks(config: Config, machine: Machine, *, is_here: bool) -> float | None:
    """Bytes that are free for all workers of a machine where states rest; elsewhere what it is taken to have, unless
    the config says how much it may be, or on which disks. None where nobody knows."""
    if is_here:
        return free_for_states(config)
    memory = config.memory
    return None if memory.offload_dirs or memory.budget.disk != "auto" else machine.disk_bytes


def what_is_trained(config: Config, model: ModelProfile) -> str:
    """What of a model is trained where that is not all of it, what its adapter will weigh, and who takes that."""
    if not model.frozen.parameters:
        return ""
    number, share = model.trained_parameters, model.trained_parameters / model.num_parameters
    counted = f"{number:,} of {model.num_parameters:,} parameters ({share:.2%})"
    if isinstance(config.adapter, str):
        return f"{counted}: {', '.join(config.train) or 'the language model'}"
    adapter = config.adapter
    also = f", and {', '.join(adapter.also)} whole" if adapter.also else ""
    sees = model.tower is not None and model.tower.trained > 0
    where = [*model.adapted, *(["layers of the vision tower"] if sees else [])]
    ranks = "".join(f", {own.match} {own.rank}" for own in adapter.patterns if own.rank is not None)
    lengths = " with lengths of rows (DoRA)" if adapter.kind == "dora" else ""
    number_of = sum(number for _, number, _ in model.adapted_matrices)
    kinds = ", ".join(f"{number:,} of {whole:,} in {kind}" for kind, number, whole in model.adapted_matrices)
    trained = f"additions{lengths} of rank {adapter.rank}{ranks} to"
    if adapter.kind == "oft":
        trained = f"rotations of {adapter.oft_block_size} inputs each (OFT) of"
    additions = f"{trained} {', '.join(where)} ({number_of:,} matrices: {kinds}){also}: {counted}"
    megabytes = 4 * number / 1e6 * (1 if adapter.init == "zero" else 2)
    taken = "vLLM and llama.cpp take it as it is"
    if why_not := only_merged(adapter, model):
        taken = f"vLLM and llama.cpp take it merged (tonnage export --merge), as it has {' and '.join(why_not)}"
    return f"{additions}; the adapter will have {megabytes:,.1f} MB in fp32, {taken}"


def what_is_packed(config: Config, plan: Plan, place: Where) -> str:
    """Where the packed weights of a frozen base rest on disk, how many bytes that is, and whether they are there."""
    whole, coming = packed_base(config, plan)
    if not whole:
        return ""
    size = f"{whole / 1e9:.2f} GB of packed weights"
    if not place.here:
        return f"{size} in the cache there: packed by the first run, and only read from then on"
    packed = "packed once, and only read from then on" if coming else "packed before, and only read"
    return f"{size} in {default_directory()}: {packed}"
