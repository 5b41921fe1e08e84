"""Recurrent policies: the cells against PyTorch's, and rollouts against going through them step by step."""

import numpy as np
import pytest
import torch
from small_runs import described, final_of, plan_of, seeded, small_config, small_state
from test_batch import made_rollout

from lockstep import reference
from lockstep.networks.spec import core_shapes
from lockstep.torch_engine.batch import bootstrap_values, make_batch, policy_outputs
from lockstep.torch_engine.minibatches import epoch_minibatches, minibatch_indices, minibatch_statistics
from lockstep.torch_engine.nets import nets, recurrent
from lockstep.torch_engine.nets.shards import from_shards, to_shards
from lockstep.training.losses import TERMS, loss_settings

CORES = pytest.mark.parametrize("core", ["lstm", "gru"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])
BY_WHOM = pytest.mark.parametrize("activation", ["tanh", "silu"], ids=["by hand", "by autograd"])
ENDS = {(1, 0): "truncated", (2, 1): "terminated", (3, 2): "truncated", (5, 3): "truncated", (7, 4): "truncated"}
ENDS |= {(7, 5): "terminated", (0, 6): "truncated"}


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=seeded(seed))


@CORES
def test_a_core_is_pytorchs(core):
    inputs, size, steps, n = 3, 4, 5, 2
    theirs = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU}[core](inputs, size)
    mine = {
        f"a.core.{name}": p for name, p in zip(("input.weight", "hidden.weight"), theirs.parameters(), strict=False)
    }
    mine["a.core.input.bias"] = theirs.bias_ih_l0
    if core == "gru":
        mine["a.core.hidden.bias"] = theirs.bias_hh_l0
    else:
        torch.nn.init.zeros_(theirs.bias_hh_l0)
    assert {name: tuple(p.shape) for name, p in mine.items()} == core_shapes(core, "a", inputs, size)
    x, state = drawn(steps, n, inputs), [drawn(1, n, size, seed=s) for s in (1, 2)]
    expected, last = theirs(x, tuple(state) if core == "lstm" else state[0])
    carry = torch.cat(state if core == "lstm" else state[:1], -1)
    parameters = nets.expand(mine, 1)
    hidden, carries = recurrent.unroll(core, parameters, "a", x.unsqueeze(0), carry, torch.zeros(1, steps, n))
    torch.testing.assert_close(hidden[0], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(
        carries[0, -1], torch.cat(last if core == "lstm" else [last], -1)[0], atol=1e-6, rtol=1e-5
    )
    resets = torch.zeros(1, steps, n)
    resets[0, 2, 1] = 1.0
    again, _ = recurrent.unroll(core, parameters, "a", x.unsqueeze(0), carry, resets)
    torch.testing.assert_close(again[0, 2:, 1], theirs(x[2:, 1:2])[0][:, 0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(again[0, :, 0], expected[:, 0], atol=1e-6, rtol=1e-5)
    assert (again[0, 2:, 1] - expected[2:, 1]).abs().max() > 1e-3


def made(core, shared, activation="tanh"):
    network = {"recurrent": core, "recurrent_size": 6, "sequence_length": 4, "shared": shared, "activation": activation}
    config = small_config(num_steps=8, num_shards=4, network=network, ppo={"num_minibatches": 2, "gae_lambda": 0.8})
    plan = plan_of(config)
    state = small_state(config, described(), plan)
    assert isinstance(state.recurrent_state, np.ndarray)
    state.recurrent_state[:] = drawn(*state.recurrent_state.shape, seed=3).numpy()
    rollout = made_rollout(config, plan, ENDS)
    return config, plan, state, rollout


@torch.no_grad()
def one_by_one(state, rollout):
    """Each environment alone and step by step: values ``[T+1, E]``, of final observations, and what is carried."""
    net, weights = state.net, state.parameters.expanded(1)
    (steps, envs), given = rollout.rewards.shape, final_of(rollout)
    values, finals, carries = np.zeros((steps + 1, envs)), {}, np.zeros((steps + 1, *state.recurrent_state.shape))

    def seen(observation, carry):
        row = torch.from_numpy(np.array(observation)).view(1, 1, 1, -1)
        _, value, carried = nets.unroll(net, weights, row, torch.from_numpy(carry).view(1, 1, -1), torch.zeros(1, 1, 1))
        assert value is not None
        return value.item(), carried[0, 0, 0].numpy()

    for env in range(envs):
        carry = state.recurrent_state[env].copy()
        for t in range(steps + 1):
            carries[t, env] = carry
            values[t, env], carry = seen(rollout.observations[t, env], carry)
            if t < steps and (t, env) in given:
                finals[t, env] = seen(given[t, env], carry)[0]
            if t < steps and rollout.done[t, env]:
                carry = np.zeros_like(carry)
    return values, finals, carries


@CORES
@SHARED
@BY_WHOM
def test_a_rollout_is_valued_as_if_seen_step_by_step(core, shared, activation):
    config, plan, state, rollout = made(core, shared, activation)
    values, finals, carries = one_by_one(state, rollout)
    assert len(finals) == 5
    batch = make_batch(state, rollout, plan, config, "batched")
    bootstrap_values = values[1:].copy()
    for where, value in finals.items():
        bootstrap_values[where] = value
    expected = reference.gae(
        rollout.rewards,
        values[:-1],
        bootstrap_values,
        rollout.terminated,
        rollout.truncated,
        gamma=config.ppo.gamma,
        gae_lambda=config.ppo.gae_lambda,
    )
    shape = (config.shards, config.num_steps // 4, 2, 4)  # shards, sequences of an environment, environments, steps
    advantages = batch.advantages.view(shape).transpose(2, 3).reshape(config.shards, -1)
    np.testing.assert_allclose(from_shards(advantages, config.num_steps), expected[0], atol=1e-4)
    assert np.abs(bootstrap_values - values[1:]).max() > 1e-2
    assert batch.recurrent_state is not None
    assert state.recurrent_state is not None
    into = batch.recurrent_state.view(config.shards, 2, 2, -1).transpose(0, 1).flatten(1, 2)
    begun = np.zeros((2, config.envs, 1))
    begun[1, :, 0] = rollout.done[3]
    np.testing.assert_allclose(into.numpy() * (1 - begun), carries[[0, 4]], atol=1e-5)
    np.testing.assert_allclose(state.recurrent_state, carries[-1], atol=1e-5)
    assert not state.recurrent_state[[4, 5]].any()
    assert state.recurrent_state[[0, 1, 2, 3, 6, 7]].any(1).all()


@CORES
@BY_WHOM
def test_what_a_simulator_tells_nothing_of_has_the_value_of_the_step_itself(core, activation):
    """The observation before the step isn't given to the core twice; what is told of is valued as ever."""
    config, plan, state, rollout = made(core, False, activation)
    rollout.final_missing = final_missing = rollout.truncated & (np.arange(config.num_steps) == 5)[:, None]
    assert 0 < final_missing.sum() < len(rollout.final)
    seen_before = final_missing[rollout.truncated]
    rollout.final[seen_before] = rollout.observations[:-1][final_missing]
    values, finals, _ = one_by_one(state, rollout)
    expected = values[1:].copy()
    for where in final_of(rollout):
        expected[where] = values[where] if final_missing[where] else finals[where]
    found = bootstrap_values(state, rollout, outputs_of(state, rollout, plan), plan)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert all(abs(finals[where] - values[where]) > 1e-4 for where in zip(*np.nonzero(final_missing), strict=True))


@torch.no_grad()
def test_without_memory_that_is_valued_in_a_pass_of_its_own_as_ever():
    config = small_config(num_steps=8)
    plan = plan_of(config)
    state, rollout = small_state(config, described(), plan), made_rollout(config, plan, ENDS)
    outputs = outputs_of(state, rollout, plan)
    before = bootstrap_values(state, rollout, outputs, plan)
    rollout.final_missing = rollout.truncated
    assert torch.equal(bootstrap_values(state, rollout, outputs, plan), before)


def outputs_of(state, rollout, plan):
    """What the policy says of a rollout, as a batch has it."""
    observations, actions = rollout.tensors(torch.device("cpu"))
    observations, actions = (to_shards(x, plan.local_num_shards).contiguous() for x in (observations, actions))
    begun = np.concatenate([np.zeros_like(rollout.resets[:1]), rollout.resets])
    begins = to_shards(torch.from_numpy(begun).float(), plan.local_num_shards)
    steps = len(rollout.rewards)
    with torch.no_grad():
        return policy_outputs(state.policy, "batched", observations, actions, begins, state.recurrent_state, steps)


@CORES
@SHARED
@BY_WHOM
def test_a_policy_that_has_not_changed_gives_its_sequences_the_probabilities_that_they_had(core, shared, activation):
    config, plan, state, rollout = made(core, shared, activation)
    batch = make_batch(state, rollout, plan, config, "batched")
    indices = minibatch_indices(config, plan, 0)
    local = torch.ones((plan.local_num_shards, *indices.shape[:2], 3), dtype=torch.float64)
    minibatches = epoch_minibatches(state, batch, indices, minibatch_statistics(config, local, local), 0, config, plan)
    without = {"recurrent_state": 0.0, "resets": 0.0}

    def approx_kl(columns):
        terms = state.policy.gradients(columns, loss_settings(config))[:, -len(TERMS) :]
        return float(terms[:, TERMS.index("approx_kl")].abs().max())

    for columns in minibatches:
        assert approx_kl(columns) < 1e-9
        for name, worst in without.items():
            without[name] = max(worst, approx_kl({**columns, name: torch.zeros_like(columns[name])}))
    assert min(without.values()) > 1e-6
