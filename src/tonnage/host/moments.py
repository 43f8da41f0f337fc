"""How many bytes the state of an optimizer takes, and what an update holds meanwhile.

As ``host.quantized``: nothing here imports torch. ``planning`` counts with it, and ``kernels`` does what it says.
"""

from __future__ import annotations

BLOCK = 256
"""Numbers that share a scale in int8 moments."""
MOMENT_BYTES: dict[str, float] = {"fp32": 8.0, "bf16": 4.0, "int8": 2.0 + 8.0 / BLOCK}
"""Bytes of both moments of a parameter; int8 ones have two fp32 scales for every block."""
LOW_BYTES = {"bf16": 2, "fp16": 4, "fp32": 0}
"""Bytes of what is missing of a master beside a weight in its precision."""
UPDATE_ELEMENTS = 1 << 22
"""That are updated at a time where the loops of a CPU are not: so many that a device is busy longer than it takes to
ask, and no more."""
UPDATE_BYTES = 44
"""For each of them meanwhile."""
MUON_BYTES = 36
"""The same where momentum or a matrix of Muon's is updated."""
