"""A run's directory as an object: what was decided and measured, and what can be done with it."""

from __future__ import annotations

import html
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.api.curve import curves
from tonnage.api.running import Step
from tonnage.api.said import conversations_of, files_of
from tonnage.config import as_overrides, read_config
from tonnage.display.progress import State, summarise
from tonnage.errors import Problem, UserError, refusals
from tonnage.files.reading import read_record
from tonnage.rundir.directory import RunDirectory
from tonnage.rundir.records import Outcome
from tonnage.rundir.samples import Sample, read_samples

if TYPE_CHECKING:
    import pandas

    from tonnage.api.chat import Chat
    from tonnage.config import Config
    from tonnage.data import Account
    from tonnage.decide.evaluation import Evaluation
    from tonnage.inference.generate import Loaded
    from tonnage.planning.plan import Plan
    from tonnage.report.comparison import Comparison
    from tonnage.training.own_loss import Loss

ASKED = "tonnage stop"
LOOK_SECONDS = 0.1


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
        if not (self._directory.config.exists() and self._directory.plan.exists()):
            change = "name a directory that tonnage has written, such as runs/NAME"
            raise UserError(Problem("no run", "a run directory", change, str(self._directory.path)))

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
        from tonnage.api.frame import frame_of

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
        return summarise(self._state())

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
        from tonnage.inference.generate import Decoding, generate_apart

        conversations = conversations_of(prompts, "generate")
        decoding = Decoding(max_new_tokens, temperature, top_p)
        return generate_apart(self._load(), conversations, decoding, seed=seed, batch_size=batch_size)

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
        from tonnage.inference.generate import Decoding

        loaded = self._load(formats=("messages",), single_turn=False)
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
        from tonnage.decide.evaluation import evaluate_model

        return evaluate_model(
            str(self.path),
            files_of(rows),
            max_length=max_length or self.config.data.max_length,
            answers=answers,
            max_new_tokens=max_new_tokens,
        )

    def _load(self, **form: Any) -> Loaded:
        """The exported model, ready to answer. Raises ``UserError``."""
        from tonnage.decide.models import code_allowed, unexpected_allowed, use_kernels_of
        from tonnage.inference.generate import load, resolve_model

        trusted = code_allowed(str(self.path), given=False)
        directory = resolve_model(self.path, trust_remote_code=trusted)
        use_kernels_of(str(self.path))
        unexpected = unexpected_allowed(str(self.path), ())
        return load(directory, trust_remote_code=trusted, allow_unexpected=unexpected, **form)

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
        from tonnage.api.shown import shown
        from tonnage.api.starting import go_on

        words = as_overrides(config)
        return shown(
            lambda progress: go_on(
                self._directory, words, progress, step=from_step, allow_changes=allow_changes, force=force, loss=loss
            ),
            self,
        )

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
            found = "a run whose steps a program takes, with a tonnage.Session"
            raise UserError(Problem(found, "a run that workers train", "end that program", str(run.path)))
        if not self.is_working:
            change = f"to go on with it: tonnage train --resume {run.word}"
            raise UserError(Problem("nobody works on this run", "a run at work", change, str(run.path)))
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

    def _state(self) -> State:
        state = State(self.plan.num_steps)
        for record in self.records:
            state.take(record)
        return state

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
        state = State(plan.num_steps)
        for record in records:
            state.take(record)
        head = f"<b>{html.escape(str(self.path))}</b><br>{html.escape(summarise(state))}"
        bars = instants_as_html(plan.choice, measured_phases(plan, records))
        memory = f"<details><summary>Memory of a worker, planned and measured</summary>{bars}</details>"
        return f'<div style="font-family: sans-serif; max-width: 1010px">{head}<br>{curves(records)}{memory}</div>'


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
