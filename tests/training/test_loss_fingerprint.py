"""Fingerprints of losses of the user's own: what they tell apart, and what they don't."""

import json

import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.torch_engine.check_loss import check_own_loss
from lockstep.torch_engine.state import check_networks
from lockstep.training.own_loss.fingerprint import CLOSE, check_same_loss, loss_fingerprint
from lockstep.training.own_loss.trial import TRAINED, made_up_samples


def fingerprint_of(loss, **ppo):
    settings = {"env": {"id": "CartPole-v1"}, "ppo": {"loss": f"users_losses:{loss}", **ppo}}
    config = resolve(Config.model_validate(settings), 1)
    return check_own_loss(config, check_networks(config, describe(config.env)))


def facts_of(fingerprint):
    return json.loads(json.dumps({"own_loss": fingerprint, "global_step": 512}, allow_nan=False))


def difference(old, new):
    with pytest.raises(ValueError) as caught:
        check_same_loss("users:loss", new, facts_of(old))
    line = str(caught.value)
    assert line.startswith("ppo.loss: users:loss isn't what step_512 was trained with any more: it ")
    assert line.endswith("; put it back as it was, or start a new run")
    return line


def test_a_loss_is_its_own():
    check_same_loss("users:loss", fingerprint_of("spo"), facts_of(fingerprint_of("spo")))
    check_same_loss("users:loss", fingerprint_of("spo"), {"global_step": 512})
    check_same_loss(None, None, facts_of(fingerprint_of("spo")))


def test_other_losses_have_other_fingerprints():
    same = fingerprint_of("same")
    assert "gives a gradient by actor_output of 0.0463782 where it gave 0, of" in difference(
        same, fingerprint_of("penalised")
    )
    assert "gives a gradient by log_prob of" in difference(same, fingerprint_of("wider"))


def test_arguments_that_change_a_thousandth_are_found():
    light, heavy = (fingerprint_of("weighted", loss_kwargs={"weight": weight}) for weight in (1e-3, 1.1e-3))
    assert "gives a gradient by entropy of" in difference(light, heavy)


def made_up(rows=29, **changed):
    draws = np.random.default_rng(0)
    arrays = {name: draws.standard_normal((rows, 4) if name == "actor_output" else rows) for name in TRAINED}
    return draws.standard_normal(rows), arrays | changed


def test_rounding_of_other_versions_and_machines_is_none():
    losses, gradients = made_up()
    shaken = {name: x * (1 + 0.01 * CLOSE) + 0.01 * CLOSE for name, x in gradients.items()}
    old = loss_fingerprint(losses, gradients)
    check_same_loss("users:loss", loss_fingerprint(losses * (1 - 0.01 * CLOSE), shaken), facts_of(old))
    changed = losses.copy()
    changed[7] += 0.01
    assert f"a loss of {changed[7]:.6g} where it gave {losses[7]:.6g}" in difference(
        old, loss_fingerprint(changed, gradients)
    )


def test_what_is_not_finite_is_compared_as_that():
    losses, gradients = made_up()
    infinite = losses.copy()
    infinite[9] = np.inf
    old, new = loss_fingerprint(losses, gradients), loss_fingerprint(infinite, gradients)
    check_same_loss("users:loss", new, facts_of(new))
    assert "a loss of nan where it gave" in difference(old, new)


def test_other_fields_are_a_difference():
    losses, gradients = made_up()
    without = {name: x for name, x in gradients.items() if name != "value"}
    old, new = loss_fingerprint(losses, gradients), loss_fingerprint(losses, without)
    assert "is trained through other fields" in difference(old, new)


def test_its_size_does_not_depend_on_how_many_actions_there_are():
    outputs = 1000
    arrays = made_up_samples(outputs, critic=False, reference=False)
    output = arrays["actor_output"]
    assert output is not None
    found = loss_fingerprint(np.ones(len(output)), {"actor_output": output})
    assert {len(numbers) for numbers in found.values()} == {len(output)}
    assert all(x is not None and x > 0 for x in found["actor_output"])
