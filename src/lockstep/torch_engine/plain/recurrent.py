"""Recurrent policies on a CPU: cores, multilayer perceptrons and their gradients by hand, in NumPy.

The reasons are those of :mod:`lockstep.torch_engine.plain.policy`. They weigh more here, because a core goes step by
step and autograd records every operation of every step. The tests compare it with autograd.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from lockstep.torch_engine.nets.nets import PolicyNet
from lockstep.torch_engine.plain.acting import Stepper
from lockstep.torch_engine.plain.cores import CORES, Core, CoreWeights, Unrolled
from lockstep.torch_engine.plain.layers import Mlp, layers_in, width_of
from lockstep.torch_engine.plain.losses import ActionHead
from lockstep.torch_engine.plain.policy import GradientRows, derivable
from lockstep.training.losses import LossSettings

ALL, FIRST, LAST = slice(None), slice(0, 1), slice(-1, None)
"""Slices of a recurrent state's trunks: the actor's is the first, the critic's the last."""


def derivable_recurrent(net: PolicyNet) -> bool:
    """Returns whether the networks have cores, and without cores and sharing would be :func:`.policy.derivable`."""
    return net.core is not None and derivable(replace(net, core=None, shared=False))


class _Part:
    """The layers ``name`` of a network, whose parameters ``[out, in]`` and ``[out]`` are given by name."""

    def __init__(self, net: PolicyNet, parameters: Mapping[str, np.ndarray], name: str) -> None:
        self._sizes = net.sizes(name)
        self.width = width_of(self._sizes)
        self.each = [
            (parameters[f"{name}.{layer}.weight"], parameters[f"{name}.{layer}.bias"][None])
            for layer in range(len(self._sizes) - 1)
        ]
        self.layers = Mlp(self.each, net.activation, linear=int(name != "trunk"))

    def backward(self, kept: list[np.ndarray], d: np.ndarray, out: np.ndarray) -> np.ndarray:
        """Writes the parameters' gradients into ``out`` ``[k, width]``; returns that of the layers' input."""
        return self.layers.backward(kept, d, layers_in(out, self._sizes), into=True)


class RecurrentPolicy:
    """Computes the numbers of a :func:`derivable_recurrent` policy on shards, in the dtype of its parameters.

    The parameters are ``[out, in]`` and ``[out]`` by name, and may be changed from outside between calls. A recurrent
    state is ``[k, rows, size]``: the state of one trunk, then the next one's.
    """

    def __init__(self, net: PolicyNet, parameters: Mapping[str, np.ndarray]) -> None:
        assert net.core is not None
        core, trunks = CORES[net.core], net.trunks
        self._activation = net.activation
        self._cores = core(parameters, trunks)
        self._acting, self._valuing = core(parameters, trunks[FIRST]), core(parameters, trunks[LAST])
        self._trunk = _Part(net, parameters, "trunk") if net.shared else None
        self._actor, self._critic = (_Part(net, parameters, name) for name in ("actor", "critic"))
        self._head = ActionHead(net, parameters.get("log_std"))
        size = sum(p.size for p in parameters.values())
        self._rows = GradientRows(size, next(iter(parameters.values())).dtype)

    def stepper(self) -> Stepper:
        """Returns what computes the actor's steps with the weights as they are now."""
        shared = [] if self._trunk is None else self._trunk.each
        return Stepper(self._acting, [*shared, *self._actor.each], self._activation)

    def step(
        self, stepper: Stepper, observations: np.ndarray, state: np.ndarray, resets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Computes logits or means of one step ``[k, rows, action outputs]``, and the recurrent state after it.

        Takes observations ``[k, rows, width]``, the state before, and resets ``[k, rows]``, 1.0 where nothing is
        carried into the step. The critic's part of the state stays what it was.
        """
        after = state.copy()
        actors = _by_trunk(self._acting, after)[:, :, 0]
        output, actors[...] = stepper(observations, actors, resets)
        return output, after

    def act(
        self, stepper: Stepper, observations: np.ndarray, noise: np.ndarray, state: np.ndarray, resets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Samples actions with noise ``[k, rows, action outputs]``, and returns the next state; see :meth:`step`."""
        output, after = self.step(stepper, observations, state, resets)
        return self._head.sample(output, noise), after

    def values(self, observations: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Computes values ``[k, rows]`` of observations ``[k, rows, width]``, from the state before them."""
        none = np.zeros((len(state), 1, state.shape[1]), state.dtype)
        run = _unrolled(self._valuing, self._valuing.weights(), observations[:, None], state, LAST, none)
        return self._critic.layers(self._features(run, 0))[..., 0]

    def unroll(
        self, observations: np.ndarray, actions: np.ndarray, state: np.ndarray, resets: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Computes log-probabilities, values and recurrent states of whole rollouts, from the state before them.

        See :meth:`lockstep.torch_engine.nets.functions.PolicyFunctions.unroll` for the shapes.
        """
        k, steps, rows, _ = observations.shape
        run = _unrolled(self._cores, self._cores.weights(), observations, state, ALL, resets)
        output, values = (
            network.layers(self._features(run, trunk)) for network, trunk in ((self._actor, 0), (self._critic, -1))
        )
        taken = actions.reshape(k, (steps - 1) * rows, *actions.shape[3:])
        log_probs = self._head.log_probs(output[:, : taken.shape[1]], taken).reshape(k, steps - 1, rows)
        states = run.states.transpose(3, 1, 4, 2, 0, 5).reshape(k, steps, rows, -1)
        return log_probs, values.reshape(k, steps, rows), states

    def _features(self, run: Unrolled, trunk: int, kept: list[np.ndarray] | None = None) -> np.ndarray:
        """Computes the actor's or critic's own layers' input, ``[k, steps·n, …]``, from the trunk's hidden states."""
        hidden = run.states[0, :, trunk].swapaxes(0, 1)
        x = hidden.reshape(len(hidden), -1, hidden.shape[-1])
        return x if self._trunk is None else self._trunk.layers(x, kept)

    @np.errstate(all="ignore")  # the update reports what isn't finite
    def gradients(self, columns: Mapping[str, np.ndarray], settings: LossSettings) -> np.ndarray:
        """Computes each shard's gradient and loss terms ``[k, P + 5]``, parameters in the order of ``net.shapes()``.

        The columns are sequences ``[k, n, steps, …]``: observations, resets and those of :meth:`ActionHead.loss`; and
        the recurrent_state ``[k, n, size]`` before the first step. With several shards the next call uses the memory
        again.
        """
        given = {name: x.swapaxes(1, 2) for name, x in columns.items() if name != "recurrent_state"}
        observations, resets = given.pop("observations"), given.pop("resets")
        samples = {name: x.reshape(len(x), -1, *x.shape[3:]) for name, x in given.items()}
        out = self._rows(len(observations))
        first, weights = columns["recurrent_state"], self._cores.weights()
        run = _unrolled(self._cores, weights, observations, first, ALL, resets, graph=True)
        kept: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]] = ([], [], [])
        seen = [self._features(run, trunk, kept[2]) for trunk in range(self._cores.trunks)]
        output, values = self._actor.layers(seen[0], kept[0]), self._critic.layers(seen[-1], kept[1])[..., 0]
        d_output, d_values = self._head.loss(output, values, samples, settings, out)
        self._backward(run, kept, d_output, d_values, out)
        return self._rows.kept(out)

    def _backward(
        self,
        run: Unrolled,
        kept: tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]],
        d_output: np.ndarray,
        d_values: np.ndarray,
        out: np.ndarray,
    ) -> None:
        """Computes the parameters' gradients from those of outputs and values, the last layer first."""
        cores, trunk = self._cores.trunks * self._cores.width, 0 if self._trunk is None else self._trunk.width
        middle, end = cores + trunk + self._actor.width, cores + trunk + self._actor.width + self._critic.width
        d_actor = self._actor.backward(kept[0], d_output, out[:, cores + trunk : middle])
        d_critic = self._critic.backward(kept[1], d_values[..., None], out[:, middle:end])
        d_features = [d_actor, d_critic]
        if self._trunk is not None:
            d_features = [self._trunk.backward(kept[2], d_actor + d_critic, out[:, cores : cores + trunk])]
        d_hidden = np.empty_like(run.inner)
        steps, _, k, n, size = d_hidden.shape
        for number, d in enumerate(d_features):
            d_hidden[:, number] = d.reshape(k, steps, n, size).swapaxes(0, 1)
        self._cores.backward(run, d_hidden, out[:, :cores])


def _by_trunk(core: Core, state: np.ndarray) -> np.ndarray:
    """Returns a view of a recurrent state by trunk and part: ``[k, rows, trunks, parts, size]``."""
    return state.reshape(*state.shape[:2], -1, core.parts, core.size)


def _unrolled(
    core: Core,
    weights: CoreWeights,
    observations: np.ndarray,
    state: np.ndarray,
    trunks: slice,
    resets: np.ndarray,
    graph: bool = False,
) -> Unrolled:
    """Runs the cores of some trunks over observations ``[k, steps, rows, width]``, from their parts of a state."""
    first = _by_trunk(core, state)[:, :, trunks].transpose(3, 2, 0, 1, 4)
    return core.unroll(weights, observations, first, resets, graph)
