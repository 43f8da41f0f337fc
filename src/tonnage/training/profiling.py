"""Where the time of a step goes: real steps of a run under ``torch.profiler``, summed up by cause.

``python -m tonnage.training.profiling RUN STEPS`` is what a worker of ``tonnage profile`` executes. It assembles the
job that the run directory describes and lets the loop itself take a few steps: one that compiles and touches memory
for the first time, ``STEPS`` that are only timed, and as many that are recorded. What was recorded gives the shares;
the steps that were only timed give the seconds, since recording slows down what is small.

Every operation is counted once, for itself and not for what it calls, and belongs to the first cause that knows it or
something around it (``cause_of``). On CUDA the time counts that an operation's kernels take on the device.

Every worker of a run does this, so a run whose workers divide matrices or stages is profiled as it is: each says what
it computed and how long it waited for the others (``cli.profile`` puts them together).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.profiler_util import FunctionEvent

from tonnage.config import read_config
from tonnage.files.writing import write_json
from tonnage.host.allocators import choose_allocators
from tonnage.kernels.products import linear
from tonnage.kernels.widening import processor_is_slow
from tonnage.parallel.world import World, join_world
from tonnage.planning.layout import Layout
from tonnage.planning.plan import Plan
from tonnage.planning.profile import ModelProfile
from tonnage.planning.seconds import Work, forward_backward_flops
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.positions import PositionFile
from tonnage.training.assemble import assemble
from tonnage.training.job import Job
from tonnage.training.loop import BetweenSteps, train
from tonnage.training.memory import Peak, Phases
from tonnage.training.metrics import Recorder
from tonnage.training.setting import WorkerSetting

CAUSES = (
    "matrix products",
    "attention",
    "head and loss",
    "norms, sums and copies",
    "clip and update",
    "communication",
    "waiting for other stages",
    "waiting for the disk",
    "between operations",
)
"""``between operations`` is Python, autograd's engine and, on CUDA, a device without work. ``communication`` includes
the wait for others that come later to a sum."""
PRODUCTS, ATTENTION, HEAD, ELEMENTWISE, UPDATE, COMMUNICATION, STAGES, WAITING, BETWEEN = CAUSES

_RANGE = "tonnage: "
"""Before the name of a phase of the loop, as a range of the profiler."""
_INSIDE = {
    UPDATE: (f"{_RANGE}update",),
    HEAD: ("LinearCrossEntropy",),
    COMMUNICATION: ("c10d::", "gloo:", "nccl:", "FSDP::all_", "FSDP::reduce", "FSDP::post_backward_reduce"),
    ATTENTION: (
        "tonnage::packed_attention",
        "scaled_dot_product",
        "_varlen_attn",
        "_flash_attention",
        "_efficient_attention",
    ),
    PRODUCTS: (
        "aten::mm",
        "aten::_scaled_mm",
        "aten::addmm",
        "aten::bmm",
        "aten::linear",
        "aten::matmul",
        "mkldnn::_linear",
        "tonnage::product_in_fp32",
        "tonnage::quantized_linear",
        "tonnage::quantized_grouped_product",
        "tonnage::product_along_rows",
    ),
}
"""What an operation, or something around it, is called; the first that is met from the outside in counts."""
_NO_OPERATION = (_RANGE, "autograd::engine::", "Torch-Compiled Region", "ProfilerStep", "FSDP::")

RATE_SECONDS = 2.0
"""How long products alone are timed."""
MOST_OPERATIONS = 40
"""Told by name."""


def cause_of(event: FunctionEvent) -> str:
    """Why an operation was there."""
    names, around = [], event.cpu_parent
    while around is not None:
        names.append(around.name)
        around = around.cpu_parent
    for name in (*reversed(names), event.name):
        for cause, beginnings in _INSIDE.items():
            if any(beginning in name for beginning in beginnings):
                return cause
    return BETWEEN if event.name.startswith(_NO_OPERATION) else ELEMENTWISE


def sum_up(events: Iterable[FunctionEvent], *, on_device: bool) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds by cause, and the operations that took most of them, from the events of one thread tree."""
    causes: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
    operations: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.device_type.name != "CPU":  # a kernel itself, whose time its operation has already
            continue
        seconds = (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
        cause = cause_of(event)
        causes[cause] += seconds
        operation = operations[event.name, cause]
        operation[0] += 1
        operation[1] += seconds
    longest = sorted(operations.items(), key=lambda item: -item[1][1])[:MOST_OPERATIONS]
    return causes, [
        {"name": name.removeprefix(_RANGE), "cause": cause, "calls": int(calls), "seconds": seconds}
        for (name, cause), (calls, seconds) in longest
    ]


class _Ranges(Phases):
    """Phases that the profiler sees as ranges."""

    def __init__(self, position: PositionFile) -> None:
        super().__init__(position)
        self._stack = ExitStack()

    def enter(self, phase: str, **where: int) -> None:
        super().enter(phase, **where)
        self._stack.enter_context(torch.profiler.record_function(f"{_RANGE}{phase}"))

    def end(self) -> None:
        self._stack.close()
        super().end()


class _Enough(Exception):
    """All steps that were wanted are taken."""


class _Steps:
    """The loop's question whether to stop, which comes before every step, as the place to start and stop recording."""

    def __init__(self, num_steps: int, profiler: torch.profiler.profile, job: Job, phases: Phases) -> None:
        self._num_steps, self._profiler, self._job, self._phases = num_steps, profiler, job, phases
        self._taken, self._began, self._began_recording, self._waited_before = -1, 0.0, 0.0, 0.0
        self.plain: list[float] = []
        self.recorded_seconds = 0.0
        self.waited_seconds = 0.0
        """For other stages of a pipeline, while steps were recorded."""
        self.peak = Peak()
        """Until recording began, which takes memory of its own."""

    def __call__(self) -> bool:
        self._job.optimizer.finish()  # what goes on in the background belongs to the step that began it
        now = time.perf_counter()
        self._taken += 1
        if 2 <= self._taken <= self._num_steps + 1:
            self.plain.append(now - self._began)
        if self._taken == self._num_steps + 1:
            self.peak = self._phases.peak
            self._profiler.start()
        elif self._taken == 2 * self._num_steps + 1:
            self.recorded_seconds = now - self._began_recording
            self.waited_seconds = self._job.pipeline.waited_seconds - self._waited_before
            self._profiler.stop()
            raise _Enough
        self._began = time.perf_counter()
        if self._taken == self._num_steps + 1:
            self._began_recording = self._began
            self._waited_before = self._job.pipeline.waited_seconds
        return False


def profile_run(run: RunDirectory, num_steps: int) -> None:
    """Profile the run on this rank; writes ``profile-N.json`` and ``trace-N.json.gz`` into the run directory."""
    rank = int(os.environ.get("RANK", "0"))
    config, plan = read_config(run.config, [], check_files=False), Plan.read(run.plan)
    recorder = Recorder(run, rank=rank)
    phases = _Ranges(PositionFile(run.worker_position(rank)))
    layout = plan.layout
    axes: dict[str, Any] = {key: getattr(layout, key) for key in ("tensor", "pipeline", "context")}
    axes |= {"device_type": layout.device}
    with join_world(layout.replicate, **axes) as world:
        phases.device = world.device
        job = assemble(WorkerSetting(config, plan, world, recorder.log, phases))
        phases.end()
        activities = [torch.profiler.ProfilerActivity.CPU]
        if world.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(activities=activities, acc_events=True)
        steps = _Steps(num_steps, profiler, job, phases)
        with suppress(_Enough):
            # Of a step more than the run has, or the loop would not ask after its last one; and no step overlaps
            # another, so that each has its own time.
            longer = replace(job, num_packs=job.num_packs + 1, reads_late=False)
            train(longer, BetweenSteps(0, 0, run.checkpoints, 1), recorder, phases, steps)
        phases.end()
        world.barrier()  # or what rank 0 says of its last step may not be there yet
        records = [record for record in run.read_metrics() if "loss" in record]
        write_json(run.path / f"profile-{rank}.json", _account(steps, profiler, records, plan, world))
        profiler.export_chrome_trace(str(run.path / f"trace-{rank}.json.gz"))


def _account(
    steps: _Steps, profiler: torch.profiler.profile, records: list[dict[str, Any]], plan: Plan, world: World
) -> dict[str, Any]:
    """What the profile says, in seconds of a step that was not recorded."""
    num_steps, on_device = len(steps.plain), world.device.type == "cuda"
    recorded = records[-num_steps:]
    causes, operations = sum_up(profiler.events(), on_device=on_device)
    moves = [record[place] for record in recorded for place in ("disk", "host") if place in record]
    waited = sum(move["waited_seconds"] for move in moves)
    left = steps.recorded_seconds - sum(seconds for cause, seconds in causes.items() if cause != BETWEEN)
    for cause, spent in ((STAGES, steps.waited_seconds), (WAITING, waited), (BETWEEN, left)):
        causes[cause] = min(spent, max(0.0, left))  # in the time in which no operation went on
        left -= causes[cause]
    step_seconds = statistics.median(steps.plain)
    scale = step_seconds / steps.recorded_seconds
    plain, keys = records[1 : num_steps + 1], ("tokens", "computed_tokens", "supervised_tokens")
    sizes = {key: statistics.mean(record[key] for record in plain) for key in keys}
    computed, supervised = sizes["computed_tokens"], sizes["supervised_tokens"]
    flops = step_flops(plan.model, plan.layout, computed, supervised, plan.data.document_tokens)
    rate = product_rate(world.device, plan.layout.precision)
    return {
        "steps": num_steps,
        "step_seconds": step_seconds,
        "recorded_step_seconds": steps.recorded_seconds / num_steps,
        **sizes,
        "peak_bytes": {"host": steps.peak.host, "device": steps.peak.device},
        "causes": {cause: seconds * scale for cause, seconds in causes.items()},
        "operations": [
            operation | {"calls": operation["calls"] / num_steps, "seconds": operation["seconds"] * scale}
            for operation in operations
        ],
        "flops": flops,
        "product_flops_per_second": rate,
        "floor_seconds": flops / rate,
    }


def step_flops(model: ModelProfile, layout: Layout, tokens: float, supervised: float, document_tokens: float) -> float:
    """Floating-point operations of one worker's step that the model needs: nothing twice, and the head only where a
    token is supervised. ``tokens``, those of rows, and ``supervised`` are of all workers. Of those that compute the
    same packs together each is counted with an equal part."""
    parts = layout.data_workers * layout.micro_batches
    work = Work(tokens / parts, supervised / parts, document_tokens)
    together = layout.tensor * layout.pipeline
    return forward_backward_flops(replace(layout, recompute="none", recomputed=None), model, work) / together


def product_rate(device: torch.device, precision: str) -> float:
    """FLOP/s of large matrix products, the best of ``RATE_SECONDS``: what nothing here can be faster than."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]
    if device.type == "cpu" and processor_is_slow(dtype):
        dtype = torch.float32  # through which products go; to widen their operands is our cost, not the floor's
    size = 8192 if device.type == "cuda" else 2048
    with torch.no_grad():
        left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best, end = 0.0, time.perf_counter() + RATE_SECONDS
        while not best or time.perf_counter() < end:
            began = time.perf_counter()
            linear(left, right, None)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            best = max(best, 2.0 * size**3 / (time.perf_counter() - began))
    return best


def main(path: str, num_steps: str) -> int:
    run = RunDirectory(path)
    try:
        profile_run(run, int(num_steps))
    except Exception as error:
        status: int = getattr(error, "exit_status", 1)  # which errors of ours have
        run.write_error(int(os.environ.get("RANK", "0")), error, status)
        return status
    return 0


if __name__ == "__main__":
    choose_allocators()
    exit_status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status)
