"""Recurrent cores by hand, in NumPy: LSTM and GRU over sequences, and their gradients back through time.

Equations and the order of gates are those of :mod:`lockstep.torch_engine.nets.recurrent`. The cores of networks that
see the same observations run side by side, along an axis of trunks. ``np.matmul`` calls the BLAS once for each shard
and trunk, so a shard's bits don't depend on its neighbours. A step's gates lie one after the other,
``[gates, k, trunks, n, size]``, because NumPy goes over whole arrays several times faster than over parts of rows. What
needs no order in time is computed for all steps at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np


class CoreWeights(NamedTuple):
    """Holds what a core computes from its parameters before it runs.

    Attributes:
        input: ``[trunks, inputs, gates·size]``.
        input_bias: ``[trunks, 1, gates·size]``.
        hidden: ``[trunks, size, gates·size]``.
        hidden_bias: of a GRU's new state, ``[trunks, 1, size]``.
    """

    input: np.ndarray
    input_bias: np.ndarray
    hidden: np.ndarray
    hidden_bias: np.ndarray


@dataclass
class Unrolled:
    """Holds what a core computed over sequences.

    Attributes:
        x: the input, ``[k, 1, steps·n, inputs]``.
        keep: 0.0 where nothing is carried into a step, else 1.0: ``[steps, k, 1, n, 1]``.
        resets: whether a step has such rows, on any shard.
        first: the state before the first step, ``[parts, k, trunks, n, size]``.
        states: the state after each step, ``[parts, steps, k, trunks, n, size]``: hidden state, cell state.
        gates: activated, ``[steps, gates, k, trunks, n, size]``; only the last step's unless gradients are taken.
        inner: an LSTM's tanh of cell states, a GRU's hidden part of new states, ``[steps, k, trunks, n, size]``;
            likewise.
    """

    x: np.ndarray
    keep: np.ndarray
    resets: list[bool]
    first: np.ndarray
    states: np.ndarray
    gates: np.ndarray
    inner: np.ndarray

    def before(self, part: int) -> np.ndarray:
        """Computes one part of the states as it went into each step."""
        into = np.concatenate([self.first[part, None], self.states[part, :-1]])
        return np.multiply(into, self.keep, out=into) if any(self.resets) else into


class Core(ABC):
    """Runs the cores of some networks, and computes gradients back through them, in the dtype of their parameters.

    The parameters may be changed from outside between calls.

    Attributes:
        size: units of a core; ``trunks`` is the number of networks.
        width: the number of a core's parameters.
    """

    names = ("input.weight", "input.bias", "hidden.weight", "hidden.bias")
    parts: ClassVar[int]
    """The number of arrays that a state has: a hidden state, and an LSTM's cell state."""
    slopes: ClassVar[tuple[float, ...]]
    """By gate: 0.5 for logistic functions, taken as ``(1 + tanh(x/2)) / 2``, and 1.0 for tanh."""

    def __init__(self, parameters: Mapping[str, np.ndarray], trunks: Sequence[str]) -> None:
        self._parameters = [
            {name: parameters[full] for name in self.names if (full := f"{trunk}.core.{name}") in parameters}
            for trunk in trunks
        ]
        self._gates = len(self.slopes)
        self.dtype = self._parameters[0]["hidden.weight"].dtype
        self.size = self._parameters[0]["hidden.weight"].shape[1]
        self.trunks = len(trunks)
        self.width = sum(p.size for p in self._parameters[0].values())
        self._halves = np.repeat(np.array(self.slopes, self.dtype), self.size)

    def _stacked(self, name: str) -> np.ndarray:
        return np.stack([parameters[name] for parameters in self._parameters])

    def weights(self) -> CoreWeights:
        """Returns the weights as they are now; those of logistic functions are halved, which loses no bit."""
        bias, hidden_bias = self._stacked("input.bias"), np.zeros((self.trunks, self.size), self.dtype)
        if "hidden.bias" in self._parameters[0]:  # added to the input's, except where the reset gate multiplies it
            given = self._stacked("hidden.bias")
            bias[:, : -self.size] += given[:, : -self.size]
            hidden_bias = given[:, -self.size :]
        return CoreWeights(
            input=self._stacked("input.weight").swapaxes(1, 2) * self._halves,
            input_bias=(bias * self._halves)[:, None],
            hidden=self._stacked("hidden.weight").swapaxes(1, 2) * self._halves,
            hidden_bias=hidden_bias[:, None],
        )

    def unroll(
        self, weights: CoreWeights, x: np.ndarray, first: np.ndarray, resets: np.ndarray, graph: bool = False
    ) -> Unrolled:
        """Runs over sequences ``[k, steps, n, inputs]``.

        ``first`` is the state before the first step, ``[parts, k, trunks, n, size]``; ``resets`` ``[k, steps, n]`` are
        1.0 where nothing is carried into a step. With ``graph``, :meth:`backward` can follow.
        """
        k, steps, n, inputs = x.shape
        kept = steps if graph else 1
        shape = (k, self.trunks, n, self.size)
        run = Unrolled(
            x=x.reshape(k, 1, steps * n, inputs),
            keep=(1.0 - resets).swapaxes(0, 1)[:, :, None, :, None],
            resets=(resets.max((0, 2)) > 0.0).tolist(),
            first=first,
            states=np.empty((self.parts, steps, *shape), self.dtype),
            gates=np.empty((kept, self._gates, *shape), self.dtype),
            inner=np.empty((kept, *shape), self.dtype),
        )
        projected = np.matmul(run.x, weights.input)
        projected += weights.input_bias
        by_gate = projected.reshape(k, self.trunks, steps, n, self._gates, self.size).transpose(2, 4, 0, 1, 3, 5)
        self._run(weights, by_gate, run)
        return run

    def backward(self, run: Unrolled, d_hidden: np.ndarray, out: np.ndarray) -> None:
        """Writes the gradients of all trunks' parameters into ``out`` ``[k, trunks·width]``.

        ``d_hidden`` is the gradient of hidden states ``[steps, k, trunks, n, size]``; it is overwritten.
        """
        d_input, d_product = self._back(self._stacked("hidden.weight"), run, d_hidden)
        steps, k, trunks, n, _ = run.inner.shape

        def by_shard(x: np.ndarray) -> np.ndarray:
            return x.transpose(1, 2, 0, 3, 4).reshape(k, trunks, steps * n, -1)

        d_input, d_product = by_shard(d_input), by_shard(d_product)
        ones = np.ones((1, steps * n), self.dtype)
        blocks = out.reshape(k, trunks, self.width)
        position = 0
        for name, d, x in (
            ("input.weight", d_input, run.x),
            ("input.bias", d_input, None),
            ("hidden.weight", d_product, by_shard(run.before(0))),
            ("hidden.bias", d_product, None),
        ):
            if name not in self._parameters[0]:
                continue
            size = self._parameters[0][name].size
            block = blocks[..., position : position + size]
            if x is None:
                np.matmul(ones, d, out=block[:, :, None])
            else:
                np.matmul(d.swapaxes(2, 3), x, out=block.reshape(k, trunks, d.shape[-1], -1))
            position += size

    @abstractmethod
    def _run(self, weights: CoreWeights, projected: np.ndarray, run: Unrolled) -> None:
        """Fills gates, states and ``inner`` from the inputs' products ``[steps, gates, k, trunks, n, size]``."""

    @abstractmethod
    def _back(self, weight: np.ndarray, run: Unrolled, d_hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the gradients of the sums in the gates, ``[steps, k, trunks, n, gates·size]``.

        Takes hidden weights ``[trunks, gates·size, size]``; returns the gradients of the inputs' and of the hidden
        products.
        """

    def _step_buffer(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Allocates products ``[…, n, gates·size]``; returns them, and a view gate by gate, ``[gates, …, n, size]``."""
        buffer = np.empty((*shape[:-1], self._gates * self.size), self.dtype)
        by_gate = buffer.reshape(*shape[:-1], self._gates, self.size)
        return buffer, by_gate.transpose(*range(len(shape) - 4), -2, -5, -4, -3, -1)


class Lstm(Core):
    """Runs LSTMs (Hochreiter & Schmidhuber 1997): input, forget, cell and output gate."""

    parts = 2
    slopes = (0.5, 0.5, 1.0, 0.5)

    def _run(self, weights: CoreWeights, projected: np.ndarray, run: Unrolled) -> None:
        hiddens, cells = run.states
        product, by_gate = self._step_buffer(run.inner.shape[1:])
        scale = np.array(self.slopes, self.dtype).reshape(-1, 1, 1, 1, 1)
        shift = 1.0 - scale
        added = np.empty_like(run.inner[0])
        hidden, cell = run.first
        for t, begins in enumerate(run.resets):
            gates, inner = run.gates[t % len(run.gates)], run.inner[t % len(run.inner)]
            if begins:
                hidden, cell = hidden * run.keep[t], cell * run.keep[t]
            np.matmul(hidden, weights.hidden, out=product)
            np.add(projected[t], by_gate, out=gates)
            np.tanh(gates, out=gates)
            gates *= scale
            gates += shift
            i, f, g, o = gates
            np.multiply(i, g, out=added)
            cell = np.multiply(f, cell, out=cells[t])
            cell += added
            np.tanh(cell, out=inner)
            hidden = np.multiply(o, inner, out=hiddens[t])

    def _back(self, weight: np.ndarray, run: Unrolled, d_hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        i, f, g, o = run.gates.swapaxes(0, 1)
        to_cell = o * (1.0 - run.inner * run.inner)
        factors = np.empty_like(run.gates)
        factors[:, 0] = g * i * (1.0 - i)
        factors[:, 1] = run.before(1) * f * (1.0 - f)
        factors[:, 2] = i * (1.0 - g * g)
        factors[:, 3] = run.inner * o * (1.0 - o)
        d, d_gates = self._step_buffer(run.inner.shape)
        d_cell, back, cell_back = np.empty_like(run.inner[0]), np.zeros_like(run.inner[0]), np.zeros_like(run.inner[0])
        for t in range(len(d) - 1, -1, -1):
            d_hidden[t] += back
            np.multiply(d_hidden[t], to_cell[t], out=d_cell)
            d_cell += cell_back
            np.multiply(factors[t, :3], d_cell, out=d_gates[t, :3])
            np.multiply(factors[t, 3], d_hidden[t], out=d_gates[t, 3])
            np.matmul(d[t], weight, out=back)
            np.multiply(d_cell, f[t], out=cell_back)
            if run.resets[t]:
                back *= run.keep[t]
                cell_back *= run.keep[t]
        return d, d


class Gru(Core):
    """Runs GRUs (Cho et al. 2014): reset gate, update gate and new state."""

    parts = 1
    slopes = (0.5, 0.5, 1.0)

    def _run(self, weights: CoreWeights, projected: np.ndarray, run: Unrolled) -> None:
        product, by_gate = self._step_buffer(run.inner.shape[1:])
        hidden = run.first[0]
        for t, begins in enumerate(run.resets):
            gates, inner = run.gates[t % len(run.gates)], run.inner[t % len(run.inner)]
            if begins:
                hidden = hidden * run.keep[t]
            np.matmul(hidden, weights.hidden, out=product)
            logistic, (reset, update, new) = gates[:2], gates
            np.add(projected[t, :2], by_gate[:2], out=logistic)
            np.tanh(logistic, out=logistic)
            logistic *= 0.5
            logistic += 0.5
            np.add(by_gate[2], weights.hidden_bias, out=inner)
            np.multiply(reset, inner, out=new)
            new += projected[t, 2]
            np.tanh(new, out=new)
            after = np.subtract(hidden, new, out=run.states[0, t])
            after *= update
            after += new
            hidden = after

    def _back(self, weight: np.ndarray, run: Unrolled, d_hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        reset, update, new = run.gates.swapaxes(0, 1)
        to_new = (1.0 - update) * (1.0 - new * new)
        factors = np.empty_like(run.gates)
        factors[:, 2] = to_new * reset
        factors[:, 0] = factors[:, 2] * run.inner * (1.0 - reset)
        factors[:, 1] = (run.before(0) - new) * update * (1.0 - update)
        d, d_gates = self._step_buffer(run.inner.shape)
        past, back = np.empty_like(run.inner[0]), np.zeros_like(run.inner[0])
        for t in range(len(d) - 1, -1, -1):
            d_hidden[t] += back
            np.multiply(factors[t], d_hidden[t], out=d_gates[t])
            np.matmul(d[t], weight, out=back)
            np.multiply(d_hidden[t], update[t], out=past)
            back += past
            if run.resets[t]:
                back *= run.keep[t]
        d_input = d.copy()
        d_input[..., -self.size :] = d_hidden * to_new
        return d_input, d


CORES: dict[str, type[Core]] = {"lstm": Lstm, "gru": Gru}
