"""Layers of several shards: a shard's bits are those it has alone, and what PyTorch's own layer gives it."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box
from small_runs import seeded
from torch import Tensor
from torch.nn import functional

from lockstep.core.spaces import observation_layout
from lockstep.torch_engine.nets import encoders, layers_of_shards
from lockstep.torch_engine.nets.layers_of_shards import FEW_COLUMNS, ConvolutionOfShards, LinearOfShards, products_alike

NAMES = ("output", "images or features", "weight", "bias")
with_onednn = pytest.mark.skipif(not encoders.ONEDNN, reason="rows are multiplied by oneDNN on x86 alone")


def taken(function, x: Tensor, weight: Tensor, bias: Tensor, upstream_seed: int, shard: int | None = None):
    """The output ``[k, …]`` of shards, or of one alone, and the gradients by all that goes in, weights expanded.

    What comes down to a shard is the same, alone or among others, and lies in memory as the output does.
    """
    mine = x if shard is None else x[shard : shard + 1].clone()
    shards = len(mine)
    arguments = [
        mine.detach().requires_grad_(),
        *(p.expand(shards, *p.shape).detach().requires_grad_() for p in (weight, bias)),
    ]
    out = function(*arguments)
    whole = torch.randn((len(x), *out.shape[1:]), generator=seeded(upstream_seed))
    upstream = torch.empty_like(out).copy_(whole if shard is None else whole[shard : shard + 1])
    return [out.detach(), *torch.autograd.grad(out, arguments, upstream)]


def close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()))


# --- Convolutions -----------------------------------------------------------------------------------------------------

CONVOLUTIONS = [  # images a shard, [H, W, C], and [out, kernel, stride, padding]
    (5, (6, 7, 3), (8, 3, 1, 1)),
    (4, (9, 9, 1), (8, 3, 1, 1)),
    (3, (7, 5, 6), (7, 3, 1, 1)),
    (2, (11, 13, 2), (5, 4, 2, 0)),
    (6, (18, 20, 4), (16, 8, 4, 0)),
    (7, (5, 6, 3), (1, 3, 1, 1)),
    (3, (3, 3, 8), (16, 3, 1, 0)),
]


def layer_of_images(n, shape, layer, shards):
    """Images of shards as the engine takes them out of rows, and a convolution's weight and bias."""
    leaf = observation_layout(Box(0, 255, shape, np.uint8)).leaves[0]
    rows = torch.randint(0, 256, (shards, n, leaf.size), dtype=torch.uint8, generator=seeded(0))
    out, kernel, _, _ = layer
    weight = 0.3 * torch.randn(out, shape[2], kernel, kernel, generator=seeded(1))
    return encoders.image(leaf, rows), weight, torch.randn(out, generator=seeded(2))


def of_shards(stride, padding):
    return lambda x, weight, bias: ConvolutionOfShards.apply(x, weight, bias, stride, padding)


def of_pytorch(stride, padding):
    """PyTorch's own layer, of a single shard."""

    def function(x, weight, bias):
        return functional.conv2d(x.flatten(0, 1), weight.squeeze(0), bias.squeeze(0), stride, padding).unsqueeze(0)

    return function


@pytest.mark.parametrize("shards", [2, 3, 4])
@pytest.mark.parametrize("other", [of_shards, of_pytorch])
@pytest.mark.parametrize(("n", "shape", "layer"), CONVOLUTIONS)
def test_a_convolution_gives_a_shard_the_bits_it_has_alone(n, shape, layer, other, shards):
    """What was measured. Where it does not hold a run takes its shards one by one, slower and just as right."""
    images, weight, bias = layer_of_images(n, shape, layer, shards)
    together = taken(of_shards(*layer[2:]), images, weight, bias, 3)
    for shard in range(shards):
        alone = taken(other(*layer[2:]), images, weight, bias, 3, shard)
        for name, ours, expected in zip(NAMES, together, alone, strict=True):
            assert torch.equal(ours[shard], expected[0]), (name, shard)
    assert not torch.allclose(together[2][0], together[2][1], rtol=1e-2)


@pytest.mark.parametrize("shards", [2, 3])
@pytest.mark.parametrize("n", [1, 4])
def test_convolutions_of_shards_have_the_values_that_float64_gives(n, shards):
    """Also of one image a shard, which alone is another kernel's."""
    layer = (8, 3, 1, 1)
    images, weight, bias = layer_of_images(n, (6, 5, 3), layer, shards)
    together = taken(of_shards(*layer[2:]), images, weight, bias, 3)
    for shard in range(shards):
        doubled = (images.double(), weight.double(), bias.double())
        for ours, expected in zip(together, taken(of_pytorch(*layer[2:]), *doubled, 3, shard), strict=True):
            close(ours[shard].double(), expected[0])


def test_observations_need_no_gradient_and_parameters_have_the_same_then():
    images, weight, bias = layer_of_images(4, (6, 5, 3), (8, 3, 1, 1), 3)
    whole = taken(of_shards(1, 1), images, weight, bias, 3)
    parameters = [p.expand(3, *p.shape).detach().requires_grad_() for p in (weight, bias)]
    out = of_shards(1, 1)(images, *parameters)
    upstream = torch.empty_like(out).copy_(torch.randn(out.shape, generator=seeded(3)))
    for ours, expected in zip(torch.autograd.grad(out, parameters, upstream), whole[2:], strict=True):
        assert torch.equal(ours, expected)


def test_an_encoder_convolves_several_shards_so_only_for_gradients(monkeypatch):
    calls = []
    right = ConvolutionOfShards.forward

    def watched(ctx, x, *rest):
        calls.append(len(x))
        return right(ctx, x, *rest)

    monkeypatch.setattr(ConvolutionOfShards, "forward", staticmethod(watched))
    images, weight, bias = layer_of_images(4, (6, 5, 3), (8, 3, 1, 1), 3)

    def convolved(shards, wanted):
        expanded = {"a.weight": weight.expand(shards, *weight.shape), "a.bias": bias.expand(shards, *bias.shape)}
        parameters = {name: p.detach().requires_grad_(wanted) for name, p in expanded.items()}
        return encoders.convolve(images[:shards], parameters, "a", padding=1).detach()

    outputs = [convolved(shards, wanted) for shards in (1, 3) for wanted in (False, True)]
    assert calls == [3]
    assert torch.equal(outputs[2], outputs[3])
    assert torch.equal(outputs[0], outputs[1])


# --- Products by oneDNN -----------------------------------------------------------------------------------------------

PRODUCTS = [(5, 24, 8), (4, 33, 7), (3, 100, 16), (2, 17, 3), (6, 50, 1), (3, 5, 4), (16, 288, 64)]  # rows, in, out


def layer_of_features(rows, inputs, outputs, shards):
    x = torch.randn(shards, rows, inputs, generator=seeded(0))
    return x, torch.randn(outputs, inputs, generator=seeded(1)), torch.randn(outputs, generator=seeded(2))


def linear(into=None):
    return lambda x, weight, bias: LinearOfShards.apply(x, weight, bias, into)


def linear_of_pytorch(x, weight, bias):
    """PyTorch's own layer on oneDNN's memory, of a single shard."""
    return functional.linear(x.squeeze(0).to_mkldnn(), weight.squeeze(0), bias.squeeze(0)).to_dense().unsqueeze(0)


def place_of(shards, outputs, inputs, start=3):
    """Where gradients may lie, `[k, out, in]`, and the memory around it, which is no number anywhere."""
    memory = torch.full((shards, start + outputs * inputs + 4), torch.nan)
    return memory[:, start : start + outputs * inputs].view(shards, outputs, inputs), memory


@with_onednn
@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), PRODUCTS)
def test_a_product_gives_a_shard_the_bits_of_pytorchs_own_layer(rows, inputs, outputs, shards, placed):
    """What was measured; wherever the weight's gradient lies."""
    x, weight, bias = layer_of_features(rows, inputs, outputs, shards)
    into = place_of(shards, outputs, inputs)[0] if placed else None
    together = taken(linear(into), x, weight, bias, 3)
    for shard in range(shards):
        alone = taken(linear_of_pytorch, x, weight, bias, 3, shard)
        for name, ours, expected in zip(NAMES, together, alone, strict=True):
            assert torch.equal(ours[shard], expected[0]), (name, shard)
    assert shards == 1 or not torch.allclose(together[2][0], together[2][1], rtol=1e-2)


@with_onednn
def test_one_row_a_shard_has_the_values_it_has_alone():
    x, weight, bias = layer_of_features(1, 20, 5, 3)
    together = taken(linear(), x, weight, bias, 3)
    for shard in range(3):
        for ours, expected in zip(together, taken(linear_of_pytorch, x, weight, bias, 3, shard), strict=True):
            close(ours[shard], expected[0])


@with_onednn
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(5, 24, 8), (6, 50, 1)])
def test_a_weights_gradient_lies_where_it_shall_and_nowhere_else(rows, inputs, outputs):
    x, weight, bias = layer_of_features(rows, inputs, outputs, 3)
    into, memory = place_of(3, outputs, inputs)
    expected = taken(linear(), x, weight, bias, 3)[2]
    gradient = taken(linear(into), x, weight, bias, 3)[2]
    assert gradient.data_ptr() == into.data_ptr()
    assert gradient.stride() == into.stride()
    assert torch.equal(into, expected)
    assert expected.data_ptr() != into.data_ptr()
    assert int(memory.isnan().sum()) == memory.numel() - into.numel()


@with_onednn
def test_without_a_place_every_gradient_has_memory_of_its_own():
    x, weight, bias = layer_of_features(5, 24, 8, 2)
    first, second = (taken(linear(), x, weight, bias, seed)[2] for seed in (3, 4))
    assert first.data_ptr() != second.data_ptr()
    assert first.is_contiguous()
    assert not torch.equal(first, second)


# --- Whose product is a weight's gradient -----------------------------------------------------------------------------


@with_onednn
@pytest.mark.parametrize(("rows", "inputs", "outputs"), PRODUCTS)
def test_whoever_multiplies_a_gradient_has_the_same_bits_where_products_are_alike(monkeypatch, rows, inputs, outputs):
    monkeypatch.setattr(layers_of_shards, "SMALL", 1 << 10)
    alike = products_alike.__wrapped__(rows, inputs, outputs)
    x, weight, bias = layer_of_features(rows, inputs, outputs, 2)
    found = []
    for said in (False, True):
        monkeypatch.setattr(layers_of_shards, "products_alike", lambda *_, said=said: said)
        found.append(taken(linear(place_of(2, outputs, inputs)[0]), x, weight, bias, 3))
    for one, other in zip(*found, strict=True):
        close(one, other)
    if not alike:
        pytest.skip("these products aren't alike on this machine")
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@with_onednn
def test_a_shape_is_tried_once():
    before = products_alike.cache_info()
    assert products_alike(5, 24, 8) == products_alike(5, 24, 8)
    assert products_alike.cache_info().hits > before.hits


def moved(x: Tensor) -> Tensor:
    """The least that a number can be moved by."""
    return torch.nextafter(x, torch.tensor(torch.inf))


@with_onednn
@pytest.mark.parametrize("mistake", ["another product", "another where memory isn't aligned", "another bias of few"])
def test_products_that_are_not_alike_are_found(monkeypatch, mistake):
    shape = next((shape for shape in PRODUCTS if products_alike(*shape)), None)
    if shape is None:
        pytest.skip("no products are alike on this machine")
    multiply, by_onednn = torch.mm, layers_of_shards._gradients_by_onednn

    def other_product(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
        multiply(x, y, out=out)
        return out.copy_(moved(out)) if mistake == "another product" or out.storage_offset() else out

    def other_bias(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product, of_bias = by_onednn(grad, x, weight)
        return product, moved(of_bias) if x.shape[1] == FEW_COLUMNS else of_bias

    if mistake == "another bias of few":
        monkeypatch.setattr(layers_of_shards, "_gradients_by_onednn", other_bias)
    else:
        monkeypatch.setattr(torch, "mm", other_product)
    assert not products_alike.__wrapped__(*shape)
    monkeypatch.undo()
    assert products_alike.__wrapped__(*shape)
