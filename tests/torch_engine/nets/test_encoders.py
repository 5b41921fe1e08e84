"""From rows to features: convolutions as ``torch.nn`` computes them, one-hot vectors, and what is too small."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from small_runs import actions_of, alone, described, random_parameters, seeded, small_config, small_state
from torch import nn

from lockstep.core.spaces import ObservationLayout, observation_layout
from lockstep.torch_engine.nets import autograd, encoders, memory, nets
from lockstep.torch_engine.nets.encoders import ImageEncoder, action_mask, encode, encoder_name, image, images_of
from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.setup.choose_mode import choose_mode

SPEED = Box(-9, 9, (2,), np.float32)


def picture(*shape: int) -> Box:
    return Box(0, 255, shape, np.uint8)


def rows_of(space, layout: ObservationLayout, count: int = 5) -> torch.Tensor:
    """Sampled observations `[1, count, width]`."""
    space.seed(3)
    return torch.from_numpy(np.stack([layout.encode(space.sample()) for _ in range(count)])).unsqueeze(0)


def conv(weights: dict[str, torch.Tensor], name: str, stride: int = 1, padding: int = 0) -> nn.Conv2d:
    weight = weights[f"{name}.weight"]
    layer = nn.Conv2d(weight.shape[1], weight.shape[0], weight.shape[2], stride, padding)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(weights[f"{name}.bias"])  # pyright: ignore[reportOptionalMemberAccess]
    return layer


def expected_features(kind: str, depth: int, weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """As anybody would write it, of images `[n, C, H, W]`."""
    relu, prefix = nn.ReLU(), "actor.encoder.image"
    if kind == "nature":
        for layer, stride in enumerate((4, 2, 1)):
            x = relu(conv(weights, f"{prefix}.{layer}", stride)(x))
    elif kind == "simple":
        for layer in range(depth):
            x = relu(conv(weights, f"{prefix}.{layer}", padding=1)(x))
    elif kind == "residual":
        x = conv(weights, f"{prefix}.0", padding=1)(x)
        for block in range(depth):
            inner = conv(weights, f"{prefix}.0.{block}.0", padding=1)(relu(x))
            x = x + conv(weights, f"{prefix}.0.{block}.1", padding=1)(relu(inner))
        x = relu(x)
    else:
        for stage in range(3):
            x = nn.MaxPool2d(3, 2, 1)(conv(weights, f"{prefix}.{stage}", padding=1)(x))
            for block in range(depth):
                inner = conv(weights, f"{prefix}.{stage}.{block}.0", padding=1)(relu(x))
                x = x + conv(weights, f"{prefix}.{stage}.{block}.1", padding=1)(relu(inner))
        x = relu(x)
    return relu(nn.functional.linear(x.flatten(1), weights[f"{prefix}.out.weight"], weights[f"{prefix}.out.bias"]))


CASES = [
    ("nature", (36, 40, 2), 2),
    ("nature", (3, 44, 44), 2),
    ("simple", (5, 6, 3), 1),
    ("simple", (7, 7), 3),
    ("impala", (9, 12, 3), 1),
    ("impala", (8, 8), 2),
    ("residual", (5, 6, 3), 1),
    ("residual", (7, 7), 3),
]


@pytest.mark.parametrize(("kind", "shape", "depth"), CASES)
def test_convolutions_are_those_of_torch_nn(kind, shape, depth):
    space, encoder = picture(*shape), ImageEncoder(kind, width=0.25, depth=depth)
    layout = observation_layout(space)
    net = PolicyNet(layout, actions_of(True, 2), (4,), image=encoder)
    weights, rows = random_parameters(net), rows_of(space, layout)
    weights = {name: 0.3 * w for name, w in weights.items()}
    ours = encode(layout, encoder, nets.expand(weights, 1), "actor", rows)
    observations = [layout.decode(row) for row in rows[0].numpy()]
    channels_last = np.stack(
        [o if layout.leaves[0].channels_first else np.atleast_3d(o).transpose(2, 0, 1) for o in observations]
    )
    expected = expected_features(kind, depth, weights, torch.from_numpy(channels_last).float() / 255)
    assert ours.shape == (1, 5, encoder.feature_size(layout))
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(ours[0], expected, rtol=1e-4, atol=1e-5 * scale)
    assert expected.std() > 0
    turned = expected_features(kind, depth, weights, torch.from_numpy(channels_last[..., ::-1].copy()).float() / 255)
    assert not torch.allclose(turned, expected, atol=1e-3 * scale)


def test_channels_first_and_last_are_the_same_picture():
    pixels = np.random.default_rng(0).integers(0, 256, (6, 7, 3), dtype=np.uint8)
    last, first = observation_layout(picture(6, 7, 3)), observation_layout(picture(3, 6, 7))
    rows = torch.from_numpy(last.encode(pixels)), torch.from_numpy(first.encode(pixels.transpose(2, 0, 1)))
    images = [image(layout.leaves[0], row) for layout, row in zip((last, first), rows, strict=True)]
    assert torch.equal(*images)
    assert images[0].shape == (3, 6, 7)
    assert float(images[0].max()) == pytest.approx(pixels.max() / 255)


def test_features_are_numbers_then_indices_then_images_without_the_mask():
    space = Dict(
        {"legal": MultiBinary(2), "dice": MultiDiscrete([3, 2], start=[1, 0]), "speed": SPEED, "eye": picture(5, 5)}
    )
    layout, encoder = observation_layout(space, "legal"), ImageEncoder(width=0.1)
    net = PolicyNet(layout, actions_of(True, 2), (4,), image=encoder)
    weights = nets.expand(random_parameters(net), 1)
    observation = {"legal": [1, 0], "dice": [3, 0], "speed": [0.5, -2.0], "eye": np.full((5, 5), 7, np.uint8)}
    row = torch.from_numpy(layout.encode(observation))[None, None]
    features = encode(layout, encoder, weights, "actor", row)[0, 0]
    assert len(features) == encoder.feature_size(layout) == 2 + 5 + 26
    assert features[:7].tolist() == [0.5, -2.0, 0, 0, 1, 1, 0]
    mask = action_mask(layout, row)
    assert mask is not None
    assert mask.tolist() == [[[True, False]]]
    other = torch.from_numpy(layout.encode(observation | {"legal": [0, 1]}))[None, None]
    assert torch.equal(encode(layout, encoder, weights, "actor", other)[0, 0], features)
    for changed in ({"dice": [2, 0]}, {"speed": [0.4, -2.0]}, {"eye": np.full((5, 5), 9, np.uint8)}):
        other = torch.from_numpy(layout.encode(observation | changed))[None, None]
        assert not torch.equal(encode(layout, encoder, weights, "actor", other)[0, 0], features), changed


@pytest.mark.parametrize("host", [{"cpu"}, set()], ids=["CPU", "accelerator"])
@pytest.mark.parametrize("choices", [[11, 6, 3] * 4, [3] * 4, [2, 4, 2]])
def test_choices_that_repeat_are_one_hot_vectors_one_after_another(choices, host, monkeypatch):
    monkeypatch.setattr(memory, "HOST", host)
    space = MultiDiscrete(choices)
    layout = observation_layout(space)
    rows = rows_of(space, layout)
    expected = [nn.functional.one_hot(rows[..., n].long(), count).float() for n, count in enumerate(choices)]
    if not host:  # it looks for indices that are none, and so waits for some devices
        monkeypatch.delattr(nn.functional, "one_hot")
    features = encode(layout, ImageEncoder(), {}, "actor", rows)
    assert torch.equal(features, torch.cat(expected, -1))
    assert not torch.equal(features[0, 0], features[0, 1])


def test_a_plain_row_is_its_own_features():
    layout, x = observation_layout(Dict({"a": SPEED, "b": MultiBinary(3)})), torch.randn(2, 4, 5, generator=seeded(0))
    assert encode(layout, ImageEncoder(), {}, "actor", x) is x


def test_what_auto_means_and_what_is_too_small():
    big, small = (observation_layout(picture(*shape)) for shape in ((36, 36, 1), (35, 99, 1)))
    assert ImageEncoder().resolved(big.leaves[0]) == "nature"
    assert ImageEncoder().resolved(small.leaves[0]) == "simple"
    ImageEncoder("nature").check(big)
    ImageEncoder("impala").check(small)
    with pytest.raises(ValueError) as caught:
        ImageEncoder("nature").check(small)
    assert str(caught.value) == (
        "network.image.kind: nature needs images of 36 x 36 pixels or more and the observation has 35 x 99; use "
        "simple, residual or impala"
    )


@pytest.mark.parametrize("kind", ["nature", "impala", "simple", "residual"])
def test_width_and_depth_scale_the_networks(kind):
    layout = observation_layout(Dict({"eye": picture(40, 40, 3)}))
    sizes = {}
    for width, depth in ((1.0, 2), (2.0, 2), (1.0, 3)):
        shapes = ImageEncoder(kind, width, depth).shapes(layout, "actor")
        assert all(name.startswith("actor.encoder.eye.") for name in shapes)
        sizes[width, depth] = sum(int(np.prod(shape)) for shape in shapes.values())
    assert sizes[2.0, 2] > 3 * sizes[1.0, 2]
    assert (sizes[1.0, 3] == sizes[1.0, 2]) == (kind == "nature")
    assert encoder_name("critic", replace(layout.leaves[0], name="a/b")) == "critic.encoder.a.b"


def test_shards_of_images_have_gradients_of_their_own():
    """One weight for several shards has one gradient: that would mix them, so each has its own, as if it were alone."""
    layout = observation_layout(picture(5, 5))
    net = PolicyNet(layout, actions_of(True, 2), (4,))
    rows = torch.randint(0, 256, (2, 3, layout.width), dtype=torch.uint8, generator=seeded(0))
    parameters = random_parameters(net)

    def gradients(part: torch.Tensor) -> list[torch.Tensor]:
        weights = {name: w.requires_grad_() for name, w in nets.expand(parameters, len(part)).items()}
        mine = [w for name, w in weights.items() if name.startswith("actor")]
        output = nets.actor(net, weights, part)
        assert output.shape == (len(part), 3, 2)
        return list(torch.autograd.grad(output.square().sum(), mine))

    both, one, other = gradients(rows), gradients(rows[:1]), gradients(rows[1:])
    for ours, *each in zip(both, one, other, strict=True):
        torch.testing.assert_close(ours, torch.cat(each), rtol=1e-4, atol=1e-4 * float(ours.abs().max()))
        assert not torch.allclose(*each, rtol=1e-2)


def test_runs_with_images_loop_over_shards():
    config, description = small_config(), replace(described(actions=2), observation=observation_layout(picture(5, 5)))
    assert choose_mode(small_state(config, description), config, alone(config)) == "loop"
    discrete = replace(described(actions=2), observation=observation_layout(Discrete(4)))
    assert choose_mode(small_state(config, discrete), config, alone(config)) == "batched"


def image_state(shared: bool, **image):
    config = small_config(num_steps=6, network={"hidden_sizes": (8,), "shared": shared, "image": image})
    layout = observation_layout(Dict({"eye": picture(6, 5, 3), "speed": SPEED}))
    return small_state(config, replace(described(actions=2), observation=layout)), layout


@pytest.mark.parametrize("shared", [False, True])
def test_a_rollout_of_images_is_evaluated_some_at_a_time(monkeypatch, shared):
    state, layout = image_state(shared, width=0.25)
    rows = rows_of(Dict({"eye": picture(6, 5, 3), "speed": SPEED}), layout, 14).view(2, 7, -1)
    actions = torch.tensor([[0, 1, 1, 0, 1, 0]] * 2)
    seen: list[int] = []
    right = nets.actor_critic

    def watched(net, weights, observations):
        seen.append(observations.shape[1])
        return right(net, weights, observations)

    monkeypatch.setattr(nets, "actor_critic", watched)
    with torch.no_grad():
        whole = state.policy.evaluate(rows, actions)
        monkeypatch.setattr(autograd, "IMAGES_AT_A_TIME", 4)
        parts = state.policy.evaluate(rows, actions)
    assert seen == [7, 2, 2, 2, 1]
    for part, expected, count in zip(parts, whole, (6, 7), strict=True):
        assert part.shape == (2, count)
        torch.testing.assert_close(part, expected, rtol=1e-5, atol=1e-6)
    assert whole[1].std() > 0


@pytest.mark.parametrize("kind", ["simple", "impala", "residual"])
def test_an_image_alone_has_the_features_that_it_has_among_others_and_with_gradients(kind):
    state, layout = image_state(False, kind=kind, width=0.25)
    rows = rows_of(Dict({"eye": picture(6, 5, 3), "speed": SPEED}), layout, 3)
    weights, encoder = state.parameters.expanded(1), state.net.image
    with torch.no_grad():
        alone_, among = (encode(layout, encoder, weights, "actor", x) for x in (rows[:, 1:2], rows))
        given = encode(layout, encoder, weights, "actor", rows, images_of(layout, rows))
    with_gradients = encode(layout, encoder, weights, "actor", rows[:, 1:2])
    assert alone_.shape == (1, 1, encoder.feature_size(layout))
    assert torch.equal(given, among)
    scale = float(among.abs().max())
    for other in (among[:, 1:2], with_gradients):
        torch.testing.assert_close(alone_, other, rtol=1e-4, atol=1e-5 * scale)
    assert not torch.allclose(alone_, among[:, :1], atol=1e-3 * scale)


def test_products_by_onednn_have_the_values_and_gradients_of_others(monkeypatch):
    state, layout = image_state(False, width=0.5)
    rows = rows_of(Dict({"eye": picture(6, 5, 3), "speed": SPEED}), layout, 9)
    found = []
    for available in (True, False):
        monkeypatch.setattr(encoders, "ONEDNN", available)
        weights = {name: w.requires_grad_() for name, w in nets.expand(state.parameters.views, 1).items()}
        features = encode(layout, state.net.image, weights, "actor", rows)
        mine = {name: w for name, w in weights.items() if name.startswith("actor.encoder")}
        found.append((features, *torch.autograd.grad(features.square().sum(), list(mine.values()))))
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
