"""Decides which callbacks run on which rank, and keeps ranks together after each rollout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CallbackList,
    CheckpointCallback,
    ConvertCallback,
    EvalCallback,
    EventCallback,
    ProgressBarCallback,
)
from stable_baselines3.common.type_aliases import MaybeCallback

from lockstep.integrations.sb3.exchange import RolloutExchange

EVALUATION = ("best_mean_reward", "last_mean_reward")


class OneRankCallback(CallbackList):
    """Runs callbacks that write on one rank only: ``OneRankCallback([MyPlots(), MyTable()])``.

    The callbacks of Stable-Baselines3 that write don't need it. If one returns False, all ranks stop.
    """


ONE_RANK = (OneRankCallback, CheckpointCallback, EvalCallback, ProgressBarCallback)


class Elsewhere(BaseCallback):
    """Replaces, on the other ranks, a callback that runs on one rank only; it only counts calls and steps."""

    def __init__(self, callback: BaseCallback) -> None:
        super().__init__()
        self.callback = callback

    def _init_callback(self) -> None:
        self.callback.model = self.model

    def _on_step(self) -> bool:
        self.callback.n_calls, self.callback.num_timesteps = self.n_calls, self.num_timesteps
        return True


class GlobalProgressBar(ProgressBarCallback):
    """Shows Stable-Baselines3's progress bar over the steps of all ranks."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size

    def _on_step(self) -> bool:
        self.pbar.update(self.training_env.num_envs * self.world_size)
        return True


def of_this_rank(callback: MaybeCallback, progress_bar: bool, writer: bool, world_size: int) -> BaseCallback:
    """Turns the callbacks that a script gives to ``learn`` into those that this rank runs."""
    tree = CallbackList(list(callback)) if isinstance(callback, list) else callback
    if not isinstance(tree, BaseCallback):
        tree = ConvertCallback(tree)
    if progress_bar:
        tree = CallbackList([tree, ProgressBarCallback()])
    return _of_this_rank(tree, writer, world_size)


def _of_this_rank(callback: BaseCallback, writer: bool, world_size: int) -> BaseCallback:
    if isinstance(callback, ONE_RANK) and not writer:
        return Elsewhere(callback)
    if type(callback) is ProgressBarCallback:
        return GlobalProgressBar(world_size)
    if isinstance(callback, CallbackList):
        callback.callbacks = [_of_this_rank(child, writer, world_size) for child in callback.callbacks]
    elif isinstance(callback, EventCallback) and callback.callback is not None:
        callback.callback = _of_this_rank(callback.callback, writer, world_size)
    return callback


def _evaluations(callback: BaseCallback | None) -> Iterator[EvalCallback]:
    """Yields the evaluation callbacks in a tree of callbacks, in the same order on every rank."""
    if isinstance(callback, Elsewhere):
        yield from _evaluations(callback.callback)
    elif isinstance(callback, EvalCallback):
        yield callback
    elif isinstance(callback, CallbackList):
        for child in callback.callbacks:
            yield from _evaluations(child)
    elif isinstance(callback, EventCallback):
        yield from _evaluations(callback.callback)


class SynchronizedCallback(BaseCallback):
    """Wraps a rank's callbacks: counts the steps of all ranks, and meets the other ranks after each rollout."""

    exchange: RolloutExchange

    def __init__(self, callback: BaseCallback, world_size: int) -> None:
        super().__init__()
        self.callback, self._world_size = callback, world_size

    def init_callback(self, model: BaseAlgorithm) -> None:
        """Initialises the callbacks of this rank."""
        super().init_callback(model)
        self.callback.init_callback(model)

    def _on_training_start(self) -> None:
        self.callback.on_training_start(self.locals, self.globals)

    def _on_rollout_start(self) -> None:
        self.callback.on_rollout_start()

    def on_step(self) -> bool:
        """Adds the other ranks' steps to ``num_timesteps`` before any callback reads it."""
        self.model.num_timesteps += self.training_env.num_envs * (self._world_size - 1)
        return super().on_step()

    def _on_step(self) -> bool:
        return self.callback.on_step()

    def _on_rollout_end(self) -> None:
        self.exchange.meet()
        if not self.exchange.stopped:
            self.callback.on_rollout_end()

    def _on_training_end(self) -> None:
        self.callback.on_training_end()

    def update_child_locals(self, locals_: dict[str, Any]) -> None:
        """Passes the rollout's local variables on."""
        self.callback.update_locals(locals_)

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """Returns the last and the best mean reward of every evaluation callback."""
        return [{name: float(getattr(one, name)) for name in EVALUATION} for one in _evaluations(self.callback)]

    @evaluations.setter
    def evaluations(self, found: list[dict[str, float]]) -> None:
        for one, values in zip(_evaluations(self.callback), found, strict=False):  # one rank alone may have some
            for name, value in values.items():
                setattr(one, name, value)
