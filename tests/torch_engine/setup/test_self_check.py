"""The self-check: what it passes, what it finds, and that the mode it leads to keeps a shard's bits."""

import os

import numpy as np
import pytest
import torch
from small_runs import (
    IMAGE_NETS,
    alone,
    described,
    described_picture,
    policy_net,
    random_actions_of,
    seeded,
    small_config,
    small_state,
)

from lockstep.core.life import life
from lockstep.core.tree import ranges
from lockstep.torch_engine.nets import autograd, distributions, encoders, nets
from lockstep.torch_engine.nets.functions import shard_gradients
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.nets.shards import by_shard
from lockstep.torch_engine.plain.policy import PlainPolicy
from lockstep.torch_engine.plain.recurrent import RecurrentPolicy
from lockstep.torch_engine.setup import choose_mode, invariance
from lockstep.torch_engine.setup.self_check import ALL_LOOKED_AT, group_sizes, group_starts, shard_invariant
from lockstep.training.losses import LossSettings

SHARDS = 8


def forward_and_gradient(net: PolicyNet):
    """A function of shards with everything a run does with its networks: outputs, loss terms and gradients."""
    config = small_config(network={"hidden_sizes": net.hidden_sizes, "activation": net.activation})
    state = small_state(config, described(net.discrete, net.observation.width, net.action.outputs))
    assert state.net == net
    gradient = shard_gradients(state.policy, LossSettings(0.2, 0.2, 0.01, 0.5, 64), 1)

    @torch.no_grad()
    def function(columns: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, actions = columns["observations"], columns["actions"]
        weights = state.parameters.expanded(len(x))
        output, values = nets.actor(net, weights, x), nets.critic(net, weights, x)
        log_prob, entropy = distributions.log_prob_and_entropy(net, weights, output, actions)
        return output, values, log_prob, entropy.clone(), gradient(columns, 64).clone()

    return function


def samples(net: PolicyNet, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Columns of a minibatch, `[8, rows, …]`."""
    names = ("log_probs", "values", "advantages", "returns")
    rest = {name: torch.randn(SHARDS, rows, generator=seeded(seed + i)) for i, name in enumerate(names)}
    x = torch.randn(SHARDS, rows, net.observation.width, generator=seeded(seed + 4))
    return {"observations": x, "actions": random_actions_of(net, (SHARDS, rows), seed), **rest}


@pytest.mark.parametrize("rows", [1, 8, 64])
@pytest.mark.parametrize(("discrete", "actions"), [(True, 2), (False, 1), (False, 6)])
@pytest.mark.parametrize("activation", ["tanh", "elu"])
def test_batching_shards_keeps_their_bits_in_the_usual_networks(activation, discrete, actions, rows):
    """What was measured. Where it does not hold the engine loops over shards, slower and just as right."""
    net = policy_net(4, actions, discrete, (64, 64), activation)
    assert shard_invariant(forward_and_gradient(net), SHARDS, samples(net, rows))


@pytest.mark.parametrize("hidden_sizes", [(64, 64), (17,), (17, 5)], ids=str)
@pytest.mark.parametrize(("size", "rows"), [(4, 8), (3, 1), (11, 2), (11, 3), (3, 7)])
@pytest.mark.parametrize("activation", ["tanh", "elu", "silu"])
def test_in_the_mode_that_the_check_chooses_every_rank_gets_the_same_bits(activation, size, rows, hidden_sizes):
    """On other numbers than the check saw; each rank's inputs lie in memory of their own."""
    net = policy_net(size, 3, True, hidden_sizes, activation)
    function = forward_and_gradient(net)
    mode = "batched" if shard_invariant(function, SHARDS, samples(net, rows)) else "loop"
    columns = samples(net, rows, seed=50)
    expected = by_shard(mode, function, columns)
    for world_size in (2, 3, 4, 5, 8):
        owned = [slice(shards.start, shards.stop) for shards in ranges(SHARDS, world_size)]
        parts = [{name: x[shards].clone() for name, x in columns.items()} for shards in owned]
        ranks = [by_shard(mode, function, part) for part in parts]
        for part, whole in zip(zip(*ranks, strict=True), expected, strict=True):
            assert torch.equal(torch.cat(part), whole), f"{world_size} ranks, {mode}"


@pytest.mark.parametrize("shards", [2, 8])
def test_a_loop_gives_every_shard_memory_of_its_own(shards):
    """Alignment may decide the last bits; a rank with one shard relies on what it was given (`shards.aligned`)."""
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
    assert not shard_invariant(INTRUDERS[intruder], SHARDS, x)
    assert shard_invariant(lambda x: (x.tanh(), x.sum(1, keepdim=True)), SHARDS, x)


def test_one_shard_has_nothing_to_be_batched_with():
    assert shard_invariant(INTRUDERS["knows how many shards there are"], 1, torch.zeros(1, 3))


# --- The mode of a run ------------------------------------------------------------------------------------------------


def chosen(config=None, ranks_say=None, monkeypatch=None):
    config = config or small_config(network={"hidden_sizes": (64, 64)})
    communicator = alone(config)
    if ranks_say is not None and monkeypatch is not None:
        monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.tensor(ranks_say).unsqueeze(1))
    return choose_mode.choose_mode(small_state(config, described()), config, communicator)


@pytest.mark.parametrize(("invariant", "mode"), [(False, "loop"), (True, "batched")])
def test_a_run_loops_where_the_check_fails(monkeypatch, invariant, mode):
    monkeypatch.setattr(choose_mode, "shards_invariant_here", lambda *_: invariant)
    assert chosen() == mode


def test_in_bfloat16_a_run_loops_on_a_cpu_unasked(monkeypatch):
    """Nearly all elements of a product hide the order of its sum there, which the check may not see in a few draws."""
    monkeypatch.setattr(choose_mode, "shards_invariant_here", lambda *_: pytest.fail("nothing is asked"))
    assert chosen(small_config(precision="bf16")) == "loop"


def test_mkl_is_asked_for_bits_that_do_not_depend_on_places_in_memory():
    assert os.environ["MKL_CBWR"] == "AUTO"
    x, w = torch.randn(17, 9, generator=seeded(0)), torch.randn(6, 9, generator=seeded(1))
    places = torch.baddbmm(torch.zeros(6, 1, 6), x.expand(6, 17, 9).contiguous(), w.expand(6, 6, 9).transpose(1, 2))
    assert all(torch.equal(places[0], other) for other in places)  # 612 bytes apart


def test_a_run_loops_on_all_ranks_where_it_fails_on_one(monkeypatch):
    monkeypatch.setattr(choose_mode, "shards_invariant_here", lambda *_: True)
    assert chosen(ranks_say=[True, False, True, True], monkeypatch=monkeypatch) == "loop"
    assert chosen(ranks_say=[True] * 4, monkeypatch=monkeypatch) == "batched"


def test_the_fast_reduction_batches_without_asking(monkeypatch):
    monkeypatch.setattr(choose_mode, "shards_invariant_here", lambda *_: pytest.fail("asked"))
    assert chosen(small_config(reduction="fast")) == "batched"


NUMPY, AUTOGRAD = "tanh", "silu"  # activations of plain policies, and of others


@pytest.mark.parametrize(
    ("activation", "place", "name"),
    [
        (NUMPY, PlainPolicy, "output"),
        (NUMPY, PlainPolicy, "values"),
        (NUMPY, PlainPolicy, "log_probs"),
        (NUMPY, PlainPolicy, "gradients"),
        (AUTOGRAD, nets, "actor"),
        (AUTOGRAD, nets, "critic"),
        (AUTOGRAD, autograd, "minibatch_loss"),
    ],
)
def test_the_check_of_a_run_finds_what_mixes_shards(monkeypatch, activation, place, name):
    """Everything else is as it should be: one function alone depends on how many shards are batched."""
    config = small_config(network={"hidden_sizes": (64, 64), "activation": activation})
    right = getattr(place, name)

    def mixed(*arguments):
        result = right(*arguments)
        shards = len(result[0] if isinstance(result, tuple) else result)
        return (result[0] * shards, result[1]) if isinstance(result, tuple) else result * shards

    assert chosen(config) == "batched"
    monkeypatch.setattr(place, name, mixed)
    assert chosen(config) == "loop"


@pytest.mark.parametrize("core", ["lstm", "gru"])
@pytest.mark.parametrize(
    ("activation", "place", "name"),
    [
        (NUMPY, RecurrentPolicy, "step"),
        (NUMPY, RecurrentPolicy, "unroll"),
        (NUMPY, RecurrentPolicy, "gradients"),
        (AUTOGRAD, nets.recurrent, "unroll"),
        (AUTOGRAD, nets, "unroll"),
        (AUTOGRAD, autograd, "minibatch_loss"),
    ],
)
def test_the_check_of_a_run_finds_a_recurrent_policy_that_mixes_shards(monkeypatch, core, activation, place, name):
    network = {"recurrent": core, "recurrent_size": 16, "sequence_length": 2, "activation": activation}
    config, right = small_config(network=network), getattr(place, name)

    def mixed(*arguments, **options):
        result = right(*arguments, **options)
        first, *rest = result if isinstance(result, tuple) else (result,)
        return (first * len(first), *rest) if rest else first * len(first)

    assert chosen(config) == "batched"
    monkeypatch.setattr(place, name, mixed)
    assert chosen(config) == "loop"


def rollout_mode_of_images(rows=1, ranks_say=None, monkeypatch=None, **settings):
    config = small_config(num_envs=8 * rows, num_shards=8, network={"hidden_sizes": (8,), **settings})
    state, communicator = small_state(config, described_picture()), alone(config)
    if ranks_say is not None and monkeypatch is not None:
        monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.tensor(ranks_say).unsqueeze(1))
    assert choose_mode.choose_mode(state, config, communicator) == "loop"
    return choose_mode.choose_rollout_mode(state, config, communicator, "loop")


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", IMAGE_NETS)
def test_shards_of_images_are_batched_in_rollouts(kind, rows):
    """What was measured; one image alone is the odd one, and goes through a network as two."""
    assert rollout_mode_of_images(rows, **IMAGE_NETS[kind]) == "batched"


@pytest.mark.parametrize("kind", IMAGE_NETS)
def test_rollouts_of_images_loop_where_a_shard_would_depend_on_others(monkeypatch, kind):
    right = encoders.convolve

    def mixed(x, *arguments, **options):
        return right(x, *arguments, **options) * (1 + 2.0**-20 * (len(x) > 1))

    monkeypatch.setattr(encoders, "convolve", mixed)
    assert rollout_mode_of_images(**IMAGE_NETS[kind]) == "loop"


def test_an_image_alone_would_be_found_out(monkeypatch):
    """The negative of what makes two of it: as it is, its numbers may be another kernel's, and here they are."""
    right = encoders.convolve

    def other_kernel_for_one(x, *arguments, **options):
        return right(x, *arguments, **options) * (1 + 2.0**-20 * (x.shape[0] * x.shape[1] == 1))

    monkeypatch.setattr(encoders, "convolve", other_kernel_for_one)
    assert rollout_mode_of_images() == "batched"
    monkeypatch.setattr(encoders, "_twice", lambda x: x)
    assert rollout_mode_of_images() == "loop"


def test_rollouts_of_images_loop_on_all_ranks_where_the_check_fails_on_one(monkeypatch):
    assert rollout_mode_of_images(ranks_say=[True, False], monkeypatch=monkeypatch) == "loop"
    assert rollout_mode_of_images(ranks_say=[True, True], monkeypatch=monkeypatch) == "batched"


def test_other_networks_go_through_rollouts_as_through_the_rest(monkeypatch):
    monkeypatch.setattr(choose_mode, "rollouts_invariant_here", lambda *_: pytest.fail("asked"))
    config = small_config()
    state = small_state(config, described())
    for mode in ("loop", "batched"):
        assert choose_mode.choose_rollout_mode(state, config, alone(config), mode) == mode


def test_every_shard_count_is_checked_at_the_sizes_that_ranks_can_own():
    seen: set[int] = set()

    def counted(x: torch.Tensor) -> torch.Tensor:
        seen.add(len(x))
        return x

    for shards, sizes in ((1, {1}), (2, {1, 2}), (7, {1, 2, 3, 4, 7}), (8, {1, 2, 3, 4, 8})):
        seen.clear()
        assert shard_invariant(counted, shards, torch.zeros(shards, 2))
        assert seen == sizes


def test_arrays_and_dicts_are_parted_like_tensors():
    x, y = np.arange(8.0).reshape(4, 2), {"a": torch.arange(4), "b": torch.arange(8).view(4, 2)}

    def both(array: np.ndarray, columns: dict[str, torch.Tensor]) -> tuple[np.ndarray, torch.Tensor]:
        return array + 1, columns["b"] + columns["a"].unsqueeze(1)

    looped, batched = by_shard("loop", both, x, y), by_shard("batched", both, x, y)
    assert np.array_equal(looped[0], batched[0])
    assert torch.equal(looped[1], batched[1])
    assert shard_invariant(both, 4, x, y)
    assert not shard_invariant(lambda array, _: array - array.mean(0), 4, x, y)
    assert not shard_invariant(lambda _, columns: columns["b"] - columns["b"][0], 4, x, y)


def test_each_shard_and_each_group_that_is_looked_at_is_progress():
    """Of many large shards the check takes longer than ranks may be silent, and one that is done waits for others."""
    before = life.sign().count
    assert invariance.invariant(lambda x: x * 2.0, SHARDS, torch.ones(SHARDS, 3), sizes=[2, 4])
    assert life.sign().count == before + SHARDS + 4 + 2


@pytest.mark.parametrize("shards", [2, 8, 12, ALL_LOOKED_AT])
def test_up_to_sixty_four_shards_each_is_compared_in_groups_of_every_size(shards):
    for size in group_sizes(shards):
        starts = group_starts(shards, size)
        assert {start + n for start in starts for n in range(size)} == set(range(shards))
        assert starts[0] == 0
        assert starts[-1] == shards - size


def test_of_many_shards_every_size_is_compared_at_both_ends_and_few_groups_are():
    shards = 1024
    looked_at = [(start, size) for size in group_sizes(shards) for start in group_starts(shards, size)]
    assert {size for _, size in looked_at} == set(group_sizes(shards))
    assert all({0, shards - size} <= {at for at, of in looked_at if of == size} for size in group_sizes(shards))
    assert all(0 <= start <= shards - size for start, size in looked_at)
    for size in group_sizes(shards):
        compared = {at + n for at, of in looked_at if of == size for n in range(size)}
        assert compared >= set(range(ALL_LOOKED_AT)) | {shards - 1}
    few = [start for start, size in looked_at if size == 2]
    assert few == [*range(0, ALL_LOOKED_AT, 2), shards - 2]
    assert sum(size for _, size in looked_at) < len(group_sizes(shards)) * shards / 4


@pytest.mark.parametrize("wrong", [2, 3, 17, 33, 257, 513])
def test_of_many_shards_a_size_whose_bits_differ_is_found(wrong):
    """The negative: nothing else than groups of that size rounds differently."""
    x = torch.ones(513, 1)
    assert wrong in group_sizes(len(x))
    assert shard_invariant(lambda part: part + 0.0, len(x), x)
    assert not shard_invariant(lambda part: part + float(len(part) == wrong), len(x), x)
