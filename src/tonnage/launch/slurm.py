"""The workers as one Slurm job: write its script, submit it, follow it, end it.

    tonnage train ──► job.sh ──► sbatch ──► a job: srun starts the workers, which find one another by themselves
         │                                        │
         └── follows: scontrol, the run directory ◄┘

The job needs nobody who follows it. Its workers are told of the end of their time by a signal to the job's steps
(``--signal`` without ``B:``, which would reach the batch shell alone): they save and exit with 3, and the script puts
its own job back into the queue. Started again, the workers go on from the newest checkpoint by themselves. So a run
longer than any time limit, or one that is preempted, is one job that comes and goes. It is not queued again when it is
done, when a worker failed, when its owner asked it to stop, or when two starts in a row came no further. The script
also exports the model, so that this costs the login node nothing.

Inside an allocation that is there already (``salloc``, a batch script) there is nothing to submit, and ``started`` runs
``srun`` there.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tonnage.config import SlurmLaunch, sbatch
from tonnage.errors import TonnageError, WorkerFailed, user_error
from tonnage.files.reading import read_record
from tonnage.files.writing import write_json
from tonnage.launch.failures import as_error, without_account
from tonnage.launch.watch import DONE, STOPPED, WATCH_SECONDS, AtWork
from tonnage.rundir.directory import LAUNCHER, RunDirectory
from tonnage.rundir.stalls import StallWatchdog

LOOK_SECONDS = 5.0
"""Between two questions to Slurm's controller, which answers everybody's."""
LAST_WORKERS_SECONDS = 60
"""For the other workers when one has ended: they end by themselves, saved or for want of it, or are killed."""
ENDINGS = {
    "CANCELLED": "was cancelled",
    "TIMEOUT": "reached its time limit before its workers had saved (launch.save_seconds is how long they have)",
    "NODE_FAIL": "lost a node",
    "OUT_OF_MEMORY": "ran out of the memory it was given (--mem in launch.options)",
    "PREEMPTED": "was preempted",
    "GONE": "is no longer known to Slurm",
}
OVER = {"COMPLETED", "FAILED", "BOOT_FAIL", "DEADLINE", "REVOKED", *ENDINGS}
"""States that a job does not leave by itself. GONE is ours: Slurm forgets a job some minutes after its end."""
SCRIPT = """\
#!/bin/bash
{directives}

run={run}
python={python}
{setup}
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 {launcher}=slurm
newest() {{ printf '%s\\n' "$run"/checkpoints/step-*/COMPLETE | grep -E '/step-[0-9]{{8,18}}/COMPLETE$' | tail -n 1; }}
before=$(newest)

{srun}
status=$?

# Told to stop, and saved: this job goes on later, unless its owner stopped it or it came no further twice in a row.
if [ "$status" -eq 3 ] && [ ! -e "$run/workers/stop-asked" ] && ! ls "$run"/workers/*.error.json >/dev/null 2>&1; then
    if [ "$(newest)" != "$before" ]; then
        rm -f "$run/workers/no-progress"
    elif [ -e "$run/workers/no-progress" ]; then
        echo "stopped twice without a step in between: not queued again" >&2
        exit 3
    else
        touch "$run/workers/no-progress"
    fi
    scontrol requeue "$SLURM_JOB_ID" && exit 0
    exit 3
fi

if [ "$status" -eq 0 ]; then
    new="$run/.export" old="$run/.export.old"
    rm -rf "$new" "$old"
    "$python" -m tonnage export "$run" "$new" \\
        && {{ [ ! -e "$run/export" ] || mv "$run/export" "$old"; }} && mv "$new" "$run/export" && rm -rf "$old"
    status=$?
fi
"$python" -m tonnage report "$run" || true
exit "$status"
"""


@dataclass(frozen=True)
class JobState:
    name: str
    """In Slurm's words: PENDING, RUNNING, COMPLETED ..."""
    reason: str = ""
    """Why it is so, if Slurm says why."""
    exit_status: int = 0

    @property
    def is_over(self) -> bool:
        return self.name in OVER

    def waiting(self, job: str) -> str:
        """A line for people while the workers do not run; empty while they do."""
        if self.name in ("RUNNING", "COMPLETING"):
            return ""
        return f"job {job} is {self.name.lower()}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class JobNote:
    """What ``job.json`` says."""

    job: str


def in_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def check_commands(*names: str) -> None:
    """Refuse a machine without Slurm's commands. Raises ``UserError``."""
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        raise user_error(
            found=f"no {', no '.join(missing)} on this machine",
            needed="Slurm's commands",
            change="start from a machine of the cluster, or set launch.with to local",
            where="launch.with",
        )


def batch_script(launch: SlurmLaunch, run: RunDirectory) -> str:
    """The whole job as a script for ``sbatch``."""
    path, python = run.path.absolute(), launch.python or sys.executable
    directives = [
        ("job-name", re.sub(r"[^\w.-]", "-", path.name)),
        ("output", _pattern(path / "workers" / "job.log")),
        ("open-mode", "append"),
        ("chdir", str(Path.cwd())),
        ("nodes", launch.nodes),
        ("ntasks", launch.num_workers),
        ("ntasks-per-node", launch.num_workers // launch.nodes),
        ("cpus-per-task", launch.cpus_per_worker),
        ("gres", f"gpu:{launch.gpus_per_node}" if launch.gpus_per_node else None),
        ("partition", launch.partition),
        ("account", launch.account),
        ("qos", launch.qos),
        ("time", launch.time),
        ("signal", f"USR1@{launch.save_seconds}"),
    ]
    lines = [f"#SBATCH --{name}={sbatch.quoted(str(value))}" for name, value in directives if value is not None]
    lines += ["#SBATCH --requeue"]
    lines += [f"#SBATCH {' '.join(map(sbatch.quoted, sbatch.words(option)))}" for option in launch.options]
    # Evaluated, so that nothing in it (an open quote, a backslash at its end) reaches the lines that follow.
    own = "\n".join(launch.setup)
    setup = ["", "set -e", f"eval {shlex.quote(own)}", "set +e", ""] if launch.setup else [""]
    options = shlex.join(["srun", *srun_options(launch, run)])
    return SCRIPT.format(
        directives="\n".join(lines),
        run=shlex.quote(str(path)),
        python=shlex.quote(python),
        launcher=LAUNCHER,
        setup="\n".join(setup),
        srun=f'{options} -- "$python" -m tonnage.training.worker "$run"',
    )


def srun_options(launch: SlurmLaunch, run: RunDirectory) -> list[str]:
    """How ``srun`` starts the workers: neighbouring ranks on one node, one output file for each."""
    return [
        f"--nodes={launch.nodes}",
        f"--ntasks={launch.num_workers}",
        f"--ntasks-per-node={launch.num_workers // launch.nodes}",
        f"--cpus-per-task={launch.cpus_per_worker}",
        "--distribution=block",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        f"--wait={LAST_WORKERS_SECONDS}",
        f"--output={_pattern(run.path.absolute() / 'workers')}/rank-%t.log",
    ]


def submit(launch: SlurmLaunch, run: RunDirectory) -> str:
    """Write the script, submit it, note the job in the run directory; returns its number.

    Raises:
        UserError: Slurm refuses the job; what it says is shown.
    """
    run.workers.mkdir(parents=True, exist_ok=True)
    (run.workers / "no-progress").unlink(missing_ok=True)
    run.clear_traces()
    run.job_script.write_text(batch_script(launch, run))
    run.job_script.chmod(0o755)
    result = _ask("sbatch", "--parsable", str(run.job_script))
    job = result.stdout.strip().partition(";")[0]
    if result.returncode or not job.isdecimal():
        message = re.sub(r"^sbatch: (error: )?", "", result.stderr.strip() or result.stdout.strip(), flags=re.MULTILINE)
        raise user_error(
            found=f"Slurm refuses the job: {message}",
            needed="a job that this cluster takes",
            change="change launch.partition, launch.account, launch.time or what else it speaks of",
            where="launch",
        )
    write_json(run.job, {"job": job})
    return job


def job_of(run: RunDirectory) -> str | None:
    """The job that was last submitted for a run, if it may still run: where Slurm does not answer, it may."""
    if not run.job.exists() or shutil.which("scontrol") is None:
        return None
    job = read_record(run.job, JobNote).job
    if not (job.isascii() and job.isdecimal()):
        raise user_error(f"job is {job[:60]!r}", "the number of a job", f"remove {run.job}", str(run.job))
    state = look(job)
    return job if state is None or not state.is_over else None


def look(job: str) -> JobState | None:
    """The state of a job; None where Slurm does not answer now."""
    result = _ask("scontrol", "--oneliner", "show", "job", job)
    if result.returncode:
        return JobState("GONE") if "Invalid job id" in result.stderr + result.stdout else None
    fields = dict(re.findall(r"(?:^|\s)(JobState|Reason|ExitCode)=(\S+)", result.stdout))
    status, _, number = fields.get("ExitCode", "0:0").partition(":")
    reason = fields.get("Reason", "None").strip("()")
    return JobState(
        name=fields.get("JobState", "GONE"),
        reason="" if reason == "None" else reason,
        exit_status=int(status) or (-int(number) if number.isdecimal() else 0),
    )


class SlurmJob(AtWork):
    """A job that was submitted. It goes on without whoever looks at it."""

    def __init__(self, run: RunDirectory, job: str, num_workers: int, look_seconds: float = LOOK_SECONDS) -> None:
        self._run, self._job, self._num_workers, self._look_seconds = run, job, num_workers, look_seconds
        self._looked = -math.inf
        self._asked_by: str | None = None

    def look(self) -> int | None:
        """As of ``AtWork``; what Slurm says may be some seconds old."""
        if time.monotonic() < self._looked + self._look_seconds:
            return None
        if self._asked_by is not None and not self._run.stop_asked.exists():  # its workers had only just begun
            stop(self._run, self._job, self._asked_by)
        state = look(self._job)
        self._looked = time.monotonic()
        if state is not None and state.is_over:
            return _outcome(self._run, self._job, state, self._num_workers)
        if state is not None:
            self.waits_for = state.waiting(self._job)
        return None

    def ask_to_stop(self, who: str) -> None:
        """As of ``AtWork``; one that does not run yet is cancelled."""
        if self._asked_by is None:
            stop(self._run, self._job, who)
            self._asked_by = who

    def kill(self) -> None:
        cancel(self._job)


def follow(job: SlurmJob, *, poll: Callable[[], None], tell: Callable[[str], None]) -> int:
    """Wait for the end of a job. Ending this (Ctrl-C) does not end the job, nor does a ``poll`` that fails.

    ``poll`` is called about ten times a second, ``tell`` with why the job does not run, or with nothing when it does.
    Returns and raises as ``SlurmJob.look``.
    """
    told = ""
    while (status := job.look()) is None:
        if told != job.waits_for:
            told = job.waits_for
            tell(told)
        poll()
        time.sleep(WATCH_SECONDS)
    return status


def stop(run: RunDirectory, job: str, who: str = "SIGINT") -> None:
    """Ask a job to save and end for good; one that does not run yet is cancelled."""
    state = look(job)
    run.stop_asked.write_text(who)
    if state is None or state.name == "RUNNING":  # nothing said is no reason to lose what a job has not saved
        _ask("scancel", "--signal=TERM", job)  # to its steps, the workers; the script stays, and sees what they did
    else:
        cancel(job)


def cancel(job: str) -> None:
    """End a job at once."""
    _ask("scancel", job)


@contextlib.contextmanager
def started(launch: SlurmLaunch, run: RunDirectory, *, command: list[str] | None = None) -> Iterator[AtWork]:
    """Workers that ``srun`` starts in the allocation that this process is in. ``command`` is what each executes, by
    default the training worker.

    On leaving the context none is left running.
    """
    run.clear_traces()
    command = command or [launch.python or sys.executable, "-m", "tonnage.training.worker", str(run.path.absolute())]
    log = run.workers / "job.log"
    with log.open("wb") as output:
        srun = subprocess.Popen(
            ["srun", *srun_options(launch, run), "--", *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", LAUNCHER: "slurm"},
            start_new_session=True,  # a key press on the terminal is ours to pass on
        )
        workers = SlurmWorkers(launch, run, srun)
        try:
            yield workers
        finally:
            workers.kill()


class SlurmWorkers(AtWork):
    def __init__(self, launch: SlurmLaunch, run: RunDirectory, srun: subprocess.Popen[bytes]) -> None:
        self._launch, self._run, self._srun = launch, run, srun
        self._watchdog = StallWatchdog(run, launch.num_workers, launch.timeout)
        self._is_asked = False

    def look(self) -> int | None:
        run, num_workers = self._run, self._launch.num_workers
        status = self._srun.poll()
        if status is None:
            if message := self._watchdog.stalled([None] * num_workers):
                raise WorkerFailed(message)
            return None
        if status in (DONE, STOPPED) and not run.read_errors():
            return status
        raise _failure(run, num_workers, f"srun ended with exit status {status}")

    def ask_to_stop(self, who: str) -> None:
        if self._is_asked:
            return
        self._is_asked = True
        self._run.note_stop(who)  # and if that fails, the signal tells them
        self._srun.send_signal(signal.SIGUSR1)  # srun passes this one on to its tasks

    def kill(self) -> None:
        if self._srun.poll() is None:
            self._srun.terminate()  # ends the tasks
            self._srun.wait()


def _outcome(run: RunDirectory, job: str, state: JobState, num_workers: int) -> int:
    """How a job ended. Returns and raises as ``AtWork.look``."""
    if state.name == "COMPLETED" or (state.name == "GONE" and run.export.exists()):
        return DONE
    if run.stop_asked.exists() and (state.exit_status == STOPPED or state.name == "CANCELLED"):
        if state.name == "CANCELLED":
            raise KeyboardInterrupt
        return STOPPED
    how = ENDINGS.get(state.name, f"ended with exit status {state.exit_status} ({state.name}, {state.reason})")
    raise _failure(run, num_workers, f"job {job} {how}; to go on: tonnage train --resume {run.word}")


def _failure(run: RunDirectory, num_workers: int, what: str) -> TonnageError:
    """The first worker's error, or ``what`` and the last lines of the job's own output."""
    for account in run.read_errors():
        return as_error(account, num_workers, run.worker_log(account.rank))
    return without_account(what, run.workers / "job.log")


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise WorkerFailed(f"{command[0]} is gone from this machine: {error}") from error


def _pattern(path: Path) -> str:
    """A path for Slurm, which replaces what follows a single percent sign."""
    return str(path).replace("%", "%%")
