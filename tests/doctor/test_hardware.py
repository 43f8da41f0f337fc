"""What is there: this machine against other sources, and machines made of files."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from doctor.machines import GIB, hardware, install_smi
from tonnage.doctor.hardware import (
    Neighbours,
    available_memory,
    device_files,
    free_device_memory,
    look,
    look_at_disk,
)


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_this_machine(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", torch.__version__.partition("+")[0] + build)
    here = look()
    assert 1 <= here.cores <= here.machine_cores <= (os.cpu_count() or 1)
    assert 0 < here.memory_bytes <= here.machine_memory_bytes
    assert here.torch.partition("+")[0] == torch.__version__.partition("+")[0]  # builds for CUDA say so in one of them
    assert len(here.devices) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert here == look()


def test_tests_see_no_gpu() -> None:
    """Where there is one, too: plans and numbers that they expect are those of processors."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert look().devices == ()


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux")
def test_memory_is_what_the_kernel_says() -> None:
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    assert look().machine_memory_bytes == int(fields["MemTotal"].split()[0]) * 1024
    assert 0 < (available_memory() or 0) < look().machine_memory_bytes


def test_looking_imports_no_torch_without_an_accelerator() -> None:
    code = "import sys; from tonnage.doctor.cache import describe_here as d; d(); sys.exit('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode
    assert found == (1 if device_files() else 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"processor": "Another"},
        {"features": ("avx2",)},
        {"cores": 4},
        {"memory_bytes": 32 * GIB},
        {"devices": ("NVIDIA H200",)},
        {"torch": "2.14.0"},
    ],
)
def test_other_hardware_has_another_fingerprint(changes: dict[str, object]) -> None:
    assert hardware(**changes).fingerprint != hardware().fingerprint


def test_a_little_memory_more_or_less_is_the_same_hardware() -> None:
    assert hardware(memory_bytes=64 * GIB - 10**7).fingerprint == hardware().fingerprint


MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:21 / /proc rw - proc proc rw
24 22 0:30 / {there} rw - xfs /dev/nvme0n1 rw
25 22 0:31 / {there}/with\\040space rw master:2 - nfs4 server:/export rw
26 24 0:32 / {there}/over rw - tmpfs first rw
27 24 0:33 / {there}/over rw - tmpfs second rw
torn line
"""


@pytest.mark.parametrize(
    ("directory", "key"),
    [
        ("", "xfs:/dev/nvme0n1"),
        ("deep/er/than/exists", "xfs:/dev/nvme0n1"),
        ("with space/x", "nfs4:server:/export"),
        ("over", "tmpfs:second"),
        ("over-not", "xfs:/dev/nvme0n1"),
        ("/", "ext4:/dev/sda1"),
    ],
)
def test_the_mount_of_a_directory(tmp_path: Path, directory: str, key: str) -> None:
    for name in ("with space/x", "over", "over-not"):
        (tmp_path / name).mkdir(parents=True)
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS.format(there=str(tmp_path.resolve())))
    assert look_at_disk(tmp_path / directory, mounts).key == key


def test_a_disk_here(tmp_path: Path) -> None:
    disk = look_at_disk(tmp_path / "not" / "there")
    assert disk.directory == str(tmp_path)
    assert disk.free_bytes == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)
    unknown = look_at_disk(tmp_path, tmp_path / "no mounts")
    assert unknown.key == f"device:{tmp_path.stat().st_dev}"
    assert not unknown.is_memory


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory")
def test_files_in_memory_are_recognised() -> None:
    assert look_at_disk(Path("/dev/shm")).is_memory


def test_device_files(tmp_path: Path) -> None:
    assert device_files(tmp_path) == []
    (tmp_path / "nvidiactl").touch()
    (tmp_path / "nvidia0").touch()
    assert device_files(tmp_path) == [str(tmp_path / "nvidiactl")]


def test_what_is_free_on_devices_is_asked_of_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert free_device_memory() == []
    install_smi(tmp_path, free_mib={"0": 24000, "1": 800, "2": 81000})
    assert free_device_memory() == [24000 << 20, 800 << 20, 81000 << 20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert free_device_memory() == [81000 << 20, 24000 << 20]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-7")  # which the tool does not know
    assert free_device_memory() == []


def test_what_others_take_of_the_processors(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    stat = tmp_path / "stat"

    def write(user: int, idle: int, waiting: int) -> None:
        lines = [f"cpu{cpu} {user} 0 0 {idle} {waiting} 0 0 0 9 9" for cpu in cpus]
        other = f"cpu{max(cpus) + 1} {user * 100} 0 0 0 0 0 0 0 0 0"
        stat.write_text("\n".join(["cpu 1 2 3 4 5 6 7 8 9 10", *lines, other]))

    write(user=1000, idle=10000, waiting=100)
    neighbours = Neighbours(stat)
    assert neighbours.share() == 0.0
    write(user=4000, idle=16000, waiting=1100)
    assert neighbours.share() == pytest.approx(0.3, abs=0.02)
    assert Neighbours(tmp_path / "none").share() == 0.0


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux")
def test_own_work_is_not_that_of_others() -> None:
    both, began = Neighbours(), os.times()
    while sum(os.times()[:2]) - sum(began[:2]) < 0.3:
        sum(range(10000))
    ticks = 0.3 * os.sysconf("SC_CLK_TCK")
    elapsed = (os.times().elapsed - began.elapsed) * len(os.sched_getaffinity(0)) * os.sysconf("SC_CLK_TCK")
    assert both.share() <= 1 - ticks / elapsed + 0.1
