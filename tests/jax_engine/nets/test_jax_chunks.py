"""On a CPU passes of the networks take so many rows at a time as its cache holds, with the same results."""

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from net_cases import CASES, arrays_of, rows_of

from lockstep.config.run import Config
from lockstep.jax_engine.batch import policy_outputs
from lockstep.jax_engine.gradients import gradient_parts, minibatch_loss
from lockstep.jax_engine.nets.chunks import CHUNK_IMAGES, equal_chunks, in_chunks, most_images
from lockstep.jax_engine.nets.nets import PolicyNet
from lockstep.jax_engine.rollout import Rollout
from lockstep.training.losses import loss_settings

IMAGES, VECTORS = CASES["residual"], CASES["categorical"]
STEPS, ENVS = 33, 2


def net_of(case: Any, **options: Any) -> PolicyNet:
    return case.net(PolicyNet, hidden_sizes=(8,), **options)


@pytest.mark.parametrize(
    ("case", "platform", "chunks"),
    [
        (VECTORS, "cpu", {128: 1, 256: 1, 300: 1, 512: 2, 1024: 4}),
        (VECTORS, "gpu", {1024: 1}),
        (IMAGES, "cpu", {1: 1, 32: 1, 33: 3, 37: 1, 64: 2, 100: 4, 250: 10, 256: 8, 257: 1}),
        (IMAGES, "tpu", {256: 1}),
    ],
)
def test_a_gradient_is_cut_into_equal_chunks_where_that_comes_out_even(case, platform, chunks):
    net = net_of(case)
    assert {rows: equal_chunks(net, platform, rows) for rows in chunks} == chunks
    config = Config.model_validate({"ppo": {"gradient_accumulation": 2}})
    assert {rows: gradient_parts(net, config, 2 * rows, platform) for rows in chunks} == {
        rows: 2 * n for rows, n in chunks.items()
    }


def test_a_network_of_ones_own_is_not_cut():
    net = net_of(IMAGES)
    object.__setattr__(net, "custom", object())
    assert (equal_chunks(net, "cpu", 256), most_images(net, "cpu")) == (1, None)


@pytest.mark.parametrize(("rows", "sizes"), [(1, {1}), (32, {32}), (33, {17}), (129, {26})])
def test_rows_are_taken_in_chunks_of_one_size(rows, sizes):
    taken = set()

    def function(x: Any) -> Any:
        taken.add(len(x))
        return 2.0 * x, x.sum(1)

    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    doubled, sums = in_chunks(function, jnp.asarray(x), CHUNK_IMAGES)
    np.testing.assert_array_equal(doubled, 2.0 * x)
    np.testing.assert_allclose(sums, x.sum(1), rtol=1e-6, atol=1e-6)
    assert taken == sizes
    taken.clear()
    in_chunks(function, jnp.asarray(x), None)
    assert taken == {rows}


def rollout_of(net: PolicyNet) -> Rollout:
    rows = jnp.asarray(rows_of(IMAGES, (STEPS + 1) * ENVS)).reshape(STEPS + 1, ENVS, -1)
    rng, shape = np.random.default_rng(1), (STEPS, ENVS)
    ends, no = jnp.asarray(rng.random(shape) < 0.1), jnp.zeros(shape, jnp.bool_)
    zeros = jnp.zeros(shape)
    return Rollout(
        observations=rows,
        raw=None,
        actions=jnp.asarray(rng.integers(0, 2, shape), jnp.int32),
        outputs=None,
        rewards=zeros,
        terminated=ends,
        truncated=no,
        final=rows[:-1],
        recurrent_state=jnp.full((ENVS, net.state_size if net.core else 0), 0.3),
        over=ends,
        returns=zeros,
        lengths=zeros.astype(jnp.int32),
        successes=zeros.astype(jnp.int8),
        terms={},
    )


@pytest.mark.parametrize(
    "options", [{}, {"shared": True}, {"core": "gru", "core_size": 6}], ids=["apart", "shared", "recurrent"]
)
def test_a_rollout_of_images_is_evaluated_in_chunks_as_by_one_pass(options):
    net = net_of(IMAGES, **options)
    weights, rollout = arrays_of(net), rollout_of(net)

    def evaluated(platform: str) -> Any:
        return jax.jit(partial(policy_outputs, net, acted=None, platform=platform))(weights, rollout=rollout)

    for chunked, whole in zip(evaluated("cpu"), evaluated("gpu"), strict=True):
        if whole is not None:
            np.testing.assert_allclose(chunked, whole, rtol=1e-4, atol=1e-5)
            assert np.abs(whole).max() > 1e-2
    spoiled = rollout._replace(observations=rollout.observations.at[STEPS].set(0))
    values = jax.jit(partial(policy_outputs, net, acted=None, platform="cpu"))(weights, rollout=spoiled).values
    assert not np.allclose(values[STEPS], evaluated("cpu").values[STEPS], atol=1e-3)


def test_gradients_of_sequences_of_images_are_the_same_in_chunks():
    net = net_of(IMAGES, core="gru", core_size=6)
    weights, rollout, rng = arrays_of(net), rollout_of(net), np.random.default_rng(2)
    drawn = {name: jnp.asarray(rng.normal(size=(ENVS, STEPS)), jnp.float32) for name in ("advantages", "returns")}
    columns = {
        "observations": jnp.moveaxis(rollout.observations[:-1], 0, 1),
        "actions": rollout.actions.T,
        "log_probs": jnp.full((ENVS, STEPS), -0.7),
        "values": jnp.zeros((ENVS, STEPS)),
        "recurrent_state": rollout.recurrent_state,
        "resets": rollout.terminated.T.astype(jnp.float32),
        **drawn,
    }
    settings = loss_settings(Config.model_validate({"algorithm": "ppo"}), jnp.float32(STEPS * ENVS))

    def gradient(together: int | None) -> Any:
        run = jax.grad(lambda w: minibatch_loss(net, w, columns, settings, None, together)[0])
        return jax.jit(run)(weights)

    chunked, whole = gradient(CHUNK_IMAGES), gradient(None)
    for name, right in whole.items():
        np.testing.assert_allclose(chunked[name], right, rtol=1e-3, atol=1e-5, err_msg=name)
    assert max(float(np.abs(x).max()) for x in whole.values()) > 1e-2
