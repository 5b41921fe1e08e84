"""Tasks of a Slurm step are ranks; as a user would start them, but for Slurm itself, whose variables are set here."""

import signal
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import CARTPOLE, GATED, Run, command, metrics_of, same, surroundings, wait_until

TASKS = 2


def tasks(directory: Path, *words: Any, during: Callable[..., None] | None = None, **more: str) -> list[Any]:
    """Exit status, output and errors of each task of ``lockstep train WORDS``; ``during`` is called with them."""
    step = more | {
        "SLURM_JOB_ID": str(uuid.uuid4().int % 4096),
        "SLURM_STEP_NODELIST": "node07",
        "SLURM_STEP_TASKS_PER_NODE": str(TASKS),
        "SLURM_NTASKS": str(TASKS),
        "SLURM_NODEID": "0",
    }
    line, mark, pipe = command("train", *words, "--name", "run"), uuid.uuid4().hex, subprocess.PIPE
    processes = []
    try:
        for task in range(TASKS):
            place = surroundings(mark, step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)})
            processes.append(subprocess.Popen(line, cwd=directory, env=place, stdout=pipe, stderr=pipe, text=True))
        if during is not None:
            during(*processes)
        outputs = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


@pytest.mark.long  # test_slurm.py has them of a real cluster
def test_the_tasks_of_a_step_give_the_same_agent(trained, tmp_path):
    first, second = tasks(tmp_path, *CARTPOLE)
    assert (first[0], second[0]) == (0, 0), (first, second)
    assert "2 ranks × 4 shards" in first[1]
    assert second[1] == ""
    reference = trained(*CARTPOLE)
    run = Run(tmp_path / "runs" / "run", reference.ended)
    assert run.summary["world_size"] == TASKS
    assert metrics_of(run.path)
    same(reference, run)


def test_the_task_that_writes_says_that_a_signal_stopped_the_run(tmp_path):
    """The others end with 0: srun may end what runs yet when one ends otherwise."""
    gate, path = tmp_path / "gate", tmp_path / "runs" / "run"
    gate.touch()

    def stop(*processes):
        wait_until(lambda: len(metrics_of(path)) == 4, "the run doesn't reach the gate")
        for process in processes:
            process.send_signal(signal.SIGTERM)
        gate.unlink()

    first, second = tasks(tmp_path, *GATED, during=stop, GATE=str(gate))
    assert (first[0], second[0]) == (128 + signal.SIGTERM, 0), (first, second)
    assert (path / "checkpoints" / "step_640").is_dir()
