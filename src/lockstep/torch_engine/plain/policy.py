"""Plain policies on a CPU: two multilayer perceptrons with a gradient derived by hand, in NumPy.

At common sizes most of PyTorch's time goes into calling its operations. NumPy's calls cost a fraction of it, and its
products run once a shard by construction. The parameters are in the same memory. The tests compare it with autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.plain.layers import ACTIVATIONS, Layer, Mlp, layers_in, width_of
from lockstep.torch_engine.plain.losses import ActionHead
from lockstep.training.losses import TERMS, LossSettings

FEW_NUMBERS = 1 << 14  # of all rows in a layer; with more, those of two networks leave the cache between calls


def derivable(net: PolicyNet) -> bool:
    """Returns whether the networks are plain, with an activation whose derivative is a function of its output."""
    return net.plain and net.activation in ACTIVATIONS


class GradientRows:
    """Holds memory for each shard's gradient and loss terms ``[k, P + T]``, which the next call uses again."""

    def __init__(self, parameters: int, dtype: np.dtype) -> None:
        self._size, self._dtype = parameters + len(TERMS), dtype
        self._rows: dict[int, np.ndarray] = {}

    def __call__(self, k: int) -> np.ndarray:
        """Returns rows for ``k`` shards, to be filled."""
        if k not in self._rows:
            self._rows[k] = np.empty((k, self._size), self._dtype)
        return self._rows[k]

    @staticmethod
    def kept(rows: np.ndarray) -> np.ndarray:
        """Returns the rows themselves, or a copy of a lone one: several calls may each compute one shard's."""
        return rows.copy() if len(rows) == 1 else rows


class PlainLayers:
    """Views the layers of both networks, or their gradients, in contiguous vectors ``[…, P]`` of all parameters.

    Args:
        memory: the vectors.
        actor: the sizes of the actor's input, layers and result; ``critic``: likewise. The hidden ones are the same.
    """

    def __init__(self, memory: np.ndarray, actor: tuple[int, ...], critic: tuple[int, ...]) -> None:
        self._memory, self._sizes = memory, (actor, critic)
        self._bounds = 0, width_of(actor), width_of(actor) + width_of(critic)

    @cached_property
    def alone(self) -> list[list[Layer]]:
        """All layers of each network."""
        parts = (self._memory[..., start:end] for start, end in itertools.pairwise(self._bounds))
        return [layers_in(part, sizes) for part, sizes in zip(parts, self._sizes, strict=True)]

    @cached_property
    def both(self) -> list[Layer]:
        """The hidden layers of actor and critic: weights ``[2, …, out, in]`` and biases ``[2, …, 1, out]``."""
        memory, hidden = self._memory, self._sizes[0][:-1]
        shape, strides = (2, *memory.shape[:-1], width_of(hidden)), (self._bounds[1] * memory.itemsize, *memory.strides)
        return layers_in(np.ndarray(shape, memory.dtype, memory, 0, strides), hidden)

    @cached_property
    def last(self) -> list[list[Layer]]:
        """The last layer of each network."""
        hidden, (start, middle, end) = width_of(self._sizes[0][:-1]), self._bounds
        parts = self._memory[..., start + hidden : middle], self._memory[..., middle + hidden : end]
        return [layers_in(part, sizes[-2:]) for part, sizes in zip(parts, self._sizes, strict=True)]


class PlainPolicy:
    """Computes the numbers of a :func:`derivable` policy on shards, in the dtype of its parameters.

    The hidden layers of actor and critic have the same sizes. An update of few samples computes both by the same calls,
    which take most of the time then.

    Args:
        net: the networks.
        flat: all parameters ``[P]`` in the order of ``net.shapes()``; may be changed from outside between calls.
    """

    def __init__(self, net: PolicyNet, flat: np.ndarray) -> None:
        self._sizes = net.sizes("actor"), net.sizes("critic")
        layers = PlainLayers(flat, *self._sizes)
        self._actor, self._critic = (Mlp(each, net.activation, linear=1) for each in layers.alone)
        self._both = Mlp([(w[:, None], b[:, None]) for w, b in layers.both], net.activation)
        self._actor_last, self._critic_last = (Mlp(each, net.activation, linear=1) for each in layers.last)
        self._few_rows = FEW_NUMBERS // max(net.hidden_sizes) if net.hidden_sizes else 0
        self._head = ActionHead(net, None if net.discrete else flat[sum(map(width_of, self._sizes)) :])
        self._rows = GradientRows(len(flat), flat.dtype)
        self._gradients: dict[int, PlainLayers] = {}

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
        layers = self._layers_of(out)
        kept: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
        together = observations.shape[0] * observations.shape[1] <= self._few_rows
        if together:
            features = self._both(observations, kept[2])
            output, values = self._actor_last(features[0], kept[0]), self._critic_last(features[1], kept[1])
        else:
            output, values = self._actor(observations, kept[0]), self._critic(observations, kept[1])
        d_output, d_values = self._head.loss(output, values[..., 0], columns, settings, out)
        if together:
            d = np.empty_like(kept[2][-1])
            self._actor_last.backward(kept[0], d_output, layers.last[0], into=d[0])
            self._critic_last.backward(kept[1], d_values[..., None], layers.last[1], into=d[1])
            self._both.backward(kept[2], d, layers.both)
        else:
            self._actor.backward(kept[0], d_output, layers.alone[0])
            self._critic.backward(kept[1], d_values[..., None], layers.alone[1])
        return self._rows.kept(out)

    def _layers_of(self, rows: np.ndarray) -> PlainLayers:
        """Returns where each layer's gradients go in ``rows`` ``[k, P + T]``."""
        if len(rows) not in self._gradients:
            self._gradients[len(rows)] = PlainLayers(rows, *self._sizes)
        return self._gradients[len(rows)]
