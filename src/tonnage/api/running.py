"""Workers as an iterator over their steps: what they write into ``metrics.jsonl`` comes out here, record by record.

There is no thread: workers are processes, and are looked at while somebody waits for the next step. In between they
train on.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tonnage.display.progress import Tail
from tonnage.launch.watch import DONE, WATCH_SECONDS, AtWork, stop_requests, watch
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import metrics_record

if TYPE_CHECKING:
    from tonnage.api.run import Run
    from tonnage.data import Progress
    from tonnage.planning.plan import Plan


@dataclass(frozen=True)
class Step:
    """One update of the weights, as ``metrics.jsonl`` tells it; NaN and 0 for what an old run does not."""

    step: int
    """From 1."""
    epoch: float
    """Passes over the data that are done."""
    loss: float
    """Mean over the supervised tokens of the step, in nats; not finite in a step that was skipped."""
    grad_norm: float
    """Of all gradients together, before clipping."""
    lr: float
    tokens: int
    """Trained on in the step, padding left out, over all workers."""
    supervised_tokens: int
    """Those of them whose loss counts."""
    tokens_per_second: float
    step_seconds: float
    memory: Mapping[str, float] = field(repr=False)
    """Bytes: ``device_peak`` and ``host_peak`` of the worker that took most."""
    skipped: bool
    """Whether loss or gradient were not finite, so that nothing was changed."""
    record: Mapping[str, Any] = field(repr=False, compare=False)
    """All that the run wrote of it."""

    @staticmethod
    def of(record: Mapping[str, Any]) -> Step | None:
        """The step of a record; None where it tells of something else."""
        if "loss" not in record or "eval_loss" in record:
            return None

        def number(name: str) -> float:
            value = record.get(name)
            return math.nan if value is None else float(value)

        return Step(
            step=int(record["step"]),
            epoch=number("epoch"),
            loss=number("loss"),
            grad_norm=number("grad_norm"),
            lr=number("lr"),
            tokens=int(record.get("tokens") or 0),
            supervised_tokens=int(record.get("supervised_tokens") or 0),
            tokens_per_second=number("tokens_per_second"),
            step_seconds=number("step_seconds"),
            memory=record.get("memory") or {},
            skipped=bool(record.get("skipped")),
            record=record,
        )


class Running(Iterator[Step]):
    """A run whose workers are at work, from ``tonnage.start``: an iterator over its steps, and a context.

    Leaving the context early saves and ends the run (``stop``). At its end, or when it is stopped, the model is
    exported; not where an exception ends it. Ctrl-C while a step is waited for saves and ends the run as well, before
    it is raised; a second one ends it at once. Without a context, a plain loop to its end does the same.

    Raises, while it is iterated: ``UserError`` or ``WorkerFailed`` with the first failure of a worker.
    """

    def __init__(
        self,
        run: RunDirectory,
        plan: Plan,
        at_work: AtWork,
        closing: ExitStack,
        progress: Progress,
        since: int,
        *,
        is_local: bool = True,
        news: Sequence[str] = (),
    ) -> None:
        """``closing`` ends what ``at_work`` needs. ``since``: the step after which the run goes on, 0 for a new one.
        ``is_local``: whether workers are on this machine."""
        self.directory = run
        """The names of the run's files."""
        self._at_work = at_work
        self._closing = closing
        self._progress = progress
        self._since = since
        self._is_local = is_local
        self._metrics = Tail(run.metrics)
        self._metrics.lines()  # of steps that were taken before
        self._waiting: deque[Step] = deque()
        self._status: int | None = None
        self._is_over = False
        self.plan = plan
        """What was decided: layout, bytes, seconds."""
        self.news = tuple(news)
        """Of a run that goes on: what is not as it was before, a line for each."""

    @property
    def run(self) -> Run:
        """The run, which is there already."""
        from tonnage.api.run import Run

        return Run(self.directory.path)

    @property
    def is_over(self) -> bool:
        """Whether no worker is at work any more."""
        return self._is_over

    def __repr__(self) -> str:
        return f"Running({str(self.directory.path)!r}{', over' if self._is_over else ''})"

    def __iter__(self) -> Running:
        return self

    def __next__(self) -> Step:
        while not self._waiting:
            if self._is_over:
                raise StopIteration
            self._look(until=lambda: bool(self._waiting))
        return self._waiting.popleft()

    def wait(self, poll: Callable[[], None] | None = None, tell: Callable[[str], None] = lambda _: None) -> Run:
        """Go on to the end of the run; ``poll`` is called about ten times a second, ``tell`` with what the workers wait
        for before they can begin. Raises as the iteration."""
        if not self._is_over:
            self._look(until=lambda: False, poll=poll, tell=tell)
        self._waiting.clear()
        return self.run

    def stop(self, *, export: bool = True) -> Run:
        """Have the workers finish their step, save, and end; waits for that. A run that is over stays as it is.

        ``export``: whether the model is written as well, as at the end of a run. ``Run.resume`` goes on.

        Raises ``UserError`` or ``WorkerFailed`` where a worker failed, ``KeyboardInterrupt`` if Ctrl-C ended them
        before they had saved.
        """
        if self._is_over:
            return self.run
        with self._ending():
            with stop_requests() as requests:
                self._at_work.ask_to_stop("stop()")
                try:
                    while self._still_works():
                        if requests:
                            self._at_work.kill()
                            raise KeyboardInterrupt
                        time.sleep(WATCH_SECONDS)
                except KeyboardInterrupt:
                    if requests:
                        raise
                    self._close()  # they had not even begun
            if not self._is_over:
                self._finish(export=export)
        _pass_on(requests)
        return self.run

    def __enter__(self) -> Running:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(export=kind is None)

    def __del__(self) -> None:
        """Forgotten while workers are at work, as by a plain loop that was left early: they save and end."""
        if not getattr(self, "_is_over", True):
            with suppress(Exception):
                self.stop(export=False)

    def _look(
        self,
        *,
        until: Callable[[], bool],
        poll: Callable[[], None] | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Look at the workers until they have ended or ``until`` says enough. A signal that asks for a stop does what
        it does in this program once everything is saved."""
        with self._ending():
            with stop_requests() as requests:
                is_working = watch(self._at_work, requests, self._still_works, until=until, poll=poll, tell=tell)
            if not is_working:
                self._finish(export=not requests)
        _pass_on(requests)

    def _still_works(self) -> bool:
        """Take in what is new; whether any worker is at work."""
        status = self._at_work.look()
        for line in self._metrics.lines():
            record = metrics_record(line, str(self.directory.metrics))
            if record is not None and (step := Step.of(record)) is not None:
                self._waiting.append(step)
        self._status = status
        return status is None

    def _finish(self, *, export: bool) -> None:
        """What is left when the workers have ended well: what was learnt, and the model."""
        from tonnage.decide.exports import export_run, is_exported, step_of_export
        from tonnage.decide.outcome import learn, measure
        from tonnage.decide.pushing import push_rest
        from tonnage.planning.plan import Plan
        from tonnage.report.comparison import leave_comparison
        from tonnage.report.page import leave_report
        from tonnage.rundir.directory import complete_checkpoints

        run = self.directory
        if self._is_local:
            learn(run, self.plan, self._since)
        else:
            self.plan = Plan.read(run.plan)  # of as many workers as there were at the end
        measure(run, self.plan, self._since)
        if (export or self._status == DONE) and complete_checkpoints(run.checkpoints) and not is_exported(run):
            export_run(run, self._progress)
            leave_comparison(run, step_of_export(run))
        leave_report(run)
        if export or self._status == DONE:
            push_rest(run)
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        """End the run's context; ``error`` is what ended the run, and none that the program handles meanwhile."""
        self._is_over = True
        if error is None:
            self._closing.close()
        else:
            self._closing.__exit__(type(error), error, error.__traceback__)

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Whatever goes wrong within it ends the run's context, which hears of it."""
        from tonnage.report.page import reported_if_it_fails

        try:
            with reported_if_it_fails(self.directory):
                yield
        except BaseException as error:
            self._close(error)
            raise


def _pass_on(requests: Sequence[int]) -> None:
    """Let a signal that was only noted do what it does in this program."""
    if requests:
        signal.raise_signal(requests[0])
