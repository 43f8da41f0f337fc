"""What is here, and what is missing: told before anything heavy is imported."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tonnage.host.nodes import code_digest
from tonnage.host.processor import processor

NEEDED: Mapping[str, str] = {
    "torch": "2.11",
    "transformers": "5.17",
    "safetensors": "0.8",
    "numpy": "1",
    "xxhash": "3.5",
    "pydantic": "2.10",
    "pyyaml": "6.0.2",
    "jinja2": "3.1",
    "numba": "0.62",
    "rich": "14.0",
    "pyarrow": "15",
}
"""What the pieces import, and from which version on."""
USEFUL: Mapping[str, str] = {"datasets": "4.0", "typer": "0.20"}
"""What tonnage needs besides, and ``python -m tonnage.prove`` does not."""
PEERS = ("trl", "peft", "flash-attn", "flash-attn-3", "torchao", "liger-kernel")


def installed(name: str) -> str:
    """The version of a package; empty where it is not there."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def missing(needed: Mapping[str, str] = NEEDED) -> list[str]:
    """Packages that are not there or too old, each as pip is asked for it."""
    return [f"{name}>={least}" for name, least in needed.items() if _numbers(installed(name)) < _numbers(least)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", text.partition("+")[0])[:3])


def described() -> dict[str, Any]:
    """The machine and its versions, for the record, found by a process of its own: whoever asks a GPU for its name
    takes half a gigabyte of it for as long as he lives. Raises ``RuntimeError``."""
    command = [sys.executable, "-m", "tonnage.prove.machine"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the machine could not be described:\n{done.stderr[-3000:]}")
    machine: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return machine


def describe() -> dict[str, Any]:
    """What ``described`` tells, by this process."""
    import torch

    from tonnage import __version__
    from tonnage.doctor.hardware import devices_and_drivers

    description: dict[str, Any] = {
        "tonnage": __version__,
        "code": code_digest(),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": processor()[0],
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "packages": {name: there for name in (*NEEDED, *USEFUL, *PEERS, "triton") if (there := installed(name))},
        "gpus": [],
        "compiler": shutil.which("cc") or shutil.which("gcc") or "",
    }
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(number)
            capability = f"{card.major}.{card.minor}"
            description["gpus"].append({"name": card.name, "memory_bytes": card.total_memory, "capability": capability})
        driver = next((line.rpartition(", ")[2] for line in devices_and_drivers()), "")
        description |= {"driver": driver, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return description


def of_which(machine: Mapping[str, Any]) -> str:
    """What a result holds for: this code, these versions, this hardware."""
    keys = ("code", "python", "torch", "processor", "cpus", "packages", "gpus", "driver")
    return hashlib.blake2b(repr([machine.get(key) for key in keys]).encode(), digest_size=8).hexdigest()


def computes(device: Any) -> bool:
    import torch

    twos = torch.full((8, 8), 2.0, device=device)
    return float((twos @ twos).sum()) == 8 * 8 * 32.0


def free_bytes(device: Any) -> int:
    """Memory of the device, or of the machine, that nobody uses now."""
    import torch

    from tonnage.doctor.hardware import available_memory

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory() or int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


if __name__ == "__main__":
    print(json.dumps(describe()))
