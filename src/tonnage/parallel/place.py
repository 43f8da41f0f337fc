"""Which rank this process is, as whatever started it says.

Launchers of the field name the same things differently:

    torchrun, our own    RANK                  WORLD_SIZE            LOCAL_RANK                  LOCAL_WORLD_SIZE
    Open MPI             OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  OMPI_COMM_WORLD_LOCAL_RANK  ..._LOCAL_SIZE
    MPICH, Intel MPI     PMI_RANK              PMI_SIZE              MPI_LOCALRANKID             MPI_LOCALNRANKS
    Cray PALS            PMI_RANK              PMI_SIZE              PMI_LOCAL_RANK              PMI_LOCAL_SIZE
    Slurm's srun         SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_LOCALID

They are looked for in this order, because one may run inside the other: ``torchrun`` or ``mpirun`` in a task of
``srun``, never the other way round. A process that finds none of them is alone. No torch is imported here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from tonnage.errors import user_error

DEFAULT_PORT = 29500
"""Where ``MASTER_PORT`` is not given: torch's own."""


@dataclass(frozen=True)
class Place:
    """One rank among all."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Among the ranks of this machine; it chooses the device."""
    local_size: int | None = None
    """Ranks on this machine, where the launcher says so."""
    address: str = ""
    """Where rank 0 listens; empty where the launcher does not say."""
    port: int = 0
    launch: str = ""
    """The launcher's name for the launch, the same for all its ranks and for no other launch; empty where it gives
    none."""

    def announce(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Set torch's environment variables to this place."""
        values = {"RANK": self.rank, "WORLD_SIZE": self.size, "LOCAL_RANK": self.local_rank}
        environ.update({name: str(number) for name, number in values.items()})
        if self.address:
            environ.update(MASTER_ADDR=self.address, MASTER_PORT=str(self.port))


@dataclass(frozen=True)
class _Names:
    """The variables of one kind of launcher; for some of them there are several names."""

    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()


_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
_KINDS = (
    _Names("RANK", ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Names(
        "OMPI_COMM_WORLD_RANK",
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE",),
    ),
    _Names("PMI_RANK", ("PMI_SIZE",), ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"), ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE")),
    _Names(
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
        _SLURM_STEP,
    ),
)


def find_place(environ: Mapping[str, str] = os.environ) -> Place:
    """The place that the variables give this process.

    Raises:
        UserError: a launcher's variables are there in part, or contradict each other.
    """
    names = next((kind for kind in _KINDS if kind.rank in environ), None)
    if names is None:
        return Place()
    if names.rank == "PMI_RANK" and environ.get("SLURM_PROCID") == environ["PMI_RANK"]:
        slurm = _KINDS[-1]  # srun --mpi=pmi2: Slurm itself speaks PMI, and says the rest in its own words
        names = _Names("PMI_RANK", names.size, (*names.local_rank, "SLURM_LOCALID"), names.local_size, slurm.launch)
    rank, size = _number(environ, (names.rank,)), _number(environ, names.size)
    local_rank, local_size = _number(environ, names.local_rank), _number(environ, names.local_size)
    if size == 1:
        local_rank = local_rank or 0
    for value, variables in ((rank, (names.rank,)), (size, names.size), (local_rank, names.local_rank)):
        if value is None:
            raise user_error(
                found=f"{names.rank}={environ[names.rank]!r} without a number in {' or '.join(variables)}",
                needed="a rank, the number of ranks, and the rank within this machine",
                change="set RANK, WORLD_SIZE and LOCAL_RANK for every process, or start with torchrun",
                where="environment",
            )
    assert rank is not None
    assert size is not None
    assert local_rank is not None
    if not 0 <= rank < size:
        problem = f"rank {rank} of {size} ({names.rank}, {names.size[0]})"
        raise user_error(problem, f"a rank from 0 to {size - 1}", where="environment")
    address = environ.get("MASTER_ADDR", "")
    return Place(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        address=address,
        port=(_number(environ, ("MASTER_PORT",)) or DEFAULT_PORT) if address else 0,
        launch=" ".join(environ.get(name, "") for name in names.launch).strip(),
    )


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    text = next((environ[name] for name in names if name in environ), "")
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", text)  # Slurm writes 4(x2) for 4 on each of 2 nodes
    return int(match[1]) if match else None
