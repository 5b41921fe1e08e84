"""``play`` and the videos of a run show the episodes that evaluations count; where they can't, a line says so."""

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from lockstep.config.checks import resolve
from lockstep.config.engines import engine_module
from lockstep.config.run import Config, EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium.make import make_environment
from lockstep.launch.request import request_of
from lockstep.policies import videos
from lockstep.policies.evaluation import evaluate
from lockstep.policies.policy import Policy
from lockstep.policies.videos import check_video, drawn_environment, play
from lockstep.runs.checkpoint import POLICY
from lockstep.torch_engine.state import make_net
from lockstep.training.session import policy_of

SMALL = {"hidden_sizes": [8], "image": {"width": 0.25, "depth": 1}}


def policy_in(env: dict[str, Any], engine: str = "torch") -> Policy:
    """A policy of random parameters."""
    settings = {"env": env, "engine": engine, "network": SMALL, "eval": {"max_steps": 80}, "seed": 5}
    config = resolve(Config.model_validate(settings))
    description = describe(config.env)
    net, generator = make_net(config, description.observation, description.action), np.random.default_rng(0)
    arrays = {POLICY + name: generator.normal(0, 0.5, shape).astype(np.float32) for name, shape in net.shapes().items()}
    return policy_of(config, description, arrays, 0)


def assert_shows_what_counts(
    policy: Policy, episodes: int = 4, deterministic: bool = True, seed: int | None = None
) -> None:
    """Plays and evaluates, one by one if the policy's noise goes on from episode to episode."""
    shown = play(policy, None, episodes, seed, deterministic)
    table = evaluate(policy, episodes, seed, deterministic, 1 if not deterministic else episodes)
    assert [length for _, length, _ in shown] == table[:, 1].tolist()
    np.testing.assert_allclose([total for total, *_ in shown], table[:, 0], rtol=1e-4, atol=1e-4)
    scores = [score for *_, score in shown]
    assert scores == ([None] * episodes if np.isnan(table[:, 3]).any() else table[:, 3].tolist())


@pytest.fixture
def unseen(monkeypatch):
    """Has environments drawn by nobody, so that no picture needs a package."""

    def made(config: EnvConfig, _: str, device: str) -> Any:
        if config.jax_only:
            return engine_module("jax").DrawnEnvironment(config, "rgb_array", device)
        return make_environment(config)

    monkeypatch.setattr(videos, "drawn_environment", made)


ENVIRONMENTS = {
    "CartPole": {"id": "lockstep/CartPole-v1"},
    "CartPole on tensors": {"id": "lockstep/CartPole-v1", "backend": "tensor", "max_episode_steps": 15},
    "Snake": {"id": "lockstep/Snake-v0", "kwargs": {"size": 4}},
    "stacked Snake": {"id": "lockstep/Snake-v0", "kwargs": {"size": 4}, "frame_stack": 2},
    "images": {"id": "lockstep/GridWorldPixels-v0", "max_episode_steps": 20},
    "stacked PushCube": {"id": "lockstep/PushCube-v0", "frame_stack": 3, "max_episode_steps": 15},
    "one by one": {"id": "lockstep/Snake-v0", "kwargs": {"size": 4}, "backend": "gymnasium", "sticky_actions": 0.3},
}


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("env", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
def test_the_episodes_of_array_environments_are_those_that_count(env):
    policy = policy_in(env)
    assert_shows_what_counts(policy)
    assert_shows_what_counts(policy, deterministic=False)
    assert_shows_what_counts(policy, deterministic=False, seed=7)


IN_JAX = {
    "Snake": {"id": "lockstep/Snake-v0", "kwargs": {"size": 4}},
    "wrapped CartPole": {"id": "lockstep/CartPole-v1", "frame_skip": 2, "sticky_actions": 0.3, "frame_stack": 2},
}


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("env", IN_JAX.values(), ids=IN_JAX)
def test_those_that_jax_draws_are_too(env):
    policy = policy_in({**env, "backend": "jax", "max_episode_steps": 40}, "jax")
    assert_shows_what_counts(policy, 2, deterministic=False)  # each of which is compiled anew


@pytest.mark.usefixtures("unseen")
def test_a_run_inside_the_compiled_program_shows_them():
    """Whose evaluations are stepped on the host."""
    config = request_of(["CartPole-v1", "--engine", "jax"]).config
    assert_shows_what_counts(policy_in(config.env.model_dump(), "jax"))


@pytest.mark.usefixtures("unseen")
def test_a_video_is_of_an_evaluations_first_episode(monkeypatch, tmp_path):
    class Writer(list):
        append_data = list.append

        def close(self):
            assert len(self) == evaluate(policy, 1)[0, 1]

    writer, policy = Writer(), policy_in({"id": "lockstep/PushCube-v0", "max_episode_steps": 15})
    monkeypatch.setattr(videos, "video_writer", lambda path, _: path.touch() or writer)
    monkeypatch.setattr(videos, "_frame", lambda _: np.zeros((2, 2, 3), np.uint8))
    assert videos.record_evaluation(policy, tmp_path / "a.mp4") == pytest.approx(evaluate(policy, 1)[0, 0])
    assert writer


def test_other_episodes_would_be_found():
    """Two seeds, and two episodes of a seed, differ."""
    policy = policy_in(ENVIRONMENTS["Snake"])
    policy.reset(5)
    first = evaluate(policy, 8, None, False, 1)
    assert len({tuple(row) for row in first.tolist()}) > 2
    assert not np.array_equal(evaluate(policy, 8, 6, False, 1), first)


@pytest.mark.parametrize("mode", ["rgb_array", "human", "ansi"])
def test_another_environment_is_not_shown_in_envpools_place(mode):
    line = r"^env.backend: envpool, which draws no pictures, and an .* another one; lockstep eval plays CartPole-v1$"
    with pytest.raises(ValueError, match=line):
        drawn_environment(EnvConfig(id="CartPole-v1", backend="envpool"), mode)
    with pytest.raises(
        ValueError, match=r"^env.id: simulators:isaac is a simulator on tensors, .* can't be drawn here"
    ):
        drawn_environment(EnvConfig(id="simulators:isaac", backend="tensor"), mode)


def test_no_run_starts_whose_videos_would_be_of_another_environment():
    pytest.importorskip("imageio_ffmpeg")
    line = (
        r"^eval.record_video: env.backend: envpool, which draws .*; --eval.record-video false goes on without videos$"
    )
    with pytest.raises(ValueError, match=line):
        check_video(EnvConfig(id="CartPole-v1", backend="envpool"))


class Otherwise(gymnasium.Env):
    """Observes as many numbers as its space says, in another shape: training takes them, with a warning."""

    action_space = spaces.Discrete(3)
    observations = {  # noqa: RUF012
        "one": (spaces.Box(-9, 9, (1,)), float),
        "row": (spaces.Box(-9, 9, (3,)), lambda at: np.array([[at, 1.0, at % 2]], np.float32)),
        "index": (spaces.Discrete(9), lambda at: np.array([at % 9])),
    }

    def __init__(self, kind):
        self.observation_space, self._observe = self.observations[kind]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._at = int(self.np_random.integers(5))
        return self._observe(self._at), {}

    def step(self, action):
        assert type(action) is int
        self._at = (3 * self._at + action + 1) % 11 - 2 * (action == 2)
        self._at = max(self._at, 0)
        return self._observe(self._at), float(10 * self._at + action), False, False, {}


@pytest.mark.usefixtures("unseen")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("kind", Otherwise.observations)
def test_so_do_those_of_environments_that_observe_in_another_shape(kind, engine, deterministic):
    gymnasium.register("Otherwise-v0", lambda **kwargs: Otherwise(**kwargs), max_episode_steps=12)
    try:
        env = {"id": "Otherwise-v0", "kwargs": {"kind": kind}}
        assert_shows_what_counts(policy_in(env, engine), 3, deterministic)
    finally:
        del gymnasium.registry["Otherwise-v0"]


@pytest.mark.parametrize(
    ("trained", "played", "said"),
    [
        ({"id": "lockstep/Snake-v0", "kwargs": {"size": 4}}, {"kwargs": {"size": 6}}, r"image \(4, 4, 3\)"),
        ({"id": "CartPole-v1"}, {"id": "Acrobot-v1"}, r"vector \(6,\); actions .*trained with vector \(4,\)"),
        ({"id": "FrozenLake-v1"}, {"kwargs": {"map_name": "8x8"}}, r"one_hot \(\) \(64,\).*one_hot \(\) \(16,\)"),
        ({"id": "Pendulum-v1"}, {"id": "MountainCarContinuous-v0"}, "vector"),
    ],
)
def test_an_environment_of_other_spaces_is_refused(trained, played, said):
    """A policy would read another part of each row than it learnt from, and say nothing."""
    policy = policy_in(trained)
    assert len(evaluate(policy, 1)) == 1
    env = policy.config.env.model_copy(update=played)
    policy.config = policy.config.model_copy(update={"env": env})
    with pytest.raises(ValueError, match=said) as caught:
        evaluate(policy, 2)
    assert str(caught.value).startswith(f"env.id: {env.id} has observations ")
    assert "\n" not in str(caught.value)


class Breaking(gymnasium.Env):
    """Observes NaN in its third step, and goes on."""

    observation_space = spaces.Box(-1.0, 1.0, (4,))
    action_space = spaces.Discrete(2)

    def __init__(self, broken=True, **_):
        self._broken = broken

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(4, np.float32), {}

    def step(self, action):
        self._steps += 1
        observed = np.full(4, np.nan if self._broken and self._steps == 3 else 0.0, np.float32)
        return observed, 1.0, self._steps == 6, False, {}


def test_an_observation_of_nan_ends_an_evaluation_as_it_ends_training(monkeypatch):
    gymnasium.register("Breaking-v0", Breaking)
    try:
        policy = policy_in({"id": "Breaking-v0"})
        with pytest.raises(
            EnvironmentFailureError, match=r"environment Breaking-v0 gave .*nan.* in step 3 of episode 0"
        ):
            evaluate(policy, 2)
        env = policy.config.env.model_copy(update={"kwargs": {"broken": False}})
        policy.config = policy.config.model_copy(update={"env": env})
        assert evaluate(policy, 2)[:, 0].tolist() == [6.0, 6.0]
    finally:
        del gymnasium.registry["Breaking-v0"]
