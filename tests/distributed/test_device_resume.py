"""Engine jax: a run that was stopped, and moved to other devices, ends as the one that never stopped."""

import pytest
from command_line import SMALL, copy_of, resume
from device_runs import CHEETAH, EVALUATED, JAX, PENDULUM, TWO_PROCESSES, devices, inside, same_agent
from variants import variants

from lockstep.runs.checkpoint import read_checkpoint

HALF = ("--stop-at-step", 512)
LSTM = ("--network.recurrent", "lstm", "--network.recurrent-size", 8, "--network.sequence-length", 8)


def stopped_at_half(trained, *words):
    run = trained(*words, *HALF)
    assert run.summary["status"] == "stopped at step"
    assert len(run.metrics) == 4
    return run


def ends_as(whole, resumed):
    assert resumed.summary["status"] == "finished"
    assert resumed.summary["restarted_environments"] == []
    assert resumed.ended.stderr == ""
    assert len(resumed.metrics) == 8
    same_agent(whole, resumed)


def test_four_devices_that_go_on_as_one_and_as_four_again(trained, tmp_path):
    first = stopped_at_half(trained, *EVALUATED, *devices(4))
    second = resume(copy_of(first, tmp_path / "run"), *devices(1), "--stop-at-step", 640)
    assert (second.summary["world_size"], second.summary["global_step"]) == (1, 640)
    third = resume(second.path, *devices(4))
    assert third.summary["world_size"] == 4
    ends_as(trained(*EVALUATED, *devices(1)), third)


@pytest.mark.parametrize("number", variants([2, 5], []))
def test_three_devices_that_go_on_as_others(trained, tmp_path, number):
    stopped = stopped_at_half(trained, *EVALUATED, *devices(3))
    resumed = resume(copy_of(stopped, tmp_path / "run"), *devices(number))
    assert resumed.summary["world_size"] == number
    ends_as(trained(*EVALUATED, *devices(1)), resumed)


@pytest.mark.long
@pytest.mark.parametrize(
    "words", [(*inside("cart_pole"), *LSTM), PENDULUM, CHEETAH], ids=["LSTM", "normalised", "host"]
)
def test_what_three_devices_carry_goes_on_on_two_and_on_three(trained, tmp_path, words):
    stopped = stopped_at_half(trained, *words, *devices(3))
    second = resume(copy_of(stopped, tmp_path / "run"), *devices(2), "--stop-at-step", 640)
    assert second.summary["global_step"] == 640
    ends_as(trained(*words, *devices(1)), resume(second.path, *devices(3)))


@pytest.mark.long
def test_a_process_that_goes_on_as_two_and_two_as_one(trained, tmp_path):
    whole = trained(*EVALUATED, *devices(1))
    one = stopped_at_half(trained, *EVALUATED, *devices(4))
    two = resume(copy_of(one, tmp_path / "one"), *TWO_PROCESSES, "--stop-at-step", 640)
    assert two.summary["processes"] == 2
    ends_as(whole, resume(two.path, *devices(2)))


@pytest.mark.long
def test_normalisers_go_on(trained, tmp_path):
    stopped = stopped_at_half(trained, *PENDULUM, *devices(2))
    ends_as(trained(*PENDULUM, *devices(1)), resume(copy_of(stopped, tmp_path / "run"), *devices(2)))


@pytest.mark.long
def test_host_environments_are_restored_in_worker_processes_too(trained, tmp_path):
    stopped = stopped_at_half(trained, *CHEETAH, *devices(2))
    shards = read_checkpoint(stopped.path / "checkpoints" / "step_512").env_shards
    assert all(shards[shard]["lengths"][0] > 0 for shard in range(8))  # 64 steps of episodes of 40
    resumed = resume(copy_of(stopped, tmp_path / "run"), "--env.workers", 2, *devices(1), "--stop-at-step", 640)
    ends_as(trained(*CHEETAH, *devices(1)), resume(resumed.path, "--env.workers", 0, *devices(1)))


@pytest.mark.long
def test_an_environment_that_no_seed_repeats_is_restarted_and_named(trained, tmp_path):
    stopped = stopped_at_half(trained, "forgetful:ForgetfulCartPole-v0", *SMALL, *JAX, *devices(2))
    shards = read_checkpoint(stopped.path / "checkpoints" / "step_512").env_shards
    live = [shard for shard in sorted(shards) if shards[shard]["lengths"][0] > 0]
    resumed = resume(copy_of(stopped, tmp_path / "run"), *devices(2))
    assert live
    assert resumed.summary["restarted_environments"] == live
    warning = f"lockstep: warning: environments {live} couldn't be restored exactly and began a new episode"
    (line,) = resumed.ended.stderr.splitlines()
    assert line.startswith(f"{warning}: from here on the agent isn't that of an uninterrupted run")


@pytest.mark.long
def test_what_environments_and_a_recurrent_policy_carry_matters(trained, tmp_path):
    """The negative of the runs above: one that forgets it ends elsewhere."""
    whole = trained(*inside("cart_pole"), *LSTM, *devices(1))
    stopped = stopped_at_half(trained, *inside("cart_pole"), *LSTM, *devices(2))
    ends_as(whole, resume(copy_of(stopped, tmp_path / "kept"), *devices(1)))
    forgetful = stopped_at_half(trained, *inside("forgetting"), *LSTM, *devices(2))
    assert forgetful.agent == stopped.agent
    resumed = resume(copy_of(forgetful, tmp_path / "forgotten"), *devices(2))
    assert resumed.metrics[:4] == whole.metrics[:4]
    assert resumed.metrics[4] != whole.metrics[4]
    assert resumed.agent != whole.agent
