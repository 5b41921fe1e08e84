"""``num_envs_per_rank: auto``: the table, what memory leaves of it, and that the config gets a number."""

import contextlib
import json
import re

import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config, EnvConfig
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.launch import sizing, start
from lockstep.launch.sizing import ENV_BYTES, GB, Resources, available_memory, bytes_per_env, size, wanted
from lockstep.launch.world import World

PLENTY = 10**15


@pytest.fixture(scope="module")
def cartpole():
    return describe(EnvConfig(id="CartPole-v1"))


@pytest.mark.parametrize(
    ("gigabytes", "auto", "most"),
    [(141, 48, 64), (85, 48, 64), (80, 48, 64), (79, 32, 48), (40, 32, 48), (24, 24, 32), (16, 16, 24), (8, 8, 16)],
)
def test_a_gpu_gets_environments_by_its_memory(gigabytes, auto, most):
    resources = Resources(cores=2, memory=PLENTY, device_memory=gigabytes * GB)
    assert (wanted("auto", resources, 1)[0], wanted("max", resources, 1)[0]) == (auto, most)
    assert f"on a GPU of {gigabytes} GB" in wanted("auto", resources, 1)[1]


@pytest.mark.parametrize(("cores", "auto", "most"), [(1, 16, 64), (4, 64, 256)])
def test_a_rank_on_cpus_gets_environments_by_its_cores(cores, auto, most):
    resources = Resources(cores, PLENTY)
    assert (wanted("auto", resources, 1)[0], wanted("max", resources, 1)[0]) == (auto, most)


@pytest.mark.parametrize(("memory", "count"), [(None, 64), (2 * 64 * ENV_BYTES, 64), (64 * ENV_BYTES, 32), (1, 1)])
def test_half_of_the_free_memory_is_the_limit(memory, count):
    found, rule = wanted("max", Resources(1, memory), ENV_BYTES)
    assert found == count
    assert (f"free allow {count}" in rule) == (count < 64)


def test_long_rollouts_of_large_observations_take_memory(cartpole):
    short, long = (bytes_per_env(Config(num_steps=steps), cartpole) for steps in (16, 2048))
    assert long - short == 2032 * (3 * 16 + 64)


def sized(cartpole, world_size=1, ranks_here=1, resources=None, **settings):
    resources = resources or Resources(2, PLENTY)
    config, line = size(Config(**settings), World(world_size, ranks_here), resources, lambda: cartpole)
    assert line is not None
    return config, line


def test_ranks_of_a_machine_share_its_cores_and_memory(cartpole):
    for ranks, count in ((1, 32), (2, 16), (8, 16)):
        config, line = sized(cartpole, ranks, ranks, num_envs_per_rank="auto", num_steps=16)
        assert config.num_envs_per_rank == count
        assert line.startswith("num_envs_per_rank auto: 16 for each of ")
        assert line.endswith("; --num-envs-per-rank N overrides it")
    tight = Resources(2, 16 * ENV_BYTES)
    found = [sized(cartpole, n, n, tight, num_envs_per_rank="auto", num_steps=1, ppo={"num_minibatches": 1})[0]
             for n in (1, 2)]  # fmt: skip
    assert [config.num_envs_per_rank for config in found] == [7, 3]


def test_the_number_is_the_next_below_that_everything_else_allows(cartpole):
    three, line = sized(cartpole, num_envs_per_rank="max", num_steps=1, num_shards=1, ppo={"num_minibatches": 3})
    assert three.num_envs_per_rank == 126
    assert "; 126 is the next that shards and minibatches allow" in line
    groups, _ = sized(cartpole, num_envs_per_rank="auto", num_steps=16, algorithm="grpo", grpo={"group_size": 12})
    assert groups.num_envs_per_rank == 24
    assert resolve(groups).num_envs == 24


def test_without_a_number_that_fits_the_error_is_that_of_the_rule(cartpole):
    with pytest.raises(ValueError, match=r"^ppo\.num_minibatches: 1000 doesn't divide"):
        sized(cartpole, num_envs_per_rank="auto", num_steps=1, ppo={"num_minibatches": 1000})


@pytest.mark.parametrize("settings", [{"num_envs_per_rank": 5}, {"num_envs": 6}, {}])
def test_a_number_is_left_as_it_is_and_nobody_looks_at_the_environment(settings):
    config = Config(**settings)
    assert size(config, World(1, 1), Resources(1, None), lambda: pytest.fail("asked")) == (config, None)


def test_available_memory_is_the_least_of_system_and_container(monkeypatch, tmp_path):
    meminfo, left = tmp_path / "meminfo", dict[str, int | None](bytes=None)
    meminfo.write_text("MemTotal: 100 kB\nMemAvailable: 50 kB\n")
    monkeypatch.setattr(sizing, "MEMINFO", meminfo)
    monkeypatch.setattr(sizing, "memory_left", lambda: left["bytes"])
    assert available_memory() == 50 * 1024
    left["bytes"] = 20000
    assert available_memory() == 20000
    monkeypatch.setattr(sizing, "MEMINFO", tmp_path / "none")
    assert available_memory() == 20000
    left["bytes"] = None
    assert available_memory() is None


def test_a_run_prints_the_rule_and_keeps_the_number(monkeypatch, tmp_path, capsys):
    from lockstep.launch.request import request_of

    monkeypatch.setattr(sizing, "available_cores", lambda: 3)
    monkeypatch.setattr(sizing, "available_memory", lambda: PLENTY)
    words = ["CartPole-v1", "--num-envs-per-rank", "auto", "--num-steps", "8", "--runs-dir", str(tmp_path)]
    prepare = lambda *words: start.prepare(request_of(words), Topology(), contextlib.ExitStack())  # noqa: E731
    prepared = prepare(*words, "--name", "a")
    prepared.run.unlock()
    assert re.match(r"num_envs_per_rank auto: 16 for each of 3 cores; --num-envs-per-rank N", capsys.readouterr().out)
    stored = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (stored["num_envs"], stored["num_envs_per_rank"]) == (48, None)
    assert prepared.assignment.config.num_envs == 48
    prepare(*words[:2], "5", *words[3:], "--name", "b").run.unlock()
    assert json.loads((tmp_path / "b" / "config.json").read_text())["num_envs"] == 5


def test_only_training_makes_a_number_of_it():
    with pytest.raises(ValueError, match=r"^num_envs_per_rank: auto is made a number by lockstep train alone"):
        resolve(Config(num_envs_per_rank="auto"))
