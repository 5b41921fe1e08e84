"""A policy in a caller's own process: settings of PyTorch's and JAX's are the caller's, and so are tensors and runs."""

import copy
import os
import pickle
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest
import torch
from command_line import CARTPOLE
from torch import nn

import lockstep
from lockstep.torch_engine.policy import as_in_training

ENGINES = ("torch", "jax")
SETTINGS = {
    "plain": (),
    "recurrent": ("--network.recurrent", "lstm", "--network.recurrent-size", 8, "--network.sequence-length", 8),
}
COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda policy: pickle.loads(pickle.dumps(policy))}
CALLERS_OF_JAX = {
    "x64": lambda: jax.enable_x64(True),
    "no jit": lambda: jax.disable_jit(True),
    "rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "dtype promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "transfers": lambda: jax.transfer_guard("disallow"),
}
ONE = np.array([0.1, -0.2, 0.03, 0.4], np.float32)


@pytest.fixture(params=SETTINGS)
def run(request, trained):
    return lockstep.load_run(trained(*CARTPOLE, *SETTINGS[request.param]).path)


@pytest.fixture
def callers():
    """A caller's own settings of PyTorch's, which are put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield lambda: (torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device())
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.set_num_threads(threads)


def said(policy):
    """All that a policy says of an observation, from the beginning of an episode on."""
    policy.reset(3)
    return policy(ONE), policy.value(ONE), policy.log_prob(ONE, 1), policy(ONE, deterministic=False)


def test_settings_of_the_callers_decide_nothing_and_stay(run, request):
    expected = said(run.load_policy(engine="torch"))
    now = request.getfixturevalue("callers")
    before = now()
    policy = run.load_policy(engine="torch")
    assert said(policy) == expected
    assert policy.to_torch().action_first.device.type == "cpu"
    assert now() == before


@pytest.mark.parametrize("setting", CALLERS_OF_JAX)
def test_settings_of_jax_decide_nothing_either(run, setting):
    """Under some of them a policy ended with one of JAX's own errors, under others it had other bits."""
    expected = said(run.load_policy(engine="jax"))
    with CALLERS_OF_JAX[setting]():
        assert said(run.load_policy(engine="jax")) == expected
        assert jax.dtypes.canonicalize_dtype(float) == ("float64" if setting == "x64" else "float32")


def test_a_mesh_of_the_callers_does_not_count(trained):
    """A policy computes on one device; JAX refuses that of a program whose mesh has others."""
    code = f"""
import jax
jax.config.update("jax_num_cpu_devices", 2)
import numpy, lockstep, lockstep.jax
policy = lockstep.load_policy({str(trained(*CARTPOLE).path)!r}, engine="jax")
one = numpy.float32([0.1, -0.2, 0.03, 0.4])
value = policy.value(one)
with lockstep.jax.set_mesh(lockstep.jax.make_mesh()) as mesh:
    assert policy.value(one) == value and policy(one) in (0, 1)
    assert lockstep.jax.active_mesh() is mesh and jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_threads_leave_each_other_what_they_compute_with(callers):
    """The one that came second saw what the first had set, and lost it when that one left."""
    before, found = callers(), []
    entered, left = threading.Event(), threading.Event()

    def second():
        with as_in_training(1):
            entered.set()
            left.wait()
            found.append((torch.get_num_threads(), torch.get_default_dtype()))

    with as_in_training(1):
        other = threading.Thread(target=second)
        other.start()
        entered.wait(0.5)  # which it doesn't before this one has left
    left.set()
    other.join()
    assert found == [(1, torch.float32)]
    assert callers() == before


def test_a_policy_with_the_callers_settings_keeps_them_until_it_has_computed():
    """The number of threads is the whole process's: another's came into effect while it computed."""
    threads, entered, order = torch.get_num_threads(), threading.Event(), []

    def second():
        with as_in_training(threads + 1):
            entered.set()
            order.append("second")

    with as_in_training(threads):
        other = threading.Thread(target=second)
        other.start()
        entered.wait(0.5)  # which it doesn't before this one has left
        order.append("first")
    other.join()
    assert order == ["first", "second"]


def test_policies_with_the_callers_settings_compute_at_once():
    threads, both = torch.get_num_threads(), threading.Barrier(2, timeout=60)

    def compute():
        with as_in_training(threads):
            both.wait()

    other = threading.Thread(target=compute)
    other.start()
    compute()
    other.join()


def test_a_policy_may_ask_another_while_it_computes():
    threads = torch.get_num_threads()
    with as_in_training(threads), as_in_training(threads + 1):
        assert torch.get_num_threads() == threads + 1
        with as_in_training(threads):
            assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == threads


class Branching(nn.Module):
    """Makes a tensor of its own in each pass."""

    def __init__(self, observation, outputs):
        super().__init__()
        self.actor, self.critic = nn.Linear(observation.shape[1], outputs), nn.Linear(observation.shape[1], 1)

    def forward(self, observation):
        return self.actor(observation) + torch.ones(1), self.critic(observation)


def test_nor_do_they_of_a_network_of_the_users(tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    run = lockstep.train("CartPole-v1", num_steps=16, total_steps=128, quiet=True, network={"custom": Branching})
    expected = said(run.load_policy())
    request.getfixturevalue("callers")
    assert said(run.load_policy()) == expected


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_policy_can_be_copied(run, engine, how):
    policy = run.load_policy(engine=engine)
    policy(ONE)
    again = COPIES[how](policy)
    assert again.value(ONE) == policy.value(ONE)  # what it remembers is copied too
    assert said(again) == said(policy)


@pytest.mark.parametrize("engine", ENGINES)
def test_of_no_observations_there_are_no_actions(run, engine):
    policy, none = run.load_policy(engine=engine), np.zeros((0, 4), np.float32)
    assert policy(none).shape == policy(none, deterministic=False).shape == policy.predict(none)[0].shape == (0,)
    assert policy.value(none).shape == policy.log_prob(none, np.zeros(0, int)).shape == (0,)
    assert policy.probabilities(none).shape == (0, 2)
    assert policy(none).dtype == policy(ONE[None]).dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tensors_are_observations_whatever_they_are_part_of(run, dtype):
    policy, tensor = run.load_policy(), torch.tensor([[0.5, -0.25, 0.125, 1.0]] * 2, dtype=dtype, requires_grad=True)
    array = np.array([[0.5, -0.25, 0.125, 1.0]] * 2, np.float32)
    assert np.array_equal(policy.value(tensor), policy.value(array))
    assert np.array_equal(policy.log_prob(tensor, torch.tensor([0, 1])), policy.log_prob(array, np.array([0, 1])))
    assert policy.value(tensor[0]) == policy.value(array[0])
    policy.reset()
    action = policy(tensor[0])
    policy.reset()
    assert action == policy(array[0])


def test_a_run_stands_where_a_path_does(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    newest, *_, oldest = run.checkpoints
    assert os.fspath(run) == str(run.path)
    assert lockstep.load_policy(run).global_step == lockstep.load_run(run).policy.global_step == run.policy.global_step
    assert run.load_policy(oldest).global_step < run.load_policy(newest).global_step
    assert run.evaluate(1, checkpoint=oldest)["episodes"] == 1


def test_jax_without_a_cpu_is_said_in_one_line(trained):
    """What it is told to look for isn't here, so that it has nothing at all."""
    path = trained(*CARTPOLE).path
    code = f"import lockstep; lockstep.load_policy({str(path)!r}, engine='jax')"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cuda"}
    )
    assert ended.stderr.splitlines()[-1].startswith("ValueError: engine: jax computes a policy on the CPU, which JAX")
    assert ended.stderr.endswith("set JAX_PLATFORMS=cuda,cpu\n")


@pytest.mark.parametrize("engine", ENGINES)
def test_variables_of_the_callers_stay(trained, engine):
    path = trained(*CARTPOLE).path
    code = f"""
import os, {engine}  # which set some themselves
before = dict(os.environ)
import lockstep
lockstep.load_policy({str(path)!r}, engine={engine!r})([0.0, 0.0, 0.0, 0.0])
assert os.environ == before, set(os.environ.items()) ^ set(before.items())
"""
    variables = {name: value for name, value in os.environ.items() if name != "KMP_DUPLICATE_LIB_OK"}
    subprocess.run([sys.executable, "-c", code], check=True, env=variables)


def test_what_was_not_used_yet_is_listed_too():
    code = "import lockstep; assert not {*lockstep.__all__} - {*dir(lockstep)}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_callers_autocast_decides_nothing(run):
    expected = said(run.load_policy(engine="torch"))
    policy = run.load_policy(engine="torch")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert said(policy) == expected
        assert torch.is_autocast_enabled("cpu")


def test_a_run_is_loaded_and_no_checkpoint_of_it(trained):
    checkpoint = next((trained(*CARTPOLE).path / "checkpoints").glob("step_*"))
    with pytest.raises(ValueError, match=r"^run: .*step_\d+ is a checkpoint, and load_run takes a run"):
        lockstep.load_run(checkpoint)
    assert lockstep.load_policy(checkpoint).global_step == int(checkpoint.name.removeprefix("step_"))
