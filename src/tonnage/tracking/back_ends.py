"""The trackers: each is told to start, to log and to end, in a process of its own, and may fail or hang in any of them.

Where a tracker keeps runs, and who may, is said by the library's own variables (``WANDB_MODE``,
``MLFLOW_TRACKING_URI``, ``TRACKIO_SPACE_ID`` ...). Whatever a library would find out and send by itself (the machine,
the repository, what is printed, how busy the GPU is) is switched off: what is sent is what it is handed here.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from tonnage.rundir.samples import Sample
from tonnage.tracking.news import News

T = TypeVar("T")
Outcome = Literal["finished", "stopped", "failed"]

PROJECT = "tonnage"
"""Where a library's own variable names no project."""
START_SECONDS = 60
"""For Weights & Biases to answer."""


@dataclass(frozen=True)
class About:
    """A run, as trackers are told."""

    name: str
    """Of its directory."""
    directory: Path
    first_step: int
    """That will be logged now; what a tracker has of this step and later ones is of steps that are trained again."""
    config: Mapping[str, Any]
    """Dotted keys, see ``told.told_config``."""


class Tracker(Protocol):
    """One tool that shows runs. All of it may raise what it likes: ``start`` is called again then."""

    def start(self, about: About, run_id: str | None) -> str:
        """Begin a run or, where its id is ``run_id``, go on with it; returns its id.

        Called again after a failure, with the id that it returned if it had.
        """

    def log(self, news: Sequence[News]) -> None:
        """Numbers and answers, in the order in which they came."""

    def end(self, outcome: Outcome) -> None:
        """All was logged; may take a moment."""


class TensorBoard:
    """Files in the run directory."""

    _writer: Any = None

    def start(self, about: About, run_id: str | None) -> str:
        """Open a new file of events, which hides what older ones have of steps that are trained again."""
        if self._writer is None:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._writer = EventFileWriter(str(about.directory / "tensorboard"))
            if about.first_step > 1:
                restart = SessionLog(status=SessionLog.START)
                self._writer.add_event(Event(wall_time=time.time(), step=about.first_step, session_log=restart))
            if run_id is None:
                rows = "\n".join(f"| {key} | {_as_text(value)} |" for key, value in about.config.items())
                self._text("config", f"| key | value |\n|---|---|\n{rows}", 0)
        return "tensorboard"

    def log(self, news: Sequence[News]) -> None:
        """A scalar of each number; answers as text."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for item in news:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in item.values.items()]
            if values:
                self._writer.add_event(Event(wall_time=time.time(), step=item.step, summary=Summary(value=values)))
            for sample in item.samples:
                lines = [f"{name}:\n\n{_indented(value)}" for name, value in _shown(sample).items()]
                self._text(f"samples/{sample.number}", "\n\n".join(lines), item.step)
        self._writer.flush()

    def end(self, outcome: Outcome) -> None:
        self._writer.close()

    def _text(self, name: str, markdown: str, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.plugins.text.summary_v2 import text_pb

        summary = text_pb(name, markdown)
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))


class WandB:
    """Weights & Biases: a server, or files in the run directory that ``wandb sync`` takes there later."""

    def __init__(self) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")

    def start(self, about: About, run_id: str | None) -> str:
        """Begin or go on with a run; ``step`` is a value like others, as theirs may only grow."""
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or PROJECT,
            name=os.environ.get("WANDB_NAME") or about.name,
            id=run_id,
            resume="allow" if run_id else None,
            dir=os.environ.get("WANDB_DIR") or str(about.directory),
            config=dict(about.config),
            settings=wandb.Settings(
                console="off",
                host="",
                silent=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
                init_timeout=START_SECONDS,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    def log(self, news: Sequence[News]) -> None:
        """A record of each; answers as a table."""
        import wandb

        for one in news:
            told: dict[str, Any] = {"step": one.step, **one.values}
            if one.samples:
                rows = [_shown(sample) for sample in one.samples]
                told["samples"] = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
            self._run.log(told)

    def end(self, outcome: Outcome) -> None:
        """Wait for everything to have arrived; a run that was stopped counts as one that was not finished."""
        self._run.finish(exit_code=0 if outcome == "finished" else 1)


class MLflow:
    """A server, or a database or directory of this machine."""

    STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
    MOST_VALUES, MOST_PARAMETERS, LONGEST_PARAMETER = 1000, 100, 6000
    """Of one request, and letters of a parameter: MLflow takes no more."""

    def __init__(self) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # the sender tries again
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
        self._id: str | None = None

    def start(self, about: About, run_id: str | None) -> str:
        """Begin a run in the experiment that ``MLFLOW_EXPERIMENT_NAME`` names, or go on with it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        if run_id is not None:
            self._id = run_id
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        if self._id is None:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT
            experiment = self._client.get_experiment_by_name(name)
            number = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
            self._id = str(self._client.create_run(number, run_name=about.name).info.run_id)
        shown = {key: _as_text(value)[: self.LONGEST_PARAMETER] for key, value in about.config.items()}
        for some in _portions(list(shown.items()), self.MOST_PARAMETERS):
            self._client.log_batch(self._id, params=[Param(key, value) for key, value in some])
        return self._id

    def log(self, news: Sequence[News]) -> None:
        """All numbers in few requests; the answers of a step as a file."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(name, value, now, item.step) for item in news for name, value in item.values.items()]
        for some in _portions(values, self.MOST_VALUES):
            self._client.log_batch(self._id, metrics=some)
        for item in news:
            if item.samples:
                text = json.dumps([_shown(sample) for sample in item.samples], ensure_ascii=False, indent=1)
                place = f"samples/step-{item.step:08}-{item.samples[0].number}.json"
                self._client.log_text(self._id, text, place)

    def end(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._id, status=self.STATUS[outcome])


class Trackio:
    """A database of this machine, a server, or a Space."""

    _run: Any = None
    _id: str | None = None

    def start(self, about: About, run_id: str | None) -> str:
        """Begin or go on with a run, which Trackio knows by its name."""
        import trackio

        self._id = run_id or self._id or f"{about.name}-{secrets.token_hex(3)}"
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or PROJECT,
            name=self._id,
            config=dict(about.config),  # or what was told at first is forgotten
            resume="allow",
            private=True,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        return self._id

    def log(self, news: Sequence[News]) -> None:
        """A record of each; answers as a table."""
        import pandas
        import trackio

        for one in news:
            told: dict[str, Any] = dict(one.values)
            if one.samples:
                told["samples"] = trackio.Table(dataframe=pandas.DataFrame([_shown(sample) for sample in one.samples]))
            self._run.log(told, step=one.step)

    def end(self, outcome: Outcome) -> None:
        """Wait for everything to be stored."""
        self._run.finish()


TRACKERS: Mapping[str, Callable[[], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""By the names that ``track`` of a config has."""


def _portions(items: Sequence[T], most: int) -> Iterator[Sequence[T]]:
    for begin in range(0, len(items), most):
        yield items[begin : begin + most]


def _shown(sample: Sample) -> dict[str, Any]:
    return {**asdict(sample), "expected": sample.expected or ""}


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _indented(value: Any) -> str:
    """As a block of code in Markdown, in which nothing is markup."""
    return "\n".join(f"    {line}" for line in str(value).splitlines())
