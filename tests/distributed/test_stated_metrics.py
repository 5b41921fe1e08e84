"""What an environment puts in ``info["metrics"]``: means over the last episodes, the same for every world size."""

import pytest
from command_line import CARTPOLE, SMALL, copy_of, resume, same

STATING = ("stating:Stating-v0", *SMALL)
NAMES = ["rollout/metrics/ended", "rollout/metrics/length", "rollout/metrics/rare", "rollout/metrics/total"]
JAX = ("--engine", "jax", "--simulate-devices", 2)


def stated(run):
    return [{name: value for name, value in row.items() if name.startswith("rollout/metrics/")} for row in run.metrics]


def means_of_episodes(run):
    """What an environment says is what is counted without it."""
    for row in run.metrics:
        assert [name for name in row if name.startswith("rollout/metrics/")] == NAMES
        assert row["rollout/metrics/length"] == row["rollout/episode_length_mean"]
        assert row["rollout/metrics/total"] == row["rollout/episode_return_mean"]
        assert (row["rollout/metrics/ended"], row["rollout/metrics/rare"]) == (1.0, 1.0)


@pytest.mark.parametrize("engine", [(), JAX], ids=["torch", "jax"])
def test_numbers_are_averaged_over_episodes(trained, engine):
    means_of_episodes(trained(*STATING, *engine))


def test_ranks_workers_and_a_resume_leave_them_as_they_are(trained, tmp_path):
    alone = trained(*STATING)
    stopped = trained(*STATING, "--stop-at-step", 512, "--nproc", 2, "--env.workers", 2)
    resumed = resume(copy_of(stopped, tmp_path / "run"), "--nproc", 4)
    same(alone, resumed)
    assert stated(resumed) == stated(alone)


@pytest.mark.long
def test_processes_of_jax_leave_them_as_they_are(trained):
    words = ("--engine", "jax", "--nproc", 2, "--devices", 1)
    assert stated(trained(*STATING, *words)) == stated(trained(*STATING, *JAX))


def test_groups_count_each_environments_first_episode(trained):
    run = trained(*STATING, "--algorithm", "grpo", "--grpo.group-size", 4, "--num-shards", 2)
    alone = trained(*STATING, "--algorithm", "grpo", "--grpo.group-size", 4, "--num-shards", 2, "--nproc", 2)
    assert stated(run) == stated(alone)
    means_of_episodes(run)


def test_an_environment_that_says_nothing_has_none(trained):
    assert not any(stated(trained(*CARTPOLE)))
