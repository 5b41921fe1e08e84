"""Reads the place that mpirun gave to this process: Open MPI's variables, or those of Hydra (MPICH, Intel MPI).

Slurm's own PMI sets some of Hydra's variables in a step too; there Slurm's say more.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

OPEN_MPI = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
"""Like ``OPEN_MPI``: rank, number of processes, and both on this host."""
JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
"""Name of one call of mpirun, the same in all its processes: from Open MPI 5 on, and before."""
BY_HAND = "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_ADDR for each process yourself"


@dataclass(frozen=True)
class Place:
    """A process among those that one mpirun started.

    Attributes:
        rank, world_size: its number, and how many there are.
        local_rank, local_world_size: the same among those of this host.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int


def place_by_mpi(environ: Mapping[str, str], in_step: bool, met: bool) -> Place | None:
    """Returns this process's place; None if mpirun didn't start it, or if Slurm's variables say more.

    Args:
        environ: the variables.
        in_step: whether Slurm's variables name a step.
        met: whether the ranks have met already; then a place that is incomplete is none.

    Raises:
        ValueError: variables are missing or contradict one another; one line.
    """
    names = _names(environ, in_step)
    if names is None:
        return None
    if environ.get(names[1]) == "1":
        return Place(0, 1, 0, 1)
    missing = [name for name in names if name not in environ]
    if missing and met:
        return None
    if missing:
        given = " and ".join(name for name in names if name in environ)
        raise ValueError(
            f"launcher variables: {missing[0]} is not set, as if mpirun had started this process, but not all of it; "
            f"unset {given}, or {BY_HAND}"
        )
    try:
        place = Place(*(int(environ[name]) for name in names))
    except ValueError as error:
        raise ValueError(f"launcher variables: {', '.join(names)} must be whole numbers ({error})") from None
    if not (0 <= place.rank < place.world_size and 0 <= place.local_rank < place.local_world_size <= place.world_size):
        found = ", ".join(f"{name} {environ[name]}" for name in names)
        raise ValueError(f"launcher variables: {found} don't fit together; start every rank with mpirun, or {BY_HAND}")
    return place


def nowhere_to_meet(environ: Mapping[str, str], place: Place) -> ValueError:
    """Returns the error for ranks on several hosts that don't know the host of rank 0; one line."""
    given = f"is {environ['MASTER_ADDR']}" if "MASTER_ADDR" in environ else "is not set"
    return ValueError(
        f"launcher variables: MASTER_ADDR {given}, but mpirun started {place.world_size} processes, "
        f"{place.local_world_size} of them on this host; set it to rank 0's host, by mpirun -x MASTER_ADDR=HOST or "
        "mpiexec -genv MASTER_ADDR HOST"
    )


def _names(environ: Mapping[str, str], in_step: bool) -> tuple[str, ...] | None:
    """Returns the names under which mpirun gave a place; None if there is none, or only one that Slurm gave."""
    if any(name in environ for name in OPEN_MPI[:2]):
        return OPEN_MPI
    found = any(name in environ for name in HYDRA[:2])
    return HYDRA if found and (HYDRA[2] in environ or not in_step) else None


def job_number(environ: Mapping[str, str]) -> int | None:
    """Derives a number from the name of this mpirun, the same in all its processes; None if it has no name."""
    name = next((environ[name] for name in JOB if name in environ), None)
    return None if name is None else zlib.crc32(name.encode(errors="surrogateescape"))
