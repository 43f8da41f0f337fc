"""Variables of every launcher, as they set them, and what is refused."""

from __future__ import annotations

import pytest

from tonnage.errors import UserError
from tonnage.parallel.place import Place, find_place

OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "1246035969",
    "PMIX_RANK": "5",
}
SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}


def test_nobody_says_anything() -> None:
    assert find_place({"PATH": "/bin"}) == Place(0, 1, 0)


def test_torchrun() -> None:
    found = find_place(
        {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", **SLURM}
    )
    assert found == Place(3, 4, 1, 2, "a", 29500)
    environ: dict[str, str] = {}
    found.announce(environ)
    assert find_place(environ) == Place(3, 4, 1, None, "a", 29500)


def test_open_mpi_inside_slurm() -> None:
    assert find_place(OPEN_MPI | SLURM) == Place(5, 8, 1, 4, launch="1246035969")
    assert find_place(OPEN_MPI | {"MASTER_ADDR": "b", "MASTER_PORT": "1234"}).port == 1234


def test_slurm() -> None:
    assert find_place(SLURM) == Place(3, 4, 1, 2, launch="12 0")
    assert find_place(SLURM | {"SLURM_STEP_TASKS_PER_NODE": "3,1"}).local_size is None
    again = find_place(SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert again.launch == "12 0 1"


def test_pmi() -> None:
    mpich = {"PMI_RANK": "2", "PMI_SIZE": "3", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert find_place(mpich | SLURM) == Place(2, 3, 0, 1)
    by_slurm = {"PMI_RANK": "3", "PMI_SIZE": "4"} | SLURM
    assert find_place(by_slurm) == Place(3, 4, 1, launch="12 0")
    assert find_place({"PMI_RANK": "0", "PMI_SIZE": "1"}) == Place()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "1"}, "WORLD_SIZE"),
        ({"RANK": "one", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 of 2"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "MPI_LOCALRANKID or PMI_LOCAL_RANK"),
    ],
)
def test_half_a_place_is_refused(environ: dict[str, str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        find_place(environ)
