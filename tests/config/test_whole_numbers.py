"""Whole numbers have an upper limit, so that none reaches what counts in 64 bits or makes arrays of that size."""

import re

import pytest

from lockstep.config.checks import resolve
from lockstep.config.command_line import read_request
from lockstep.config.keys import LEAVES, Leaf, validate
from lockstep.config.run import Config, RunOptions

WHOLE = [path for path, leaf in LEAVES.items() if "INT" in leaf.type]


def given(leaf: Leaf, value: int) -> list[str]:
    return [f"--{leaf.path.replace('_', '-')}", str(value)]


@pytest.mark.parametrize("path", WHOLE)
def test_a_number_that_no_computer_counts_to_is_refused_in_one_line(path):
    huge, limit = 2**63, "(at most|input should be less than)"
    if path == "seed":
        huge, limit = 10**40, "one whole number from 0 on, of at most 40 digits"
    with pytest.raises(ValueError, match=rf"^command line: {re.escape(path)}: '?{huge}'?: {limit}") as no:
        read_request(["CartPole-v1", *given(LEAVES[path], huge)])
    assert "\n" not in str(no.value)


@pytest.mark.parametrize(
    "path", ["total_steps", "checkpoint.keep_last", "checkpoint.interval", "env.max_episode_steps"]
)
def test_a_number_that_stands_for_without_end_is_taken(path):
    section, _, name = path.rpartition(".")
    config = read_request(["CartPole-v1", *given(LEAVES[path], 2**63 - 1)]).config
    assert getattr(getattr(config, section) if section else config, name) == 2**63 - 1


@pytest.mark.parametrize("number", [2**63, 10**40 - 1])
def test_a_seed_may_be_higher_for_it_is_only_hashed(number):
    assert read_request(["CartPole-v1", "--seed", str(number)]).config.seed == number


@pytest.mark.parametrize(("model", "settings"), [(Config, {"num_envs": 10**9 + 1}), (RunOptions, {"nproc": 2**64})])
def test_numbers_from_python_have_the_same_limits(model, settings):
    with pytest.raises(ValueError, match=r"less than or equal to 1000000000|at most 9223372036854775807"):
        validate(model, settings, "python")


def test_iterations_that_come_to_more_steps_than_a_config_takes():
    given = {"num_envs": 8, "num_steps": 128, "total_iterations": 2**53}
    with pytest.raises(
        ValueError, match=r"^total_iterations: 9007199254740992 x num_envs 8 .*; give at most (\d+)$"
    ) as no:
        resolve(Config.model_validate(given))
    most = int(str(no.value).rpartition(" ")[2])
    config = resolve(Config.model_validate({**given, "total_iterations": most}))
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_list_of_them():
    with pytest.raises(ValueError, match=r"^command line: network\.hidden_sizes: '9999999999': input should be less"):
        read_request(["CartPole-v1", "--network.hidden-sizes", "64", "9999999999"])
