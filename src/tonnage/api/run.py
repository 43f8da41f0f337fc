"""A run as an object: at rest, its directory with what was decided and measured, and what can be done with it; and at
work, an iterator over the steps of its workers.

There is no thread: workers are processes, and are looked at while somebody waits for the next step. What they write
into ``metrics.jsonl`` comes out here, record by record. In between they train on.
"""

from __future__ import annotations

import html
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tonnage.api.curve import curves
from tonnage.api.said import conversations_of, files_of
from tonnage.api.steps import Step, frame_of
from tonnage.config import as_overrides, read_config
from tonnage.display.bar import progress_bar
from tonnage.display.progress import RunDisplay, State, Tail, summarise
from tonnage.display.terminal import say, terminal
from tonnage.errors import refusals, user_error
from tonnage.files.reading import read_record
from tonnage.launch.watch import DONE, WATCH_SECONDS, stop_requests, watch
from tonnage.rundir.directory import RunDirectory, complete_checkpoints
from tonnage.rundir.records import Outcome, metrics_record
from tonnage.rundir.samples import Sample, read_samples

if TYPE_CHECKING:
    import pandas

    from tonnage.api.chat import Chat
    from tonnage.api.starting import Started
    from tonnage.config import Config
    from tonnage.data import Account
    from tonnage.decide.evaluation import Evaluation
    from tonnage.inference.generate import Loaded
    from tonnage.planning.plan import Plan
    from tonnage.report.comparison import Comparison
    from tonnage.training.own_loss import Loss

ASKED = "tonnage stop"
LOOK_SECONDS = 0.1
UPDATE_SECONDS = 1.0
"""Between two pictures in a notebook."""


class Run:
    """A run, by its directory, wherever it was made; what is read is what stands there now.

    Example:
        >>> run = tonnage.open_run("runs/first")
        >>> run.plan.num_steps, [step.step for step in run.steps]
        (4, [1, 2, 3, 4])
        >>> run.config.optimizer.lr, run.account.total.rows_read
        (0.003, 120)
        >>> bool(run.metrics["loss"].iloc[-1] == run.steps[-1].loss), run.report().name
        (True, 'report.html')
        >>> (run.export / "config.json").exists()
        True
        >>> [len(answer) <= 8 for answer in run.generate(["Say one.", "Say two."], max_new_tokens=8)]
        [True, True]
        >>> run.evaluate([{"instruction": "Say two.", "output": "two"}], answers=1).answers
        1
        >>> sorted(run.outcome.measured)
        ['memory_bytes', 'step_seconds']
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """``path``: of the run's directory. Raises ``UserError`` where no run is there."""
        self._directory = RunDirectory(Path(path).expanduser())
        self._directory.check_decided()

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        """Its directory."""
        return self._directory.path

    @property
    def config(self) -> Config:
        """The config as resolved, with every default: ``run.config.optimizer.lr``. Raises ``UserError``."""
        return read_config(self._directory.config, check_files=False)

    @property
    def plan(self) -> Plan:
        """What was decided: layout, bytes of every category, seconds. Raises ``UserError``."""
        from tonnage.planning.plan import Plan

        return Plan.read(self._directory.plan)

    @property
    def account(self) -> Account:
        """The account of the data: rows and tokens by source, and what became of them. Raises ``UserError``."""
        from tonnage.data import Account

        return read_record(self._directory.data, Account)

    @property
    def metrics(self) -> pandas.DataFrame:
        """What was measured, as a frame of pandas: a row for each step, which is its index, with ``loss`` and
        ``eval_loss`` in nats, ``lr``, ``grad_norm``, ``tokens_per_second``, ``step_seconds``, ``memory.host_peak`` in
        bytes and what else ``metrics.jsonl`` says of steps and evaluations; NaN where it says nothing. Raises
        ``UserError`` for a line that no run writes."""
        return frame_of(self.records)

    @property
    def records(self) -> list[dict[str, Any]]:
        """All records of ``metrics.jsonl`` as they were written, in their order: of steps, evaluations and saves.
        Raises ``UserError`` for a line that no run writes."""
        return self._directory.read_metrics()

    @property
    def steps(self) -> list[Step]:
        """The steps that were taken, in their order."""
        return [step for step in map(Step.of, self.records) if step is not None]

    @property
    def outcome(self) -> Outcome | None:
        """``planned`` and ``measured``: ``memory_bytes`` of a worker and ``step_seconds``; None before the run ended.
        Raises ``UserError``."""
        return read_record(self._directory.outcome, Outcome) if self._directory.outcome.exists() else None

    @property
    def samples(self) -> list[Sample]:
        """What the model answered to ``evaluate.prompts``, in the order of steps and prompts: each has ``step`` (0 is
        before the first), ``number`` of the prompt (from 1), ``prompt``, ``answer``, and what the row ``expected``.
        Raises ``UserError``."""
        return read_samples(self._directory)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """Records of evaluations, in their order: ``step``, and ``eval_loss`` in nats a supervised token."""
        return [record for record in self.records if "eval_loss" in record]

    @property
    def comparison(self) -> Comparison:
        """What the run made of the rows it was evaluated on: ``before`` and ``after`` of the exported step, each with
        ``rows``, ``sources``, ``general`` and ``scores``; ``figures()``, ``lines()``, and whether ``evaluate.gate`` was
        ``passed``. Raises ``UserError``."""
        from tonnage.report.comparison import compare

        return compare(self._directory)

    @property
    def export(self) -> Path:
        """Where the model is once the run has ended: a Hugging Face model directory, or a PEFT adapter's."""
        return self._directory.export

    @property
    def is_working(self) -> bool:
        """Whether workers are at work on it now, or a launcher is; a Slurm job that waits counts."""
        from tonnage.launch.ray import is_working
        from tonnage.launch.slurm import job_of

        return self._directory.is_locked() or is_working(self._directory) or job_of(self._directory) is not None

    def summary(self) -> str:
        """One line: steps, loss, evaluation, tokens a second, peak memory."""
        return summarise(State.of(self.plan.num_steps, self.records))

    def generate(
        self,
        prompts: Sequence[str | Sequence[Mapping[str, Any]]],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        seed: int = 0,
    ) -> list[str]:
        """What the exported model answers: one answer to each prompt, in their order. It is loaded into this process,
        and let go afterwards.

        Args:
            prompts: what a user says, or the messages of a conversation.
            max_new_tokens: tokens of an answer at most.
            temperature: 0 takes the likeliest token, 1 draws from the model's own distribution.
            top_p: draw only from the likeliest tokens that together have this probability.
            batch_size: answers that are written side by side.
            seed: of the draws; the program's own random numbers stay as they are.

        Raises:
            UserError: the run has no export yet, or a prompt leaves no room for an answer.
        """
        from tonnage.inference.generate import Decoding, generate

        conversations = conversations_of(prompts, "generate")
        decoding = Decoding(max_new_tokens, temperature, top_p)
        return generate(self._load(), conversations, decoding, seed=seed, batch_size=batch_size)

    def chat(
        self,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Chat:
        """Talk to the exported model: ``chat = run.chat()``, then ``chat.say(...)`` again and again.

        Args:
            system: the system message.
            max_new_tokens, temperature, top_p, seed: as for ``generate``.

        Raises:
            UserError: the run has no export yet.
        """
        from tonnage.api.chat import Chat
        from tonnage.inference.generate import TALK, Decoding

        loaded = self._load(**TALK)
        return Chat(loaded, Decoding(max_new_tokens, temperature, top_p), system, seed)

    def evaluate(
        self, rows: Any, *, answers: int = 0, max_new_tokens: int = 128, max_length: int | None = None
    ) -> Evaluation:
        """How good the exported model is on other rows, computed in this process, as ``tonnage eval`` does.

        Args:
            rows: a file, several, or rows in memory, as ``train`` takes them.
            answers: to how many rows an answer is generated, and compared with the row's own; 0 is none.
            max_new_tokens: tokens of an answer at most.
            max_length: tokens of a row at most; None is what the run was trained with.

        Returns:
            The evaluation: ``loss`` (nats a supervised token), ``perplexity``, ``supervised_tokens``, ``answers``, and
            ``exact``, how many of these are the row's own.

        Raises:
            UserError: the run has no export yet, or rows cannot be read.
        """
        from tonnage.decide.evaluation import Answers, evaluate_model

        return evaluate_model(
            str(self.path),
            [{"path": path} for path in files_of(rows)],
            max_length=max_length or self.config.data.max_length,
            answers=Answers(answers, max_new_tokens),
        )

    def _load(self, **form: Any) -> Loaded:
        """The exported model, ready to answer. Raises ``UserError``."""
        from tonnage.decide.models import use_model

        return use_model(str(self.path)).load(**form)

    def resume(
        self,
        *,
        from_step: int | None = None,
        allow_changes: bool = False,
        force: bool = False,
        loss: Loss | None = None,
        **config: Any,
    ) -> Run:
        """Go on from the newest checkpoint, or that of ``from_step``, to the end of the run, as ``tonnage.train`` does.

        ``config``: keys to change, such as ``launch={"workers": 2}``. What would make it another run is refused, unless
        ``allow_changes``; ``force`` takes a plan that does not fit into memory. ``loss`` is the function that the run
        was started with, if it was. A run that is done is left as it is.

        Returns:
            This run.

        Raises:
            UserError: nothing to go on from, another config, loss or data, or somebody works on it.
            WorkerFailed: a worker died.
        """
        from tonnage.api.starting import go_on

        with progress_bar(terminal()) as progress:
            started = go_on(
                self._directory,
                as_overrides(config),
                progress,
                step=from_step,
                allow_changes=allow_changes,
                force=force,
                loss=loss,
            )
        if started is not None:
            show(Running(started))
        return self

    def stop(self, *, wait: bool = True) -> None:
        """Have whoever works on it, in whatever process, finish the step, save, and end.

        ``wait``: until that is done. A Slurm job that has not begun is cancelled. This process's own loop over the run
        is not waited for: it ends with its next step.

        Raises:
            UserError: nobody works on it.
        """
        from tonnage.launch import slurm

        run = self._directory
        if run.by_hand.exists():
            observed = "a run whose steps a program takes, with a tonnage.Session"
            raise user_error(observed, "a run that workers train", "end that program", str(run.path))
        if not self.is_working:
            change = f"to go on with it: tonnage train --resume {run.word}"
            raise user_error("nobody works on this run", "a run at work", change, str(run.path))
        if (job := slurm.job_of(run)) is not None:
            slurm.stop(run, job)
            while wait and self.is_working:
                time.sleep(slurm.LOOK_SECONDS)  # its controller answers everybody's questions
                if not run.stop_asked.exists():  # its workers had only just begun
                    slurm.stop(run, job)
            return
        self._ask()
        while wait and not run.is_locked_here() and self.is_working:
            self._ask()
            time.sleep(LOOK_SECONDS)

    def _ask(self) -> None:
        """Say so where workers look at every step border; whoever has just begun may have cleared it away."""
        if not self._directory.stop_asked.exists():
            with refusals("the run could not be asked to stop", self._directory.workers):
                self._directory.workers.mkdir(exist_ok=True)
                self._directory.stop_asked.write_text(ASKED)

    def report(self, output: str | os.PathLike[str] | None = None) -> Path:
        """Write the page about the run that every run leaves when it ends, again; returns where it is.

        ``output``: the file; an earlier report is replaced, nothing else is. By default ``report.html`` in the run's
        directory.

        Raises ``UserError``: a file of the run is damaged, or the report cannot be written.
        """
        from tonnage.report.page import write_report

        return write_report([self.path], output)

    def _repr_html_(self) -> str:
        """For notebooks: the directory, a line, curves, and the memory that was planned beside what was measured."""
        from tonnage.planning.drawn import instants_as_html, measured_phases

        plan, records = self.plan, self.records
        line = summarise(State.of(plan.num_steps, records))
        head = f"<b>{html.escape(str(self.path))}</b><br>{html.escape(line)}"
        bars = instants_as_html(plan.choice, measured_phases(plan, records))
        memory = f"<details><summary>Memory of a worker, planned and measured</summary>{bars}</details>"
        return f'<div style="font-family: sans-serif; max-width: 1010px">{head}<br>{curves(records)}{memory}</div>'


class Running(Iterator[Step]):
    """A run whose workers are at work, from ``tonnage.start``: an iterator over its steps, and a context.

    Leaving the context early saves and ends the run (``stop``). At its end, or when it is stopped, the model is
    exported; not where an exception ends it. Ctrl-C while a step is waited for saves and ends the run as well, before
    it is raised; a second one ends it at once. Without a context, a plain loop to its end does the same.

    Raises, while it is iterated: ``UserError`` or ``WorkerFailed`` with the first failure of a worker.
    """

    def __init__(self, started: Started) -> None:
        self.directory = started.run
        """The names of the run's files."""
        self.plan = started.plan
        """What was decided: layout, bytes, seconds."""
        self.news = started.news
        """Of a run that goes on: what is not as it was before, a line for each."""
        self._started = started
        self._metrics = Tail(started.run.metrics)
        self._metrics.lines()  # of steps that were taken before
        self._waiting: deque[Step] = deque()
        self._status: int | None = None
        self._is_over = False

    @property
    def run(self) -> Run:
        """The run, which is there already."""
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
                self._started.at_work.ask_to_stop("stop()")
                try:
                    while self._still_works():
                        if requests:
                            self._started.at_work.kill()
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
                workers, look = self._started.at_work, self._still_works
                is_working = watch(workers, requests, look, until=until, poll=poll, tell=tell)
            if not is_working:
                self._finish(export=not requests)
        _pass_on(requests)

    def _still_works(self) -> bool:
        """Take in what is new; whether any worker is at work."""
        status = self._started.at_work.look()
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

        run = self.directory
        if self._started.is_local:
            learn(run, self.plan, self._started.since)
        else:
            self.plan = Plan.read(run.plan)  # of as many workers as there were at the end
        measure(run, self.plan, self._started.since)
        if (export or self._status == DONE) and complete_checkpoints(run.checkpoints) and not is_exported(run):
            export_run(run, self._started.progress)
            leave_comparison(run, step_of_export(run))
        leave_report(run)
        if export or self._status == DONE:
            push_rest(run)
        self._close()

    def _close(self, error: BaseException | None = None) -> None:
        """End the run's context; ``error`` is what ended the run, and none that the program handles meanwhile."""
        self._is_over = True
        if error is None:
            self._started.closing.close()
        else:
            self._started.closing.__exit__(type(error), error, error.__traceback__)

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


def show(running: Running) -> None:
    """Wait for the end of a run: on a terminal it is shown as by the command, in a notebook as one output that updates,
    elsewhere it goes on in silence. Raises as ``train``."""
    console, display = terminal(), _notebook()
    if display is not None or console.is_terminal:
        for line in running.news:
            say(console, line)
    if display is not None:
        run, drawn_at = running.run, time.monotonic()
        handle = display(run, display_id=True)

        def draw(pause: float = UPDATE_SECONDS) -> None:
            nonlocal drawn_at
            if handle is not None and time.monotonic() - drawn_at >= pause:
                handle.update(run)
                drawn_at = time.monotonic()

        running.wait(draw)
        draw(pause=0)
    elif console.is_terminal:
        plan, num_workers = running.plan, None if running.directory.plans.exists() else running.plan.workers
        with RunDisplay(running.directory, plan.num_steps, num_workers=num_workers, console=console) as on_terminal:
            running.wait(on_terminal.poll, on_terminal.tell)
    else:
        running.wait()


def _notebook() -> Callable[..., Any] | None:
    """What displays an object in the notebook in which this is; None elsewhere."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    display: Callable[..., Any] = import_module("IPython.display").display
    return display


def open_run(path: str | os.PathLike[str]) -> Run:
    """A run that is there: made on a command line, from Python, or on another machine.

    Args:
        path: the run's directory.

    Raises:
        UserError: there is no run.

    Example:
        >>> tonnage.open_run("runs/first").steps[-1].step
        4
    """
    return Run(path)


def _pass_on(requests: Sequence[int]) -> None:
    """Let a signal that was only noted do what it does in this program."""
    if requests:
        signal.raise_signal(requests[0])
