"""Faults, for real: each ends in a clear error and leaves an earlier checkpoint from which the run goes on to its end.

A full disk and a disk that turns read-only are small file systems of their own, which takes the right to mount.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

from forked import train
from mounts import Disk, mounted
from tiny import alpaca_rows, llama_config, write_model, write_rows
from tonnage.checkpoint.description import ExportForm
from tonnage.checkpoint.export import Start, export
from tonnage.checkpoint.save import Cursor, Saver, checkpoint_path, complete_checkpoints, step_of
from tonnage.decide.decision import decide
from tonnage.decide.resumption import begin_again, decide_resumption
from tonnage.decide.written import write_run
from tonnage.errors import UserError, WorkerFailed
from tonnage.launch.local import run_workers
from tonnage.offload.residency import OPTIMIZER
from tonnage.parallel.world import join_world
from tonnage.planning.space import checkpoint_bytes, resting_bytes
from tonnage.planning.states import states
from tonnage.rundir.directory import RunDirectory

STEPS, EVERY = 16, 4
TIMED = ("step_seconds", "core_wait", "tokens_per_second", "memory")
QUIET = Console(quiet=True)


def steps(run: RunDirectory) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{k: v for k, v in record.items() if k not in TIMED} for record in records if "loss" in record]


def written(folder: Path, output: Path, every: int = EVERY) -> RunDirectory:
    config = {
        "model": str(folder / "model"),
        "data": {
            "train": str(folder / "rows.jsonl"),
            "max_length": 128,
            "template": "plain",
            "cache": str(folder / "cache"),
        },
        "batch": {"sequences": 4},
        "steps": STEPS,
        "optimizer": {"lr": 3e-3},
        "checkpoint": {"every": every, "keep": 1},
        "launch": {"workers": 2, "threads": 1},
        "track": [],
        "output": str(output),
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    decision = decide(str(folder / "config.yaml"), [])
    run = RunDirectory(output)
    write_run(run, decision)
    return run


def go_on(run: RunDirectory, step: int | None = None, command: list[str] | None = None) -> None:
    resumption = decide_resumption(run, [], step=step, allow_changes=False)
    begin_again(run, resumption)
    assert run_workers(run, 2, 1, command=command) == 0


def saved_steps(run: RunDirectory) -> list[int]:
    return [step_of(path) for path in complete_checkpoints(run.checkpoints)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    write_model(folder / "model", llama_config(num_hidden_layers=1))
    write_rows(folder / "rows.jsonl", alpaca_rows(100))
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[dict[str, Any]]:
    """The steps of a run without a fault."""
    run = written(folder, folder / "whole", every=0)
    train((2, [run]))
    return steps(run)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with mounted(tmp_path / "run" / "checkpoints") as disk:
        yield disk


READ_ONLY = """
import subprocess, sys
from tonnage.checkpoint import save
from tonnage.training.worker import main

prune = save.prune

def turning(*arguments, **named):
    prune(*arguments, **named)
    subprocess.run(["mount", "-o", "remount,ro", sys.argv[2]], check=True)

save.prune = turning
sys.exit(main(sys.argv[1]))
"""


@pytest.mark.matrix
@pytest.mark.privileged
def test_a_full_disk_and_one_that_turns_read_only(
    folder: Path, tmp_path: Path, disk: Disk, whole: list[dict[str, Any]]
) -> None:
    run = written(folder, tmp_path / "run")
    with pytest.raises(UserError, match=r"No space left on device \(.* are free\)(.|\n)*needed: (.|\n)*--resume"):
        run_workers(run, 2, 1)  # one checkpoint has room, two have not
    assert saved_steps(run) == [EVERY]
    assert disk.change("size=16m")

    turning = [sys.executable, "-c", READ_ONLY, str(run.path), str(disk.path)]
    with pytest.raises(UserError, match=r"Read-only file system(.|\n)*write access(.|\n)*--resume RUN"):
        go_on(run, command=turning)
    assert disk.change("rw")
    assert saved_steps(run) == [2 * EVERY]
    go_on(run)
    assert steps(run) == whole


@pytest.mark.matrix
@pytest.mark.privileged
def test_a_disk_of_the_size_that_is_counted_is_enough(tmp_path: Path, disk: Disk) -> None:
    write_model(tmp_path / "model", llama_config(vocab_size=16384, hidden_size=192, tie_word_embeddings=False))
    write_rows(tmp_path / "rows.jsonl", alpaca_rows(20))
    data = {"train": str(tmp_path / "rows.jsonl"), "max_length": 128, "template": "plain", "over_length": "truncate"}
    config = {
        "model": str(tmp_path / "model"),
        "data": data | {"cache": str(tmp_path / "cache"), "max_loss": 1.0},
        "batch": {"sequences": 1},
        "steps": 2,
        "precision": "bf16",
        "memory": {"optimizer_tier": "disk", "gradient_tier": "disk", "parameter_tier": "disk", "moments": "fp32"},
        "track": [],
        "output": str(disk.path / "run"),
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert disk.change("size=1G")  # for the plan, which looks at what is free
    decision = decide(str(tmp_path / "config.yaml"), [])
    counted = resting_bytes(decision.plan) + checkpoint_bytes(decision.plan)
    whole_tiles = 2 * OPTIMIZER["disk"].unit_bytes  # of the state, and of the tile that is not full
    assert states(decision.plan.layout, decision.plan.model).optimizer > whole_tiles
    assert disk.change(f"size={counted + whole_tiles}")
    run = RunDirectory(disk.path / "run")
    write_run(run, decision)
    assert run_workers(run, 1, 1) == 0
    assert saved_steps(run) == [2]


MORTAL = """
import os, signal, sys
from tonnage.checkpoint import save
from tonnage.offload import files
from tonnage.training.worker import main

files.STREAM_BYTES = 4096  # so that a part of a small file is on disk
write_file = save.write_file

def dying(path, parts, _):
    count = 0
    def told(num_bytes):
        nonlocal count
        count += 1
        if count == 5 and path.parent.name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)
    return write_file(path, parts, told)

if os.environ["RANK"] == "1":
    save.write_file = dying
sys.exit(main(sys.argv[1]))
"""


@pytest.mark.privileged
def test_an_export_to_a_full_disk(folder: Path, tmp_path: Path, disk: Disk) -> None:
    run = written(folder, tmp_path / "run")
    with join_world() as world:
        model = LlamaForCausalLM(llama_config(vocab_size=8192))
        Saver(tmp_path, 1, world).save(Cursor(1, 8, 1), dict(model.named_parameters()), {}, {}, wait=True)
    with pytest.raises(UserError, match=r"the export could not be written: No space left(.|\n)*bytes for the weights"):
        export(
            checkpoint_path(tmp_path, 1),
            disk.path / "out",
            ExportForm(llama_config(vocab_size=8192), run.tokenizer, [], torch.float32),
            Start(tmp_path),
        )
    assert list(disk.path.iterdir()) == []


@pytest.mark.slow
def test_a_rank_killed_in_a_save_and_a_bit_flipped_later(
    folder: Path, tmp_path: Path, whole: list[dict[str, Any]]
) -> None:
    run = written(folder, tmp_path / "run")
    interrupted = checkpoint_path(run.checkpoints, 3 * EVERY)
    command = [sys.executable, "-c", MORTAL, str(run.path), interrupted.name]
    with pytest.raises(WorkerFailed, match=r"worker 1 \(of 2\) was killed by SIGKILL"):
        run_workers(run, 2, 1, command=command)
    assert saved_steps(run) == [2 * EVERY]
    assert interrupted.exists()
    half = next(interrupted.glob("shard-00002*")).stat().st_size
    whole_size = next(checkpoint_path(run.checkpoints, 2 * EVERY).glob("shard-00002*")).stat().st_size
    assert 0 < half < whole_size

    resumption = decide_resumption(run, ["checkpoint.keep=9"], step=None, allow_changes=False)
    begin_again(run, resumption)
    write_run(run, resumption.decision)
    assert run_workers(run, 2, 1) == 0
    assert f"removing {interrupted.name}, a save that was interrupted" in run.log.read_text()
    assert steps(run) == whole
    assert saved_steps(run) == [2 * EVERY, 3 * EVERY, STEPS]

    victim = next(checkpoint_path(run.checkpoints, STEPS).glob("shard-00002*"))
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 16
    victim.write_bytes(content)
    with pytest.raises(UserError, match=rf"{victim.name}: a damaged checkpoint(.|\n)*--from {3 * EVERY}"):
        go_on(run)
    go_on(run, step=3 * EVERY)
    assert steps(run) == whole


WITHOUT_RIGHTS = """
import os, sys
from pathlib import Path
import torch
from tonnage.checkpoint.save import Cursor, Saver
from tonnage.errors import UserError
from tonnage.parallel.world import join_world
with join_world() as world:
    if os.geteuid() == 0:  # who may do everything
        os.setgroups([])
        os.setuid(65534)
    saver = Saver(Path(sys.argv[1]), 1, world)
    try:
        saver.save(Cursor(2, 16, 2), {"w": torch.ones(3)}, {}, {})
        saver.wait()
    except UserError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_directory_without_write_access() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        checkpoints = Path(folder, "checkpoints")
        checkpoints.mkdir()
        checkpoints.chmod(0o555)
        command = [sys.executable, "-c", WITHOUT_RIGHTS, str(checkpoints)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
        assert (
            f"{checkpoint_path(checkpoints, 2)}: the checkpoint could not be written: Permission denied"
            in result.stdout
        )
        assert "write access" in result.stdout
        assert list(checkpoints.iterdir()) == []
