"""The engines' networks, distributions and gradients against each other, on the same arrays."""

from functools import lru_cache
from typing import Any

import jax
import numpy as np
import pytest
import torch
from net_cases import CASES, RECURRENT, arrays_of, noise_of, rows_of

from lockstep.jax_engine import losses as jax_losses
from lockstep.jax_engine.nets import distributions as jax_distributions
from lockstep.jax_engine.nets import nets as jax_nets
from lockstep.torch_engine import losses as torch_losses
from lockstep.torch_engine.nets import distributions as torch_distributions
from lockstep.torch_engine.nets import nets as torch_nets

STEPS, ENVS = 4, 3
ROWS = STEPS * ENVS
SETTINGS = {"clip_range": 0.2, "value_clip_range": 0.3, "entropy_coef": 0.05, "value_coef": 0.7, "count": 20}
with_all = pytest.mark.parametrize("name", CASES)


def columns_of(name: str) -> dict[str, Any]:
    """What a shard gives to its loss, with an episode that begins in the middle."""
    rng, case = np.random.default_rng(4), CASES[name]
    net = case.net(jax_nets.PolicyNet)
    numbers = {key: rng.normal(size=ROWS).astype(np.float32) for key in ("advantages", "returns", "old_values")}
    resets = np.zeros((STEPS, ENVS), np.float32)
    resets[2, 1] = 1.0
    return {
        "observations": rows_of(case, ROWS),
        "noise": noise_of(case.action, ROWS),
        "carry": 0.5 * rng.normal(size=(ENVS, net.state_size)).astype(np.float32),
        "resets": resets,
        "changes": rng.uniform(-0.4, 0.4, ROWS).astype(np.float32),
        "valid": (rng.random(ROWS) < 0.8).astype(np.float32),
        **numbers,
    }


def jax_results(net: Any, weights: Any, x: Any, actions: Any) -> tuple[Any, dict[str, Any]]:
    if net.core:
        rows = x["observations"].reshape(STEPS, ENVS, -1)
        output, values, carries = jax_nets.unroll(net, weights, rows, x["carry"], x["resets"])
        output, values = output.reshape(ROWS, -1), None if values is None else values.reshape(ROWS)
    else:
        (output, values), carries = jax_nets.actor_critic(net, weights, x["observations"]), None
    sampled = jax_distributions.sample(net, weights, output, x["noise"])
    log_prob, entropy = jax_distributions.log_prob_and_entropy(net, weights, output, actions)
    loss, terms = jax_losses.loss_and_terms(
        log_prob,
        entropy,
        values,
        jax.lax.stop_gradient(log_prob) + x["changes"],
        None if values is None else x["old_values"],
        x["advantages"],
        None if values is None else x["returns"],
        jax_losses.LossSettings(**SETTINGS, kl_coef=0.1),
        x["valid"],
        jax.lax.stop_gradient(log_prob) - x["changes"],
    )
    found = {"output": output, "values": values, "carries": carries, "sampled": sampled, "log_prob": log_prob}
    return loss, found | {"mode": jax_distributions.mode(net, output), "entropy": entropy, "terms": terms}


def torch_results(net: Any, weights: Any, x: Any, actions: Any) -> tuple[Any, dict[str, Any]]:
    expanded, x = torch_nets.expand(weights, 1), {key: value[None] for key, value in x.items()}
    if net.core:
        rows = x["observations"].view(1, STEPS, ENVS, -1)
        output, values, carries = torch_nets.unroll(net, expanded, rows, x["carry"], x["resets"])
        output, values = output.view(1, ROWS, -1), None if values is None else values.view(1, ROWS)
    else:
        (output, values), carries = torch_nets.actor_critic(net, expanded, x["observations"]), None
    sampled = torch_distributions.sample(net, expanded, output, x["noise"])
    log_prob, entropy = torch_distributions.log_prob_and_entropy(net, expanded, output, actions[None])
    loss, terms = torch_losses.loss_and_terms(
        log_prob,
        entropy,
        values,
        log_prob.detach() + x["changes"],
        None if values is None else x["old_values"],
        x["advantages"],
        None if values is None else x["returns"],
        torch_losses.LossSettings(**SETTINGS, kl_coef=0.1),
        x["valid"],
        log_prob.detach() - x["changes"],
    )
    found = {"output": output, "values": values, "carries": carries, "sampled": sampled, "log_prob": log_prob}
    found |= {"mode": torch_distributions.mode(net, output), "entropy": entropy, "terms": terms}
    return loss, {key: None if value is None else value[0].detach().numpy() for key, value in found.items()}


def actions_of(name: str) -> np.ndarray:
    """Actions that the mask allows, of every index."""
    case, rng = CASES[name], np.random.default_rng(5)
    if case.action.kind == "continuous":
        return rng.normal(size=(ROWS, 2)).astype(np.float32)
    if case.action.kind == "discrete":
        return np.zeros(ROWS, np.int64) if case.mask else rng.integers(0, 3, ROWS)
    return np.zeros((ROWS, 3), np.int64) if case.mask else rng.integers(0, (3, 1, 4), (ROWS, 3))


@lru_cache
def both(name: str) -> tuple[Any, Any]:
    """Loss, gradients and everything in between, of JAX and of PyTorch."""
    case, x, actions = CASES[name], columns_of(name), actions_of(name)
    actions = actions.astype(np.int32) if case.action.discrete else actions
    net = case.net(jax_nets.PolicyNet)
    arrays = arrays_of(net)
    run = jax.jit(jax.value_and_grad(lambda w: jax_results(net, w, x, actions), has_aux=True))
    (loss, found), gradients = run(arrays)
    other = case.net(torch_nets.PolicyNet)
    weights = {key: torch.from_numpy(value).requires_grad_() for key, value in arrays.items()}
    tensors = {key: torch.from_numpy(value) for key, value in x.items()}
    its_loss, its_found = torch_results(other, weights, tensors, torch.from_numpy(actions_of(name)))
    its_gradients = torch.autograd.grad(its_loss.sum(), list(weights.values()))
    theirs = dict(zip(weights, [g.numpy() for g in its_gradients], strict=True))
    return (float(loss), found, gradients), (its_loss.item(), its_found, theirs)


def close(ours: Any, theirs: np.ndarray, what: str) -> None:
    scale = max(1.0, float(np.abs(np.where(theirs < -1e7, 0.0, theirs)).max())) if theirs.size else 1.0
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-5, atol=2e-6 * scale, err_msg=what)


@with_all
def test_the_engines_name_the_same_arrays_in_the_same_order(name):
    ours, theirs = (CASES[name].net(kind).shapes() for kind in (jax_nets.PolicyNet, torch_nets.PolicyNet))
    assert list(ours.items()) == list(theirs.items())


@with_all
def test_outputs_actions_and_losses_are_the_other_engines(name):
    (loss, ours, _), (its_loss, theirs, _) = both(name)
    assert loss == pytest.approx(its_loss, rel=1e-5, abs=1e-5)
    for key, expected in theirs.items():
        if expected is None:
            assert ours[key] is None
            continue
        assert ours[key].shape == expected.shape
        if key in ("sampled", "mode") and CASES[name].action.discrete:
            assert ours[key].dtype == np.int32
            assert np.asarray(ours[key]).tolist() == expected.tolist()
        else:
            assert ours[key].dtype == np.float32
            close(ours[key], expected, key)


@pytest.mark.parametrize("name", ["no hidden layer", "categorical", "Dict, shared", "simple"])
def test_heads_are_float32_in_both_engines_where_the_rest_is_bfloat16(name):
    """So that without a hidden layer there is nothing that bfloat16 could round."""
    case, rows = CASES[name], columns_of(name)["observations"]
    ours, theirs = (case.net(kind, bf16=True) for kind in (jax_nets.PolicyNet, torch_nets.PolicyNet))
    arrays = arrays_of(ours)
    weights = torch_nets.expand({key: torch.from_numpy(value) for key, value in arrays.items()}, 1)
    with torch.no_grad():
        expected = torch_nets.actor_critic(theirs, weights, torch.from_numpy(rows)[None])
    found = jax.jit(lambda w: jax_nets.actor_critic(ours, w, rows))(arrays)
    full = jax_nets.actor_critic(case.net(jax_nets.PolicyNet), arrays, rows)
    for one, other, exact in zip(found, expected, full, strict=True):
        assert one is not None
        assert other is not None
        assert exact is not None
        scale = np.abs(exact).max()
        np.testing.assert_allclose(one, other[0].numpy(), rtol=0, atol=(0.02 if ours.hidden_sizes else 1e-6) * scale)
        assert (np.abs(one - exact).max() > 1e-4 * scale) == bool(ours.hidden_sizes)
        assert not np.array_equal(one, one.astype(jax.numpy.bfloat16).astype(np.float32))


@with_all
def test_gradients_are_the_other_engines(name):
    (_, _, ours), (_, _, theirs) = both(name)
    assert set(ours) == set(theirs)
    for key, expected in theirs.items():
        close(ours[key], expected, key)
        if key.endswith("weight"):
            assert np.abs(expected).max() > 1e-6, f"{key} has no part in the loss"


def test_what_is_compared_depends_on_every_array():
    """The negative of the comparisons above: other arrays give other outputs and gradients, by more than they allow."""
    name = "LSTM, shared, Dict"
    case, x, actions = CASES[name], columns_of(name), actions_of(name)
    actions = actions.astype(np.int32) if case.action.discrete else actions
    net = case.net(jax_nets.PolicyNet)
    arrays = arrays_of(net)
    run = jax.jit(lambda w: jax_results(net, w, x, actions)[1])
    outputs, values = (np.asarray(both(name)[1][1][key]) for key in ("output", "values"))
    for key in arrays:
        changed = run(arrays | {key: arrays[key] + 0.1})
        moved = max(np.abs(changed["output"] - outputs).max(), np.abs(changed["values"] - values).max())
        assert moved > 1e-4, key


@pytest.mark.parametrize("name", RECURRENT)
def test_nothing_is_carried_into_a_new_episode(name):
    """The negative of the resets in the comparison: without them the outputs from there on are others."""
    case, x = CASES[name], columns_of(name)
    net = case.net(jax_nets.PolicyNet)
    rows = x["observations"].reshape(STEPS, ENVS, -1)
    run = jax.jit(lambda resets: jax_nets.unroll(net, arrays_of(net), rows, x["carry"], resets)[0])
    kept, fresh = run(np.zeros((STEPS, ENVS), np.float32)), both(name)[1][1]["output"].reshape(STEPS, ENVS, -1)
    assert not np.allclose(kept[2:, 1], fresh[2:, 1], atol=1e-4)
    np.testing.assert_allclose(kept[:2], fresh[:2], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(kept[:, 0], fresh[:, 0], rtol=1e-5, atol=1e-5)
