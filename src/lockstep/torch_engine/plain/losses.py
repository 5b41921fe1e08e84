"""Action distributions and losses of plain policies, with their gradients by hand, in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.training.losses import TERMS, LossSettings

LOG_TWO_PI = math.log(2.0 * math.pi)
FEW_COLUMNS = 8

Back = Callable[[np.ndarray, np.ndarray, np.ndarray | None], np.ndarray]
"""Computes the gradient of the output from that of log-probabilities, the place of log_std's, and valid samples."""


def sum_columns(x: np.ndarray) -> np.ndarray:
    """Sums over a short last axis, column by column."""
    if x.shape[-1] > FEW_COLUMNS:
        return x.sum(-1)
    total = x[..., 0].copy()
    for column in range(1, x.shape[-1]):
        total += x[..., column]
    return total


class ActionHead:
    """Makes a categorical or a diagonal Gaussian from an actor's output ``[k, rows, action outputs]``.

    ``log_std`` ``[action outputs]`` is a Gaussian's parameter, and may be changed from outside between calls.
    """

    def __init__(self, net: PolicyNet, log_std: np.ndarray | None) -> None:
        self._discrete, self._log_std = net.discrete, log_std

    def sample(self, output: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Samples actions with Gumbel or normal noise of the output's shape; may overwrite the output."""
        if self._discrete:
            output += noise
            return output.argmax(-1)
        assert self._log_std is not None
        return output + np.exp(self._log_std) * noise

    def log_probs(self, output: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Computes log-probabilities ``[k, rows]`` of actions."""
        if self._discrete:
            return _chosen(_log_softmax(output)[0], _flat_index(actions))
        return self._gaussian_log_prob(output, actions)[0]

    def _gaussian_log_prob(self, mean: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Computes log-probability ``[k, rows]``, standardised actions, and one over the standard deviation."""
        assert self._log_std is not None
        inverse = np.exp(-self._log_std)
        z = (actions - mean) * inverse
        return sum_columns(-0.5 * (z * z) - self._log_std - 0.5 * LOG_TWO_PI), z, inverse

    def loss(
        self,
        output: np.ndarray,
        values: np.ndarray,
        columns: Mapping[str, np.ndarray],
        settings: LossSettings,
        out: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes the gradients of the output and of the values ``[k, rows]``.

        The columns ``[k, rows, …]`` are actions, log_probs, values, advantages and returns, and valid, 1.0 where a
        sample counts, unless all do. The gradient of log_std, if there is one, and the loss terms go into the last
        columns of ``out``. The loss is that of :func:`lockstep.torch_engine.losses.loss_and_terms`, whose gradient
        autograd computes: a change of one must be made in both.
        """
        size = out.shape[1] - len(TERMS)
        terms = np.empty((*values.shape[:1], len(TERMS), values.shape[1]), out.dtype)
        head = self._categorical if self._discrete else self._gaussian
        chosen, back = head(output, columns["actions"], settings, terms[:, 2])
        d_chosen = _policy_loss(chosen - columns["log_probs"], columns["advantages"], settings, terms)
        d_values = _value_loss(values, columns["values"], columns["returns"], settings, terms[:, 1])
        valid = columns.get("valid")
        if valid is not None:
            d_chosen, d_values = d_chosen * valid, d_values * valid
            terms *= valid[:, None]
        d_output = back(d_chosen, out[:, size - output.shape[2] : size], valid)
        np.divide(terms.sum(-1), settings.count, out=out[:, size:])
        return d_output, d_values

    def _categorical(
        self, logits: np.ndarray, actions: np.ndarray, settings: LossSettings, entropy: np.ndarray
    ) -> tuple[np.ndarray, Back]:
        """Computes log-probabilities, and a function of the gradient through them; fills ``entropy`` ``[k, rows]``."""
        log_probs, probs = _log_softmax(logits)
        index = _flat_index(actions)
        own_entropy = -_sum_choices(probs * log_probs)
        entropy[...] = own_entropy

        def back(d_chosen: np.ndarray, _: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
            d = probs * -d_chosen
            d.reshape(-1)[index] += d_chosen.reshape(-1)
            if settings.entropy_coef:
                weight = settings.entropy_coef / settings.count
                d += (weight if valid is None else weight * valid) * probs * (log_probs + own_entropy)
            return d.transpose(1, 2, 0).copy()

        return _chosen(log_probs, index), back

    def _gaussian(
        self, mean: np.ndarray, actions: np.ndarray, settings: LossSettings, entropy: np.ndarray
    ) -> tuple[np.ndarray, Back]:
        """Does what :meth:`_categorical` does; its function also writes the gradient of log_std."""
        chosen, z, inverse = self._gaussian_log_prob(mean, actions)
        assert self._log_std is not None
        entropy[...] = (self._log_std + 0.5 * (1.0 + LOG_TWO_PI)).sum()

        def back(d_chosen: np.ndarray, d_log_std: np.ndarray, valid: np.ndarray | None) -> np.ndarray:
            d = d_chosen[..., None]
            np.add.reduce(d * (z * z - 1.0), axis=1, out=d_log_std)
            rows = mean.shape[1] if valid is None else valid.sum(1, keepdims=True)
            d_log_std -= settings.entropy_coef * rows / settings.count
            return d * z * inverse

        return chosen, back


def _sum_choices(x: np.ndarray) -> np.ndarray:
    """Sums ``[choices, k, rows]`` over the choices, in the order of :func:`sum_columns`."""
    if len(x) > FEW_COLUMNS:
        return x.transpose(1, 2, 0).copy().sum(-1)
    total = x[0].copy()
    for choice in x[1:]:
        total += choice
    return total


def _log_softmax(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes log-probabilities and probabilities ``[choices, k, rows]`` of logits ``[k, rows, choices]``.

    NumPy goes through arrays by their last axis, and takes long if it is short.
    """
    by_choice = logits.transpose(2, 0, 1).copy()
    shifted = by_choice - by_choice.max(0)
    powers = np.exp(shifted)
    total = _sum_choices(powers)
    return shifted - np.log(total), powers / total


def _flat_index(actions: np.ndarray) -> np.ndarray:
    """Returns where the number of each action ``[k, rows]`` lies in flattened ``[choices, k, rows]``."""
    return np.arange(actions.size) + actions.reshape(-1) * actions.size


def _chosen(x: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Takes the numbers ``[k, rows]`` of the actions from ``[choices, k, rows]``."""
    return x.reshape(-1).take(index).reshape(x.shape[1:])


def _policy_loss(
    log_ratio: np.ndarray, advantages: np.ndarray, settings: LossSettings, terms: np.ndarray
) -> np.ndarray:
    """Computes the gradient with respect to the log-probability ``[k, rows]``; fills three terms: loss, KL, clipped."""
    ratio = np.exp(log_ratio)
    plain = -advantages * ratio
    # the same bits as np.clip, which is slower
    clipped = np.minimum(np.maximum(ratio, 1.0 - settings.clip_range), 1.0 + settings.clip_range)
    limited = -advantages * clipped
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
        clipped = np.square(old + np.minimum(np.maximum(change, -limit), limit) - returns)
        gradient = np.where((squared >= clipped) | (np.abs(change) <= limit), error, 0.0)
        squared = np.maximum(squared, clipped)
    np.multiply(squared, 0.5, out=term)
    return gradient * (settings.value_coef / settings.count)
