"""Code of functional trainers runs with only the import changed: meshes, training, history, checkpoints, and errors."""

import dataclasses
import pickle
import re
from typing import Any

import corridors
import equinox as eqx
import functional_sharding
import functional_training
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from refusals import error_of
from tasks_of_users import Net
from variants import variants

import lockstep.jax as ljax
from lockstep.jax.between_updates import PLOT, progress_line
from lockstep.jax.checkpoints.folder import CheckpointFolder
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.training import Training, devices_of
from lockstep.jax_engine.envs.default_params import default_params, that_may_be_called
from lockstep.runs.checkpoint_writer import aside_of
from lockstep.runs.directory import LOCK

untyped: Any = ljax
"""For what a type checker would refuse as well."""

pytestmark = pytest.mark.quick
PPO = ljax.PPOConfig(
    n_steps=8, n_minibatches=2, n_epochs=2, hidden_sizes=(8,), normalize_observations=True, normalize_rewards=True
)
STEPS = 8 * 8


def differing(a, b):
    named = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    return [
        jax.tree_util.keystr(path)
        for (path, x), y in named
        if not np.array_equal(np.asarray(x), np.asarray(y), equal_nan=True)
    ]


def train(updates, devices=2, state=None, seed=3, envs=8, ppo=PPO, **runner):
    env, params = ljax.make("CartPole-v1")
    given: dict[str, Any] = {"num_shards": 4} | runner
    settings = ljax.RunnerConfig(updates * envs * 8, num_devices=devices, num_envs=envs // devices, seed=seed, **given)
    return ljax.train_ppo_multigpu(env, params, ppo_config=ppo, runner_config=settings, train_state=state)


def test_a_callers_guard_against_transfers_holds_for_the_callers_code_alone():
    key = jax.random.key(0)
    with jax.transfer_guard("disallow"):
        assert int(ljax.PPO.init(key, obs_shape=(4,), n_actions=2).step) == 0
        state, _ = train(1)
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jnp.add(jnp.ones(2), np.ones(2))
    assert int(state.step) == 1


def test_training_in_a_traced_function_is_refused():
    with pytest.raises(
        ValueError, match=r"^train: called in a function that JAX traces \(jit, vmap, scan, …\), which has no"
    ):
        jax.jit(lambda x: x + train(1)[0].step)(1)


def test_training_once_for_each_of_many_seeds_by_vmap_is_refused():
    """Arrays of no argument aren't traced there: it would train once, and give every seed that agent."""
    seeds = jnp.arange(2)
    with pytest.raises(ValueError, match=r"^train: called in a function that JAX traces .* once for each seed"):
        jax.vmap(lambda _: train(1)[0].step)(seeds)
    with pytest.raises(ValueError, match=r"^seed: a value that JAX traces \(vmap, jit, scan, …\) and must be a whole"):
        jax.vmap(lambda seed: train(1, seed=seed)[0].step)(seeds)


@pytest.fixture(scope="module")
def whole():
    return train(4)


@pytest.fixture(scope="module")
def half():
    return train(2)


@pytest.mark.long
def test_three_devices_give_the_state_of_one_where_nobody_chooses_shards():
    one, three = (train(2, devices, envs=24, num_shards=None)[0] for devices in (1, 3))
    assert differing(one.replace(num_devices=3), three) == []
    assert differing(one.agent_state, train(2, 3, envs=24, num_shards=3)[0].agent_state) != []


def test_uneven_shards_are_taken_out_by_a_program_that_is_compiled_once():
    env, params = ljax.make("CartPole-v1")
    training = Training(env, params, PPO, ljax.RunnerConfig(8 * 12, num_devices=3, num_envs=4, num_shards=4))
    training.begin()
    training.state(0)
    names: list[str] = []

    def note(event: str, duration_secs: float, **_: str | int) -> None:
        names.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        training.state(0)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert [name for name in names if name.endswith("backend_compile_duration")] == []


# --- scripts ---------------------------------------------------------------------------------------------------------


def test_a_training_script_runs(tmp_path, capsys):
    state, history = functional_training.main(tmp_path)
    assert "final loss" in capsys.readouterr().out
    assert state.params["actor.head.weight" if "actor.head.weight" in state.params else next(iter(state.params))].size
    assert set(history) > {"total_loss", "episode_return"}


def test_a_script_of_ones_own_program_runs():
    results = functional_sharding.main()
    assert results["plain"] == results["fsdp"] == (2 * np.arange(64.0).sum() / 64, 64.0)
    x, w = np.arange(64.0).reshape(16, 4) / 64, np.full((4, 2), 0.1)
    out = np.tanh(x @ w)
    expected = x.T @ (2 * (out - 1) * (1 - out**2)) / out.size
    np.testing.assert_allclose(results["gradient"], expected, rtol=1e-4)


# --- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", variants([2, 1], [2]))
def test_training_goes_on_exactly_on_any_number_of_devices(whole, half, devices):
    state, history = whole
    first, of_first = half
    again, of_second = train(2, devices, first)
    assert differing(state, again) == []
    for name in history:
        joined = np.concatenate([of_first[name], of_second[name]])
        assert np.array_equal(joined, history[name], equal_nan=True), name
    assert again.env_obs.shape == (devices, 8 // devices, 4)
    assert int(again.step) == 4


def test_a_train_state_is_saved_whole_or_without_environments(half, tmp_path, capsys):
    state, _ = half
    ljax.save_checkpoint(tmp_path / "whole", state)
    assert differing(ljax.load_checkpoint(tmp_path / "whole", like=state), state) == []
    agent = ljax.load_checkpoint(tmp_path / "whole", ljax.PPO.init(jax.random.key(0), 4, 2, PPO))
    assert differing(agent, state.agent_state) == []
    assert agent.env_obs is None is agent.env_state
    ljax.save_checkpoint(tmp_path / "agent", {"inside": state.agent_state})
    loaded = ljax.load_checkpoint(tmp_path / "agent", {"inside": state})["inside"]
    assert loaded.envs is None
    assert differing(loaded, state.agent_state) == []
    with pytest.raises(ValueError, match="other is not in the checkpoint"):
        ljax.load_checkpoint(tmp_path / "whole", {"other": jnp.ones(2)})
    capsys.readouterr()
    exact, anew = train(1, state=state)[1], train(1, state=agent)[1]
    assert exact.total_loss[0] != anew.total_loss[0]
    assert capsys.readouterr().err == ""


def begun(state, seed=3, envs=8):
    """A training that has begun with a state."""
    runner = ljax.RunnerConfig(4 * envs * 8, num_devices=2, num_envs=envs // 2, seed=seed, num_shards=4)
    training = Training(*ljax.make("CartPole-v1"), PPO, runner)
    training.begin(state)
    return training


def carried(training) -> Any:
    return training.device_runner.state.envs


def moments(training) -> Any:
    return training.device_runner.state.observation_normalizer


def test_what_doesnt_go_on_is_said_in_a_line(half, capsys):
    state, _ = half
    assert (np.asarray(carried(begun(state)).lengths).ravel() > 0).any()
    assert capsys.readouterr().err == ""
    begun(state, seed=4)
    assert "it is of another seed; random numbers are those of seed 4" in capsys.readouterr().err
    fewer = state.replace(envs=jax.tree.map(lambda x: x[:2], state.envs))
    training = begun(fewer)
    assert "train_state: it has 4 environments and this run 8, so that episodes begin anew" in capsys.readouterr().err
    assert not np.asarray(carried(training).lengths).any()
    other = state.replace(envs=state.envs._replace(state=state.envs.rows))
    begun(other)
    assert "states are of another structure" in capsys.readouterr().err


def test_statistics_that_were_changed_count(half):
    state, _ = half
    mean = np.asarray(moments(begun(state)).mean)
    assert mean.dtype == np.float64
    assert (mean != mean.astype(np.float32)).any()  # all of its bits
    changed = state.replace(observations=state.observations._replace(mean=state.observations.mean + 1))
    np.testing.assert_allclose(moments(begun(changed)).mean, mean + 1, rtol=1e-6)


def test_parts_of_a_train_state_are_replaced(half):
    state, _ = half
    other = ljax.PPO.init(jax.random.key(9), 4, 2, PPO)
    mixed = state._replace(agent_state=other)
    assert differing(mixed.agent_state, other) == []
    assert differing(mixed.envs, state.envs) == []
    assert mixed.env_obs.shape == (2, 4, 4)
    assert state.env_state["time"].shape == (2, 4)
    np.testing.assert_array_equal(state.env_obs[..., 0], state.env_state["env"]["x"])
    assert state.rng.shape == (2,)
    assert "'env_obs' is no part that can be replaced" in error_of(state.replace, env_obs=1)


def test_other_observations_come_back_as_they_are():
    env, params = ljax.make("Snake-v0")
    obs, _ = jax.vmap(env.reset, (0, None))(jax.random.split(jax.random.key(0), 3), params)
    from lockstep.envs.description import described
    from lockstep.jax.config import engine_config
    from lockstep.jax_engine.nets.encoders import decode_rows, encode_rows

    config = engine_config(PPO, {"env.id": "x", "env.backend": "jax"})
    layout = described(config.env, env.observation_space(params), env.action_space(params), None).observation
    assert differing(decode_rows(layout, encode_rows(layout, obs)), obs) == []


# --- history ---------------------------------------------------------------------------------------------------------


def test_a_history_is_a_named_tuple_and_a_mapping(whole):
    history: Any = whole[1]
    assert history._fields[:5] == ("total_loss", "actor_loss", "critic_loss", "entropy", "approx_kl")
    assert history.total_loss is history["total_loss"] is history[0]
    assert issubclass(PPOMetricsHistory, tuple)
    assert dict(history) == history._asdict() == dict(history.items())
    assert list(history) == list(history.keys()) == list(history._fields)
    assert len(history.values()) == len(history)
    assert "entropy" in history
    assert history.get("nothing") is None
    doubled = jax.tree.map(lambda x: 2 * x, history)
    assert isinstance(doubled, PPOMetricsHistory)
    assert np.array_equal(doubled.entropy, 2 * history.entropy)
    assert history == pickle.loads(pickle.dumps(history)) == history._replace()
    assert history != doubled
    named = PPOMetricsHistory(1, 2, 3, 4, 5, **{"reward/x": 6})
    assert (named.approx_kl, named["reward/x"], named._fields[-1]) == (5, 6, "reward/x")
    assert "entropy=4" in repr(named)


def test_a_history_refuses_what_it_has_not():
    history = PPOMetricsHistory(total_loss=np.ones(2))
    with pytest.raises(AttributeError, match="no 'entropy'; it has total_loss"):
        _ = history.entropy
    with pytest.raises(KeyError):
        _ = history["entropy"]
    assert "there is no 'entropy'" in error_of(history._replace, entropy=1)
    assert "without a name" in error_of(PPOMetricsHistory, *range(6))
    assert "without a name" in error_of(PPOMetricsHistory, 1, total_loss=2)


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_go_by_both_names():
    config = ljax.PPOConfig(lr=1e-2, shared_backbone=True)
    assert (config.learning_rate, config.lr, config.shared_layers, config.shared_backbone) == (1e-2, 1e-2, True, True)
    assert config == ljax.PPOConfig(1e-2, shared_layers=True)
    assert dataclasses.replace(config, n_steps=4).lr == 1e-2
    assert ljax.RunnerConfig().total_timesteps == 100_000
    assert ljax.RunnerConfig() == ljax.RunnerConfig(100_000)


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        (ljax.PPOConfig, {"lr": 1.0, "learning_rate": 1.0}, "lr: 1.0, and learning_rate is the same setting"),
        (ljax.PPOConfig, {"n_step": 3}, "n_step: no setting of PPOConfig; did you mean n_steps?"),
        (ljax.PPOConfig, {"xyzzy": 3}, "xyzzy: no setting of PPOConfig; there are learning_rate"),
        (ljax.PPOConfig, {"num_envs": 3}, "num_envs: environments are RunnerConfig's"),
        (ljax.RunnerConfig, {"buffer_size": 3}, "buffer_size: belongs to algorithms with a replay buffer"),
        (ljax.RunnerConfig, {"total_timestep": 3}, "did you mean total_timesteps?"),
        (ljax.RunnerConfig, {"eval_every": 0}, "eval_every: 0 must be a whole number, at least 1"),
        (ljax.RunnerConfig, {"max_checkpoints": 0}, "max_checkpoints: 0"),
        (ljax.RunnerConfig, {"resume": True}, "resume: it is about checkpoint_dir"),
        (ljax.RunnerConfig, {"plot": True}, "plot: it is about checkpoint_dir"),
        (ljax.RunnerConfig, {"resume": True, "overwrite": True, "checkpoint_dir": "x"}, "leave one of them out"),
        (ljax.RunnerConfig, {"checkpoint_dir": 3}, "checkpoint_dir: 3 must be the path"),
    ],
)
def test_settings_that_are_none_are_one_line(kind, settings, words):
    assert words in error_of(kind, **settings)


def test_a_keyword_that_is_none_is_a_type_error_too():
    with pytest.raises(TypeError, match="did you mean n_steps"):
        ljax.PPOConfig(nsteps=3)  # pyright: ignore[reportCallIssue]
    with pytest.raises(TypeError, match="learning_rate: given twice"):
        untyped.PPOConfig(1e-3, learning_rate=1e-3)
    with pytest.raises(TypeError, match="60 values for"):
        untyped.PPOConfig(*range(60))
    env, params = ljax.make("CartPole-v1")
    with pytest.raises(TypeError, match="ppo_config: dict was given; give a PPOConfig"):
        ljax.train_ppo_multigpu(env, params, ppo_config={}, runner_config=ljax.RunnerConfig())  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="runner_config: NoneType was given"):
        ljax.train_ppo_multigpu(env, params, ppo_config=PPO, runner_config=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("misuse", "words"),
    [
        (lambda: untyped.shard_pytree(jnp.ones(8), 4), "mesh: int was given; give one of make_mesh"),
        (lambda: untyped.replicate_on_mesh(jnp.ones(8), 4), "mesh: int was given"),
        (lambda: untyped.fsdp_sharding(jnp.ones(8), None), "mesh: NoneType was given"),
        (lambda: untyped.fsdp_sharding(jnp.ones(8), jax.make_mesh((2,), ("data",))),
         "mesh: its axes are data and none is fsdp, over which parameters are cut; give one of make_mesh"),
        (lambda: untyped.data_sharding(2), "mesh: int was given"),
        (lambda: untyped.split_key_across_devices(3, 2), "key: int was given; give one of jax.random.key"),
        (lambda: untyped.PPO.init(3, 4, 2), "key: int was given"),
        (lambda: untyped.PPO.apply({}, jnp.ones(4)), "state: dict was given; give a PPOTrainState"),
        (lambda: untyped.PPOConfig(hidden_sizes="64"), "hidden_sizes: '64' must be units of each layer"),
        (lambda: untyped.PPOConfig(lr="fast"), "learning_rate: 'fast'"),
        (lambda: untyped.save_checkpoint(3, {}), "checkpoint: 3 is no path"),
        (lambda: untyped.train_ppo_multigpu("CartPole-v1", None, ppo_config=PPO, runner_config=untyped.RunnerConfig()),
         "env: str was given, which has no reset and step"),
    ],
)  # fmt: skip
def test_arguments_of_another_type_are_one_line(misuse, words):
    assert words in error_of(misuse)


def test_a_remainder_is_dropped_if_that_is_asked_for():
    odd = dataclasses.replace(PPO, n_minibatches=3)
    assert "n_minibatches: 3 doesn't divide a shard's" in error_of(train, 1, ppo=odd)
    _, history = train(1, ppo=dataclasses.replace(odd, drop_remainder=True))
    assert history.optimizer_steps.tolist() == [6.0]
    assert "n_minibatches: 17" in error_of(
        train, 1, ppo=dataclasses.replace(PPO, n_minibatches=17, drop_remainder=True)
    )


@pytest.mark.long
def test_a_remainder_is_the_same_on_any_number_of_devices():
    odd = dataclasses.replace(PPO, n_minibatches=3, drop_remainder=True)
    assert differing(train(2, 2, ppo=odd)[0], train(2, 1, ppo=odd)[0]) == []


def test_fsdp_that_cant_be_had_is_an_error(monkeypatch):
    assert "fsdp_devices: 3, and num_devices 8 must be divisible by it" in error_of(
        devices_of, ljax.RunnerConfig(fsdp_devices=3)
    )
    monkeypatch.setattr("lockstep.jax.training.get_num_devices", lambda requested: 1)
    assert "fsdp_devices: 2, and num_devices 1" in error_of(devices_of, ljax.RunnerConfig(fsdp_devices=2))
    assert devices_of(ljax.RunnerConfig()) == (1, 1)


# --- meshes, copies, keys --------------------------------------------------------------------------------------------


def test_errors_say_it_in_known_words():
    requested = re.compile("Requested .* devices")
    for function in (
        lambda: ljax.get_num_devices(9999),
        lambda: ljax.make_mesh(num_devices=99),
        lambda: ljax.replicate(jnp.ones(2), 99),
        lambda: ljax.split_key_across_devices(jax.random.key(0), n_devices=99),
        lambda: train(1, devices=16, envs=16, num_shards=16),
    ):
        assert requested.search(error_of(function))
    assert "divisible" in error_of(ljax.make_mesh, 3)
    assert "divisible" in error_of(ljax.shard_pytree, jnp.ones(3), ljax.make_mesh())
    assert "num_devices: 'two' must be a whole number" in error_of(ljax.get_num_devices, "two")
    assert "num_fsdp_devices: '2'" in error_of(ljax.make_mesh, "2")
    assert "nothing" in error_of(ljax.named_sharding, ljax.make_mesh(), ("nothing", None))
    assert "n_devices was given twice" in error_of(ljax.replicate, 1, 2, n_devices=2)
    assert "n_devices was given twice" in error_of(ljax.split_key_across_devices, jax.random.key(0), 2, n_devices=2)


def test_a_mesh_is_set_by_numbers_or_as_it_is():
    mesh = ljax.make_mesh(2, 4)
    with ljax.set_mesh(2, 4) as made, ljax.set_mesh(num_fsdp_devices=4) as inner:
        assert made == mesh
        assert ljax.active_mesh() is inner
        assert dict(inner.shape) == {"batch": 2, "fsdp": 4}
        assert ljax.replicate(jnp.ones(())).shape == (8,)
        assert jax.sharding.get_mesh().empty
    with ljax.set_mesh(mesh):
        assert jax.sharding.get_mesh() == mesh
    for bad in (lambda: ljax.set_mesh(mesh, 4), lambda: ljax.set_mesh(2, num_fsdp_devices=2)):
        with pytest.raises(ValueError, match="given"), bad():
            pass
    assert ljax.active_mesh() is None


def test_functions_in_pytrees_stay_what_they_are(tmp_path):
    mesh = ljax.make_mesh(2)
    tree = {"w": jnp.arange(16.0), "act": jax.nn.relu, "name": "net"}
    for made in (
        ljax.replicate(tree, 4),
        ljax.unreplicate(ljax.replicate(tree, 4)),
        ljax.shard_pytree(tree, mesh),
        ljax.replicate_on_mesh(tree, mesh),
    ):
        assert (made["act"], made["name"]) == (jax.nn.relu, "net")
    assert ljax.fsdp_sharding(tree, mesh)["act"] == ljax.replicate_sharding(mesh)
    bent = jax.jit(lambda w: ljax.activation_sharding_constraint({**tree, "w": w}, mesh)["w"])(tree["w"])
    assert np.array_equal(bent, tree["w"])
    ljax.save_checkpoint(tmp_path / "c", tree)
    assert ljax.load_checkpoint(tmp_path / "c", tree, replicate_to=2)["act"] is jax.nn.relu


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    gravity: float = 9.8


def test_default_parameters_are_an_attribute_and_a_call():
    env, params = ljax.make("CartPole-v1")
    wrapped = ljax.AutoResetWrapper(env)
    assert wrapped.default_params() == wrapped.default_params == params

    class Method:
        def default_params(self):
            return 3

    assert default_params(Method()) == 3
    assert default_params(object()) is None
    assert that_may_be_called(3) == 3
    slotted = Slotted()
    assert that_may_be_called(slotted) is slotted


def test_default_parameters_of_gymnax_are_too():
    pytest.importorskip("gymnax")
    env, params = ljax.make("gymnax/CartPole-v1")
    assert env.default_params() == params
    assert jax.tree.map(lambda x: x, params)().replace(max_steps_in_episode=7)().max_steps_in_episode == 7


# --- evaluation, checkpoints, progress -------------------------------------------------------------------------------


@pytest.mark.long
def test_a_training_that_was_cut_is_resumed_to_the_same_end(tmp_path, whole, capsys):
    state, history = whole
    duties = {"checkpoint_dir": tmp_path / "c", "checkpoint_interval": STEPS, "eval_every": 2 * STEPS}
    train(3, eval_episodes=3, log_interval=STEPS, **duties)
    said = capsys.readouterr().err
    assert re.findall(r"step (\d+) of 192", said) == ["64", "128", "192"]
    again, of_again = train(4, 1, eval_episodes=3, resume=True, **duties)
    assert "training goes on after update 3 of 4" in capsys.readouterr().err
    assert differing(again, state) == []
    assert np.isnan(of_again.eval_return).tolist() == [True, False, True, False]
    assert (of_again.eval_length[[1, 3]] == of_again.eval_return[[1, 3]]).all()  # a reward a step
    assert all(np.array_equal(of_again[name], history[name], equal_nan=True) for name in history)
    assert (ljax.load_metadata(tmp_path / "c", step=4 * STEPS) or {})["update"] == 4
    assert train(4, eval_episodes=3, resume=True, **duties)[1] == of_again  # there is nothing left to do
    assert "total_timesteps: 128 are 2 updates, and the newest checkpoint" in error_of(
        train, 2, eval_episodes=3, resume=True, **duties
    )
    assert "holds checkpoints (step_256)" in error_of(train, 4, **duties)
    assert "seed: 9, but" in error_of(train, 4, seed=9, resume=True, **duties)


class Halved(corridors.Corridor):
    """A step observes in half the bits of a reset."""

    def seen(self, place):
        return super().seen(place).astype(jnp.bfloat16)


def test_reset_and_step_may_observe_in_two_dtypes():
    def evaluated(env):
        runner = ljax.RunnerConfig(STEPS, num_devices=1, num_envs=8, eval_every=STEPS, eval_episodes=3)
        return ljax.train_ppo_multigpu(env, None, ppo_config=PPO, runner_config=runner)[1]["eval_return"].tolist()

    assert evaluated(Halved()) == evaluated(corridors.Corridor())


class Hollow(corridors.Corridor):
    """A state and an observation with parts that have no elements."""

    def reset(self, key, params):
        obs, place = super().reset(key, params)
        return {"none": jnp.zeros(0), "seen": obs}, {"place": place, "none": jnp.zeros((0, 4))}

    def step(self, key, state, action, params):
        obs, place, *rest = super().step(key, state["place"], action, params)
        return {"none": jnp.zeros(0), "seen": obs}, state | {"place": place}, *rest

    def observation_space(self, params):
        seen = super().observation_space(params)
        return spaces.Dict({"none": spaces.Box(-np.inf, np.inf, (0,), np.float32), "seen": seen})


def test_arrays_without_elements_are_laid_out_by_device():
    runner = ljax.RunnerConfig(STEPS, num_devices=2, num_envs=4)
    state, _ = ljax.train_ppo_multigpu(Hollow(), None, ppo_config=PPO, runner_config=runner)
    assert jax.tree.map(np.shape, state.env_state) == {"none": (2, 4, 0, 4), "place": (2, 4)}
    assert jax.tree.map(np.shape, state.env_obs) == {"none": (2, 4, 0), "seen": (2, 4, 2)}


def test_checkpoints_are_kept_and_removed_as_asked(tmp_path):
    state = ljax.PPO.init(jax.random.key(0), 4, 2, PPO)
    history = PPOMetricsHistory(total_loss=np.ones(1))
    runner = ljax.RunnerConfig(checkpoint_dir=tmp_path, max_checkpoints=2, keep_period=30)
    folder = CheckpointFolder(runner, {"seed": 0})
    for update in range(1, 9):
        folder.save(state, history, update, 10 * update)
    folder.close()
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step_30", "step_60", "step_70", "step_80"}
    (tmp_path / "step_30" / "notes.txt").write_text("precious")
    (tmp_path / "step_60" / "manifest.json").write_text("{}")
    (tmp_path / "step_90").mkdir()
    overwriting = CheckpointFolder(dataclasses.replace(runner, overwrite=True), {})
    assert {path.name for path in tmp_path.iterdir()} == names | {"step_90", LOCK}
    overwriting.save(state, history, 1, 80)
    overwriting.close()
    assert {path.name for path in tmp_path.iterdir()} == {"step_30", "step_80", "step_90"}
    assert (ljax.load_metadata(tmp_path, step=80) or {})["update"] == 1
    (tmp_path / "step_80").rename(aside_of(tmp_path / "step_80"))  # as a crash between two renames leaves it
    CheckpointFolder(dataclasses.replace(runner, resume=True), {}).close()
    assert (ljax.load_metadata(tmp_path, step=80) or {})["update"] == 1
    ljax.save_checkpoint(tmp_path, {"w": jnp.ones(2)}, step=100)
    other = CheckpointFolder(dataclasses.replace(runner, resume=True), {})
    assert "no checkpoint of a training" in error_of(other.find, state)


def test_a_picture_is_drawn_if_it_is_asked_for(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    train(2, checkpoint_dir=tmp_path / "c", plot=True)
    assert (tmp_path / "c" / PLOT).read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("lockstep.jax.between_updates.can_plot", lambda: False)
    assert "needs matplotlib" in error_of(train, 2, checkpoint_dir=tmp_path / "d", plot=True)


def test_a_line_of_progress_leaves_out_what_isnt_known():
    row = {"episode_return": float("nan"), "total_loss": 0.5}
    assert progress_line(row, 1, 4, 64, 0.0) == "step 64 of 256 (25 %) · loss 0.5"
    assert progress_line(row | {"eval_return": 3.0}, 4, 4, 64, 0.5).endswith("evaluated 3 · loss 0.5 · 128 steps/s")


def test_a_mesh_that_was_set_by_a_call_holds_until_its_block_ends():
    mesh, other = ljax.make_mesh(2, 4), ljax.make_mesh(1, 2)
    called = ljax.set_mesh(mesh)
    assert (ljax.active_mesh(), jax.sharding.get_mesh()) == (mesh, mesh)
    assert ljax.replicate(jnp.ones(())).shape == (4,)
    with called as given, ljax.set_mesh(other):
        assert (given, ljax.active_mesh(), jax.sharding.get_mesh()) == (mesh, other, other)
    assert ljax.active_mesh() is None
    assert jax.sharding.get_mesh().empty
    with called:  # again
        assert ljax.active_mesh() is mesh
    assert ljax.active_mesh() is None
    for wrong in ("two", 3, 99):
        with pytest.raises(ValueError, match="num_fsdp_devices"):
            untyped.set_mesh(wrong)
    with pytest.raises(ValueError, match="outside of"):
        jax.jit(lambda: (ljax.set_mesh(mesh), 1)[1])()
    assert ljax.active_mesh() is None


class Averaging(ljax.Task):
    """Reduces gradients by itself, and looks at which mesh is set."""

    def environment(self):
        return ljax.make("CartPole-v1")

    def sync_gradients(self, grads, axis_name):
        return jax.lax.pmean(grads, axis_name)

    def on_update(self, update, metrics):
        self.seen = jax.sharding.get_mesh()


def test_a_report_is_printed_or_not():
    text: Any = "no"
    task = Averaging(PPO, ljax.RunnerConfig(2 * STEPS, num_devices=2, num_envs=4))
    with pytest.raises(ValueError, match=r"^verbose: 'no' must be True or False$"):
        task.verify_distributed_setup(verbose=text)


def test_a_mesh_that_is_set_changes_no_training(whole, tmp_path):
    def averaged():
        task = Averaging(PPO, ljax.RunnerConfig(2 * STEPS, num_devices=2, num_envs=4))
        assert task.verify_distributed_setup(verbose=False).in_sync
        return task, task.train()[0]

    _, plain = averaged()
    mesh = ljax.make_mesh(num_devices=4)
    with ljax.set_mesh(mesh):
        train(2, checkpoint_dir=tmp_path / "c")
        state, _ = train(4, checkpoint_dir=tmp_path / "c", resume=True, eval_every=STEPS)
        task, own = averaged()
        assert jax.sharding.get_mesh() == mesh
    assert task.seen == mesh
    assert differing(whole[0], state) == []
    assert differing(plain, own) == []


class Constrained(eqx.Module):
    """Keeps its activations cut over the active mesh."""

    net: Net

    def __call__(self, observations, key=None):
        return self.net(ljax.activation_sharding_constraint(observations), key)


class Cut(Averaging):
    def policy_network(self, observations, num_outputs, key):
        return Constrained(Net(observations.shape[-1], num_outputs, key))


def test_a_network_that_constrains_its_activations_is_trained_whatever_mesh_is_set():
    def trained():
        return Cut(PPO, ljax.RunnerConfig(2 * STEPS, num_devices=2, num_envs=4)).train()[0]

    plain = trained()
    for wanted in (lambda: ljax.set_mesh(ljax.make_mesh(num_devices=4)), lambda: ljax.set_mesh(num_devices=4)):
        with wanted() as mesh:
            assert differing(plain, trained()) == []
            assert ljax.active_mesh() is mesh


class Rounding(eqx.Module):
    """Has layers in bfloat16, and outputs in float32."""

    layers: list[eqx.nn.Linear]
    head: eqx.nn.Linear

    def __call__(self, observations, key=None):
        x = observations.astype(jnp.bfloat16)
        for layer in self.layers:
            x = jax.nn.silu(x @ layer.weight.T.astype(jnp.bfloat16))
        out = jax.vmap(self.head)(x.astype(jnp.float32))
        return out[:, :-1], out[:, -1]


class Rounded(ljax.Task):
    def environment(self):
        return ljax.make("CartPole-v1")

    def policy_network(self, observations, num_outputs, key):
        one, two, three = jax.random.split(key, 3)
        layers = [eqx.nn.Linear(observations.shape[-1], 32, key=one), eqx.nn.Linear(32, 32, key=two)]
        return Rounding(layers, eqx.nn.Linear(32, num_outputs + 1, key=three))


def test_a_network_that_computes_in_bfloat16_is_one_agent_on_any_number_of_devices():
    one, two = (
        Rounded(PPO, ljax.RunnerConfig(2 * STEPS, num_devices=n, num_envs=8 // n, num_shards=2)).train()[0]
        for n in (1, 2)
    )
    assert differing(one.params, two.params) == []


@pytest.mark.parametrize("wanted", [lambda: (ljax.make_mesh(2, 4), ljax.make_mesh(1, 2)), lambda: (2, 1)])
def test_meshes_may_be_set_before_their_blocks_begin(wanted):
    contexts = [ljax.set_mesh(each) for each in wanted()]
    for context in contexts:
        with context as mesh:
            assert ljax.active_mesh() is mesh
            assert jax.sharding.get_mesh() == mesh or jax.sharding.get_mesh().empty
    assert ljax.active_mesh() is None
    assert jax.sharding.get_mesh().empty


def test_a_train_state_of_another_activation_is_refused(half):
    state, _ = half
    other = dataclasses.replace(PPO, activation="relu")
    error = error_of(train, 1, state=state, ppo=other)
    assert error == (
        "train_state: activation is 'tanh' in its networks and 'relu' in the settings; give activation='tanh'"
    )
