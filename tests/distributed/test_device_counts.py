"""Engine jax: the same agent, byte for byte, whatever number of devices, processes, and worker processes."""

import pytest
from command_line import SMALL
from device_runs import CARTPOLE, EVALUATED, JAX, TWO_PROCESSES, devices, same_agent

WIDE = (*CARTPOLE, "--num-envs", 64, "--total-steps", 8192)
SHORT = (*SMALL, *JAX, "--total-steps", 512, "--network.hidden-sizes", 8)
LSTM = (
    *("lockstep/CartPole-v1", *SHORT, "--network.recurrent", "lstm", "--network.recurrent-size", 8),
    *("--network.sequence-length", 8),
)


@pytest.mark.parametrize("number", [2, 4, 8])
def test_cartpole_is_the_same_on_one_device_and_on_more(trained, number):
    many = trained(*EVALUATED, *devices(number))
    assert many.summary["world_size"] == number
    assert many.summary["processes"] == 1
    assert many.summary["num_shards"] == 8
    assert f" {number} devices " in many.ended.stdout
    same_agent(trained(*EVALUATED, *devices(1)), many)


def test_cartpole_is_the_same_in_two_processes(trained):
    two = trained(*EVALUATED, *TWO_PROCESSES)
    assert (two.summary["world_size"], two.summary["processes"]) == (2, 2)
    same_agent(trained(*EVALUATED, *devices(1)), two)


@pytest.mark.parametrize("number", [2, 8])
def test_sixty_four_environments_are_the_same_on_one_device_and_on_more(trained, number):
    one = trained(*WIDE, *devices(1))
    same_agent(one, trained(*WIDE, *devices(number)))
    assert one.agent != trained(*EVALUATED, *devices(1)).agent


def test_a_recurrent_policy_is_the_same_on_one_device_and_one_a_shard(trained):
    same_agent(trained(*LSTM, *devices(1)), trained(*LSTM, *devices(8)))
