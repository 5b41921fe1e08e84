"""Environments in worker processes, one half of which step while the policy infers for the other: the same agent."""

import sys
from functools import cache

import pytest
from command_line import CARTPOLE, SMALL, Run, lockstep, run_words, same
from variants import variants

from lockstep.core.machine import openblas_kernel
from lockstep.core.topology import available_cores

ENGINE_JAX = ("--engine", "jax", "--env.backend", "gymnasium")
JAX = (*CARTPOLE, *ENGINE_JAX)


@pytest.mark.parametrize(
    ("nproc", "workers"), variants([(1, 2), (1, 4), (2, 2), (3, 2), (2, "auto")], [(1, 2), (3, 2)])
)
def test_the_agent_is_that_of_environments_in_the_rank(trained, nproc, workers):
    same(trained(*CARTPOLE), trained(*CARTPOLE, "--nproc", nproc, "--env.workers", workers))


@pytest.mark.parametrize(("devices", "workers"), variants([(1, 2), (2, 2), (2, "auto")], [(1, 2)]))
def test_the_agent_of_engine_jax_likewise(trained, devices, workers):
    words = ("--simulate-devices", devices, "--env.workers", workers)
    same(trained(*JAX, "--simulate-devices", 1), trained(*JAX, *words))


SOLVING = ("solving:Solving-v0", *SMALL)
TWO_THREADS = {"OPENBLAS_NUM_THREADS": "2"}
"""What NumPy would take where nobody says otherwise; what tests fork had one thread when it was imported."""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs in one process that is started from nothing and where NumPy would compute with two threads."""

    @cache
    def find(*words):
        folder = tmp_path_factory.mktemp("alone")
        ended = lockstep("train", *words, "--name", "run", cwd=folder, **TWO_THREADS)
        assert ended.code == 0, ended.stderr
        return Run(folder / "runs" / "run", ended)

    return find


@pytest.mark.parametrize("words", variants(["--nproc 2", "--env.workers 2", "--max-restarts 1"], ["--env.workers 2"]))
@pytest.mark.parametrize("engine", [(), ENGINE_JAX], ids=["torch", "jax"])
def test_what_environments_compute_with_numpy_depends_on_no_process(alone, trained, engine, words):
    """NumPy would take as many threads as there are cores, by which the last bits of a solution differ."""
    words += " --simulate-devices 1" if engine and "--nproc" in words else ""
    same(alone(*SOLVING, *engine), trained(*SOLVING, *engine, *words.split()))


@pytest.mark.parametrize("words", variants(["--nproc 2", "--env.workers 2"], ["--env.workers 2"]))
def test_threads_are_the_policys_and_not_the_environments(alone, trained, words):
    same(alone(*SOLVING, "--threads", 2), trained(*SOLVING, "--threads", 2, *words.split()))


NUMPYS_OWN_THREADS = """
import sys
from lockstep.core import machine
machine.one_blas_thread = lambda: None
from lockstep.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(available_cores() < 2 or not openblas_kernel(), reason="NumPy has no OpenBLAS with two threads")
@pytest.mark.parametrize("engine", [(), pytest.param(ENGINE_JAX, marks=pytest.mark.long)], ids=["torch", "jax"])
def test_with_threads_of_its_own_numpy_would_compute_something_else(alone, tmp_path, engine):
    """The negative of the above."""
    words = map(str, ("train", *SOLVING, *engine, "--stop-at-step", 640, "--name", "run"))
    ended = run_words([sys.executable, "-c", NUMPYS_OWN_THREADS, *words], tmp_path, **TWO_THREADS)
    assert ended.code == 0, ended.stderr
    found, wanted = Run(tmp_path / "runs" / "run", ended).metrics, alone(*SOLVING, *engine).metrics[:5]
    assert [row["global_step"] for row in found] == [row["global_step"] for row in wanted]
    assert found[-1] != wanted[-1]


@pytest.mark.parametrize(("threads", "before"), [(1, "2"), (2, "1")])
def test_pytorch_has_the_threads_of_the_config_whatever_it_would_take(tmp_path, threads, before):
    words = ("solving:Threaded-v0", *SMALL, "--total-steps", 128, "--threads", threads, "--name", "run")
    ended = lockstep("train", *words, cwd=tmp_path, OMP_NUM_THREADS=before)
    assert ended.code == 0, ended.stderr
    assert Run(tmp_path / "runs" / "run", ended).metrics[-1]["rollout/episode_return_mean"] == threads


def test_environments_may_take_gradients_wherever_they_are_stepped(trained):
    words = ("solving:Descending-v0", *SMALL, "--eval.interval", 4, "--eval.episodes", 2)
    same(trained(*words), trained(*words, "--env.workers", 1))


@pytest.mark.parametrize("nproc", variants([2, 4], [2]))
def test_a_simulator_that_says_who_solved_its_task_when_episodes_end(trained, nproc):
    """In other steps it says nothing, and so some of a rank's groups may while others do."""
    words = ("simulators:sparing", "--env.backend", "tensor", *SMALL, "--num-shards", 4)
    run = trained(*words)
    same(run, trained(*words, "--nproc", nproc))
    assert 0 < run.metrics[-1]["rollout/success_rate"] < 1
