"""A Slurm of one node on this machine, for tests: munged, slurmctld and slurmd as root, all files in one directory.

    python tests/launch/slurm_cluster.py DIRECTORY     keeps it up until Ctrl-C, and says how to speak to it

Nothing outside the directory is written, and the daemons are children of this process.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel")

CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=5
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.log
SlurmdSpoolDir={directory}/spool
StateSaveLocation={directory}/state
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
KillWait=20
MinJobAge=300
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} State=UNKNOWN
PartitionName=test Nodes={host} Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES
"""


def missing() -> str:
    """Why there can be no Slurm here; empty if there can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class Cluster:
    """A context in which ``environment`` leads Slurm's commands to this cluster."""

    def __init__(self, directory: Path, cpus: int = 4) -> None:
        self.directory = directory
        self.environment = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        self._cpus = cpus
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Cluster:
        try:
            self._come_up()
        except BaseException:
            self._end_daemons()
            raise
        return self

    def _come_up(self) -> None:
        host = socket.gethostname().partition(".")[0]
        for name in ("spool", "state"):
            (self.directory / name).mkdir(parents=True)
        config = CONFIG.format(host=host, directory=self.directory, ports=_free_ports(2), cpus=self._cpus)
        (self.directory / "slurm.conf").write_text(config)
        key = self.directory / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        munge = {name: self.directory / f"munge.{name}" for name in ("socket", "pid", "log", "seed")}
        self._start(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge['socket']}",
            f"--pid-file={munge['pid']}", f"--log-file={munge['log']}", f"--seed-file={munge['seed']}",
        )  # fmt: skip
        self._wait_for(lambda: munge["socket"].exists(), "munged")
        self._start("slurmctld", "-D")
        self._start("slurmd", "-D", "-N", host)
        self._wait_for(lambda: "idle" in self.ask("sinfo", "--noheader", "--format=%t"), "an idle node")

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ask("scancel", "--signal=KILL", "--full", "--state=RUNNING", "--user=root")
        self._end_daemons()

    def _end_daemons(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def ask(self, *command: str) -> str:
        """What one of Slurm's commands prints."""
        result = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False, timeout=30)
        return result.stdout + result.stderr

    def _start(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        with (self.directory / f"{name}.out").open("wb") as output:
            self._daemons.append(
                subprocess.Popen(
                    [program, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT, start_new_session=True,
                )
            )  # fmt: skip

    def _wait_for(self, condition: object, what: str) -> None:
        assert callable(condition)
        deadline = time.monotonic() + 20
        while not condition():
            logs = "\n".join(path.read_text(errors="replace") for path in self.directory.glob("*.log"))
            assert time.monotonic() < deadline, f"no {what}:\n{logs}"
            time.sleep(0.05)


def _program(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def _free_ports(number: int) -> list[int]:
    holders = [socket.socket() for _ in range(number)]
    for holder in holders:
        holder.bind(("127.0.0.1", 0))
    ports = [int(holder.getsockname()[1]) for holder in holders]
    for holder in holders:
        holder.close()
    return ports


if __name__ == "__main__":
    with Cluster(Path(sys.argv[1]).absolute()) as cluster:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        print(f"export SLURM_CONF={cluster.environment['SLURM_CONF']}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
