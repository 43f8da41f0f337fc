"""A config for a model and rows of which nothing is known but themselves: each key with its reason, and the plan.

    look ──► rows and lengths ──► workers ──► what is trained ──► batch ──► how long ──► Proposal
                 (data.*)         (launch)     (adapter, lr)                (epochs)

What the user says is kept, and the rest follows from it. What is trained is what ``adapter: auto`` would be
(``planning.ways``). Every figure in a comment is the account's or the plan's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tonnage.config import Config
from tonnage.config.commented import commented_text
from tonnage.config.schema import DEFAULT_EPOCHS
from tonnage.data import Prepared, Progress, silent
from tonnage.decide.first_look import Looked, Purpose, longest, typical
from tonnage.decide.hardware import counted, where
from tonnage.decide.models import with_adapter
from tonnage.decide.plans import plan_run
from tonnage.decide.rows import prepare_data
from tonnage.errors import user_error
from tonnage.planning.batch import ENOUGH_STEPS, FEW_STEPS, resolved
from tonnage.planning.machine import Machine, parse_hardware
from tonnage.planning.plan import Plan
from tonnage.planning.ways import choose
from tonnage.planning.words import describe, run_time, step_time
from tonnage.planning.workers import decided

if TYPE_CHECKING:
    from tonnage.decide.hardware import Where

SHORT_LENGTH, USUAL_LENGTH = 512, 2048
"""Tokens of a pack: shorter ones save little memory; and what any rows may take, however few of them are so long."""
MOST_CUT, MOST_LOST = 0.01, 0.1
"""Of the supervised tokens: more than the first is lost only where nothing else can be done, more than the second
never."""
FEW_ROWS, SOME_ROWS, MANY_ROWS = 20, 1000, 5000
MOST_SET_ASIDE = 2000
"""Rows to evaluate on: more say hardly more, and take their time at every evaluation."""
EVALUATIONS = 0.2
"""Of all steps, between evaluations."""
USES: Mapping[Purpose, str] = {
    "chat": "answers in conversations",
    "task": "one task",
    "text": "text that goes on like the rows",
}
MASKS: Mapping[Purpose, tuple[str, str]] = {
    "chat": ("assistant", "every answer is trained on, and nothing of the questions"),
    "task": ("last", "the last answer of a conversation is trained on, and nothing before it"),
    "text": ("all", "every token is trained on"),
}


@dataclass(frozen=True)
class Proposal:
    """A config, why it is as it is, and what it will do."""

    config: Config
    comments: Mapping[str, str]
    """By dotted key."""
    heading: str
    prepared: Prepared
    plan: Plan

    @property
    def text(self) -> str:
        """The config as YAML, each line under its reason."""
        return commented_text(self.config, self.comments, self.heading)


@dataclass
class _Draft:
    """A config in the making."""

    found: Looked
    tree: dict[str, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)

    @property
    def config(self) -> Config:
        return self.found.wanted.config(self.tree)

    def says(self, key: str) -> bool:
        return self.found.wanted.says(key)

    def put(self, key: str, value: Any, why: str = "") -> None:
        """Decide a key, unless the user says it, and note why."""
        if self.says(key):
            why = "as given"
        else:
            *sections, name = key.split(".")
            tree = self.tree
            for section in sections:
                tree = tree.setdefault(section, {})
            tree[name] = value
        self.comments[key] = why

    def drop(self, key: str) -> None:
        self.tree.pop(key, None)
        self.comments.pop(key, None)


def propose(
    looked: Looked,
    *,
    purpose: Purpose | None = None,
    hours: float | None = None,
    hardware: str | None = None,
    progress: Progress = silent,
) -> Proposal:
    """The config that we would use.

    ``purpose`` is what the model is for (by default what its rows look like), ``hours`` how long the run may take (as
    long as some epochs take), ``hardware`` where it will run, as ``tonnage plan --hardware`` takes it (here).

    Raises:
        UserError: nothing that the user has left open fits, or the rows must not be trained on; lists every problem.
    """
    if purpose in ("chat", "task") and not looked.is_chat:
        needed = "rows with questions and answers, or conversations"
        raise user_error("rows of text alone", needed, "--for text", f"--for {purpose}")
    draft = _Draft(looked)
    prepared = _rows(draft, purpose or looked.purpose, progress)
    place = _workers(draft, hardware, progress)
    prepared, plan = _trained(draft, prepared, place, progress)
    _duration(draft, prepared, plan)
    plan = _planned(draft, prepared, place)
    if hours is not None and not draft.says("epochs") and not draft.says("steps"):
        plan = _within(draft, hours, prepared, place, plan)
    _tell(draft, prepared, plan)
    where_to = hardware if hardware is not None else "this machine as it is now"
    return Proposal(draft.config, draft.comments, _heading(looked, plan, where_to), prepared, plan)


def _rows(draft: _Draft, purpose: Purpose, progress: Progress) -> Prepared:
    """Keys of ``data``; returns the prepared rows."""
    looked, account = draft.found, draft.found.account
    total = account.total
    if total.rows_bad:
        why = f"{total.rows_bad:,} of {total.rows_read:,} rows cannot be trained on; with error they are named"
        draft.put("data.on_bad_row", "skip", why)
    if total.rows_duplicate:
        why = f"{total.rows_duplicate:,} of {total.rows_read:,} rows equal an earlier one; keep would train on all"
        draft.put("data.duplicates", "drop", why)
    _form(draft, purpose)
    _length(draft, purpose)
    _validation(draft)
    prepared = prepare_data(looked.wanted.with_data(draft.config, {"max_loss": 1.0}), looked.model, progress)
    room = looked.positions or math.inf
    while prepared.account.supervised_loss > MOST_CUT and not draft.says("data.max_length"):
        length = prepared.train.max_length
        if length >= room or length >= longest(account):
            break
        draft.tree["data"]["max_length"] = int(min(2 * length, room))
        prepared = prepare_data(looked.wanted.with_data(draft.config, {"max_loss": 1.0}), looked.model, progress)
    lost = prepared.account.supervised_loss
    if MOST_CUT < lost <= MOST_LOST:
        why = f"{lost:.2%} of the supervised tokens are lost, as the model has positions for {room:,} tokens"
        draft.put("data.max_loss", math.ceil(1000 * lost) / 1000, why)
    return prepare_data(draft.config, looked.model, progress)


def _form(draft: _Draft, purpose: Purpose) -> None:
    """Template and mask, by what the model is for."""
    looked = draft.found
    has_own = bool(looked.model.tokenizer.chat_template)
    name = "auto"
    if looked.is_chat and purpose == "text":
        name = "plain"
    elif looked.is_chat and purpose == "chat" and looked.single_turn and not has_own:
        name = "chatml"
    draft.put("data.template", name)
    value, why = MASKS["chat" if purpose == "task" and looked.single_turn else purpose]
    draft.put("data.train_on", value, f"for {USES[purpose]}: {why}")


def _length(draft: _Draft, purpose: Purpose) -> None:
    looked = draft.found
    most, usual = longest(looked.account), typical(looked.account)
    if looked.is_chat:
        tokens = most if most <= max(USUAL_LENGTH, 2 * usual) else usual
    else:
        tokens = min(most, USUAL_LENGTH)  # longer texts are split, and lose nothing
    length = min(max(SHORT_LENGTH, 1 << max(0, tokens - 1).bit_length()), looked.positions or math.inf)
    draft.put("data.max_length", int(length))
    if most > draft.config.data.max_length:
        split = not looked.is_chat or purpose == "text"
        draft.put("data.over_length", "split" if split else "drop")


def _validation(draft: _Draft) -> None:
    rows = draft.found.different_rows
    if rows < FEW_ROWS:
        draft.put("data.validation", 0.0, f"{rows:,} different rows are too few to set some aside")
        return
    share = 0.1 if rows < SOME_ROWS else 0.05 if rows < MANY_ROWS else 0.02
    if share * rows > MOST_SET_ASIDE:
        share = float(f"{MOST_SET_ASIDE / rows:.1g}")
    draft.put("data.validation", share)
    draft.put("evaluate.every", EVALUATIONS, f"of all steps: {round(1 / EVALUATIONS)} evaluations in the run")


def _workers(draft: _Draft, hardware: str | None, progress: Progress) -> Where:
    """Where the run will be, its workers and its precision."""
    machine: Machine | None = None if hardware is None else parse_hardware(hardware)
    described = machine
    if hardware is not None and machine is not None and machine.nodes > 1 and not draft.says("launch.with"):
        why = f"{machine.nodes} machines: one job, with a worker for each device"
        draft.put("launch.with", "slurm", why)
        draft.put("launch.nodes", machine.nodes, "machines of the job")
        draft.put("launch.hardware", re.sub(r"^\s*\d+\s*[x×*]\s*", "", hardware), "of each machine")
        if machine.kind == "cpu" and not draft.says("launch.cpus_per_worker"):
            draft.put("launch.cpus_per_worker", machine.cores, "all cores of a machine, for its one worker")
        if machine.kind == "cuda":
            draft.put("launch.gpus_per_node", machine.devices_per_node, "one for each worker of a machine")
        described = None  # the config itself describes it
    number = counted(draft.config, described).launch.num_workers
    place = where(draft.config, described, progress)
    device = "GPU" if place.machine.kind == "cuda" else "machine"
    draft.put("launch.workers", "auto", f"{number}, one for each {device}" if number > 1 else f"1: one {device}")
    if not place.machine.has_bf16:
        draft.put("precision", "fp16", f"{place.machine.name} has no fast bf16")
    return place


def _trained(draft: _Draft, prepared: Prepared, place: Where, progress: Progress) -> tuple[Prepared, Plan]:
    """All weights, or additions to them (LoRA), with the learning rate and the batch."""
    if draft.says("adapter") or draft.says("train") or draft.found.model.files.adapter is not None:
        config = with_adapter(draft.config, draft.found.model)
        whole = config.adapter == "none"
        if not whole or config.train:
            prepared = _with_known_tokens(draft, prepared, _of_known_tokens(draft, prepared, progress))
        plan = _batched(draft, prepared, place)
        comment = "as given" if draft.says("adapter") or draft.says("train") else "the model is an adapter, and goes on"
        draft.comments["train" if draft.says("train") else "adapter"] = comment
        draft.put("optimizer.lr", config.optimizer.lr, _why_so_fast(whole))
        return prepared, plan
    model, of_known_tokens = draft.found.model, _of_known_tokens(draft, prepared, progress)

    def planned(config: Config, anyway: bool) -> list[Plan]:
        rows = prepared if config.adapter == "none" else of_known_tokens
        return [plan_run(config, model, rows, place, None, force=anyway)]

    # Forced, as what takes least may still fit with moments of 8 bits or on disk; if not, its plan is refused.
    config, why = choose(decided(draft.config, place.machine), planned, place.machine.kind, force=True)
    adapter = config.adapter
    if not isinstance(adapter, str):
        draft.put("adapter", {"rank": adapter.rank} | adapter.model_dump(exclude_unset=True))
        prepared = _with_known_tokens(draft, prepared, of_known_tokens)
    else:
        draft.put("adapter", adapter)
    draft.put("optimizer.lr", config.optimizer.lr, _why_so_fast(adapter == "none"))
    plan = _batched(draft, prepared, place)
    draft.comments["adapter"] = why.removeprefix("auto: ")
    if plan.layout.tiers_on_disk or plan.layout.moments == "int8":
        draft.comments["adapter"] += f"; it fits with {describe(plan.layout)}"
    return prepared, plan


def _why_so_fast(whole: bool) -> str:
    if whole:
        return "usual where all weights of a trained model go on"
    return "ten times what all weights would get, as is usual: additions begin at zero"


def _of_known_tokens(draft: _Draft, prepared: Prepared, progress: Progress) -> Prepared:
    """The rows under a template all of whose tokens the model has, for runs that do not train the whole embedding:
    ``prepared`` itself if it needs no other tokens, or if the user chose the template."""
    highest = max(prepared.tokenizer.get_vocab().values())
    if highest < draft.found.model.config.vocab_size or draft.says("data.template"):
        return prepared
    plain = draft.found.wanted.with_data(draft.config, {"template": "plain"})
    return prepare_data(plain, draft.found.model, progress)


def _with_known_tokens(draft: _Draft, prepared: Prepared, known: Prepared) -> Prepared:
    """Take the rows that ``_of_known_tokens`` returned, and note why."""
    if known is not prepared:
        why = "others need tokens that the model lacks, whose embedding is not trained"
        draft.put("data.template", "plain", why)
    return known


def _batched(draft: _Draft, prepared: Prepared, place: Where) -> Plan:
    """Decide the batch; returns the plan with it."""
    if draft.says("batch"):
        draft.comments["batch"] = "as given"
    else:
        draft.tree["batch"] = "auto"
        config, why = resolved(decided(draft.config, place.machine), prepared.train.num_packs)
        assert config.batch != "auto"
        draft.put("batch", config.batch.model_dump(exclude_none=True), why.removeprefix("auto: "))
    return _planned(draft, prepared, place)


def _planned(draft: _Draft, prepared: Prepared, place: Where) -> Plan:
    model, config = draft.found.model, decided(draft.config, place.machine)
    return plan_run(with_adapter(config, model), model, prepared, place, None, force=False)


def _duration(draft: _Draft, prepared: Prepared, plan: Plan) -> None:
    if draft.says("epochs") or draft.says("steps"):
        draft.comments["steps" if draft.says("steps") else "epochs"] = "as given"
        return
    why, epochs = "as many passes over the rows as are usual", DEFAULT_EPOCHS
    if plan.num_steps < FEW_STEPS:
        epochs = float(math.ceil(ENOUGH_STEPS * plan.packs_per_step / prepared.train.num_packs))
        why = f"for {ENOUGH_STEPS} steps: {DEFAULT_EPOCHS:g} would be {plan.num_steps}, which teach hardly anything"
    draft.put("epochs", epochs, why)


def _within(draft: _Draft, hours: float, prepared: Prepared, place: Where, plan: Plan) -> Plan:
    """The plan of a run that takes no longer than ``hours``, with fewer steps if need be."""
    seconds, epochs, changed = 3600 * hours, draft.tree["epochs"], False
    while plan.num_steps * plan.choice.seconds_with_saves > seconds and plan.num_steps > 1:
        draft.drop("epochs")
        allowed = int(seconds / plan.choice.seconds_with_saves)
        steps, changed = max(1, min(allowed, plan.num_steps - 1)), True
        draft.put("steps", steps)
        plan = _planned(draft, prepared, place)
    if changed:
        draft.comments["steps"] = f"as many as {hours:g} hours allow, {epochs:g} epochs take longer"
    else:
        draft.comments["epochs"] += f"; {hours:g} hours are enough"
    return plan


def _tell(draft: _Draft, prepared: Prepared, plan: Plan) -> None:
    """Add to the reasons the figures of the account and of the plan."""
    account, config, total = prepared.account, draft.config, prepared.account.total
    source = account.sources[0]

    def add(key: str, facts: str) -> None:
        if key in draft.comments:
            draft.comments[key] = "; ".join(filter(None, (draft.comments[key], facts)))

    of_form = f" of form {source.format}" if source.format else ""
    draft.comments["data.train"] = (
        f"{total.rows_read:,} rows{of_form}: {total.tokens.read:,} tokens, {total.supervised.read:,} of them supervised"
    )
    first, length = draft.found.account, config.data.max_length
    over = total.rows_dropped + total.rows_truncated + total.rows_split
    lengths = f"99% of the rows have at most {typical(first):,} tokens, the longest has {longest(first):,}"
    add("data.max_length", f"{lengths}; {over:,} of {total.rows_read:,} rows are over {length:,}")
    lost = f"{account.supervised_loss:.2%} of the supervised tokens are lost"
    add("data.over_length", f"{over:,} rows are longer than {length:,} tokens: {lost}")
    added = f"; it adds {', '.join(account.added_tokens)} to the vocabulary" if account.added_tokens else ""
    add("data.template", f"{account.template}: {account.template_reason}{added}")
    if account.validation is not None:
        tokens = f"{account.validation.tokens:,} tokens"
        add("data.validation", f"{total.rows_validation:,} rows ({tokens}) are set aside, and never trained on")
    add("batch", f"{plan.tokens_per_step:,} tokens a step on average")
    add("launch.workers", f"{plan.threads_per_worker} threads each" if plan.layout.device == "cpu" else "")
    add("adapter", plan.memory_in_words)
    add("train", plan.memory_in_words)
    add("optimizer.lr", f"reached after {plan.warmup_steps:,} steps of warm-up")
    for key in ("epochs", "steps"):
        add(key, _course(plan))


def _course(plan: Plan) -> str:
    """How long a run is, in every unit."""
    seconds = plan.choice.seconds.total
    return (
        f"{plan.num_steps:,} steps ({plan.num_packs / plan.data.num_packs:.2f} epochs), "
        f"{plan.tokens_per_step * plan.num_steps:,} tokens; {step_time(seconds)} a step, "
        f"{run_time(seconds * plan.num_steps)} in all"
    )


def _heading(found: Looked, plan: Plan, where_to: str) -> str:
    return (
        f"What tonnage init would do with {found.wanted.rows} and {found.wanted.model} "
        f"({plan.model.model_type}, {plan.model.num_parameters:,} parameters), planned for {where_to}: {plan.machine}. "
        "Keys that are not here have their defaults, and docs/config.md describes all."
    )
