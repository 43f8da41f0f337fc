"""What a machine really reaches when it trains, learnt from steps that were timed on it.

A plan counts products and bytes (``planning.seconds``) and divides them by a machine's rates, which are those of large
products and of plain copies. Which part of these training reaches depends on the processor, its caches and the
libraries: it is fitted to samples, steps of known work and time, that ``tonnage doctor`` takes and that every run
leaves behind. Without any the parts are what was measured of single operations, or assumed (``PRODUCTS``, ``TRAFFIC``).

    calibration/FINGERPRINT.json      in the user's cache directory: a list of samples, the newest last
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tonnage.errors import UserError
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.host.cachedir import kept, room_for
from tonnage.planning.machine import Machine

PRODUCTS = {"cpu": 0.83, "cuda": 1.0}
"""Part of the rate of large products that a model's own reach, where nothing is known. Fitted to six runs on one
processor."""
TRAFFIC = {"cpu": 0.15, "cuda": 0.8}
"""Part of the rate of copies at which everything else reads and writes: on a CPU most of it computes more than it
moves (another processor reached 0.19 in bf16); on CUDA, whose kernels stream, an assumption."""
TRUST = 0.05
"""How much the assumed parts weigh beside samples: as much as one that is off by their relative error times this."""
WITHIN = 8.0
"""No part is taken to be further from the assumed one than by this factor."""
FORMAT = 4
"""Of a file: where what a sample counts is counted in another way, this is another number."""
KEPT = 40
"""Samples of each origin."""

Origin = Literal["doctor", "run"]


@dataclass(frozen=True)
class TimedStep:
    """A step, or a forward and backward pass, that was timed."""

    origin: Origin
    precision: str
    flops: float
    """Products of linear layers, of all workers of a node."""
    attention: float
    """Those of attention, which has a rate of its own (``Machine.attention_flops``)."""
    traffic: float
    """Bytes that all else reads and writes, of all workers of a node."""
    besides: float
    """Seconds planned for what is neither: dispatch, fresh pages, updates."""
    seconds: float
    """Measured."""


@dataclass(frozen=True)
class Samples:
    """What a file holds."""

    format: int
    samples: list[TimedStep]


def read(path: Path) -> list[TimedStep]:
    """The samples of a file; none if there is no such file, or it does not read as it should."""
    with suppress(UserError):
        found = read_record(path, Samples)
        if found.format == FORMAT:
            return found.samples
    return []


def add(path: Path, samples: Iterable[TimedStep], origin: Origin) -> None:
    """Put samples of one origin beside those of a file: the doctor's replace older ones of his, those of runs add up.

    A file that cannot be written costs nothing but exactness.
    """
    before = read(path)
    others = [sample for sample in before if sample.origin != origin]
    own = [*(sample for sample in before if sample.origin == origin == "run"), *samples]
    with kept(path, "plans here do not learn from runs"):
        room_for(path)
        write_json(path, {"format": FORMAT, "samples": [asdict(sample) for sample in (*others, *own[-KEPT:])]})


def calibrated(machine: Machine, samples: Sequence[TimedStep]) -> Machine:
    """The machine with the parts of its rates that fit the samples, for every precision that has some."""
    precisions = dict.fromkeys(sample.precision for sample in samples)
    fitted = {
        precision: fit(machine, [sample for sample in samples if sample.precision == precision])
        for precision in precisions
    }
    return replace(machine, reached={**machine.reached, **fitted})


def parts_of(machine: Machine, precision: str) -> tuple[float, float]:
    """Which parts of its rates of products and of copies a machine reaches when it trains."""
    reached: Mapping[str, Sequence[float]] = machine.reached
    products, traffic = reached.get(precision, (PRODUCTS[machine.kind], TRAFFIC[machine.kind]))
    return products, traffic


def fit(machine: Machine, samples: Sequence[TimedStep]) -> tuple[float, float]:
    """The parts with which the relative errors of the planned seconds are least, as squares.

    With u and v the inverse parts, a sample takes u * (flops / rate + attention / rate) + v * traffic / rate + besides:
    linear in both. The parts without samples are two more rows of the system.
    """
    rate, copies = machine.flops[samples[0].precision], machine.memory_bytes_per_second
    assumed = 1 / np.array(parts_of(machine, samples[0].precision))
    attending = machine.attention_flops(samples[0].precision)
    multiplying = [sample.flops / rate + sample.attention / attending for sample in samples]
    rows = [
        [products / sample.seconds, sample.traffic / copies / sample.seconds]
        for products, sample in zip(multiplying, samples, strict=True)
    ]
    rest = [max(sample.seconds - sample.besides, 0.0) / sample.seconds for sample in samples]
    system = np.vstack([np.diag(TRUST / assumed), rows])
    targets = np.array([TRUST, TRUST, *rest])
    solution, *_ = np.linalg.lstsq(system, targets, rcond=None)
    least, most = assumed / WITHIN, assumed * WITHIN
    parts = solution.clip(least, most)
    for held in np.flatnonzero(parts != solution):  # the other one fits the samples anew, beside the one at its bound
        other = 1 - held
        column, left = system[:, other], targets - system[:, held] * parts[held]
        parts[other] = (column @ left / (column @ column)).clip(least[other], most[other])
    products, traffic = 1 / parts
    return float(products), float(traffic)
