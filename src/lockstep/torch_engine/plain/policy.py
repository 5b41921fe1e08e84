"""Plain policies on a CPU: two multilayer perceptrons with a gradient derived by hand, in NumPy.

At common sizes most of PyTorch's time goes into calling its operations; NumPy's cost a fraction, and its products run
once a shard by construction. The parameters are the same memory. The tests hold it to autograd.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.training.losses import LossSettings

Layers = list[tuple[np.ndarray, np.ndarray]]

LOG_TWO_PI = math.log(2.0 * math.pi)
FEW_COLUMNS = 8


def _tanh(x: np.ndarray) -> np.ndarray:
    return np.tanh(x, out=x)


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0, out=x)


def _tanh_back(d: np.ndarray, h: np.ndarray) -> np.ndarray:
    slope = h * h
    np.subtract(1.0, slope, out=slope)
    return np.multiply(d, slope, out=d)


def _relu_back(d: np.ndarray, h: np.ndarray) -> np.ndarray:
    return np.multiply(d, h > 0.0, out=d)


def _elu(x: np.ndarray) -> np.ndarray:
    return np.where(x > 0.0, x, np.expm1(np.minimum(x, 0.0)))


def _elu_back(d: np.ndarray, h: np.ndarray) -> np.ndarray:
    return np.multiply(d, np.where(h > 0.0, 1.0, h + 1.0), out=d)


ACTIVATIONS: dict[str, tuple[Callable[..., np.ndarray], Callable[..., np.ndarray]]] = {
    "tanh": (_tanh, _tanh_back),
    "relu": (_relu, _relu_back),
    "elu": (_elu, _elu_back),
}
"""By name: the activation, and its derivative as a function of its output; both may work in place."""


def derivable(net: PolicyNet) -> bool:
    """Tells whether the networks are plain, with an activation whose derivative is a function of its output."""
    return net.plain and net.activation in ACTIVATIONS


def sum_columns(x: np.ndarray) -> np.ndarray:
    """Sums over a short last axis, column by column."""
    if x.shape[-1] > FEW_COLUMNS:
        return x.sum(-1)
    total = x[..., 0].copy()
    for column in range(1, x.shape[-1]):
        total += x[..., column]
    return total


def _max_columns(x: np.ndarray) -> np.ndarray:
    if x.shape[-1] > FEW_COLUMNS:
        return x.max(-1)
    largest = x[..., 0]
    for column in range(1, x.shape[-1]):
        largest = np.maximum(largest, x[..., column])
    return largest


class PlainPolicy:
    """Computes the numbers of a :func:`derivable` policy on shards, in the dtype of its parameters.

    Those are ``[out, in]`` and ``[out]`` by name, and may be changed from outside between calls.
    """

    def __init__(self, net: PolicyNet, parameters: Mapping[str, np.ndarray]) -> None:
        self.net = net
        self._activate, self._derive = ACTIVATIONS[net.activation]
        self._actor, self._critic = (
            [
                (parameters[f"{name}.{layer}.weight"], parameters[f"{name}.{layer}.bias"])
                for layer in range(len(net.sizes(name)) - 1)
            ]
            for name in ("actor", "critic")
        )
        self._log_std = parameters.get("log_std")
        self._size = sum(p.size for p in parameters.values())
        self._dtype = self._actor[0][0].dtype
        self._ones: dict[int, np.ndarray] = {}
        self._buffers: dict[int, np.ndarray] = {}

    def _forward(self, layers: Layers, x: np.ndarray, kept: list[np.ndarray] | None = None) -> np.ndarray:
        """Applies a network: ``[k, rows, in]`` to ``[k, rows, out]``; each layer's input is appended to ``kept``."""
        last = len(layers) - 1
        for layer, (weight, bias) in enumerate(layers):
            if kept is not None:
                kept.append(x)
            x = np.matmul(x, weight.T)
            x += bias
            if layer < last:
                x = self._activate(x)
        return x

    def output(self, observations: np.ndarray) -> np.ndarray:
        """Computes logits or means ``[k, rows, action outputs]``."""
        return self._forward(self._actor, observations)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Samples actions of observations ``[k, rows, size]`` and noise ``[k, rows, action outputs]``."""
        output = self.output(observations)
        if self.net.discrete:
            output += noise
            return output.argmax(-1)
        assert self._log_std is not None
        return output + np.exp(self._log_std) * noise

    def values(self, observations: np.ndarray) -> np.ndarray:
        """Computes values ``[k, rows]`` of observations ``[k, rows, size]``."""
        return self._forward(self._critic, observations)[..., 0]

    def log_probs(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Computes log-probabilities ``[k, rows]`` of actions."""
        output = self._forward(self._actor, observations)
        if self.net.discrete:
            log_probs = _log_softmax(output)[0]
            return log_probs.reshape(-1).take(_flat_index(output, actions)).reshape(actions.shape)
        return self._gaussian_log_prob(output, actions)[0]

    def _gaussian_log_prob(self, mean: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Computes log-probability ``[k, rows]``, standardised actions, and one over the standard deviation."""
        assert self._log_std is not None
        inverse = np.exp(-self._log_std)
        z = (actions - mean) * inverse
        return sum_columns(-0.5 * (z * z) - self._log_std - 0.5 * LOG_TWO_PI), z, inverse

    @np.errstate(all="ignore")  # what isn't finite ends the update, with a line of its own
    def gradients(self, columns: Mapping[str, np.ndarray], settings: LossSettings) -> np.ndarray:
        """Computes each shard's gradient and loss terms ``[k, P + 5]``, parameters in the order of ``net.shapes()``.

        The columns ``[k, rows, …]`` are observations, actions, log_probs, values, advantages and returns; and valid,
        1.0 where a sample counts, unless all do. With several shards the memory is used again by the next call.
        """
        observations, actions = columns["observations"], columns["actions"]
        k, rows = observations.shape[:2]
        out = self._buffer(k)
        inputs: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        output = self._forward(self._actor, observations, inputs[0])
        values = self._forward(self._critic, observations, inputs[1])[..., 0]
        terms = np.empty((k, 5, rows), self._dtype)
        head = self._categorical if self.net.discrete else self._gaussian
        chosen, back = head(output, actions, settings, terms[:, 2])
        d_chosen = _policy_loss(chosen - columns["log_probs"], columns["advantages"], settings, terms)
        d_value = _value_loss(values, columns["values"], columns["returns"], settings, terms[:, 1])
        valid = columns.get("valid")
        if valid is not None:
            d_chosen, d_value = d_chosen * valid, d_value * valid
            terms *= valid[:, None]
        d_output = back(d_chosen, out, valid)
        position = self._backward(self._actor, inputs[0], d_output, out, 0)
        self._backward(self._critic, inputs[1], d_value[..., None], out, position)
        np.divide(terms.sum(-1), settings.count, out=out[:, self._size :])
        return out

    def _buffer(self, k: int) -> np.ndarray:
        if k == 1:
            return np.empty((1, self._size + 5), self._dtype)
        return self._buffers.setdefault(k, np.empty((k, self._size + 5), self._dtype))

    def _backward(self, layers: Layers, inputs: list[np.ndarray], d: np.ndarray, out: np.ndarray, position: int) -> int:
        """Writes the gradients of a network's layers into ``out`` from column ``position``; returns the next one."""
        starts = list(itertools.accumulate((w.size + b.size for w, b in layers), initial=position))
        ones = self._ones.setdefault(d.shape[1], np.ones((1, d.shape[1]), self._dtype))
        for layer in range(len(layers) - 1, -1, -1):
            (weight, bias), x, at = layers[layer], inputs[layer], starts[layer]
            block = out[:, at : at + weight.size].reshape(len(out), *weight.shape)
            np.matmul(d.transpose(0, 2, 1), x, out=block)
            np.matmul(ones, d, out=out[:, None, at + weight.size : at + weight.size + bias.size])
            if layer:  # a product over a single column is faster as a multiplication
                d = self._derive(d * weight[0] if len(weight) == 1 else np.matmul(d, weight), x)
        return starts[-1]

    def _categorical(
        self, logits: np.ndarray, actions: np.ndarray, settings: LossSettings, entropy: np.ndarray
    ) -> tuple[np.ndarray, Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]]:
        """Computes log-probabilities and how the gradient comes back through them; fills ``entropy`` ``[k, rows]``."""
        log_probs, probs = _log_softmax(logits)
        index = _flat_index(logits, actions)
        own_entropy = -sum_columns(probs * log_probs)
        entropy[...] = own_entropy

        def back(d_chosen: np.ndarray, _: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
            d = probs * -d_chosen[..., None]
            d.reshape(-1)[index] += d_chosen.reshape(-1)
            if settings.entropy_coef:
                weight = settings.entropy_coef / settings.count
                scale = weight if valid is None else (weight * valid)[..., None]
                d += scale * probs * (log_probs + own_entropy[..., None])
            return d

        return log_probs.reshape(-1).take(index).reshape(actions.shape), back

    def _gaussian(
        self, mean: np.ndarray, actions: np.ndarray, settings: LossSettings, entropy: np.ndarray
    ) -> tuple[np.ndarray, Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]]:
        """Does what :meth:`_categorical` does; the way back also writes the gradient of log_std."""
        chosen, z, inverse = self._gaussian_log_prob(mean, actions)
        assert self._log_std is not None
        entropy[...] = (self._log_std + 0.5 * (1.0 + LOG_TWO_PI)).sum()

        def back(d_chosen: np.ndarray, out: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
            d = d_chosen[..., None]
            d_log_std = out[:, self._size - mean.shape[2] : self._size]
            np.sum(d * (z * z - 1.0), axis=1, out=d_log_std)
            rows = mean.shape[1] if valid is None else valid.sum(1, keepdims=True)
            d_log_std -= settings.entropy_coef * rows / settings.count
            return d * z * inverse

        return chosen, back


def _log_softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes log-probabilities and probabilities ``[k, rows, choices]``."""
    shifted = logits - _max_columns(logits)[..., None]
    powers = np.exp(shifted)
    total = sum_columns(powers)[..., None]
    return shifted - np.log(total), powers / total


def _flat_index(logits: np.ndarray, actions: np.ndarray) -> np.ndarray:
    """Finds where each action's logit lies in the flattened logits."""
    return np.arange(0, logits.size, logits.shape[-1]) + actions.reshape(-1)


def _policy_loss(
    log_ratio: np.ndarray, advantages: np.ndarray, settings: LossSettings, terms: np.ndarray
) -> np.ndarray:
    """Computes the gradient with respect to the log-probability ``[k, rows]``; fills three terms: loss, KL, clipped."""
    ratio = np.exp(log_ratio)
    plain = -advantages * ratio
    limited = -advantages * np.clip(ratio, 1.0 - settings.clip_range, 1.0 + settings.clip_range)
    np.maximum(plain, limited, out=terms[:, 0])
    np.subtract(np.expm1(log_ratio), log_ratio, out=terms[:, 3])
    terms[:, 4] = np.abs(ratio - 1.0) > settings.clip_range
    return np.where(plain >= limited, plain, 0.0) / settings.count


def _value_loss(
    values: np.ndarray, old: np.ndarray, returns: np.ndarray, settings: LossSettings, term: np.ndarray
) -> np.ndarray:
    """Computes the gradient with respect to the value ``[k, rows]``; fills ``term`` with the loss per sample."""
    error = values - returns
    squared, gradient = error * error, error
    if settings.value_clip_range is not None:
        limit, change = settings.value_clip_range, values - old
        clipped = np.square(old + np.clip(change, -limit, limit) - returns)
        gradient = np.where((squared >= clipped) | (np.abs(change) <= limit), error, 0.0)
        squared = np.maximum(squared, clipped)
    np.multiply(squared, 0.5, out=term)
    return gradient * (settings.value_coef / settings.count)
