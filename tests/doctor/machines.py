"""Hardware and measurements made up for tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tonnage.doctor.cache import Compute, Storage
from tonnage.doctor.hardware import Disk, Hardware

GIB = 2**30


def hardware(**changes: Any) -> Hardware:
    """Eight cores and 64 GiB, without accelerators."""
    fields: dict[str, Any] = {
        "processor": "A Processor",
        "features": ("avx2", "avx512f"),
        "cores": 8,
        "machine_cores": 8,
        "memory_bytes": 64 * GIB,
        "machine_memory_bytes": 64 * GIB,
        "devices": (),
        "device_bytes": 0,
        "torch": "2.13.0",
    }
    return Hardware(**(fields | changes))


def disk(**changes: Any) -> Disk:
    """A disk with a terabyte free."""
    fields: dict[str, Any] = {"directory": "/data", "key": "ext4:/dev/sda", "free_bytes": 10**12}
    return Disk(**(fields | changes))


def compute(**changes: Any) -> Compute:
    """Rates that leave nothing to complain of."""
    fields: dict[str, Any] = {
        "flops": {"fp32": 1e12, "bf16": 2e12, "fp16": 2e12},
        "memory_bytes_per_second": 80e9,
        "host_device_bytes_per_second": 0.0,
        "optimizer_parameters_per_second": {"fp32": 3e9, "bf16": 3.5e9, "int8": 4e9},
        "link_bytes_per_second": 2e9,
        "link_failure": "",
        "busy": 0.01,
        "fresh_bytes_per_second": 12e9,
        "quick": False,
        "date": "2026-01-01",
    }
    return Compute(**(fields | changes))


def storage(**changes: Any) -> Storage:
    """A good disk."""
    fields: dict[str, Any] = {"read": 3e9, "write": 2e9, "mixed": 2.5e9, "direct": True, "quick": False, "date": "x"}
    return Storage(**(fields | changes))


def install_smi(directory: Path, free_mib: dict[str, int]) -> None:
    """Put an ``nvidia-smi`` there that knows these devices and answers the one question that it is asked."""
    tool = directory / "nvidia-smi"
    directory.mkdir(exist_ok=True)
    tool.write_text(f"""#!{sys.executable} -IS
import sys
free, words = {free_mib!r}, sys.argv[1:]
assert words[:2] == ["--query-gpu=memory.free", "--format=csv,noheader,nounits"], words
chosen = words[3].split(",") if words[2:3] == ["--id"] else free
if not set(chosen) <= set(free):
    print("No devices were found")
    sys.exit(6)
print(*(free[one] for one in chosen), sep="\\n")
""")
    tool.chmod(0o755)
