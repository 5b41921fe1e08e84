"""Checks of the library door that need two devices; ``test_library.py`` runs them in a process of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tasks_of_users import Corridors, corridor_settings

from lockstep.core.errors import DesyncError
from lockstep.jax.training import Training
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.setup.set_up import has_started

jax.config.update("jax_num_cpu_devices", 2)

import lockstep.jax as ljax  # noqa: E402

STARTED_BEFORE = has_started()
PPO = ljax.PPOConfig(
    n_steps=16, n_minibatches=2, hidden_sizes=(16,), normalize_observations=True, normalize_rewards=True
)


def run_of(devices, num_envs, **settings):
    env, params = ljax.make("CartPole-v1")
    runner = ljax.RunnerConfig(8 * 16 * 5 + 100, num_devices=devices, num_envs=num_envs, seed=4, **settings)
    return env, params, runner


@pytest.fixture(scope="module")
def on_two():
    env, params, runner = run_of(2, 4)
    return ljax.train_ppo_multigpu(env, params, ppo_config=PPO, runner_config=runner, obs_shape=(4,), n_actions=2)


@pytest.fixture(scope="module")
def training_on_one():
    return Training(*ljax.make("CartPole-v1"), PPO, run_of(1, 8)[2])


def same(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True) for x, y in leaves)


def test_two_devices_train_what_one_does(on_two, training_on_one):
    assert not STARTED_BEFORE
    state, history = on_two
    one, of_one = training_on_one.train()
    assert same(state, one)
    assert same(history, of_one)
    assert state.params["actor.0.weight"].sharding.device_set == set(jax.devices())
    assert state.params["actor.0.weight"].shape == (16, 4)


def test_the_history_has_an_entry_for_each_whole_update(on_two):
    state, history = on_two
    assert {"total_loss", "actor_loss", "critic_loss", "entropy", "approx_kl"} <= set(history)
    assert {x.shape for x in history.values()} == {(5,)}
    assert int(state.step) == 5
    assert np.asarray(state.opt_state.count) == 5 * 4 * 2
    total = history["actor_loss"] + 0.5 * history["critic_loss"] - 0.01 * history["entropy"]
    assert np.allclose(history["total_loss"], total, rtol=1e-6)
    ended = history["episodes"] > 0
    assert ended.any()
    assert np.array_equal(np.isfinite(history["episode_return"]), ended)
    assert np.array_equal(history["episode_return"][ended], history["episode_length"][ended])  # a reward a step
    assert history["episodes"].sum() * history["episode_length"][ended].min() <= 8 * 16 * 5


def test_a_state_is_saved_and_gone_on_from(on_two, training_on_one, tmp_path):
    state, _ = on_two
    ljax.save_checkpoint(tmp_path / "c", state)
    template = ljax.PPO.init(jax.random.key(0), (4,), 2, PPO)
    loaded = ljax.load_checkpoint(tmp_path / "c", template)
    assert same(loaded, state.agent_state)
    assert not same(template, state)
    copies = ljax.load_checkpoint(tmp_path / "c", template, replicate_to=2)
    assert copies.params["actor.0.weight"].shape == (2, 16, 4)
    ljax.save_checkpoint(tmp_path / "c", copies, unreplicate=True)
    assert same(ljax.load_checkpoint(tmp_path / "c", template), state.agent_state)
    with pytest.raises(ValueError, match="device axis"):
        ljax.save_checkpoint(tmp_path / "d", state, unreplicate=True)
    again, history = training_on_one.train(loaded)
    assert int(again.step) == 10
    assert float(again.observations.count) == pytest.approx(float(state.observations.count) + 5 * 8 * 16)
    first = training_on_one.train()[1]
    assert history["critic_loss"][0] != first["critic_loss"][0]


def test_going_on_draws_no_number_twice(training_on_one):
    fresh = training_on_one.fresh()
    first, anew = training_on_one.train()[1], training_on_one.train(fresh)[1]
    assert np.array_equal(anew["total_loss"], first["total_loss"])
    later = training_on_one.train(fresh.replace(step=jnp.int32(5)))[1]  # the same agent, after five updates
    assert (later["total_loss"] != first["total_loss"]).all()
    count = fresh.opt_state._replace(count=jnp.int32(40))
    training_on_one.begin(fresh.replace(opt_state=count))
    rows = np.asarray(training_on_one.device_runner.state.envs.rows)
    training_on_one.begin(fresh)
    assert (rows != np.asarray(training_on_one.device_runner.state.envs.rows)).any()


def test_the_policy_is_the_engines(on_two, training_on_one):
    state, _ = on_two
    seen = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4)), jnp.float32)
    logits, values = jax.jit(ljax.PPO.apply)(state, seen)
    assert logits.shape == (3, 5, 2)
    assert values.shape == (3, 5)
    training_on_one.train()
    policy, engine = Inference(training_on_one.program), training_on_one.device_runner.state
    parameters, scale = policy.local_parameters(engine), policy.local_scale(engine)
    rest = jnp.zeros((1, 15, 0)), jnp.zeros((1, 15), bool), jnp.int32(1)
    likeliest, _ = policy.most_likely(parameters, scale, seen.reshape(1, 15, 4), *rest)
    assert np.array_equal(ljax.PPO.act(state, seen).reshape(-1), likeliest[0])
    assert np.array_equal(ljax.PPO.act(state, seen), logits.argmax(-1))
    assert np.array_equal(ljax.PPO.act(state, seen[0, 0]), logits[0, 0].argmax(-1))
    drawn = ljax.PPO.act(state, jnp.broadcast_to(seen[0, 0], (4000, 4)), jax.random.key(1))
    assert float(drawn.mean()) == pytest.approx(float(jax.nn.softmax(logits[0, 0])[1]), abs=0.03)
    with pytest.raises(ValueError, match=r"\(3, 5\)"):
        ljax.PPO.apply(state, seen[:, :, 0])


def test_fsdp_and_wrapped_gymnax_environments():
    env, params = ljax.make("gymnax/CartPole-v1")
    wrapped = ljax.EpisodeStatisticsWrapper(ljax.AutoResetWrapper(env))
    runner = ljax.RunnerConfig(8 * 16, num_envs=4, fsdp_devices=2)
    training = Training(wrapped, params, PPO, runner)
    assert dict(training.program.mesh.shape) == {"batch": 1, "fsdp": 2}
    assert training.config.reduction == "fast"
    state, history = training.train()
    assert np.isfinite(history["total_loss"]).all()
    fresh = ljax.PPO.init(jax.random.key(0), (4,), 2, PPO)
    assert not same(state.params, fresh.params)
    assert set(state.params) == set(fresh.params)
    again, _ = training.train(state)  # whose arrays are not used up by that
    assert int(again.step) == 2
    assert int(state.step) == 1


# --- tasks -----------------------------------------------------------------------------------------------------------


class Averaging(Corridors):
    def sync_gradients(self, grads, axis_name):
        self.seen = axis_name, set(grads)
        return lax.pmean(grads, axis_name)


class Apart(Corridors):
    def sync_gradients(self, grads, axis_name):
        return grads


class Adding(Corridors):
    def sync_gradients(self, grads, axis_name):
        return lax.psum(grads, "workers")


@pytest.fixture(scope="module")
def exact():
    task = Corridors(*corridor_settings(), log_devices_every=2)
    return task, *task.train()


def test_a_mean_over_devices_is_the_engines_own_gradient(exact):
    _, state, history = exact
    task = Averaging(*corridor_settings(), axis_name="workers")
    mine, of_mine = task.train()
    assert task.seen == ("workers", set(mine.params))
    assert task._training.config.reduction == "fast"
    for name in ("total_loss", "grad_norm"):
        assert np.allclose(of_mine[name][0], history[name][0], rtol=1e-4), name
    close = [np.allclose(mine.params[name], state.params[name], atol=1e-3) for name in mine.params]
    assert all(close)
    setup = task.verify_distributed_setup(verbose=False)
    assert setup.gradient_error < 1e-6
    assert setup.in_sync
    assert setup.mesh == {"workers": 2, "fsdp": 1}
    assert setup.environments == (range(0, 4), range(4, 8))
    assert len(set(setup.fingerprints)) == 1
    assert setup.devices == tuple(map(str, jax.devices()))


def test_devices_that_drift_apart_are_found(capsys):
    task = Apart(*corridor_settings())
    with pytest.raises(DesyncError, match=r"after an update.* first policy/"):
        task.verify_distributed_setup()
    report = capsys.readouterr().out
    assert "DIFFERENT" in report
    assert "environments 4 to 7 (4)" in report
    with pytest.raises(DesyncError):
        task.train()


def test_a_sum_is_not_taken_for_a_mean():
    task = Adding(*corridor_settings(), axis_name="workers")
    assert task._gradient_error() > 0.5


def test_reward_terms_add_up_and_are_logged(exact):
    task, _, history = exact
    assert np.allclose(history["reward/haste"], -0.1)
    ended = history["episodes"] * 2.0 / (8 * 16)  # each arrival is worth 2
    assert np.allclose(history["reward/arrival"], ended)
    returns = history["episode_return"] - (2.0 - 0.1 * history["episode_length"])
    assert np.allclose(returns[history["episodes"] > 0], 0, atol=1e-4)
    assert task.updates == [1, 2, 3, 4]


def test_each_device_tells_what_it_did(exact):
    task, _, history = exact
    assert [(m.update, m.device) for m in task.device_log] == [(u, str(d)) for u in (2, 4) for d in jax.devices()]
    assert {m.num_envs for m in task.device_log} == {4}
    assert all(m.memory_bytes > 1000 and m.steps_per_second > 0 for m in task.device_log)
    means = [m.episode_return for m in task.device_log[2:]]
    assert min(means) <= history["episode_return"][3] <= max(means)


def test_a_period_between_synchronisations_and_a_state_to_begin_with(exact):
    _, given, _ = exact
    task = Corridors(*corridor_settings(), sync_period=2, batch_size=2, num_batches=2)
    task.given = given
    setup = task.verify_distributed_setup(verbose=False)
    assert setup.in_sync
    assert setup.gradient_error == 0
    state = task._training.state(1)
    moved = max(float(np.abs(state.params[name] - given.params[name]).max()) for name in given.params)
    assert 0 < moved < 0.05
    assert np.asarray(state.opt_state.count) == np.asarray(given.opt_state.count) + 4 * 2
