"""What a newcomer gets wrong in ``lockstep.jax`` is said in one line that tells what would work."""

from typing import Any

import corridors
import gymnasium
import jax
import numpy as np
import pytest

import lockstep.jax as ljax
from lockstep.jax.checkpoint_folder import CheckpointFolder
from lockstep.jax.history import PPOMetricsHistory

untyped: Any = ljax
"""For what a type checker would refuse as well."""

PPO = ljax.PPOConfig(n_steps=8, n_minibatches=2, n_epochs=1, hidden_sizes=(4,))


def error_of(function, *args, **kwargs):
    with pytest.raises(ValueError) as caught:
        function(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, capsys):
    state = ljax.PPO.init(jax.random.key(0), 4, 2, PPO)
    folder = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path), {"seed": 0})
    for update in (1, 2):
        folder.save(state, PPOMetricsHistory(total_loss=np.ones(update)), update, 10 * update)
    resumed = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path, resume=True), {"seed": 0})
    found = resumed.find(state)
    assert (found and found.updates, capsys.readouterr().err) == (2, "")
    (tmp_path / "step_20" / "kinds.json").write_text("{}")
    found = resumed.find(state)
    damage = "is damaged (its sha256 is not the manifest's); passed over"
    assert (found and found.updates) == 1
    assert capsys.readouterr().err == f"lockstep: warning: {tmp_path}/step_20/kinds.json {damage} for step_10\n"
    (tmp_path / "step_10" / "manifest.json").unlink()
    assert resumed.find(state) is None
    newest, older = capsys.readouterr().err.splitlines()
    assert newest.endswith(f"{damage}, and training begins anew")
    assert f"{tmp_path}/step_10 has no valid manifest.json; passed over" in older


# --- environments ----------------------------------------------------------------------------------------------------


def trained(env: Any, *more: Any, **settings: Any):
    runner = ljax.RunnerConfig(64, num_devices=1, num_envs=2)
    return untyped.train_ppo_multigpu(env, None, *more, ppo_config=PPO, runner_config=runner, **settings)


class Task(ljax.Task):
    def __init__(self, env):
        super().__init__(PPO, ljax.RunnerConfig(64, num_devices=1, num_envs=2))
        self._env = env

    def environment(self):
        return self._env, None


class PmapTask(ljax.DistributedPPOTask):
    def __init__(self, env):
        super().__init__(ljax.DistributedPPOConfig(num_envs=4, num_devices=1))
        self._env = env

    def get_environment(self):
        return self._env


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (corridors.Corridor, "the class Corridor was {how}; {give} an instance, Corridor(…)"),
        (ljax.ClipActionWrapper, "the class ClipActionWrapper was {how}; {give} an instance"),
        ("CartPole-v1", "str was {how}, which has no reset and step; {give} one of make, as in env, params = "
                        "lockstep.jax.make('CartPole-v1')"),
        (None, "NoneType was {how}, which has no reset and step; {give} one of make"),
        (3, "int was {how}, which has no reset and step"),
    ],
)  # fmt: skip
def test_what_is_no_environment_is_said(env, words):
    assert error_of(trained, env).startswith("env: " + words.format(how="given", give="give"))
    returned = words.format(how="returned", give="return")
    assert error_of(Task(env).train).startswith("environment: " + returned)
    assert error_of(PmapTask(env).train).startswith("get_environment: " + returned)


def test_an_environment_of_the_host_is_trained_elsewhere():
    for env in (gymnasium.make("CartPole-v1"), gymnasium.make_vec("CartPole-v1", 2)):
        line = error_of(trained, env)
        assert "is an environment of Gymnasium, which steps on the host: train it with lockstep train CartPole" in line
        assert line.endswith(
            "here give one that JAX steps, of lockstep.jax.make, of gymnax or a class with reset(key, params)"
        )
    assert error_of(Task(gymnasium.make("CartPole-v1")).train).startswith("environment: ")


def test_a_hook_gives_an_environment_or_a_pair():
    assert "get_environment: 3 values were returned; return env, or (env" in error_of(PmapTask((1, 2, 3)).train)
    env = corridors.Corridor()
    assert PmapTask((env, 7)).environment() == (env, 7)
    assert PmapTask(env).environment() == (env, None)


# --- arguments and settings ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("seed", "seed: it is RunnerConfig's; give RunnerConfig(seed=…) as runner_config"),
        ("lr", "lr: it is PPOConfig's; give PPOConfig(lr=…) as ppo_config"),
        ("key", "key: random numbers are of RunnerConfig's seed; give RunnerConfig(seed=…), a whole number"),
        ("rng", "rng: random numbers are of RunnerConfig's seed"),
        ("network", "network: networks are PPOConfig's hidden_sizes and activation; for a module of your own"),
        ("trainstate", "trainstate: no argument of train_ppo_multigpu; did you mean train_state?"),
        ("xyzzy", "xyzzy: no argument of train_ppo_multigpu; there are env, env_params, ppo_config"),
    ],
)  # fmt: skip
def test_an_argument_that_is_none_says_where_it_belongs(argument, words):
    with pytest.raises(TypeError) as caught:
        trained(corridors.Corridor(), **{argument: 0})
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


def test_arguments_by_place_are_two():
    with pytest.raises(TypeError) as caught:
        trained(corridors.Corridor(), PPO)
    assert str(caught.value) == (
        "train_ppo_multigpu: 3 arguments were given by place, which are env and env_params; give others by name: "
        "ppo_config, runner_config, obs_shape, n_actions, train_state"
    )
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'env_params'"):
        untyped.train_ppo_multigpu(corridors.Corridor(), ppo_config=PPO, runner_config=ljax.RunnerConfig())


def test_a_seed_is_a_whole_number():
    line = "seed: a key of jax.random was given and must be a whole number, such as 0"
    assert error_of(untyped.RunnerConfig, seed=jax.random.key(0)) == line
    assert "must be a whole number, at least 0" in error_of(untyped.RunnerConfig, seed=jax.random.PRNGKey(0))
    assert "must be a whole number" in error_of(untyped.RunnerConfig, seed=np.eye(2))
    assert ljax.RunnerConfig(seed=np.int64(3)).seed == 3  # type: ignore[arg-type]
