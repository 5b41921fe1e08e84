"""The first environment's first steps: what differs from a space, and generators that all of a process share."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Tuple

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.watched import WATCHED_STEPS, GlobalGenerators, WatchedEnv, outside
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs

VECTOR = Box(-1.0, 1.0, (3,), np.float32)
FITS, WIDE, NAN = np.zeros(3, np.float32), np.zeros(3), np.full(3, np.nan, np.float32)


def trained_on(name: str, steps: int = 40) -> HostEnvs:
    """Two environments after so many steps of one action."""
    config = EnvConfig(id=name)
    envs = make_envs(config, describe(config), 0, range(2), pytest.fail)
    envs.reset()
    for _ in range(steps):
        envs.step()
    return envs


# --- spaces -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("space", "observation", "said"),
    [
        (
            Tuple((VECTOR, Discrete(2))),
            (WIDE, 1),
            "the observation under '0' is of dtype float64, its space says float32",
        ),
        (Tuple((VECTOR, Discrete(2))), [FITS, 2], "the observation under '1' is 2, which isn't in Discrete(2)"),
        (Tuple((VECTOR, Discrete(2))), (FITS,), "the observation has 1 parts, its space says 2"),
        (Dict({"a": Tuple((VECTOR,))}), {"a": (WIDE,)}, "the observation under 'a/0' is of dtype float64, "),
        (Dict({"a": VECTOR}), MappingProxyType({"a": FITS}), "is of type mappingproxy, its space says dict"),
        (Dict({"a": VECTOR}), {"a": FITS, 3: FITS, "b": 0}, "has other keys than its space: [3, 'b']"),
        (VECTOR, [[1.0], [2.0, 3.0]], "the observation is [[1.0], [2.0, 3.0]], which isn't in Box"),
        (Dict({"a": VECTOR, "b": VECTOR}), {"a": NAN, "b": WIDE}, "the observation under 'b' is of dtype float64"),
    ],
)
def test_how_an_observation_differs_from_its_space(space, observation, said):
    assert not space.contains(observation)
    assert said in (outside(space, observation) or "")


def test_a_number_that_is_none_is_named_elsewhere():
    assert outside(Dict({"a": VECTOR, "b": VECTOR}), {"a": NAN, "b": FITS}) is None


@pytest.mark.parametrize("name", ["Parts", "Frozen"])
def test_what_can_be_encoded_is_one_warning(name, capsys):
    trained_on(f"heedless:{name}-v0")
    (line,) = capsys.readouterr().err.splitlines()
    said = {"Parts": "under '0' is of dtype float64, its space says float32", "Frozen": "is of type mappingproxy, "}
    assert line.startswith(f"lockstep: warning: heedless:{name}-v0: the observation {said[name]}")


class Unsure(Box):
    """A space that can't say what lies in it."""

    def contains(self, x: Any) -> bool:
        raise RuntimeError("who\nknows")


@pytest.mark.parametrize("reward", [0.0, [[1], [2, 3]]])
def test_a_look_that_fails_ends_nothing(reward, capsys):
    watched = WatchedEnv(gymnasium.make("CartPole-v1"), Unsure(-1, 1, (4,)), "Mine-v0")
    observation, _ = watched.reset(seed=0)
    watched.look(observation, reward)
    assert capsys.readouterr().err == (
        "lockstep: warning: Mine-v0: the observation can't be compared with its space: RuntimeError: who knows\n"
    )


# --- generators -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "moved"), [("DrawsGlobally", "numpy.random"), ("SeedsGlobally", "random")], ids=["numpy", "python"]
)
def test_a_generator_that_all_share_is_one_warning(name, moved, capsys):
    trained_on(f"heedless:{name}-v0", 80)
    (line,) = capsys.readouterr().err.splitlines()
    said = f"it draws from or seeds the global generator of {moved}, which all environments of a process share"
    assert line.startswith(f"lockstep: warning: heedless:{name}-v0: {said}")
    assert "draw every random number from self.np_random" in line


@pytest.mark.parametrize("env_id", ["CartPole-v1", "FrozenLake-v1", "Blackjack-v1", "hooked:Hooked-v0"])
def test_environments_that_draw_from_their_own_are_not_blamed(env_id, capsys):
    envs = trained_on(env_id, 80)
    assert envs.buffers.episodes.min() > 0
    assert capsys.readouterr().err == ""


def test_the_generators_are_watched_on_where_the_space_was_warned_of(capsys):
    class Both(gymnasium.Env):
        action_space = Discrete(2)

        def reset(self, *, seed=None, options=None):
            return WIDE, {}

        def step(self, action):
            return WIDE, random.random(), False, False, {}

    watched = WatchedEnv(Both(), VECTOR, "Both-v0")
    watched.reset(seed=0)
    assert watched.left == WATCHED_STEPS - 1
    watched.step(0)
    assert watched.left == 0
    watched.step(0)
    assert [line.split(": ")[3].split()[1] for line in capsys.readouterr().err.splitlines()] == ["observation", "draws"]


def test_what_is_put_back_is_not_moved():
    watched = GlobalGenerators()
    with watched:
        before = np.random.get_state()
        np.random.seed(0)
        np.random.set_state(before)
    assert watched.said() is None
    with watched:
        np.random.seed(0)
    with watched:
        random.random()
    assert "of numpy.random and of random," in (watched.said() or "")
