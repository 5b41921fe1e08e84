"""The self-check: what it passes, what it finds, and that the mode it leads to keeps a shard's bits."""

import pytest
import torch
from small_runs import (
    alone,
    described,
    random_actions_of,
    seeded,
    small_config,
    small_state,
)

from lockstep.torch_engine import nets, session, update
from lockstep.torch_engine.losses import LossSettings
from lockstep.torch_engine.nets import PolicyNet
from lockstep.torch_engine.self_check import by_shard, shard_invariant
from lockstep.torch_engine.update import shard_gradients

SHARDS = 8


def forward_and_gradient(net: PolicyNet):
    """A function of shards with everything a run does with its networks: outputs, loss terms and gradients."""
    config = small_config(network={"hidden_sizes": net.hidden_sizes, "activation": net.activation})
    state = small_state(config, described(net.discrete, net.observation_size, net.num_actions))
    assert state.net == net
    gradients = shard_gradients(state, LossSettings(0.2, 0.2, 0.01, 0.5, 64))

    @torch.no_grad()
    def function(x: torch.Tensor, actions: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights = state.parameters.expanded(len(x))
        output, values = nets.actor(net, weights, x), nets.critic(net, weights, x)
        log_prob, entropy = nets.log_prob_and_entropy(net, weights, output, actions)
        return output, values, log_prob, entropy.clone(), gradients(x, actions, *rest)

    return function


def samples(net: PolicyNet, rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Observations, actions, old log-probabilities and values, advantages, returns: `[8, rows, …]`."""
    rest = [torch.randn(SHARDS, rows, generator=seeded(seed + i)) for i in range(4)]
    x = torch.randn(SHARDS, rows, net.observation_size, generator=seeded(seed + 4))
    return [x, random_actions_of(net, (SHARDS, rows), seed), *rest]


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("discrete", "actions"), [(True, 2), (False, 1), (False, 6)])
@pytest.mark.parametrize("activation", ["tanh", "elu"])
def test_batching_shards_keeps_their_bits_in_the_usual_networks(activation, discrete, actions, rows):
    """What DESIGN.md measured. Where it does not hold the engine loops over shards, slower and just as right."""
    net = PolicyNet(4, actions, discrete, (64, 64), activation)
    assert shard_invariant(forward_and_gradient(net), *samples(net, rows))


@pytest.mark.parametrize("hidden_sizes", [(64, 64), (17,), (17, 5)], ids=str)
@pytest.mark.parametrize(("size", "rows"), [(4, 8), (3, 1), (11, 2), (11, 3), (3, 7)])
@pytest.mark.parametrize("activation", ["tanh", "elu", "silu"])
def test_in_the_mode_that_the_check_chooses_every_rank_gets_the_same_bits(activation, size, rows, hidden_sizes):
    """On other numbers than the check saw; each rank's inputs lie in memory of their own."""
    net = PolicyNet(size, 3, True, hidden_sizes, activation)
    function = forward_and_gradient(net)
    mode = "batched" if shard_invariant(function, *samples(net, rows)) else "loop"
    arguments = samples(net, rows, seed=50)
    expected = by_shard(mode, function, *arguments)
    for world_size in (2, 4, 8):
        ranks = [
            by_shard(mode, function, *parts)
            for parts in zip(*([part.clone() for part in a.chunk(world_size)] for a in arguments), strict=True)
        ]
        for part, whole in zip(zip(*ranks, strict=True), expected, strict=True):
            assert torch.equal(torch.cat(part), whole), f"{world_size} ranks, {mode}"


@pytest.mark.parametrize("shards", [2, 8])
def test_a_loop_gives_every_shard_memory_of_its_own(shards):
    """Alignment may decide the last bits; a rank with one shard relies on what it was given (`rollout.aligned`)."""
    x = torch.arange(8.0 * 3).view(8, 3)[:shards]

    def shares_memory(part: torch.Tensor) -> torch.Tensor:
        return torch.tensor([part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()])

    assert by_shard("loop", shares_memory, x).tolist() == [False] * shards
    assert by_shard("batched", shares_memory, x).tolist() == [True]


def test_a_loop_equals_a_batch_for_a_function_of_single_shards():
    x, y = torch.randn(4, 3, generator=seeded(0)), torch.arange(4)

    def pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a * 2, b.unsqueeze(1) + a

    for looped, batched in zip(by_shard("loop", pair, x, y), by_shard("batched", pair, x, y), strict=True):
        assert torch.equal(looped, batched)
    assert torch.equal(by_shard("loop", torch.neg, x), -x)


def test_a_loop_calls_with_one_shard_at_a_time_and_a_batch_with_all():
    seen: list[int] = []

    def counted(part: torch.Tensor) -> torch.Tensor:
        seen.append(len(part))
        return part

    by_shard("loop", counted, torch.zeros(4, 2))
    by_shard("batched", counted, torch.zeros(4, 2))
    assert seen == [1, 1, 1, 1, 4]


INTRUDERS = {
    "mixes shards": lambda x: x - x.mean(0),
    "knows how many shards there are": lambda x: x + len(x),
    "knows a shard's place": lambda x: x + torch.arange(len(x)).unsqueeze(1),
    "differs in pairs only": lambda x: x + (len(x) == 2),
    "differs in fours only": lambda x: x + (len(x) == 4),
    "differs in all eight only": lambda x: x + (len(x) == 8),
    "differs in the last pair only": lambda x: x + ((len(x) == 2) & (x[:, :1] >= 6)),
    "is wrong in its second result": lambda x: (x, x.cumsum(0)),
    "is wrong in one bit of one number": lambda x: x.where(
        torch.arange(x.numel()).view_as(x) != 20, torch.nextafter(x, torch.tensor(9.0))
    ),
}


@pytest.mark.parametrize("intruder", INTRUDERS)
def test_the_check_finds_a_function_that(intruder):
    x = torch.randn(SHARDS, 3, generator=seeded(0))
    x[:, 0] = torch.arange(SHARDS)
    assert not shard_invariant(INTRUDERS[intruder], x)
    assert shard_invariant(lambda x: (x.tanh(), x.sum(1, keepdim=True)), x)


def test_one_shard_has_nothing_to_be_batched_with():
    assert shard_invariant(INTRUDERS["knows how many shards there are"], torch.zeros(1, 3))


# --- The mode of a run ------------------------------------------------------------------------------------------------


def chosen(config=None, ranks_say=None, monkeypatch=None):
    config = config or small_config(network={"hidden_sizes": (64, 64)})
    communicator = alone(config)
    if ranks_say is not None and monkeypatch is not None:
        monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.tensor(ranks_say).unsqueeze(1))
    description = described()
    return session.choose_mode(small_state(config, description), config, description, communicator)


@pytest.mark.parametrize(("invariant", "mode"), [(False, "loop"), (True, "batched")])
def test_a_run_loops_where_the_check_fails(monkeypatch, invariant, mode):
    monkeypatch.setattr(session, "shards_invariant_here", lambda *_: invariant)
    assert chosen() == mode


def test_a_run_loops_on_all_ranks_where_it_fails_on_one(monkeypatch):
    monkeypatch.setattr(session, "shards_invariant_here", lambda *_: True)
    assert chosen(ranks_say=[True, False, True, True], monkeypatch=monkeypatch) == "loop"
    assert chosen(ranks_say=[True] * 4, monkeypatch=monkeypatch) == "batched"


def test_the_fast_reduction_batches_without_asking(monkeypatch):
    monkeypatch.setattr(session, "shards_invariant_here", lambda *_: pytest.fail("asked"))
    assert chosen(small_config(reduction="fast")) == "batched"


@pytest.mark.parametrize("part", ["actor", "critic"])
def test_the_check_of_a_run_finds_networks_that_mix_shards(monkeypatch, part):
    right = getattr(nets, part)
    assert chosen() == "batched"
    monkeypatch.setattr(nets, part, lambda net, weights, x: right(net, weights, x) + x.mean())
    assert chosen() == "loop"


@pytest.mark.parametrize(("activation", "name"), [("tanh", "ppo_gradients"), ("silu", "ppo_terms")])
def test_the_check_of_a_run_finds_a_gradient_that_mixes_shards(monkeypatch, activation, name):
    """Rollout and evaluation are as they should be; only the gradient depends on how many shards are batched."""
    config = small_config(network={"hidden_sizes": (64, 64), "activation": activation})
    right = getattr(update, name)

    def mixed(*arguments):
        result = right(*arguments)
        shards = len(result[0] if isinstance(result, tuple) else result)
        return (result[0] * shards, result[1]) if isinstance(result, tuple) else result * shards

    assert chosen(config) == "batched"
    monkeypatch.setattr(update, name, mixed)
    assert chosen(config) == "loop"


def test_every_shard_count_is_checked_at_the_sizes_that_ranks_can_own():
    seen: set[int] = set()

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x

    for shards, sizes in ((1, {1}), (2, {1, 2}), (8, {1, 2, 4, 8})):
        seen.clear()
        assert shard_invariant(counted, torch.zeros(shards, 2))
        assert seen == sizes
