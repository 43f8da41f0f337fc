"""Cards that the stand-in can pretend to be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """What a driver tells of a card."""

    name: str
    mib: int
    """Memory that a program may have."""
    capability: int
    """Times ten."""
    processors: int
    shared_kib: int
    """Shared memory that a block may ask for."""

    def settings(self) -> dict[str, str]:
        """As the stand-in reads them (``source/settings.c``)."""
        return {
            "STAND_IN_NAME": self.name,
            "STAND_IN_MIB": str(self.mib),
            "STAND_IN_CAPABILITY": str(self.capability),
            "STAND_IN_PROCESSORS": str(self.processors),
            "STAND_IN_SHARED_KIB": str(self.shared_kib),
        }


CARDS = {
    "T4": Card("Tesla T4", 14913, 75, 40, 64),
    "V100": Card("Tesla V100-SXM2-32GB", 32494, 70, 80, 96),
    "A100": Card("NVIDIA A100-SXM4-80GB", 81153, 80, 108, 163),
    "H100": Card("NVIDIA H100 80GB HBM3", 81079, 90, 132, 227),
    "H200": Card("NVIDIA H200", 143156, 90, 132, 227),
    "RTX4090": Card("NVIDIA GeForce RTX 4090", 24080, 89, 128, 99),
    "RTX5090": Card("NVIDIA GeForce RTX 5090", 32120, 120, 170, 99),
}
"""Shared memory by the generation's programming guide; the rest as drivers were seen to report it."""
