"""Gradients by autograd where a caller wants them: the same bits as in memory of their own."""

import pytest
import torch
from small_runs import (
    IMAGE_NETS,
    described,
    described_picture,
    random_batch,
    shards_gradients,
    small_config,
    small_state,
)
from torch import Tensor

from lockstep.torch_engine.nets import autograd, encoders, layers_of_shards
from lockstep.torch_engine.nets.autograd import AutogradFunctions
from lockstep.torch_engine.state import TrainState
from lockstep.training.losses import TERMS, loss_settings

COUNT = 32
NETS = {
    "simple": {"image": {"width": 0.25}},
    "shared impala": IMAGE_NETS["shared impala"],
    "silu": {"activation": "silu", "shared": True},
}
SEEING = ("simple", "shared impala")
with_onednn = pytest.mark.skipif(not encoders.ONEDNN, reason="rows are multiplied by oneDNN on x86 alone")


def state_and_columns(net: str, shards: int) -> tuple[TrainState, dict[str, Tensor]]:
    """A policy of eight shards, and the samples of the first ones."""
    config = small_config(network=NETS[net])
    state = small_state(config, described_picture() if net in SEEING else described())
    assert isinstance(state.policy, AutogradFunctions)
    assert state.net.convolutional == (net in SEEING)
    return state, {name: x[:shards].clone() for name, x in random_batch(config, state.net).columns().items()}


def gradients_of(state: TrainState, columns: dict[str, Tensor], out: Tensor | None = None) -> Tensor:
    return state.policy.gradients(columns, loss_settings(small_config()).counting(COUNT), out)


@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("net", NETS)
def test_gradients_have_the_same_bits_in_memory_that_is_given(net, shards):
    state, columns = state_and_columns(net, shards)
    expected = gradients_of(state, columns)
    assert expected.shape == (shards, state.parameters.flat.numel() + len(TERMS))
    rows = torch.full((shards + 2, expected.shape[1]), torch.nan)  # some of them a caller's, and others'
    out = rows[1:-1]
    assert gradients_of(state, columns, out) is out
    assert torch.equal(out, expected)
    assert rows[[0, -1]].isnan().all()
    assert not torch.equal(out[0], gradients_of(state, {name: x.flip(1) for name, x in columns.items()})[0])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("net", SEEING)
def test_nothing_of_the_last_gradients_is_left_in_the_next(net, shards):
    state, columns = state_and_columns(net, shards)
    other = {name: x.roll(1, 1) if name == "advantages" else x for name, x in columns.items()}
    out = torch.empty_like(gradients_of(state, columns))
    for part in (columns, other, columns):
        assert torch.equal(gradients_of(state, part, out), gradients_of(state, part))
    assert not torch.equal(gradients_of(state, other), out)


@pytest.mark.parametrize("net", SEEING)
def test_a_parameter_has_its_own_part_of_the_memory(net):
    state, columns = state_and_columns(net, 2)
    assert isinstance(state.policy, AutogradFunctions)
    out = gradients_of(state, columns)
    places = state.policy._places(out)
    assert list(places) == list(state.parameters.shapes)
    for shard in range(2):
        for name, expected in state.parameters.split(out[shard, : -len(TERMS)]).items():
            assert places[name][shard].data_ptr() == expected.data_ptr()
            assert places[name][shard].shape == expected.shape


@pytest.mark.parametrize("net", NETS)
def test_only_networks_for_images_are_told_of_the_places(monkeypatch, net):
    told = []

    class Watched(layers_of_shards.GradientPlaces):
        def __init__(self, parameters, places):
            super().__init__(parameters, places)
            told.append(list(places))

    monkeypatch.setattr(autograd, "GradientPlaces", Watched)
    state, columns = state_and_columns(net, 2)
    expected = gradients_of(state, columns)
    assert told == []
    gradients_of(state, columns, torch.empty_like(expected))
    assert told == ([list(state.parameters.shapes)] if net in SEEING else [])


@with_onednn
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("net", SEEING)
def test_the_large_weights_gradient_is_put_into_its_place_by_who_computes_it(monkeypatch, net, shards):
    seen = []
    right = layers_of_shards.LinearOfShards.forward

    def watched(ctx, x, weight, bias, into):
        seen.append(into)
        return right(ctx, x, weight, bias, into)

    monkeypatch.setattr(layers_of_shards.LinearOfShards, "forward", staticmethod(watched))
    state, columns = state_and_columns(net, shards)
    assert isinstance(state.policy, AutogradFunctions)
    out = torch.empty_like(gradients_of(state, columns))
    seen.clear()
    gradients_of(state, columns, out)
    names = [f"{trunk}.encoder.eye.out.weight" for trunk in state.net.trunks]
    places = state.policy._places(out)
    assert [into.data_ptr() for into in seen] == [places[name].data_ptr() for name in names]


@pytest.mark.parametrize("onednn", [False, pytest.param(True, marks=with_onednn)])
@pytest.mark.parametrize("net", SEEING)
def test_several_shards_have_the_gradients_that_each_has_alone(monkeypatch, net, onednn):
    """Whether rows are multiplied by oneDNN or not; to the last bit or not is for the self-check to say."""
    monkeypatch.setattr(encoders, "ONEDNN", onednn)
    state, columns = state_and_columns(net, 3)
    together = gradients_of(state, columns)
    for shard in range(3):
        alone = gradients_of(state, {name: x[shard : shard + 1].clone() for name, x in columns.items()})
        torch.testing.assert_close(together[shard : shard + 1], alone, rtol=1e-4, atol=1e-6)
        assert not torch.allclose(together[shard - 1], alone[0], rtol=1e-2)


@pytest.mark.parametrize("net", NETS)
def test_accumulated_gradients_come_to_the_same_memory(net):
    config = small_config(network=NETS[net], ppo={"gradient_accumulation": 2})
    state, columns = state_and_columns(net, 2)
    gradients = shards_gradients(state, config)
    expected = gradients(columns, COUNT).clone()
    out = torch.full_like(expected, torch.nan)
    assert gradients(columns, COUNT, out) is out
    assert torch.equal(out, expected)
