"""How many shards' gradients one call takes: of images, as many as are worth it and keep a shard's bits."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from small_runs import (
    IMAGE_NETS,
    actions_of,
    alone,
    described,
    described_picture,
    run_ranks,
    small_config,
    small_state,
)

from lockstep.core.spaces import observation_layout
from lockstep.envs.description import EnvDescription
from lockstep.torch_engine.nets import encoders, memory
from lockstep.torch_engine.nets.layers_of_shards import ConvolutionOfShards, LinearOfShards
from lockstep.torch_engine.nets.shards import Mode
from lockstep.torch_engine.setup import choose_mode, invariance
from lockstep.torch_engine.setup.choose_mode import choose_together
from lockstep.torch_engine.setup.invariance import draws_of, gradients_invariant_here

NETS = IMAGE_NETS | {"simple": {"image": {"width": 0.25}}}


def config_of(shards=8, rows=1, net="simple", **changes):
    """Eight shards of four images each, two minibatches."""
    network = {**NETS[net], **changes.pop("network", {})}
    return small_config(num_envs=shards * rows, num_shards=shards, network=network, **changes)


def chosen(config=None, description=None, mode: Mode = "loop", ranks_say=None, monkeypatch=None):
    config = config or config_of()
    communicator = alone(config)
    if ranks_say is not None and monkeypatch is not None:
        monkeypatch.setattr(communicator, "gather_ranks", lambda x: torch.tensor(ranks_say).unsqueeze(1))
    return choose_together(small_state(config, description or described_picture()), config, communicator, mode)


@pytest.mark.parametrize(("shards", "rows", "together"), [(8, 1, 8), (3, 1, 2), (6, 4, 4)])
@pytest.mark.parametrize("net", NETS)
def test_shards_of_images_go_together(net, shards, rows, together):
    """What was measured; a power of two, which fewer shards of a rank can be cut into."""
    assert chosen(config_of(shards, rows, net)) == together


@pytest.mark.parametrize(("images", "together"), [(256, 8), (15, 4), (8, 4), (7, 2), (4, 2), (3, 1), (2, 1), (1, 1)])
def test_a_call_takes_as_many_shards_as_a_number_of_images_are(monkeypatch, images, together):
    """Two images are a shard's minibatch."""
    monkeypatch.setattr(choose_mode, "IMAGES_TOGETHER", images)
    asked = []
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *a: not asked.append(a[2]))
    assert chosen() == together
    assert asked == [together]


def test_pieces_of_a_minibatch_make_no_room_for_more_shards(monkeypatch):
    monkeypatch.setattr(choose_mode, "IMAGES_TOGETHER", 8)
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: True)
    assert [chosen(config_of(8, 2, ppo={"gradient_accumulation": pieces})) for pieces in (1, 2)] == [2, 2]


@pytest.mark.parametrize("pieces", [{"num_minibatches": 4}, {"gradient_accumulation": 2}], ids=str)
def test_where_a_shards_gradient_is_of_one_image_shards_go_one_by_one(monkeypatch, pieces):
    """A lone image meets other kernels than several, and draws may not show that: a rank with one shard has one."""
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: pytest.fail("asked"))
    assert chosen(config_of(ppo=pieces)) == 1


@pytest.mark.parametrize(("images", "draws"), [(1, 8), (2, 8), (32, 8), (64, 4), (256, 1), (4096, 1)])
def test_of_fewer_images_more_draws_are_looked_at(images, draws):
    assert draws_of(images) == draws


def test_a_single_draw_that_differs_is_enough(monkeypatch):
    asked = []

    def differs(state, config, shards, number):
        asked.append((shards, number))
        return (shards, number) != (4, 5)

    monkeypatch.setattr(invariance, "_gradients_invariant", differs)
    assert chosen() == 1
    assert asked == [*((2, n) for n in range(8)), *((4, n) for n in range(6))]


def test_of_larger_images_there_is_room_for_fewer(monkeypatch):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: True)
    monkeypatch.setattr(choose_mode, "BYTES_TOGETHER", 4 * described_picture().observation.image_bytes)
    assert chosen() == 2


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_loss_of_ones_own_changes_nothing(pieces):
    loss = {"loss": "users_losses:penalised", "gradient_accumulation": pieces}
    usual = {"gradient_accumulation": pieces}
    assert chosen(config_of(8, 2, ppo=loss)) == chosen(config_of(8, 2, ppo=usual)) > 1


def test_one_shard_is_taken_alone_and_tried_with_none(monkeypatch):
    monkeypatch.setattr(invariance, "_gradient_of_minibatch", lambda *_: pytest.fail("tried"))
    assert chosen(config_of(1)) == 1


@pytest.mark.parametrize("changes", [{"precision": "bf16"}, {"compile": True}], ids=str)
def test_what_else_runs_do_takes_one_shard_at_a_time_unasked(monkeypatch, changes):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: pytest.fail("asked"))
    assert chosen(config_of(**changes)) == 1


@pytest.mark.parametrize("mode", ["batched", "loop"])
@pytest.mark.parametrize("network", [{}, {"activation": "silu"}], ids=["by hand", "autograd"])
def test_networks_without_images_are_left_alone(monkeypatch, network, mode):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: pytest.fail("asked"))
    assert chosen(small_config(network=network), described(), mode) == 1


def test_where_shards_are_batched_anyway_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: pytest.fail("asked"))
    assert chosen(mode="batched") == 1


def test_a_users_network_for_images_is_called_shard_by_shard(monkeypatch):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: pytest.fail("asked"))
    layout = observation_layout(Box(0, 255, (6, 5, 3), np.uint8))
    description = EnvDescription("Scripted-v0", layout, actions_of(True, 2))
    assert chosen(config_of(network={"custom": "learned_nets:Eyes"}), description) == 1


def test_an_accelerator_takes_one_shard_at_a_time(monkeypatch):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: pytest.fail("asked"))
    config = config_of()
    state = small_state(config, described_picture())
    monkeypatch.setattr(memory, "HOST", set())
    assert choose_together(state, config, alone(config), "loop") == 1


@pytest.mark.parametrize(("invariant", "together"), [(False, 1), (True, 8)])
def test_a_run_takes_one_shard_at_a_time_where_the_check_fails(monkeypatch, invariant, together):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: invariant)
    assert chosen() == together


def test_a_run_takes_one_shard_at_a_time_where_the_check_fails_on_one_rank(monkeypatch):
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda *_: True)
    assert chosen(ranks_say=[True, False, True, True], monkeypatch=monkeypatch) == 1
    assert chosen(ranks_say=[True] * 4, monkeypatch=monkeypatch) == 8


@pytest.mark.parametrize(("failing", "together"), [(None, 8), (0, 1), (2, 1)])
def test_ranks_choose_alike(monkeypatch, failing, together):
    config = config_of()
    failed = set()
    monkeypatch.setattr(choose_mode, "gradients_invariant_here", lambda state, *_: id(state) not in failed)

    def rank(plan, communicator):
        state = small_state(config, described_picture(), plan)
        if communicator.topology.rank == failing:
            failed.add(id(state))
        return choose_together(state, config, communicator, "loop")

    assert run_ranks(config, 3, rank) == [together] * 3


# --- The check itself -------------------------------------------------------------------------------------------------


def mixed(right, place):
    """A function of shards as it is, but for a small part of one of its results where there are several."""

    def function(ctx, x, *rest):
        result = right(ctx, x, *rest)
        if len(x) == 1:
            return result
        if place is None:
            return result + 1e-6
        return tuple(x if x is None or n != place else x * (1 + 2.0**-20) for n, x in enumerate(result))

    return staticmethod(function)


@pytest.mark.parametrize(
    ("layer", "name", "place"),
    [
        (ConvolutionOfShards, "forward", None),
        (ConvolutionOfShards, "backward", 0),
        (ConvolutionOfShards, "backward", 1),
        (ConvolutionOfShards, "backward", 2),
        (LinearOfShards, "forward", None),
        (LinearOfShards, "backward", 0),
        (LinearOfShards, "backward", 1),
        (LinearOfShards, "backward", 2),
    ],
)
@pytest.mark.parametrize("net", ["simple", "shared impala"])
def test_the_check_finds_a_layer_of_shards_with_other_bits(monkeypatch, net, layer, name, place):
    """Everything else is as it should be."""
    if layer is LinearOfShards and not encoders.ONEDNN:
        pytest.skip("rows are multiplied by oneDNN on x86 alone")
    config = config_of(2, net=net)
    state = small_state(config, described_picture())
    assert gradients_invariant_here(state, config, 2)
    monkeypatch.setattr(layer, name, mixed(getattr(layer, name), place))
    assert not gradients_invariant_here(state, config, 2)
    assert chosen(config) == 1


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_number_of_shards_that_a_call_may_take_is_tried(monkeypatch, size):
    """Also those that are left over: three shards are two and one."""
    right = ConvolutionOfShards.forward

    def other_bits(ctx, x, *rest):
        return right(ctx, x, *rest) * (1 + 2.0**-20 * (len(x) == size))

    monkeypatch.setattr(ConvolutionOfShards, "forward", staticmethod(other_bits))
    config = config_of()
    state = small_state(config, described_picture())
    found = [gradients_invariant_here(state, config, together) for together in (1, 2, 4, 8)]
    assert found == [together < size for together in (1, 2, 4, 8)]


def test_one_image_a_shard_is_another_kernels_and_would_be_found_out(monkeypatch):
    """Where kernels for one image are others: as they are made here, whether they are so or not."""
    right = encoders.convolve

    def other_kernel_for_one(x, *arguments, **options):
        return right(x, *arguments, **options) * (1 + 2.0**-20 * (x.shape[0] * x.shape[1] == 1))

    monkeypatch.setattr(encoders, "convolve", other_kernel_for_one)
    assert chosen(config_of(ppo={"num_minibatches": 2})) == 8
    assert chosen(config_of(ppo={"num_minibatches": 4})) == 1
    assert chosen(config_of(ppo={"gradient_accumulation": 2})) == 1
