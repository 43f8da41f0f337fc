"""What is new in the files of a run since somebody looked: numbers by step, and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge

from tonnage.errors import UserError
from tonnage.files.reading import parse_record, read_record
from tonnage.files.writing import write_json
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import metrics_record
from tonnage.rundir.samples import Sample

TOGETHER_BYTES = 1 << 16
"""Read of a file at once: what is sent together, some two hundred steps."""


@dataclass(frozen=True)
class News:
    """What is known of a step: numbers, or answers."""

    step: int
    values: Mapping[str, float] = field(default_factory=dict)
    """By name; what a record of ``metrics.jsonl`` has inside of an object is ``memory/host_peak``."""
    samples: tuple[Sample, ...] = ()


@dataclass(frozen=True)
class Note:
    """What ``trackers/NAME.json`` says."""

    id: str | None = None
    """Of the tracker's own run, once it has begun."""
    metrics: Annotated[int, Ge(0)] = 0
    """Bytes of ``metrics.jsonl`` that were sent."""
    samples: Annotated[int, Ge(0)] = 0
    """Bytes of ``samples.jsonl`` that were sent."""

    @classmethod
    def of(cls, run: RunDirectory, name: str) -> Note:
        """The note of a tracker, empty where there is none. Raises ``UserError`` for one that is none."""
        path = run.tracker_note(name)
        return read_record(path, cls) if path.exists() else cls()

    def write(self, run: RunDirectory, name: str) -> None:
        write_json(run.tracker_note(name), asdict(self))

    def within(self, run: RunDirectory) -> Note:
        """The same places in files that may have been cut since, at the beginning of a line.

        A run that goes on from a checkpoint cuts what was recorded later. A record that a line before the cut has moved
        may be sent twice.
        """
        return replace(
            self, metrics=_line_begin(run.metrics, self.metrics), samples=_line_begin(run.samples, self.samples)
        )

    def unsent(self, run: RunDirectory, *, samples: bool) -> int:
        """How many lines have not been sent."""
        files = [(run.metrics, self.metrics), *([(run.samples, self.samples)] if samples else [])]
        return sum(_lines_after(path, place) for path, place in files)


def new_numbers(run: RunDirectory, place: int) -> tuple[list[News], int]:
    """Records of ``metrics.jsonl`` from byte ``place`` on, not too many at once, and the place after them."""
    lines, after = _new_lines(run.metrics, place)
    records = (metrics_record(line, str(run.metrics)) for line in lines)
    news = [News(record["step"], dict(_numbers(record))) for record in records if record is not None]
    return [one for one in news if one.values], after


def new_answers(run: RunDirectory, place: int) -> tuple[list[News], int]:
    """Lines of ``samples.jsonl`` from byte ``place`` on by step, not too many at once, and the place after them."""
    lines, after = _new_lines(run.samples, place)
    samples = []
    for line in lines:
        try:
            samples.append(parse_record(line, Sample, str(run.samples)))
        except UserError:  # cut short by a crash
            continue
    return [News(step, samples=tuple(some)) for step, some in groupby(samples, lambda sample: sample.step)], after


def _numbers(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in record.items():
        if name == "evaluation":  # intervals, and figures by source: those of all rows are beside it
            continue
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and prefix + name != "step":
            yield prefix + name, float(value)


def _new_lines(path: Path, place: int) -> tuple[list[bytes], int]:
    """Whole lines from ``place`` on; one at least, if there is one, however long it is."""
    if not path.is_file():
        return [], place
    with path.open("rb") as file:
        file.seek(place)
        block = file.read(TOGETHER_BYTES)
        if b"\n" not in block:
            block += file.readline()
    block = block[: block.rfind(b"\n") + 1]
    return block.splitlines(), place + len(block)


def _line_begin(path: Path, place: int) -> int:
    """The beginning of the line in which ``place`` lies, or the end of a file that is shorter."""
    if not path.is_file():
        return 0
    size = path.stat().st_size
    if place >= size:
        return size
    with path.open("rb") as file:
        return file.read(place).rfind(b"\n") + 1


def _lines_after(path: Path, place: int) -> int:
    if not path.is_file():
        return 0
    with path.open("rb") as file:
        file.seek(place)
        return sum(1 for _ in file)
