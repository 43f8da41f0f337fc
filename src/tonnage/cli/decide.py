"""Everything that is decided before a run: the config, the model's files, the prepared data, the plan.

``train``, ``plan`` and ``inspect`` all start here, so what is shown is what will happen. Every mistake that can be
found is found here, before a weight is loaded.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tonnage.config import Config, RayLaunch, SlurmLaunch, check_trackers, overridden_key, read_config
from tonnage.config import Source as ConfigSource
from tonnage.errors import Problem, UserError
from tonnage.planning.plan import DataProfile, WeightFacts
from tonnage.rundir.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from tonnage.data import DataOptions, PackedDataset, Prepared, Progress, Source
    from tonnage.model.files import ModelFiles
    from tonnage.planning.machine import Machine
    from tonnage.planning.memory import Layout
    from tonnage.planning.plan import Plan, Rows, Steps
    from tonnage.planning.profile import ModelProfile

MOST_LOOKED_AT = 1 << 20
"""Packs of a run whose rows a plan looks at: what is the fullest of so many hardly grows with more."""


@dataclass(frozen=True)
class ModelFound:
    """A model whose weights nobody has read yet."""

    files: ModelFiles
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    weights: WeightFacts


@dataclass(frozen=True)
class Decision:
    """A config and all that follows from it."""

    config: Config
    model: ModelFound
    prepared: Prepared
    plan: Plan
    others: tuple[Plan, ...] = ()
    """Plans of the other numbers of workers that an elastic run may have, the most first."""


@dataclass(frozen=True)
class Where:
    """What a plan is made for."""

    machine: Machine
    how: str = ""
    """In which way it was measured just now, if it was."""
    here: bool = True
    """Whether what is free on this machine counts, and what it has."""


def decide(
    path: str, overrides: Sequence[str], console: Console, *, fresh_output: bool = False, force: bool = False
) -> Decision:
    """Read the config, find the model, prepare the data, make the plan.

    ``fresh_output`` also requires that the output directory holds no run yet. ``force`` accepts a plan that does not
    fit into memory.

    Raises:
        UserError: the user can mend it; lists every problem found.
    """
    return decide_on(read_config(path, overrides), console, fresh_output=fresh_output, force=force)


def decide_on(
    config: Config, console: Console, *, fresh_output: bool = False, force: bool = False, before: Layout | None = None
) -> Decision:
    """As ``decide``, for a config that is read already; of a run that goes on, ``before`` is the layout it had."""
    check_trackers(config)
    model = find(config, fresh_output=fresh_output)
    config = _at_commit(config, model)
    prepared = prepare_data(config, model, console)
    if prepared.date:  # whoever goes on with the run another day goes on with this one
        config = config.model_copy(update={"data": config.data.model_copy(update={"date": prepared.date})})
    where = _where(config, None, console)

    def planned(config: Config) -> tuple[Plan, tuple[Plan, ...]]:
        plan = _plan(config, model, prepared, where, before, force=force)
        return plan, _other_plans(config, model, prepared, where, force=force)

    plan, others = planned(config)
    settled = _written_out(config, plan, *others)
    if any(one.choice.saving.every != settled.checkpoint.every for one in others):  # some size would save sooner
        reasons = plan.reasons
        plan, others = planned(settled)
        plan = replace(plan, reasons=reasons | {"checkpoint.every": f"auto: {plan.saves}"})
    return Decision(settled, model, prepared, plan, others)


def _written_out(config: Config, *plans: Plan) -> Config:
    """The config with what it left open as it was decided, for a run to have when it goes on."""
    from tonnage.planning.batch import resolved

    config, _ = resolved(config, plans[0].data.num_packs)
    if config.checkpoint.every != "auto":
        return config
    every = min((plan.choice.saving.every for plan in plans if plan.choice.saving.every), default=0)
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": every})})


def _at_commit(config: Config, model: ModelFound) -> Config:
    """The config with the commit that a hub model was found at, so that a run that goes on finds the same."""
    commit = model.files.commit
    return config if commit is None else config.model_copy(update={"revision": commit})


def find(config: Config, *, fresh_output: bool = False) -> ModelFound:
    """Find the model of ``config`` and check that model, weights, tokenizer and lengths belong together."""
    from tonnage.config import check_output
    from tonnage.model.files import check_fit, read_tokenizer

    problems: list[Problem] = []

    @contextmanager
    def collecting() -> Iterator[None]:
        try:
            yield
        except UserError as error:
            problems.extend(error.problems)

    found = None
    if fresh_output:
        with collecting():
            check_output(config)
    with collecting():
        files, model_config, weights = find_weights(config)
        tokenizer = read_tokenizer(files, trust_remote_code=config.trust_remote_code)
        found = ModelFound(files, model_config, tokenizer, weights)
        check_fit(model_config, tokenizer, config.data.max_length)
    with collecting():
        if found is not None:
            check_division(config, found.config)
    if problems or found is None:
        raise UserError(*problems)
    return found


def find_weights(config: Config) -> tuple[ModelFiles, PreTrainedConfig, WeightFacts]:
    """The files of the model of ``config``, what they describe, and what is remarkable about the weights; only their
    headers are read."""
    from tonnage.model.files import read_model

    is_random = config.init == "random"
    files, model_config = read_model(
        config.model,
        revision=config.revision,
        random_weights=is_random,
        trust_remote_code=config.trust_remote_code,
    )
    if is_random:
        return files, model_config, WeightFacts()
    from tonnage.model.matching import check_weights

    weights = check_weights(
        files, model_config, allow_missing=config.allow_missing, allow_unexpected=config.allow_unexpected
    )
    return files, model_config, WeightFacts(**asdict(weights))


def code_allowed(model: str, given: bool) -> bool:
    """Whether the code of a model may run: because it was ``given``, or because the run that made it says so."""
    run = RunDirectory(model)
    return given or (run.config.exists() and read_config(run.config, [], check_files=False).trust_remote_code)


def check_division(config: Config, model_config: PreTrainedConfig) -> None:
    """Refuse a model that cannot be divided as the config wants it."""
    degree = config.parallel.tensor
    if degree == "auto" or degree == 1:
        return
    from tonnage.model.tensor_plan import check_degree

    check_degree(model_config, degree)
    _check_family(model_config)


def _check_family(model_config: PreTrainedConfig) -> None:
    import torch

    from tonnage.model.anatomy import dissect
    from tonnage.model.build import build_on_meta
    from tonnage.model.tensor_plan import tensor_plan

    model = build_on_meta(copy.deepcopy(model_config), torch.float32)
    tensor_plan(model, dissect(model))


def prepare_data(config: Config, model: ModelFound, console: Console) -> Prepared:
    """Rows to packs, or the packs of an earlier preparation of the same rows, with a progress bar."""
    from tonnage.data import RayCluster, prepare
    from tonnage.launch import ray
    from tonnage.model.files import positions_of

    cache, cluster = Path(config.data.cache) if config.data.cache else None, None
    if isinstance(config.launch, RayLaunch) and config.launch.address is not None:
        ray.check_installed()
        cluster = RayCluster(config.launch.address, config.launch.runtime_env)
    options = replace(data_options(config), most_positions=positions_of(model.config))
    with progress_bar(console) as progress:
        return prepare(options, model.tokenizer, cache=cache, progress=progress, cluster=cluster)


def data_options(config: Config) -> DataOptions:
    """The part of a config that the data room needs, as it wants it."""
    from tonnage.data import DataOptions

    data = config.data
    return DataOptions(
        train=_sources(data.train),
        validation=_sources(data.validation) if isinstance(data.validation, tuple) else data.validation,
        max_length=data.max_length,
        over_length=data.over_length,
        max_loss=data.max_loss,
        template=data.template,
        template_arguments=data.template_arguments,
        date=None if data.date == "auto" else datetime.date.fromisoformat(data.date),
        fold_system=data.fold_system,
        train_on=data.train_on,
        pack=data.pack,
        on_bad_row=data.on_bad_row,
        duplicates=data.duplicates,
        mixture=data.mixture,
        seed=config.seed,
    )


def _sources(sources: tuple[ConfigSource, ...]) -> tuple[Source, ...]:
    from tonnage.data import Source

    return tuple(Source(**source.model_dump()) for source in sources)


def decide_for(path: str, overrides: Sequence[str], console: Console, machine: Machine | None) -> Plan:
    """The plan of a config: for this machine or, if given, for another one and, unless said, as many workers as it has
    devices. Raises as ``decide``."""
    config = read_config(path, _for_machine(overrides, machine))
    model = find(config)
    prepared = prepare_data(config, model, console)
    return _plan(config, model, prepared, _where(config, machine, console), None, force=False)


def _for_machine(overrides: Sequence[str], machine: Machine | None) -> list[str]:
    """Overrides, and as many workers as the machine has devices if they do not say how many."""
    if machine is None or "launch.workers" in map(overridden_key, overrides):
        return list(overrides)
    return [*overrides, f"launch.workers={machine.num_devices}"]


def suppose(
    name: str, overrides: Sequence[str], machine: Machine | None = None, console: Console | None = None
) -> Plan:
    """The plan of a model that is trained on full packs of which half is supervised. No weights or data are needed.

    Raises:
        UserError: no such model, or nothing that the overrides allow fits.
    """
    from tonnage.model.files import read_model
    from tonnage.planning.batch import resolved

    supposed = {"model": name, "data": {"train": "rows.jsonl"}, "steps": 1000}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "supposed.yaml"
        path.write_text(json.dumps(supposed))
        config = read_config(path, _for_machine(overrides, machine), check_files=False)
    _, model_config = read_model(
        name,
        revision=config.revision,
        random_weights=True,
        tokenizer=False,
        trust_remote_code=config.trust_remote_code,
    )
    check_division(config, model_config)
    config, why_so_many = resolved(config, None)
    length, packs = config.data.max_length, config.packs_per_step * 1000
    data = DataProfile("", None, packs, packs * length, packs * length // 2, length, length / 4)
    plan = _plan_of(config, model_config, None, data, _where(config, machine, console), None, force=False)
    return replace(plan, reasons=({"batch": why_so_many} if why_so_many else {}) | plan.reasons)


def _other_plans(
    config: Config, model: ModelFound, prepared: Prepared, where: Where, *, force: bool
) -> tuple[Plan, ...]:
    """Plans of all numbers of workers from the most to the least, the most left out: a run must fit with each."""
    launch = config.launch
    if not isinstance(launch, RayLaunch):
        return ()
    plans = []
    for workers in range(launch.workers - 1, launch.fewest_workers - 1, -1):
        nodes = math.ceil(workers / math.ceil(launch.workers / launch.nodes))
        fewer = config.model_copy(
            update={"launch": launch.model_copy(update={"workers": workers, "least": None, "nodes": nodes})}
        )
        try:
            plans.append(_plan(fewer, model, prepared, where, None, force=force))
        except UserError as error:
            raise UserError(
                Problem(
                    found=f"the run does not fit on {workers} of its {launch.fewest_workers} to {launch.workers} "
                    "workers:",
                    needed="a plan for every number of workers that it may have",
                    change=f"write launch.workers: [{workers + 1}, {launch.workers}]",
                    where="launch.workers",
                ),
                *error.problems,
            ) from error
    return tuple(plans)


def _plan(
    config: Config,
    model: ModelFound,
    prepared: Prepared,
    where: Where,
    before: Layout | None,
    *,
    force: bool,
) -> Plan:
    train, validation = prepared.train, prepared.validation
    data = DataProfile(
        train_path=str(train.path.resolve()),
        validation_path=None if validation is None else str(validation.path.resolve()),
        num_packs=train.num_packs,
        num_tokens=train.num_tokens,
        supervised_tokens=train.supervised_tokens,
        max_length=train.max_length,
        document_tokens=train.document_tokens,
    )
    vocab_size = max(prepared.tokenizer.get_vocab().values()) + 1
    rows = rows_of(train, validation, config.seed)
    plan = _plan_of(config, model.config, vocab_size, data, where, before, rows=rows, force=force)
    return replace(plan, weights=model.weights)


def rows_of(train: PackedDataset, validation: PackedDataset | None, seed: int) -> Rows:
    """Tells how full the rows of a run will be, evaluations included."""
    import numpy as np

    from tonnage.data import first_packs
    from tonnage.planning.plan import RowSizes

    def rows(steps: Steps, workers: int, micro_batch: int) -> RowSizes:
        dealt = {"packs_per_step": steps.packs, "workers": workers, "micro_batch": micro_batch}
        order = first_packs(min(steps.num_packs, MOST_LOOKED_AT), train.num_packs, seed)
        tokens, supervised, *means = train.row_sizes(order, **dealt, share_prefixes=steps.share_prefixes)
        if validation is not None:
            order = np.arange(min(validation.num_packs, MOST_LOOKED_AT))
            others = validation.row_sizes(order, **dealt, share_prefixes=steps.share_prefixes)
            tokens, supervised = max(tokens, others[0]), max(supervised, others[1])
        return RowSizes(tokens, supervised, *means)

    return rows


def _plan_of(
    config: Config,
    model_config: PreTrainedConfig,
    vocab_size: int | None,
    data: DataProfile,
    where: Where,
    before: Layout | None,
    *,
    rows: Rows | None = None,
    force: bool,
) -> Plan:
    from tonnage.host.cachedir import default_directory
    from tonnage.host.control_groups import free_memory
    from tonnage.host.threads import threads_per_worker
    from tonnage.planning.planner import make_plan
    from tonnage.planning.space import no_room_for_saves
    from tonnage.training.weigh import weigh_once

    launch, machine, here = config.launch, where.machine, where.here
    elsewhere = here and (
        isinstance(launch, SlurmLaunch) or (isinstance(launch, RayLaunch) and launch.address is not None)
    )
    if elsewhere:  # on nodes that are taken to be like this one, where the config does not describe them
        assert isinstance(launch, SlurmLaunch | RayLaunch)
        machine = replace(machine, nodes=launch.nodes)
    parts = {
        degree: weigh_once(
            model_config,
            vocab_size,
            precision=config.precision,
            document_tokens=data.max_length,
            device_type=machine.kind,
            cache=default_directory(),
            tensor=degree,
        )
        for degree in _degrees(config, model_config, machine)
    }
    _check_apart(config, parts[1])
    if isinstance(launch, SlurmLaunch | RayLaunch) and launch.threads == "auto" and launch.cpus_per_worker != "auto":
        threads = launch.cpus_per_worker
    else:
        threads = threads_per_worker(launch.threads, launch.workers) if here else 1
    planned = partial(
        make_plan,
        model=parts[1],
        data=data,
        machine=machine,
        threads_per_worker=threads,
        parts=parts,
        memory_bytes=_free_now(config, machine) if here and not elsewhere else None,
        host_memory_bytes=free_memory() if here and not elsewhere else None,
        rows=rows,
        before=before,
        force=force,
    )
    plan = planned(config)
    workers_here = math.ceil(plan.workers / machine.nodes)
    if here and config.checkpoint.every == "auto" and (why_not := no_room_for_saves(config, plan, workers_here)):
        at_its_end, said = config.checkpoint.model_copy(update={"every": 0}), plan.warnings
        plan = planned(config.model_copy(update={"checkpoint": at_its_end}))
        reasons = plan.reasons | {"checkpoint.every": f"auto: {why_not}"}
        plan = replace(plan, reasons=reasons, warnings=(*said, f"the run is saved {why_not}"))
    return replace(plan, reasons=plan.reasons | {"machine": where.how}) if where.how else plan


def _check_apart(config: Config, model: ModelProfile) -> None:
    """Refuse rows of several documents for a model in which they would meet."""
    if not model.documents_meet or (not config.data.pack and config.memory.micro_batch == 1):
        return
    raise UserError(
        Problem(
            where=f"model type {model.model_type}",
            found=f"documents that lie in one row meet in {model.documents_meet}: each would see what stood before it",
            needed="a row for each document, or a family whose documents meet in attention alone",
            change="set data.pack: false and memory.micro_batch: 1, which computes one document at a time, or choose "
            "another model family",
        )
    )


def _where(config: Config, machine: Machine | None, console: Console | None) -> Where:
    """The machine that is asked for, or a node of the cluster that the config describes, or this one: measured if it
    never was, for which nobody waits more than two seconds.

    Raises ``UserError`` where the config describes no hardware that is known.
    """
    from tonnage.data import silent
    from tonnage.doctor.cache import describe_here, load_machine
    from tonnage.doctor.measure import glance

    if machine is not None:
        return Where(machine, here=False)
    if (known := _node_of(config) or load_machine(config.output)) is not None:
        return Where(known)
    with nullcontext(silent) if console is None else progress_bar(console) as progress:
        found = glance(Path(config.output), progress=progress)
    return Where(describe_here(config.output)) if found is None else Where(found.machine, str(found))


def _free_now(config: Config, machine: Machine) -> float | None:
    """Bytes that this machine's workers may use on a CPU, or each on its device; None where nobody knows."""
    from tonnage.doctor.hardware import free_device_memory
    from tonnage.host.control_groups import free_memory

    if machine.kind == "cpu":
        return free_memory()
    return min(free_device_memory()[: config.launch.workers], default=None)


def _degrees(config: Config, model_config: PreTrainedConfig, machine: Machine) -> list[int]:
    """Sizes of the tensor axis to weigh the model for: whole, and what the config says, or what divides a node."""
    said = config.parallel.tensor
    if said != "auto":
        return sorted({1, said})
    from tonnage.model.tensor_plan import fitting_degrees

    with suppress(UserError):
        _check_family(model_config)
        per_node = math.ceil(config.launch.workers / machine.nodes)
        return [degree for degree in fitting_degrees(model_config, per_node) if per_node % degree == 0]
    return [1]


def _node_of(config: Config) -> Machine | None:
    """A node of the cluster, if the config describes it. Raises ``UserError`` where it is no hardware that is known."""
    from tonnage.planning.machine import parse_hardware

    launch = config.launch
    if not isinstance(launch, SlurmLaunch | RayLaunch) or launch.hardware is None:
        return None
    return parse_hardware(launch.hardware)


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A progress bar that is told (what, done, total) and goes away at the end; nothing where there is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        task = bar.add_task("", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total)

        yield show
