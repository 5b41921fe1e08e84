"""A real Slurm on this machine: tasks of its steps are ranks, and its jobs stop, are requeued and go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    TIMEOUT,
    Ended,
    Run,
    assert_no_orphans,
    command,
    lockstep,
    marked,
    metrics_of,
    ranks_of,
    same,
    surroundings,
    wait_until,
)
from slurm_cluster import KILL_WAIT, Cluster, install, running_cluster, without_slurm
from variants import variants

pytestmark = NEEDS_PROC

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster" / "slurm.sbatch"
LAST_GATED_STEP, LAST_CHECKPOINT = 512, 384
STOPPED = 128 + signal.SIGTERM


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    install()
    before = own_files()
    with running_cluster() as made:
        yield made
    assert own_files() == before
    assert not marked(made.mark)
    assert not Path(made.environment["SLURM_CONF"]).parent.exists()


def own_files() -> dict[Path, int]:
    """What the machine's own Slurm and table of hosts consist of, and when it was last changed."""
    files = [file for root in ("/etc/slurm", "/etc/munge", "/var/lib/slurm") for file in Path(root).rglob("*")]
    return {file: file.stat().st_mtime_ns for file in (*files, Path("/etc/hosts"))}


def place(cluster: Cluster, directory: Path, mark: str, **more: str) -> dict[str, str]:
    """The environment in which a step or a job is submitted, with ``lockstep`` on its path."""
    (directory / "bin").mkdir(exist_ok=True)
    called = directory / "bin" / "lockstep"
    called.write_text(f'#!/bin/sh\nexec {sys.executable} -m lockstep "$@"\n')
    called.chmod(0o755)
    path = {"PATH": f"{called.parent}{os.pathsep}{os.environ['PATH']}"}
    return without_slurm(surroundings(mark, cluster.environment | path | more))


def step(cluster: Cluster, directory: Path, *words: Any, **more: str) -> Ended:
    """``srun WORDS`` to its end."""
    mark = uuid.uuid4().hex
    variables, line = place(cluster, directory, mark, **more), ["srun", *map(str, words)]
    done = subprocess.run(line, cwd=directory, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    return Ended(done.returncode, done.stdout, done.stderr, mark)


@dataclass(frozen=True)
class Job:
    """The example's job, of two tasks, that stands still in its fifth iteration for as long as the gate exists."""

    cluster: Cluster
    number: str
    directory: Path
    mark: str

    @property
    def path(self) -> Path:
        return self.directory / "runs" / "run"

    @property
    def log(self) -> str:
        return (self.directory / f"run-{self.number}.log").read_text()

    @property
    def state(self) -> str:
        return self.cluster.state(self.number)

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint."""
        return max(int(path.name.removeprefix("step_")) for path in (self.path / "checkpoints").glob("step_*"))

    def open_gate(self) -> None:
        (self.directory / "gate").unlink()

    def comes_to(self, *states: str) -> None:
        """Waits for a state as :meth:`Cluster.state` says it; asks Slurm four times a second."""
        deadline = time.monotonic() + 180
        while self.state not in states:
            if time.monotonic() > deadline:
                pytest.fail(f"{self.cluster.ask('scontrol', 'show', 'job', self.number)}\n{self.log}")
            time.sleep(0.25)

    def ended(self, code: int = 0) -> Ended:
        return Ended(code, self.log, "", self.mark)


def at_the_gate(cluster: Cluster, directory: Path, *options: str) -> Job:
    """Submits the example's own file with settings that fit these nodes; its first four iterations are done."""
    gate, mark = directory / "gate", uuid.uuid4().hex
    gate.touch()
    fit = ["--parsable", "--job-name=run", "--nodes=1", "--ntasks-per-node=2", *options]
    words = [*fit, str(EXAMPLE), *map(str, GATED), "--quiet"]
    variables = place(cluster, directory, mark, GATE=str(gate))
    done = subprocess.run(
        ["sbatch", *words], cwd=directory, env=variables, capture_output=True, text=True, timeout=60, check=True
    )
    job = Job(cluster, done.stdout.strip(), directory, mark)
    wait_until(lambda: len(metrics_of(job.path)) == 4, "the job doesn't reach the gate", 120.0)
    wait_until(lambda: (job.path / "checkpoints" / f"step_{LAST_CHECKPOINT}").is_dir(), "no checkpoint")
    assert job.state == "RUNNING 0"
    return job


@pytest.mark.parametrize(("engine", "nodes", "tasks"), variants([("torch", 2, 4), ("jax", 2, 2)], [("torch", 2, 4)]))
def test_tasks_of_a_step_give_the_agent_of_one_process(cluster, trained, tmp_path, engine, nodes, tasks):
    if nodes > 1 and not cluster.names:
        pytest.skip("nodes have no names: mount namespaces are not permitted here")
    words = [*CARTPOLE, "--engine", engine]
    ended = step(cluster, tmp_path, "-N", nodes, "-n", tasks, *command("train", *words, "--name", "run"))
    assert ended.code == 0, ended.stderr
    run = Run(tmp_path / "runs" / "run", ended)
    same(trained(*words), run)
    assert run.summary["world_size"] >= tasks
    assert ended.stdout.count("parameters in sync") == 1
    assert_no_orphans(ended)


def announced(job: Job) -> None:
    """Slurm says before the end that it comes, to the ranks alone, as ``--signal`` does before the time limit."""
    job.cluster.ask("scancel", "--signal=TERM", job.number)


def requeued(job: Job) -> None:
    job.cluster.ask("scontrol", "requeue", job.number)


def killed(job: Job) -> None:
    (victim,) = marked(job.mark, "SLURM_PROCID=1", "SLURM_LOCALID=1")
    os.kill(victim, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.parametrize("how", [announced, requeued, killed])
def test_a_job_that_is_stopped_goes_on_by_itself(cluster, trained, tmp_path, how):
    job = at_the_gate(cluster, tmp_path)
    how(job)
    if how is killed:
        wait_until(lambda: not marked(job.mark, "SLURM_PROCID=0", "SLURM_LOCALID=0", "SLURM_STEP_ID=0"), "rank 0 stays")
    job.open_gate()
    job.comes_to("PENDING 1", "RUNNING 1")
    if how is not killed:
        assert job.newest == metrics_of(job.path)[-1]["global_step"] == LAST_GATED_STEP + 128
    job.comes_to("COMPLETED 1")
    same(trained(*CARTPOLE), Run(job.path, job.ended()))
    said = {announced: f"ended with {STOPPED}", requeued: "REQUEUE", killed: f"ended with {128 + signal.SIGKILL}"}
    assert said[how] in job.log
    assert_no_orphans(job.ended())


@pytest.mark.long
def test_the_time_limit_is_announced_and_the_job_goes_on(cluster, trained, tmp_path):
    """Slurm looks at the limit twice a minute, and a minute is the least there is."""
    job = at_the_gate(cluster, tmp_path, "--time=1", "--signal=TERM@59")
    wait_until(lambda: "CANCELLED" in job.log, "no signal", 120.0)
    job.open_gate()
    job.comes_to("PENDING 1", "RUNNING 1")
    assert job.newest == metrics_of(job.path)[-1]["global_step"] == LAST_GATED_STEP + 128
    job.comes_to("COMPLETED 1", "COMPLETED 2", "COMPLETED 3")
    same(trained(*CARTPOLE), Run(job.path, job.ended()))


@pytest.mark.long
def test_a_cancelled_job_leaves_nothing_behind_but_its_run(cluster, trained, tmp_path):
    job = at_the_gate(cluster, tmp_path)
    job.cluster.ask("scancel", job.number)
    wait_until(lambda: not marked(job.mark), "processes outlive their job", 10.0 * KILL_WAIT)
    job.comes_to("CANCELLED 0")
    job.open_gate()
    assert job.newest == LAST_CHECKPOINT
    ended = lockstep("train", *GATED, "--name", "run", "--resume", "auto", cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    same(trained(*CARTPOLE), Run(job.path, ended))


@pytest.mark.long
def test_a_job_with_a_wrong_word_is_not_started_again(cluster, tmp_path):
    fit = ["--wait", "--parsable", "--job-name=run", "--nodes=1", "--ntasks-per-node=2"]
    words = ["sbatch", *fit, str(EXAMPLE), "CartPole-v1", "--num-env-s", "3"]
    variables = place(cluster, tmp_path, uuid.uuid4().hex)
    done = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=TIMEOUT)
    number = done.stdout.strip()
    assert done.returncode != 0
    assert cluster.state(number) == "FAILED 0"
    assert "--num-env-s: unknown option" in (tmp_path / f"run-{number}.log").read_text()


@pytest.mark.long
def test_our_launcher_starts_the_ranks_of_a_step_of_one_task_again(cluster, trained, tmp_path):
    gate, mark = tmp_path / "gate", uuid.uuid4().hex
    gate.touch()
    words = command("train", *GATED, "--name", "run", "--nproc", 2, "--max-restarts", 2)
    variables = place(cluster, tmp_path, mark, GATE=str(gate))
    process = subprocess.Popen(
        ["srun", "-n", "1", "-c", "2", *words], cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True
    )
    try:
        wait_until(lambda: len(metrics_of(tmp_path / "runs" / "run")) == 4, "the run doesn't reach the gate")
        (victim,) = ranks_of(mark, 1)
        os.kill(victim, signal.SIGKILL)
        gate.unlink()
        stdout, _ = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 0
    ended = Ended(0, stdout, "", mark)
    run = Run(tmp_path / "runs" / "run", ended)
    assert len(run.summary["restarts"]) == 1
    same(trained(*CARTPOLE), run)
    assert_no_orphans(ended)
