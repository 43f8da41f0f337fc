"""The scales: what a layout takes in bytes and seconds, from a model, its data and a machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property

from tonnage.planning.layout import Layout
from tonnage.planning.machine import Machine
from tonnage.planning.memory import CUBLAS_BYTES, LOADING, instants
from tonnage.planning.plan import Choice, DataProfile, Rows
from tonnage.planning.profile import ModelProfile
from tonnage.planning.seconds import Seconds, Work, step_seconds
from tonnage.planning.states import (
    fullest_states,
    host_bytes,
    is_packed,
    packed_on_disk,
    resting_on_disk,
    states,
)

RUNTIME_BYTES = {"cpu": 0.585e9, "cuda": 0.8e9}
"""Of one worker, whatever the model: interpreter and libraries (0.535 GB with a model that weighs nothing) and what the
heap keeps of small things, or a CUDA context. cuBLAS's memory is counted apart (``CUBLAS_BYTES``)."""
PROCESSOR_BYTES = 0.022e9
"""On a CPU, of a processor of images and the thread that it runs in, beside what it makes of them: 17 to 25 MB in ten
runs (``benchmarks/images_memory.py``)."""
COMMUNICATOR_BYTES = 0.5e9
"""On CUDA, of the first communicator; 0.5 to 1.6 GB were reported (NVIDIA/nccl issue 864)."""


@dataclass(frozen=True)
class Scales:
    """Weighs layouts of one model, on one kind of rows, for one machine."""

    model: ModelProfile
    data: DataProfile
    machine: Machine
    parts: Mapping[int, ModelProfile] = field(default_factory=dict)
    """What one rank has and computes of the model, by sizes of the tensor axis that it allows; 1 need not be among
    them."""
    rows: Rows | None = None
    """Tells how full rows will be; without it they are taken to be full."""
    tiled: Callable[[int, int], ModelProfile] | None = None
    """Weighs what a rank has, of a size of the tensor axis, with MLPs over rows in so many tiles."""
    looks_first: bool = False
    """Whether a step begins with forward passes of all its rows without a gradient."""

    @cached_property
    def models(self) -> dict[int, ModelProfile]:
        """What one rank has, by sizes of the tensor axis, the whole model first."""
        return {1: self.model} | dict(self.parts)

    def model_of(self, layout: Layout) -> ModelProfile:
        """What one rank has in a layout."""
        if layout.sequence_tiles == 1:
            return self.models[layout.tensor]
        return self._tiled(layout.tensor, layout.sequence_tiles)

    @cached_property
    def _tiled(self) -> Callable[[int, int], ModelProfile]:
        assert self.tiled is not None, "nobody weighs tiles of the sequence"
        return cache(self.tiled)

    @cached_property
    def sizes(self) -> Rows:
        """The sizes of rows, each asked for once."""
        return cache(self.rows or self.data.full_rows)

    def held(self, layout: Layout, seconds: Seconds) -> Choice:
        """What a layout holds whose steps take so long."""
        model, machine = self.model_of(layout), self.machine
        runtime = RUNTIME_BYTES[machine.kind]
        if machine.kind == "cpu" and model.tower is not None:
            runtime += PROCESSOR_BYTES
        if machine.kind == "cuda" and layout.workers > 1:
            runtime += COMMUNICATOR_BYTES
        evaluates = (self.data.validation_path or self.data.general_path) is not None
        moments = instants(layout, model, evaluates=evaluates)
        if machine.kind == "cuda":
            moments = [one if one.name == LOADING else one.with_workspace(CUBLAS_BYTES) for one in moments]
        divided = layout.tiers_on_disk and layout.tensor * layout.pipeline > 1
        fullest = fullest_states(layout, model) if divided else None
        on_disk = resting_on_disk(layout, model, fullest or states(layout, model), caches=True)
        return Choice(
            layout,
            tuple(moments),
            runtime,
            seconds,
            host_bytes(layout, model),
            host_bytes(layout, model, copies=False),
            machine.workers_on_node(layout.workers) * on_disk,
            packed_on_disk(model) if is_packed(layout, model) else 0.0,
            states=fullest,
        )

    def timed(self, layout: Layout) -> Seconds:
        """How long steps of a layout take, cut as it says."""
        seconds = step_seconds(layout, self.model_of(layout), work_of(layout, self.data), self.machine)
        if not self.looks_first:
            return seconds
        forward = seconds.compute / (3 + layout.recomputed_part)
        return replace(seconds, compute=seconds.compute + forward, total=seconds.total + forward)


def work_of(layout: Layout, data: DataProfile) -> Work:
    """What a worker's rows hold, on average."""
    tokens, supervised = (
        number / data.num_packs * layout.micro_batch for number in (data.num_tokens, data.supervised_tokens)
    )
    tokens, supervised = tokens / layout.context, supervised / layout.context
    return Work(layout.mean_row_tokens or tokens, supervised, data.document_tokens)
