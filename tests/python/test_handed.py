"""Environments and networks that are handed over as objects, and given again by whatever name finds them now."""

import copy
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import handed_envs
import pytest
import users_losses
from frameworks import installed
from scripts_classes import of_a_script

import lockstep
from lockstep.commands.next_steps import next_steps
from lockstep.config.run import Config
from lockstep.core.user_code.handed import _read, handed_object
from lockstep.envs.tensor import named_object
from lockstep.python.handed import Handed, handed, handed_again, with_objects
from lockstep.python.pickled import pickled
from lockstep.python.run import Run

SMALL = {"num_steps": 16, "total_steps": 256, "quiet": True}
MODULES = {"torch": "users_nets", "jax": "equinox_nets"}
ENGINES = [
    pytest.param(
        name,
        marks=[
            pytest.mark.skipif(not installed(name), reason=f"needs {name}"),
            *([pytest.mark.long] if name == "jax" else []),
        ],
    )
    for name in MODULES
]


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def stored(runs: Path, **settings: Any) -> Path:
    """A run's directory with a config, as it is before its first iteration."""
    path = runs / "stored"
    path.mkdir(parents=True)
    (path / "config.json").write_text(Config.model_validate(settings).model_dump_json())
    return path


def test_a_class_may_be_given_again_by_another_name(runs):
    """A script's class is recorded without a module, and another script imports it."""
    group = lockstep.train(of_a_script("handed_envs", "Counting"), seeds=[3], name="group", **SMALL)
    assert group.config.env.id == "python:Counting"
    again = lockstep.load_run("group", env=handed_envs.Counting)
    run = again.seeds[0]
    assert run.evaluate(1)["length_mean"] == 10
    assert run.policy([0.0, 0.0]) in (0, 1)
    longer = run.resume(512, quiet=True)
    assert longer.summary["global_step"] == 512
    table = again.dataframe()
    assert list(table.columns[:3]) == ["seed", "iteration", "global_step"]
    assert (set(table["seed"]), len(table)) == ({3}, len(longer.metrics))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_network_of_a_script_has_the_bits_of_one_with_a_module(engine):
    module = MODULES[engine]
    network = of_a_script(module, "Tiny")
    named = __import__(module).Tiny
    two: dict[str, Any] = {"nproc": 2} if engine == "torch" else {"simulate_devices": 2}
    ended = [
        lockstep.train(
            "CartPole-v1",
            engine=engine,
            network={"custom": each, "custom_kwargs": {"units": 5}},
            name=name,
            **more,
            **SMALL,
        )
        for name, each, more in (("module", named, {}), ("one", network, {}), ("two", network, two))
    ]
    assert [run.config.network.custom for run in ended] == [f"{module}:Tiny", "python:Tiny", "python:Tiny"]
    assert len({run.summary["state_sha256"] for run in ended}) == 1
    again, bare = lockstep.load_run("two", network=named), lockstep.load_run("two")
    observation = [0.1, 0.2, 0.3, 0.4]
    assert again.policy.value(observation) == ended[0].policy.value(observation) == ended[2].policy.value(observation)
    assert again.resume(512, quiet=True).evaluate(1)["episodes"] == 1
    for use in (lambda: bare.policy, lambda: lockstep.load_policy(bare.path)):
        with pytest.raises(
            ValueError, match=r"^python:Tiny was handed to lockstep\.train as .*\(RUN, network=…\), with every .*$"
        ):
            use()


@pytest.mark.parametrize(
    ("settings", "given", "line"),
    [
        ({"env": {"id": "CartPole-v1"}}, {"env": handed_envs.Counting}, "env: handed_envs:Counting was given, but the"),
        ({"env": {"id": "CartPole-v1"}}, {"env": "Acrobot-v1"}, "environment of runs/stored is CartPole-v1, which is"),
        ({"env": {"id": "CartPole-v1"}}, {"env": lambda: None}, "<lambda> was given, but the environment"),
        ({"env": {"id": "python:Maze"}}, {"env": "CartPole-v1"}, "env: 'CartPole-v1' was given, but python:Maze of"),
        ({"env": {"id": "python:Maze"}}, {"env": 7}, "env: 7 was given, but python:Maze of runs/stored was an object"),
        ({}, {"network": handed_envs.Counting}, "the network of runs/stored is none of its own (network.custom)"),
        ({"network": {"custom": "python:Net"}}, {"network": lambda: None}, "<lambda> is no class; give the class"),
        ({}, {"loss": handed_envs.Counting}, "the loss of runs/stored is none of its own (ppo.loss)"),
        (
            {"ppo": {"loss": "python:mine"}},
            {"loss": users_losses.spo},
            "spo was given, but runs/stored was started with mine",
        ),
        (
            {"ppo": {"loss": "python:lambda"}},
            {"loss": "losses:mine"},
            "was an object, and is given again as one: a ",
        ),
        ({"network": {"custom": "nets:Net"}}, {"network": handed_envs.Counting}, "is nets:Net, which is found by"),
    ],
)
def test_what_a_run_was_not_trained_with_is_one_line(runs, settings, given, line):
    stored(runs, **settings)
    with pytest.raises(ValueError, match=re.escape(line)) as caught:
        lockstep.load_run("stored", **given)
    assert "\n" not in str(caught.value)


def test_what_a_run_finds_by_itself_may_be_said(runs):
    path = stored(runs, env={"id": "handed_envs:Counting"}, network={"custom": "users_nets:Tiny"})
    for env in ("handed_envs:Counting", handed_envs.Counting):
        assert lockstep.load_run("stored", env=env, network="users_nets:Tiny").path == path
        assert handed_again("env.id", env, "handed_envs:Counting", path) is None


def test_what_is_given_again_trusts_nothing_else(runs):
    path = stored(runs, env={"id": "python:Counting"}, network={"custom": "nobodys_nets:Net"})
    with pytest.raises(ValueError, match=r"names nobodys_nets:Net, which would be imported from nowhere"):
        lockstep.load_run(path, env=handed_envs.Counting).load_policy()


def test_a_network_is_given_as_a_class():
    asked: dict[str, Any] = {"network": {"custom": handed_envs.Counting}}
    (given,) = with_objects(asked, ())
    assert (asked["network"]["custom"], given.id, given.pickled) == (*["handed_envs:Counting"] * 2, None)
    assert with_objects({"network": {"custom": "module:Class"}}, ()) == ()
    with pytest.raises(ValueError, match=r"^network\.custom: Counting is no class; give the class, and its arguments"):
        with_objects({"network": {"custom": handed_envs.Counting()}}, ())


def test_a_loss_of_a_script_has_the_bits_of_one_with_a_module(tmp_path, monkeypatch):
    loss = of_a_script("users_losses", "penalised")
    named, two = (
        lockstep.train("CartPole-v1", ppo={"loss": each, "clip_range": 0.1}, name=name, nproc=nproc, **SMALL)
        for name, each, nproc in (("module", users_losses.penalised, 1), ("two", loss, 2))
    )
    assert [run.config.ppo.loss for run in (named, two)] == ["users_losses:penalised", "python:penalised"]
    assert named.summary["state_sha256"] == two.summary["state_sha256"]
    bare = lockstep.load_run("two")
    assert bare.policy([0.0] * 4) in (0, 1)  # which needs no loss
    with pytest.raises(
        ValueError, match=r"^python:penalised was handed to lockstep\.train as .*\(RUN, loss=…\), with every .*$"
    ):
        bare.resume(512, quiet=True)
    again = lockstep.load_run("two", loss=users_losses.penalised).resume(512, quiet=True)
    assert again.summary["state_sha256"] == named.resume(512, quiet=True).summary["state_sha256"]
    another = of_a_script("users_losses", "same")
    another.__qualname__ = "penalised"
    with pytest.raises(
        ValueError, match=r"^ppo\.loss: python:penalised isn't what step_512 was trained with any more: "
    ):
        lockstep.load_run("two", loss=another).resume(1024, quiet=True)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "another account"))
    assert lockstep.load_policy("module")([0.0] * 4) in (0, 1)
    with pytest.raises(
        ValueError, match=r"names users_losses:penalised, which would be imported from .* give trust=True"
    ):
        lockstep.load_run("module").resume(1024, quiet=True)
    with pytest.raises(ValueError, match=r"^ppo\.loss: 3 can't be called; give a function"):
        lockstep.train("CartPole-v1", ppo={"loss": 3})


FIELDS = """
import dataclasses, equinox as eqx, jax, jax.numpy as jnp

class Base(eqx.Module):
    weight: jax.Array = eqx.field(converter=jnp.asarray)
    sizes: list = dataclasses.field(default_factory=list)
    name: str = eqx.field(static=True, default="base")

class Derived(Base):
    layer: eqx.nn.Linear
    def __init__(self, key):
        super().__init__([1.0, 2.0], name="derived")
        self.layer = eqx.nn.Linear(2, 2, key=key)
    def same(self):
        return type(self) is Derived
"""
SAYS = """
import jax
made = derived(jax.random.key(0))
sums = jax.tree.map(lambda x: x.sum(), made)
print(base([3.0]), made, made.same(), jax.tree.structure(made), jax.tree.leaves(sums))
"""


@pytest.mark.skipif(not installed("equinox"), reason="needs equinox")
def test_a_module_of_equinox_keeps_its_fields(capsys):
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(FIELDS, names)
    base, derived = names["Base"], names["Derived"]
    exec(SAYS, {"base": base, "derived": derived})
    read = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            f"import pickle, sys\nbase, derived = pickle.load(sys.stdin.buffer)\n{SAYS}",
        ],
        input=pickled((base, derived)),
        capture_output=True,
        check=False,
    )
    assert read.returncode == 0, read.stderr.decode()
    said = capsys.readouterr().out
    assert "name='derived'" in said
    assert read.stdout.decode() == said


def test_what_others_may_write_is_not_unpickled(tmp_path, monkeypatch):
    file = tmp_path / "environment.pickle"
    tmp_path.chmod(0o700)
    file.write_bytes(handed("env.id", of_a_script("handed_envs", "Counting")).pickled or b"")
    file.chmod(0o600)
    monkeypatch.setenv("LOCKSTEP_ENVIRONMENT", str(file))
    assert handed_object("env.id", "python:Local")(3).length == 3
    file.chmod(0o666)
    _read.cache_clear()
    with pytest.raises(ValueError, match="isn't this user's alone"):
        handed_object("env.id", "python:Local")
    file.chmod(0o600)
    file.write_bytes(pickle.dumps(pickle.Pickler)[:-1])
    with pytest.raises(ValueError, match=r"^env\.id: python:Local can't be loaded in another process: .*Error: "):
        handed_object("env.id", "python:Local")
    file.unlink()
    with pytest.raises(ValueError, match=r"environment\.pickle, which held it, is gone .*load_run\(RUN, env=…\)"):
        handed_object("env.id", "python:Local")


def test_what_an_earlier_version_pickled_is_read():
    old = Handed.__new__(Handed)
    state = {"key": "env.id", "id": "handed_envs:Counting", "given": handed_envs.Counting, "pickled": None}
    old.__setstate__(state)
    assert (old.key, old.id, old.given, old.pickled) == ("env.id", state["id"], handed_envs.Counting, None)


def test_a_run_is_pickled_with_objects_that_no_module_has(runs):
    """As processes of a pool return it; the objects are loaded again only if they are asked for."""
    network = of_a_script("users_nets", "Tiny")
    run = lockstep.train(lambda: handed_envs.Counting(4), name="a", network={"custom": network}, **SMALL)
    value = run.policy.value([0.5, 1.0])
    again = pickle.loads(pickle.dumps(run))
    assert (again.path, again.status, again.metrics) == (run.path, "finished", run.metrics)
    assert again.policy.value([0.5, 1.0]) == value
    assert again.resume(512, quiet=True).evaluate(1)["length_mean"] == 4
    assert copy.deepcopy(run).network is network
    code = "import pickle, sys\nrun = pickle.load(sys.stdin.buffer)\nprint(len(run.metrics), run.final_return)"
    content = pickle.dumps(run)
    elsewhere = subprocess.run([sys.executable, "-c", code], input=content, capture_output=True, check=False)
    assert elsewhere.stdout.decode().split() == ["4", str(run.final_return)], elsewhere.stderr.decode()


def test_an_object_that_cannot_be_loaded_again_is_one_line(runs):
    run = Run(stored(runs), [Handed("network.custom", "python:Net", int, b"no pickle")])
    again = pickle.loads(pickle.dumps(run))
    assert again.config.env.id == run.config.env.id
    with pytest.raises(ValueError, match=r"^network\.custom: python:Net can't be loaded in this process: \w+Error: "):
        _ = again.network


def test_a_run_is_resumed_with_its_environments_class_given_again(runs):
    run = lockstep.train(of_a_script("handed_envs", "Counting"), name="a", **SMALL)
    assert run.config.env.id == "python:Counting"
    longer = lockstep.load_run("a").resume(512, env=handed_envs.Counting, quiet=True)
    assert (longer.summary["global_step"], longer.evaluate(1)["length_mean"]) == (512, 10)
    with pytest.raises(ValueError, match=r"^env: .*<lambda> was given, but .* is CartPole-v1, .*; leave env= out$"):
        Run(stored(runs, env={"id": "CartPole-v1"})).resume(env=lambda: None)
    with pytest.raises(ValueError, match=r"^env: Counting is one environment, and a run makes several"):
        run.resume(env=handed_envs.Counting())


def test_no_command_is_named_that_would_not_find_an_object(runs):
    path = stored(runs, env={"id": "python:lambda"}, network={"custom": "python:Net"})
    config = lockstep.load_run("stored").config
    summary = {
        "final_return": None,
        "global_step": 8,
        "wall_time": 1.0,
        "status": "finished",
        "params_sha256": "0" * 64,
    }
    said = next_steps(path, summary, config)
    assert said.endswith(f"lockstep.load_run({str(path)!r}, env=…, network=Net) has resume(), evaluate(), policy")
    assert "lockstep eval" not in said
    assert "lockstep eval" in next_steps(path, summary, Config())


def test_an_object_is_never_imported_by_its_name():
    with pytest.raises(ValueError, match=r"^python:simulator was handed to lockstep\.train"):
        named_object("python:simulator")


def test_a_dataframe_names_its_extra(runs, monkeypatch):
    stored(runs)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install 'lockstep-rl\[pandas\]'; Run\.metrics doesn't"):
        lockstep.load_run("stored").dataframe()
