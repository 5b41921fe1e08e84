"""Defines the config of a :class:`~lockstep.jax.pmap.task.DistributedPPOTask`, and translates it into settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from lockstep.config.on_off import switch
from lockstep.jax.config import SEEDS, UPDATES, PPOConfig, RunnerConfig, minibatches, whole_number
from lockstep.jax.settings import Settings, check_attribute
from lockstep.jax_engine.distributed.mesh import nearest

BATCHES = 4

SAME = {
    "gae_lambda": "lam",
    "clip_eps": "clip_param",
    "ent_coef": "entropy_coef",
    "vf_coef": "value_loss_coef",
    "n_steps": "rollout_length_steps",
    "num_steps": "rollout_length_steps",
    "n_epochs": "num_passes",
    "num_epochs": "num_passes",
    "n_minibatches": "num_batches",
    "num_minibatches": "num_batches",
    "normalize_advantage": "normalize_advantages",
    "sync_period": "grad_sync_period",
    "axis_name": "pmap_axis_name",
}
"""Maps settings of :class:`PPOConfig`, :class:`RunnerConfig` and others to their names here."""

_NAMES = SAME | {"vf_clip_eps": "clip_param", "max_grad_norm": "global_grad_clip", "num_devices x num_envs": "num_envs"}
_SAID = re.compile(rf"(?<![\w.])(?:{'|'.join(sorted(_NAMES, key=len, reverse=True))})(?!\w)")


@dataclass
class DistributedPPOConfig(metaclass=Settings):
    """Settings of a run, as numbers of all devices together; a user's subclass may add to them.

    Attributes:
        num_envs: environments of the *whole run*, the same number on each device.
        batch_size: size of a minibatch in environments of the whole run.
        num_batches: minibatches of a pass; ``batch_size * num_batches`` is ``num_envs``. One of the two is enough; with
            neither there are 4.
        num_devices: number of devices of all processes; None: all that JAX sees.
        pmap_axis_name: name of the mesh's axis of devices, for collectives in ``sync_gradients``.
        grad_sync_period: optimiser steps that a device takes alone before parameters and moments are averaged; 1:
            gradients are reduced at every step.
        log_devices_every: updates between lines about every device, logged and kept in ``device_log``; 0: no lines.
        total_timesteps: environment steps of all devices together, rounded down to whole updates.
        rollout_length_steps: steps of each environment per update.
        rollout_length_seconds: the same in seconds, as steps of ``ctrl_dt`` seconds; replaces ``rollout_length_steps``.
        ctrl_dt: seconds of a step.
        num_passes: passes over the samples of an update.
        learning_rate: Adam's step size; ``anneal_lr``: whether it falls to 0 over the run.
        gamma: discount per step; ``lam``: lambda of GAE.
        clip_param: clipping range of the probability ratio; ``use_clipped_value_loss``: of the value's change too.
        value_loss_coef: weight of ``0.5 * mean((v - return)^2)``; ``entropy_coef`` is that of the entropy bonus.
        global_grad_clip: clipping by global norm, None: off.
        normalize_advantages: whether to normalise advantages over the global minibatch.
        target_kl: ends an update early above 1.5 times this approx_kl, None: off.
        hidden_sizes: layers of the networks, if the task makes no model of its own; ``activation`` likewise.
        seed: seed of every random number.
        eval_every: this and what follows: see :class:`~lockstep.jax.config.RunnerConfig`.

    Raises:
        ValueError: a keyword is no setting; one line.
    """

    ALSO: ClassVar[dict[str, str]] = {"max_grad_norm": "global_grad_clip", "lr": "learning_rate"}
    ELSEWHERE: ClassVar[dict[str, str]] = {
        **{name: f"it is {mine} here" for name, mine in SAME.items()},
        **{"num_updates": UPDATES, "num_seeds": SEEDS},
    }

    num_envs: int = 16
    batch_size: int | None = None
    num_batches: int | None = None
    num_devices: int | None = None
    pmap_axis_name: str = "device"
    grad_sync_period: int = 1
    log_devices_every: int = 1
    total_timesteps: int = 100_000
    rollout_length_steps: int = 128
    rollout_length_seconds: float | None = None
    ctrl_dt: float | None = None
    num_passes: int = 4
    learning_rate: float = 3e-4
    anneal_lr: bool = False
    gamma: float = 0.99
    lam: float = 0.95
    clip_param: float = 0.2
    use_clipped_value_loss: bool = False
    value_loss_coef: float = 0.5
    entropy_coef: float = 0.01
    global_grad_clip: float | None = 0.5
    normalize_advantages: bool = True
    target_kl: float | None = None
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    seed: int = 0
    eval_every: int | None = None
    eval_episodes: int = 10
    log_interval: int | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_interval: int = 5_000
    max_checkpoints: int = 5
    keep_period: int | None = None
    resume: bool = False
    overwrite: bool = False
    if TYPE_CHECKING:  # other names
        lr: float = 3e-4
        max_grad_norm: float | None = 0.5

    else:

        def __setattr__(self, name: str, value: Any) -> None:
            """Sets a setting, by a further name too; raises a :class:`SettingError` for an unknown one."""
            name = self.ALSO.get(name, name)
            check_attribute(self, name)
            super().__setattr__(name, value)


RUNNER = (
    *("total_timesteps", "seed", "eval_every", "eval_episodes", "log_interval", "checkpoint_dir"),
    *("checkpoint_interval", "max_checkpoints", "keep_period", "resume", "overwrite"),
)
"""Settings that have the same name in :class:`RunnerConfig`."""


def in_configs_names(message: str) -> str:
    """Translates a message about settings into the names of :class:`DistributedPPOConfig`."""
    return _SAID.sub(lambda found: _NAMES[found[0]], message)


def settings_of(config: DistributedPPOConfig, devices: int) -> tuple[PPOConfig, RunnerConfig]:
    """Returns the settings of a run on ``devices`` devices.

    Raises:
        ValueError: they contradict one another; one line in the config's names.
    """
    num_envs = whole_number("num_envs", config.num_envs, 1)
    if num_envs % devices:
        raise ValueError(
            f"num_envs: {num_envs} environments of the whole run must be divisible by num_devices {devices}; "
            f"{nearest(num_envs, devices)}"
        )
    try:
        return _ppo(config, num_envs), _runner(config, num_envs // devices, devices)
    except ValueError as error:
        raise ValueError(in_configs_names(str(error))) from None


def _ppo(config: DistributedPPOConfig, num_envs: int) -> PPOConfig:
    clipped = switch("use_clipped_value_loss", config.use_clipped_value_loss)
    return PPOConfig(
        learning_rate=config.learning_rate,
        anneal_lr=config.anneal_lr,
        gamma=config.gamma,
        gae_lambda=config.lam,
        clip_eps=config.clip_param,
        vf_clip_eps=config.clip_param if clipped else None,
        ent_coef=config.entropy_coef,
        vf_coef=config.value_loss_coef,
        max_grad_norm=config.global_grad_clip,
        target_kl=config.target_kl,
        n_steps=_steps(config),
        n_epochs=whole_number("num_passes", config.num_passes, 1),
        n_minibatches=minibatches(config.batch_size, config.num_batches, num_envs, "the whole run") or BATCHES,
        hidden_sizes=config.hidden_sizes,
        activation=config.activation,
        normalize_advantage=config.normalize_advantages,
    )


def _runner(config: DistributedPPOConfig, num_envs: int, devices: int) -> RunnerConfig:
    return RunnerConfig(
        num_devices=devices,
        num_envs=num_envs,
        sync_period=whole_number("grad_sync_period", config.grad_sync_period, 1),
        **{name: getattr(config, name) for name in RUNNER},
    )


def _steps(config: DistributedPPOConfig) -> int:
    if config.rollout_length_seconds is None:
        return whole_number("rollout_length_steps", config.rollout_length_steps, 1)
    if not config.ctrl_dt or config.ctrl_dt < 0:
        raise ValueError(f"rollout_length_seconds: {config.rollout_length_seconds} need ctrl_dt, the seconds of a step")
    steps = round(config.rollout_length_seconds / config.ctrl_dt)
    if steps < 1:
        raise ValueError(f"rollout_length_seconds: {config.rollout_length_seconds} are no step of {config.ctrl_dt}")
    return steps
