"""Recurrent policies in NumPy: what PyTorch computes, the gradient autograd's, and each shard as if it were alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_runs import described, plan_of, policy_net, random_actions_of, random_parameters, seeded, small_config
from small_runs import small_state as made_state

from lockstep.core.tree import ranges
from lockstep.torch_engine.losses import loss_and_terms
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.functions import Actor
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.plain.functions import RecurrentFunctions
from lockstep.torch_engine.plain.layers import ACTIVATIONS
from lockstep.torch_engine.plain.recurrent import RecurrentPolicy, derivable_recurrent
from lockstep.torch_engine.state import make_policy
from lockstep.training.losses import TERMS, LossSettings

SETTINGS = LossSettings(clip_range=0.2, value_clip_range=0.3, entropy_coef=0.05, value_coef=0.5, count=40)
SHARDS, SEQUENCES, STEPS, SIZE = 2, 3, 5, 6
CORES = pytest.mark.parametrize("core", ["lstm", "gru"])
SHARED = pytest.mark.parametrize("shared", [True, False], ids=["shared", "separate"])


def recurrent_net(
    core: str, shared: bool, discrete: bool = True, hidden: tuple[int, ...] = (7,), **options
) -> PolicyNet:
    return policy_net(4, 3, discrete, hidden, core=core, core_size=SIZE, shared=shared, **options)


@st.composite
def recurrent_nets(draw):
    return recurrent_net(
        core=draw(st.sampled_from(["lstm", "gru"])),
        shared=draw(st.booleans()),
        discrete=draw(st.booleans()),
        hidden=draw(st.sampled_from([(), (7,), (5, 1)])),
        activation=draw(st.sampled_from(sorted(ACTIVATIONS))),
    )


def in_float64(net: PolicyNet, seed: int) -> dict[str, torch.Tensor]:
    return {name: p.double() for name, p in random_parameters(net, seed).items()}


def by_hand(net: PolicyNet, parameters: dict[str, torch.Tensor]) -> RecurrentPolicy:
    return RecurrentPolicy(net, {name: p.numpy() for name, p in parameters.items()})


def sequences_for(
    net: PolicyNet, parameters: dict[str, torch.Tensor], seed: int, shards: int = SHARDS, masked: bool = False
) -> dict[str, torch.Tensor]:
    """A minibatch of sequences ``[k, n, L, …]`` in which episodes begin, of a policy that has moved since."""
    shape, g = (shards, SEQUENCES, STEPS), seeded(seed)
    dtype = next(iter(parameters.values())).dtype
    actions = random_actions_of(net, shape, seed)
    drawn = torch.randn((4, *shape), generator=g, dtype=torch.float64).to(dtype)
    columns = {
        "observations": torch.randn((*shape, net.observation.width), generator=g, dtype=torch.float64).to(dtype),
        "actions": actions if net.discrete else actions.to(dtype),
        "recurrent_state": torch.randn((shards, SEQUENCES, net.state_size), generator=g, dtype=torch.float64).to(dtype),
        "resets": (torch.rand(shape, generator=g) < 0.3).to(dtype),
    }
    log_prob, _, values = torchs(net, nets.expand(parameters, shards), columns)
    columns |= {"log_probs": log_prob + 0.2 * drawn[0], "values": values + 0.3 * drawn[1]}
    columns |= {"advantages": drawn[2], "returns": drawn[3]}
    if masked:
        columns["valid"] = (torch.rand(shape, generator=g) < 0.7).to(dtype)
    return columns


def torchs(net, weights, columns):
    """Log-probabilities, entropies and values ``[k, n, L]`` by the general networks."""
    x, resets = columns["observations"].transpose(1, 2), columns["resets"].transpose(1, 2)
    output, values, _ = nets.unroll(net, weights, x, columns["recurrent_state"], resets)
    assert values is not None
    both = distributions.log_prob_and_entropy(net, weights, output.transpose(1, 2), columns["actions"])
    return *both, values.transpose(1, 2)


def autograds(net, parameters, settings, columns):
    """Each shard's gradient and loss terms ``[k, P + T]`` by autograd, in the precision of the parameters."""
    shards = len(columns["actions"])
    weights = {name: w.requires_grad_() for name, w in nets.expand(parameters, shards).items()}
    log_prob, entropy, values = (x.flatten(1) for x in torchs(net, weights, columns))
    names = ("log_probs", "values", "advantages", "returns")
    old_log_prob, old_values, advantages, returns = (columns[name].flatten(1) for name in names)
    given = (log_prob, entropy, values, old_log_prob, old_values, advantages, returns, settings)
    valid = columns["valid"].flatten(1) if "valid" in columns else None
    loss, terms = loss_and_terms(*given, valid=valid)
    parts = torch.autograd.grad(loss.sum(), list(weights.values()))
    return torch.cat([*(part.reshape(shards, -1) for part in parts), terms], 1)


def gradients(net, parameters, columns, settings=SETTINGS) -> torch.Tensor:
    return torch.from_numpy(by_hand(net, parameters).gradients(arrays(columns), settings).copy())


def arrays(columns: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: x.numpy() for name, x in columns.items()}


@given(recurrent_nets(), st.booleans(), st.integers(0, 10_000))
def test_the_gradient_and_the_terms_are_autograds(net, masked, seed):
    parameters = in_float64(net, seed)
    columns = sequences_for(net, parameters, seed, masked=masked)
    ours, expected = gradients(net, parameters, columns), autograds(net, parameters, SETTINGS, columns)
    assert ours.shape == (SHARDS, sum(p.numel() for p in parameters.values()) + len(TERMS))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-11)


@CORES
@SHARED
def test_the_gradient_depends_on_all_that_a_sequence_has(core, shared):
    """The negative: a comparison with autograd would notice a column that is ignored."""
    net = recurrent_net(core, shared)
    parameters = in_float64(net, 0)
    columns = sequences_for(net, parameters, 0, masked=True)
    gradient = gradients(net, parameters, columns)
    for name, x in columns.items():
        other = gradients(net, parameters, columns | {name: x.flip(1)})
        assert (other - gradient)[:, : -len(TERMS)].abs().max() > 1e-5, name
    half = net.state_size // 2
    for part in (slice(0, half), slice(half, None)):  # hidden and cell state, or the actor's and the critic's
        state = columns["recurrent_state"].clone()
        state[..., part] = 0.0
        assert (gradients(net, parameters, columns | {"recurrent_state": state}) - gradient).abs().max() > 1e-5


@CORES
@SHARED
def test_no_gradient_crosses_the_beginning_of_an_episode(core, shared):
    net = recurrent_net(core, shared)
    parameters = in_float64(net, 0)
    columns = sequences_for(net, parameters, 0)
    columns["resets"] = torch.zeros_like(columns["resets"])
    columns["resets"][..., 3] = 1.0
    parts = [
        {name: x if x.dim() < 3 else x[:, :, steps] for name, x in columns.items()}
        for steps in (slice(0, 3), slice(3, 5))
    ]
    parts[0]["recurrent_state"] = columns["recurrent_state"]
    parts[1]["recurrent_state"] = torch.zeros_like(columns["recurrent_state"])
    apart = sum(gradients(net, parameters, part) for part in parts)
    torch.testing.assert_close(gradients(net, parameters, columns), apart, rtol=1e-9, atol=1e-12)


@given(recurrent_nets(), st.integers(0, 10_000))
def test_float32_loses_no_more_than_rounding(net, seed):
    parameters = in_float64(net, seed)
    columns = sequences_for(net, parameters, seed)
    single = {name: x.float() if x.is_floating_point() else x for name, x in columns.items()}
    wide = replace(SETTINGS, clip_range=50.0, value_clip_range=None)  # no sample lies where clipping sets in
    ours = gradients(net, {name: p.float() for name, p in parameters.items()}, single, wide)
    expected = gradients(net, parameters, columns, wide)
    assert ours.dtype == torch.float32
    scale = float(expected.abs().max()) + 1.0
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4 * scale)


# --- Forward ----------------------------------------------------------------------------------------------------------


def rollout_for(net: PolicyNet, seed: int, dtype: torch.dtype, shards: int = SHARDS) -> tuple[torch.Tensor, ...]:
    """Observations, actions, the state before and resets, as :meth:`RecurrentPolicy.unroll` takes them."""
    g = seeded(seed)
    actions = random_actions_of(net, (shards, STEPS, SEQUENCES), seed)
    return (
        torch.randn((shards, STEPS + 1, SEQUENCES, net.observation.width), generator=g).to(dtype),
        actions if net.discrete else actions.to(dtype),
        torch.randn((shards, SEQUENCES, net.state_size), generator=g).to(dtype),
        (torch.rand((shards, STEPS + 1, SEQUENCES), generator=g) < 0.3).to(dtype),
    )


@given(recurrent_nets(), st.integers(0, 10_000))
def test_rollouts_steps_and_values_are_pytorchs(net, seed):
    parameters = in_float64(net, seed)
    policy, weights = by_hand(net, parameters), nets.expand(parameters, SHARDS)
    x, actions, state, resets = rollout_for(net, seed, torch.float64)
    output, values, states = nets.unroll(net, weights, x, state, resets)
    assert values is not None
    log_probs = distributions.log_prob_and_entropy(net, weights, output[:, :-1], actions)[0]
    ours = policy.unroll(x.numpy(), actions.numpy(), state.numpy(), resets.numpy())
    for mine, theirs in zip(ours, (log_probs, values, states), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), rtol=1e-11, atol=1e-12)
    first, after = policy.step(policy.stepper(), x[:, 0].numpy(), state.numpy(), resets[:, 0].numpy())
    np.testing.assert_allclose(first, output[:, 0].numpy(), rtol=1e-12, atol=1e-12)
    own = after.shape[-1] // len(net.trunks)
    np.testing.assert_allclose(after[..., :own], states[:, 0, :, :own].numpy(), rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(after[..., own:], state[..., own:].numpy())
    kept = state * (1.0 - resets[:, 0, :, None])
    np.testing.assert_allclose(policy.values(x[:, 0].numpy(), kept.numpy()), values[:, 0].numpy(), rtol=1e-11)


@CORES
@SHARED
def test_an_actor_goes_step_by_step_as_pytorchs_does(core, shared):
    """Over the ends of episodes."""
    config = small_config(network={"recurrent": core, "recurrent_size": SIZE, "sequence_length": 2, "shared": shared})
    state, plan = made_state(config, described(discrete=False)), plan_of(config)
    assert isinstance(state.policy, RecurrentFunctions)
    autograds_own = AutogradFunctions(state.net, state.parameters, config)
    actors: list[Actor] = [state.policy.actor(plan, mode) for mode in ("batched", "loop")]
    actors.append(autograds_own.actor(plan, "batched"))
    carried = torch.randn((8, state.net.state_size), generator=seeded(0)).numpy()
    rng, taken = np.random.default_rng(0), []
    x = noise = np.zeros(0)
    for actor in actors:
        actor.begin(carried)
    for _ in range(STEPS):
        x, noise = (rng.normal(size=(8, size)).astype(np.float32) for size in (4, 3))
        done = torch.from_numpy(rng.random(8) < 0.3)
        with torch.no_grad():
            taken.append([actor(x, noise) for actor in actors])
        for actor in actors:
            actor.forget(done)
    for batched, looped, pytorchs in taken:
        np.testing.assert_array_equal(batched, looped)
        np.testing.assert_allclose(batched, pytorchs, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(actors[0](x, noise), actors[0](x, noise))  # something is carried


@CORES
@SHARED
def test_an_actor_has_the_parameters_of_its_rollouts_beginning(core, shared):
    net = recurrent_net(core, shared)
    parameters = random_parameters(net)
    policy = by_hand(net, parameters)
    rng = np.random.default_rng(0)
    observations, state = (rng.normal(size=(2, 3, size)).astype(np.float32) for size in (4, net.state_size))
    none = np.zeros((2, 3), np.float32)
    stepper = policy.stepper()
    before = policy.step(stepper, observations, state, none)
    own = ("trunk.core", "trunk", "actor") if shared else ("actor.core", "actor")
    for part in own:
        for parameter in (p for name, p in parameters.items() if name.startswith(part)):
            parameter.mul_(1.5)
        for same, was in zip(policy.step(stepper, observations, state, none), before, strict=True):
            np.testing.assert_array_equal(same, was)
        assert not np.allclose(policy.step(policy.stepper(), observations, state, none)[0], before[0], atol=1e-4)


@CORES
def test_a_rollout_begins_with_the_parameters_as_they_are_then(core):
    config = small_config(network={"recurrent": core, "recurrent_size": SIZE, "sequence_length": 2})
    state, plan = made_state(config, described(discrete=False)), plan_of(config)
    actor: Actor = state.policy.actor(plan, "batched")
    x, noise = np.ones((8, 4), np.float32), np.zeros((8, 3), np.float32)
    taken = []
    for _ in range(2):
        actor.begin(np.zeros((8, state.net.state_size), np.float32))
        taken.append(np.array(actor(x, noise)))
        with torch.no_grad():
            state.parameters.views["actor.core.input.weight"].mul_(1.5)
    assert not np.allclose(taken[0], taken[1], atol=1e-4)


def test_parameters_are_read_anew_by_each_call():
    net = recurrent_net("lstm", False)
    parameters = random_parameters(net)
    policy, columns = by_hand(net, parameters), sequences_for(net, parameters, 0)
    before = policy.gradients(arrays(columns), SETTINGS).copy()
    parameters["critic.core.hidden.weight"].add_(0.5)
    assert not np.allclose(policy.gradients(arrays(columns), SETTINGS), before, atol=1e-4)


# --- Shards -----------------------------------------------------------------------------------------------------------


@CORES
@SHARED
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_shards_bits_do_not_depend_on_its_company(monkeypatch, core, shared, size, rows):
    """On as many ranks as 8 shards may have, and at the sizes of a run."""
    net = policy_net(4, 2, True, (64,), core=core, core_size=size, shared=shared)
    assert_bits_without_company(monkeypatch, net, rows)


@pytest.mark.parametrize(
    ("core", "size", "observations", "actions", "hidden", "rows"),
    [
        ("gru", 160, 4, 2, (64,), 2),
        ("gru", 192, 4, 2, (64,), 2),
        ("lstm", 64, 376, 17, (64,), 4),
        ("lstm", 64, 27, 17, (64,), 16),
        ("lstm", 64, 4, 1, (4,), 1),
        ("lstm", 64, 4, 1, (4,), 3),
        ("lstm", 16, 4, 2, (), 2),
    ],
)
def test_a_shards_bits_do_not_depend_on_its_company_at_odd_sizes(
    monkeypatch, core, size, observations, actions, hidden, rows
):
    """At some of them a shard's rows had others' bits once."""
    net = policy_net(observations, actions, actions == 2, hidden, core=core, core_size=size)
    assert_bits_without_company(monkeypatch, net, rows)


def assert_bits_without_company(monkeypatch, net, rows):
    monkeypatch.setitem(globals(), "SEQUENCES", rows)
    parameters = random_parameters(net)
    columns, rollout = sequences_for(net, parameters, 1, 8), rollout_for(net, 1, torch.float32, 8)

    def of(shards: slice) -> list[np.ndarray]:
        policy, given = by_hand(net, parameters), [x[shards].clone().numpy() for x in rollout]
        own = {name: x[shards].clone().numpy() for name, x in columns.items()}
        step = policy.step(policy.stepper(), given[0][:, 0].copy(), given[2], given[3][:, 0].copy())
        return [policy.gradients(own, SETTINGS).copy(), *policy.unroll(*given), *step]

    whole = of(slice(None))
    for world_size in (2, 3, 8):
        ranks = [of(slice(owned.start, owned.stop)) for owned in ranges(8, world_size)]
        for parts, expected in zip(zip(*ranks, strict=True), whole, strict=True):
            np.testing.assert_array_equal(np.concatenate(parts), expected)
    assert not np.array_equal(whole[0][0], whole[0][1])


# --- Whose numbers are computed by hand -------------------------------------------------------------------------------


def test_what_is_computed_by_hand():
    for core in ("lstm", "gru"):
        for shared in (True, False):
            assert derivable_recurrent(recurrent_net(core, shared))
    assert not derivable_recurrent(policy_net(4, 2, True, (8,)))
    for option in ({"squashed": True}, {"state_dependent_std": True}, {"critic": False}, {"activation": "silu"}):
        assert not derivable_recurrent(replace(recurrent_net("lstm", False, discrete=False), **option))


@pytest.mark.parametrize(
    "change",
    [{"precision": "bf16"}, {"reduction": "fast", "fsdp": True}, {"compile": True}, {"device": "cuda"}, {}],
    ids=str,
)
def test_what_pytorch_computes_all_the_same(change):
    config = small_config(network={"recurrent": "gru", "recurrent_size": 4, "sequence_length": 2})
    state = made_state(config, described())
    policy, _ = make_policy(config.model_copy(update=change), state.net, state.parameters)
    assert isinstance(policy, AutogradFunctions if change else RecurrentFunctions)
