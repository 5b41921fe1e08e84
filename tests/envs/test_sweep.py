"""Environments stepped by Lockstep beside Gymnasium's own chain of wrappers: what they give, and how they fail."""

from __future__ import annotations

import importlib
import itertools
import threading
from typing import Any

import gymnasium
import numpy as np
import pytest
from command_line import wait_until
from gymnasium.wrappers import OrderEnforcing, PassiveEnvChecker, TimeLimit, TransformReward
from hooked import Hooked

from lockstep.config.run import EnvConfig
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.envs import describe as describing
from lockstep.envs.describe import describe
from lockstep.envs.gymnasium import in_process
from lockstep.envs.gymnasium.in_process import Watchdog
from lockstep.envs.gymnasium.make import make_environment
from lockstep.envs.gymnasium.sweep import Sweep
from lockstep.envs.gymnasium.time_limit import without_time_limit
from lockstep.envs.host_envs import Buffers, WantedEnvs, buffer_layout
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import row_hashes


def swept(config: EnvConfig, count: int = 2) -> tuple[Sweep, Buffers, WantedEnvs]:
    wanted = WantedEnvs(config, describe(config), 0, range(count))
    layout = buffer_layout(wanted.description, count, 1)
    buffers = Buffers(**{name: np.zeros(shape, dtype) for name, (shape, dtype) in layout.items()})
    return Sweep(wanted, buffers, range(count), 0), buffers, wanted


def test_in_an_evaluation_an_environment_rests_from_its_episodes_end_to_the_next_reset():
    config = EnvConfig(id="tiring:Tiring-v0", max_episode_steps=5)
    wanted = WantedEnvs(config, describe(config), 0, range(2), "eval")
    buffers = Buffers(**{k: np.zeros(s, d) for k, (s, d) in buffer_layout(wanted.description, 2, 1).items()})
    sweep = Sweep(wanted, buffers, range(2), 0)
    for taken in (5, 10):
        sweep.reset()
        ends = []
        for _ in range(8):
            sweep.step()
            ends.append(buffers.truncated.tolist())
        assert ends == [[False] * 2] * 4 + [[True] * 2] + [[False] * 2] * 3
        assert [env.unwrapped.taken for env in sweep.envs] == [taken, taken]  # pyright: ignore[reportAttributeAccessIssue]


# --- Gymnasium's own chain --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env_id", "limit"),
    [("CartPole-v1", 13), ("CartPole-v1", 1), ("Pendulum-v1", 7), ("FrozenLake-v1", 5), ("MountainCar-v0", None)],
)
def test_every_step_is_that_of_gymnasiums_wrappers(env_id, limit):
    config = EnvConfig(id=env_id, max_episode_steps=limit)
    sweep, b, wanted = swept(config)
    chains = [make_environment(config) for _ in range(2)]
    layout, action = wanted.description.observation, wanted.description.action
    sweep.reset()
    episodes = [0, 0]
    for row, chain in enumerate(chains):
        first, _ = chain.reset(seed=wanted.episode_seed(row, 0))
        assert b.observations[row].tobytes() == layout.encode(first).tobytes()
    rng, kinds = np.random.default_rng(1), set()
    for _ in range(260):
        drawn = rng.integers(0, action.choices[0], 2) if action.discrete else rng.normal(size=(2, 1)).astype(np.float32)
        b.actions[:] = drawn
        sweep.step()
        for row, chain in enumerate(chains):
            observation, reward, terminated, truncated, _ = chain.step(action.native(drawn[row]))
            assert b.rewards[row] == float(reward)
            assert (b.terminated[row], b.truncated[row]) == (terminated, truncated)
            if terminated or truncated:
                kinds.add((bool(terminated), bool(truncated)))
                assert b.final_observations[row].tobytes() == layout.encode(observation).tobytes()
                episodes[row] += 1
                observation, _ = chain.reset(seed=wanted.episode_seed(row, episodes[row]))
            assert b.observations[row].tobytes() == layout.encode(observation).tobytes()
        assert b.episodes.tolist() == episodes
    assert min(episodes) >= 1
    assert (False, True) in kinds
    sweep.close()


def test_the_limit_of_make_is_counted_and_every_other_wrapper_stays():
    made = gymnasium.make("CartPole-v1", disable_env_checker=True)
    assert [type(made), type(made.env)] == [TimeLimit, OrderEnforcing]  # pyright: ignore[reportAttributeAccessIssue]
    assert without_time_limit(made) == (made.unwrapped, 500)
    assert without_time_limit(made.unwrapped) == (made.unwrapped, None)
    assert without_time_limit(TimeLimit(made, 40)) == (made.unwrapped, 40)
    checked = gymnasium.make("CartPole-v1")
    assert isinstance(without_time_limit(checked)[0], PassiveEnvChecker)
    scaled = TransformReward(made, lambda reward: 2 * float(reward))
    assert without_time_limit(scaled) == (scaled, None)
    assert without_time_limit(TimeLimit(scaled, 9)) == (scaled, 9)


class Lenient(TimeLimit):
    """A user's own limit."""


def test_a_subclass_of_the_limit_is_no_limit_of_makes():
    own = Lenient(gymnasium.make("CartPole-v1"), 5)
    assert without_time_limit(own) == (own, None)


def test_what_somebody_has_replaced_stays():
    sweep, b, _ = swept(EnvConfig(id="odd_factories:rewarded_tenfold"))
    sweep.reset()
    sweep.step()
    assert b.rewards.tolist() == [10.0, 10.0]


def test_one_object_for_two_environments_is_refused():
    one = EnvConfig(id="odd_factories:always_the_same")
    with pytest.raises(ValueError, match="gives the same object each time"):
        swept(one)
    alone, _, _ = swept(one, 1)  # which nobody else steps
    with pytest.raises(ValueError, match="gives the same object each time"):
        swept(one, 1)  # of an evaluation beside it
    alone.close()
    swept(one, 1)[0].close()


HOOKED = [
    *(("stacked_walk", False), ("scaled_walk", False), ("passed_walk", False)),
    *(("clipped_walk", True), ("sworn_walk", True)),
]


@pytest.mark.parametrize(("name", "back"), HOOKED)
def test_state_hooks_count_where_nothing_around_them_remembers(name, back):
    config = EnvConfig(id=f"odd_factories:{name}", kwargs={})
    sweep, b, _ = swept(config, 1)
    sweep.reset()
    b.actions[0] = 1
    sweep.step()
    (state,) = sweep.save_states()
    assert (state is not None) == back
    again, there, _ = swept(config, 1)
    there.observations[:] = b.observations
    hashes = row_hashes(b.observations, b.rewards)
    there.actions[:] = b.actions
    assert again.restore(0, np.ones(1), hashes, state or {}) == back  # the walk's drift is no seed's
    sweep.step()
    again.step()
    assert (there.observations.tobytes() == b.observations.tobytes()) == back


def test_an_environment_that_fails_to_close_is_told_and_the_others_are_closed(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CLOSED_IN", str(tmp_path))
    sweep, _, _ = swept(EnvConfig(id="odd_factories:Closing"))
    closed = len(list(tmp_path.iterdir()))
    monkeypatch.setenv("CLOSE_FAILS", "1")
    sweep.envs[0].close()
    monkeypatch.delenv("CLOSE_FAILS")
    sweep.envs[1].close()
    assert len(list(tmp_path.iterdir())) == closed + 1
    said = capsys.readouterr().err
    assert "environment 0 (odd_factories:Closing) raised in close" in said
    assert "renderer gone" in said
    monkeypatch.setenv("CLOSE_FAILS", "1")
    assert describe(EnvConfig(id="odd_factories:Closing")).id == "odd_factories:Closing"
    assert "renderer gone" in capsys.readouterr().err


def test_a_restored_episode_is_truncated_where_it_would_have_been():
    config = EnvConfig(id="CartPole-v1", max_episode_steps=6)
    for elapsed in (2, 5):
        sweep, b, _ = swept(config, 1)
        sweep.reset()
        b.actions[0] = 0
        rows = []
        for t in range(elapsed):
            b.actions[0] = t % 2
            sweep.step()
            rows.append((b.observations.copy(), b.rewards.copy()))
        hashes = np.concatenate([row_hashes(row, reward) for row, reward in rows])
        again, there, _ = swept(config, 1)
        there.observations[:] = b.observations
        assert again.restore(0, np.arange(elapsed) % 2, hashes, {})
        left = 0
        while not there.truncated[0]:
            there.actions[0] = left % 2
            again.step()
            left += 1
        assert left == 6 - elapsed


@pytest.mark.parametrize("elapsed", [2, 5])
def test_an_episode_that_its_hooks_restore_is_truncated_where_it_would_have_been(elapsed):
    config = EnvConfig(id="hooked:Hooked-v0", max_episode_steps=6)
    sweep, b, _ = swept(config, 1)
    sweep.reset()
    for _ in range(elapsed):
        sweep.step()
    (state,) = sweep.save_states()
    assert state
    again, there, _ = swept(config, 1)
    there.observations[:] = b.observations
    assert again.restore(0, np.zeros((elapsed, *b.actions.shape[1:])), np.zeros(0, np.uint64), state)
    left = 0
    while not there.truncated[0]:
        again.step()
        left += 1
        assert left <= 6 - elapsed
    assert left == 6 - elapsed


def test_an_episode_that_is_longer_than_a_limit_is_truncated_at_the_next_step():
    """As one is that was saved with another limit."""
    longer, b, _ = swept(EnvConfig(id="hooked:Hooked-v0", max_episode_steps=6), 1)
    longer.reset()
    for _ in range(5):
        longer.step()
    (state,) = longer.save_states()
    again, there, _ = swept(EnvConfig(id="hooked:Hooked-v0", max_episode_steps=3), 1)
    there.observations[:] = b.observations
    assert again.restore(0, np.zeros((5, *b.actions.shape[1:])), np.zeros(0, np.uint64), state or {})
    again.step()
    assert there.truncated[0]


def test_hooks_may_write_to_what_they_are_given(monkeypatch):
    """Evaluations give it back again and again."""
    take = Hooked.set_env_state

    def spoils(self, state):
        take(self, state)
        for array in state.values():
            array[...] = 99

    monkeypatch.setattr(Hooked, "set_env_state", spoils)
    sweep, b, _ = swept(EnvConfig(id="hooked:Hooked-v0"), 1)
    sweep.reset()
    (state,) = sweep.save_states()
    assert state
    nothing, seen = b.actions[:0], []
    for _ in range(2):
        assert sweep.restore(0, nothing, np.zeros(0, np.uint64), state)
        sweep.step()
        seen.append(b.observations.copy())
    np.testing.assert_array_equal(*seen)


def test_a_replay_that_ends_an_episode_which_went_on_restores_nothing():
    """Though every number is the same, as where the limit was another one."""
    longer, b, _ = swept(EnvConfig(id="CartPole-v1", max_episode_steps=6), 1)
    longer.reset()
    b.actions[0], hashes = 0, []
    for _ in range(4):
        longer.step()
        hashes.append(row_hashes(b.observations, b.rewards))
    for limit, restored in ((6, True), (4, False)):
        again, there, _ = swept(EnvConfig(id="CartPole-v1", max_episode_steps=limit), 1)
        there.observations[:] = b.observations
        assert again.restore(0, np.zeros(4, np.int64), np.concatenate(hashes), {}) == restored
        assert there.episodes[0] == (0 if restored else 1)


# --- What a step says -------------------------------------------------------------------------------------------------


def test_what_a_step_said_is_not_said_again_by_the_next_one():
    sweep, b, _ = swept(EnvConfig(id="telling:Telling-v0"))
    sweep.reset()
    for _ in range(6):
        b.actions[:] = [1, 0]
        env_metrics = sweep.step()
    assert b.successes.tolist() == [1, -1]
    assert b.terminated.tolist() == [True, True]
    assert env_metrics == {}
    b.actions[:] = 0
    sweep.step()
    assert not b.terminated.any()
    assert b.successes.tolist() == [-1, -1]


def sizes(observation: Any) -> Any:
    """An environment whose observations have another shape from its third step on."""

    class Env(gymnasium.Env):
        observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
        action_space = gymnasium.spaces.Discrete(2)

        def reset(self, *, seed=None, options=None):
            self._t = 0
            return np.zeros(3, np.float32), {}

        def step(self, action):
            self._t += 1
            return (observation if self._t > 2 else np.zeros(3, np.float32)), 0.0, False, False, {}

    return Env


@pytest.mark.parametrize("wrong", [np.zeros(1, np.float32), np.zeros(2, np.float32), 0.5])
def test_a_shape_that_would_broadcast_is_named_nevertheless(wrong):
    gymnasium.register("Sizes-v0", sizes(wrong))
    sweep, _, _ = swept(EnvConfig(id="Sizes-v0"))
    try:
        sweep.reset()
        sweep.step()
        sweep.step()
        shape = str(np.shape(wrong)).replace("(", r"\(").replace(")", r"\)")
        with pytest.raises(
            EnvironmentFailureError, match=rf"^environment 0 .* of shape {shape}, its space says \(3,\)"
        ):
            sweep.step()
    finally:
        del gymnasium.registry["Sizes-v0"]


def test_a_shape_of_as_many_numbers_is_taken():
    gymnasium.register("Sizes-v0", sizes(np.array([[0.1, 0.2, 0.3]], np.float64)))
    sweep, b, _ = swept(EnvConfig(id="Sizes-v0"))
    try:
        sweep.reset()
        for _ in range(3):
            sweep.step()
        np.testing.assert_array_equal(b.observations, np.array([[0.1, 0.2, 0.3]] * 2, np.float32))
    finally:
        del gymnasium.registry["Sizes-v0"]


# --- Life -------------------------------------------------------------------------------------------------------------


class Asking(gymnasium.Env):
    """Writes down what the buffers say of who is being stepped."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    seen: list[tuple[int, int]] = []  # noqa: RUF012
    buffers: Any = None

    def _note(self) -> None:
        if Asking.buffers is not None:
            self.seen.append((int(Asking.buffers.stepping[0]), int(Asking.buffers.heartbeats[0])))

    def reset(self, *, seed=None, options=None):
        self._note()
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self._note()
        return np.zeros(1, np.float32), 0.0, bool(action), False, {}


def test_the_sign_of_life_changes_with_every_step_and_reset_and_says_whose_it_is():
    gymnasium.register("Asking-v0", lambda **_: Asking())
    try:
        sweep, b, _ = swept(EnvConfig(id="Asking-v0"), 3)
        Asking.buffers, Asking.seen[:] = b, []
        sweep.reset()
        b.actions[:] = [0, 1, 0]
        sweep.step()
        sweep.step()
        assert [row for row, _ in Asking.seen] == [0, 1, 2] + 2 * [0, 1, 1, 2]
        assert len(set(Asking.seen)) == len(Asking.seen)
        assert b.stepping.tolist() == [-1]
    finally:
        Asking.buffers = None
        del gymnasium.registry["Asking-v0"]


def test_whoever_waits_for_this_rank_sees_that_its_environments_go_on():
    signs = iter(range(10**9))
    moving = Watchdog(0.2, lambda: next(signs), lambda: "", pytest.fail)
    before = life.sign().count
    with moving:
        wait_until(lambda: life.sign().count >= before + 3, "what is waited for is no sign of life of this rank")
    moving.close()


@pytest.fixture
def waiting(monkeypatch):
    """A module whose environment number ``made_before`` waits where it is made until it is released."""
    module = importlib.import_module("unfit_later")
    monkeypatch.setattr(module, "RELEASED", threading.Event())
    monkeypatch.setattr(module, "MADE", itertools.count())
    for place in (describing, in_process):
        monkeypatch.setattr(place, "MAKE_SECONDS", 1.0)
    return module


def test_an_environment_that_is_never_made_is_named(waiting):
    said = []

    def fail(message: str) -> None:
        said.append(message)
        waiting.RELEASED.set()

    config = EnvConfig(id="unfit_later:WaitsWhereMade", kwargs={"made_before": 3}, timeout=0.1)
    make_envs(config, describe(config), 0, range(4), fail).close()
    line = f"environment 2 ({config.id}) wasn't made within 1 s; a longer env.timeout gives it more"
    assert said == [line]


def test_where_its_spaces_are_read_it_is_told_and_waited_for(waiting, monkeypatch):
    said = []

    def say(line: str) -> None:
        said.append(line)
        waiting.RELEASED.set()

    monkeypatch.setattr(describing, "say", say)
    config = EnvConfig(id="unfit_later:WaitsWhereMade", timeout=0.1)
    describe(config)
    assert said == [f"lockstep: warning: env.id: {config.id} isn't made after 1 s; it is waited for"]
    describe(config)
    assert len(said) == 1
