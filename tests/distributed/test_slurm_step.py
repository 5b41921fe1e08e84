"""Processes are ranks by the variables that Slurm, mpirun, a Kubernetes job or a user has set; no launcher is there."""

import re
import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CARTPOLE, GATED, Run, command, metrics_of, same, surroundings, wait_until
from free_ports import free_port

TASKS = 2


def step() -> list[dict[str, str]]:
    """Slurm's variables of each task of a step."""
    shared = {
        "SLURM_JOB_ID": str(uuid.uuid4().int % 4096),
        "SLURM_STEP_NODELIST": "node07",
        "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
        "SLURM_NTASKS": str(TASKS),
        "SLURM_NODEID": "0",
    }
    return [shared | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)} for task in range(TASKS)]


def open_mpi() -> list[dict[str, str]]:
    """Variables of each process that Open MPI's mpirun starts on one host."""
    shared = {"PMIX_NAMESPACE": f"prterun-node-{uuid.uuid4().int % 10**6}@1"}
    for name in ("SIZE", "LOCAL_SIZE"):
        shared[f"OMPI_COMM_WORLD_{name}"] = str(TASKS)
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "PMIX_RANK")
    return [shared | dict.fromkeys(names, str(rank)) for rank in range(TASKS)]


def hydra() -> list[dict[str, str]]:
    """The same of MPICH's and Intel MPI's mpiexec."""
    shared = {"PMI_SIZE": str(TASKS), "MPI_LOCALNRANKS": str(TASKS), "MASTER_PORT": str(free_port())}
    return [shared | dict.fromkeys(("PMI_RANK", "MPI_LOCALRANKID"), str(rank)) for rank in range(TASKS)]


def by_hand(ranks: int) -> list[dict[str, str]]:
    """Variables of each process where nothing but rank, world size and the place to meet is set."""
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": str(rank)} for rank in range(ranks)]


def tasks(
    directory: Path,
    places: list[dict[str, str]],
    *words: Any,
    during: Callable[..., None] | None = None,
    **more: str,
) -> list[Any]:
    """Exit status, output and errors of ``lockstep train WORDS`` at each place; ``during`` is called with them."""
    line, mark, pipe = command("train", *words, "--name", "run"), uuid.uuid4().hex, subprocess.PIPE
    processes = []
    try:
        for place in places:
            environ = surroundings(mark, more | place)
            processes.append(subprocess.Popen(line, cwd=directory, env=environ, stdout=pipe, stderr=pipe, text=True))
        if during is not None:
            during(*processes)
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.long  # test_slurm.py has them of a real cluster
def test_the_tasks_of_a_step_give_the_same_agent(trained, tmp_path):
    first, second = tasks(tmp_path, step(), *CARTPOLE)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "2 ranks × 4 shards" in first[1]
    assert second[1] == ""
    reference = trained(*CARTPOLE)
    run = Run(tmp_path / "runs" / "run", reference.ended)
    assert run.summary["world_size"] == TASKS
    assert metrics_of(run.path)
    same(reference, run)


@pytest.mark.parametrize(("started", "engine"), [(open_mpi, "torch"), (hydra, "torch"), (open_mpi, "jax")])
def test_what_mpirun_starts_are_ranks_of_one_run(trained, tmp_path, started, engine):
    words = CARTPOLE if engine == "torch" else (*CARTPOLE, "--engine", "jax", "--devices", 1)
    first, second = tasks(tmp_path, started(), *words)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert second[1] == ""
    reference = trained(*words)
    run = Run(tmp_path / "runs" / "run", reference.ended)
    assert run.summary["world_size"] == TASKS
    same(reference, run)


def stopped(directory: Path, places: list[dict[str, str]]) -> list[Any]:
    """The same of a run that SIGTERM stops after four iterations, on all ranks."""
    gate, path = directory / "gate", directory / "runs" / "run"
    gate.touch()

    def stop(*processes):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        for process in processes:
            process.send_signal(signal.SIGTERM)
        gate.unlink()

    ended = tasks(directory, places, *GATED, during=stop, GATE=str(gate))
    assert (path / "checkpoints" / "step_640").is_dir(), ended
    return ended


def test_the_task_that_writes_says_that_a_signal_stopped_the_run(tmp_path):
    """The others end with 0: srun may end what runs yet when one ends otherwise."""
    first, second = stopped(tmp_path, step())
    assert (first[0], second[0]) == (128 + signal.SIGTERM, 0), (first, second)


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_process_that_nobody_watches_says_that_a_signal_stopped_the_run(tmp_path, ranks):
    """A pod that ends with 0 counts as done, and isn't started again."""
    ended = stopped(tmp_path, by_hand(ranks))
    assert [each[0] for each in ended] == [128 + signal.SIGTERM] * ranks, ended
    assert "stopped by a signal, with a checkpoint" in ended[0][1] + ended[0][2]


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (0, "not all of {} processes have come within 1 s"),
        (1, "rank 0 hasn't listened there within 1 s (Connection refused)"),
    ],
)
def test_a_rank_without_the_others_says_that_they_can_not_meet(tmp_path, rank, said):
    pytest.importorskip("gymnax")
    words = ("gymnax/Acrobot-v1", "--engine", "jax", "--collective-timeout", 1)
    [(code, output, errors)] = tasks(tmp_path, by_hand(TASKS)[rank : rank + 1], *words)
    assert (code, output) == (2, ""), errors
    why = re.escape(said.format(TASKS))
    assert re.fullmatch(rf"lockstep: error: rank {rank} can't meet the others at 127\.0\.0\.1:\d+: {why}\n", errors)
    assert not (tmp_path / "runs").exists()
