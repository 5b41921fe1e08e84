"""What the networks compile to: nothing but their layers, bfloat16 and remat where asked for; sequences by steps."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from net_cases import CASES, RECURRENT, arrays_of, rows_of

from lockstep.jax_engine.nets import layers, nets
from lockstep.jax_engine.nets.nets import PolicyNet

STEPS, ENVS = 4, 3


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a program, those of inner ones too."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def program(function: Any, *arguments: Any) -> list[Any]:
    return list(equations(jax.make_jaxpr(function)(*arguments).jaxpr))


def outputs_of(net: PolicyNet, weights: Any, rows: Any) -> tuple[Any, Any]:
    """Of either kind of network, recurrent ones over four steps of three environments."""
    if not net.core:
        return nets.actor_critic(net, weights, rows)
    carry = jnp.full((ENVS, net.state_size), 0.3)
    return nets.unroll(net, weights, rows.reshape(STEPS, ENVS, -1), carry, jnp.zeros((STEPS, ENVS)))[:2]


def total(net: PolicyNet, weights: Any, rows: Any) -> Any:
    output, values = outputs_of(net, weights, rows)
    return (output * output).sum() + (0.0 if values is None else (values * values).sum())


# --- Lean -------------------------------------------------------------------------------------------------------------


def test_a_perceptron_is_products_sums_and_activations():
    case = CASES["categorical"]
    net, rows = case.net(PolicyNet, hidden_sizes=(8, 8)), rows_of(case, 6)
    found = [e.primitive.name for e in program(partial(nets.actor_critic, net), arrays_of(net), rows)]
    found = [name for name in found if name != "custom_vjp_call"]  # on a CPU a product has a gradient of its own
    layer = ["dot_general", "broadcast_in_dim", "add"]
    one = [*layer, "tanh", *layer, "tanh", *layer]
    assert found == [*one, *one, "squeeze"]


def test_modules_hold_every_named_array_and_compute_by_themselves():
    for name, case in CASES.items():
        net, rows = case.net(PolicyNet), rows_of(case, 2)
        weights = arrays_of(net)
        built = nets.networks(net, weights)
        held = [id(x) for x in jax.tree.leaves(built)]
        assert sorted(held) == sorted(id(x) for key, x in weights.items() if key != "log_std"), name
        if not net.core and net.observation.mask is None:
            np.testing.assert_array_equal(built.actor(built.bodies[0](rows)), nets.actor(net, weights, rows))


# --- Precision --------------------------------------------------------------------------------------------------------

with_kinds = pytest.mark.parametrize("name", ["Gaussian, three layers", "Dict, shared", "impala", "LSTM", "GRU"])
PRODUCTS = ("dot_general", "conv_general_dilated")


@with_kinds
def test_in_bfloat16_every_product_is_but_those_of_heads_and_what_comes_out_is_float32(name):
    case = CASES[name]
    rows = rows_of(case, STEPS * ENVS)
    full, low = case.net(PolicyNet), case.net(PolicyNet, bf16=True)
    weights = arrays_of(full)
    for net, others in ((full, "float32"), (low, "bfloat16")):
        found = [e for e in program(partial(outputs_of, net), weights, rows) if e.primitive.name in PRODUCTS]
        kinds = [{str(x.aval.dtype) for x in (*e.invars, *e.outvars)} for e in found]
        kinds.remove({"float32"})
        kinds.remove({"float32"})
        assert kinds
        assert all(kind == {others} for kind in kinds)
    exact, ours = (jax.jit(partial(outputs_of, net))(weights, rows) for net in (full, low))
    for expected, found in zip(exact, ours, strict=True):
        assert found.dtype == np.float32
        scale = np.abs(expected).max()
        np.testing.assert_allclose(found, expected, atol=0.05 * scale)
        assert np.abs(found - expected).max() > 1e-4 * scale
    gradients = jax.eval_shape(jax.grad(partial(total, low)), weights, rows)
    assert {str(g.dtype) for g in gradients.values()} == {"float32"}


@pytest.mark.parametrize("name", ["categorical", "Dict, shared", "simple", "LSTM", "GRU"])
def test_heads_in_bfloat16_are_those_of_float32_on_the_same_features(name, monkeypatch):
    """Far from 0 steps between numbers of bfloat16 are large: those of a value near 195 are 1."""
    case, heads = CASES[name], []
    net, rows = case.net(PolicyNet, bf16=True), rows_of(case, STEPS * ENVS)
    weights = arrays_of(net)
    weights["critic.0.bias" if net.shared else "critic.1.bias"][:] = 195.0
    right = layers.product

    def watched(x, weight):
        if weight.shape[0] in (net.outputs, 1):
            heads.append(np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T)
        return right(x, weight)

    monkeypatch.setattr(layers, "product", watched)
    results = outputs_of(net, weights, rows)
    biases = [weights[f"{head}.{0 if net.shared else 1}.bias"] for head in ("actor", "critic")]
    for found, head, bias in zip(results, heads, biases, strict=True):
        found = np.asarray(found).reshape(len(head), -1)
        assert not np.array_equal(found, np.asarray(jnp.asarray(found, jnp.bfloat16), np.float32))
        np.testing.assert_allclose(found, head + bias, rtol=1e-6, atol=1e-5)


def test_an_activation_in_bfloat16_is_one():
    case = CASES["categorical"]
    net = case.net(PolicyNet, bf16=True)
    found = program(partial(nets.actor, net), arrays_of(net), rows_of(case, 2))
    assert [str(e.outvars[0].aval.dtype) for e in found if e.primitive.name == "tanh"] == ["bfloat16"]


def test_what_is_carried_stays_float32_in_bfloat16():
    case = CASES["LSTM"]
    net, rows = case.net(PolicyNet, bf16=True), rows_of(case, ENVS)
    carry = jnp.full((ENVS, net.state_size), 0.3)
    carries = nets.unroll(net, arrays_of(net), rows[None], carry, jnp.zeros((1, ENVS)))[2]
    assert carries.dtype == np.float32


# --- Remat ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Gaussian, three layers", "Dict, shared", "LSTM", "GRU"])
def test_remat_computes_again_and_changes_no_gradient(name):
    case = CASES[name]
    plain, again = case.net(PolicyNet), case.net(PolicyNet, remat=True)
    weights, rows = arrays_of(plain), rows_of(case, STEPS * ENVS)
    names = [{e.primitive.name for e in program(partial(total, net), weights, rows)} for net in (plain, again)]
    assert not any("remat" in name or "checkpoint" in name for name in names[0])
    assert any("remat" in name or "checkpoint" in name for name in names[1])
    expected, ours = (jax.jit(jax.grad(partial(total, net)))(weights, rows) for net in (plain, again))
    for key, gradient in expected.items():
        scale = max(1.0, float(np.abs(gradient).max()))
        np.testing.assert_allclose(ours[key], gradient, rtol=1e-5, atol=1e-5 * scale, err_msg=key)


def test_with_remat_the_backward_pass_stores_less():
    case = CASES["categorical"]
    rows = rows_of(case, 6)

    def stored(net):
        """Numbers that the forward pass leaves for the backward pass, beside what is given to it."""
        _, backward = jax.vjp(lambda w: total(net, w, rows), arrays_of(net))
        return sum(x.size for x in jax.tree.leaves(backward))

    wide = {"hidden_sizes": (64, 64, 64)}
    plain, again = (stored(case.net(PolicyNet, remat=remat, **wide)) for remat in (False, True))
    assert plain - again >= 2 * 3 * 6 * 64


# --- Sequences --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECURRENT)
def test_steps_one_by_one_are_the_sequence_and_the_actor_alone_gives_the_same(name):
    case = CASES[name]
    net = case.net(PolicyNet)
    weights, rows = arrays_of(net), rows_of(case, STEPS * ENVS).reshape(STEPS, ENVS, -1)
    carry = np.random.default_rng(3).normal(size=(ENVS, net.state_size)).astype(np.float32)
    resets = np.zeros((STEPS, ENVS), bool)
    resets[1, 0] = resets[0, 2] = True
    run = jax.jit(partial(nets.unroll, net), static_argnames="actor_only")
    output, values, carries = run(weights, rows, carry, resets)
    assert (values is None) == (not net.critic)
    for t in range(STEPS):
        step = run(weights, rows[t : t + 1], carry, resets[t : t + 1])
        alone = run(weights, rows[t : t + 1], carry, resets[t : t + 1], actor_only=True)
        assert alone[1] is None
        np.testing.assert_allclose(step[0][0], output[t], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(alone[0][0], output[t], rtol=1e-5, atol=1e-6)
        if values is not None:
            np.testing.assert_allclose(step[1][0], values[t], rtol=1e-5, atol=1e-6)
        width = net.state_size // len(net.trunks)
        np.testing.assert_allclose(alone[2][0, :, :width], carries[t, :, :width], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(alone[2][0, :, width:], carry[:, width:])
        carry = np.asarray(step[2][0])
        np.testing.assert_allclose(carry, carries[t], rtol=1e-5, atol=1e-6)
    assert not np.allclose(output[0], output[1], atol=1e-3)
