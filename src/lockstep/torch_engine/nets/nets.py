"""Actor and critic networks as functions of named parameters with a leading shard axis.

A parameter is ``[out, in]`` or ``[out]`` in a checkpoint. Here each layer is one batched matrix product over shards:
weights ``[k, out, in]``, inputs ``[k, rows, in]``. With weights expanded over the ``k`` shards that a rank owns,
autograd returns one gradient per shard, and a shard's numbers don't depend on ``k`` (``docs/design.md``; checked at the
start by :mod:`lockstep.torch_engine.setup.self_check`).

A network is encoder → recurrent core → hidden layers → head, without the parts that a config doesn't ask for. Actor and
critic are two networks, or share all parts except the head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from lockstep.networks.spec import MASKED_LOGIT, PolicyNet
from lockstep.torch_engine.nets import recurrent
from lockstep.torch_engine.nets.activations import ACTIVATIONS, fast_activation
from lockstep.torch_engine.nets.autocast import autocast
from lockstep.torch_engine.nets.encoders import action_mask, encode, images_of
from lockstep.torch_engine.nets.row_sums import over_rows

Parameters = Mapping[str, Tensor]
Images = Mapping[str, Tensor]
"""Images of observations by their leaves' names, ``[k, rows, C, H, W]``; :func:`.encoders.images_of` makes them."""

Function = TypeVar("Function", bound=Callable[..., Any])


def expand(parameters: Parameters, num_shards: int) -> dict[str, Tensor]:
    """Adds a leading shard axis to parameters: ``[k, …]``, in which every shard has the same memory."""
    return {name: p.expand(num_shards, *p.shape) for name, p in parameters.items()}


def _in_precision(function: Function) -> Function:
    """Runs a network under autocast if its precision asks for it; parameters, inputs, heads and outputs are float32.

    The outputs of a custom network are converted to float32.
    """

    @functools.wraps(function)
    def run(net: PolicyNet, parameters: Parameters, observations: Tensor, *rest: Any, **options: Any) -> Any:
        if not net.bf16:
            return function(net, parameters, observations, *rest, **options)
        with autocast(observations.device):
            result = function(net, parameters, observations, *rest, **options)
        if isinstance(result, Tensor):
            return result.float()
        return tuple(None if x is None else x.float() for x in result)

    return run  # pyright: ignore[reportReturnType]


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Applies one layer: ``[k, rows, in]``, weights ``[k, out, in]`` and biases ``[k, out]`` to ``[k, rows, out]``."""
    if weight.shape[1] == 1:  # a batched product with one output column rounds differently for one shard than for two
        weight, bias = functional.pad(weight, (0, 0, 0, 1)), functional.pad(bias, (0, 1))
        return torch.baddbmm(over_rows(bias, x.shape[1]), x, weight.transpose(1, 2))[..., :1]
    return torch.baddbmm(over_rows(bias, x.shape[1]), x, weight.transpose(1, 2))


def mlp(
    x: Tensor, parameters: Parameters, name: str, layers: int, activate: Callable[[Tensor], Tensor], activate_last: bool
) -> Tensor:
    """Applies a multilayer perceptron: ``[k, rows, in]`` to ``[k, rows, out]`` with expanded parameters."""
    for layer in range(layers):
        x = linear(x, parameters[f"{name}.{layer}.weight"], parameters[f"{name}.{layer}.bias"])
        if activate_last or layer < layers - 1:
            x = activate(x)
    return x


def _layers(net: PolicyNet, parameters: Parameters, name: str, x: Tensor) -> Tensor:
    """Applies a trunk's layers, or an actor's or critic's, whose last one, the head, is float32 at any precision."""
    layers, graph = len(net.sizes(name)) - 1, net.traceable or torch.is_grad_enabled()
    activate = ACTIVATIONS[net.activation] if graph else fast_activation(net.activation)
    if name == "trunk" or not net.bf16:
        return mlp(x, parameters, name, layers, activate, name == "trunk")
    x, head = mlp(x, parameters, name, layers - 1, activate, True), f"{name}.{layers - 1}"
    with autocast(x.device, enabled=False):
        return linear(x.float(), parameters[f"{head}.weight"], parameters[f"{head}.bias"])


def _masked(net: PolicyNet, observations: Tensor, output: Tensor) -> Tensor:
    mask = action_mask(net.observation, observations)
    return output if mask is None else torch.where(mask, output, MASKED_LOGIT)


@_in_precision
def actor(net: PolicyNet, parameters: Parameters, observations: Tensor, images: Images | None = None) -> Tensor:
    """Computes the actor's output ``[k, rows, outputs]`` of rows ``[k, rows, width]``; forbidden logits are -1e8."""
    if net.custom is not None:
        return _masked(net, observations, net.custom(parameters, net.observation, observations)[0])
    trunk = net.trunks[0]
    x = encode(net.observation, net.image, parameters, trunk, observations, images)
    if net.shared:
        x = _layers(net, parameters, trunk, x)
    return _masked(net, observations, _layers(net, parameters, "actor", x))


@_in_precision
def critic(net: PolicyNet, parameters: Parameters, observations: Tensor, images: Images | None = None) -> Tensor:
    """Computes values ``[k, rows]`` of observation rows ``[k, rows, width]``."""
    if net.custom is not None:
        return net.custom(parameters, net.observation, observations)[1]
    trunk = net.trunks[-1]
    x = encode(net.observation, net.image, parameters, trunk, observations, images)
    if net.shared:
        x = _layers(net, parameters, trunk, x)
    return _layers(net, parameters, "critic", x)[..., 0]


@_in_precision
def actor_critic(net: PolicyNet, parameters: Parameters, observations: Tensor) -> tuple[Tensor, Tensor | None]:
    """Computes the actor's output ``[k, rows, outputs]`` and the values ``[k, rows]`` (None without a critic)."""
    if net.custom is not None:
        output, values = net.custom(parameters, net.observation, observations)
        return _masked(net, observations, output), values if net.critic else None
    if not net.shared:
        images = images_of(net.observation, observations)
        output = actor(net, parameters, observations, images)
        return output, critic(net, parameters, observations, images) if net.critic else None
    x = encode(net.observation, net.image, parameters, "trunk", observations)
    return _heads(net, parameters, observations, [_layers(net, parameters, "trunk", x)])


def _heads(
    net: PolicyNet, parameters: Parameters, observations: Tensor, features: list[Tensor]
) -> tuple[Tensor, Tensor | None]:
    """Applies both heads to the features of their trunks ``[k, rows, …]``."""
    output = _masked(net, observations, _layers(net, parameters, "actor", features[0]))
    return output, _layers(net, parameters, "critic", features[-1])[..., 0] if net.critic else None


@_in_precision
def unroll(
    net: PolicyNet,
    parameters: Parameters,
    observations: Tensor,
    recurrent_state: Tensor,
    resets: Tensor,
    actor_only: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Runs recurrent networks over sequences.

    Args:
        net: with a recurrent core.
        parameters: expanded.
        observations: rows ``[k, steps, n, width]``.
        recurrent_state: before the first step, ``[k, n, size]``.
        resets: 1.0 where an episode begins with this step, ``[k, steps, n]``: nothing is carried into it.
        actor_only: whether to leave the critic out; the state of a core of its own then stays what it was.

    Returns:
        The actor's output ``[k, steps, n, outputs]``, values ``[k, steps, n]`` or None, and recurrent states after each
        step ``[k, steps, n, size]``.
    """
    k, steps, n, _ = observations.shape
    rows = observations.flatten(1, 2)
    width = net.state_size // len(net.trunks)
    features: list[Tensor] = []
    states: list[Tensor] = []
    images = images_of(net.observation, rows)
    for number, trunk in enumerate(net.trunks):
        part = recurrent_state[..., number * width : (number + 1) * width]
        if actor_only and trunk == "critic":
            states.append(part.unsqueeze(1).expand(k, steps, n, width))
            continue
        x = encode(net.observation, net.image, parameters, trunk, rows, images).view(k, steps, n, -1)
        outputs, carried = recurrent.unroll(net.core, parameters, trunk, x, part, resets)
        x = outputs.flatten(1, 2)
        features.append(_layers(net, parameters, trunk, x) if net.shared else x)
        states.append(carried)
    if actor_only:
        output, values = _masked(net, rows, _layers(net, parameters, "actor", features[0])), None
    else:
        output, values = _heads(net, parameters, rows, features)
    shaped = None if values is None else values.view(k, steps, n)
    return output.view(k, steps, n, -1), shaped, torch.cat(states, -1)
