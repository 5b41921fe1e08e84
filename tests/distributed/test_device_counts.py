"""Engine jax: the same agent, byte for byte, whatever number of devices, processes, and worker processes."""

import sys

import pytest
from command_line import SMALL, Run, error_line, lockstep, run_words
from device_runs import CARTPOLE, EVALUATED, JAX, TWO_PROCESSES, devices, same_agent
from variants import variants

pytestmark = pytest.mark.optimized

WIDE = (*CARTPOLE, "--num-envs", 64, "--total-steps", 8192)
FAST = (*CARTPOLE, "--reduction", "fast")
SHORT = (*SMALL, *JAX, "--total-steps", 512, "--network.hidden-sizes", 8)
TWELVE = (*CARTPOLE, "--num-envs", 12, "--num-shards", 12, "--total-steps", 768)
LARGE = (*CARTPOLE, "--total-steps", 256, "--network.hidden-sizes", 384, 384, "--ppo.num-epochs", 1)
LARGE_LOOPS = (*CARTPOLE, "--total-steps", 128, "--network.hidden-sizes", 256, 256, "--ppo.num-epochs", 1)
LSTM = (
    *("lockstep/CartPole-v1", *SHORT, "--network.recurrent", "lstm", "--network.recurrent-size", 8),
    *("--network.sequence-length", 8),
)


@pytest.mark.parametrize("number", variants([2, 3, 4, 5, 6, 7, 8], [2, 3]))
def test_cartpole_is_the_same_on_one_device_and_on_more(trained, number):
    many = trained(*EVALUATED, *devices(number))
    assert many.summary["world_size"] == number
    assert many.summary["processes"] == 1
    assert many.summary["num_shards"] == 8
    assert f" {number} devices " in many.ended.stdout
    assert many.summary["collectives"] == "shared memory"
    same_agent(trained(*EVALUATED, *devices(1)), many)


def test_devices_with_different_numbers_of_shards_are_told(trained):
    text = trained(*EVALUATED, *devices(3)).ended.stdout
    assert " × 3 or 2 shards × 1 environment " in text
    assert "8 shards on 3 devices: 3, 3, 2; " in text
    assert "would be even" not in trained(*EVALUATED, *devices(2)).ended.stdout


def test_a_summary_says_how_sums_travel(trained):
    assert [trained(*EVALUATED, *devices(n)).summary["sums"] for n in (1, 2, 3)] == ["none", "gather", "gather"]


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 5])
def test_twelve_shards_are_the_same_on_one_device_and_on_more(trained, number):
    one, many = trained(*TWELVE, *devices(1)), trained(*TWELVE, *devices(number))
    assert many.summary["num_shards"] == 12
    same_agent(one, many)
    assert one.agent != trained(*TWELVE, "--num-shards", 6, *devices(1)).agent


@pytest.mark.long
@pytest.mark.parametrize("how", ["shared", "backend"])
def test_large_sums_go_by_slices_to_the_same_agent(trained, how):
    one, many = trained(*LARGE, *devices(1)), trained(*LARGE, *devices(3), "--collectives", how)
    assert (one.summary["sums"], many.summary["sums"]) == ("none", "slices")
    same_agent(one, many)


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "number"),
    [(EVALUATED, 4), (EVALUATED, 3), (FAST, 4), (FAST, 3)],
    ids=["exact", "exact, uneven", "fast", "fast, uneven"],
)
def test_cartpole_is_the_same_by_xlas_collectives(trained, words, number):
    by_xla, in_memory = (trained(*words, "--collectives", how, *devices(number)) for how in ("backend", "shared"))
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


def test_processes_meet_where_downloads_go_through_a_proxy(tmp_path):
    """gRPC would go through it as well, even to this host, and there is none."""
    words = ("train", *EVALUATED, *TWO_PROCESSES, "--stop-at-step", 128)
    ended = lockstep(*words, cwd=tmp_path, http_proxy="http://127.0.0.1:9", no_proxy="elsewhere.example")
    assert ended.code == 0, ended.stderr
    assert ended.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize(("processes", "each"), [(3, 1), (2, 3)])
def test_cartpole_is_the_same_in_processes_with_different_numbers_of_shards(trained, processes, each):
    many = trained(*EVALUATED, "--nproc", processes, "--simulate-devices", each)
    assert (many.summary["world_size"], many.summary["processes"]) == (processes * each, processes)
    same_agent(trained(*EVALUATED, *devices(1)), many)


@pytest.mark.long
@pytest.mark.parametrize("number", [2, 3, 8])
def test_sixty_four_environments_are_the_same_on_one_device_and_on_more(trained, number):
    one = trained(*WIDE, *devices(1))
    same_agent(one, trained(*WIDE, *devices(number)))
    assert one.agent != trained(*EVALUATED, *devices(1)).agent


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 8])
def test_a_recurrent_policy_is_the_same_on_one_device_and_on_more(trained, number):
    same_agent(trained(*LSTM, *devices(1)), trained(*LSTM, *devices(number)))


def test_more_devices_than_shards_are_refused(tmp_path):
    line = error_line(lockstep("train", *CARTPOLE, "--num-shards", 4, *devices(5), cwd=tmp_path))
    assert "devices: 5 devices can't share 4 shards, at least one each; use at most 4, " in line


# --- large networks, compiled anew: what is kept doesn't say for how many threads it was compiled


def compiled_anew(folder, *words):
    words = ("train", *LARGE_LOOPS, *words, "--name", "run")
    ended = lockstep(*words, cwd=folder, JAX_COMPILATION_CACHE_DIR=str(folder / "compiled"))
    assert ended.code == 0, ended.stderr
    assert any((folder / "compiled").iterdir())
    return Run(folder / "runs" / "run", ended)


@pytest.fixture(scope="module")
def on_one(tmp_path_factory):
    return compiled_anew(tmp_path_factory.mktemp("one"), *devices(1))


@pytest.mark.long
def test_a_large_network_is_the_same_on_one_device_and_on_two(on_one, tmp_path):
    same_agent(on_one, compiled_anew(tmp_path, *devices(2)))


IN_A_POOL_OF_ONE = """
import sys
from lockstep.jax_engine.setup import set_up
set_up.LEAN_THREADS = 1
from lockstep.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
def test_in_a_pool_of_one_thread_it_would_not_be(on_one, tmp_path):
    """The negative of the above."""
    words = [sys.executable, "-c", IN_A_POOL_OF_ONE, "train", *map(str, (*LARGE_LOOPS, *devices(1))), "--name", "run"]
    ended = run_words(words, tmp_path, JAX_COMPILATION_CACHE_DIR=str(tmp_path / "compiled"))
    assert ended.code == 0, ended.stderr
    assert Run(tmp_path / "runs" / "run", ended).agent != on_one.agent
