"""The table of the ZeRO paper: bytes of model states on each of N devices, by stage, as it counts them, and ours.

Rajbhandari et al. 2020, table 1: 16-bit parameters and gradients and K = 12 bytes of optimizer state a parameter (fp32
master and two moments); stage 1 divides the optimizer state by N, stage 2 the gradients as well, stage 3 everything.
Ours keep an fp32 master that is gathered in 16 bits, and reduce gradients in fp32 (``planning.memory``).
"""

from __future__ import annotations

from dataclasses import dataclass

from tonnage.errors import user_error

OPTIMIZER_BYTES = 12
DEVICES = (1, 4, 16, 64, 256, 1024)
STAGES = (0, 1, 2, 3)


def classic_bytes(parameters: float, devices: int, stage: int) -> float:
    """Bytes of model states on each device, as the paper counts them."""
    weights = 2 * parameters / (devices if stage == 3 else 1)
    gradients = 2 * parameters / (devices if stage >= 2 else 1)
    return weights + gradients + OPTIMIZER_BYTES * parameters / (devices if stage >= 1 else 1)


def our_bytes(parameters: float, devices: int, stage: int) -> float:
    """Bytes of model states on each device, as tonnage holds them in bf16 with fp32 moments, one micro-batch a step.

    One device has bf16 weights, the low halves of their masters, bf16 gradients and moments. Several have the fp32
    master, fp32 gradients and moments by ``devices`` from stage 1 on, and below stage 3 the gathered bf16 weights.
    """
    if devices == 1:
        return (2 + 2 + 2 + 8) * parameters
    part = parameters if stage == 0 else parameters / devices
    return (4 + 4 + 8) * part + (2 * parameters if stage < 3 else 0)


@dataclass(frozen=True)
class Row:
    """One number of devices."""

    devices: int
    classic: tuple[float, ...]
    """By stage."""
    ours: tuple[float, ...]


def table(parameters: float) -> list[Row]:
    """Bytes on each device for 1 to 1024 devices."""
    return [
        Row(
            devices,
            tuple(classic_bytes(parameters, devices, stage) for stage in STAGES),
            tuple(our_bytes(parameters, devices, stage) for stage in STAGES),
        )
        for devices in DEVICES
    ]


def parse_parameters(text: str) -> float:
    """A number of parameters: ``7.5B``, ``350M``, ``1T``.

    Raises:
        UserError: it is none.
    """
    units = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
    number, unit = text.strip().upper()[:-1], text.strip().upper()[-1:]
    try:
        parameters = float(number) * units[unit]
    except (ValueError, KeyError):
        parameters = 0.0
    if not 0 < parameters < float("inf"):
        raise user_error(f"{text!r} parameters", "a number and a unit, as 7.5B, 350M or 1T", where="--zero-table")
    return parameters
