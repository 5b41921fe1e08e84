"""MiniGrid: its cells are indices, its mission is left out, and its ids need no import."""

import importlib.util

import gymnasium
import numpy as np
import pytest

from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.registry import make_envs

minigrid = pytest.importorskip("minigrid")
DOOR_KEY = "MiniGrid-DoorKey-5x5-v0"


def pictures() -> gymnasium.Env:
    return minigrid.wrappers.RGBImgPartialObsWrapper(gymnasium.make(DOOR_KEY))


def words() -> gymnasium.Env:
    return minigrid.wrappers.FlatObsWrapper(gymnasium.make("MiniGrid-Fetch-5x5-N2-v0"))


def leaves_of(**config):
    return {leaf.name: (leaf.kind, leaf.shape) for leaf in describe(EnvConfig(**config)).observation.leaves}


def test_a_policy_sees_cells_and_direction_as_indices_and_no_mission():
    description = describe(EnvConfig(id=DOOR_KEY))
    assert description.texts == ("mission",)
    direction, cells = description.observation.leaves
    assert (direction.kind, direction.choices) == ("one_hot", (4,))
    assert (cells.kind, cells.shape, cells.pattern) == ("one_hot", (7, 7, 3), (11, 6, 3))


def test_observations_stay_as_the_environment_gives_them():
    env, plain = make_environment(EnvConfig(id=DOOR_KEY)), gymnasium.make(DOOR_KEY)
    layout = describe(EnvConfig(id=DOOR_KEY)).observation
    (ours, _), (theirs, _) = env.reset(seed=3), plain.reset(seed=3)
    assert ours["mission"] == theirs["mission"] == "use the key to open the door and then get to the goal"
    assert env.observation_space.contains(ours)
    np.testing.assert_array_equal(layout.encode(ours), layout.encode(theirs))
    np.testing.assert_array_equal(layout.encode(ours)[1:].reshape(7, 7, 3), theirs["image"])
    other = {**theirs, "image": theirs["image"] + 11}
    assert not env.observation_space.contains(other)
    assert plain.observation_space.contains(other)


def test_wrappers_of_minigrids_own_are_taken_at_their_word():
    assert leaves_of(id=f"{__name__}:pictures")["image"] == ("image", (56, 56, 3))
    assert leaves_of(id=f"{__name__}:words") == {"": ("vector", (2835,))}
    assert leaves_of(id="CartPole-v1") == {"": ("vector", (4,))}


def test_a_stack_holds_cells_of_several_steps():
    config = EnvConfig(id=DOOR_KEY, frame_stack=3)
    cells = next(leaf for leaf in describe(config).observation.leaves if leaf.name == "image")
    assert (cells.shape, cells.pattern) == ((3, 7, 7, 3), (11, 6, 3))
    assert describe(config).texts == ("mission",)


@pytest.mark.parametrize("more", [{}, {"frame_stack": 2}, {"workers": 1}], ids=str)
def test_environments_are_stepped_to_their_ends(more):
    config = EnvConfig.model_validate({"id": "MiniGrid-Empty-5x5-v0", **more})
    envs = make_envs(config, describe(config), 0, range(2), pytest.fail)
    envs.reset()
    ended, rng = 0, np.random.default_rng(0)
    for _ in range(110):  # of at most 100 steps
        envs.buffers.actions[:] = rng.integers(0, 3, 2)
        envs.step()
        ended += int((envs.buffers.terminated | envs.buffers.truncated).sum())
    envs.close()
    assert ended >= 2


def test_without_minigrid_its_ids_say_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = f"env.id: {DOOR_KEY} needs minigrid, which isn't installed; pip install 'lockstep-rl[minigrid]'"
    with pytest.raises(ValueError) as caught:
        describe(EnvConfig(id=DOOR_KEY))
    assert str(caught.value) == said


def test_an_id_of_minigrids_that_there_is_not():
    with pytest.raises(ValueError, match="did you mean MiniGrid-DoorKey-5x5-v0"):
        describe(EnvConfig(id="MiniGrid-DorKey-5x5-v0"))
