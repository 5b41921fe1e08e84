"""Tasks of pmap task libraries run with only the import changed: hooks, numbers of the whole run, logging, errors."""

import copy
import logging
import pickle
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pmap_periodic
import pmap_walking
import pytest
from gymnasium import spaces
from refusals import error_of

import lockstep.jax as ljax
from lockstep.jax import training
from lockstep.jax.engine_state import replaced_environments
from lockstep.jax.pmap.config import settings_of
from lockstep.jax.pmap.rewards import terms_of
from lockstep.jax.training import Training
from lockstep.jax_engine.program.runner import DeviceRunner
from lockstep.jax_engine.state import EnvCarry

pytestmark = pytest.mark.quick


def same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in leaves)


# --- scripts ---------------------------------------------------------------------------------------------------------


def test_a_task_with_all_hooks_runs(caplog):
    caplog.set_level(logging.DEBUG, "lockstep.jax")
    task, state, history = pmap_walking.main()
    assert (task.num_devices, task.num_envs_per_device, task.num_steps) == (2, 4, 8)
    assert dict(task._training.program.mesh.shape) == {"device": 2, "fsdp": 1}
    assert history.total_loss.shape == (3,)
    assert set(state.params) >= {"model.actor.layers.0.weight", "model.critic.layers.0.weight"}
    assert (history["reward/upright"] > 1.5).all()
    assert ((history["reward/effort"] <= 0) & (history["reward/effort"] >= -0.01)).all()
    assert history["episode_length"][~np.isnan(history["episode_length"])].min() > 5
    assert [(m.update, m.num_envs) for m in task.device_log] == [(u, 4) for u in (1, 1, 2, 2, 3, 3)]
    text = caplog.text
    assert "training on 2 devices, 4 environments on each" in text
    assert "device 1: environments 4 to 7" in text
    assert "update 2: {'total_loss'" in text
    assert re.search(r"update 3 · \S+ · 4 environments", text)


@pytest.mark.long
def test_a_task_that_averages_now_and_then_runs(tmp_path, caplog):
    caplog.set_level(logging.INFO, "lockstep.jax")
    task, state, history = pmap_periodic.main(tmp_path / "c")
    assert task.ppo_config.n_minibatches == 2
    assert task.runner_config.sync_period == 2
    assert history.total_loss.shape == (3,)
    assert int(state.step) == 3
    assert [m.update for m in task.device_log] == []  # of update 2 in the run before
    assert "update 2 · " in caplog.text
    assert "environments" in caplog.text
    assert np.allclose(history["reward/haste"], -0.1)
    whole = pmap_periodic.CorridorTask(pmap_periodic.config())
    assert same(whole.train()[0], state)
    assert "DEBUG" not in {record.levelname for record in caplog.records}


# --- hooks -----------------------------------------------------------------------------------------------------------


class Plain(pmap_periodic.CorridorTask):
    """The networks of the config, and the engine's own rollout."""


class Copied(Plain):
    def rollout(self, model, env_state, rng):
        trajectory, env_state = super().rollout(model, env_state, rng)
        assert trajectory.obs.shape == (8, len(trajectory.reward[0]), 2)
        output, values = model(trajectory.obs[0])
        assert output.shape == (len(values), 2)
        assert model.mode(trajectory.obs[0]).shape == values.shape
        assert jax.tree.leaves(env_state.state)[0].shape == values.shape
        return trajectory._replace(reward=3 * trajectory.reward), env_state


class Scaled(Copied):
    def rollout(self, model, env_state, rng):
        trajectory, env_state = super().rollout(model, env_state, rng)
        return trajectory._replace(reward=trajectory.reward / 3), env_state


def trained(kind, **changes):
    task = kind(pmap_periodic.config(**({"grad_sync_period": 1, "total_timesteps": 64} | changes)))
    return task.run_distributed_training()


@pytest.fixture(scope="module")
def copied():
    return trained(Copied, total_timesteps=3 * 64)


def test_a_rollout_of_ones_own_is_what_is_learned_from(copied):
    state, history = copied
    scaled, of_scaled = trained(Scaled, total_timesteps=3 * 64)
    assert history.critic_loss[0] > 2 * of_scaled.critic_loss[0]
    assert not same(state.params, scaled.params)


@pytest.mark.long
def test_a_rollout_of_ones_own_is_the_same_on_any_number_of_devices(copied):
    state, history = copied
    on_one, of_one = trained(Copied, num_devices=1, total_timesteps=3 * 64)
    assert same(state.params, on_one.params)
    assert same(history, of_one)
    plain, _ = trained(Plain, total_timesteps=3 * 64)
    assert not same(plain.params, state.params)


def test_a_rollout_of_ones_own_counts_episodes_as_the_engine_does(copied):
    state, history = copied
    lengths, returns = history["episode_length"], history["episode_return"]
    ended = history["episodes"] > 0
    assert ended.any()
    # three times: twice the arrival, less a tenth a step
    assert np.allclose(returns[ended], 3 * (2 - 0.1 * lengths[ended]), atol=1e-4)
    assert int(state.step) == 3


class Lasting:
    """An environment whose episodes end by their time limit alone, after six steps of reward 1."""

    max_episode_steps = 6

    def observation_space(self, params=None):
        return spaces.Box(-1, 1, (1,))

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def reset(self, key, params=None):
        return jnp.zeros(1), jnp.int32(0)

    def step(self, key, state, action, params=None):
        return jnp.zeros(1), state + 1, jnp.float32(1), jnp.bool_(False), {}


class Repeating(Plain):
    """Takes each action twice."""

    def get_environment(self):
        return Lasting()

    def get_rewards(self):
        return None

    def rollout(self, model, env_state, rng):
        def step(env_state, rng):
            act, *moves = jax.random.split(rng, 3)
            action, seen = model.sample(env_state.obs, act), env_state.obs
            env_state, one = env_state.step(action, moves[0])
            env_state, two = env_state.step(action, moves[1])
            return env_state, two._replace(obs=seen, reward=one.reward + two.reward)

        env_state, trajectory = jax.lax.scan(step, env_state, jax.random.split(rng, self.num_steps))
        return trajectory, env_state


def test_a_rollout_that_repeats_actions_does_not_move_the_time_limit():
    _, history = trained(Repeating, total_timesteps=3 * 64)
    assert history["episode_return"].tolist() == [6, 6, 6]
    assert history["episode_length"].tolist() == [6, 6, 6]
    # sixteen steps an update: 2, then 3 more after 4 of an episode, then 3 after 2
    assert history["episodes"].tolist() == [2 * 8, 3 * 8, 3 * 8]


def carried(task) -> Any:
    return task._training.device_runner.state.envs


class FromFar(Plain):
    def get_initial_env_state(self, rng):
        place = jnp.full(self.config.num_envs, 3, jnp.int32)
        return jnp.stack([place, place + 1], -1).astype(jnp.float32), place


def test_first_episodes_begin_with_states_of_ones_own():
    task = FromFar(pmap_periodic.config(grad_sync_period=1))
    task._training.begin()
    assert np.asarray(carried(task).state).tolist() == np.full((8, 1), 3).tolist()
    assert (np.asarray(task._training.state(0).env_obs)[..., 0] == 3).all()
    plain = Plain(pmap_periodic.config(grad_sync_period=1))
    plain._training.begin()
    assert not np.asarray(carried(plain).state).any()


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda task: pickle.loads(pickle.dumps(task))])
def test_a_task_that_has_trained_can_be_copied_and_pickled(again):
    task = FromFar(pmap_periodic.config(grad_sync_period=1))
    task._training.begin()
    other = again(task)
    assert other.config == task.config
    assert "_training" not in vars(other)
    other._training.begin()
    assert same(carried(other), carried(task))


class Unweighed:
    weight = None

    def get_reward(self, transition):
        return 0.0


@pytest.mark.parametrize(
    ("hook", "result", "words"),
    [
        ("get_environment", lambda *_: None, "CorridorTask"),
        ("get_rewards", lambda *_: 3, "get_rewards: int was returned"),
        ("get_rewards", lambda *_: [abs, abs], "two rewards are named 'abs'"),
        ("get_rewards", lambda *_: {"x": 3}, "get_rewards: 'x' is 3"),
        ("get_rewards", lambda *_: {"x": (1.0, 3)}, "reward_terms: 'x' must be a tuple"),
        ("get_rewards", lambda *_: [Unweighed()], "reward_terms: the weight of 'unweighed' is None"),
        ("get_initial_model", lambda *_: 3, "get_initial_model: int was returned"),
        (
            "get_initial_model",
            lambda *_: lambda x, key: (x, x[:, 0]),
            "get_initial_model: function was returned, in",
        ),
        ("get_initial_env_state", lambda *_: 3, "get_initial_env_state: int was returned"),
        ("get_initial_env_state", lambda *_: (jnp.ones((8, 2)), jnp.ones(3)), "must begin with num_envs 8"),
        ("get_initial_env_state", lambda *_: (jnp.ones((8, 2)), (jnp.ones(8),)), "of another structure"),
        ("get_initial_env_state", lambda *_: (jnp.ones((8, 2)), jnp.ones((8, 2))), "doesn't fit"),
        (
            "get_initial_env_state",
            lambda *_: (jnp.ones((8, 2)), jnp.ones(8)),
            "get_initial_env_state: the state, float32[8], doesn't fit int32[] of each of 8 environments",
        ),
        ("rollout", lambda self, a, b, c: 3, "rollout: int was returned"),
        ("rollout", lambda self, a, b, c: (3, b), "rollout: it gave int and RolloutState"),
    ],
)
def test_hooks_that_give_something_else_are_one_line(hook, result, words):
    kind = type("CorridorTask", (Plain,), {hook: result})
    if hook == "get_environment":
        kind = type("CorridorTask", (ljax.DistributedPPOTask,), {})
    assert words in error_of(lambda: kind(pmap_periodic.config(grad_sync_period=1)).train())


def test_a_task_trains_under_a_callers_guard_against_transfers():
    task = Plain(pmap_periodic.config(grad_sync_period=1))
    with jax.transfer_guard("disallow"):
        state, _ = task.train()
    assert int(state.step) > 0


def test_states_of_ones_own_are_not_laid_out_anew():
    per_env = jax.ShapeDtypeStruct((2, 4, 2, 3), np.int32)
    other: Any = jax.ShapeDtypeStruct((2, 4, 1), np.float32)
    shapes = EnvCarry(*[other] * len(EnvCarry._fields))._replace(state={"m": per_env})
    rows, m = jnp.ones((8, 1)), np.arange(48).reshape(8, 2, 3)
    found: Any = replaced_environments(shapes, rows, {"m": m}).state
    assert (found["m"].dtype, found["m"].tolist()) == (np.int32, m.reshape(2, 4, 2, 3).tolist())
    for wrong in (m.reshape(8, 3, 2), m + 0.7):
        line = error_of(replaced_environments, shapes, rows, {"m": wrong})
        assert line.startswith(f"get_initial_env_state: m, {wrong.dtype}{list(wrong.shape)}, doesn't fit int32[2, 3] ")


def test_a_trajectory_of_another_shape_is_refused():
    class Short(Plain):
        def rollout(self, model, env_state, rng):
            trajectory, env_state = super().rollout(model, env_state, rng)
            return jax.tree.map(lambda x: x[:-1], trajectory), env_state

    assert "rollout: action is of shape (7, " in error_of(trained, Short)


def test_a_model_is_a_module_or_a_state_to_begin_with():
    given, _ = trained(Plain)

    class Going(Plain):
        def get_initial_model(self, rng):
            return given

    task = Going(pmap_periodic.config(grad_sync_period=1, total_timesteps=64))
    assert int(task.train()[0].step) == 2

    class Called(eqx.Module):
        head: eqx.nn.Linear

        def __call__(self, observations, key=None):
            out = jax.vmap(self.head)(observations)
            return out[:, :2], out[:, 2]

    class Own(Plain):
        def get_initial_model(self, rng):
            return Called(eqx.nn.Linear(2, 3, key=rng))

    assert Own(pmap_periodic.config())._training.program.layout.shapes == {"head.weight": (3, 2), "head.bias": (3,)}


def test_rewards_are_objects_functions_and_names():
    class HighJumpReward(ljax.Reward):
        def get_reward(self, transition):
            return 1.0

    def alive(transition):
        return 2.0

    terms = terms_of([HighJumpReward(0.5), alive])
    nothing: Any = None
    assert {name: (weight, f(nothing)) for name, (weight, f) in terms.items()} == {
        "high_jump": (0.5, 1.0), "alive": (1.0, 2.0)
    }  # fmt: skip
    assert terms_of({"x": alive, "y": (2.0, alive)}) == {"x": (1.0, alive), "y": (2.0, alive)}
    assert "has no get_reward" in error_of(ljax.Reward().get_reward, nothing)


# --- the config ------------------------------------------------------------------------------------------------------


def test_numbers_are_of_the_whole_run():
    config = ljax.DistributedPPOConfig(num_envs=16, batch_size=4, rollout_length_seconds=8.0, ctrl_dt=0.02, lr=1e-3)
    ppo, runner = settings_of(config, 4)
    assert (ppo.n_minibatches, ppo.n_steps, ppo.learning_rate) == (4, 400, 1e-3)
    assert (runner.num_envs, runner.num_devices) == (4, 4)
    assert settings_of(ljax.DistributedPPOConfig(num_batches=2), 1)[0].n_minibatches == 2
    fours: Any = 4.0
    assert type(settings_of(ljax.DistributedPPOConfig(num_envs=16, batch_size=fours), 1)[0].n_minibatches) is int
    assert settings_of(ljax.DistributedPPOConfig(), 1)[0].n_minibatches == 4
    assert settings_of(ljax.DistributedPPOConfig(use_clipped_value_loss=True), 1)[0].vf_clip_eps == 0.2
    assert settings_of(pmap_walking.config(), 2)[0].n_steps == 8


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"num_envs": 10},
            "num_envs: 10 environments of the whole run must be divisible by num_devices 4; use 8 or 12",
        ),
        ({"batch_size": 8, "num_batches": 3}, "8 x 3 = 24 must be num_envs 16"),
        ({"batch_size": 5}, "batch_size: 5 doesn't divide num_envs 16"),
        ({"num_batches": 0}, "num_batches: 0"),
        ({"grad_sync_period": 0}, "grad_sync_period: 0"),
        ({"num_passes": 0}, "num_passes: 0"),
        ({"rollout_length_seconds": 1.0}, "rollout_length_seconds: 1.0 need ctrl_dt"),
        ({"rollout_length_seconds": 0.001, "ctrl_dt": 1.0}, "are no step of 1.0"),
        ({"resume": True}, "resume: it is about checkpoint_dir"),
    ],
)
def test_a_config_that_contradicts_itself_is_one_line(settings, words):
    assert words in error_of(lambda: settings_of(ljax.DistributedPPOConfig(**settings), 4))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pmap_axis_name": "fsdp"}, "pmap_axis_name: 'fsdp' must be an identifier, and 'fsdp' is taken"),
        ({"pmap_axis_name": "my axis"}, "pmap_axis_name: 'my axis'"),
        ({"log_devices_every": -1}, "log_devices_every: -1"),
    ],
)
def test_what_a_task_checks_has_the_configs_names(settings, words):
    assert error_of(lambda: Plain(pmap_periodic.config(**settings))).startswith(words)


def test_a_config_of_ones_own_is_checked_as_ours_is():
    config = pmap_walking.BalancingConfig(lr=0.5, hidden_size=3, max_grad_norm=1.0)
    assert (config.learning_rate, config.lr, config.global_grad_clip, config.hidden_size) == (0.5, 0.5, 1.0, 3)
    config.learning_rate = 0.25
    assert config.lr == 0.25
    assert "no setting of BalancingConfig; did you mean hidden_size" in error_of(
        pmap_walking.BalancingConfig, hidden_siz=3
    )


def test_a_config_that_is_none_is_one_line():
    assert "no setting of DistributedPPOConfig; did you mean num_envs" in error_of(
        ljax.DistributedPPOConfig, nums_envs=3
    )
    assert "config: dict was given" in error_of(Plain, {})


def test_a_period_longer_than_an_update_is_said(caplog):
    Plain(pmap_periodic.config(grad_sync_period=5))
    assert "grad_sync_period: 5 optimiser steps are longer than an update of 4" in caplog.text
    caplog.clear()
    Plain(pmap_periodic.config(grad_sync_period=4))
    assert caplog.text == ""
    Plain(pmap_periodic.config(num_devices=1))
    assert "only 1 device" in caplog.text


def test_the_update_that_is_verified_rounds_as_all_others(monkeypatch):
    """On accelerators: the precision of products is part of what is compiled."""
    seen: list[Any] = []
    dispatch = DeviceRunner.dispatch

    def looked_at(run: DeviceRunner, *words: Any) -> Any:
        seen.append(jax.config.jax_default_matmul_precision)  # pyright: ignore[reportAttributeAccessIssue]
        return dispatch(run, *words)

    monkeypatch.setattr(DeviceRunner, "dispatch", looked_at)
    monkeypatch.setattr(Training, "rounding", lambda _: jax.default_matmul_precision("highest"))
    task = Plain(pmap_periodic.config(grad_sync_period=1))
    text: Any = "no"
    with pytest.raises(ValueError, match=r"^verbose: 'no' must be True or False$"):
        task.verify_distributed_setup(verbose=text)
    task.verify_distributed_setup(verbose=False)
    task.train()
    assert len(seen) > 1
    assert set(seen) == {"highest"}


@pytest.mark.parametrize(("backend", "expected"), [("gpu", ["NCCL_ALGO"]), ("cpu", [])])
def test_gpus_are_kept_from_adding_up_inside_a_switch(backend, expected, monkeypatch):
    applied: list[str] = []

    def far_enough(*_: Any) -> None:
        raise ValueError("far enough")

    monkeypatch.setattr(training, "apply", lambda settings: applied.extend(setting.name for setting in settings))
    monkeypatch.setattr(training, "run_config", far_enough)
    monkeypatch.setattr(training.jax, "default_backend", lambda: backend)
    assert "far enough" in error_of(Plain(pmap_periodic.config(grad_sync_period=1)).train)
    assert applied == expected


def test_the_set_up_is_logged(caplog):
    caplog.set_level(logging.INFO, "lockstep.jax")
    task = Plain(pmap_periodic.config(grad_sync_period=1))
    report = task.verify_distributed_setup()
    assert report.in_sync
    assert "copies after an update: equal" in caplog.text
    caplog.clear()
    task.verify_distributed_setup(verbose=False)
    assert caplog.text == ""
