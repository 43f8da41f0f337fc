"""What a model is asked while it is trained (``prompts.json``), and what it answered (``samples.jsonl``)."""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.files.reading import NotJson, parse_record
from tonnage.files.writing import write_whole
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import divide


@dataclass(frozen=True)
class Prompt:
    text: str
    """As it is rendered."""
    ids: list[int]
    """Its tokens."""
    room: int
    """For the answer, in tokens."""
    expected: str | None = None
    """The answer that its row has."""
    document: int | None = None
    """Of validation rows, where images are among its tokens: those of this document."""


@dataclass(frozen=True)
class Prompts:
    """What ``prompts.json`` holds."""

    stop_tokens: list[int]
    """Any of which ends an answer."""
    prompts: list[Prompt]


@dataclass(frozen=True)
class Sample:
    step: int
    """After which it was given; 0 is before the first."""
    number: int
    """Of the prompt, from 1."""
    prompt: str
    answer: str
    expected: str | None = None
    """The answer that the row has, if it has one."""


def read_samples(run: RunDirectory) -> list[Sample]:
    """All answers of a run, in their order; a line that a crash cut short is passed over.

    Raises:
        UserError: a line says what no run writes; names it and the key.
    """
    samples = []
    lines = run.samples.read_bytes().split(b"\n") if run.samples.is_file() else []
    for number, line in enumerate(lines, start=1):
        try:
            samples.append(parse_record(line, Sample, f"{run.samples}:{number}"))
        except NotJson:
            continue
    return samples


def rewind_samples(run: RunDirectory, step: int) -> None:
    """Cut the answers after ``step``, so that a run that goes on from there writes them once."""
    if run.samples.is_file():
        earlier, _ = divide(run.samples.read_bytes(), Sample, step)
        write_whole(run.samples, b"".join(earlier))
