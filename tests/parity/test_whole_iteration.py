"""One whole iteration is the same in both engines and in the float64 reference: from a checkpoint, to 1e-5."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from same_iteration import COLUMNS, config_of, given_by, jax_iteration, reference_iteration, torch_iteration

from lockstep.envs.describe import describe
from lockstep.runs.checkpoint import to_files
from lockstep.runs.checkpoint_writer import commit
from lockstep.torch_engine.state import check_networks, initial_parameters

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint as training leaves it after three optimiser steps: no parameter and no moment is zero."""
    config = config_of()
    net, rng = check_networks(config, describe(config.env)), np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {"optimizer/step": np.array([3.0], np.float32)}
    for name, initial in initial_parameters(config, net).items():
        first, second, third = (rng.normal(size=initial.shape).astype(np.float32) for _ in range(3))
        arrays |= {f"policy/{name}": initial + 0.2 * first, f"optimizer/exp_avg/{name}": 0.01 * second}
        arrays[f"optimizer/exp_avg_sq/{name}"] = 1e-4 * np.square(third) + np.float32(1e-4)
    return commit(tmp_path_factory.mktemp("run"), 384, to_files(arrays, {}, {"iteration": 3}), None)


SCHEDULED = {"clip_schedule": "linear", "entropy_schedule": "linear", "entropy_coef": 0.1}


@pytest.fixture(scope="module", params=["constant", "scheduled"])
def given(request, checkpoint):
    """An iteration with the coefficients of the config, and one with a fifth of them left."""
    if request.param == "constant":
        return given_by(checkpoint, config_of())
    config = config_of(total_steps=1280, **{"ppo": config_of().ppo.model_dump() | SCHEDULED})
    return replace(given_by(checkpoint, config), global_step=1024)


@pytest.fixture(scope="module")
def iterations(given):
    """The iteration by PyTorch, JAX and the reference, and the two engines' rollouts."""
    theirs, rollout = torch_iteration(given)
    with pytest.MonkeyPatch.context() as patch:
        ours, rollouts = jax_iteration(given, rollout.done, patch)
    by_name = {"PyTorch": theirs, "JAX": ours, "reference": reference_iteration(given, rollout)}
    return by_name, rollout, rollouts


PAIRS = pytest.mark.parametrize("pair", list(combinations(["PyTorch", "JAX", "reference"], 2)), ids=" and ".join)


def close(actual, expected, what):
    assert actual.shape == expected.shape, what
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE, err_msg=what)


def test_the_rollout_is_the_same_and_has_ends_of_both_kinds(given, iterations):
    _, theirs, ours = iterations
    for name in ("observations", "terminated", "truncated", "rewards", "actions"):
        parts = np.asarray(getattr(ours, name))
        whole = np.moveaxis(parts, 0, 1).reshape(parts.shape[1], given.config.envs, *parts.shape[3:])
        close(whole, getattr(theirs, name), name)
    assert theirs.terminated.sum() >= 5
    assert theirs.truncated.sum() >= 5


@PAIRS
def test_values_and_advantages_agree(iterations, pair):
    one, other = (iterations[0][name].batch for name in pair)
    for name in COLUMNS:
        close(one[name], other[name], name)
    assert np.abs(one["advantages"]).max() > 0.5


@PAIRS
def test_losses_and_gradients_of_every_minibatch_agree(given, iterations, pair):
    one, other = (iterations[0][name] for name in pair)
    close(one.terms, other.terms, "loss terms")
    close(one.gradients, other.gradients, "gradients")
    norms = np.linalg.norm(one.gradients, axis=1)
    assert len(norms) == 4
    assert (norms > given.config.ppo.max_grad_norm).all()  # clipping was at work


@PAIRS
def test_parameters_and_moments_agree_after_the_iteration(given, iterations, pair):
    one, other = (iterations[0][name].arrays for name in pair)
    assert one.keys() == other.keys()
    for name in one:
        close(one[name], other[name], name)
    assert one["optimizer/step"] == 7
    moved = max(np.abs(one[name] - given.arrays[name]).max() for name in one if name.startswith("policy/"))
    assert moved > 100 * TOLERANCE


def test_another_order_of_samples_would_show(given, iterations):
    """The negative of the comparisons above: minibatches that hold other samples."""
    by_name, rollout, _ = iterations
    indices = np.roll(given.indices, 1, axis=3)[:, ::-1].copy()
    other, _ = torch_iteration(replace(given, indices=indices))
    assert np.abs(other.gradients - by_name["JAX"].gradients).max() > 100 * TOLERANCE
    apart = [np.abs(other.arrays[name] - by_name["JAX"].arrays[name]).max() for name in other.arrays]
    assert max(apart) > 10 * TOLERANCE
    assert np.abs(rollout.rewards).max() > 0
