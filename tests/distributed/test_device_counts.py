"""Engine jax: the same agent, byte for byte, whatever number of devices, processes, and worker processes."""

import pytest
from command_line import SMALL, Run, error_line, lockstep
from device_runs import CARTPOLE, EVALUATED, JAX, TWO_PROCESSES, devices, same_agent
from variants import variants

WIDE = (*CARTPOLE, "--num-envs", 64, "--total-steps", 8192)
FAST = (*CARTPOLE, "--reduction", "fast")
SHORT = (*SMALL, *JAX, "--total-steps", 512, "--network.hidden-sizes", 8)
LSTM = (
    *("lockstep/CartPole-v1", *SHORT, "--network.recurrent", "lstm", "--network.recurrent-size", 8),
    *("--network.sequence-length", 8),
)


@pytest.mark.parametrize("number", variants([2, 4, 8], [2, 4]))
def test_cartpole_is_the_same_on_one_device_and_on_more(trained, number):
    many = trained(*EVALUATED, *devices(number))
    assert many.summary["world_size"] == number
    assert many.summary["processes"] == 1
    assert many.summary["num_shards"] == 8
    assert f" {number} devices " in many.ended.stdout
    assert many.summary["collectives"] == "shared memory"
    same_agent(trained(*EVALUATED, *devices(1)), many)


@pytest.mark.parametrize("words", [EVALUATED, pytest.param(FAST, marks=pytest.mark.long)], ids=["exact", "fast"])
def test_cartpole_is_the_same_by_xlas_collectives(trained, words):
    by_xla, in_memory = (trained(*words, "--collectives", how, *devices(4)) for how in ("backend", "shared"))
    assert (by_xla.summary["collectives"], in_memory.summary["collectives"]) == ("xla", "shared memory")
    same_agent(by_xla, in_memory)


def test_where_nothing_can_be_compiled_xla_takes_over_and_says_so(trained, tmp_path):
    nowhere = {"CC": "/no/such/compiler", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = lockstep("train", *EVALUATED, *devices(2), "--name", "run", cwd=tmp_path, **nowhere)
    assert ended.code == 0, ended.stderr
    run = Run(tmp_path / "runs" / "run", ended)
    assert run.summary["collectives"] == "xla"
    assert "collectives go through XLA, which is slower, and not through memory: " in ended.stdout
    assert "/no/such/compiler" in ended.stdout
    same_agent(trained(*EVALUATED, *devices(2)), run)
    refused = lockstep("train", *EVALUATED, *devices(2), "--collectives", "shared", cwd=tmp_path, **nowhere)
    assert "collectives: shared can't be had: " in error_line(refused)
    assert error_line(refused).endswith("; use collectives auto")


def test_cartpole_is_the_same_in_two_processes(trained):
    two = trained(*EVALUATED, *TWO_PROCESSES)
    assert (two.summary["world_size"], two.summary["processes"]) == (2, 2)
    assert two.summary["collectives"] == "xla"
    assert "collectives go through" not in two.ended.stdout
    same_agent(trained(*EVALUATED, *devices(1)), two)


@pytest.mark.parametrize("number", [2, pytest.param(8, marks=pytest.mark.long)])  # compiled again for it
def test_sixty_four_environments_are_the_same_on_one_device_and_on_more(trained, number):
    one = trained(*WIDE, *devices(1))
    same_agent(one, trained(*WIDE, *devices(number)))
    assert one.agent != trained(*EVALUATED, *devices(1)).agent


@pytest.mark.long
def test_a_recurrent_policy_is_the_same_on_one_device_and_one_a_shard(trained):
    same_agent(trained(*LSTM, *devices(1)), trained(*LSTM, *devices(8)))
