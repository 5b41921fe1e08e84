"""The library door: what it refuses, and what it does on two devices, in a process of its own."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import corridors
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium import spaces
from jax._src.compilation_cache import decompress_executable
from refusals import error_of
from tasks_of_users import Corridors, corridor_settings

import lockstep.jax as ljax
from lockstep.config.run import Config
from lockstep.jax.config import PPO_NAMES, engine_config, in_users_names, run_config
from lockstep.jax.reward_terms import RewardTermsWrapper
from lockstep.jax.training import devices_of
from lockstep.jax_engine.envs.functional_checks import check_functions
from lockstep.jax_engine.setup.set_up import has_started

pytestmark = pytest.mark.quick
ROOT = Path(__file__).parents[2]
PPO = ljax.PPOConfig(n_steps=16)


def fresh(*command, cwd=ROOT, **environment):
    """Run Python in a process that JAX has not started in."""
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "modules")])
    ours = ("XLA_FLAGS", "PJRT_NPROC", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    variables = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=variables | {"PYTHONPATH": paths} | environment,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-3000:]
    return done


@pytest.mark.long
@pytest.mark.timeout(900)
def test_everything_that_needs_two_devices():
    output = fresh("-m", "pytest", "-p", "no:xdist", "tests/jax_engine/two_devices.py").stdout
    assert re.search(r"^\d\d passed in", output, re.MULTILINE), output


@pytest.mark.timeout(600)
def test_the_example_learns(tmp_path):
    output = fresh(str(ROOT / "examples" / "custom_task.py"), cwd=tmp_path).stdout
    first, last = map(float, re.findall(r"episode_return: (\S+) in the first update, (\S+) in the last", output)[0])
    assert last > 10 > 3 > first
    assert "cpu:1: environments 32 to 63 (32)" in output
    assert "copies after an update: equal" in output
    assert not any(tmp_path.iterdir())


# --- settings --------------------------------------------------------------------------------------------------------


def test_settings_are_the_configs():
    config = engine_config(ljax.PPOConfig(anneal_lr=True, clip_eps=0.1, vf_coef=0.7, hidden_sizes=(8, 8)))
    assert config.ppo.schedule == "linear"
    assert config.ppo.clip_range == 0.1
    assert config.ppo.value_coef == 0.7
    assert config.network.hidden_sizes == (8, 8)
    assert config.ppo.advantage_normalization == "global"
    off = engine_config(ljax.PPOConfig(normalize_advantage=False, n_epochs=7))
    assert (off.ppo.advantage_normalization, off.ppo.schedule, off.ppo.num_epochs) == ("off", "constant", 7)


def test_every_setting_stands_in_the_config():
    fields = {field.name for field in dataclasses.fields(ljax.PPOConfig)}
    assert fields - set(PPO_NAMES) == {"anneal_lr", "normalize_advantage"}
    changed = {"learning_rate": 1e-3, "activation": "relu", "hidden_sizes": (8,), "vf_clip_eps": 0.3, "target_kl": 0.1}
    for name, where in PPO_NAMES.items():
        default = getattr(PPO, name)
        value = changed.get(
            name, not default if isinstance(default, bool) else default / 2 if isinstance(default, float) else 8
        )
        config: object = engine_config(ljax.PPOConfig(**{name: value}))
        for part in where.split("."):
            config = getattr(config, part)
        assert config == value, name


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"gamma": 1.5}, "gamma"),
        ({"n_steps": 0}, "n_steps"),
        ({"n_minibatches": 0}, "n_minibatches"),
        ({"activation": "sine"}, "activation"),
        ({"clip_eps": 0.0}, "clip_eps"),
        ({"hidden_sizes": 64}, "hidden_sizes"),
    ],
)
def test_values_out_of_limits_are_refused_in_the_users_names(settings, name):
    assert error_of(ljax.PPOConfig, **settings).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"total_timesteps": 0}, "total_timesteps: 0"),
        ({"total_timesteps": "x"}, "total_timesteps: 'x' must be a whole number"),
        ({"total_timesteps": float("nan")}, "total_timesteps: nan"),
        ({"seed": -1}, "seed: -1 must be a whole number, at least 0"),
        ({"num_envs": 0}, "num_envs: 0"),
        ({"num_devices": 1.5}, "num_devices: 1.5"),
        ({"reduction": "slow"}, "reduction: 'slow'"),
        ({"reduction": "exact", "fsdp_devices": 2}, "fsdp_devices: 2"),
        ({"reduction": "exact", "sync_period": 2}, "sync_period: 2"),
    ],
)
def test_a_runner_that_contradicts_itself_is_refused(settings, words):
    assert words in error_of(ljax.RunnerConfig, **({"total_timesteps": 1000} | settings))


def resolved(devices, reduced=False, **settings) -> Config:
    runner = ljax.RunnerConfig(settings.pop("total_timesteps", 10_000), **settings)
    return run_config(PPO, runner, "env", devices, "cpu", reduced)


def test_the_run_is_a_function_of_what_all_devices_have():
    assert resolved(1, num_envs=16) == resolved(2, num_envs=8) == resolved(8, num_envs=2)
    assert resolved(1, num_envs=16) != resolved(1, num_envs=8)
    config = resolved(4, num_envs=3, seed=5)
    assert (config.envs, config.shards, config.seed) == (12, 4, 5)
    assert config.num_iterations == 10_000 // (12 * 16)
    assert resolved(16).shards == 16
    assert resolved(2, num_envs=4, sync_period=2).reduction == "fast"


@pytest.mark.parametrize(
    ("devices", "num_envs", "shards"),
    [(1, 12, 4), (2, 12, 8), (3, 8, 8), (3, 4, 4), (3, 3, 3), (5, 2, 5), (6, 16, 8), (7, 1, 7), (12, 3, 12)],
)
def test_shards_are_those_of_one_device_where_nobody_chooses_and_they_go_round(devices, num_envs, shards):
    config = resolved(devices, num_envs=num_envs)
    assert (config.envs, config.shards) == (devices * num_envs, shards)
    if shards > devices:
        assert config == resolved(1, num_envs=devices * num_envs)


def test_devices_that_step_by_themselves_have_equally_many_shards():
    assert resolved(3, num_envs=8, sync_period=2).shards == 3
    assert resolved(2, num_envs=8, sync_period=2).shards == 8


def test_devices_whose_gradients_are_reduced_by_a_hook_have_equally_many_shards():
    assert resolved(3, reduced=True, num_envs=8).shards == 3
    assert resolved(2, reduced=True, num_envs=8).shards == 8
    assert resolved(3, reduced=True, num_envs=8, num_shards=8).shards == 8


def test_shards_that_are_chosen_may_be_uneven():
    assert resolved(3, num_envs=4, num_shards=4) == resolved(1, num_envs=12, num_shards=4)


def test_numbers_that_dont_fit_are_refused():
    assert "256" in error_of(resolved, 2, num_envs=8, total_timesteps=255)
    message = error_of(resolved, 3, num_envs=4, num_shards=2)
    assert message.startswith("num_devices: 3 devices can't share 2 shards")
    assert "for a new run num_shards 3" in message
    assert "--" not in message
    assert "num_shards 2 or 3, or num_devices x num_envs 4 or 8" in error_of(resolved, 1, num_envs=6, num_shards=4)
    assert error_of(resolved, 1, num_envs=4, num_shards=8).startswith("num_shards: 4 environments can't be cut into 8 ")
    runner = ljax.RunnerConfig(10_000)
    assert "n_minibatches: 3 " in error_of(run_config, ljax.PPOConfig(n_minibatches=3), runner, "env", 1, "cpu", False)


def test_a_message_is_translated_once():
    """Errors pass through more than one function that translates them: through the door, through a task."""
    words = (
        "num_shards: 6 environments can't be cut into 4 equal shards; nearest that work: num_shards 2 or 3, or "
        "num_devices x num_envs 4 or 8"
    )
    runner = ljax.RunnerConfig(10_000, num_devices=1, num_envs=6, num_shards=4)
    assert error_of(ljax.train_ppo_multigpu, *ljax.make("CartPole-v1"), ppo_config=PPO, runner_config=runner) == words
    plain = "num_envs: 4 don't fit num_envs 6; ppo.num_minibatches: 3, num_envs_per_rank 2, my.num_steps"
    once = in_users_names(plain)
    assert once.startswith("num_devices x num_envs: 4 don't fit num_devices x num_envs 6; n_minibatches: 3")
    assert once.endswith("num_envs_per_rank 2, my.num_steps")
    assert in_users_names(once) == once


def test_devices_that_are_not_there(capsys):
    present = jax.device_count()
    assert str(present + 1) in error_of(devices_of, ljax.RunnerConfig(100, num_devices=present + 1))
    assert devices_of(ljax.RunnerConfig(100, num_devices=1)) == (1, 1)
    assert capsys.readouterr().err == ""
    assert "fsdp_devices: 2" in error_of(devices_of, ljax.RunnerConfig(100, num_devices=1, fsdp_devices=2))


def test_a_single_device_where_many_were_meant_is_said_in_a_line():
    code = "import lockstep.jax as j; from lockstep.jax.training import devices_of; "
    said = fresh("-c", code + "assert devices_of(j.RunnerConfig(100)) == (1, 1)").stderr
    assert said.startswith("lockstep: training runs on a single device [")
    assert said.count("\n") == 1


def test_jax_is_seen_to_have_started():
    assert jax.device_count() >= 1
    assert has_started()
    code = "import jax; from lockstep.jax_engine.setup.set_up import *; assert not has_started(); assert prepare_jax()"
    fresh("-c", code + "; jax.devices(); assert has_started() and prepare_jax()")
    fresh("-c", "import jax; jax.devices(); import lockstep.jax as j; assert not j.prepare_jax()")


def test_a_program_of_ones_own_that_was_torn_is_compiled_and_kept_again(tmp_path):
    """The place is Lockstep's, so that its promise holds for what ``lockstep.jax`` has kept there, too."""
    code = (
        "import jax, lockstep.jax as j; j.prepare_jax(); jax.config.update('jax_persistent_cache_min_compile_time_secs'"
        ", 0); print(jax.jit(lambda x: x @ x.T + 3)(jax.numpy.ones((8, 8)))[0, 0])"
    )
    given = fresh("-c", code, XDG_CACHE_HOME=str(tmp_path)).stdout
    kept = list(tmp_path.rglob("*-cache"))
    assert kept
    for file in kept:
        file.write_bytes(file.read_bytes()[:40])
    again = fresh("-c", code, XDG_CACHE_HOME=str(tmp_path))
    assert (again.stdout, again.stderr) == (given, "")
    # Whole again. Their sizes differ by some bytes: two compilations of a program needn't give the same file.
    assert all(decompress_executable(file.read_bytes()) for file in kept)
    written = {file: file.stat().st_mtime_ns for file in kept}
    assert fresh("-c", code, XDG_CACHE_HOME=str(tmp_path)).stdout == given
    assert {file: file.stat().st_mtime_ns for file in kept} == written


OPENED = """
import jax, lockstep.jax as ljax
from lockstep.jax.training import Training
jax.config.update("jax_num_cpu_devices", 2)
{first}
Training(*ljax.make("CartPole-v1"), ljax.PPOConfig(), ljax.RunnerConfig(10_000))
"""


@pytest.mark.long
def test_a_line_says_that_jax_had_started_too_early():
    assert fresh("-c", OPENED.format(first="jax.devices()")).stderr.count("prepare_jax() first") == 1
    assert fresh("-c", OPENED.format(first="ljax.prepare_jax(); jax.devices()")).stderr == ""
    assert fresh("-c", OPENED.format(first="")).stderr == ""


def test_an_environment_can_be_made_before_anything_else(tmp_path):
    """gymnax starts JAX when it is imported: threads, rounding and cache are settled before."""
    code = (
        "import os, lockstep.jax as j; j.make('gymnax/CartPole-v1'); import jax; jax.devices(); assert j.prepare_jax()"
    )
    code += "; print(os.environ['PJRT_NPROC'], jax.config.values['jax_compilation_cache_dir'])"
    threads, cache = fresh("-c", code, XDG_CACHE_HOME=str(tmp_path)).stdout.split()
    assert int(threads) == 16  # as for eight devices: what a user brings may depend on it
    assert cache.startswith(str(tmp_path / "lockstep" / "jax"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_persistent_cache_min_compile_time_secs", 30.0),
        ("jax_persistent_cache_min_compile_time_secs", 0.0),
        ("jax_compilation_cache_dir", "mine"),
    ],
)
@pytest.mark.parametrize("by", ["setting", "variable"])
def test_how_a_user_keeps_compiled_programs_is_left_alone(tmp_path, name, value, by):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    seen = f"[jax.config.values[name] for name in {names}]"
    sets = f"jax.config.update({name!r}, {value!r})" if by == "setting" else "pass"
    code = f"import jax; {sets}; before = {seen}; import lockstep.jax as j; j.make('CartPole-v1')"
    code += f"; assert {seen} == before and {value!r} in before, ({seen}, before)"
    variables: dict[str, Any] = {} if by == "setting" else {name.upper(): str(value)}
    fresh("-c", code, XDG_CACHE_HOME=str(tmp_path), **variables)


def refused(env, params=None, **settings):
    runner = ljax.RunnerConfig(1000, num_devices=1)
    return error_of(ljax.train_ppo_multigpu, env, params, ppo_config=PPO, runner_config=runner, **settings)


def test_an_environment_that_isnt_what_was_said_is_refused():
    env, params = ljax.make("CartPole-v1")
    assert re.search(r"obs_shape: \(3,\).*\(4,\)", refused(env, params, obs_shape=(3,)))
    assert "obs_shape: 'a' must be a whole number" in refused(env, params, obs_shape="a")
    assert "train_state: int was given" in refused(env, params, train_state=3)
    assert re.search(r"n_actions: 3 .* 2 actions", refused(env, params, n_actions=3))
    pendulum, params = ljax.make("Pendulum-v1")
    assert re.search(r"n_actions: 2 .* 1 ", refused(pendulum, params, n_actions=2))
    assert "normalize_observations" in refused(ljax.VmapWrapper(env))
    assert "can't be traced" in refused(corridors.Wrong("branch"))


# --- a state of one's own --------------------------------------------------------------------------------------------


def test_a_fresh_state_is_that_of_a_run_with_the_keys_seed():
    state = ljax.PPO.init(jax.random.key(7), 4, 2, PPO)
    again = ljax.PPO.init(jax.random.PRNGKey(7), (4,), spaces.Discrete(2), PPO)
    assert jax.tree.structure(state) == jax.tree.structure(again)
    assert all(bool((state.params[n] == again.params[n]).all()) for n in state.params)
    other = ljax.PPO.init(jax.random.split(jax.random.key(7))[0], 4, 2, PPO)
    assert not bool((state.params["actor.0.weight"] == other.params["actor.0.weight"]).all())
    assert ljax.PPO.apply(state, jnp.ones(4))[0].shape == (2,)
    with pytest.raises(ValueError, match="traced"):
        jax.jit(lambda key: ljax.PPO.init(key, 4, 2).params)(jax.random.key(0))


def test_continuous_actions_keep_to_their_bounds():
    box = spaces.Box(np.array([-0.1, -2.0], np.float32), np.array([0.1, 2.0], np.float32))
    state = ljax.PPO.init(jax.random.key(0), (3,), box)
    actions = ljax.PPO.act(state, jnp.ones((50, 3)), jax.random.key(1))
    assert actions.shape == (50, 2)
    assert np.abs(actions[:, 0]).max() == np.float32(0.1)
    assert 0.5 < np.abs(actions[:, 1]).max() <= 2.0
    assert state.params["log_std"].shape == (2,)


# --- tasks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": 3, "num_batches": 2}, "3 x 2 = 6 must be num_envs 4"),
        ({"batch_size": 3}, "batch_size: 3 doesn't divide num_envs 4"),
        ({"num_batches": 0}, "num_batches: 0"),
        ({"batch_size": 2.5}, "batch_size: 2.5 must be a whole number"),
        ({"batch_size": "2"}, "batch_size: '2' must be a whole number"),
        ({"log_devices_every": None}, "log_devices_every: None must be a whole number"),
        ({"axis_name": "fsdp"}, "axis_name: 'fsdp'"),
        ({"axis_name": "my axis"}, "axis_name: 'my axis'"),
        ({"log_devices_every": -1}, "log_devices_every: -1"),
        ({"sync_period": 0}, "sync_period: 0"),
    ],
)
def test_settings_of_a_task_that_dont_fit_are_refused(settings, words):
    assert words in error_of(Corridors, *corridor_settings(), **settings)


def test_batches_say_how_many_minibatches_there_are():
    given: list[tuple[Any, Any]] = [(1, None), (None, 4), (1, 4), (1.0, None), (None, np.int64(4))]
    for size, number in given:
        minibatches = Corridors(*corridor_settings(), batch_size=size, num_batches=number).ppo_config.n_minibatches
        assert (minibatches, type(minibatches)) == (4, int)
    assert Corridors(*corridor_settings()).ppo_config.n_minibatches == 2


class Reducing(Corridors):
    def sync_gradients(self, grads, axis_name):
        return grads


@pytest.mark.parametrize("settings", [{"reduction": "exact"}, {"sync_period": 2}, {"fsdp_devices": 2}])
def test_a_reduction_of_ones_own_needs_reduction_fast(settings):
    assert "sync_gradients" in error_of(Reducing, *corridor_settings(**settings))
    Reducing(*corridor_settings())
    Corridors(*corridor_settings(**settings))


def test_a_task_needs_an_environment():
    with pytest.raises(TypeError, match="environment"):
        ljax.Task(PPO, ljax.RunnerConfig(100)).train()


# --- reward terms ----------------------------------------------------------------------------------------------------


def test_a_reward_is_the_weighted_sum_of_its_terms():
    terms = {
        "place": (3.0, lambda t: t.next_state),
        "own": (np.float32(0.5), lambda t: t.reward),
        "push": (np.int64(-1), lambda t: t.action),
    }
    env = RewardTermsWrapper(corridors.Corridor(), terms)
    assert env.weights == {"place": 3.0, "own": 0.5, "push": -1.0}
    check_functions(env, None, jax.random.PRNGKey(0), "it", ())
    _, state = env.reset(jax.random.key(0))
    for place in (1, 2):
        _, state, reward, _, info = env.step(jax.random.key(0), state, jnp.int32(1))
        assert float(reward) == pytest.approx(3 * place - 0.05 - 1)
        assert {name: float(x) for name, x in info["reward_terms"].items()} == pytest.approx(
            {"place": 3 * place, "own": -0.05, "push": -1}
        )


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"a b": (1.0, len)}, "'a b' is no name"),
        ({"a": 1.0}, "tuple of a weight"),
        ({"a": (float("nan"), len)}, "nan"),
        ({"a": ("1", len)}, "'1'"),
        ({"a": (np.float32("nan"), len)}, "nan"),
        ({"a": (np.bool_(True), len)}, "True"),
        ({"a": (np.ones(1), len)}, "array([1.])"),
    ],
)
def test_terms_that_are_none_are_refused(terms, words):
    assert words in error_of(RewardTermsWrapper, corridors.Corridor(), terms)


def test_terms_give_numbers_of_environments_that_dont_reset():
    env = RewardTermsWrapper(corridors.Corridor(), {"a": (1.0, lambda t: t.observation)})
    _, state = env.reset(jax.random.key(0))
    assert "(2,)" in error_of(env.step, jax.random.key(0), state, jnp.int32(1))
    inside = ljax.AutoResetWrapper(corridors.Corridor())
    assert "resets by itself" in error_of(RewardTermsWrapper, inside, {"a": (1.0, lambda t: 1.0)})
