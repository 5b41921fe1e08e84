"""Finds this process's place among the ranks.

Only it, ``host/mpi.py`` and ``host/slurm.py`` read the launchers' environment variables.

torchrun's variables (``RANK``, ``WORLD_SIZE``, …) take precedence over those of mpirun and of a Slurm step, so that
torchrun and ``lockstep train --nproc`` work inside these. mpirun's take precedence over those of the step in which it
starts its own processes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lockstep.core.host.cgroups import cpu_limit
from lockstep.core.host.mpi import HYDRA, OPEN_MPI, Place, job_number, nowhere_to_meet, place_by_mpi
from lockstep.core.host.slurm import STEP, cores_of_task, first_host, place_of_task

LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER"
MEMORY_VARIABLE, STORE_VARIABLE = "LOCKSTEP_MEMORY", "LOCKSTEP_STORE"
"""Set by our launcher for its ranks: a descriptor of memory that they share, and a file through which they meet."""
LOOPBACK_ADDRESS = "127.0.0.1"
LOOPBACK_HOSTS = (LOOPBACK_ADDRESS, "localhost", "::1")
DEFAULT_PORT = 29500
PORTS = 65536
JOB_PORTS = 4096
"""Number of the highest ports, from which job and step number pick the one of a Slurm step, and its name mpirun's."""
JOB_STRIDE = 2531
"""Distance between the ports of consecutive jobs: a golden section, which keeps those of concurrent jobs apart."""

_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
_ENDS_ALL = (STEP, OPEN_MPI[0], HYDRA[0])
"""Set by srun and mpirun, which end all ranks if one exits with another status than 0."""
_LAUNCHERS = ("RANK", "WORLD_SIZE", LAUNCHER_VARIABLE, MEMORY_VARIABLE, STORE_VARIABLE, STEP, *OPEN_MPI, *HYDRA)


@dataclass(frozen=True)
class Topology:
    """This process's place in the run.

    Attributes:
        rank: global rank, ``0 … world_size-1``; in the JAX engine, whose ranks are devices, that of the process.
        world_size: number of ranks; in the JAX engine of processes.
        local_rank: index among the ranks of this host; picks the GPU ``cuda:{local_rank}``.
        local_world_size: ranks on this host.
        launched: whether a launcher (torchrun, mpirun, srun, ``lockstep train --nproc``, coordinator flags) started
            this process as one of its ranks.
        master_addr: host where the ranks meet, rank 0's; loopback unless a launcher says otherwise.
        master_port: where on that host.
        agent_store: whether the launcher itself listens on that port and holds PyTorch's store.
        starts_again: whether torchrun restarts all ranks after one failed, or after a host came or left.
        memory: descriptor of memory that our launcher shares among the ranks of this host.
        store_file: file of our launcher through which ranks can meet; only this user can read it.
        restarts: whether the launcher treats every exit status except 0 as a failure, and then restarts or ends the
            ranks: torchrun and ours do, srun doesn't.
        ends_all: whether srun or mpirun may end all ranks if one exits with another status than 0. Pods, and processes
            started by hand, are judged one by one.
        cores: CPU cores that the launcher gave to this rank alone; None if it doesn't say, and the ranks of this host
            share its cores.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    launched: bool = False
    master_addr: str = LOOPBACK_ADDRESS
    master_port: int = DEFAULT_PORT
    agent_store: bool = False
    starts_again: bool = False
    memory: int | None = None
    store_file: str | None = None
    restarts: bool = False
    ends_all: bool = False
    cores: int | None = None

    @property
    def on_one_host(self) -> bool:
        """Whether every rank runs on this host."""
        return self.local_world_size == self.world_size

    @property
    def loopback(self) -> bool:
        """Whether the ranks meet over the loopback interface; one host may have several agents of torchrun."""
        return self.master_addr in LOOPBACK_HOSTS

    @property
    def holds_store(self) -> bool:
        """Whether this process holds PyTorch's store, through which ranks meet over TCP."""
        return self.rank == 0 and not self.agent_store and self.store_file is None

    @property
    def holds_coordinator(self) -> bool:
        """Whether this process holds JAX's coordinator, at which JAX's processes meet."""
        return self.rank == 0

    @property
    def names_round(self) -> bool:
        """Whether this rank chooses the name that this start of the ranks has in a store that outlives them."""
        return self.rank == 0

    @property
    def master(self) -> str:
        """``host:port`` where rank 0 listens for the others, if no launcher does."""
        return _address(self.master_addr, self.master_port)

    @property
    def coordinator(self) -> str:
        """``host:port`` where rank 0 listens for JAX's processes; the next port if the launcher listens on its own."""
        taken = self.agent_store
        return _address(self.master_addr, self.master_port % (PORTS - 1) + 1 if taken else self.master_port)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def from_environment(environ: Mapping[str, str] = os.environ, met: bool = False) -> Topology:
    """Reads torchrun's variables, else mpirun's, else those of a Slurm step; a single rank if there are none.

    Of ranks that have ``met`` already, in a user's own process group, mpirun's variables may be incomplete, and the
    local world size may be missing.

    Raises:
        ValueError: variables are missing or contradict one another.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        return _from_torchrun(environ, met)
    place = place_by_mpi(environ, STEP in environ, met)
    if place is not None:
        return _from_mpi(environ, place, met)
    return _from_slurm(environ) if STEP in environ else Topology()


def from_flags(
    coordinator: str, num_processes: int, process_id: int, environ: Mapping[str, str] = os.environ
) -> Topology:
    """Returns the place of a process that was started by hand and given its place on the command line.

    If ``coordinator`` is on loopback, all processes run on this host; else each has its own host.

    Raises:
        ValueError: a launcher started this process too, or the port is invalid.
    """
    if "RANK" in environ or "WORLD_SIZE" in environ:
        raise ValueError(
            f"coordinator: {coordinator}, but a launcher started this process too (RANK, WORLD_SIZE); leave one out"
        )
    host, _, port = coordinator.rpartition(":")
    host = host.strip("[]")
    if not 0 < int(port) < PORTS:
        raise ValueError(f"coordinator: {coordinator}: ports go from 1 to {PORTS - 1}")
    here = (process_id, num_processes) if host in LOOPBACK_HOSTS else (0, 1)
    place = Topology(process_id, num_processes, *here, launched=True, master_addr=host, master_port=int(port))
    return replace(place, ends_all=_ends_all(environ), cores=cores_of_task(environ, num_processes))


def _from_torchrun(environ: Mapping[str, str], met: bool) -> Topology:
    for name in ("RANK", "WORLD_SIZE"):
        if name not in environ:
            raise ValueError(f"launcher variables: {name} is not set but the other of RANK and WORLD_SIZE is; unset it")
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    try:
        given = {name: int(environ[name]) for name in names if name in environ}
    except ValueError as error:
        raise ValueError(
            f"launcher variables: RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error})"
        ) from None
    rank, world_size = given["RANK"], given["WORLD_SIZE"]
    here = _places_here(environ, rank, world_size, met)
    local_rank, local_world_size = given.get("LOCAL_RANK", here[0]), given.get("LOCAL_WORLD_SIZE", here[1])
    if not (0 <= rank < world_size and 0 <= local_rank < local_world_size <= world_size):
        raise ValueError(
            f"launcher variables: RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of "
            f"LOCAL_WORLD_SIZE {local_world_size} don't fit together; unset them or start through torchrun"
        )
    store = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master, port = _master(environ, LOOPBACK_ADDRESS, DEFAULT_PORT, alone=world_size == 1 and not store)
    torchrun, ours = started_by_torchrun(environ), started_by_lockstep(environ)
    return Topology(
        rank,
        world_size,
        local_rank,
        local_world_size,
        launched=True,
        master_addr=master,
        master_port=port,
        agent_store=store,
        starts_again=torchrun and environ[_RESTARTS] != "0",
        memory=int(environ[MEMORY_VARIABLE]) if MEMORY_VARIABLE in environ else None,
        store_file=environ.get(STORE_VARIABLE),
        restarts=torchrun or ours,
        ends_all=_ends_all(environ) and not (torchrun or ours),
        cores=None if torchrun or ours else cores_of_task(environ, world_size),
    )


def _ends_all(environ: Mapping[str, str]) -> bool:
    return any(name in environ for name in _ENDS_ALL)


def _places_here(environ: Mapping[str, str], rank: int, world_size: int, met: bool) -> tuple[int, int]:
    """Finds local rank and local world size for variables that may leave them out, as a script's own ``export RANK=…``.

    If srun or mpirun started the ranks, their variables know. Else this is a guess: ranks that meet on loopback, or
    that have the local world size, are all here; others have their own hosts, as the pods of a Kubernetes job have.

    Raises:
        ValueError: only the local rank is given, ranks may be on several hosts, and they haven't ``met``.
    """
    for by_slurm in (True, False) if STEP in environ else (False,):
        with contextlib.suppress(ValueError):
            place = place_of_task(environ) if by_slurm else place_by_mpi(environ, STEP in environ, True)
            if place is not None and (place.rank, place.world_size) == (rank, world_size):
                return place.local_rank, place.local_world_size
    master = environ.get("MASTER_ADDR", LOOPBACK_ADDRESS)
    if master.strip("[]") in LOOPBACK_HOSTS or "LOCAL_WORLD_SIZE" in environ:
        return rank, world_size
    if "LOCAL_RANK" in environ and world_size > 1:
        if met:  # what is left to know isn't worth an error
            return rank, world_size
        raise ValueError(
            f"launcher variables: LOCAL_RANK {environ['LOCAL_RANK']} is set without LOCAL_WORLD_SIZE, and MASTER_ADDR "
            f"{master!r} may be another host's; set LOCAL_WORLD_SIZE to the number of ranks on this host"
        )
    return 0, 1


def _master(environ: Mapping[str, str], host: str, port: int, alone: bool = False) -> tuple[str, int]:
    """Returns where the ranks meet: ``MASTER_ADDR`` and ``MASTER_PORT``, else the given host and port.

    A rank that is ``alone``, with nobody to meet, has the given host: that of ``MASTER_ADDR`` may not be there.
    """
    given = environ.get("MASTER_PORT", str(port))
    if not given.isdecimal() or not 0 < int(given) < PORTS:
        raise ValueError(f"launcher variables: MASTER_PORT {given!r} is no port (1 to {PORTS - 1})")
    named = host if alone else environ.get("MASTER_ADDR", host)
    address = named.removeprefix("[").removesuffix("]")  # as IPv6 stands before a port
    if not address.strip():
        raise ValueError(
            f"launcher variables: MASTER_ADDR {named!r} is no host's name; set it to the address of rank 0's host, or "
            "unset it if all ranks are on this host"
        )
    return address, int(given)


def _from_mpi(environ: Mapping[str, str], place: Place, met: bool) -> Topology:
    """Returns the place of a process of mpirun; a single one is no rank of a launcher, so that ``--nproc`` works."""
    if place.world_size == 1:
        return Topology()
    here, job = place.local_world_size, job_number(environ)
    if not met and here < place.world_size and environ.get("MASTER_ADDR", LOOPBACK_ADDRESS) in LOOPBACK_HOSTS:
        raise nowhere_to_meet(environ, place)
    port = DEFAULT_PORT if job is None else PORTS - JOB_PORTS + job % JOB_PORTS
    master, port = _master(environ, LOOPBACK_ADDRESS, port)
    return Topology(place.rank, place.world_size, place.local_rank, here, True, master, port, ends_all=True)


# --- Slurm ------------------------------------------------------------------------------------------------------


def _from_slurm(environ: Mapping[str, str]) -> Topology:
    """Returns the place of a Slurm task; a step of one task is no launcher, so that ``--nproc`` works in it."""
    place = place_of_task(environ)
    if place is None:
        return Topology()
    host = LOOPBACK_ADDRESS if place.local_world_size == place.world_size else first_host(environ[STEP])
    master, port = _master(environ, host, _slurm_port(environ))
    found = Topology(place.rank, place.world_size, place.local_rank, place.local_world_size, True, master, port)
    return replace(found, ends_all=True, cores=cores_of_task(environ, place.world_size))


def _slurm_port(environ: Mapping[str, str]) -> int:
    """Derives a port from job and step, the same in every task: the tasks can't agree on one before they meet."""
    given = [environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    job, number = (int(n) if n.isdecimal() else 0 for n in given)
    return PORTS - JOB_PORTS + (JOB_STRIDE * job + number) % JOB_PORTS


# --- this process -----------------------------------------------------------------------------------------------


def without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment for a process that starts its own run, without this process's launcher variables."""
    return {name: value for name, value in environ.items() if name not in _LAUNCHERS}


def error_file(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the file in which the launcher expects a failing rank's message, or None."""
    path = environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path) if path else None


def started_by_lockstep(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether ``lockstep train --nproc`` started this rank and shows a failing rank's message itself."""
    return LAUNCHER_VARIABLE in environ


def started_by_torchrun(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun's agent, and not our launcher, started this process."""
    return _RESTARTS in environ and not started_by_lockstep(environ)


def available_cores() -> int:
    """Returns the CPU cores that this process may use: those it is bound to, up to its container's limit."""
    cores, limit = bound_cores(), cpu_limit()
    return cores if limit is None else min(cores, limit)


def bound_cores() -> int:
    """Returns the CPU cores that this process is bound to, whatever its container's limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
