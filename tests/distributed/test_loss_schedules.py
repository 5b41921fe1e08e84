"""Scheduled coefficients of the loss: the same run on any ranks and devices, and through a stop."""

import pytest
from command_line import CARTPOLE, SMALL, copy_of, resume, same
from device_runs import CARTPOLE as IN_JAX
from device_runs import JAX, devices, same_agent

FALLING = (
    *("--ppo.clip-schedule", "linear", "--ppo.value-clip-range", 0.2),
    *("--ppo.entropy-schedule", "linear", "--ppo.entropy-coef", 0.05),
)
HALF = ("--stop-at-step", 512)


def falls_over_the_run(run):
    """Both coefficients are logged, falling by the steps that are left: a run of eight iterations."""
    left = [1 - number / 8 for number in range(8)]
    for name, start in (("clip_range", 0.2), ("entropy_coef", 0.05)):
        assert [record[f"train/{name}"] for record in run.metrics] == pytest.approx([start * x for x in left])


def test_ranks_and_a_stop_in_the_middle_change_nothing(trained, tmp_path):
    whole = trained(*CARTPOLE, *FALLING)
    falls_over_the_run(whole)
    stopped = trained(*CARTPOLE, *FALLING, *HALF, "--nproc", 3)
    same(whole, resume(copy_of(stopped, tmp_path / "run"), "--nproc", 2))
    constant = trained(*CARTPOLE, *FALLING[2:4], "--ppo.entropy-coef", 0.05)
    assert whole.agent != constant.agent


@pytest.mark.long
@pytest.mark.parametrize("words", [IN_JAX, ("gated:GatedCartPole-v0", *SMALL, *JAX)], ids=["inside", "host"])
def test_devices_and_a_stop_in_the_middle_change_nothing(trained, tmp_path, words):
    whole = trained(*words, *FALLING, *devices(1))
    falls_over_the_run(whole)
    stopped = trained(*words, *FALLING, *HALF, *devices(3))
    same_agent(whole, resume(copy_of(stopped, tmp_path / "run"), *devices(2)))


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_local_steps_and_grpo_follow_the_schedules_too(trained, engine, algorithm):
    many = ("--nproc", 2) if engine == "torch" else devices(2)
    env = ("lockstep/CartPole-v1", *SMALL, "--engine", engine, *many, "--ppo.entropy-schedule", "linear")
    words = (*env, "--ppo.clip-schedule", "linear", "--ppo.entropy-coef", 0.05, "--reduction", "fast")
    periodic = ("--sync-period", 2) if algorithm == "ppo" else ("--algorithm", "grpo", "--num-envs", 32)
    records = trained(*words, *periodic, "--total-steps", 2048).metrics
    left = [1 - number / len(records) for number in range(len(records))]
    assert len(records) >= 4
    assert [record["train/entropy_coef"] for record in records] == pytest.approx([0.05 * x for x in left])
    assert [record["train/clip_range"] for record in records] == pytest.approx([0.2 * x for x in left])


@pytest.mark.long
def test_each_seed_of_one_program_is_that_of_its_own_run(trained):
    words = (*IN_JAX, *FALLING, *devices(1))
    many = trained(*words, "--seed", 5, "--num-seeds", 2)
    one = trained(*words, "--seed", 6)
    assert many.summary["seeds"][1]["params_sha256"] == one.summary["params_sha256"]
