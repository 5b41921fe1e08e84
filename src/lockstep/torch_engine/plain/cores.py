"""Recurrent cores by hand, in NumPy: LSTM and GRU over sequences, and their gradients back through time.

Equations and the order of gates are those of :mod:`lockstep.torch_engine.nets.recurrent`. The cores of networks that
see the same observations run side by side, along an axis of trunks. Products over all steps call the BLAS once for each
shard and trunk, and those of a step take all shards' rows at once where a shard's bits are the same
(:mod:`lockstep.torch_engine.plain.products`), so its bits don't depend on its neighbours. A step's gates lie one after
the other, ``[gates, trunks, k, n, size]``, because NumPy goes over whole arrays several times faster than over parts of
rows. What needs no order in time is computed for all steps at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from lockstep.torch_engine.plain.products import RowProduct, laid_out


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
        keep: 0.0 where nothing is carried into a step, else 1.0: ``[steps, 1, k, n, 1]``.
        resets: whether a step has such rows, on any shard.
        first: the state before the first step, ``[parts, trunks, k, n, size]``.
        states: the state after each step, ``[parts, steps, trunks, k, n, size]``: hidden state, cell state.
        gates: activated, ``[steps, gates, trunks, k, n, size]``; only the last step's unless gradients are taken.
        inner: an LSTM's tanh of cell states, a GRU's hidden part of new states, ``[steps, trunks, k, n, size]``;
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
    """By gate, logistic functions first: 0.5 for those, taken as ``(1 + tanh(x/2)) / 2``, and 1.0 for tanh."""
    moved: ClassVar[int] = 0
    """How many of the parameters' last gates are computed first."""

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

    def _stacked(self, name: str) -> np.ndarray:
        return np.stack([parameters[name] for parameters in self._parameters])

    def weights(self) -> CoreWeights:
        """Returns the weights as they are now; those of logistic functions are halved, which loses no bit."""
        bias, hidden_bias = self._stacked("input.bias"), np.zeros((self.trunks, self.size), self.dtype)
        if "hidden.bias" in self._parameters[0]:  # added to the input's, except where the reset gate multiplies it
            given = self._stacked("hidden.bias")
            bias[:, : -self.size] += given[:, : -self.size]
            hidden_bias = given[:, -self.size :]
        by_column = [self._stacked(name).swapaxes(1, 2) for name in ("input.weight", "hidden.weight")]
        return CoreWeights(
            input=self._scaled(by_column[0], laid_out(by_column[0])),
            input_bias=self._scaled(bias[:, None], np.empty_like(bias[:, None])),
            hidden=self._scaled(by_column[1], laid_out(by_column[1])),
            hidden_bias=hidden_bias[:, None],
        )

    def _scaled(self, columns: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Halves columns ``[trunks, in, gates·size]`` of logistic functions, and writes these first into ``out``."""
        for gate, slope in enumerate(self.slopes):
            start, end = gate * self.size, (gate + 1) * self.size
            given = (gate - self.moved) % self._gates * self.size
            np.multiply(columns[..., given : given + self.size], slope, out=out[..., start:end])
        return out

    def unroll(
        self, weights: CoreWeights, x: np.ndarray, first: np.ndarray, resets: np.ndarray, graph: bool = False
    ) -> Unrolled:
        """Runs over sequences ``[k, steps, n, inputs]``.

        ``first`` is the state before the first step, ``[parts, trunks, k, n, size]``; ``resets`` ``[k, steps, n]`` are
        1.0 where nothing is carried into a step. With ``graph``, :meth:`backward` can follow.
        """
        k, steps, n, inputs = x.shape
        run = self.empty_run(k, steps, n, graph)
        run.x, run.first = x.reshape(k, 1, steps * n, inputs), np.ascontiguousarray(first)
        run.keep[:, 0, :, :, 0] = (1.0 - resets).swapaxes(0, 1)
        run.resets = (resets.max((0, 2)) > 0.0).tolist()
        projected = np.matmul(run.x, weights.input)
        projected += weights.input_bias
        by_step = projected.reshape(k, self.trunks, steps, n, -1).transpose(2, 1, 0, 3, 4)
        self.run(weights, by_step, run, RowProduct(weights.hidden, k, n))
        return run

    def empty_run(self, k: int, steps: int, n: int, graph: bool = False) -> Unrolled:
        """Allocates what :meth:`run` needs for sequences of ``n`` rows of each of ``k`` shards; without the input."""
        kept = steps if graph else 1
        shape = (self.trunks, k, n, self.size)
        return Unrolled(
            x=np.empty((k, 1, steps * n, 0), self.dtype),
            keep=np.ones((steps, 1, k, n, 1), self.dtype),
            resets=[False] * steps,
            first=np.empty((self.parts, *shape), self.dtype),
            states=np.empty((self.parts, steps, *shape), self.dtype),
            gates=np.empty((kept, self._gates, *shape), self.dtype),
            inner=np.empty((kept, *shape), self.dtype),
        )

    def backward(self, run: Unrolled, d_hidden: np.ndarray, out: np.ndarray) -> None:
        """Writes the gradients of all trunks' parameters into ``out`` ``[k, trunks·width]``.

        ``d_hidden`` is the gradient of hidden states ``[steps, trunks, k, n, size]``; it is overwritten.
        """
        d_input, d_product = self._back(self._stacked("hidden.weight"), run, d_hidden)
        steps, trunks, k, n, _ = run.inner.shape

        def by_shard(x: np.ndarray) -> np.ndarray:
            return x.transpose(2, 1, 0, 3, 4).reshape(k, trunks, steps * n, -1)

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
    def run(self, weights: CoreWeights, projected: np.ndarray, run: Unrolled, product: RowProduct) -> None:
        """Fills gates, states and ``inner`` from the inputs' products ``[steps, trunks, k, n, gates·size]``.

        ``product`` is that of a step's rows by the hidden weights.
        """

    @abstractmethod
    def _back(self, weight: np.ndarray, run: Unrolled, d_hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Computes the gradients of the sums in the gates, ``[steps, trunks, k, n, gates·size]``.

        Takes hidden weights ``[trunks, gates·size, size]``; returns the gradients of the inputs' and of the hidden
        products.
        """

    def _by_gate(self, x: np.ndarray) -> np.ndarray:
        """Views products ``[…, trunks, k, n, gates·size]`` gate by gate, ``[…, gates, trunks, k, n, size]``."""
        by_gate = x.reshape(*x.shape[:-1], self._gates, self.size)
        return by_gate.transpose(*range(x.ndim - 4), -2, -5, -4, -3, -1)


class Lstm(Core):
    """Runs LSTMs (Hochreiter & Schmidhuber 1997), whose parameters are of input, forget, cell and output gate."""

    parts = 2
    slopes = (0.5, 0.5, 0.5, 1.0)
    moved = 1  # output, input, forget, cell

    def run(self, weights: CoreWeights, projected: np.ndarray, run: Unrolled, product: RowProduct) -> None:
        """See :meth:`Core.run`."""
        summed, by_gate = product.out, self._by_gate(product.out)
        hiddens, cells = run.states
        added = np.empty_like(run.inner[0])
        hidden, cell = run.first
        for t, begins in enumerate(run.resets):
            gates, inner = run.gates[t % len(run.gates)], run.inner[t % len(run.inner)]
            if begins:
                hidden, cell = hidden * run.keep[t], cell * run.keep[t]
            product(hidden)
            summed += projected[t]
            np.tanh(by_gate, out=gates)
            logistic, (o, i, f, g) = gates[:3], gates
            logistic *= 0.5
            logistic += 0.5
            np.multiply(i, g, out=added)
            cell = np.multiply(f, cell, out=cells[t])
            cell += added
            np.tanh(cell, out=inner)
            hidden = np.multiply(o, inner, out=hiddens[t])

    def _back(self, weight: np.ndarray, run: Unrolled, d_hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        o, i, f, g = run.gates.swapaxes(0, 1)
        to_cell = o * (1.0 - run.inner * run.inner)
        factors = np.empty_like(run.gates)
        factors[:, 0] = run.inner * o * (1.0 - o)
        factors[:, 1] = g * i * (1.0 - i)
        factors[:, 2] = run.before(1) * f * (1.0 - f)
        factors[:, 3] = i * (1.0 - g * g)
        d = np.empty((*run.inner.shape[:-1], self._gates * self.size), self.dtype)
        d_gates, product = self._by_gate(d), RowProduct(weight, *run.inner.shape[2:4])
        d_cell, back, cell_back = np.empty_like(run.inner[0]), product.out, np.zeros_like(run.inner[0])
        back[...] = 0.0
        for t in range(len(d) - 1, -1, -1):
            d_hidden[t] += back
            np.multiply(d_hidden[t], to_cell[t], out=d_cell)
            d_cell += cell_back
            np.multiply(factors[t, 1:], d_cell, out=d_gates[t, :3])
            np.multiply(factors[t, 0], d_hidden[t], out=d_gates[t, 3])
            product(d[t])
            np.multiply(d_cell, f[t], out=cell_back)
            if run.resets[t]:
                back *= run.keep[t]
                cell_back *= run.keep[t]
        return d, d


class Gru(Core):
    """Runs GRUs (Cho et al. 2014): reset gate, update gate and new state."""

    parts = 1
    slopes = (0.5, 0.5, 1.0)

    def run(self, weights: CoreWeights, projected: np.ndarray, run: Unrolled, product: RowProduct) -> None:
        """See :meth:`Core.run`."""
        summed, by_gate = product.out[..., : 2 * self.size], self._by_gate(product.out)
        hidden_bias = weights.hidden_bias[:, None]
        hidden = run.first[0]
        for t, begins in enumerate(run.resets):
            gates, inner = run.gates[t % len(run.gates)], run.inner[t % len(run.inner)]
            if begins:
                hidden = hidden * run.keep[t]
            product(hidden)
            logistic, (reset, update, new) = gates[:2], gates
            summed += projected[t, ..., : 2 * self.size]
            np.tanh(by_gate[:2], out=logistic)
            logistic *= 0.5
            logistic += 0.5
            np.add(by_gate[2], hidden_bias, out=inner)
            np.multiply(reset, inner, out=new)
            new += projected[t, ..., 2 * self.size :]
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
        d = np.empty((*run.inner.shape[:-1], self._gates * self.size), self.dtype)
        d_gates, product = self._by_gate(d), RowProduct(weight, *run.inner.shape[2:4])
        past, back = np.empty_like(run.inner[0]), product.out
        back[...] = 0.0
        for t in range(len(d) - 1, -1, -1):
            d_hidden[t] += back
            np.multiply(factors[t], d_hidden[t], out=d_gates[t])
            product(d[t])
            np.multiply(d_hidden[t], update[t], out=past)
            back += past
            if run.resets[t]:
                back *= run.keep[t]
        d_input = d.copy()
        d_input[..., -self.size :] = d_hidden * to_new
        return d_input, d


CORES: dict[str, type[Core]] = {"lstm": Lstm, "gru": Gru}
