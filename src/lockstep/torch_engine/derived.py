"""The PPO gradient of our multilayer perceptrons, derived by hand: what autograd gives, in a third of the time.

The same batched products over the leading shard axis as :mod:`lockstep.torch_engine.nets`, without a graph. Checked
against autograd in the tests; used where :func:`derivable` says so.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lockstep.torch_engine import nets
from lockstep.torch_engine.activations import derivative_from_output, fast_activation
from lockstep.torch_engine.losses import LossSettings
from lockstep.torch_engine.nets import Parameters, PolicyNet


def derivable(net: PolicyNet) -> bool:
    """Whether the activation's derivative is a function of its output, which is all that is kept."""
    return net.activation in derivative_from_output


class _Pass:
    """One network's forward pass with its hidden outputs, and its backward pass."""

    def __init__(self, net: PolicyNet, parameters: Parameters, name: str, layers: int) -> None:
        self._activate = fast_activation(net.activation)
        self._derive = derivative_from_output[net.activation]
        self._weights = [parameters[f"{name}.{layer}.weight"] for layer in range(layers)]
        self._biases = [parameters[f"{name}.{layer}.bias"] for layer in range(layers)]
        self._inputs: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """``[k, rows, in]`` to ``[k, rows, out]``."""
        last = len(self._weights) - 1
        for layer, (weight, bias) in enumerate(zip(self._weights, self._biases, strict=True)):
            self._inputs.append(x)
            x = nets.linear(x, weight, bias)
            if layer < last:
                x = self._activate(x)
        return x

    def backward(self, d: Tensor) -> list[Tensor]:
        """From the gradient of the output to those of each layer's weight and bias, flat ``[k, …]``, in order."""
        gradients: list[Tensor] = []
        for layer in range(len(self._weights) - 1, -1, -1):
            x = self._inputs[layer]
            gradients += [d.sum(1), _outer(d, x).flatten(1)]
            if layer:
                d = self._derive(_times(d, self._weights[layer]), x)
        return gradients[::-1]


def _outer(d: Tensor, x: Tensor) -> Tensor:
    """Weight gradient ``[k, out, in]`` of ``d`` ``[k, rows, out]`` and the layer's input ``[k, rows, in]``."""
    if d.shape[2] == 1:  # one column: elementwise, so that no kernel is chosen by the number of shards
        return (d * x).sum(1, keepdim=True)
    if x.shape[2] < d.shape[2]:  # few inputs: the product is faster the other way round
        return torch.bmm(x.transpose(1, 2), d).transpose(1, 2)
    return torch.bmm(d.transpose(1, 2), x)


def _times(d: Tensor, weight: Tensor) -> Tensor:
    """Gradient of a layer's input ``[k, rows, in]``."""
    return d * weight if d.shape[2] == 1 else torch.bmm(d, weight)


def _categorical(
    logits: Tensor, actions: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, Callable[[Tensor], tuple[Tensor, None]]]:
    log_probs = torch.log_softmax(logits, -1)
    probs = log_probs.exp()
    index = actions.unsqueeze(-1)
    chosen = log_probs.gather(-1, index).squeeze(-1)
    entropy = -(probs * log_probs).sum(-1)

    def back(d_chosen: Tensor) -> tuple[Tensor, None]:
        d = probs * -d_chosen.unsqueeze(-1)
        d.scatter_add_(-1, index, d_chosen.unsqueeze(-1))
        if settings.entropy_coef:
            d += (settings.entropy_coef / settings.count) * probs * (log_probs + entropy.unsqueeze(-1))
        return d, None

    return chosen, entropy, back


def _gaussian(
    mean: Tensor, log_std: Tensor, actions: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    inverse = torch.exp(-log_std)
    z = (actions - mean) * inverse
    squares = z * z
    chosen = (-0.5 * squares - log_std - 0.5 * nets.LOG_TWO_PI).sum(-1)
    entropy = (log_std + 0.5 * (1.0 + nets.LOG_TWO_PI)).sum(-1).expand_as(chosen)

    def back(d_chosen: Tensor) -> tuple[Tensor, Tensor]:
        d = d_chosen.unsqueeze(-1)
        d_log_std = (d * (squares - 1.0)).sum(1) - settings.entropy_coef * mean.shape[1] / settings.count
        return d * z * inverse, d_log_std

    return chosen, entropy, back


def _policy_loss(log_ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Gradient with respect to the log-probability, the loss per sample, and [kl, clipped] per sample."""
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1.0 - settings.clip_range, 1.0 + settings.clip_range)
    plain, limited = -advantages * ratio, -advantages * clipped
    gradient = torch.where(plain >= limited, plain, 0.0) / settings.count
    outside = ((ratio - 1.0).abs() > settings.clip_range).to(ratio.dtype)
    return gradient, torch.maximum(plain, limited), [torch.expm1(log_ratio) - log_ratio, outside]


def _value_loss(values: Tensor, old: Tensor, returns: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    """Gradient with respect to the value, and the loss per sample."""
    error = values - returns
    squared, gradient = error * error, error
    if settings.value_clip_range is not None:
        limit, change = settings.value_clip_range, values - old
        clipped = (old + change.clamp(-limit, limit) - returns).square()
        gradient = torch.where((squared >= clipped) | (change.abs() <= limit), error, 0.0)
        squared = torch.maximum(squared, clipped)
    return gradient * (settings.value_coef / settings.count), 0.5 * squared


@torch.no_grad()
def ppo_gradients(
    net: PolicyNet,
    parameters: Parameters,
    settings: LossSettings,
    observations: Tensor,
    actions: Tensor,
    log_probs: Tensor,
    values: Tensor,
    advantages: Tensor,
    returns: Tensor,
) -> Tensor:
    """Each shard's gradient and loss terms ``[k, P + 5]``, of a minibatch ``[k, rows, …]``.

    Args:
        net: shapes; its activation must be :func:`derivable`.
        parameters: expanded weights ``[k, out, in]`` and biases ``[k, out]`` by name.
        settings: coefficients and the global count.
        observations: what the minibatch holds, as :func:`lockstep.torch_engine.losses.ppo_terms` takes it.
        actions: see there.
        log_probs: see there.
        values: see there.
        advantages: see there.
        returns: see there.
    """
    actor = _Pass(net, parameters, "actor", len(net.actor_sizes) - 1)
    critic = _Pass(net, parameters, "critic", len(net.critic_sizes) - 1)
    output, new_values = actor.forward(observations), critic.forward(observations)
    if net.discrete:
        chosen, entropy, back = _categorical(output, actions, settings)
    else:
        chosen, entropy, back = _gaussian(output, parameters["log_std"].unsqueeze(1), actions, settings)
    d_chosen, policy, rest = _policy_loss(chosen - log_probs, advantages, settings)
    d_value, value = _value_loss(new_values[..., 0], values, returns, settings)
    d_output, d_log_std = back(d_chosen)
    gradients = actor.backward(d_output) + critic.backward(d_value.unsqueeze(-1))
    if d_log_std is not None:
        gradients.append(d_log_std)
    terms = torch.stack([policy, value, entropy, *rest], 1).sum(-1) / settings.count
    return torch.cat([*gradients, terms], 1)
