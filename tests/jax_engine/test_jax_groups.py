"""GRPO's groups inside the program: members have the same luck, and differ by their actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax_engine.small_programs import apart, arrays_of, opened, program_of, small_config, trained

from lockstep.jax_engine.rollout import draw
from lockstep.jax_engine.seeds.runner import SeedsRunner
from lockstep.jax_engine.state import init_state, state_arrays

GROUP, SHARDS, GROUPS = 4, 2, 2
"""Groups of each shard."""
STICKY = {"id": "lockstep/CartPole-v1", "backend": "jax", "sticky_actions": 0.5}
RANDOM = {
    "sticky actions": STICKY,
    "array": {"id": "Snake-v0"},
    "skipped frames": {"id": "Snake-v0", "backend": "jax", "frame_skip": 2, "sticky_actions": 0.5},
    "functional": {"id": "corridors:Noisy", "backend": "jax"},
    "gymnax": {"id": "gymnax/CartPole-v1", "backend": "jax", "sticky_actions": 0.5},
}
"""Environments whose steps draw."""


def grpo(env, **changes):
    """Four groups of four environments, in two shards."""
    groups = {"algorithm": "grpo", "grpo": {"group_size": GROUP}, "num_envs": GROUP * GROUPS * SHARDS}
    return small_config(env=env, num_shards=SHARDS, **{**groups, **changes})


def drawn(config, group):
    """What the first shard's first rollout draws."""
    program = program_of(config, 1)
    assert program.env is not None
    return draw(config, program.net, program.env, program.keys, jnp.int32(0), jnp.int32(0), group)


def different(rows):
    """How many of them there are, arrays ``[..., n]``."""
    return len({row.tobytes() for row in rows.reshape(-1, rows.shape[-1])})


@pytest.mark.parametrize("env", RANDOM.values(), ids=RANDOM)
def test_steps_of_a_group_draw_alike_and_those_of_groups_and_times_do_not(env):
    if env["id"].startswith("gymnax"):
        pytest.importorskip("gymnax")
    config = grpo(env)
    draws, alone = drawn(config, GROUP), drawn(config, 1)
    leaves, others = jax.tree.leaves(draws.steps), jax.tree.leaves(alone.steps)
    assert len(leaves) == len(others) > 0
    for x, other in zip(leaves, others, strict=True):
        assert (x.shape, x.dtype) == (other.shape, other.dtype)
        rows, own = (np.asarray(y).reshape(config.num_steps, GROUPS, GROUP, -1) for y in (x, other))
        assert (rows == rows[:, :, :1]).all()
        assert different(rows) == config.num_steps * GROUPS
        assert different(own) == config.num_steps * GROUPS * GROUP
    others = jax.tree.leaves((alone.noise, alone.resets))  # of what members have for themselves
    for x, other in zip(jax.tree.leaves((draws.noise, draws.resets)), others, strict=True):
        assert np.array_equal(x, other)


def test_a_step_that_draws_nothing_still_does_not():
    assert drawn(grpo("lockstep/CartPole-v1"), GROUP).steps is None


def first_episodes(run):
    """Marks and returns of each environment's first episode, where it ended: ``[2, shards, T, groups, members]``."""
    outputs = run.dispatch(0, 1, 0).outputs
    marks, returns = (np.asarray(x)[0] for x in (outputs.marks, outputs.returns))
    found = np.stack([marks, np.where(marks, returns, 0.0)])
    assert ((marks != 0).sum(1) == 1).all()
    return found.reshape(*found.shape[:-1], GROUPS, GROUP)


@pytest.mark.parametrize("kind", ["sticky actions", "functional"])
def test_members_that_act_alike_fare_alike(kind, monkeypatch):
    """One noise is made for the actions of a group: by noises of their own members differ."""
    config = grpo(RANDOM[kind], num_steps=32)

    def noise_of_groups(config, net, key, iteration, shard):
        key = jax.random.fold_in(key, shard)
        noise = jax.random.gumbel(key, (config.num_steps, GROUPS, net.action.outputs))
        return jnp.repeat(noise, GROUP, axis=1)

    found = first_episodes(opened(config, 1))
    assert (found != found[..., :1]).any()
    monkeypatch.setattr("lockstep.jax_engine.rollout.action_noise", noise_of_groups)
    found = first_episodes(opened(config, 1))
    assert (found == found[..., :1]).all()
    assert (found != found[..., :1, :]).any()


def test_one_program_of_several_seeds_trains_in_the_same_groups():
    configs = [grpo(STICKY, seed=seed) for seed in (3, 4)]
    program = program_of(configs[0], 1)
    states = [init_state(config, program.net, program.layout) for config in configs]
    together = SeedsRunner(program, [3, 4], states, 1)
    together.begin()
    together.fetch(together.dispatch(0, 1, 0))
    for number, config in enumerate(configs):
        alone = opened(config, 1)
        trained(alone)
        state = together.state_of(number)
        assert apart(arrays_of(alone), state_arrays(state, program.layout)) < 1e-6
        for one, other in zip(jax.tree.leaves(state.envs), jax.tree.leaves(alone.state.envs), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)
