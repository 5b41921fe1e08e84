"""Atari games: what the environment shows and gives is what Gymnasium's own wrappers show and give, resets included."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("ale_py", reason="needs ale-py")


import ale_py
import gymnasium
from gymnasium import wrappers

from lockstep.config.run import EnvConfig
from lockstep.envs.gymnasium.atari import SeededLoad, reload_quickly
from lockstep.envs.gymnasium.make import make_environment

gymnasium.register_envs(ale_py)

GAMES = {
    "without sticky actions": ("BreakoutNoFrameskip-v4", {}),
    "with sticky actions": ("ALE/Pong-v5", {}),
    "in colours": ("ALE/Breakout-v5", {"grayscale": False, "noop_max": 0, "screen_size": 40}),
    "whose state doesn't come back": ("ALE/Berzerk-v5", {}),
    "in another mode": ("ALE/Breakout-v5", {"mode": 4}),
}
SEEDS = (3, 2**40, 4, 3)


def by_gymnasium(env_id: str, mode: int | None, grayscale: bool = True, **settings):
    made = gymnasium.make(env_id, frameskip=1, mode=mode)
    env = wrappers.AtariPreprocessing(made, grayscale_obs=grayscale, **settings)
    return wrappers.FrameStackObservation(env, 3)


def by_us(env_id: str, mode: int | None, **settings):
    atari = {"enabled": True, "fire_reset": False, "terminal_on_life_loss": False, **settings}
    config = {"id": env_id, "atari": atari, "frame_stack": 3, "kwargs": {} if mode is None else {"mode": mode}}
    return make_environment(EnvConfig.model_validate(config))


def episode(env, seed: int, steps: int = 40):
    """What a seeded episode shows and gives under keyed actions: observations oldest frame first, rewards and ends."""
    rng = np.random.default_rng(seed)
    shown, given = [env.reset(seed=seed)[0]], []
    for _ in range(steps):
        observation, *rest, _ = env.step(int(rng.integers(env.action_space.n)))
        shown.append(observation)
        given.append(tuple(map(float, rest)))
    return np.stack(shown), given


@pytest.mark.parametrize("game", GAMES)
def test_an_episode_is_what_gymnasiums_wrappers_make_of_its_seed(game):
    env_id, options = GAMES[game]
    settings = {k: v for k, v in options.items() if k != "mode"}
    mode = options.get("mode")
    ours, theirs, episodes = by_us(env_id, mode, **settings), by_gymnasium(env_id, mode, **settings), []
    for seed in SEEDS:
        (shown, given), (expected, right) = episode(ours, seed), episode(theirs, seed)
        frames = np.moveaxis(expected, 1, -1) if expected.ndim == 4 else np.concatenate(np.moveaxis(expected, 1, 0), -1)
        assert np.array_equal(shown, frames)
        assert given == right
        episodes.append(shown)
    assert np.array_equal(episodes[0], episodes[3])
    assert not np.array_equal(episodes[0], episodes[2])
    quick = isinstance(ours.unwrapped.load_game, SeededLoad)  # pyright: ignore[reportAttributeAccessIssue]
    assert quick == ("doesn't" not in game)


@pytest.mark.parametrize(("frame_skip", "rate"), [(1, 60), (4, 15), (7, 9), (200, 1)])
def test_a_video_has_the_games_pace(frame_skip, rate):
    env = by_us("ALE/Pong-v5", None, frame_skip=frame_skip)
    assert env.metadata["render_fps"] == rate
    assert "rgb_array" in env.metadata["render_modes"]
    assert type(env.unwrapped).metadata["render_fps"] == 30  # of all environments of the class


class OtherState:
    """A state as some other version of the emulator might write it down."""

    def __getstate__(self) -> bytes:
        return b"a state without a generator"


class OtherEmulator:
    def getInt(self, name: str) -> int:  # noqa: N802
        return 5

    def cloneSystemState(self) -> OtherState:  # noqa: N802
        return OtherState()

    def restoreSystemState(self, state: OtherState) -> None:  # noqa: N802
        raise AssertionError("nothing may be put back")


class OtherEnv:
    ale = OtherEmulator()

    def load_game(self) -> str:
        return "loaded"


def test_a_state_that_is_not_understood_is_never_put_back():
    env = OtherEnv()
    reload_quickly(env)
    assert env.load_game() == "loaded"


def test_a_generator_that_was_seeded_otherwise_is_noticed():
    env: object = gymnasium.make("ALE/Pong-v5", frameskip=1).unwrapped
    ale = env.ale  # pyright: ignore[reportAttributeAccessIssue]
    assert SeededLoad(ale).possible
    ale.setInt("random_seed", 8)  # said, and not loaded
    assert not SeededLoad(ale).possible
