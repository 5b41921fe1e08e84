"""A run's policy, loaded in the engine that didn't train it."""

import sys

import gymnasium
import numpy as np
import pytest
from command_line import CARTPOLE, SMALL, copy_of

from lockstep import load_policy

PENDULUM = ("Pendulum-v1", *SMALL, "--normalize.observations", "--stop-at-step", 256)
LSTM = (*CARTPOLE, "--network.recurrent", "lstm", "--network.recurrent-size", 8, "--network.sequence-length", 8)
DOORS = ("small_worlds:Doors-v0", *SMALL, "--env.action-mask", "info", "--stop-at-step", 256)
LANTERN = ("small_worlds:Lantern-v0", *SMALL, "--normalize.observations", "--stop-at-step", 256)


@pytest.mark.parametrize("words", [PENDULUM, LSTM, DOORS, LANTERN], ids=["Pendulum", "LSTM", "masked", "Dict"])
def test_actions_of_a_torch_run_are_the_same_in_jax(trained, words):
    run = trained(*words)
    policies = [load_policy(run.path, engine=engine) for engine in ("torch", "jax", None)]
    env, actions = gymnasium.make(words[0]), []
    observation, info = env.reset(seed=1)
    for step in range(8):
        mask = np.concatenate(info["action_mask"]) if "action_mask" in info else None
        theirs, ours, own = (policy(observation, deterministic=step < 4, action_mask=mask) for policy in policies)
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)
        np.testing.assert_array_equal(own, theirs)
        assert type(ours) is type(theirs)
        actions.append(np.asarray(ours).tolist())
        observation, _, _, _, info = env.step(theirs)
    env.close()
    assert any(action != actions[0] for action in actions)


def test_an_engine_that_is_none(trained):
    run = trained(*CARTPOLE)
    with pytest.raises(ValueError, match=r"^engine: 'tensorflow' is none of torch, jax$"):
        load_policy(run.path, engine="tensorflow")


def test_an_engine_that_is_not_installed(trained, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ValueError, match=r"^engine: jax needs jax, which isn't installed: pip install 'lockstep-rl"):
        load_policy(trained(*CARTPOLE).path, engine="jax")


def test_a_custom_network_stays_in_its_engine(trained, tmp_path):
    copied = copy_of(trained(*CARTPOLE), tmp_path / "run")
    for file in (copied / "config.json", *copied.glob("checkpoints/*/manifest.json")):
        file.write_text(file.read_text().replace('"custom": null', '"custom": "users_nets:Tiny"'))
    with pytest.raises(ValueError, match=r"^engine: users_nets:Tiny is a network of the torch engine; jax can't comp"):
        load_policy(copied, engine="jax", trust=True)
