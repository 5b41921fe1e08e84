"""Actor and critic networks as functions of named parameters with a leading shard axis.

A parameter is ``[out, in]`` or ``[out]`` in a checkpoint. Here each layer is one batched matrix product over shards:
weights ``[k, out, in]``, inputs ``[k, rows, in]``. With weights expanded over the ``k`` shards that a rank owns,
autograd returns one gradient per shard, and a shard's numbers don't depend on ``k`` (DESIGN: Reductions; checked at
start by :mod:`lockstep.torch_engine.self_check`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.torch_engine.activations import ACTIVATIONS, fast_activation

Parameters = Mapping[str, Tensor]

LOG_TWO_PI = math.log(2.0 * math.pi)


@dataclass(frozen=True)
class PolicyNet:
    """Shapes of an actor and a critic.

    Attributes:
        observation_size: components of an observation.
        num_actions: discrete actions, or components of a continuous one.
        discrete: categorical (else diagonal Gaussian with a state-independent standard deviation).
        hidden_sizes: units of the hidden layers.
        activation: name of the activation.
    """

    observation_size: int
    num_actions: int
    discrete: bool
    hidden_sizes: tuple[int, ...]
    activation: str

    @property
    def actor_sizes(self) -> tuple[int, ...]:
        """Units of every layer of the actor, input and output included."""
        return (self.observation_size, *self.hidden_sizes, self.num_actions)

    @property
    def critic_sizes(self) -> tuple[int, ...]:
        """Units of every layer of the critic, input and output included."""
        return (self.observation_size, *self.hidden_sizes, 1)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, in the order in which they are stored."""
        out: dict[str, tuple[int, ...]] = {}
        for name, sizes in (("actor", self.actor_sizes), ("critic", self.critic_sizes)):
            for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
                out[f"{name}.{layer}.weight"] = (outputs, inputs)
                out[f"{name}.{layer}.bias"] = (outputs,)
        if not self.discrete:
            out["log_std"] = (self.num_actions,)
        return out


def expand(parameters: Parameters, num_shards: int) -> dict[str, Tensor]:
    """Parameters with a leading shard axis: ``[k, …]``, every shard the same memory."""
    return {name: p.expand(num_shards, *p.shape) for name, p in parameters.items()}


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One layer: ``[k, rows, in]``, weights ``[k, out, in]`` and biases ``[k, out]`` to ``[k, rows, out]``."""
    if weight.shape[1] == 1:  # a batched product with one output column rounds differently for one shard than for two
        weight, bias = functional.pad(weight, (0, 0, 0, 1)), functional.pad(bias, (0, 1))
        return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))[..., :1]
    return torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2))


def mlp(x: Tensor, parameters: Parameters, name: str, layers: int, activation: str) -> Tensor:
    """A multilayer perceptron: ``[k, rows, in]`` to ``[k, rows, out]`` with expanded parameters."""
    activate = ACTIVATIONS[activation] if torch.is_grad_enabled() else fast_activation(activation)
    for layer in range(layers):
        x = linear(x, parameters[f"{name}.{layer}.weight"], parameters[f"{name}.{layer}.bias"])
        if layer < layers - 1:
            x = activate(x)
    return x


def actor(net: PolicyNet, parameters: Parameters, observations: Tensor) -> Tensor:
    """Logits or means ``[k, rows, num_actions]`` of observations ``[k, rows, size]``."""
    return mlp(observations, parameters, "actor", len(net.actor_sizes) - 1, net.activation)


def critic(net: PolicyNet, parameters: Parameters, observations: Tensor) -> Tensor:
    """Values ``[k, rows]`` of observations ``[k, rows, size]``."""
    return mlp(observations, parameters, "critic", len(net.critic_sizes) - 1, net.activation)[..., 0]


def sample(net: PolicyNet, parameters: Parameters, output: Tensor, noise: Tensor) -> Tensor:
    """Actions from the actor's output and noise drawn beforehand.

    Args:
        net: shapes.
        parameters: expanded parameters.
        output: ``[k, rows, num_actions]``.
        noise: the same shape; Gumbel noise (discrete, the Gumbel-max trick) or standard normal (continuous).

    Returns:
        int64 ``[k, rows]`` or float32 ``[k, rows, num_actions]``.
    """
    if net.discrete:
        return (output + noise).argmax(-1)
    return output + parameters["log_std"].exp().unsqueeze(1) * noise


def mode(net: PolicyNet, output: Tensor) -> Tensor:
    """The most likely actions, shaped as :func:`sample`'s."""
    return output.argmax(-1) if net.discrete else output


def log_prob_and_entropy(
    net: PolicyNet, parameters: Parameters, output: Tensor, actions: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy, each ``[k, rows]``, of actions shaped as :func:`sample`'s."""
    if net.discrete:
        log_probs = torch.log_softmax(output, -1)
        chosen = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)
    log_std = parameters["log_std"].unsqueeze(1)
    z = (actions - output) * torch.exp(-log_std)
    log_prob = (-0.5 * z * z - log_std - 0.5 * LOG_TWO_PI).sum(-1)
    entropy = (log_std + 0.5 * (1.0 + LOG_TWO_PI)).sum(-1)
    return log_prob, entropy.expand_as(log_prob)


class PolicyModule(nn.Module):
    """The networks as a module, for DDP: every gradient-producing pass goes through its ``forward``."""

    def __init__(self, net: PolicyNet, parameters: Parameters) -> None:
        super().__init__()
        self.net = net
        self._names = {name: name.replace(".", "_") for name in parameters}
        for name, value in parameters.items():
            self.register_parameter(self._names[name], nn.Parameter(value))

    def forward(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities, entropies and values, each ``[rows]``, of ``[rows, …]``."""
        parameters = expand({name: getattr(self, flat) for name, flat in self._names.items()}, 1)
        rows = observations.unsqueeze(0)
        output = actor(self.net, parameters, rows)
        log_prob, entropy = log_prob_and_entropy(self.net, parameters, output, actions.unsqueeze(0))
        return log_prob[0], entropy[0], critic(self.net, parameters, rows)[0]
