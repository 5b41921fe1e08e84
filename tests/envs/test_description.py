import calendar
import sys

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Graph, MultiBinary, MultiDiscrete, Sequence, Text, Tuple

from lockstep.config.run import EnvConfig
from lockstep.core.spaces import ActionLayout, Leaf, ObservationLayout
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.make import make_environment

FAKE = "LockstepTest/Fake-v0"
VECTOR = Box(-1.0, 1.0, (3,), np.float32)


class FakeEnv(gymnasium.Env):
    """Has the spaces that it is given."""

    closed = 0

    def __init__(self, observation_space=VECTOR, action_space=None, error=None):
        if error is not None:
            raise error
        self.observation_space = observation_space
        self.action_space = Discrete(2) if action_space is None else action_space

    def close(self):
        FakeEnv.closed += 1


@pytest.fixture(autouse=True)
def _registered():
    gymnasium.register(FAKE, entry_point=lambda **kwargs: FakeEnv(**kwargs), max_episode_steps=70)
    yield
    del gymnasium.registry[FAKE]


def fake(max_episode_steps=None, **spaces):
    return EnvConfig(id=FAKE, kwargs=spaces, max_episode_steps=max_episode_steps)


def complaint(config):
    with pytest.raises(ValueError) as caught:
        describe(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is supported


def test_discrete_actions():
    assert describe(fake(action_space=Discrete(5, start=-2))) == EnvDescription(
        id=FAKE,
        observation=ObservationLayout((Leaf("", "vector", (3,)),)),
        action=ActionLayout("discrete", (5,), (-2,)),
        max_episode_steps=70,
    )


def test_continuous_actions_with_their_bounds():
    bounds = np.array([[-1.0, -2.0], [0.0, -np.inf]], np.float32), np.array([[1.0, 2.0], [3.0, np.inf]], np.float32)
    description = describe(fake(action_space=Box(*bounds)))
    action = description.action
    assert not action.discrete
    assert not action.bounded
    assert (action.outputs, action.shape) == (4, (2, 2))
    assert action.low == (-1.0, -2.0, 0.0, -np.inf)
    assert action.high == (1.0, 2.0, 3.0, np.inf)


@pytest.mark.parametrize(
    ("space", "shape", "size"),
    [
        (Box(-1, 1, (2, 3), np.float64), (2, 3), 6),
        (Box(0, 255, (128,), np.uint8), (128,), 128),
        (Box(0, 9, (4,), np.int64), (4,), 4),
        (Box(-1, 1, (), np.float32), (), 1),
    ],
)
def test_box_observations_are_counted_flat(space, shape, size):
    observation = describe(fake(observation_space=space)).observation
    assert [leaf.shape for leaf in observation.leaves] == [shape]
    assert (observation.width, observation.dtype) == (size, np.float32)


def test_the_time_limit_is_the_environments_own_or_the_configs():
    assert describe(fake()).max_episode_steps == 70
    assert describe(fake(max_episode_steps=9)).max_episode_steps == 9
    env = make_environment(EnvConfig(id="CartPole-v1", max_episode_steps=4))
    env.reset(seed=0)
    truncated = [env.step(t % 2)[3] for t in range(4)]
    assert truncated == [False, False, False, True]
    env.close()


def test_array_environments_are_known_as_such():
    assert describe(EnvConfig(id="lockstep/CartPole-v1")).is_array
    assert not describe(EnvConfig(id="CartPole-v1")).is_array


def test_arguments_reach_the_environment():
    env = make_environment(EnvConfig(id="Pendulum-v1", kwargs={"g": 1.5}))
    assert getattr(env.unwrapped, "g", None) == 1.5
    env.close()


def test_a_limit_is_an_argument_where_an_environment_has_one_of_this_name():
    """``gymnasium.make`` would keep it, and the environment would have its default."""
    made = make_environment(EnvConfig(id="unfit_later:OwnLimit", kwargs={"max_episode_steps": 500}))
    assert (made.unwrapped.length, made.spec and made.spec.max_episode_steps) == (500, None)  # pyright: ignore[reportAttributeAccessIssue]
    both = EnvConfig(id="unfit_later:OwnLimit", kwargs={"max_episode_steps": 500}, max_episode_steps=70)
    made = make_environment(both)
    assert (made.unwrapped.length, made.spec and made.spec.max_episode_steps) == (500, 70)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("env_id", [FAKE, "unfit_later:Fit", "unfit_later:made_with"])
def test_a_limit_among_the_arguments_is_gymnasiums_elsewhere(env_id):
    made = make_environment(EnvConfig(id=env_id, kwargs={"max_episode_steps": 30}))
    assert made.spec is not None
    assert made.spec.max_episode_steps == 30


def test_texts_are_named_where_they_are_left_out():
    assert describe(fake(observation_space=Dict({"a": VECTOR, "b": Dict({"c": Text(2)})}))).texts == ("b/c",)
    assert describe(fake()).texts == ()


# ---- what is not


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (Text(3), "observation space Text("),
        (Sequence(VECTOR), "observation space Sequence("),
        (Graph(VECTOR, None), "observation space Graph("),
        (Dict({"a": VECTOR, "b": Dict({"c": Sequence(VECTOR)})}), "observation 'b/c': space Sequence("),
    ],
)
def test_observation_spaces_that_are_not_supported_are_named(space, said):
    text = complaint(fake(observation_space=space))
    assert text.startswith(f"env.id: {FAKE}: {said}")
    assert "supported are Box, Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of those" in text


@pytest.mark.parametrize(
    ("space", "said"),
    [
        (Tuple([VECTOR]), "Tuple("),
        (Dict({"a": VECTOR}), "Dict("),
        (Box(0, 3, (2,), np.int32), "int32"),
    ],
)
def test_action_spaces_that_are_not_supported_are_named(space, said):
    text = complaint(fake(action_space=space))
    assert text.startswith(f"env.id: {FAKE}: action space ")
    assert said in text
    assert "supported are Discrete, MultiDiscrete, MultiBinary and floating-point Box" in text


LONG = Box(np.arange(99), np.arange(99) + 1, dtype=np.int32)


@pytest.mark.parametrize("spaces", [{"action_space": LONG}, {"observation_space": Sequence(LONG)}])
def test_a_space_with_a_long_name_is_still_one_line(spaces):
    assert "\n" in str(LONG)
    assert "Box([ 0 1" in complaint(fake(**spaces))


# ---- action masks


def test_where_a_mask_comes_from():
    known = Dict({"board": VECTOR, "legal": MultiBinary(4)})
    action = {"observation_space": known, "action_space": MultiDiscrete([2, 2])}
    description = describe(EnvConfig(id=FAKE, kwargs=action, action_mask="legal"))
    assert description.mask_from == ""
    assert description.observation.mask == Leaf("legal", "mask", (4,), start=3)
    for source in ("info", "method"):
        description = describe(EnvConfig(id=FAKE, kwargs={"action_space": Discrete(6)}, action_mask=source))
        assert description.mask_from == source
        assert description.observation.mask == Leaf("action_mask", "mask", (6,), start=3, apart=True)
    assert describe(fake(**action)).observation.mask is None


@pytest.mark.parametrize(
    ("mask", "spaces", "said"),
    [
        ("legal", {}, "'legal' is no entry of the observation"),
        ("info", {"action_space": VECTOR}, "actions are continuous"),
        ("a", {"observation_space": Dict({"a": VECTOR, "b": VECTOR})}, "'a' has 3 entries and the actions have 2"),
    ],
)
def test_masks_that_do_not_fit(mask, spaces, said):
    text = complaint(EnvConfig(id=FAKE, kwargs=spaces, action_mask=mask))
    assert "env.action_mask: " in text
    assert said in text


def test_the_environment_is_closed_whatever_it_is():
    FakeEnv.closed = 0
    describe(fake())
    assert FakeEnv.closed == 1
    complaint(fake(observation_space=Text(2)))
    assert FakeEnv.closed == 2


def test_workers_are_not_for_array_environments():
    text = complaint(EnvConfig(id="lockstep/CartPole-v1", workers=2))
    assert text.startswith("env.workers: 2,")
    assert "use 0" in text
    assert not describe(EnvConfig(id="CartPole-v1", workers=2)).is_array


@pytest.mark.parametrize("source", ["info", "method"])
@pytest.mark.parametrize("backend", ["auto", "tensor"])
def test_a_mask_apart_is_not_for_array_environments(source, backend):
    config = EnvConfig(id="lockstep/CartPole-v1", action_mask=source, backend=backend)
    assert complaint(config) == (
        f"env.action_mask: {source!r}, but lockstep/CartPole-v1 is an array environment, which forbids no action; "
        "leave it out"
    )


# ---- what can't be made


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("CartPol-v1", "CartPole-v1"),
        ("CartPole-v99", "CartPole-v1"),
        ("cartpole-v1", "CartPole-v1"),
        ("lockstep/CartPol-v1", "lockstep/CartPole-v1"),
        ("LockstepTest/Fak-v0", FAKE),
        ("HalfCheeta-v3", "HalfCheetah-v5"),  # Gymnasium refuses the third, and knows it
    ],
)
def test_an_unknown_id_gets_the_nearest_one(wrong, right):
    assert complaint(EnvConfig(id=wrong)) == f"env.id: no environment {wrong!r} is registered; did you mean {right}?"


def test_a_script_isnt_an_environment():
    assert "'ppo.py' is a script: lockstep run --nproc 2 ppo.py" in complaint(EnvConfig(id="ppo.py"))


MAZES = """raise SystemExit("imported")
class Helper: ...
class _Base(gymnasium.Env): ...
class Maze(_Base):
    def step(self, action): ...
class Cave(gym.Env[int, int]): ...
class Hall(gym.Env): ...
"""


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("mazes", "mazes:Maze"),
        ("mazes.Hall", "mazes:Hall"),
        ("mazes.Hal", "mazes:Hall"),
        ("Maze", None),
        ("cave", "cave:Cave"),
        ("Cave", "cave:Cave"),
        ("games.mazes", "games.mazes:Maze"),
        ("games.mazes.Cave", "games.mazes:Cave"),
        ("helpers", None),
        ("torn", None),
    ],
)
def test_a_file_here_is_read_for_the_class_that_may_be_meant(tmp_path, monkeypatch, wrong, right):
    (tmp_path / "games").mkdir()
    files = {"mazes": MAZES, "games/mazes": MAZES, "cave": "class Cave(gymnasium.Env): ...", "helpers": "class A: ..."}
    for name, text in (files | {"torn": "class A(Env"}).items():
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    text = complaint(EnvConfig(id=wrong))
    start = f"env.id: no environment {wrong!r} is registered; "
    assert text.startswith(
        start + ("'module:Class' names your own class" if right is None else f"did you mean {right}?")
    )


def test_a_script_with_an_environment_is_told_how_to_name_that(tmp_path, monkeypatch):
    (tmp_path / "mazes.py").write_text(MAZES)
    monkeypatch.chdir(tmp_path)
    assert complaint(EnvConfig(id="mazes.py")).endswith("; its environment is mazes:Maze")


@pytest.mark.parametrize("backend", [None, "tensor"])
def test_a_module_that_another_one_hides_is_named(tmp_path, monkeypatch, backend):
    monkeypatch.chdir(tmp_path)
    for name in ("calendar.py", "time.py", "unfit_later.py"):
        (tmp_path / name).touch()
    options = {} if backend is None else {"backend": backend}
    hidden = complaint(EnvConfig(id="calendar:Mine", **options))  # pyright: ignore[reportArgumentType]
    assert hidden.endswith(f"calendar has no Mine; calendar is {calendar.__file__} here, so rename your calendar.py")
    built_in = complaint(EnvConfig(id="time:Mine", **options))  # pyright: ignore[reportArgumentType]
    assert built_in.endswith("time has no Mine; time is built into Python here, so rename your time.py")
    monkeypatch.setattr(sys.modules["unfit_later"], "__file__", str(tmp_path / "unfit_later.py"))
    assert complaint(EnvConfig(id="unfit_later:Mine", **options)).endswith("unfit_later has no Mine")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("backend", [None, "tensor"])
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("mine.py", "mine:Base"),
        ("./mine.py", "mine:Base"),
        ("games/mine.py", "games.mine:Base"),
        ("{}/mine.py", "mine:Base, with {} in PYTHONPATH"),
    ],
)
def test_a_file_in_place_of_a_module_is_told_how_to_name_it(tmp_path, monkeypatch, file, said, backend):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "games").mkdir()
    for path in ("mine.py", "games/mine.py"):
        (tmp_path / path).touch()
    env_id = f"{file.format(tmp_path)}:Base"
    config = EnvConfig(id=env_id) if backend is None else EnvConfig(id=env_id, backend=backend)
    assert complaint(config) == f"env.id: {env_id} names a file; give the module, {said.format(tmp_path)}"


def test_an_id_like_no_other_gets_no_suggestion():
    text = complaint(EnvConfig(id="Qqqqqqqq-v7"))
    assert text.startswith("env.id: no environment 'Qqqqqqqq-v7' is registered; ")
    assert "did you mean" not in text


@pytest.mark.parametrize("env_id", ["not an id", "nosuchmodule_at_all:Env-v0"])
def test_an_id_that_is_none_and_a_module_that_is_not_there(env_id):
    assert complaint(EnvConfig(id=env_id)).startswith(f"env.id: {env_id}")


def test_arguments_that_the_environment_does_not_take():
    text = complaint(EnvConfig(id="CartPole-v1", kwargs={"gravitation": 1}))
    assert text.startswith("env.id: CartPole-v1 can't be made: TypeError: ")
    assert "'gravitation'" in text


def test_a_class_that_is_no_environment_of_gymnasium_says_which_backend_takes_it():
    pytest.importorskip("jax")
    assert complaint(EnvConfig(id="corridors:Corridor")) == (
        "env.id: corridors:Corridor is no gymnasium.Env; one of lockstep.jax takes --env.backend jax, one of tensors "
        "--env.backend tensor"
    )


def test_an_environment_that_raises_when_it_is_made():
    text = complaint(fake(error=RuntimeError("no licence")))
    assert text.startswith(f"env.id: {FAKE} can't be made: RuntimeError: no licence")
    text = complaint(fake(error=RuntimeError("first line\nsecond line")))
    assert "first line second line" in text


def test_a_package_that_is_missing():
    text = complaint(fake(error=gymnasium.error.DependencyNotInstalled("pip install something")))
    assert text == f"env.id: {FAKE} needs a package that isn't installed: pip install something"


@pytest.mark.parametrize(("env_id", "extra"), [("BipedalWalker-v3", "box2d"), ("HalfCheetah-v4", "mujoco")])
def test_a_missing_package_of_gymnasiums_is_an_extra_of_ours(monkeypatch, env_id, extra):
    def make(*_, **__):
        raise gymnasium.error.DependencyNotInstalled("it is not installed, you can install it by two commands")

    monkeypatch.setattr(gymnasium, "make", make)
    said = f"env.id: {env_id} needs a package that isn't installed: pip install 'lockstep-rl[{extra}]'"
    assert complaint(EnvConfig(id=env_id)) == said
    assert "by two commands" in complaint(EnvConfig(id="FrozenLake-v1"))
