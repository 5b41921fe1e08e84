"""Fingerprints of losses of the user's own: what they tell apart, and what they don't."""

import json

import numpy as np
import pytest

from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.torch_engine.start.own_loss import check_own_loss
from lockstep.torch_engine.state import check_networks
from lockstep.training.own_loss.fingerprint import (
    CLOSE,
    Fingerprint,
    check_loss_on_ranks,
    fingerprint_in,
    loss_fingerprint,
    same_loss,
)
from lockstep.training.own_loss.trial import TRAINED, made_up_samples


def fingerprint_of(loss, **ppo):
    settings = {"env": {"id": "CartPole-v1"}, "ppo": {"loss": f"users_losses:{loss}", **ppo}}
    config = resolve(Config.model_validate(settings), 1)
    return check_own_loss(config, check_networks(config, describe(config.env)))


def facts_of(fingerprint):
    return json.loads(json.dumps({"own_loss": fingerprint.to_json(), "global_step": 512}, allow_nan=False))


def difference(old, new):
    with pytest.raises(ValueError) as caught:
        same_loss("users:loss", new, facts_of(old))
    line = str(caught.value)
    assert line.startswith("ppo.loss: users:loss isn't what step_512 was trained with any more: it ")
    assert line.endswith("; put it back as it was, or start a new run")
    return line


def test_a_loss_is_its_own():
    same_loss("users:loss", fingerprint_of("spo"), facts_of(fingerprint_of("spo")))
    same_loss("users:loss", fingerprint_of("spo"), {"global_step": 512})
    same_loss(None, None, facts_of(fingerprint_of("spo")))


def test_other_losses_have_other_fingerprints():
    same = fingerprint_of("same")
    assert "gives a gradient by actor_output of -0.0237172 where it gave 0, of" in difference(
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
    old = loss_fingerprint(print, losses, gradients)
    same_loss("users:loss", loss_fingerprint(print, losses * (1 - 0.01 * CLOSE), shaken), facts_of(old))
    changed = losses.copy()
    changed[7] += 0.01
    assert f"a loss of {changed[7]:.6g} where it gave {losses[7]:.6g}" in difference(
        old, loss_fingerprint(print, changed, gradients)
    )


def test_a_gradient_that_should_be_0_is_rounding_alone():
    losses, gradients = made_up()
    old = loss_fingerprint(print, losses, gradients | {"actor_output": np.full((29, 4), 4e-8)})
    new = loss_fingerprint(print, losses, gradients | {"actor_output": np.full((29, 4), -3e-8)})
    same_loss("users:loss", new, facts_of(old))
    large = loss_fingerprint(print, losses, gradients | {"actor_output": np.full((29, 4), 4e-6)})
    assert "a gradient by actor_output of" in difference(old, large)


def test_ranks_of_one_function_are_alike_but_for_rounding():
    losses, gradients = made_up()
    own = loss_fingerprint(print, losses, gradients)
    near, far = (loss_fingerprint(print, losses * factor, gradients) for factor in (1 + 1e-6, 1.01))
    check_loss_on_ranks("users:loss", own, lambda value: [value, near.to_json()])
    check_loss_on_ranks(None, None, lambda value: [])
    with pytest.raises(ValueError, match="users:loss is another function on rank 2 than on rank 0: it gives a loss of"):
        check_loss_on_ranks("users:loss", own, lambda value: [value, value, far.to_json()])


def test_what_is_not_finite_is_compared_as_that():
    losses, gradients = made_up()
    infinite = losses.copy()
    infinite[9] = np.inf
    old, new = loss_fingerprint(print, losses, gradients), loss_fingerprint(print, infinite, gradients)
    same_loss("users:loss", new, facts_of(new))
    assert "a loss of nan where it gave" in difference(old, new)


def test_other_fields_are_a_difference():
    losses, gradients = made_up()
    without = {name: x for name, x in gradients.items() if name != "value"}
    old, new = loss_fingerprint(print, losses, gradients), loss_fingerprint(print, losses, without)
    assert "is trained through other fields" in difference(old, new)


def test_its_size_does_not_depend_on_how_many_actions_there_are():
    outputs = 1000
    arrays = made_up_samples(outputs, critic=False, reference=False)
    output = arrays["actor_output"]
    assert output is not None
    found = loss_fingerprint(print, np.ones(len(output)), {"actor_output": output})
    assert {len(numbers) for numbers in found.numbers.values()} == {len(output)}


def test_errors_of_thousands_are_among_the_samples():
    value, return_ = (made_up_samples(2, critic=True, reference=False)[name] for name in ("value", "return_"))
    assert value is not None
    assert return_ is not None
    errors = np.sort(np.abs(value - return_))
    assert errors[-1] > 1000
    assert (errors > 10).sum() >= 6
    losses, gradients = made_up()
    losses[-1] = 1e6
    changed = losses.copy()
    changed[3] += 1e-3
    old, new = loss_fingerprint(print, losses, gradients), loss_fingerprint(print, changed, gradients)
    assert "gives a loss of" in difference(old, new)


def edited(loss):
    scope = {}
    exec(f"def mine(sample):\n    {loss}", scope)
    return scope["mine"]


def test_what_was_edited_and_gives_the_same_is_noted():
    losses, gradients = made_up()

    def noted(old, new):
        before, now = (loss_fingerprint(edited(loss), losses, gradients) for loss in (old, new))
        found = same_loss("users:loss", now, facts_of(before))
        return found is not None and found.note

    plain = "return min(sample, 10.0)"
    assert noted(plain, "return min(sample, 20.0)") == (
        "ppo.loss: users:loss was edited since step_512; what it gives of the made-up samples is the same"
    )
    assert noted(plain, "return max(sample, 10.0)")
    assert noted(plain, f"'A docstring.'\n    # a comment\n    {plain}") is None
    assert noted("return [x for x in sample if x in {1, 2}]", "return [x for x in sample if x in {1, 3}]")
    of_another_python = loss_fingerprint(edited(plain), losses, gradients).to_json() | {"code": "2.7.18 abc"}
    now = loss_fingerprint(edited("return 1"), losses, gradients)
    assert same_loss("users:loss", now, {"own_loss": of_another_python, "global_step": 512}) == now


def test_whether_the_policy_is_trained_is_known():
    found = [fingerprint_of(loss) for loss in ("penalised", "of_values")]
    assert [each is not None and each.trains_the_policy for each in found] == [True, False]


@pytest.mark.parametrize(
    "strange", [None, 3, {}, {"numbers": {"loss": "x"}}, {"numbers": {"loss": [[]]}}, {"numbers": {}}]
)
def test_what_is_no_fingerprint_is_none(strange):
    assert fingerprint_in({"own_loss": strange}) is None
    assert same_loss("users:loss", Fingerprint({"loss": [1.0]}), {"own_loss": strange, "global_step": 1}) is not None
