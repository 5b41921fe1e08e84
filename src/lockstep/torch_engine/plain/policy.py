"""Plain policies on a CPU: two multilayer perceptrons with a gradient derived by hand, in NumPy.

At common sizes most of PyTorch's time goes into calling its operations. NumPy's calls cost a fraction of it, and its
products run once a shard by construction. The parameters are in the same memory. The tests compare it with autograd.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.plain.layers import ACTIVATIONS, Mlp
from lockstep.torch_engine.plain.losses import ActionHead
from lockstep.training.losses import TERMS, LossSettings


def derivable(net: PolicyNet) -> bool:
    """Returns whether the networks are plain, with an activation whose derivative is a function of its output."""
    return net.plain and net.activation in ACTIVATIONS


class GradientRows:
    """Holds memory for each shard's gradient and loss terms ``[k, P + T]``; with several shards it is reused."""

    def __init__(self, parameters: Mapping[str, np.ndarray]) -> None:
        self._size = sum(p.size for p in parameters.values()) + len(TERMS)
        self._dtype = next(iter(parameters.values())).dtype
        self._rows: dict[int, np.ndarray] = {}

    def __call__(self, k: int) -> np.ndarray:
        """Returns rows for ``k`` shards, to be filled."""
        if k == 1:
            return np.empty((1, self._size), self._dtype)
        if k not in self._rows:
            self._rows[k] = np.empty((k, self._size), self._dtype)
        return self._rows[k]


class PlainPolicy:
    """Computes the numbers of a :func:`derivable` policy on shards, in the dtype of its parameters.

    The parameters are ``[out, in]`` and ``[out]`` by name, and may be changed from outside between calls.
    """

    def __init__(self, net: PolicyNet, parameters: Mapping[str, np.ndarray]) -> None:
        self._actor, self._critic = (Mlp(net, parameters, name) for name in ("actor", "critic"))
        self._head = ActionHead(net, parameters.get("log_std"))
        self._rows = GradientRows(parameters)

    def output(self, observations: np.ndarray) -> np.ndarray:
        """Computes logits or means ``[k, rows, action outputs]``."""
        return self._actor(observations)

    def act(self, observations: np.ndarray, noise: np.ndarray) -> np.ndarray:
        """Samples actions from observations ``[k, rows, size]`` and noise ``[k, rows, action outputs]``."""
        return self._head.sample(self.output(observations), noise)

    def values(self, observations: np.ndarray) -> np.ndarray:
        """Computes values ``[k, rows]`` of observations ``[k, rows, size]``."""
        return self._critic(observations)[..., 0]

    def log_probs(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray:
        """Computes log-probabilities ``[k, rows]`` of actions."""
        return self._head.log_probs(self._actor(observations), actions)

    @np.errstate(all="ignore")  # the update reports what isn't finite
    def gradients(self, columns: Mapping[str, np.ndarray], settings: LossSettings) -> np.ndarray:
        """Computes each shard's gradient and loss terms ``[k, P + 5]``, parameters in the order of ``net.shapes()``.

        The columns ``[k, rows, …]`` are observations and those of :meth:`ActionHead.loss`. With several shards the next
        call uses the memory again.
        """
        observations = columns["observations"]
        out = self._rows(len(observations))
        kept: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        output = self._actor(observations, kept[0])
        values = self._critic(observations, kept[1])[..., 0]
        d_output, d_values = self._head.loss(output, values, columns, settings, out)
        middle, end = self._actor.width, self._actor.width + self._critic.width
        self._actor.backward(kept[0], d_output, out[:, :middle])
        self._critic.backward(kept[1], d_values[..., None], out[:, middle:end])
        return out
