"""Networks of the user's own: their parameters by name, what they see, dropout, and what is refused."""

from functools import partial

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from net_cases import CASES, arrays_of, rows_of

from lockstep.config.run import Config
from lockstep.jax_engine.nets import nets
from lockstep.jax_engine.nets.encoders import action_mask
from lockstep.jax_engine.state import make_net
from lockstep.networks.spec import MASKED_LOGIT

pytestmark = pytest.mark.optimized

SMALL, PARTS = CASES["categorical"], CASES["Dict, masked"]


def config_of(name, kwargs=None, **options):
    network = {"custom": f"equinox_nets:{name}", "custom_kwargs": kwargs or {}}
    return Config.model_validate({"network": network, **options})


def made(name, kwargs=None, case=SMALL, **options):
    return make_net(config_of(name, kwargs, **options), case.observation, case.action)


def test_its_arrays_are_the_parameters_by_path():
    net = made("Tiny", {"units": 4})
    assert net.shapes() == {
        "body.0.weight": (4, 5),
        "body.0.bias": (4,),
        "actor.weight": (3, 4),
        "actor.bias": (3,),
        "critic.weight": (1, 4),
        "critic.bias": (1,),
    }
    assert net.custom.initial_parameters().keys() == net.shapes().keys()
    assert "log_std" in made("Tiny", case=CASES["std by state"]).shapes()
    assert set(made("OfParts", case=PARTS).shapes()) == {"colours", "head.weight", "head.bias"}


def test_it_may_change_its_arguments():
    """It is made more than once."""
    options = {"units": 4}
    config = config_of("Taking", {"options": options})
    assert make_net(config, SMALL.observation, SMALL.action).shapes()["actor.weight"] == (3, 4)
    assert config.network.custom_kwargs == {"options": {"units": 4}}


def test_it_is_made_by_the_seed_of_the_run():
    first, again, other = (made("Tiny", seed=seed).custom.initial_parameters() for seed in (0, 0, 1))
    for name, value in first.items():
        assert value.dtype == np.float32
        assert np.array_equal(value, again[name])
        assert not np.array_equal(value, other[name])


def test_networks_that_compute_the_same_are_one_kind_of_pytree():
    first, other, wider = made("Tiny", {"units": 4}), made("Tiny", {"units": 4}, seed=1), made("Tiny", {"units": 5})
    assert first == other
    assert hash(first.custom) == hash(other.custom)
    assert first != wider
    assert first.custom != made("OfParts", case=PARTS).custom
    traced = []

    def output(net, weights, rows):
        traced.append(net)
        return nets.actor(net, weights, rows)

    of = jax.jit(output, static_argnums=0)
    rows = rows_of(SMALL, 6)
    alone, beside = (np.asarray(of(net, arrays_of(net, seed), rows)) for net, seed in ((first, 0), (other, 1)))
    assert len(traced) == 1
    assert not np.array_equal(alone, beside)


def test_it_computes_with_the_parameters_that_it_is_given():
    net = made("Tiny", {"units": 4})
    weights, rows = arrays_of(net), rows_of(SMALL, 6)
    output, values = jax.jit(partial(nets.actor_critic, net))(weights, rows)
    hidden = np.tanh(rows @ weights["body.0.weight"].T + weights["body.0.bias"])
    np.testing.assert_allclose(output, hidden @ weights["actor.weight"].T + weights["actor.bias"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, hidden @ weights["critic.weight"][0] + weights["critic.bias"], atol=1e-5)
    np.testing.assert_array_equal(nets.actor(net, weights, rows), output)
    np.testing.assert_array_equal(nets.critic(net, weights, rows), values)
    gradients = jax.jit(jax.grad(lambda w: nets.actor(net, w, rows).sum()))(weights)
    assert {name for name, g in gradients.items() if np.any(g)} == {n for n in weights if not n.startswith("critic")}


def test_it_sees_the_parts_of_a_dict_and_its_outputs_are_masked():
    net, rows = made("OfParts", case=PARTS), rows_of(PARTS, 6)
    output, values = nets.actor_critic(net, arrays_of(net), rows)
    allowed = np.asarray(action_mask(PARTS.observation, rows))
    np.testing.assert_array_equal(np.asarray(output) != MASKED_LOGIT, allowed)
    assert not allowed.all()
    assert values is not None
    for name in ("arm/0", "arm/1", "eye"):
        leaf = next(x for x in PARTS.observation.leaves if x.name == name)
        changed = rows.copy()
        source = changed if leaf.kind == "image" else PARTS.observation.floats(changed)
        source[:, leaf.start : leaf.start + leaf.size] = 1 if leaf.kind == "one_hot" else 2
        assert not np.allclose(nets.critic(net, arrays_of(net), changed), values, atol=1e-5), name


def test_dropout_is_keyed_and_off_without_a_key():
    net, rows = made("Tiny", {"dropout": 0.5, "units": 32}), rows_of(SMALL, 6)
    weights = net.custom.initial_parameters()
    run = jax.jit(partial(nets.actor_critic, net))
    without = run(weights, rows)[0]
    first, again, other = (run(weights, rows, jax.random.key(seed))[0] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other, atol=1e-3)
    assert not np.allclose(first, without, atol=1e-3)
    np.testing.assert_array_equal(without, run(weights, rows)[0])
    kept = made("Tiny", {"dropout": 0.0, "units": 32})
    np.testing.assert_array_equal(nets.actor(kept, weights, rows), nets.actor(kept, weights, rows, jax.random.key(1)))


def test_in_bfloat16_its_products_are_too_and_its_outputs_are_float32():
    net, rows = made("Tiny", precision="bf16"), rows_of(SMALL, 6)
    weights = arrays_of(net)
    output, values = nets.actor_critic(net, weights, rows)
    full = nets.actor(made("Tiny"), weights, rows)
    assert output.dtype == np.float32
    assert values is not None
    assert values.dtype == np.float32
    np.testing.assert_allclose(output, full, atol=0.05)
    assert np.abs(output - full).max() > 1e-4
    text = str(jax.make_jaxpr(partial(nets.actor, net))(weights, rows))
    assert "bf16" in text
    assert "bf16" not in str(jax.make_jaxpr(partial(nets.actor, made("Tiny")))(weights, rows))


def test_a_head_of_its_own_in_float32_gives_what_bfloat16_cannot_hold():
    rows = rows_of(SMALL, 6)
    for name, rounded in (("Tiny", True), ("WideHead", False)):
        net = made(name, precision="bf16")
        for x in nets.actor_critic(net, arrays_of(net), rows):
            assert x is not None
            assert np.array_equal(x, jnp.asarray(x, jnp.bfloat16).astype(jnp.float32)) is rounded


@pytest.mark.parametrize(
    ("kind", "returned"),
    [("three", "a tuple of 3 ("), ("one", "a tuple of 1 ("), ("dict", "an object of type dict"), ("nothing", "None")],
)
def test_what_is_returned_otherwise_is_refused_by_what_is_needed(kind, returned):
    with pytest.raises(ValueError) as caught:
        made("Returning", {"kind": kind})
    needed = "; a tuple of outputs [n, 3] and values [n] is needed for n observations"
    assert str(caught.value).startswith(f"network.custom: equinox_nets:Returning returned {returned}")
    assert str(caught.value).endswith(needed)


def test_a_list_of_outputs_and_values_is_taken_as_a_tuple():
    rows = rows_of(SMALL, 4)
    of_list, of_tuple = (nets.actor_critic(net, arrays_of(net), rows) for net in map(made, ("Returning", "Tiny")))
    for ours, expected in zip(of_list, of_tuple, strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(expected))


def test_a_call_without_a_key_is_refused_by_what_is_needed():
    with pytest.raises(ValueError) as caught:
        made("Keyless")
    assert str(caught.value) == (
        "network.custom: equinox_nets:Keyless is called with observations and a keyword key, which is None outside of "
        "training; its __call__ takes (observation) (got an unexpected keyword argument 'key'); write def "
        "__call__(self, observation, *, key)"
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        ("Missing", {}, "equinox_nets:Missing can't be imported: "),
        ("Plain", {}, "equinox_nets:Plain is no equinox.Module class"),
        ("Tiny", {"layers": 3}, "unexpected keyword argument 'layers'"),
        (
            "Narrow",
            {},
            "gave outputs of shape (2, 2) and values of shape (2,) for 2 observations; needed are (2, 3) and (2,)",
        ),
        ("Tiny", {"critic": False}, "values of shape None for 2 observations; needed are (2, 3) and (2,)"),
        ("Broken", {}, "equinox_nets:Broken: TypeError: dot_general requires contracting dimensions to have"),
        ("Statistical", {}, "keeps running statistics (norm."),
    ],
)
def test_modules_that_are_refused(name, kwargs, said):
    with pytest.raises(ValueError) as caught:
        made(name, kwargs)
    assert said in str(caught.value)
    assert str(caught.value).startswith("network.custom: ")
    assert "\n" not in str(caught.value)


def test_without_a_critic_a_module_is_for_grpo():
    net = made("Tiny", {"critic": False}, algorithm="grpo", num_envs=16, grpo={"group_size": 4})
    assert not net.critic
    assert set(net.shapes()) == {"body.0.weight", "body.0.bias", "actor.weight", "actor.bias"}
    output, values = nets.actor_critic(net, arrays_of(net), rows_of(SMALL, 2))
    assert output.shape == (2, 3)
    assert values is None
