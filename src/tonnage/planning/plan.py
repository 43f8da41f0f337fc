"""The Plan: the frozen decision that workers carry out, stored in the run directory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tonnage.errors import user_error
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.planning.layout import Layout
from tonnage.planning.memory import LOADING, Instant
from tonnage.planning.profile import ModelProfile
from tonnage.planning.saving import Saving, in_words
from tonnage.planning.seconds import Seconds
from tonnage.planning.states import States, states
from tonnage.planning.words import size, too_much
from tonnage.rundir.weights import WeightFacts


@dataclass(frozen=True)
class DataProfile:
    """The prepared data in numbers, and where it lies."""

    train_path: str
    validation_path: str | None
    num_packs: int
    num_tokens: int
    supervised_tokens: int
    max_length: int
    document_tokens: float
    """Length of the document that a token is in, averaged over tokens."""
    general_path: str | None = None
    """Rows that are evaluated besides, and not trained on."""
    pairs: bool = False
    """Whether each document is a pair of answers to one prompt."""
    reference_path: str | None = None
    """Where the cache has, or will have, log-probabilities of the answers under the reference, if there is one."""
    teacher_path: str | None = None
    """Where the cache has, or will have, what a teacher expects of the supervised tokens, if there is one."""
    features_path: str | None = None
    """Where the cache has, or will have, what the tower makes of the images of rows, if that is computed beforehand."""
    image_tokens: int = 0
    """Of ``num_tokens``, those that stand for images."""
    sees: bool = False
    """Whether the tower looks at images in every micro-batch."""
    look_ahead: str = ""
    """In which layers the tokens of an image see those after them in it: ``all``, those with ``windows``, or none."""

    def full_rows(self, steps: Steps, workers: int, micro_batch: int) -> RowSizes:
        """Sizes of rows where nobody looked at the data: as if packs were full, and all alike."""
        supervised = micro_batch * self.max_length * self.supervised_tokens / self.num_tokens
        # Of pairs that do not share their prompts, these are there twice.
        times = 2 - self.supervised_tokens / self.num_tokens if self.pairs and not steps.share_prefixes else 1
        if steps.padded:  # as if each pack were a document
            forwards = math.ceil(math.ceil(steps.packs / workers) / micro_batch)
            most = micro_batch * math.ceil((2 if self.pairs else 1) * self.max_length / steps.chunk) * steps.chunk
            real = micro_batch * self.num_tokens / self.num_packs
            images = self.image_tokens / self.num_tokens * most
            return RowSizes(most, math.ceil(supervised), most, real, forwards, math.ceil(images), images)
        mean = micro_batch * self.num_tokens / self.num_packs
        most = math.ceil(times * micro_batch * self.max_length)
        images = self.image_tokens / self.num_tokens * micro_batch * self.max_length
        return RowSizes(most, math.ceil(supervised), times * mean, mean, 0.0, math.ceil(images), images)

    @property
    def key(self) -> str:
        """Content address of the prepared data: the same rows, prepared in the same way, have the same one."""
        return Path(self.train_path).parent.name


@dataclass(frozen=True)
class Steps:
    """The steps of a run, however they are cut up."""

    num_packs: int
    """In all of them."""
    packs: int
    """In each."""
    share_prefixes: bool
    """Whether what documents of a row begin with alike is computed once."""
    padded: bool = False
    """Whether every document has a row of its own."""
    chunk: int = 1
    """Of how many tokens each row then counts as a multiple, in ``RowSizes`` too."""
    costs: tuple[float, float] = (0.0, 0.0)
    """By which the packs of a step are divided among workers (``seconds.pack_costs``)."""


@dataclass(frozen=True)
class RowSizes:
    """Of the forwards of a run: in the fullest, and on average."""

    most_tokens: int
    most_supervised: int
    mean_tokens: float
    mean_document_tokens: float
    """Of the documents in a forward: more, where these share what they begin with; less, where rows are padded."""
    forwards: float = 0.0
    """Of a worker in a step, where that does not follow from the number of packs."""
    most_image_tokens: int = 0
    mean_image_tokens: float = 0.0
    """Tokens that stand for images."""


Rows = Callable[[Steps, int, int], RowSizes]
"""Tells the sizes of rows from the steps, the number of workers that deal them out, and the packs in a row."""

MOST_WORKERS, MOST_COUNTED = 1 << 20, 1 << 60
"""Larger numbers are in no plan that anybody made."""
STAYS = ("weights", "optimizer", "save", "in flight")
"""What is there at every instant."""
CATEGORIES = (
    "weights",
    "gathered",
    "optimizer",
    "gradients",
    "activations",
    "in flight",
    "images",
    "workspace",
    "loss",
    "save",
    "host",
    "heap",
    "runtime",
)
"""What there is at an instant, in the order in which it is drawn."""
SAFETY = 0.92
"""Part of a budget that a plan may take: plans of a few steps were up to 3% too low (``benchmarks/plan_truth.py``), and
a worker grows in its first hundred steps (``docs/planning.md``)."""


@dataclass(frozen=True)
class DiskLimit:
    """Bytes of a machine's disks that its workers take, and that they may."""

    needed: float
    most: float
    what: str
    """Where ``most`` comes from, in words."""


ASSUMED = "assumed of such a machine"
"""Where a limit comes from that nobody has looked for."""


@dataclass(frozen=True)
class Budget:
    """Bytes that may be used."""

    memory: float
    """Of one worker, on its device; on a CPU its share of the machine's."""
    what: str
    """Where the number comes from, in words."""
    host: float | None = None
    """Of one worker in the memory of its host, where that is not its device's."""
    host_what: str = ""
    """Where that number comes from, in words; empty where it is that of the machine."""
    locked: float | None = None
    """Of that, what the system lets one process lock, where its devices' driver keeps to that."""
    disk: float | None = None
    """Of all workers of a machine on its disks, where ``memory.budget.disk`` says so."""
    disk_free: float | None = None
    """Of these, what is free where states rest; None where nobody knows."""
    disks_are_assumed: bool = False
    """Whether nobody has looked at those disks, and machines of that kind are taken to have so much."""

    @property
    def usable(self) -> float:
        """What a plan may take."""
        return SAFETY * self.memory

    def holds(self, choice: Choice) -> bool:
        """Whether there is room for a way to run the step."""
        return choice.peak_bytes <= self.usable and self.host_holds(choice) and self.disk_holds(choice)

    def host_holds(self, choice: Choice) -> bool:
        """Whether there is room for what it keeps in the memory of the host."""
        if self.locked is not None and choice.locked_bytes > self.locked:
            return False
        return self.host is None or choice.host_bytes <= SAFETY * self.host

    def disk_holds(self, choice: Choice) -> bool:
        """Whether there is room for what its workers keep on the disks of a machine; it is reserved to the byte."""
        limit = self.disk_limit(choice)
        return limit is None or limit.needed <= limit.most

    def disk_limit(self, choice: Choice) -> DiskLimit | None:
        """Of the limits to what it keeps on disk, the one that is nearest; None where there is none. What is free
        bounds what is written for the run: a packed base is in the cache, maybe on another disk."""
        limits = []
        if self.disk is not None:
            limits.append(DiskLimit(choice.disk_bytes + choice.packed_bytes, self.disk, "memory.budget.disk"))
        if self.disk_free is not None:
            limits.append(DiskLimit(choice.disk_bytes, self.disk_free, ASSUMED if self.disks_are_assumed else "free"))
        return min(limits, key=lambda limit: limit.most - limit.needed, default=None)


@dataclass(frozen=True)
class Choice:
    """A way to run the step, and what it takes."""

    layout: Layout
    instants: tuple[Instant, ...]
    runtime_bytes: float
    """Of one worker, whatever the model: the interpreter and its libraries, or the device's context."""
    seconds: Seconds
    host_bytes: float = 0.0
    """Of one worker in the memory of its host, where that is not its device's: states, and copies of them."""
    locked_bytes: float = 0.0
    """Of these, what a device needs locked: all but copies for saves, which are slower where they cannot be."""
    disk_bytes: float = 0.0
    """Of all workers of a machine on its disks: states, and copies of them."""
    packed_bytes: float = 0.0
    """Of a packed base in the cache on disk, which all workers of a machine read."""
    saving: Saving = field(default_factory=Saving)
    """How the run is saved before its end."""
    states: States | None = None
    """Of the worker that has most of them, where workers divide the model and some rest on disk; else ``Plan.states``
    follows from the model."""

    @property
    def peak(self) -> Instant:
        """The moment at which most is held."""
        return max(self.instants, key=lambda instant: instant.total)

    @property
    def seconds_with_saves(self) -> float:
        """Of a step, and its part of the time in which training stands still for saves."""
        return self.seconds.total + self.saving.stop_seconds / max(1, self.saving.every)

    @property
    def heap_bytes(self) -> float:
        """What the heap keeps for tensors that are freed, beside those that are there: as much again as what comes and
        goes, where it may. Of eight models it was 0.4 to 0.9 of that, once 1.06; of three whose blocks are recomputed
        in padded rows, which differ in size, 0.9 to 1.5."""
        if self.layout.returns_memory or self.layout.device != "cpu":
            return 0.0
        mixed = self.layout.arrangement == "padded" and self.layout.recompute == "full"
        again = 1.5 if mixed else 1.0  # gradients are as large in every micro-batch
        goes = (
            sum(size * (1.0 if name == "gradients" else again) for name, size in one.bytes.items() if name not in STAYS)
            for one in self.instants
        )
        return max(goes)

    @property
    def kept_bytes(self) -> float:
        """Of one worker between its micro-batches, beside what is there before the first: what a step has from its
        first to its last, and what the heap keeps."""
        comes = sum(max(one.bytes.get(part, 0.0) for one in self.instants) for part in ("save", "in flight"))
        update = next(one for one in self.instants if one.name == "update")
        return self.heap_bytes + comes + update.bytes.get("gradients", 0.0)

    @property
    def peak_bytes(self) -> float:
        """Most bytes of one worker on its device."""
        return self.peak.total + self.heap_bytes + self.runtime_bytes

    @property
    def allocated_bytes(self) -> float:
        """Of these, what is seen when a run is measured: on a GPU its allocator's, and not the context beside it."""
        return self.peak_bytes - (self.runtime_bytes if self.layout.device != "cpu" else 0.0)

    def parts(self, instant: Instant) -> dict[str, float]:
        """Bytes of one worker at an instant, by category, in the order in which they are drawn; those that are 0 left
        out."""
        besides = {"heap": self.heap_bytes * (instant.name != LOADING), "runtime": self.runtime_bytes}
        return {name: held for name in CATEGORIES if (held := instant.bytes.get(name, besides.get(name, 0.0)))}


@dataclass(frozen=True)
class Plan:
    """What will be done. Bytes and tokens are for one worker where the name says so, else for the whole run.

    Example:
        >>> plan = tonnage.open_run("runs/first").plan
        >>> plan.layout.precision, plan.num_steps, plan.choice.peak.name in {one.name for one in plan.choice.instants}
        ('bf16', 4, True)
    """

    choice: Choice
    threads_per_worker: int
    packs_per_step: int
    num_packs: int
    """Packs trained in the whole run."""
    num_steps: int
    warmup_steps: int
    tokens_per_step: int
    """Average over the run."""
    flops_per_step: float
    """Of the products of all workers, forward and backward without recompute, attention left out."""
    machine: str
    """What the plan was made for, in words."""
    budget: Budget
    frontier: tuple[Choice, ...]
    """Other ways: what would be faster and does not fit, and what would need less."""
    model: ModelProfile
    data: DataProfile
    weights: WeightFacts = field(default_factory=WeightFacts)
    reasons: dict[str, str] = field(default_factory=dict)
    """Why what the config leaves open is as it is, by key: ``batch``, ``checkpoint.every``."""
    warnings: tuple[str, ...] = ()
    """What the run will do that nobody wants, and what to set instead."""

    @property
    def layout(self) -> Layout:
        """How a step is cut up."""
        return self.choice.layout

    @property
    def states(self) -> States:
        """Bytes of states of the worker that has most of them."""
        return self.choice.states or states(self.layout, self.model)

    @property
    def workers(self) -> int:
        return self.layout.workers

    @property
    def fits(self) -> bool:
        """Whether the budget has room for it."""
        return self.budget.holds(self.choice)

    @property
    def kept_bytes(self) -> float:
        """Of one worker on a CPU: what may have come to stay between its micro-batches before its heap is trimmed.

        That is ``Choice.kept_bytes``. Where the budget has room, the heap may keep half as much again: its next
        micro-batch uses most of it. A heap that needed 1.17 times what was planned was trimmed twice a step, which took
        a sixth longer.
        """
        room = max(0.0, self.budget.usable - self.choice.peak_bytes)
        return self.choice.kept_bytes + min(0.5 * self.choice.heap_bytes, room)

    @property
    def shortfall(self) -> str:
        """Of a plan that does not fit: what it takes, and what it may, in words."""
        if self.choice.peak_bytes > self.budget.usable:
            return too_much(self.choice.peak_bytes, self.budget.usable)
        if self.budget.locked is not None and self.choice.locked_bytes > self.budget.locked:
            return f"{too_much(self.choice.locked_bytes, self.budget.locked)} of locked memory"
        if self.budget.host is not None and not self.budget.host_holds(self.choice):
            return f"{too_much(self.choice.host_bytes, SAFETY * self.budget.host)} in the host's memory"
        limit = self.budget.disk_limit(self.choice)
        assert limit is not None
        return f"{too_much(limit.needed, limit.most)} on the disks"

    @property
    def memory_in_words(self) -> str:
        """The most that a worker holds, when that is, and what there is."""
        each = "a worker" if self.workers > 1 else "at most"
        held, budget = f"{size(self.choice.peak_bytes)} {each}, at the {self.choice.peak.name}", self.budget
        return f"{held}, of {size(budget.memory)} ({budget.what})"

    @property
    def saves(self) -> str:
        """When the run is saved, in words, and what that costs it."""
        seconds, beside = self.choice.seconds.total, self.layout.saves_beside
        return in_words(self.choice.saving, beside=beside, step_seconds=seconds, num_steps=self.num_steps)

    def facts(self) -> dict[str, object]:
        """What a checkpoint says of the run that wrote it: its data, which must be the same later, and its layout."""
        data = {name: getattr(self.data, name) for name in ("key", "num_packs", "num_tokens", "supervised_tokens")}
        axes = ("workers", "replicate", "tensor", "context", "pipeline", "schedule", "stages")
        layout = {name: getattr(self.layout, name) for name in (*axes, "zero", "micro_batch", "precision")}
        base = {"base": self.weights.base_digest} if self.weights.base_digest else {}
        steps = {"packs_per_step": self.packs_per_step, "num_steps": self.num_steps}
        return {"data": data, "layout": layout, **steps, **base}

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @staticmethod
    def read(path: Path) -> Plan:
        """A stored plan.

        Raises:
            UserError: it is no plan; names the key.
        """
        plan = read_record(path, Plan)
        counts = {
            "choice.layout.workers": plan.workers,
            "packs_per_step": plan.packs_per_step,
            "num_packs": plan.num_packs,
            "data.num_packs": plan.data.num_packs,
            "threads_per_worker": plan.threads_per_worker,
            "choice.instants": len(plan.choice.instants),
        }
        for key, count in counts.items():
            if not 0 < count <= MOST_COUNTED or (key.endswith("workers") and count > MOST_WORKERS):
                raise user_error(f"{key} is {count:,}", "a plan as it was written", where=str(path))
        return plan

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def _repr_html_(self) -> str:
        """For notebooks: what will be done, bytes by category and instant, and what else could be done."""
        from tonnage.planning.drawn import plan_as_html

        return plan_as_html(self)
