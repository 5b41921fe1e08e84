"""What a newcomer gets wrong in ``lockstep.jax`` is said in one line that tells what would work."""

import copy
import dataclasses
import inspect
import pickle
import re
import shutil
import warnings
from typing import Any

import corridors
import gymnasium
import jax
import numpy as np
import pytest
from refusals import error_of

import lockstep
import lockstep.jax as ljax
from lockstep.jax.checkpoints.folder import CheckpointFolder
from lockstep.jax.history import PPOMetricsHistory
from lockstep.jax.pmap.config import settings_of

untyped: Any = ljax
"""For what a type checker would refuse as well."""

pytestmark = pytest.mark.quick
PPO = ljax.PPOConfig(n_steps=8, n_minibatches=2, n_epochs=1, hidden_sizes=(4,))


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(tmp_path, capsys):
    state = ljax.PPO.init(jax.random.key(0), 4, 2, PPO)
    folder = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path), {"seed": 0})
    for update in (1, 2):
        folder.save(state, PPOMetricsHistory(total_loss=np.ones(update)), update, 10 * update)
    folder.close()
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
    for update in (1, 2):
        resumed.save(state, PPOMetricsHistory(total_loss=np.ones(update)), update, 10 * update)
    found = resumed.find(state)
    assert (found and found.updates, capsys.readouterr().err) == (2, "")


def test_a_checkpoint_that_a_newer_version_has_written_is_not_trained_over(tmp_path):
    state = ljax.PPO.init(jax.random.key(0), 4, 2, PPO)
    folder = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path), {"seed": 0})
    for update in (1, 2):
        folder.save(state, PPOMetricsHistory(total_loss=np.ones(update)), update, 10 * update)
    folder.close()
    manifest = tmp_path / "step_20" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format": 1', '"format": 2'))
    resumed = CheckpointFolder(ljax.RunnerConfig(checkpoint_dir=tmp_path, resume=True), {"seed": 0})
    newer = (
        f"resume: {tmp_path}/step_20 was written by a newer lockstep (format 2; this one reads up to 1); resume with "
    )
    assert error_of(resumed.find, state) == f"{newer}that lockstep, or give another checkpoint_dir"
    shutil.rmtree(tmp_path / "step_10")
    assert error_of(resumed.find, state).startswith(newer)
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 1'))
    found = resumed.find(state)
    assert found
    assert found.updates == 2


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
    assert ljax.RunnerConfig(seed=np.int64(3)).seed == 3  # pyright: ignore[reportArgumentType]


SWITCHES = [
    *((ljax.PPOConfig, name) for name in ("anneal_lr", "shared_layers", "normalize_advantage", "drop_remainder")),
    *((ljax.PPOConfig, name) for name in ("normalize_observations", "normalize_rewards")),
    *((ljax.RunnerConfig, name) for name in ("resume", "overwrite", "plot")),
]


@pytest.mark.parametrize(("kind", "name"), SWITCHES)
@pytest.mark.parametrize("value", ["False", "no", "", 2, 0.5, None, np.zeros(2)])
def test_a_setting_that_is_on_or_off_is_no_text(kind, name, value):
    """Python takes the text ``"False"`` for true, and ``overwrite`` removes checkpoints."""
    said = " ".join(repr(value).split())
    assert error_of(kind, **{name: value}) == f"{name}: {said} must be True or False"


def test_a_setting_that_is_on_or_off_may_be_a_bool_of_numpy_or_jax():
    for on, off in ((True, False), (np.True_, np.False_), (jax.numpy.bool_(1), jax.numpy.bool_(0)), (1, 0)):
        ppo = untyped.PPOConfig(anneal_lr=on, normalize_advantage=off)
        assert (ppo.anneal_lr, ppo.normalize_advantage) == (True, False)
        assert type(ppo.anneal_lr) is type(ppo.normalize_advantage) is bool
        assert untyped.RunnerConfig(resume=off).resume is False


@pytest.mark.parametrize("name", ["anneal_lr", "normalize_advantages", "use_clipped_value_loss", "resume", "overwrite"])
def test_so_is_one_of_a_task_over_devices(name):
    config = untyped.DistributedPPOConfig(checkpoint_dir="it", **{name: "False"})
    assert error_of(settings_of, config, 1) == f"{name}: 'False' must be True or False"


@pytest.mark.parametrize("name", ["n_steps", "n_epochs", "n_minibatches"])
@pytest.mark.parametrize("value", [True, "4", 0, 2.5])
def test_steps_passes_and_minibatches_are_whole_numbers(name, value):
    assert error_of(untyped.PPOConfig, **{name: value}) == f"{name}: {value!r} must be a whole number, at least 1"
    assert getattr(untyped.PPOConfig(**{name: 4.0}), name) == 4


@pytest.mark.parametrize("size", [0, True, 64.5, "64", -1])
def test_layers_have_whole_numbers_of_units(size):
    line = f"hidden_sizes: {size!r} must be a whole number, at least 1"
    assert error_of(untyped.PPOConfig, hidden_sizes=(64, size)) == line
    assert error_of(settings_of, untyped.DistributedPPOConfig(hidden_sizes=[64, size]), 1) == line
    assert "must be units of each layer" in error_of(settings_of, untyped.DistributedPPOConfig(hidden_sizes=64), 1)


def test_numbers_are_neither_true_nor_false():
    assert error_of(untyped.PPOConfig, lr=True).startswith("learning_rate: True: a number or text is wanted here")
    assert error_of(untyped.RunnerConfig, num_shards=True) == "num_shards: True must be a whole number, at least 1"


def test_replacing_a_setting_takes_its_own_name():
    line = "lr: dataclasses.replace takes a setting by its own name; give learning_rate=1.0"
    for config in (PPO, ljax.DistributedPPOConfig()):
        assert error_of(dataclasses.replace, config, lr=1.0) == line
        assert dataclasses.replace(config, learning_rate=1.0).lr == 1.0


@pytest.mark.parametrize(
    ("kind", "setting", "words"),
    [
        (ljax.RunnerConfig, "num_updates", "num_updates: updates follow from total_timesteps"),
        (ljax.RunnerConfig, "num_seeds", "num_seeds: one program trains one seed here; give seed"),
        (ljax.RunnerConfig, "n_steps", "n_steps: steps of an update are PPOConfig's"),
        (ljax.PPOConfig, "num_updates", "num_updates: how long training is is RunnerConfig's; give total_timesteps"),
        (ljax.PPOConfig, "num_steps", "num_steps: no setting of PPOConfig; did you mean n_steps?"),
        (ljax.DistributedPPOConfig, "num_steps", "num_steps: it is rollout_length_steps here"),
        (ljax.DistributedPPOConfig, "n_steps", "n_steps: it is rollout_length_steps here"),
        (ljax.DistributedPPOConfig, "clip_eps", "clip_eps: it is clip_param here"),
        (ljax.DistributedPPOConfig, "num_updates", "num_updates: updates follow from total_timesteps"),
        (ljax.DistributedPPOConfig, "num_seeds", "num_seeds: one program trains one seed here"),
        (ljax.DistributedPPOConfig, "lerning_rate", "no setting of DistributedPPOConfig; did you mean learning_rate?"),
    ],
)
def test_a_setting_of_another_name_says_what_it_is_here(kind, setting, words):
    assert words in error_of(kind, **{setting: 3})
    if kind is ljax.DistributedPPOConfig:
        config = kind()
        assert words in error_of(setattr, config, setting, 3)
        assert config == kind()


@dataclasses.dataclass
class Own(ljax.DistributedPPOConfig):
    height: float = 1.0

    def __post_init__(self):
        self.derived = 2 * self.height


def test_attributes_of_a_config_are_those_it_was_made_with():
    config: Any = Own(height=2.0)
    config.height, config.derived, config.lr, config.max_grad_norm, config._note = 3.0, 5.0, 0.5, 2.0, "mine"
    assert (config.height, config.derived, config.learning_rate, config.global_grad_clip) == (3.0, 5.0, 0.5, 2.0)
    assert "heigth: no setting of Own; did you mean height?" in error_of(setattr, config, "heigth", 1.0)
    again = pickle.loads(pickle.dumps(config))
    assert (again, copy.copy(config).derived, dataclasses.replace(config, seed=1).derived) == (config, 5.0, 6.0)


class Walk(ljax.DistributedPPOTask):
    def get_environment(self):
        return corridors.Corridor()


def test_a_checkpoint_of_other_settings_is_refused_in_the_configs_names(tmp_path):
    settings: dict[str, Any] = {"num_envs": 4, "num_devices": 1, "rollout_length_steps": 8, "total_timesteps": 32}
    settings |= {"hidden_sizes": (4,), "checkpoint_dir": tmp_path, "num_passes": 1}
    Walk(ljax.DistributedPPOConfig(num_batches=2, **settings)).train()
    other = Walk(ljax.DistributedPPOConfig(num_batches=4, resume=True, **settings))
    assert error_of(other.train).startswith(f"num_batches: 4, but {tmp_path}/step_32 was trained with 2; leave it")


def test_a_config_that_changes_after_the_task_was_made_is_refused():
    config = Own(num_envs=4, num_devices=1, rollout_length_steps=8, total_timesteps=32, hidden_sizes=[4])  # pyright: ignore[reportArgumentType]
    task = Walk(config)
    config.height = 7.0
    for name, value, then in (("learning_rate", 1.0, 3e-4), ("num_envs", 8, 4), ("resume", True, False)):
        setattr(config, name, value)
        line = (
            f"config: {name} is {value!r} and was {then!r} when the task was made, which settled it; make a new task of"
        )
        for act in (task.train, task.run_distributed_training, task.verify_distributed_setup):
            assert error_of(act).startswith(line)
        setattr(config, name, then)
    config.hidden_sizes.append(4)  # pyright: ignore[reportAttributeAccessIssue]
    assert error_of(task.train).startswith("config: hidden_sizes is [4, 4] and was [4] when")
    config.hidden_sizes = (4,)
    task.config = dataclasses.replace(config, hidden_sizes=[4])
    assert int(task.train()[0].step) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_batches": 3, "rollout_length_steps": 8}, "num_batches: 3 doesn't divide"),
        ({"clip_param": -1.0}, "clip_param: -1.0"),
        ({"lam": 2.0}, "lam: 2.0"),
        ({"entropy_coef": "x"}, "entropy_coef: 'x'"),
    ],
)
def test_errors_are_in_the_configs_names(settings, words):
    line = error_of(lambda: Walk(ljax.DistributedPPOConfig(num_envs=4, num_devices=1, **settings)).train())
    assert words in line
    assert not re.search(r"n_minibatches|n_steps|clip_eps|ent_coef|gae_lambda|num_devices x", line)


# --- what training gives ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "needed"),
    [
        ("jax_enable_x64", True, False),
        ("jax_default_prng_impl", "rbg", "threefry2x32"),
        ("jax_threefry_partitionable", False, True),
        ("eager_constant_folding", True, False),
        ("jax_numpy_rank_promotion", "raise", "allow"),
        ("jax_numpy_dtype_promotion", "strict", "standard"),
        ("jax_legacy_prng_key", "error", "allow"),
    ],
)
def test_settings_of_jaxs_own_that_make_another_agent_are_refused(setting, value, needed):
    env, env_params = ljax.make("CartPole-v1")
    runner = ljax.RunnerConfig(total_timesteps=64, num_devices=1, num_envs=8)
    jax.config.update(setting, value)
    try:
        error = error_of(ljax.train_ppo_multigpu, env, env_params, ppo_config=PPO, runner_config=runner)
    finally:
        jax.config.update(setting, needed)
    assert error == f"{setting}: {value}; lockstep.jax needs {needed}"


def test_ranks_whose_promotion_is_warned_of_are_promoted():
    with jax.numpy_rank_promotion("warn"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert int(trained(corridors.Corridor())[0].step) == 4


def test_a_history_names_what_it_has():
    history = PPOMetricsHistory(total_loss=np.ones(2), episode_return=np.ones(2))
    for name in ("episodic_return", "episode"):
        with pytest.raises(KeyError) as caught:
            _ = history[name]
        assert caught.value.args == (f"the history has no {name!r}; it has total_loss, episode_return",)


def test_acting_takes_a_key_or_none():
    state = ljax.PPO.init(jax.random.key(0), 4, 2, PPO)
    line = "key: int was given; give one of jax.random.key, or none for the likeliest actions"
    assert error_of(untyped.PPO.act, state, np.ones(4), 0) == line
    for key in (None, jax.random.key(0), jax.random.PRNGKey(0)):
        assert ljax.PPO.act(state, np.ones(4), key).shape == ()


def test_a_library_checkpoint_is_no_run(tmp_path):
    ljax.save_checkpoint(tmp_path / "one", {"w": np.ones(2)})
    ljax.save_checkpoint(tmp_path / "steps", {"w": np.ones(2)}, step=3)
    for path in (tmp_path / "one", tmp_path / "steps", tmp_path / "steps" / "step_3"):
        assert error_of(lockstep.load_policy, path) == (
            f"run: {path} holds a checkpoint of lockstep.jax, which is no run's; load it with "
            "lockstep.jax.load_checkpoint"
        )
    line = error_of(lockstep.load_policy, tmp_path / "nothing")
    assert line.startswith(f"run: {tmp_path}/nothing is no run directory; ")
    assert line.count("nothing") == 1


def test_editors_and_help_see_the_settings_and_their_defaults():
    for kind in (ljax.PPOConfig, ljax.RunnerConfig, ljax.DistributedPPOConfig):
        shown, fields = inspect.signature(kind).parameters, dataclasses.fields(kind)
        assert list(shown) == [field.name for field in fields]
        assert [shown[f.name].default for f in fields if f.default is not dataclasses.MISSING] == [
            f.default for f in fields if f.default is not dataclasses.MISSING
        ]
