"""Environments in worker processes, one half of which step while the policy infers for the other: the same agent."""

import pytest
from command_line import CARTPOLE, same
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
