"""What tells whether environments of two ranks draw the same random numbers, and which of them get new seeds."""

from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils import seeding
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

from lockstep.integrations.sb3.environments import (
    KnownEnvironments,
    Seed,
    answering,
    in_use_alike,
    random_numbers,
    seeds,
    tell_apart,
)


def cartpole():
    return gymnasium.make("CartPole-v1")


def test_the_seed_is_the_one_of_the_last_reset_that_had_one():
    env = cartpole()
    env.reset(seed=3)
    env.reset()
    number, kind = random_numbers(env)
    assert number == 3
    assert kind.endswith("CartPoleEnv CartPole-v1")


def test_a_generator_made_by_the_environment_is_known_however_much_it_has_drawn():
    env = cartpole()
    made = [seeding.np_random(seed)[0] for seed in (3, 3, 4)]
    made[1].random(100)
    numbers = []
    for generator in made:
        env.unwrapped.np_random = generator
        numbers.append(random_numbers(env)[0])
    assert numbers[0] == numbers[1] != numbers[2]


def test_looking_leaves_generators_as_they_are():
    """Gymnasium's own property puts another in the place of one that an environment has set."""
    env = cartpole()
    assert random_numbers(env)[0] is None
    assert env.unwrapped._np_random is None
    env.unwrapped._np_random = np.random.default_rng(5)
    before = env.unwrapped._np_random.bit_generator.state
    assert random_numbers(env)[0] is not None
    assert env.unwrapped._np_random.bit_generator.state == before


@pytest.mark.parametrize("generator", [np.random, np.random.RandomState(3), None])
def test_other_generators_tell_nothing(generator):
    env = cartpole()
    env.unwrapped.np_random = generator
    assert random_numbers(env)[0] is None


def test_an_environment_that_takes_no_attributes_does_not_answer():
    env = (1, 2)
    assert answering(env) is env


def test_seeds_that_wait_for_a_reset_come_before_those_in_use():
    env = VecNormalize(DummyVecEnv([cartpole, cartpole]))
    env.seed(4)
    env.reset()
    assert [(seed.number, seed.pending) for seed in seeds(env)] == [(4, False), (5, False)]
    env.seed(np.int64(8))  # pyright: ignore[reportArgumentType]
    assert [(seed.number, seed.pending) for seed in seeds(env)] == [(8, True), (9, True)]


class Recorded(SimpleNamespace):
    """A vector environment that keeps what it is seeded with."""

    def __init__(self, count):
        super().__init__(_seeds=[None] * count)
        self.unwrapped = self

    def seed(self, first):
        self._seeds = [first + place for place in range(len(self._seeds))]


def told_apart(*everyone, in_use=True):
    """The seeds that the last rank's environments get."""
    env: Any = Recorded(len(everyone[-1]))
    tell_apart(env, everyone, len(everyone) - 1, in_use)
    return env._seeds


def used(*numbers, kind="A"):
    return [Seed(number, False, kind) for number in numbers]


def pending(*numbers, kind="A"):
    return [Seed(number, True, kind) for number in numbers]


def test_seeds_in_a_row_go_on_over_the_ranks():
    assert told_apart(pending(5, 6), pending(5, 6)) == [7, 8]
    assert told_apart(used(5, 6), used(5, 6)) == [7, 8]
    assert told_apart(used(5, 6), used(7, 8), used(5, 6)) == [9, 10]
    assert told_apart(used(5, 6), pending(5, 6)) == [7, 8]
    assert told_apart(pending(5, 6), used(5, 6)) == [7, 8]


@pytest.mark.parametrize(
    "ranks",
    [
        [used(5, 6), used(7, 8)],
        [used(None, None), used(None, None)],
        [used(5, 6), used(5, 6, kind="B")],
        [used(5, 6), pending(5, 6, kind="B")],
        [used(5), used(5, 6)],
        [[], []],
    ],
)
def test_environments_that_differ_keep_their_seeds(ranks):
    assert told_apart(*ranks) == [None] * len(ranks[-1])


def test_waiting_seeds_are_told_apart_whatever_the_environments_are():
    assert told_apart(pending(5, 6), pending(5, 6, kind="B")) == [7, 8]


def test_environments_in_use_are_left_alone_unless_they_are_about_to_be_reset():
    assert told_apart(used(5, 6), used(5, 6), in_use=False) == [None, None]
    assert told_apart(pending(5, 6), used(5, 6), in_use=False) == [None, None]
    assert told_apart(pending(5, 6), pending(5, 6), in_use=False) == [7, 8]


def test_only_environments_in_use_count_as_alike_again():
    assert in_use_alike([used(5, 6), used(4, 6)], 1)
    assert not in_use_alike([used(5, 6), used(5, 6)], 0)
    assert not in_use_alike([used(5, 6), pending(5, 6)], 1)


def test_an_environment_is_known_whatever_wraps_it_as_long_as_it_exists():
    known, env = KnownEnvironments(), DummyVecEnv([cartpole])
    known.add(VecNormalize(env))
    assert env in known
    assert VecNormalize(env) in known
    assert DummyVecEnv([cartpole]) not in known


def test_only_those_that_are_alike_get_other_seeds():
    seeds = told_apart(used(5, 9), used(5, 7))
    assert seeds[0] is not None
    assert seeds[1] is None


def test_seeds_that_no_script_gives_are_replaced_by_ones_that_every_generator_takes():
    drawn = 2**100
    seeds = told_apart(used(drawn), used(drawn))
    assert 0 <= seeds[0] < 2**32
    assert told_apart(used(drawn), used(drawn), used(drawn)) != seeds
