"""The JAX engine's normalisers, inside the program, against those on the host that the torch engine uses."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from lockstep.config.run import Config
from lockstep.core.normalizers import (
    ObservationNormalizer,
    RewardNormalizer,
    RunningMoments,
    merge_shards,
    shard_moments,
)
from lockstep.core.spaces import Leaf, ObservationLayout
from lockstep.jax_engine.advantages import counted_moments
from lockstep.jax_engine.shards.normalizers import (
    Moments,
    Scale,
    empty_moments,
    merged,
    normalized,
    scale_of,
    scaled_rewards,
    vectors_of,
)
from lockstep.jax_engine.statistics import NormalizerMoments, merge_normalizers, normalizer_moments

SHARDS, SAMPLES, SIZE = 4, 40, 3
VECTOR = ObservationLayout((Leaf("", "vector", (SIZE,)),))


def samples(seed: int) -> np.ndarray:
    """Samples of every shard ``[shards, n, size]``, far from zero and of unequal spread."""
    random = np.random.default_rng(seed)
    return (random.normal(size=(SHARDS, SAMPLES, SIZE)) * [1e-2, 1.0, 50.0] + [100.0, 0.0, -7.0]).astype(np.float32)


def on_the_host(seeds: list[int]) -> RunningMoments:
    moments = RunningMoments.empty(SIZE)
    for seed in seeds:
        merge_shards(moments, np.stack([shard_moments(shard) for shard in samples(seed)]), SAMPLES)
    return moments


def in_the_program(seeds: list[int]) -> Moments:
    """As the statistics of an iteration merge them: every shard's counted moments ``[shards, size, 3]``."""

    @jax.jit
    def merge(state, x):
        parts = jnp.stack([counted_moments(shard.T, None) for shard in x])
        return merge_normalizers(state, NormalizerMoments(parts, None))

    with jax.enable_x64(True):
        moments = jax.tree.map(jnp.asarray, empty_moments(SIZE))
    state = _State(moments, None)
    for seed in seeds:
        state = merge(state, samples(seed))
    assert state.observation_normalizer is not None
    return state.observation_normalizer


@jax.tree_util.register_pytree_node_class
class _State(SimpleNamespace):
    """As much of a training state as normalisers are of."""

    def __init__(self, observations, returns):
        super().__init__(observation_normalizer=observations, return_normalizer=returns)

    def _replace(self, observation_normalizer, return_normalizer):
        return _State(observation_normalizer, return_normalizer)

    def tree_flatten(self):
        return (self.observation_normalizer, self.return_normalizer), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_moments_of_many_shards_are_those_of_the_host_in_float64():
    ours, theirs = in_the_program([0, 1, 2]), on_the_host([0, 1, 2])
    assert {x.dtype for x in ours} == {np.dtype(np.float64)}
    assert float(ours.count) == theirs.count == 3 * SHARDS * SAMPLES
    np.testing.assert_allclose(ours.mean, theirs.mean, rtol=1e-14)
    np.testing.assert_allclose(ours.m2, theirs.m2, rtol=1e-12)
    everything = np.concatenate([samples(seed).reshape(-1, SIZE) for seed in (0, 1, 2)]).astype(np.float64)
    np.testing.assert_allclose(ours.m2 / ours.count, everything.var(0), rtol=1e-10)
    assert not np.allclose(everything.astype(np.float32).var(0, dtype=np.float32), everything.var(0), rtol=1e-10)


def test_a_count_of_zero_changes_nothing():
    before = in_the_program([0])
    with jax.enable_x64(True):
        after = merged(before, jnp.zeros(()), jnp.full(SIZE, 3.0), jnp.zeros(SIZE))
    jax.tree.map(np.testing.assert_array_equal, after, before)


@pytest.mark.parametrize("seeds", [[], [0, 1]], ids=["of nothing yet", "of two iterations"])
@pytest.mark.parametrize("clip", [10.0, 0.5])
def test_observations_are_normalised_as_on_the_host(seeds, clip):
    rows = samples(7).reshape(-1, SIZE)
    expected = ObservationNormalizer(on_the_host(seeds), clip)(rows.copy())
    ours = jax.jit(lambda moments: normalized(VECTOR, jnp.asarray(rows), scale_of(moments), clip))(
        in_the_program(seeds)
    )
    np.testing.assert_allclose(ours, expected, rtol=1e-6, atol=1e-6)
    assert (np.abs(expected) == clip).any() == (clip == 0.5 or not seeds)
    assert not np.allclose(ours, rows)


def test_images_stay_as_they_are_and_the_numbers_beside_them_do_not():
    layout = ObservationLayout((Leaf("eye", "image", (2, 2, 1)), Leaf("arm", "vector", (SIZE,))))
    numbers = samples(7).reshape(-1, SIZE)
    assert layout.image_bytes == 4
    rows = np.concatenate([numbers.view(np.uint8), np.full((len(numbers), 4), 9, np.uint8)], 1)
    scale = scale_of(in_the_program([0]))
    ours = normalized(layout, jnp.asarray(rows), scale, 10.0)
    np.testing.assert_array_equal(vectors_of(layout, jnp.asarray(rows)), numbers)
    np.testing.assert_array_equal(ours[:, -4:], rows[:, -4:])
    np.testing.assert_array_equal(vectors_of(layout, ours), normalized(VECTOR, jnp.asarray(numbers), scale, 10.0))


def test_discounted_returns_and_rewards_are_those_of_the_host():
    config = Config.model_validate({"normalize": {"returns": True}, "ppo": {"gamma": 0.9}})
    random = np.random.default_rng(0)
    shape, running = (6, 5), random.normal(size=5).astype(np.float32)
    rewards, done = random.normal(size=shape).astype(np.float32), random.random(shape) > 0.7
    rollout = SimpleNamespace(rewards=jnp.asarray(rewards), done=jnp.asarray(done), raw=None)
    (_, found), after = normalizer_moments(config, None, rollout, jnp.asarray(running))  # pyright: ignore[reportArgumentType]
    host = RewardNormalizer(RunningMoments.empty(1), 1.0, 0.9, 5)
    host.running = running.astype(np.float64)
    expected = host.discounted_returns(rewards.astype(np.float64), done)
    np.testing.assert_allclose(after, host.running, rtol=1e-5, atol=1e-6)
    assert found is not None
    mean, m2 = shard_moments(expected.reshape(-1, 1))
    np.testing.assert_allclose(found[0], [30, mean.item(), m2.item()], rtol=1e-5)
    host.moments.merge(30, mean, m2)
    scale = Scale(jnp.zeros(1), jnp.asarray(1.0 / np.sqrt(host.moments.variance + 1e-8), jnp.float32))
    ours = scaled_rewards(jnp.asarray(rewards), scale, 1.0)
    np.testing.assert_allclose(ours, host(rewards.astype(np.float64)), rtol=1e-5, atol=1e-6)
    assert (np.abs(ours) == 1.0).any()
