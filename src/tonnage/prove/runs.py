"""Runs in this process, as a worker takes their steps; and the same runs in a process that sees no GPU.

``tonnage train`` would save and export at the end, which for eight billion parameters takes longer than what is to be
measured; so the loop of a worker is left where it would. ``python -m tonnage.prove.runs SPECS OUT`` takes runs one
after the other and writes what came of each.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.host.variables import variables_of_torch
from tonnage.prove.proof import Proof, apart
from tonnage.prove.record import write

if TYPE_CHECKING:
    from tonnage.rundir.positions import PositionFile
    from tonnage.training.memory import Phases


@dataclass(frozen=True)
class Spec:
    """A run: a model's directory, rows, steps, and other keys of a config."""

    name: str
    model: str
    rows: str
    steps: int
    config: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    drawn: bool = False
    """Whether weights are drawn on the device, for lack of any."""

    def words(self, folder: Path) -> list[str]:
        """The config as overrides, for a run under ``folder``."""
        from tonnage.config import as_overrides

        keys = {
            "model": self.model,
            "data": {"train": self.rows, "max_length": 128, "template": "plain", **self.data},
            "steps": self.steps,
            "output": str(folder / self.name),
            **({"init": "random"} if self.drawn else {}),
            **self.config,
        }
        keys.setdefault("batch", {"sequences": 4})
        keys.setdefault("launch", {"workers": 1} if self.drawn else {"workers": 1, "threads": 1})
        return as_overrides(keys)


@dataclass(frozen=True)
class Ran:
    losses: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    seconds: tuple[float, ...] = ()
    """Of each step."""
    tokens: tuple[int, ...] = ()
    peak_bytes: int = 0
    """Of the device's allocator, or of this process on a CPU."""
    planned_bytes: float = 0.0
    """Of the plan, without the runtime."""
    planned_seconds: float = 0.0
    layout: Mapping[str, Any] = field(default_factory=dict)
    refused: str = ""
    """Why there was no run, in a sentence."""
    broke: bool = False
    """Whether that is a lack of memory, which the plan should have known, and no refusal of the plan."""

    @property
    def step_seconds(self) -> float:
        """The median of all steps but the first two, which compile and touch memory."""
        later = sorted(self.seconds[2:] or self.seconds[1:] or self.seconds)
        return later[len(later) // 2] if later else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """Of those steps."""
        return self.tokens[-1] / self.step_seconds if self.tokens else float("nan")

    @property
    def told(self) -> dict[str, Any]:
        """What of it goes into the record."""
        return {
            "tokens_per_second": round(self.tokens_per_second, 1) if self.tokens else None,
            "step_seconds": [round(seconds, 4) for seconds in self.seconds],
            "planned_seconds": round(self.planned_seconds, 4),
            "peak_bytes": self.peak_bytes,
            "planned_bytes": round(self.planned_bytes),
            "layout": {name: self.layout.get(name) for name in TOLD},
            **({"refused": self.refused} if self.refused else {}),
        }


TOLD = (
    *("zero", "recompute", "recomputed", "precision", "moments"),
    *("optimizer_tier", "gradient_tier", "parameter_tier", "micro_batch"),
)


REFERENCE_SECONDS = 110
"""After which runs in another process are given up."""


class _Enough(Exception):
    """All steps that were wanted are taken."""


def _until_saved(position: PositionFile) -> Phases:
    """Phases of a run that ends where it would be saved: its last step has been written down then."""
    from tonnage.training.memory import Phases

    class UntilSaved(Phases):
        def enter(self, phase: str, **where: int) -> None:
            if phase == "save":
                raise _Enough
            super().enter(phase, **where)

    return UntilSaved(position)


def take(spec: Spec, folder: Path, observe: Callable[[int], None] = lambda taken: None) -> Ran:
    """Take the steps of a run here; what the plan refuses is told, not raised.

    ``observe`` is called before every step and after the last with the number of steps taken.
    """
    from tonnage.config import read_config
    from tonnage.decide.decision import decide_on
    from tonnage.errors import UserError

    try:
        with variables_of_torch(hidden=True):
            decision = decide_on(read_config(None, spec.words(folder)), fresh_output=True)
            return _taken(decision, spec, observe)
    except UserError as error:
        return Ran(refused=str(error).replace("\n", ";"))
    except Exception as error:
        if not lacks_memory(error):
            raise
        return Ran(refused=f"out of memory: {str(error).splitlines()[0]}", broke=True)
    finally:
        _let_go()


def hold(proof: Proof, check: str, case: str, one: Ran, other: Ran) -> None:
    """Hold the losses of two runs together; a refusal is told as the failure that it is."""
    if refused := one.refused or other.refused:
        proof.found(check, case, float("inf"), f"refused: {refused}")
    else:
        proof.found(check, case, apart(one.losses, other.losses))


def lacks_memory(error: Exception) -> bool:
    """Whether it is about memory that is not there, of the device or of the host."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def _taken(decision: Any, spec: Spec, observe: Callable[[int], None]) -> Ran:
    from tonnage.decide.written import write_run
    from tonnage.kernels.threads import use_threads
    from tonnage.model.attention import compile_loops
    from tonnage.model.build import filling_where_they_lie
    from tonnage.parallel.parallelize import Precision
    from tonnage.parallel.world import join_world
    from tonnage.rundir.directory import RunDirectory
    from tonnage.rundir.positions import PositionFile
    from tonnage.training.assemble import assemble
    from tonnage.training.loop import BetweenSteps, train
    from tonnage.training.metrics import Recorder
    from tonnage.training.setting import WorkerSetting

    config, plan, run = decision.config, decision.plan, RunDirectory(decision.config.output)
    write_run(run, decision)
    run.clear_traces()
    if plan.layout.device == "cpu":
        use_threads(plan.threads_per_worker)
        compile_loops(Precision.of(config.dtype, 1).compute)
    recorder, phases = Recorder(run, rank=0), _until_saved(PositionFile(run.worker_position(0)))
    finish, taken = list[Callable[[], None]](), -1

    def enough() -> bool:
        nonlocal taken
        taken += 1
        finish[0]()  # what goes on in the background belongs to the step that began it
        observe(taken)
        return taken == spec.steps

    with ExitStack() as stack:
        world = stack.enter_context(join_world(device_type=plan.layout.device))
        phases.device = world.device
        if spec.drawn:
            stack.enter_context(filling_where_they_lie())
        job = assemble(WorkerSetting(config, plan, world, recorder.log, phases))
        finish.append(job.optimizer.finish)
        with suppress(_Enough):  # of a step more than the run has, or the loop would not ask for its last one
            job, between_steps = replace(job, num_packs=job.num_packs + 1), BetweenSteps(0, 0, run.checkpoints, 1)
            train(job, between_steps, recorder, phases, enough)
        phases.end()
        recorder.close()
        peak = phases.peak.device if world.device.type == "cuda" else phases.peak.host
        del job
        finish.clear()
    steps = [record for record in run.read_metrics() if "loss" in record]
    return Ran(
        losses=tuple(step["loss"] for step in steps),
        norms=tuple(step["grad_norm"] for step in steps),
        seconds=tuple(step["step_seconds"] for step in steps),
        tokens=tuple(step["tokens"] for step in steps),
        peak_bytes=peak,
        planned_bytes=plan.choice.peak_bytes - plan.choice.runtime_bytes,
        planned_seconds=plan.choice.seconds.total,
        layout=asdict(plan.layout),
    )


def _let_go() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

    torch.compiler.reset()


class BackgroundRuns:
    """Runs in a process of its own that sees no GPU, begun at once and asked for later."""

    def __init__(self, specs: Sequence[Spec], folder: Path) -> None:
        self._out, self._end = folder / "ran.json", time.monotonic() + REFERENCE_SECONDS
        file, self._log = folder / "specs.json", folder / "ran.log"
        write(file, {"folder": str(folder), "specs": [asdict(spec) for spec in specs]})
        command = [sys.executable, "-m", "tonnage.prove.runs", str(file), str(self._out)]
        no_gpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        with self._log.open("wb") as log:  # no pipe, which nobody would empty until the end
            self._process = subprocess.Popen(command, env=no_gpu, stdout=log, stderr=subprocess.STDOUT)

    def ran(self) -> dict[str, Ran]:
        """What came of them, by their names. Raises ``RuntimeError`` with what was said where they broke off."""
        try:
            self._process.wait(timeout=max(1.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise RuntimeError("the runs on the CPU, which are the reference, took too long") from None
        if self._process.returncode:
            output = self._log.read_text(encoding="utf-8", errors="replace")[-3000:]
            raise RuntimeError(f"the runs on the CPU, which are the reference, broke off:\n{output}")
        by_name = json.loads(self._out.read_text(encoding="utf-8"))
        for fields in by_name.values():
            fields |= {key: tuple(value) for key, value in fields.items() if isinstance(value, list)}
        return {name: Ran(**fields) for name, fields in by_name.items()}


def main(asked: str, out: str) -> None:
    from tonnage.files.writing import close_to_others

    close_to_others()
    given = json.loads(Path(asked).read_text(encoding="utf-8"))
    ran = {one["name"]: asdict(take(Spec(**one), Path(given["folder"]))) for one in given["specs"]}
    write(Path(out), ran)


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)
