"""Wrappers as config: frame skip, sticky actions, frame stack, Atari; and what the learner gets of rewards."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.presets import preset_for
from lockstep.config.run import EnvConfig
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.keyed import KeyedEnv
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.host_envs import HostEnvs, WantedEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import row_hashes
from lockstep.envs.rewards import RewardShaping

NEEDS_ALE = pytest.mark.skipif(importlib.util.find_spec("ale_py") is None, reason="needs ale-py")


class Counting(gymnasium.Env):
    """Observes how many steps were done, into a buffer that it uses again; the reward is the action."""

    def __init__(self, kind: str = "vector") -> None:
        shapes = {"vector": (2,), "gray": (5, 6), "last": (5, 6, 3), "first": (3, 5, 6)}
        shape = shapes["vector" if kind == "dict" else kind]
        high, dtype = (99.0, np.float32) if len(shape) == 1 else (255, np.uint8)
        box = spaces.Box(0, high, shape, dtype)
        mask = spaces.MultiBinary(3)
        self.observation_space: Any = spaces.Dict({"x": box, "mask": mask}) if kind == "dict" else box
        self.action_space = spaces.Discrete(3)
        self._seen, self._steps, self._kind = np.zeros(shape, dtype), 0, kind
        self._mask = np.zeros(3, np.int8)

    def _observe(self) -> Any:
        self._seen[...] = self._steps
        self._mask[:] = np.arange(3) == self._steps % 3
        return {"x": self._seen, "mask": self._mask} if self._kind == "dict" else self._seen

    def reset(self, *, seed=None, options=None):
        self._steps = 0  # its generator isn't seeded: wrappers must not depend on it
        return self._observe(), {}

    def step(self, action):
        self._steps += 1
        return self._observe(), float(action), self._steps == 7, False, {}


gymnasium.register("Counting-v0", lambda **kwargs: Counting(**kwargs))
gymnasium.register("Taking-v0", lambda **kwargs: Counting(kwargs["options"].pop("kind")))


def counting(**settings: Any) -> HostEnvs:
    kind = settings.pop("kind", "vector")
    config = EnvConfig.model_validate({"id": "Counting-v0", "kwargs": {"kind": kind}, **settings})
    envs = make_envs(config, describe(config), 3, range(2), pytest.fail)
    envs.reset()
    return envs


def played(envs: HostEnvs, actions: list[int]) -> list[np.ndarray]:
    rows = []
    for action in actions:
        envs.buffers.actions[:] = action
        envs.step()
        rows.append(envs.buffers.observations[0].copy())
    return rows


def test_a_skipped_frame_repeats_the_action_adds_rewards_and_stops_at_the_end():
    envs = counting(frame_skip=3)
    assert [row.tolist() for row in played(envs, [2, 1])] == [[3, 3], [6, 6]]
    assert envs.buffers.rewards.tolist() == [3.0, 3.0]
    envs.buffers.actions[:] = 2
    envs.step()
    assert envs.buffers.terminated.all()
    assert envs.buffers.rewards.tolist() == [2.0, 2.0]  # the seventh step ended it: one step, not three
    assert envs.buffers.final_observations.tolist() == [[7, 7], [7, 7]]


def test_stacked_vectors_are_one_vector_oldest_first_and_begin_with_the_first_observation():
    envs = counting(frame_stack=3)
    assert envs.buffers.observations[0].tolist() == [0] * 6
    assert [row.tolist() for row in played(envs, [0, 0, 0])] == [
        [0, 0, 0, 0, 1, 1],
        [0, 0, 1, 1, 2, 2],
        [1, 1, 2, 2, 3, 3],
    ]
    played(envs, [0] * 4)
    assert envs.buffers.observations[0].tolist() == [0] * 6  # nothing of the last episode is left


@pytest.mark.parametrize(("kind", "channels"), [("gray", 1), ("last", 3), ("first", 3)])
@pytest.mark.parametrize("stack", [2, 4])
def test_stacked_images_are_one_image_with_more_channels(kind, channels, stack):
    envs = counting(kind=kind, frame_stack=stack)
    (leaf,) = envs.description.observation.leaves
    assert leaf.kind == "image"
    assert leaf.image_shape == (channels * stack, 5, 6)
    row = played(envs, [0] * 3)[-1]
    image = envs.description.observation.decode(row)
    assert image.shape == (5, 6, channels * stack)
    frames = np.maximum(np.arange(3 - stack + 1, 4), 0).repeat(channels)
    assert (image == frames).all()


def test_of_a_stacked_dict_the_action_mask_is_the_newest_one():
    envs = counting(kind="dict", frame_stack=2, action_mask="mask")
    row = played(envs, [0, 0])[-1]
    assert envs.description.observation.mask is not None
    assert envs.description.observation.mask.size == 3
    assert row.tolist() == [1, 1, 2, 2, 0, 0, 1]


def sticky_rewards(env_id: int, episode: int, probability: float, seed: int = 0) -> list[float]:
    config = EnvConfig.model_validate({"id": "Counting-v0", "sticky_actions": probability})
    env, row = KeyedEnv(WantedEnvs(config, describe(config), seed, [env_id]), 0), np.zeros(2, np.float32)
    env.reset(episode, row)
    return [env.step(np.array(t % 3), row)[0] for t in range(6)]


def test_sticky_actions_follow_the_key_of_the_episode_and_nothing_else():
    first = sticky_rewards(0, 0, 0.5)
    assert sticky_rewards(0, 0, 0.5) == first
    others = [sticky_rewards(e, k, 0.5, s) for e, k, s in [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 0, 0), (3, 0, 0)]]
    assert sum(other != first for other in others) >= 4
    assert sticky_rewards(0, 0, 0.0) == [0.0, 1.0, 2.0] * 2


def test_a_repeated_action_is_the_one_before_it_about_as_often_as_asked():
    repeated = total = 0
    for env_id in range(60):
        rewards = sticky_rewards(env_id, 0, 0.25)
        assert rewards[0] == 0.0
        for t in range(1, 6):
            assert rewards[t] in (t % 3, rewards[t - 1])
            repeated, total = repeated + (rewards[t] == rewards[t - 1]), total + 1
    assert 0.17 < repeated / total < 0.33


def test_a_live_episode_in_stateful_wrappers_comes_back_exactly():
    config = EnvConfig.model_validate({"id": "Counting-v0", "sticky_actions": 0.5, "frame_stack": 3})
    wanted, row = WantedEnvs(config, describe(config), 0, [5]), np.zeros(6, np.float32)
    env = KeyedEnv(wanted, 0)
    env.reset(2, row)
    actions, rows, rewards = np.array([0, 1, 2, 0]), np.zeros((4, 6), np.float32), np.zeros(4)
    for t, action in enumerate(actions):
        rewards[t], _ = env.step(action, rows[t])
    again, counted = KeyedEnv(wanted, 0), []
    assert again.restore(2, actions, row_hashes(rows, rewards), rows[-1], {}, lambda: counted.append(1))
    assert len(counted) == 4
    assert [again.step(np.array(a), row)[0] for a in (1, 2)] == [env.step(np.array(a), row)[0] for a in (1, 2)]
    assert not again.restore(2, actions, row_hashes(rows, rewards + 1.0), rows[-1], {}, lambda: None)


@pytest.mark.parametrize(
    ("shaping", "expected"),
    [
        (RewardShaping(), [-3.0, 0.0, 0.5, 7.0]),
        (RewardShaping(sign=True), [-1.0, 0.0, 1.0, 1.0]),
        (RewardShaping(scale=0.5), [-1.5, 0.0, 0.25, 3.5]),
        (RewardShaping(clip=(-1.0, 2.0)), [-1.0, 0.0, 0.5, 2.0]),
        (RewardShaping(sign=True, scale=2.0, clip=(-1.5, 9.0)), [-1.5, 0.0, 2.0, 2.0]),
    ],
)
def test_reward_shaping(shaping, expected):
    assert shaping(np.array([-3.0, 0.0, 0.5, 7.0])).tolist() == expected
    assert shaping.identity == (shaping == RewardShaping())


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"id": "lockstep/CartPole-v1", "frame_skip": 2},
            r"^env.frame_skip: .* use --env.backend gymnasium \(or jax, with --engine jax\)$",
        ),
        ({"id": "lockstep/CartPole-v1", "sticky_actions": 0.25}, r"^env.sticky_actions: "),
        ({"id": "lockstep/CartPole-v1", "atari": True}, r"^env.atari: "),
        ({"id": "CartPole-v1", "atari": True}, r"^env.atari: CartPole-v1 is no ALE game"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        describe(EnvConfig.model_validate(settings))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"reward_clip": (1.0, -1.0)}, "env.reward_clip"),
        ({"atari": True, "frame_skip": 4}, "env.atari.frame_skip"),
        ({"action_mask": "info", "frame_skip": 2}, "env.action_mask"),
        ({"action_mask": "info", "sticky_actions": 0.1}, "env.action_mask"),
        ({"sticky_actions": 1.0}, "sticky_actions"),
    ],
)
def test_options_that_contradict_each_other_are_refused(settings, says):
    with pytest.raises(ValueError, match=says):
        EnvConfig.model_validate({"id": "CartPole-v1", **settings})


@pytest.mark.parametrize("backend", ["auto", "tensor"])
def test_a_frame_stack_is_the_only_wrapper_of_array_environments(backend):
    if backend == "tensor":
        pytest.importorskip("torch")
    config = EnvConfig.model_validate({"id": "lockstep/CartPole-v1", "backend": backend, "frame_stack": 3})
    assert describe(config).is_array
    envs = make_envs(config, describe(config), 0, range(2), pytest.fail)
    envs.reset()
    seen = [envs.buffers.observations.copy()]
    for _ in range(40):
        envs.buffers.actions[:] = 1
        envs.step()
        seen.append(envs.buffers.observations.copy())
        ended = envs.buffers.terminated[:, None]
        first = np.tile(seen[-1][:, -4:], 3)  # of an episode that begins
        expected = np.where(ended, first, np.concatenate([seen[-2][:, 4:], seen[-1][:, -4:]], 1))
        np.testing.assert_array_equal(seen[-1], expected)
    assert envs.buffers.episodes.min() > 1


def test_the_array_environment_in_its_single_form_takes_wrappers():
    config = EnvConfig.model_validate({"id": "lockstep/CartPole-v1", "backend": "gymnasium", "frame_stack": 2})
    assert describe(config).observation.width == 8
    assert not describe(config).is_array


# --- Atari ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def atari() -> Iterator[Callable[..., HostEnvs]]:
    """Makes one game of Breakout in the wrappers of its preset, but for these settings."""
    pytest.importorskip("ale_py")
    made: list[HostEnvs] = []

    def make(**settings: Any) -> HostEnvs:
        config = EnvConfig.model_validate({**preset_for("ALE/Breakout-v5")["env"], **settings})
        made.append(make_envs(config, describe(config), 0, range(1), pytest.fail))
        made[-1].reset()
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def test_the_preset_of_a_game_is_the_standard_one(atari):
    envs = atari()
    assert envs.description.observation.leaves[0].image_shape == (4, 84, 84)
    assert envs.description.rewards == RewardShaping(sign=True)
    assert envs.description.lives
    assert preset_for("PongNoFrameskip-v4")["env"]["atari"] == {"enabled": True}
    assert "atari" not in preset_for("CartPole-v1")["env"]


@pytest.mark.parametrize("life_loss", [True, False])
def test_a_lost_life_is_told_and_the_game_goes_on_until_all_are_lost(atari, life_loss):
    envs = atari(atari={"enabled": True, "terminal_on_life_loss": life_loss, "noop_max": 0})
    lost, over = [], None
    envs.buffers.actions[:] = 0  # fire is pressed for us, and the ball is missed every time
    for t in range(400):
        envs.step()
        if envs.buffers.lost[0]:
            lost.append(t)
            assert envs.buffers.episodes[0] == 0
        if envs.buffers.terminated[0]:
            over = t
            break
    assert over is not None, "the ball is served only when FIRE is pressed"
    assert len(lost) == (4 if life_loss else 0)  # five lives: the last one ends the game
    assert envs.buffers.episodes[0] == 1
    assert not envs.buffers.lost[0]


def test_without_fire_nobody_serves(atari):
    envs = atari(atari={"enabled": True, "fire_reset": False, "noop_max": 0})
    envs.buffers.actions[:] = 0
    for _ in range(200):
        envs.step()
        assert not envs.buffers.lost[0]


@NEEDS_ALE
def test_a_frame_skip_that_would_come_on_top_is_refused():
    with pytest.raises(ValueError, match="ALE/Pong-v5 can't be wrapped"):
        describe(EnvConfig.model_validate({"id": "ALE/Pong-v5", "atari": True, "kwargs": {"frameskip": 4}}))


@NEEDS_ALE
def test_sticky_actions_of_a_game_are_the_emulators_own():
    for probability, expected in ((None, 0.25), (0.0, 0.0), (0.5, 0.5)):
        config = EnvConfig.model_validate({"id": "ALE/Pong-v5", "atari": True, "sticky_actions": probability})
        env = make_environment(config)
        assert env.get_wrapper_attr("ale").getFloat("repeat_action_probability") == pytest.approx(expected)
        env.close()


def test_a_missing_emulator_is_one_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"ale-py, which isn't installed; pip install 'lockstep-rl\[atari\]'"):
        describe(EnvConfig.model_validate({"id": "ALE/Pong-v5"}))


def test_a_wrappers_class_is_an_environment_as_any_other():
    pytest.importorskip("pygame")
    made = make_environment(EnvConfig(id="handed_envs:Wrapped"), render_mode="rgb_array")
    assert isinstance(made.unwrapped, gymnasium.Env)
    assert made.render_mode == "rgb_array"
    made.reset(seed=0)
    picture: Any = made.render()
    assert picture.shape == (400, 600, 3)
    made.close()


def test_an_environment_may_change_its_arguments():
    config = EnvConfig(id="Taking-v0", kwargs={"options": {"kind": "gray"}})
    for _ in range(2):
        assert make_environment(config).observation_space.shape == (5, 6)
    assert config.kwargs == {"options": {"kind": "gray"}}
