"""The interface to a policy's numbers, which PyTorch computes with autograd, or NumPy with gradients by hand.

It is chosen once, when the state is made (:func:`lockstep.torch_engine.state.make_policy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from lockstep.torch_engine.nets import distributions
from lockstep.torch_engine.nets.shards import Mode
from lockstep.training.losses import LossSettings

if TYPE_CHECKING:
    from lockstep.core.shards import ShardPlan

Columns = Mapping[str, Tensor]
"""A minibatch by name, tensors ``[k, rows, …]``; :class:`lockstep.torch_engine.batch.Batch` describes them."""


class ShardGradients(Protocol):
    """Computes each shard's gradient and loss terms ``[k, P + T]`` of a minibatch."""

    def __call__(self, columns: Columns, count: Any, out: Tensor | None = None) -> Tensor:
        """Computes them, divided by the global count of valid samples, an int or a scalar on the device.

        ``out`` is as in :meth:`PolicyFunctions.gradients`.
        """
        ...


DROPOUT_SEED = "dropout_seed"


@dataclass
class PolicyOutputs:
    """Holds what the policy computes of a rollout.

    Attributes:
        log_probs: of the actions, ``[k, T, rows]``.
        values: of all observations, the last one included, ``[k, T+1, rows]``; None without a critic.
        recurrent_states: after each step ``[k, T+1, rows, size]``; None without a recurrent core.
    """

    log_probs: Tensor
    values: Tensor | None
    recurrent_states: Tensor | None = None


class Actor(Protocol):
    """Samples a rank's actions step by step, from rows ``[E, width]`` and noise ``[E, action outputs]``.

    ``part`` selects some of the rank's environments, whole shards; None: all. An actor that keeps nothing from step to
    step inherits :meth:`begin` and :meth:`forget`, which do nothing, and :meth:`carried`.
    """

    def begin(self, recurrent_state: np.ndarray | Tensor | None) -> None:
        """Begins a rollout from a recurrent state, float32 ``[E, size]``."""

    def __call__(self, observations: np.ndarray, noise: np.ndarray, part: slice | None = None) -> np.ndarray:
        """Samples actions ``[E, …]`` on the host."""
        ...

    def tensors(self, observations: Tensor, noise: Tensor, part: slice | None = None) -> Tensor:
        """Samples actions ``[E, …]`` on the device."""
        ...

    def forget(self, done: Tensor, part: slice | None = None) -> None:
        """Resets the recurrent state where an episode ended; ``done`` is bool ``[E]``, and the host doesn't read it."""

    def carried(self) -> list[Tensor]:
        """Returns what is kept from step to step; it stays in the same memory from one rollout to the next."""
        return []


class PolicyFunctions(Protocol):
    """Computes a policy's numbers on shards ``[k, …]``, with the parameters as they are at the call."""

    def actor(self, plan: ShardPlan, mode: Mode) -> Actor:
        """Makes the actor that samples the actions of a rollout."""
        ...

    def output(self, observations: Tensor) -> Tensor:
        """Computes logits or means ``[k, rows, outputs]`` of observations ``[k, rows, width]``."""
        ...

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Computes log-probabilities ``[k, n]`` and values ``[k, m]`` of observations ``[k, m, width]``, m >= n.

        Without a critic the values are empty, ``[k, 0]``.
        """
        ...

    def unroll(
        self, observations: Tensor, actions: Tensor, recurrent_state: Tensor, resets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Does what :meth:`evaluate` does, for a recurrent policy over whole rollouts.

        Takes observations ``[k, T+1, rows, width]``, actions ``[k, T, rows, …]``, the recurrent state
        ``[k, rows, size]`` before the first step and resets ``[k, T+1, rows]``. Returns log-probabilities
        ``[k, T, rows]``, values ``[k, T+1, rows]`` (or empty) and recurrent states ``[k, T+1, rows, size]``.
        """
        ...

    def step(self, observations: Tensor, recurrent_state: Tensor) -> tuple[Tensor, Tensor]:
        """Computes the outputs of one step of a recurrent policy, from which :meth:`actor` samples.

        Takes observations ``[k, rows, width]`` and the state before the step ``[k, rows, size]``; returns logits or
        means ``[k, rows, outputs]`` and the state after it.
        """
        ...

    def values(self, observations: np.ndarray | Tensor, recurrent_state: Tensor | None) -> Tensor:
        """Computes values ``[rows]`` of one shard's rows ``[1, rows, width]`` and states ``[1, rows, size]``."""
        ...

    def gradients(self, columns: Columns, settings: LossSettings, out: Tensor | None = None) -> Tensor:
        """Computes each shard's gradient and loss terms ``[k, P + T]``, in ``out`` if it is given.

        Without ``out`` the result may lie in memory that the next call uses again.
        """
        ...


def shard_gradients(policy: PolicyFunctions, settings: LossSettings, pieces: int) -> ShardGradients:
    """Returns a function of a minibatch that computes each shard's gradient, in ``pieces`` equal parts."""

    def of_whole(columns: Columns, count: Any, out: Tensor | None = None) -> Tensor:
        return policy.gradients(columns, settings.counting(count), out)

    if pieces == 1:
        return of_whole

    def accumulated(columns: Columns, count: Any, out: Tensor | None = None) -> Tensor:
        parts = [of_whole(piece, count).clone() for piece in in_pieces(columns, pieces)]
        total = distributions.sum_in_order(parts)
        return total if out is None else out.copy_(total)

    return accumulated


def in_pieces(columns: Columns, pieces: int) -> list[Columns]:
    """Cuts a minibatch into equal parts of every shard's samples; each part has its own dropout."""
    out: list[dict[str, Tensor]] = [{} for _ in range(pieces)]
    for name, x in columns.items():
        parts = [x + number for number in range(pieces)] if name == DROPOUT_SEED else x.chunk(pieces, 1)
        for piece, part in zip(out, parts, strict=True):
            piece[name] = part.contiguous()
    return list(out)
