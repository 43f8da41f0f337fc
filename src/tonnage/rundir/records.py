"""What workers and launchers leave in the files of a run, as far as anybody reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from tonnage.errors import Problem, UserError
from tonnage.files.reading import NotJson, parse_object


@dataclass(frozen=True)
class WorkerError:
    """Why a worker died, as it wrote it down itself."""

    rank: int
    exit_status: int
    kind: str
    message: str
    trace: str
    seconds: float
    """Wall-clock time of the failure (seconds since the epoch): the earliest is the cause."""
    problems: list[Problem] = field(default_factory=list)
    """What the user can mend, if that is what it died of."""


@dataclass(frozen=True)
class Waited:
    """What training waited for a disk whose traffic the system does not tell."""

    waited_seconds: float


@dataclass(frozen=True)
class Moved(Waited):
    """Besides, the bytes that were read and written in a step."""

    read_bytes: float
    written_bytes: float


@dataclass(frozen=True)
class Copied(Waited):
    """What training waited for the memory of its host, and the bytes that came and went."""

    copied_bytes: float


@dataclass(frozen=True)
class PhasePeak:
    """The most memory of every worker in a phase of the run, in bytes."""

    phase: str
    host: Annotated[list[int], MinLen(1)]
    device: Annotated[list[int], MinLen(1)]


@dataclass(frozen=True)
class MetricsRecord:
    """What a line of ``metrics.jsonl`` may say, as far as our own code reads it by name."""

    step: Annotated[int, Ge(0)]
    epoch: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    loss_scale: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None
    skipped: bool | None = None
    not_finite: str | None = None
    eval_loss: float | None = None
    evaluation: dict[str, Any] | None = None
    tokens: Annotated[int, Ge(0)] | None = None
    supervised_tokens: Annotated[int, Ge(0)] | None = None
    step_seconds: float | None = None
    tokens_per_second: float | None = None
    core_wait: float | None = None
    memory: dict[str, float] | None = None
    disk: Moved | Waited | None = None
    host: Copied | None = None
    memory_phases: list[PhasePeak] | None = None
    checkpoint_bytes: float | None = None
    blocked_seconds: float | None = None
    save_seconds: float | None = None


@dataclass(frozen=True)
class ResumeNote:
    """What ``resume.json`` says."""

    checkpoint: str


@dataclass(frozen=True)
class LossNote:
    """What ``loss.json`` says: the function that the run's loss is, where it is not cross-entropy."""

    module: str
    name: str
    """Within the module, dotted."""
    source: str
    """Hash of its source: BLAKE2b, 32 hexadecimal digits."""
    folder: str
    """Where the module is found."""


@dataclass(frozen=True)
class Outcome:
    """What ``outcome.json`` holds."""

    planned: dict[str, float]
    measured: dict[str, float]


def is_step(record: Mapping[str, Any]) -> bool:
    return "loss" in record and "eval_loss" not in record


def has_traffic(disk: Mapping[str, float]) -> bool:
    """Whether a record of the disk tells bytes."""
    return "read_bytes" in disk and "written_bytes" in disk


def peak_memory(record: Mapping[str, Any]) -> float | None:
    """Bytes of the fullest worker in a step, from its record: of its device, or of its host where it has none; None
    where that is not told."""
    memory = record.get("memory") or {}
    return memory.get("device_peak") or memory.get("host_peak")


def divide(content: bytes, kind: type[Any], step: int) -> tuple[list[bytes], list[bytes]]:
    """Lines that are whole records of a ``kind`` up to ``step``, and all others: later ones, those that a crash cut
    short, and those that no run wrote."""
    earlier: list[bytes] = []
    others: list[bytes] = []
    for line in content.splitlines(keepends=True):
        try:
            is_earlier = line.endswith(b"\n") and parse_object(line, kind, "")["step"] <= step
        except UserError:
            is_earlier = False
        (earlier if is_earlier else others).append(line)
    return earlier, others


def metrics_record(line: bytes | str, where: str) -> dict[str, Any] | None:
    """A line of ``metrics.jsonl``; None for one that a crash cut short, and a later run wrote on.

    Raises:
        UserError: it is whole and says what no run writes; names ``where`` and the key.
    """
    try:
        return parse_object(line, MetricsRecord, where)
    except NotJson:
        return None
