"""Pictures of environments that JAX steps: gymnax's, MuJoCo's, and what has none."""

import jax
import numpy as np
import pytest

from lockstep.config.run import EnvConfig
from lockstep.envs.arrays.pictures.window import Window
from lockstep.envs.graphics import prepare_rendering
from lockstep.jax_engine.envs.picture import DrawnEnvironment
from lockstep.jax_engine.envs.renderers import MujocoRenderer
from lockstep.policies.videos import drawn_environment, frames_per_second


def drawn(env_id, **settings):
    return drawn_environment(EnvConfig(id=env_id, **settings), "rgb_array")


@pytest.mark.parametrize("env_id", ["gymnax/CartPole-v1", "gymnax/Breakout-MinAtar"])
def test_gymnax_draws_its_states(env_id):
    for package in ("gymnax", "matplotlib", "seaborn", "pygame"):
        pytest.importorskip(package)
    env = drawn(env_id)
    assert isinstance(env, DrawnEnvironment)
    env.reset(seed=1)
    first = env.render()
    assert (first.dtype, first.shape[2], first.ndim) == (np.uint8, 3, 3)
    assert np.array_equal(env.render(), first)
    for _ in range(4):
        env.step(0)
    assert not np.array_equal(env.render(), first)


@pytest.mark.parametrize(("device", "backend"), [("cpu", "cpu"), ("cuda", None), ("tpu", None)])
def test_an_environment_is_stepped_where_an_evaluation_steps_it(device, backend, monkeypatch):
    """A run's own kind of device: another one rounds differently, so that another episode would be shown."""
    asked, local = [], jax.local_devices

    def devices(**given):
        asked.append(given["backend"])
        return local(backend="cpu")

    config = EnvConfig(id="lockstep/CartPole-v1", backend="jax")
    monkeypatch.setattr(jax, "local_devices", devices)
    with jax.default_device(local(backend="cpu")[-1]):  # of the caller
        env = DrawnEnvironment(config, "rgb_array", device)
        env.reset(seed=0)
        env.step(1)
    assert asked == [backend]
    assert {leaf.devices().pop() for leaf in jax.tree.leaves(env._state)} == {local(backend="cpu")[0]}


def test_what_has_no_picture_says_so():
    with pytest.raises(ValueError, match=r"^corridors:Corridor can't be drawn: it has no render\(state, params\)"):
        drawn("corridors:Corridor", backend="jax")
    with pytest.raises(ValueError, match=r"^corridors:Painted is stepped by JAX and can't be shown in a window"):
        drawn_environment(EnvConfig(id="corridors:Painted", backend="jax"), "human")
    pytest.importorskip("gymnax")
    env = drawn("gymnax/DeepSea-bsuite")
    env.reset(seed=0)
    with pytest.raises(ValueError, match="gymnax draws no picture of it"):
        env.render()


def test_array_environments_are_drawn_shown_and_written(monkeypatch):
    shown, seen = [], []
    monkeypatch.setattr(Window, "show", lambda _, picture: shown.append(picture))
    for mode in ("rgb_array", "human", "ansi"):
        config = EnvConfig(id="lockstep/Snake-v0", kwargs={"size": 4}, backend="jax", frame_stack=2)
        env = drawn_environment(config, mode)
        env.reset(seed=1)
        *_, info = env.step(1)
        assert info["score"] in (0, 1)
        seen.append(env.render())
        env.close()
    picture, _, text = seen
    assert (picture.dtype, picture.shape) == (np.uint8, (480, 480, 3))
    assert len(shown) == 2
    np.testing.assert_array_equal(shown[1], picture)
    assert text.splitlines()[0] == "+-------+"


@pytest.mark.parametrize(
    "named", [{"id": "CartPole-v1"}, {"id": "lockstep/CartPole-v1"}, {"id": "lockstep/CartPole-v1", "backend": "jax"}]
)
@pytest.mark.parametrize(("skip", "pace"), [(1, 50), (4, 12), (200, 1)])
def test_pictures_of_every_few_steps_are_as_many_fewer_a_second(named, skip, pace):
    config = EnvConfig(**named, frame_skip=skip, frame_stack=2, sticky_actions=0.1)
    env = drawn_environment(config, "rgb_array")
    assert frames_per_second(env) == pace
    env.close()


BALL = """
<mujoco><worldbody><camera name="side" pos="0 -3 0" xyaxes="1 0 0 0 0 1"/><light pos="0 -3 3"/>
<body><joint type="slide" axis="1 0 0"/><geom size="0.3" rgba="1 0 0 1"/></body></worldbody></mujoco>
"""


def test_a_model_is_seen_where_it_is():
    prepare_rendering(screen=False)
    mujoco = pytest.importorskip("mujoco")
    try:
        pictures = MujocoRenderer(mujoco.MjModel.from_xml_string(BALL))
    except Exception as error:
        pytest.skip(f"no graphics library here: {error}")
    columns = []
    for place in (-0.5, 0.5):
        picture = pictures([place], [0.0], None)
        assert picture.shape == (480, 640, 3)
        red = picture[..., 0].astype(int) - picture[..., 1]
        columns.append((red * np.arange(640)).sum() / red.sum())
    assert columns[0] < 300
    assert columns[1] > 340
