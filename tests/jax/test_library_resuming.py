"""What a training of the library door goes on from and what it refuses: checkpoints, terms, parameters, states."""

import dataclasses
import enum
import errno
import json
from types import SimpleNamespace
from typing import Any

import corridors
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import error_of

import lockstep.jax as ljax
from lockstep.jax_engine.envs.registry import made_of
from lockstep.runs.checkpoint import MANIFEST
from lockstep.runs.checkpoint_writer import write_directory
from lockstep.runs.directory import LOCK

untyped: Any = ljax
"""For what a type checker would refuse as well."""

pytestmark = pytest.mark.quick
PPO = ljax.PPOConfig(n_steps=8, n_minibatches=2, n_epochs=1, hidden_sizes=(4,))
STEPS = 8 * 4


def runner_of(updates=1, **settings):
    return ljax.RunnerConfig(updates * STEPS, num_devices=1, num_envs=4, **settings)


class Walk(ljax.Task):
    """Corridors with reward terms and parameters of one's choice."""

    def __init__(self, runner, terms=None, params=None, env=None):
        super().__init__(PPO, runner)
        self.terms, self.params, self.env = terms or {}, params, env or corridors.Corridor()

    def environment(self):
        return self.env, self.params

    def reward_terms(self):
        return {name: (weight, lambda t: t.reward) for name, weight in self.terms.items()}


class Mode(enum.Enum):
    A = 1
    B = 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inner:
    gain: float = 1.0
    size: int = dataclasses.field(default=3, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    mode: Mode = dataclasses.field(default=Mode.A, metadata={"static": True})
    option: Any = None


# --- overwriting -----------------------------------------------------------------------------------------------------


def contents(directory):
    return {path.relative_to(directory): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_checkpoints_that_are_overwritten_stay_as_long_as_nothing_is_trained(tmp_path):
    Walk(runner_of(2, checkpoint_dir=tmp_path, checkpoint_interval=STEPS)).train()
    before = contents(tmp_path)
    wrong = ljax.PPO.init(jax.random.key(0), 7, 3, PPO)
    runner = runner_of(1, checkpoint_dir=tmp_path, overwrite=True)
    line = error_of(
        ljax.train_ppo_multigpu, corridors.Corridor(), None, ppo_config=PPO, runner_config=runner, train_state=wrong
    )
    assert line.startswith("train_state: params['actor.0.weight'] is")
    assert contents(tmp_path) == before
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{STEPS}", f"step_{2 * STEPS}"}
    Walk(runner).train()
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{STEPS}"]
    assert contents(tmp_path) != before


def test_what_a_kill_left_of_a_checkpoint_goes_with_the_next_training_that_may_use_the_folder(tmp_path):
    Walk(runner_of(1, checkpoint_dir=tmp_path)).train()
    left = tmp_path / ".step_8.4.tmp"
    left.mkdir()
    (left / "kinds.json").touch()
    error_of(Walk(runner_of(1, checkpoint_dir=tmp_path)).train)  # another training may be writing it
    assert left.exists()
    Walk(runner_of(2, checkpoint_dir=tmp_path, resume=True, max_checkpoints=1)).train()
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{2 * STEPS}"]


def test_a_damaged_checkpoint_of_a_later_step_takes_no_place_among_the_newest(tmp_path):
    Walk(runner_of(3, checkpoint_dir=tmp_path)).train()
    later = tmp_path / f"step_{3 * STEPS}"
    (later / "kinds.json").write_text("{}")
    Walk(runner_of(2, checkpoint_dir=tmp_path, resume=True, max_checkpoints=1, checkpoint_interval=STEPS)).train()
    assert {path.name for path in tmp_path.iterdir()} == {f"step_{2 * STEPS}", later.name}
    Walk(runner_of(1, checkpoint_dir=tmp_path, overwrite=True)).train()
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{STEPS}"]


def test_a_folder_has_one_training_at_a_time(tmp_path):
    class Second(Walk):
        def on_update(self, step, metrics):
            said.append(error_of(Walk(runner_of(1, checkpoint_dir=tmp_path, resume=True)).train))

    said: list[str] = []
    Second(runner_of(1, checkpoint_dir=tmp_path)).train()
    assert said == [
        f"checkpoint_dir: {tmp_path} is being written by another process; wait for its end, or give each training a "
        "directory of its own"
    ]
    Walk(runner_of(2, checkpoint_dir=tmp_path, resume=True)).train()


def test_where_there_are_no_locks_a_folder_is_written_without_one(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.lockf", refuse)
    Walk(runner_of(1, checkpoint_dir=tmp_path)).train()
    assert [path.name for path in tmp_path.iterdir()] == [f"step_{STEPS}"]


def test_a_lock_that_a_kill_has_left_is_no_other_file_of_the_folder(tmp_path):
    (tmp_path / LOCK).touch()
    ljax.save_checkpoint(tmp_path, {"w": jnp.ones(2)})
    assert (tmp_path / MANIFEST).is_file()


# --- resuming --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("then", "now", "said"),
    [
        ({"terms": {"a": 1.0}}, {"terms": {"a": 100.0}}, "reward_terms: a: 100.0, but {} was trained with 1.0"),
        ({}, {"terms": {"a": 1.0}}, "reward_terms: a: 1.0, but {} was trained with none of this name"),
        (
            {"terms": {"a": 1}},
            {"terms": {"a": 1}, "env": corridors.SixValues()},
            "env: RewardTermsWrapper of SixValues, ",
        ),
        ({"terms": {"a": 1, "b": 1}}, {"terms": {"a": 1}}, "reward_terms: b: none of this name, but {} was trained wi"),
        ({"params": {"slope": 0.5}}, {"params": {"slope": 2.0}}, "env_params: slope: 2.0, but {} was trained with 0.5"),
        ({"params": (np.arange(3.0),)}, {"params": (np.ones(3),)}, "env_params: 0: float32[3] "),
        ({"params": Outer()}, {"params": Outer(Inner(size=9))}, "env_params: inner/size: 9, but {} was trained with 3"),
        ({"params": Outer()}, {"params": Outer(mode=Mode.B)}, "env_params: mode: Mode.B, but {} was trained with Mode"),
        ({"params": Outer()}, {"params": Outer(option=3.0)}, "env_params: option: 3.0, but {} was trained with None"),
        (
            {"params": {"of": SimpleNamespace(gain=1.0)}},
            {"params": {"of": SimpleNamespace(gain=2.0)}},
            "env_params: of/gain: 2.0, but {} was trained with 1.0",
        ),
        ({"params": 1}, {"params": 2}, "env_params: the parameters: 2, but {} was trained with 1; leave it as it was"),
    ],
)
def test_another_task_is_not_gone_on_with(tmp_path, then, now, said):
    folder = {"checkpoint_dir": tmp_path / "c"}
    Walk(runner_of(**folder), **then).train()
    before = contents(tmp_path)
    assert error_of(Walk(runner_of(2, resume=True, **folder), **now).train).startswith(
        said.format(tmp_path / "c" / f"step_{STEPS}")
    )
    assert contents(tmp_path) == before


def test_the_same_task_is_gone_on_with_however_its_numbers_are_written(tmp_path):
    folder = {"checkpoint_dir": tmp_path / "c"}
    Walk(runner_of(**folder), {"a": 1}, {"slope": 0.1, "way": np.arange(3)}).train()
    params = {"slope": jnp.float32(0.1), "way": jnp.arange(3)}
    state, history = Walk(runner_of(2, resume=True, **folder), {"a": 1.0}, params).train()
    assert (int(state.step), len(history["total_loss"])) == (2, 2)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (("Pendulum-v1", {"g": 5.0}), "env: lockstep/Pendulum-v1 with g 5.0, but {} was trained with lockstep/Pend"),
        (("lockstep/MountainCar-v0", {}), "env: lockstep/MountainCar-v0, but {} was trained with lockstep/Pendulum-"),
    ],
)  # fmt: skip
def test_another_environment_of_make_is_not_gone_on_with(tmp_path, now, said):
    folder = {"checkpoint_dir": tmp_path / "c"}
    env, params = ljax.make("Pendulum-v1")
    Walk(runner_of(**folder), env=env, params=params).train()
    before = contents(tmp_path)
    other, params = ljax.make(now[0], **now[1])
    line = error_of(Walk(runner_of(2, resume=True, **folder), env=other, params=params).train)
    assert line.startswith(said.format(tmp_path / "c" / f"step_{STEPS}"))
    assert contents(tmp_path) == before
    same, params = ljax.make("lockstep/Pendulum-v1")
    assert int(Walk(runner_of(2, resume=True, **folder), env=same, params=params).train()[0].step) == 2


def test_an_environment_with_no_place_for_what_it_was_made_of_is_made():
    env, _ = ljax.make("corridors:Slotted")
    assert (type(env), made_of(env)) == (corridors.Slotted, None)
    env, _ = ljax.make("corridors:Corridor", length=3)
    assert made_of(env) == ("corridors:Corridor", {"length": 3})


def fast(devices, updates=1, **settings):
    runner = ljax.RunnerConfig(updates * STEPS, num_devices=devices, num_envs=4 // devices, num_shards=4, **settings)
    return Walk(runner).train


def test_other_devices_are_refused_where_they_train_apart_and_warned_of_where_they_add_up(tmp_path, capsys):
    apart = {"checkpoint_dir": tmp_path / "apart", "sync_period": 2}
    fast(2, **apart)()
    line = "sync_period 2: devices train apart between synchronisations; the agent depends on their number"
    assert capsys.readouterr().err.count(f"lockstep: {line}\n") == 1
    before = contents(tmp_path)
    saved = tmp_path / "apart" / f"step_{STEPS}"
    said = f"num_devices: 4, but {saved} was trained with 2; leave it as it was"
    assert error_of(fast(4, 2, resume=True, **apart)) == said
    assert contents(tmp_path) == before
    assert int(fast(2, 2, resume=True, **apart)()[0].step) == 2
    capsys.readouterr()
    alike = {"checkpoint_dir": tmp_path / "alike", "reduction": "fast"}
    fast(2, **alike)()
    line = "reduction fast: repeatable at this number of devices; others agree up to summation order only"
    assert capsys.readouterr().err.count(f"lockstep: {line}\n") == 1
    assert int(fast(1, 2, resume=True, **alike)()[0].step) == 2
    saved = tmp_path / "alike" / f"step_{STEPS}"
    said = f"lockstep: warning: num_devices: 1, but {saved} was trained with 2; with reduction fast other devices agree"
    assert f"{said} up to summation order only\n" in capsys.readouterr().err


class Averaging(Walk):
    def sync_gradients(self, grads, axis_name):
        return jax.lax.pmean(grads, axis_name)


def test_shards_that_nobody_gave_are_told_from_those_of_a_checkpoint(tmp_path):
    def on(devices, updates, **settings):
        steps = updates * 24 * PPO.n_steps
        given = {"checkpoint_dir": tmp_path, "num_devices": devices, "num_envs": 24 // devices} | settings
        return Averaging(ljax.RunnerConfig(steps, **given)).train

    on(3, 1, num_shards=8)()  # as it was by itself, before devices owned equally many shards
    saved = tmp_path / f"step_{24 * PPO.n_steps}"
    said = f"num_shards: 3 on 3 devices where none are given, but {saved} was trained with 8; give num_shards=8 (Run"
    assert error_of(on(3, 2, resume=True)).startswith(said)
    assert error_of(on(3, 2, resume=True, num_shards=6)).startswith("num_shards: 6, but ")
    assert int(on(3, 2, resume=True, num_shards=8)()[0].step) == 2
    on(1, 1, num_shards=2, overwrite=True)()
    assert error_of(on(3, 2, resume=True)).endswith("; give num_shards=2 (RunnerConfig), on at most 2 devices")


def test_a_checkpoint_from_before_tasks_were_compared_is_gone_on_with(tmp_path):
    folder = {"checkpoint_dir": tmp_path / "c"}
    Walk(runner_of(**folder), {"a": 1.0}, 1, ljax.make("corridors:Corridor")[0]).train()
    saved = tmp_path / "c" / f"step_{STEPS}"
    said = json.loads((saved / MANIFEST).read_text())
    for name in ("reward_terms", "env_params", "env_classes", "env_made"):
        del said["metadata"]["settings"][name]
    files = {path.name: path.read_bytes() for path in saved.iterdir() if path.name != MANIFEST}
    write_directory(saved, files, {name: said[name] for name in ("kind", "metadata")}, [])
    env, _ = ljax.make("corridors:Corridor", length=5)
    state, _ = Walk(runner_of(2, resume=True, **folder), {"a": 100.0}, 1, env).train()
    assert int(state.step) == 2
    settings = (ljax.load_metadata(tmp_path / "c", step=2 * STEPS) or {})["settings"]
    assert (settings["reward_terms"], settings["env_params"]) == ({"a": 100.0}, {"the parameters": "1"})


def test_a_setting_that_came_after_a_checkpoint_had_its_default_then(tmp_path):
    from lockstep.jax.checkpoints.facts import check_facts

    check_facts({"seed": 3, "ppo.clip_schedule": "constant"}, {"seed": 3}, tmp_path)
    said = error_of(check_facts, {"seed": 3, "ppo.clip_schedule": "linear"}, {"seed": 3}, tmp_path)
    assert "clip_schedule: linear, but" in said
    assert "was trained with constant" in said


def test_a_parameter_that_an_edited_environment_has_more_is_no_other_task(tmp_path):
    from lockstep.jax.checkpoints.facts import check_facts

    then = {"env_params": {"a": "1"}}
    check_facts({"env_params": {"a": "1", "b": "2"}}, then, tmp_path)
    assert "env_params: a: 2" in error_of(check_facts, {"env_params": {"a": "2"}}, then, tmp_path)


# --- states and networks that can't be -------------------------------------------------------------------------------


class Beginning(Walk):
    """Begins with a state that has been on devices."""

    whole = False

    def initial_state(self, state):
        replicated = ljax.replicate(state, n_devices=1)
        return ljax.unreplicate(replicated) if self.whole else replicated


def test_a_replicated_state_is_refused_before_anything_is_compiled(monkeypatch):
    state = ljax.replicate(ljax.PPO.init(jax.random.key(0), 2, 2, PPO), n_devices=1)
    line = "train_state: its step is of shape (1,), as replicate makes it; give lockstep.jax.unreplicate(train_state)"
    with monkeypatch.context() as patch:
        patch.setattr("lockstep.jax.training.Training", None)
        given = {"ppo_config": PPO, "runner_config": runner_of(), "train_state": state}
        assert error_of(ljax.train_ppo_multigpu, corridors.Corridor(), None, **given) == line
    task = Beginning(runner_of())
    assert error_of(task.train) == line
    assert error_of(task.verify_distributed_setup) == line
    task.whole = True
    assert int(task.train()[0].step) == 1


class Spread(eqx.Module):
    """One layer, and a standard deviation of its own."""

    layer: eqx.nn.Linear
    log_std: jax.Array

    def __call__(self, observations, key=None):
        out = jax.vmap(self.layer)(observations)
        return out[:, :-1], out[:, -1]


class Pendulum(ljax.Task):
    def environment(self):
        return ljax.make("Pendulum-v1")

    def policy_network(self, observations, num_outputs, key):
        layer = eqx.nn.Linear(observations.shape[-1], num_outputs + 1, key=key)
        return Spread(layer, jnp.full((num_outputs,), -2.0))


def test_a_log_std_of_a_modules_own_is_not_replaced_without_a_word():
    assert error_of(Pendulum(PPO, runner_of()).train) == (
        "policy_network has a parameter log_std, which is the name of ours beside the module: the log standard "
        "deviation of continuous actions, which may be set by initial_state; leave it out or rename it"
    )


class Closed(Pendulum):
    """Gives a function that holds its parameters where JAX finds none of them."""

    def policy_network(self, observations, num_outputs, key):
        weights = jax.random.normal(key, (observations.shape[-1], num_outputs + 1))
        return lambda x, key: ((x @ weights)[:, :-1], (x @ weights)[:, -1])


class ClosedWalk(Walk):
    policy_network = Closed.policy_network


class NoWalk(Walk):
    def policy_network(self, observations, num_outputs, key):
        return None


def test_a_network_without_parameters_that_jax_finds_is_refused():
    line = (
        "policy_network: {} was returned, in which JAX finds no floating-point array to train; return an "
        "equinox.Module that holds its parameters"
    )
    assert error_of(Closed(PPO, runner_of()).train) == line.format("function")
    assert error_of(ClosedWalk(runner_of()).train) == line.format("function")


class Jittery(eqx.Module):
    """Draws from a generator of the host where it has a key."""

    layer: eqx.nn.Linear

    def __call__(self, observations, key=None):
        out = jax.vmap(self.layer)(observations if key is None else observations + np.random.rand())
        return out[:, :-1], out[:, -1]


class JitteryPendulum(Pendulum):
    def policy_network(self, observations, num_outputs, key):
        return Jittery(eqx.nn.Linear(observations.shape[-1], num_outputs + 1, key=key))


def test_a_network_that_draws_numbers_which_nothing_keys_is_refused():
    said = error_of(JitteryPendulum(PPO, runner_of()).train)
    assert said.startswith(
        "policy_network draws random numbers of Python's random or of numpy.random when it is called"
    )


class DrawnPendulum(Pendulum):
    """Makes a network of numbers that nobody keys."""

    def policy_network(self, observations, num_outputs, key):
        layer = eqx.nn.Linear(observations.shape[-1], num_outputs + 1, key=key)
        return Jittery(eqx.tree_at(lambda x: x.bias, layer, jnp.asarray(np.random.rand(num_outputs + 1), jnp.float32)))


def test_a_network_that_is_made_of_numbers_which_nothing_keys_is_refused(monkeypatch):
    monkeypatch.setattr(Jittery, "__call__", lambda self, x, key=None: (x[:, :1], x[:, 0]))
    said = error_of(DrawnPendulum(PPO, runner_of()).train)
    assert said.startswith("policy_network has other numbers (layer.bias) when it is made again under the same key")


def test_a_hook_that_gives_no_network_leaves_those_of_the_settings():
    (own, _), (plain, _) = NoWalk(runner_of()).train(), Walk(runner_of()).train()
    assert own.params.keys() == plain.params.keys()
    assert all(np.array_equal(own.params[name], x) for name, x in plain.params.items())
