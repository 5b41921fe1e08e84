"""Computes a trained policy as a function of NumPy arrays."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.core.spaces import layouts_from_json
from lockstep.networks.checks import stored_parameters
from lockstep.networks.spec import PolicyNet
from lockstep.torch_engine.nets import distributions, nets
from lockstep.torch_engine.state import POLICY, make_net


class _Turns:
    """Lets threads compute together if PyTorch is set as they need it; one that must switch settings computes alone.

    A thread that computes already, such as one whose network asks another policy, is let in at once.
    """

    def __init__(self) -> None:
        self._turn, self._left = threading.Lock(), threading.Condition()
        self._together, self._here = 0, threading.local()

    @contextlib.contextmanager
    def taken(self, switches: Callable[[], bool]) -> Iterator[None]:
        """Waits for a turn, alone if ``switches()``; it is asked while no other thread has switched PyTorch."""
        if getattr(self._here, "computes", False):
            yield
            return
        self._here.computes = True
        try:
            with self._alone_or_counted(switches):
                yield
        finally:
            self._here.computes = False

    @contextlib.contextmanager
    def _alone_or_counted(self, switches: Callable[[], bool]) -> Iterator[None]:
        with self._turn:
            if switches():
                with self._left:
                    self._left.wait_for(lambda: self._together == 0)
                yield
                return
            with self._left:
                self._together += 1
        try:
            yield
        finally:
            with self._left:
                self._together -= 1
                self._left.notify_all()


_TURNS = _Turns()
"""One for all threads of the process, because they share PyTorch's number of threads and default dtype."""


@contextlib.contextmanager
def as_in_training(threads: int) -> Iterator[None]:
    """Makes PyTorch use ``threads`` threads and float32 on the CPU; then restores the caller's settings."""

    def switches() -> bool:
        return (torch.get_num_threads(), torch.get_default_dtype()) != (threads, torch.float32)

    with _TURNS.taken(switches), contextlib.ExitStack() as stack:
        before, dtype = torch.get_num_threads(), torch.get_default_dtype()
        if threads != before:
            torch.set_num_threads(threads)
            stack.callback(torch.set_num_threads, before)
        if dtype != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        if torch.is_autocast_enabled("cpu"):
            stack.enter_context(torch.autocast("cpu", enabled=False))  # a run in bf16 turns its own on
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        yield


class PolicyFunction:
    """Computes a checkpoint's policy on the CPU, from NumPy arrays.

    Args:
        config: of the run.
        environment: the description that the checkpoint holds.
        arrays: ``policy/…`` by name.
        custom_class: class of the custom network, if the caller has it; None: it is found by its name.

    Raises:
        ValueError: the arrays have other shapes than the config's networks; one line.

    Attributes:
        observation: the layout of observation rows; ``action`` is that of actions.
        state_size: size of a row's recurrent state, 0 if the policy has none.
    """

    def __init__(
        self,
        config: Config,
        environment: dict[str, Any],
        arrays: dict[str, np.ndarray],
        custom_class: type | None = None,
    ) -> None:
        self._threads = config.threads
        self.observation, self.action = layouts_from_json(environment["observation"], environment["action"])
        with as_in_training(self._threads):
            self._net = make_net(config, self.observation, self.action, custom_class)
            parameters = stored_parameters(arrays, POLICY, self._net.shapes())
            self._weights = nets.expand({name: torch.from_numpy(x) for name, x in parameters.items()}, 1)
        self.state_size = self._net.state_size if self._net.core else 0

    @torch.inference_mode()
    def __call__(
        self, observations: np.ndarray, noise: np.ndarray | None, recurrent_state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns actions, rows as :class:`lockstep.envs.host_envs.Buffers` takes them, and the next recurrent state.

        Takes normalised observation rows ``[rows, width]``, Gumbel or normal noise, float32 ``[rows, action outputs]``
        (None: the most likely actions are returned), and the recurrent state before, float32 ``[rows, state_size]``.
        """
        with as_in_training(self._threads):
            return self._act(torch.from_numpy(np.ascontiguousarray(observations)).unsqueeze(0), noise, recurrent_state)

    def _act(
        self, rows: Tensor, noise: np.ndarray | None, recurrent_state: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        net = self._net
        if net.core is None:
            output = nets.actor(net, self._weights, rows)
        else:
            none = torch.zeros((1, 1, rows.shape[1]))
            before = torch.from_numpy(recurrent_state).unsqueeze(0)
            unrolled, _, carries = nets.unroll(net, self._weights, rows.unsqueeze(1), before, none, actor_only=True)
            output, recurrent_state = unrolled[:, 0], carries[0, 0].numpy()
        if noise is None:
            actions = distributions.mode(net, output)
        else:
            actions = distributions.sample(net, self._weights, output, torch.from_numpy(noise).unsqueeze(0))
        return net.squash(actions[0].numpy()), recurrent_state

    @torch.inference_mode()
    def outputs(
        self, observations: np.ndarray, recurrent_state: np.ndarray, actions: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Computes the outputs of actor and critic for normalised rows ``[rows, width]``.

        ``recurrent_state`` is the state before them ``[rows, size]``.

        Returns:
            ``logits`` ``[rows, choices]`` or ``mean`` and ``std`` ``[rows, components]``; ``value`` ``[rows]`` if there
            is a critic; ``next_state`` ``[rows, size]`` of a recurrent policy; ``log_prob`` ``[rows]`` of ``actions``
            if they are given, those of a squashed Gaussian as they are before the tanh.
        """
        with as_in_training(self._threads):
            return self._outputs(torch.from_numpy(np.ascontiguousarray(observations)), recurrent_state, actions)

    def _outputs(self, rows: Tensor, recurrent_state: np.ndarray, actions: np.ndarray | None) -> dict[str, np.ndarray]:
        net = self._net
        output, values, after = forward(net, self._weights, rows, torch.from_numpy(recurrent_state))
        out = named_output(net, self._weights, output)
        if values is not None:
            out["value"] = values
        if after is not None:
            out["next_state"] = after.unsqueeze(0)
        if actions is not None:
            acted = torch.from_numpy(actions).unsqueeze(0)
            out["log_prob"] = distributions.log_prob_and_entropy(net, self._weights, output, acted)[0]
        return {name: x[0].numpy() for name, x in out.items()}


def forward(
    net: PolicyNet, weights: nets.Parameters, rows: Tensor, state: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Runs actor and critic over rows ``[n, width]`` for one step, from a recurrent state ``[n, size]``.

    Returns:
        The actor's output ``[1, n, outputs]``, values ``[1, n]`` or None, and the recurrent state after the step
        ``[n, size]``, or None.
    """
    if net.core is None:
        return *nets.actor_critic(net, weights, rows.unsqueeze(0)), None
    assert state is not None
    none = rows.new_zeros((1, 1, rows.shape[0]), dtype=torch.float32)
    sequence = rows.unsqueeze(0).unsqueeze(0)
    output, values, states = nets.unroll(net, weights, sequence, state.unsqueeze(0), none)
    return output[:, 0], None if values is None else values[:, 0], states[0, 0]


def named_output(net: PolicyNet, weights: nets.Parameters, output: Tensor) -> dict[str, Tensor]:
    """Names an actor's output ``[1, n, outputs]``: ``logits``, or ``mean`` and ``std`` ``[1, n, components]``."""
    if net.discrete:
        return {"logits": output}
    mean, log_std = distributions.mean_and_log_std(net, weights, output)
    return {"mean": mean, "std": log_std.exp().expand_as(mean)}
