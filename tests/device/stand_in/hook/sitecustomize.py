"""Loaded by every interpreter that runs under the stand-in.

tonnage sees the device file of a driver; with ``STAND_IN_HOST_GB`` it sees a host of so much memory, and disks with
room. The modules beside this one that ``STAND_IN_WATCHED_BY`` names are imported as soon as the training loop was.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.abc
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _devices(module: ModuleType) -> None:
    module.device_files = lambda *_: ["/dev/nvidiactl"]  # type: ignore[attr-defined]


def _memory(module: ModuleType) -> None:
    found = module.free_memory

    def free_memory(*given: Any) -> int | None:
        gigabytes = os.environ.get("STAND_IN_HOST_GB")
        return int(float(gigabytes) * 1e9) if gigabytes else found(*given)

    module.free_memory = free_memory  # type: ignore[attr-defined]


def _space(module: ModuleType) -> None:
    """Disks have room for whatever rests there, where a host's memory is made up as well."""
    check, free = module.check_space, module.free_for_states

    def check_space(*given: Any, **more: Any) -> None:
        if not os.environ.get("STAND_IN_HOST_GB"):
            check(*given, **more)

    def free_for_states(*given: Any) -> int:
        return 10**15 if os.environ.get("STAND_IN_HOST_GB") else int(free(*given))

    module.check_space = check_space  # type: ignore[attr-defined]
    module.free_for_states = free_for_states  # type: ignore[attr-defined]


def _isolation(module: ModuleType) -> None:
    found = module.isolation_of

    def isolation_of(config: Any, *, device: Any, **more: Any) -> Any:
        """Asked of the CPU, since the answer is in numbers, of which the stand-in has none."""
        answer = found(config, device=type(device)("cpu"), **more)
        return dataclasses.replace(answer, shares_prefixes=False, asked_on=device.type)

    module.isolation_of = isolation_of  # type: ignore[attr-defined]


def _answers(module: ModuleType) -> None:
    """An answer ends after a few tokens: that it is as long as it may be is found on the device, where nothing is."""
    goes_on = itertools.cycle([True] * 4 + [False])
    mixin: Any = importlib.import_module("transformers.generation.utils").GenerationMixin
    mixin._has_unfinished_sequences = lambda *_, **__: next(goes_on)


def _attention(_: ModuleType) -> None:
    """cuDNN, for which there is no stand-in, is not asked for attention: FlashAttention is."""
    importlib.import_module("torch").backends.cuda.enable_cudnn_sdp(False)


def _watch(module: ModuleType) -> None:
    for name in os.environ.get("STAND_IN_WATCHED_BY", "").split():
        importlib.import_module(name)


AFTER: dict[str, Callable[[ModuleType], None]] = {
    "tonnage.doctor.hardware": _devices,
    "tonnage.host.control_groups": _memory,
    "tonnage.inference.generate": _answers,
    "tonnage.planning.space": _space,
    "tonnage.training.isolation": _isolation,
    "tonnage.training.loop": _watch,
    "transformers.integrations.sdpa_attention": _attention,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Lets what is in ``AFTER`` be done to a module once it was imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in AFTER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        loader: Any = spec.loader
        execute = loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            AFTER[name](module)

        loader.exec_module = executed
        return spec


if "STAND_IN_DEVICES" in os.environ:
    sys.meta_path.insert(0, _Finder())
