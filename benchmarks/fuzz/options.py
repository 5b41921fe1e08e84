"""How every setting of a config is drawn, or why it isn't: a new one has to be put into one of the two tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.fuzz.environments import Environment


class Setting(NamedTuple):
    """What has been chosen so far, by which a setting is drawn or left as it is.

    Attributes:
        engine: ``torch`` or ``jax``.
        environment: what is trained on.
        grpo: whether GRPO trains, which has no critic.
        own: whether a network of one's own stands in place of the others.
        recurrent: whether the policy remembers.
    """

    engine: str
    environment: Environment
    grpo: bool
    own: bool
    recurrent: bool


class Draw(NamedTuple):
    """How often a setting is drawn where it can be, from which values, and where that is."""

    share: float
    values: Sequence[Any]
    where: Callable[[Setting], bool] = lambda _: True


def _wraps(setting: Setting) -> bool:
    return setting.environment.wraps


def _repeats(setting: Setting) -> bool:
    return setting.environment.wraps and not setting.environment.masks


def _ours(setting: Setting) -> bool:
    return not setting.own


def _pictures(setting: Setting) -> bool:
    return setting.environment.images and not setting.own


ALWAYS = 1.0
OPTIONS: dict[str, Draw] = {
    "env.max_episode_steps": Draw(0.3, (1, 3, 7, 20)),
    "env.frame_skip": Draw(0.12, (2, 3), _repeats),
    "env.frame_stack": Draw(0.15, (2, 3), _wraps),
    "env.sticky_actions": Draw(0.12, (0.3,), _repeats),
    "env.reward_sign": Draw(0.12, (True,)),
    "env.reward_scale": Draw(0.15, (0.1, 100.0)),
    "env.reward_clip": Draw(0.15, ((-0.5, 1.0),)),
    "seed": Draw(ALWAYS, (0, 1, 7, 2**31, 2**62)),
    "precision": Draw(0.12, ("bf16",)),
    "ppo.learning_rate": Draw(ALWAYS, (1e-4, 3e-3, 3e-2, 0.1)),
    "ppo.schedule": Draw(ALWAYS, ("constant", "linear", "adaptive")),
    "ppo.desired_kl": Draw(0.2, (1e-3, 0.1)),
    "ppo.gamma": Draw(ALWAYS, (0.0, 0.9, 0.99, 1.0)),
    "ppo.gae_lambda": Draw(ALWAYS, (0.0, 0.95, 1.0)),
    "ppo.num_epochs": Draw(ALWAYS, (1, 2, 2, 3)),
    "ppo.clip_range": Draw(0.3, (1e-4, 0.01, 3.0)),
    "ppo.value_clip_range": Draw(0.3, (1e-3, 0.2), lambda setting: not setting.grpo),
    "ppo.clip_schedule": Draw(0.3, ("linear",)),
    "ppo.advantage_normalization": Draw(0.4, ("local", "off"), lambda setting: not setting.grpo),
    "ppo.entropy_coef": Draw(0.4, (1e-3, 0.1)),
    "ppo.value_coef": Draw(0.2, (0.0, 2.0), lambda setting: not setting.grpo),
    "ppo.max_grad_norm": Draw(0.4, (None, 1e-3, 10.0)),
    "ppo.target_kl": Draw(0.3, (1e-8, 1e-3, 0.01)),
    "ppo.adam_eps": Draw(0.1, (1e-8,)),
    "ppo.adam_betas": Draw(0.2, ((0.0, 0.0), (0.5, 0.9))),
    "ppo.loss": Draw(0.08, ("benchmarks.fuzz.loss:penalised",), lambda setting: not setting.environment.masks),
    "grpo.normalize_std": Draw(0.3, (False,), lambda setting: setting.grpo),
    "grpo.kl_coef": Draw(0.4, (0.1,), lambda setting: setting.grpo),
    "network.hidden_sizes": Draw(ALWAYS, ((64, 64), (8,), (16, 5), (7, 3, 9), (1,)), _ours),
    "network.activation": Draw(ALWAYS, ("tanh", "relu", "elu", "silu", "gelu"), _ours),
    "network.shared": Draw(0.3, (True,), lambda setting: not (setting.own or setting.grpo)),
    "network.log_std_init": Draw(0.2, (-2.0, 1.0), lambda setting: setting.environment.continuous),
    "network.state_dependent_std": Draw(0.3, (True,), lambda setting: setting.environment.continuous),
    "network.squash": Draw(0.3, (True,), lambda setting: setting.environment.bounded),
    "network.image.kind": Draw(ALWAYS, ("simple", "residual"), _pictures),
    "network.image.width": Draw(ALWAYS, (0.125, 0.25), _pictures),
    "network.image.depth": Draw(ALWAYS, (1, 2), _pictures),
    "network.remat": Draw(0.15, (True,), lambda setting: setting.engine == "jax" and not setting.own),
    "network.recurrent_size": Draw(ALWAYS, (1, 5, 8, 16), lambda setting: setting.recurrent),
    "network.custom_kwargs": Draw(
        ALWAYS,
        ({}, {"dropout": 0.2}, {"dropout": 0.1, "normalizes": True}, {"low": True}, {"normalizes": True, "low": True}),
        lambda setting: setting.own,
    ),
    "normalize.observations": Draw(0.4, (True,), lambda setting: setting.environment.numbers),
    "normalize.returns": Draw(0.4, (True,), lambda setting: not setting.grpo),
    "normalize.clip_observations": Draw(0.15, (0.5,)),
    "normalize.clip_rewards": Draw(0.15, (0.5,)),
    "eval.interval": Draw(0.6, (1, 2, 3)),
    "eval.episodes": Draw(ALWAYS, (1, 3, 16)),
    "eval.max_steps": Draw(ALWAYS, (1, 10, 30)),
    "checkpoint.keep_best": Draw(0.3, (False,)),
    "log.console": Draw(0.2, ("full",)),
    "log.timing": Draw(0.3, (True,)),
    "log.tensorboard": Draw(ALWAYS, (False, False, False, True)),
    "proof.trace": Draw(0.2, (True,)),
}
"""Settings whose values any others allow; what has to fit together is drawn by :mod:`benchmarks.fuzz.draw`."""

OF_A_SESSION: dict[str, Draw] = {
    "checkpoint.interval": Draw(ALWAYS, (0, 1, 2, 3)),
    "checkpoint.keep_last": Draw(0.5, (1, 2)),
    "checkpoint.seconds": Draw(0.3, (0.05,)),
    "env.workers": Draw(0.2, (1, 2, 3, "auto"), lambda setting: setting.environment.host),
    "collectives": Draw(0.2, ("backend", "shared")),
    "proof.interval": Draw(0.3, (1, 2)),
}
"""Settings that change no agent, drawn anew for every session of a run."""

FITTED = (
    "engine",
    "algorithm",
    "env.id",
    "env.kwargs",
    "env.backend",
    "env.action_mask",
    "env.atari.enabled",
    "env.atari.screen_size",
    "num_envs",
    "num_shards",
    "num_steps",
    "total_steps",
    "reduction",
    "sync_period",
    "fsdp",
    "ppo.num_minibatches",
    "ppo.gradient_accumulation",
    "ppo.entropy_schedule",
    "ppo.loss_kwargs",
    "grpo.group_size",
    "network.recurrent",
    "network.sequence_length",
    "network.custom",
)
"""Settings that :mod:`benchmarks.fuzz.draw` and the environments choose so that they fit together."""

_ANOTHER_NAME = "another way to say what is drawn"
_ELSEWHERE = "sends what it gets elsewhere"
_ATARI = "Atari's standard; tests of its own compare the wrappers"
NOT_DRAWN: dict[str, str] = {
    "device": "needs an accelerator",
    "backend": "gloo is the only one of CPUs",
    "compile": "compiles for half a minute; tests of its own",
    "cuda_graphs": "needs an accelerator",
    "threads": "a part of the config by which bits differ; more threads than cores would only be slow",
    "collective_timeout": "faults that hang are tests of their own",
    "total_iterations": _ANOTHER_NAME,
    "num_envs_per_rank": "the agent depends on the number of ranks then, as it says",
    "ppo.batch_size": _ANOTHER_NAME,
    "ppo.drop_remainder": "only where minibatches don't come out even; tests of its own",
    "grpo.reference": "needs a run that was trained before",
    "env.timeout": "environments that hang are tests of their own",
    "env.atari.noop_max": _ATARI,
    "env.atari.frame_skip": _ATARI,
    "env.atari.grayscale": _ATARI,
    "env.atari.terminal_on_life_loss": _ATARI,
    "env.atari.fire_reset": _ATARI,
    "checkpoint.mirror": "needs a server; tests of its own",
    "checkpoint.replay_limit": "begins episodes anew, as it says",
    "eval.record_video": "an encoder's seconds for a picture that nobody looks at",
    "log.jsonl": "a copy of metrics.jsonl",
    "log.wandb": _ELSEWHERE,
    "log.trackio": _ELSEWHERE,
    "log.mlflow": _ELSEWHERE,
    "log.project": _ELSEWHERE,
    "log.group": _ELSEWHERE,
    "log.tags": _ELSEWHERE,
    "log.entity": _ELSEWHERE,
}
"""Why a setting is never drawn."""
