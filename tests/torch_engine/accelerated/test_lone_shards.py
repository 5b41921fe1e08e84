"""On an accelerator a lone shard is computed as one of two, if that gives it the bits that it has among others."""

from typing import Any

import numpy as np
import pytest
import torch
from small_runs import (
    alone,
    described,
    plan_of,
    random_batch,
    run_ranks,
    shards_gradients,
    small_config,
    small_state,
)
from torch import Tensor

from lockstep.torch_engine.batch import make_batch
from lockstep.torch_engine.envs.tensor_rollout import device_moments
from lockstep.torch_engine.nets import distributions, memory, nets, row_sums
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.nets.shards import aligned, in_pairs
from lockstep.torch_engine.rollout import Rollout
from lockstep.torch_engine.setup import choose_mode
from lockstep.torch_engine.setup.choose_mode import ALONE, LOOP, PAIRS
from lockstep.torch_engine.setup.invariance import shards_invariant_here
from lockstep.torch_engine.setup.self_check import shard_invariant

GELU: dict[str, Any] = {"network": {"activation": "gelu", "hidden_sizes": (8,)}}
LSTM: dict[str, Any] = {"network": {**GELU["network"], "recurrent": "lstm", "recurrent_size": 4, "sequence_length": 2}}


@pytest.fixture
def device(monkeypatch):
    """The CPU plays an accelerator."""
    monkeypatch.setattr(memory, "HOST", set())


def policy_of(config) -> tuple[Any, AutogradFunctions]:
    state = small_state(config, described())
    assert isinstance(state.policy, AutogradFunctions)
    return state, state.policy


def chosen(monkeypatch, passing: int, others: int | None = None):
    """The mode and the policy where this rank's check passes with ``passing``, and another says ``others``."""
    config = small_config(**GELU)
    (state, policy), communicator = policy_of(config), alone(config)
    tried = []

    def check(state, _):
        tried.append(PAIRS if state.policy.pairs else ALONE)
        return tried[-1] == passing

    monkeypatch.setattr(choose_mode, "shards_invariant_here", check)
    if others is not None:
        monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.stack([x, torch.tensor([others])]))
    state.reference = AutogradFunctions(state.net, state.parameters, config)
    mode = choose_mode.choose_mode(state, config, communicator)
    assert state.reference.pairs == policy.pairs
    return mode, policy.pairs, tried


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("passing", "others", "expected"),
    [
        (ALONE, None, ("batched", False, [ALONE])),
        (PAIRS, None, ("batched", True, [ALONE, PAIRS])),
        (LOOP, None, ("loop", False, [ALONE, PAIRS])),
        (ALONE, PAIRS, ("batched", True, [ALONE])),
        (PAIRS, LOOP, ("loop", False, [ALONE, PAIRS])),
    ],
)
def test_a_lone_shard_is_one_of_two_where_only_so_it_has_its_bits(monkeypatch, passing, others, expected):
    assert chosen(monkeypatch, passing, others) == expected


@pytest.mark.usefixtures("device")
def test_large_shards_are_not_computed_twice(monkeypatch):
    """116 parameters with two samples."""
    monkeypatch.setattr(choose_mode, "FEW_OPERATIONS", 6 * 116 * 2)
    assert chosen(monkeypatch, PAIRS) == ("batched", True, [ALONE, PAIRS])
    monkeypatch.setattr(choose_mode, "FEW_OPERATIONS", 6 * 116 * 2 - 1)
    assert chosen(monkeypatch, PAIRS) == ("loop", False, [ALONE])


def test_on_a_cpu_pairs_are_not_tried(monkeypatch):
    assert chosen(monkeypatch, PAIRS) == ("loop", False, [ALONE])


class Alone(torch.autograd.Function):
    """Stands in for a product that rounds otherwise where there is a single matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * (1.0 + 1e-6) if len(x) == 1 else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * (1.0 + 1e-6) if len(grad) == 1 else grad.clone()


@pytest.fixture
def odd_alone(monkeypatch):
    linear = nets.linear
    monkeypatch.setattr(nets, "linear", lambda x, *rest: Alone.apply(linear(x, *rest)))


@pytest.mark.usefixtures("device", "odd_alone")
@pytest.mark.parametrize("changes", [GELU, LSTM], ids=["GELU", "LSTM"])
def test_all_that_is_computed_of_a_lone_shard_is_computed_in_a_pair(changes):
    config = small_config(**changes)
    state, policy = policy_of(config)
    assert not shards_invariant_here(state, config)
    assert choose_mode.choose_mode(state, config, alone(config)) == "batched"
    assert policy.pairs
    assert shards_invariant_here(state, config)


@pytest.mark.usefixtures("device", "odd_alone")
@pytest.mark.parametrize("pairs", [True, False])
def test_ranks_of_a_shard_each_have_the_gradient_of_one_that_has_all(pairs):
    config = small_config(**GELU)

    def gradient(plan, communicator):
        state, policy = policy_of(config)
        policy.pairs = pairs
        batch = random_batch(config, state.net).columns()
        mine = {name: x[plan.shards.start : plan.shards.stop].clone() for name, x in batch.items()}
        return communicator.sum_shards(shards_gradients(state, config)(mine, 16))

    (one,), many = run_ranks(config, 1, gradient), run_ranks(config, config.shards, gradient)
    assert [torch.equal(one, other) for other in many] == [pairs] * config.shards


@pytest.mark.usefixtures("device", "odd_alone")
@pytest.mark.parametrize("changes", [GELU, LSTM], ids=["GELU", "LSTM"])
def test_an_actor_of_a_lone_shard_samples_as_one_of_two(changes):
    config = small_config(num_envs=1, num_shards=1, ppo={"num_minibatches": 1}, **changes)
    state = small_state(config, described(discrete=False))
    policy = state.policy
    assert isinstance(policy, AutogradFunctions)
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(1, 4, generator=generator), torch.randn(1, 3, generator=generator)
    carried = torch.randn(1, state.net.state_size, generator=generator) if state.net.core else None

    def sampled(pairs: bool) -> Tensor:
        policy.pairs = pairs
        actor = policy.actor(plan_of(config), "batched")
        actor.begin(carried)
        return actor.tensors(x, noise)

    alone, paired = sampled(False), sampled(True)
    assert not torch.equal(alone, paired)
    policy.pairs = False
    two = x.unsqueeze(0).expand(2, 1, 4)
    mean = policy.output(two) if carried is None else policy.step(two, in_pairs(carried.unsqueeze(0)))[0]
    assert torch.equal(paired, distributions.sample(state.net, policy.weights.expanded(2), mean, noise)[0])


@pytest.mark.usefixtures("device", "odd_alone")
def test_what_a_batch_is_made_of_does_not_depend_on_how_many_shards_a_rank_has():
    """With one environment a shard, a shard's steps lie as far apart as there are shards."""
    config = small_config(**GELU)
    state, policy = policy_of(config)
    steps, seen = config.num_steps, []

    def evaluate(observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        seen.append((observations.stride(), actions.stride()))
        return AutogradFunctions.evaluate(policy, observations, actions)

    policy.evaluate = evaluate  # pyright: ignore[reportAttributeAccessIssue]
    for ranks in (1, config.shards):
        shape = steps, config.envs // ranks
        rows, never = np.zeros((steps + 1, shape[1], 4), np.float32), np.zeros(shape, np.bool_)
        actions, scores = np.zeros(shape, np.int64), np.zeros(shape)
        rollout = Rollout(
            rows, rows[:-1], actions, actions, scores, never, never, np.zeros(shape, np.int8), rows[0, :0]
        )
        make_batch(state, rollout, plan_of(config, ranks), config, "batched")
    (of_all, actions_of_all), (of_one, actions_of_one) = seen
    assert of_all[1:] == of_one[1:] == (4, 1)
    assert actions_of_all[1:] == actions_of_one[1:] == (1,)


# --- sums over rows ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("width", [1, 5])
def test_gradients_of_what_all_rows_share_are_products(monkeypatch, width):
    products = []
    product = row_sums.summed_by_product
    monkeypatch.setattr(row_sums, "summed_by_product", lambda x: products.append(x.shape) or product(x))
    generator = torch.Generator().manual_seed(0)
    x, into = torch.randn(3, width, generator=generator).requires_grad_(), torch.randn(3, 7, width, generator=generator)
    spread = row_sums.over_rows(x, 7)
    assert torch.equal(spread, x.unsqueeze(1).expand(3, 7, width))
    (gradient,) = torch.autograd.grad((spread * into).sum(), x)
    torch.testing.assert_close(gradient, into.sum(1))
    assert products == [(3, 7, width)]
    with torch.no_grad():
        assert row_sums.over_rows(x, 7).shape == (3, 1, width)


@pytest.mark.usefixtures("device")
def test_sums_of_columns_are_those_of_each():
    columns = list(torch.randn(4, 3, 9, generator=torch.Generator().manual_seed(1)))
    sums = row_sums.sums_of_rows(columns)
    torch.testing.assert_close(sums, torch.stack([x.sum(-1) for x in columns], -1))
    assert shard_invariant(lambda *parts: row_sums.sums_of_rows(list(parts)), 3, *columns, sizes=[2, 3])


def test_on_a_cpu_sums_are_pytorchs():
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert row_sums.over_rows(x, 7).shape == (3, 1, 5)
    assert torch.equal(row_sums.sums_of_rows([x, 2 * x]), torch.stack([x.sum(-1), (2 * x).sum(-1)], -1))


@pytest.mark.usefixtures("device")
def test_a_gaussians_log_std_is_shared_by_rows(monkeypatch):
    asked = []
    over_rows = row_sums.over_rows
    monkeypatch.setattr(distributions, "over_rows", lambda x, rows: asked.append(rows) or over_rows(x, rows))
    config = small_config(**GELU)
    state = small_state(config, described(discrete=False))
    gradients = shards_gradients(state, config)(random_batch(config, state.net).columns(), 16)
    assert asked
    monkeypatch.setattr(memory, "HOST", {"cpu"})
    torch.testing.assert_close(
        gradients, shards_gradients(state, config)(random_batch(config, state.net).columns(), 16)
    )


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dims", [3, 4])
def test_a_log_std_is_as_broad_as_what_it_goes_with(dims):
    """Of rows, and of sequences of them."""
    net = small_state(small_config(**GELU), described(discrete=False)).net
    output, log_std = torch.zeros(2, *range(3, dims + 1), 3), torch.randn(2, 3).requires_grad_()
    _, spread = distributions.mean_and_log_std(net, {"log_std": log_std}, output)
    assert spread.shape == output.shape
    torch.testing.assert_close(
        torch.autograd.grad(spread.sum(), log_std)[0], torch.full((2, 3), float(output[0, ..., 0].numel()))
    )


def test_moments_of_a_shard_are_those_that_it_has_alone():
    vectors = torch.randn(33, 24, 5, generator=torch.Generator().manual_seed(0)) * 3.0 + 1.0
    of_all = device_moments(vectors, 8)
    for shard in range(8):
        own = vectors[:, 3 * shard : 3 * shard + 3].clone()
        assert torch.equal(of_all[shard], device_moments(own, 1)[0])
    x = vectors.unflatten(1, (8, 3)).double()
    at_once = (x - x.mean((0, 2), keepdim=True)).square().sum((0, 2))
    torch.testing.assert_close(of_all[:, 5:], at_once)


def test_what_is_on_a_device_already_is_copied_to_memory_of_its_own():
    """A step of a rollout begins anywhere in it."""
    x = torch.zeros(3, 5, device="meta")
    assert aligned(x[1], x.device).storage_offset() == 0
    assert x[1].to(x.device).storage_offset() == 5
