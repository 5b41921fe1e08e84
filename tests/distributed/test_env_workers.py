"""Environments in worker processes, one half of which step while the policy infers for the other: the same agent."""

import pytest
from command_line import CARTPOLE, SMALL, same
from variants import variants

JAX = (*CARTPOLE, "--engine", "jax", "--env.backend", "gymnasium")


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


@pytest.mark.parametrize("words", variants(["--nproc 2", "--env.workers 2", "--max-restarts 1"], ["--env.workers 2"]))
@pytest.mark.parametrize("engine", [(), ("--engine", "jax", "--env.backend", "gymnasium")], ids=["torch", "jax"])
def test_what_environments_compute_with_numpy_depends_on_no_process(trained, engine, words):
    """NumPy would take as many threads as there are cores, by which the last bits of a solution differ."""
    words += " --simulate-devices 1" if engine and "--nproc" in words else ""
    same(trained(*SOLVING, *engine), trained(*SOLVING, *engine, *words.split()))


@pytest.mark.parametrize("words", variants(["--nproc 2", "--env.workers 2"], ["--env.workers 2"]))
def test_threads_are_the_policys_and_not_the_environments(trained, words):
    same(trained(*SOLVING, "--threads", 2), trained(*SOLVING, "--threads", 2, *words.split()))


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
