"""The job script does the right thing after every end of its workers; what Slurm says becomes what people read.

The script is run by bash, with programs that stand in for Slurm's. ``test_slurm_cluster.py`` has the real one.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostile.strings import CANARY, LINES, SHELL, inside, recorded, recorder, shellcheck
from tonnage.config import SlurmLaunch, sbatch
from tonnage.errors import UserError, WorkerFailed
from tonnage.files.writing import write_json
from tonnage.launch import slurm
from tonnage.launch.elsewhere import refuse_while_in_queue
from tonnage.launch.watch import DONE, STOPPED, to_their_end
from tonnage.rundir.directory import RunDirectory


def launch(**fields: object) -> SlurmLaunch:
    return SlurmLaunch.model_validate({"with": "slurm", "workers": 4, "nodes": 2, **fields})


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "a run")
    run.workers.mkdir(parents=True)
    return run


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of programs that are found first; each notes how it was called in ``calls``."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    return directory


def program(programs: Path, name: str, body: str = "") -> None:
    path = programs / name
    path.write_text(f'#!/bin/bash\necho {name} "$@" >> {shlex.quote(str(programs / "calls"))}\n{body}\n')
    path.chmod(0o755)


def calls(programs: Path) -> list[str]:
    path = programs / "calls"
    return path.read_text().splitlines() if path.exists() else []


def test_the_job_asks_for_what_the_config_says(run: RunDirectory) -> None:
    section = launch(
        cpus_per_worker=6, gpus_per_node=2, partition="gpu", account="me", qos="low", time="1-00:00:00",
        save_seconds=300, options=("--mem=64G", "--constraint=a100"), setup=("module load cuda",),
    )  # fmt: skip
    script = slurm.batch_script(section, run)
    directives = [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "--job-name=a-run", f'--output="{run.workers}/job.log"', "--open-mode=append", f"--chdir={Path.cwd()}",
        "--nodes=2", "--ntasks=4", "--ntasks-per-node=2", "--cpus-per-task=6", "--gres=gpu:2", "--partition=gpu",
        "--account=me", "--qos=low", "--time=1-00:00:00", "--signal=USR1@300", "--requeue", "--mem=64G",
        "--constraint=a100",
    ]  # fmt: skip
    assert script.index("set -e\neval 'module load cuda'\nset +e") < script.index("srun ")
    assert "--cpus-per-task=6 " in script.partition("\nsrun ")[2]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def worked(run: RunDirectory, programs: Path, status: int, also: str = "") -> tuple[int, list[str]]:
    """The script's exit status and the calls it made, if its workers end with ``status`` having done ``also``."""
    (programs / "calls").unlink(missing_ok=True)
    program(programs, "srun", f"cd {shlex.quote(str(run.path))}; {also}\nexit {status}")
    program(programs, "scontrol")
    program(programs, "python", 'mkdir -p "${@: -1}"')
    script = slurm.batch_script(launch(python=str(programs / "python")), run)
    result = subprocess.run(["bash"], input=script, text=True, check=False, capture_output=True)
    return result.returncode, [call for call in calls(programs) if not call.startswith("srun")]


SAVED = "mkdir -p checkpoints/step-{0:08d}; touch checkpoints/step-{0:08d}/COMPLETE"
REQUEUED = (0, ["scontrol requeue 12"])


def test_a_finished_run_is_exported_and_not_queued_again(run: RunDirectory, programs: Path) -> None:
    run.export.mkdir()
    (run.export / "of-an-earlier-part").touch()
    status, made = worked(run, programs, 0, SAVED.format(5))
    assert status == 0
    assert made == [
        f"python -m tonnage export {run.path} {run.path}/.export",
        f"python -m tonnage report {run.path}",
    ]
    assert list(run.export.iterdir()) == []


def test_a_stop_with_progress_is_queued_again(run: RunDirectory, programs: Path) -> None:
    assert worked(run, programs, 3, SAVED.format(5)) == REQUEUED
    assert worked(run, programs, 3, SAVED.format(9)) == REQUEUED


def test_a_copy_of_a_checkpoint_under_another_name_is_none(run: RunDirectory, programs: Path) -> None:
    """Names as ``step-best`` sort behind those of all steps."""
    copied = f"{SAVED.format(5)}; cp -r checkpoints/step-00000005 checkpoints/step-best"
    assert worked(run, programs, 3, copied) == REQUEUED
    for step in (6, 7, 8):
        assert worked(run, programs, 3, SAVED.format(step)) == REQUEUED


def test_stops_without_progress_end_it(run: RunDirectory, programs: Path) -> None:
    assert worked(run, programs, 3) == REQUEUED
    assert worked(run, programs, 3) == (3, [])
    assert worked(run, programs, 3, SAVED.format(5)) == REQUEUED
    assert worked(run, programs, 3) == REQUEUED
    assert worked(run, programs, 3, SAVED.format(6)) == REQUEUED
    assert worked(run, programs, 3) == REQUEUED


@pytest.mark.parametrize(
    ("status", "also"),
    [
        (1, SAVED.format(5)),
        (2, ""),
        (143, SAVED.format(5)),
        (3, f"{SAVED.format(5)}; touch workers/stop-asked"),
        (3, f"{SAVED.format(5)}; touch workers/rank-1.error.json"),
    ],
)
def test_what_is_not_queued_again(run: RunDirectory, programs: Path, status: int, also: str) -> None:
    assert worked(run, programs, status, also) == (status, [f"python -m tonnage report {run.path}"])


def test_setup_that_fails_ends_the_job(run: RunDirectory, programs: Path) -> None:
    program(programs, "srun")
    script = slurm.batch_script(launch(setup=("false",)), run)
    assert subprocess.run(["bash"], input=script, text=True, check=False).returncode == 1
    assert calls(programs) == []


def test_a_job_that_slurm_refuses(run: RunDirectory, programs: Path) -> None:
    program(programs, "sbatch", "echo 'sbatch: error: invalid partition specified: nowhere' >&2; exit 1")
    with pytest.raises(UserError, match="refuses the job: invalid partition specified: nowhere"):
        slurm.submit(launch(), run)
    assert not run.job.exists()


def test_a_submitted_job_is_known_until_it_is_over(run: RunDirectory, programs: Path) -> None:
    program(programs, "sbatch", "echo '77;cluster'")
    assert slurm.submit(launch(), run) == "77"
    program(programs, "scontrol", "echo 'JobId=77 JobName=a JobState=PENDING Reason=Resources ExitCode=0:0'")
    assert slurm.job_of(run) == "77"
    program(programs, "scontrol", "echo 'JobId=77 JobState=COMPLETED Reason=None ExitCode=0:0'")
    assert slurm.job_of(run) is None
    program(programs, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert slurm.job_of(run) is None
    program(programs, "scontrol", "echo 'Unable to contact slurm controller (connect failure)' >&2; exit 1")
    assert slurm.job_of(run) == "77"
    with pytest.raises(UserError, match="does not answer whether job 77 of this run is over"):
        refuse_while_in_queue(run)


def test_a_machine_without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no sbatch, no scontrol on this machine"):
        slurm.check_commands("sbatch", "scontrol")


def followed(run: RunDirectory, programs: Path, *states: str) -> tuple[int, list[str]]:
    """What following a job gives that is in these states one after another, and what was told."""
    (programs / "states").write_text("".join(f"{state}\n" for state in states))
    body = f"cd {shlex.quote(str(programs))}; head -n 1 states; sed -i 1d states"
    program(programs, "scontrol", body)
    told: list[str] = []
    status = slurm.follow(slurm.SlurmJob(run, "12", 4, look_seconds=0.01), poll=lambda: None, tell=told.append)
    return status, told


PENDING = "JobState=PENDING Reason=Resources ExitCode=0:0"
RUNNING = "JobState=RUNNING Reason=None ExitCode=0:0"


def test_a_job_is_followed_through_the_queue_and_back(run: RunDirectory, programs: Path) -> None:
    again = "JobState=PENDING Reason=BeginTime ExitCode=0:0"
    status, told = followed(run, programs, PENDING, RUNNING, again, RUNNING, "JobState=COMPLETED ExitCode=0:0")
    assert status == DONE
    assert told == ["job 12 is pending: Resources", "", "job 12 is pending: BeginTime", ""]


def test_a_job_that_was_asked_to_stop(run: RunDirectory, programs: Path) -> None:
    run.stop_asked.touch()
    assert followed(run, programs, RUNNING, "JobState=FAILED Reason=NonZeroExitCode ExitCode=3:0")[0] == STOPPED
    with pytest.raises(KeyboardInterrupt):
        followed(run, programs, "JobState=CANCELLED ExitCode=0:15")


def test_a_failed_job_shows_the_first_worker_s_error(run: RunDirectory, programs: Path) -> None:
    run.write_error(1, ZeroDivisionError("the cause"), 1)
    run.write_error(0, ConnectionError("lost a peer"), 1)
    with pytest.raises(WorkerFailed, match=r"worker 1 \(of 4\) failed: ZeroDivisionError: the cause"):
        followed(run, programs, "JobState=FAILED Reason=NonZeroExitCode ExitCode=1:0")


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("JobState=CANCELLED Reason=None ExitCode=0:15", "was cancelled"),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:15", "launch.save_seconds"),
        ("JobState=FAILED Reason=NonZeroExitCode ExitCode=127:0", "exit status 127"),
        ("JobState=NODE_FAIL Reason=None ExitCode=0:0", "lost a node"),
    ],
)
def test_a_job_that_ended_otherwise(run: RunDirectory, programs: Path, state: str, expected: str) -> None:
    (run.workers / "job.log").write_text("module: command not found\n")
    with pytest.raises(WorkerFailed, match=expected) as caught:
        followed(run, programs, state)
    assert f"tonnage train --resume {run.word}" in str(caught.value)
    assert "module: command not found" in str(caught.value)


def test_a_controller_that_does_not_answer_is_asked_again(run: RunDirectory, programs: Path) -> None:
    program(programs, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    assert slurm.look("12") is None


@pytest.mark.parametrize(
    ("state", "expected"),
    [(RUNNING, "scancel --signal=TERM 12"), (PENDING, "scancel 12")],
)
def test_stopping_saves_what_runs_and_cancels_what_waits(
    run: RunDirectory, programs: Path, state: str, expected: str
) -> None:
    program(programs, "scontrol", f"echo {state}")
    program(programs, "scancel")
    slurm.stop(run, "12")
    assert calls(programs)[-1] == expected
    assert run.stop_asked.read_text() == "SIGINT"


def test_a_job_of_which_slurm_says_nothing_is_not_cancelled(run: RunDirectory, programs: Path) -> None:
    """It may be at work, and would lose what it has not saved."""
    program(programs, "scontrol", "echo 'Unable to contact slurm controller' >&2; exit 1")
    program(programs, "scancel")
    slurm.stop(run, "12")
    assert calls(programs)[-1] == "scancel --signal=TERM 12"


@pytest.mark.parametrize("status", [DONE, STOPPED])
def test_inside_an_allocation_srun_runs_the_workers(run: RunDirectory, programs: Path, status: int) -> None:
    program(programs, "srun", f"exit {status}")
    assert slurm.in_allocation()
    assert to_their_end(slurm.started(launch(), run)) == status
    (call,) = calls(programs)
    assert call.startswith("srun --nodes=2 --ntasks=4 --ntasks-per-node=2 ")
    assert call.endswith(f"-m tonnage.training.worker {run.path}")


def test_a_failure_inside_an_allocation(run: RunDirectory, programs: Path) -> None:
    program(programs, "srun", "echo 'srun: error: Unable to create step' >&2; exit 1")
    with pytest.raises(WorkerFailed, match=r"exit status 1(.|\n)*Unable to create step"):
        to_their_end(slurm.started(launch(), run))


def test_a_job_in_the_queue_keeps_a_second_one_out(run: RunDirectory, programs: Path) -> None:
    from tonnage.launch.elsewhere import refuse_while_in_queue

    refuse_while_in_queue(run)
    write_json(run.job, {"job": "12"})
    program(programs, "scontrol", f"echo {RUNNING}")
    with pytest.raises(UserError, match="tonnage follow"):
        refuse_while_in_queue(run)


def as_sbatch_reads(line: str) -> list[str]:
    """The words of a line, by the letters of ``_get_argument`` in Slurm's ``src/sbatch/opt.c``."""
    found, word, quote, escaped, begun = [], "", "", False, False
    for letter in line:
        if escaped:
            word, escaped, begun = word + letter, False, True
        elif letter == "\\":
            escaped = True
        elif quote and letter == quote:
            quote = ""
        elif not quote and letter in "\"'":
            quote, begun = letter, True
        elif not quote and letter == "#":
            break
        elif not quote and letter in " \t\n\v\f\r":
            found += [word] * begun
            word, begun = "", False
        else:
            word, begun = word + letter, True
    assert not quote
    return found + [word] * begun


NAMES = st.one_of(
    st.sampled_from(SHELL), st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=20)
)
PLAIN_NAMES = NAMES.filter(lambda name: sbatch.fits_on_a_line(name) and name not in (".", ".."))
PATH_NAMES = PLAIN_NAMES.filter(lambda name: "\\" not in name and len(name.encode()) < 150)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(PLAIN_NAMES, PLAIN_NAMES, PATH_NAMES)
def test_names_arrive_at_sbatch_as_they_are(tmp_path: Path, partition: str, comment: str, directory: str) -> None:
    run = RunDirectory(tmp_path / directory)
    option = f"--comment={sbatch.quoted(comment)}"
    section = launch(partition=partition, account=partition, qos=partition, options=(option,), setup=("true",))
    script = slurm.batch_script(section, run)
    lines = [line.removeprefix("#SBATCH ") for line in script.split("\n") if line.startswith("#SBATCH ")]
    assert lines == script.split("\n")[1 : len(lines) + 1] or all(
        "#SBATCH" in one for one in script.split("\n")[1 : len(lines) + 1]
    )
    words = [as_sbatch_reads(line) for line in lines]
    assert all(len(found) == 1 for found in words)
    said = {found[0].partition("=")[0]: found[0].partition("=")[2] for found in words}
    assert (said["--partition"], said["--account"], said["--qos"]) == (partition, partition, partition)
    assert said["--comment"] == comment
    assert said["--output"].replace("%%", "%") == str(run.workers / "job.log")
    assert said["--output"].replace("%%", "").count("%") == 0


@settings(max_examples=40, deadline=None)
@given(PATH_NAMES, st.one_of(st.sampled_from([*SHELL, *LINES]), NAMES).filter(lambda name: len(name.encode()) < 150))
def test_names_arrive_at_the_workers_and_nothing_else_runs(directory: str, program: str) -> None:
    with TemporaryDirectory() as folder:
        here, stubs = Path(folder) / "here", Path(folder) / "stubs"
        run, python = RunDirectory(here / f"run {directory}"), stubs / f"python{program}"
        run.workers.mkdir(parents=True)
        for path in (stubs / "srun", stubs / "scontrol", python):
            recorder(path, 'mkdir -p "${@: -1}"' if path == python else "")
        script = slurm.batch_script(launch(python=str(python), setup=("value='one'", "value=${value}two")), run)
        environment = os.environ | {"PATH": f"{stubs}:{os.environ['PATH']}", "SLURM_JOB_ID": "12"}
        with inside(here):
            subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True)
        words = recorded(stubs / "srun")
        assert words[words.index("--") + 1 :] == [str(python), "-m", "tonnage.training.worker", str(run.path)]
        assert words[words.index("--") - 1] == f"--output={str(run.workers).replace('%', '%%')}/rank-%t.log"
        assert recorded(python)[-2:] == ["report", str(run.path)]
        assert run.export.is_dir()
        assert list(here.iterdir()) == [run.path]
        assert not list(Path(folder).rglob(CANARY))


@pytest.mark.parametrize(
    "setup",
    [
        "echo 'open",
        'echo "open',
        "echo a \\",
        "cat <<END",
        "if true; then",
        "(",
        "f() {",
        "# only a comment",
        "exit 5",
        "return 5",
    ],
)
def test_setup_stays_what_it_is(run: RunDirectory, programs: Path, setup: str) -> None:
    """Whatever a line leaves open ends in it: what follows runs as it was written, or the job ends there."""
    for name in ("srun", "scontrol", "python"):
        recorder(programs / name, 'mkdir -p "${@: -1}"' if name == "python" else "")
    script = slurm.batch_script(launch(setup=(setup,), python=str(programs / "python")), run)
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    if result.returncode == 0:
        assert recorded(programs / "srun")[-1] == str(run.path)
        assert run.export.is_dir()
    else:
        assert not (programs / "srun.words").exists()


def test_setup_of_several_lines_is_one_text(run: RunDirectory, programs: Path) -> None:
    for name in ("srun", "python"):
        recorder(programs / name, 'mkdir -p "${@: -1}"' if name == "python" else "echo $VALUE > value")
    lines = ("if true; then", "export VALUE='a b'", "fi")
    script = slurm.batch_script(launch(setup=lines, python=str(programs / "python")), run)
    with inside(programs):
        subprocess.run(["bash", "-c", script], check=True, capture_output=True)
    assert (programs / "value").read_text() == "a b\n"


@pytest.mark.slow
def test_shellcheck_has_no_complaint(tmp_path: Path) -> None:
    for name in SHELL:
        run = RunDirectory(tmp_path / name)
        section = launch(
            partition=name, python=f"/usr/{name}", setup=("module load cuda", "source ~/venv/bin/activate")
        )
        assert shellcheck(slurm.batch_script(section, run)) == "", name
