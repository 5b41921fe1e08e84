"""Defines the settings of ``lockstep.jax``, named as in other JAX trainers, and translates them into a config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jax.core import Tracer

from lockstep.config.checks import resolve
from lockstep.config.keys import check_no_booleans, validate
from lockstep.config.on_off import switch
from lockstep.config.run import Config
from lockstep.core.errors import one_line
from lockstep.core.shards import default_num_shards
from lockstep.jax.settings import Settings

PPO_NAMES = {
    "learning_rate": "ppo.learning_rate",
    "gamma": "ppo.gamma",
    "gae_lambda": "ppo.gae_lambda",
    "clip_eps": "ppo.clip_range",
    "vf_clip_eps": "ppo.value_clip_range",
    "ent_coef": "ppo.entropy_coef",
    "vf_coef": "ppo.value_coef",
    "max_grad_norm": "ppo.max_grad_norm",
    "target_kl": "ppo.target_kl",
    "adam_eps": "ppo.adam_eps",
    "n_steps": "num_steps",
    "n_epochs": "ppo.num_epochs",
    "n_minibatches": "ppo.num_minibatches",
    "drop_remainder": "ppo.drop_remainder",
    "hidden_sizes": "network.hidden_sizes",
    "activation": "network.activation",
    "shared_layers": "network.shared",
    "normalize_observations": "normalize.observations",
    "normalize_rewards": "normalize.returns",
}
"""Maps settings of :class:`PPOConfig` that stay unchanged to their names in :class:`lockstep.config.run.Config`."""

_PRODUCT = "num_devices x num_envs"
_USERS = {theirs: mine for mine, theirs in PPO_NAMES.items()} | {
    "env.id": "env",
    "num_envs": _PRODUCT,
    "devices": "num_devices",
    "--num-shards": "num_shards",
}
_DOTTED = "|".join(map(re.escape, PPO_NAMES.values()))
_NAMES = re.compile(
    rf"{_PRODUCT}|(?<![\w.])(?:{_DOTTED})(?!\w)|^(?:devices|env\.id)(?=:)|(?<!\w)num_envs(?=:| \d)|--num-shards(?=\s)"
)
"""Matches names of a config in a message, and the product that stands for one of them."""

OFF_POLICY = ("buffer_size", "warmup_steps", "batch_size", "tau", "target_update_freq")

COUNTS = (
    *("total_timesteps", "num_devices", "num_envs", "fsdp_devices", "num_shards", "sync_period"),
    *("eval_every", "eval_episodes", "log_interval", "checkpoint_interval", "max_checkpoints", "keep_period"),
)
"""Settings of :class:`RunnerConfig` that are whole numbers, at least 1."""

UPDATES = "updates follow from total_timesteps, environment steps of the whole run; give that"
SEEDS = "one program trains one seed here; give seed, and train once for each"

PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "tpu": "tpu"}


@dataclass(frozen=True)
class PPOConfig(metaclass=Settings):
    """Settings of proximal policy optimisation (Schulman et al. 2017).

    Attributes:
        learning_rate: Adam's step size (``ppo.learning_rate``); ``lr`` is the same.
        anneal_lr: whether it falls to 0 linearly over the run (``ppo.schedule`` linear; else constant).
        gamma: discount per step (``ppo.gamma``).
        gae_lambda: lambda of GAE (``ppo.gae_lambda``).
        clip_eps: clipping range of the probability ratio (``ppo.clip_range``).
        vf_clip_eps: clipping range of the value's change, None: off (``ppo.value_clip_range``). PureJaxRL clips it by
            ``clip_eps``: give the same number for that.
        ent_coef: weight of the entropy bonus (``ppo.entropy_coef``).
        vf_coef: weight of the value loss ``0.5 * mean((v - return)^2)`` (``ppo.value_coef``), as in CleanRL and
            PureJaxRL. Stable-Baselines3 and SBX leave out the 0.5: their ``vf_coef`` is half of this one.
        max_grad_norm: clipping by global norm, None: off (``ppo.max_grad_norm``).
        target_kl: ends an update early above 1.5 times this approx_kl, None: off (``ppo.target_kl``).
        adam_eps: Adam's epsilon (``ppo.adam_eps``).
        n_steps: steps of each environment per update (``num_steps``).
        n_epochs: passes over an update's samples (``ppo.num_epochs``).
        n_minibatches: optimiser steps per pass (``ppo.num_minibatches``).
        drop_remainder: whether a pass drops samples of a shard, others each time, so that minibatches come out even;
            otherwise minibatches must divide the samples (``ppo.drop_remainder``).
        hidden_sizes: units of each hidden layer, of actor and critic (``network.hidden_sizes``).
        activation: tanh, relu, elu, silu or gelu (``network.activation``).
        shared_layers: whether actor and critic share all but their heads (``network.shared``); ``shared_backbone`` is
            the same.
        normalize_advantage: whether to normalise over the global minibatch (``ppo.advantage_normalization`` global;
            else off).
        normalize_observations: whether to normalise by running statistics of all environments
            (``normalize.observations``).
        normalize_rewards: whether to divide by the running deviation of the discounted return (``normalize.returns``).

    Raises:
        ValueError: a value is out of its limits; one line.
    """

    ALSO: ClassVar[dict[str, str]] = {"lr": "learning_rate", "shared_backbone": "shared_layers"}
    ELSEWHERE: ClassVar[dict[str, str]] = {
        "num_envs": "environments are RunnerConfig's: give num_envs there",
        "seed": "it is RunnerConfig's; give it there",
        "num_updates": "how long training is is RunnerConfig's; give total_timesteps there",
    }

    learning_rate: float = 3e-4
    anneal_lr: bool = False
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_eps: float = 0.2
    vf_clip_eps: float | None = None
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    max_grad_norm: float | None = 0.5
    target_kl: float | None = None
    adam_eps: float = 1e-5
    n_steps: int = 128
    n_epochs: int = 4
    n_minibatches: int = 4
    hidden_sizes: tuple[int, ...] = (64, 64)
    activation: str = "tanh"
    shared_layers: bool = False
    normalize_advantage: bool = True
    normalize_observations: bool = False
    normalize_rewards: bool = False
    drop_remainder: bool = False
    if TYPE_CHECKING:  # other names
        lr: float = 3e-4
        shared_backbone: bool = False

    def __post_init__(self) -> None:
        _set_switches(self, PPOConfig)
        for name in ("n_steps", "n_epochs", "n_minibatches"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        if isinstance(self.hidden_sizes, str | bytes) or not isinstance(self.hidden_sizes, Iterable):
            raise ValueError(f"hidden_sizes: {self.hidden_sizes!r} must be units of each layer, such as (64, 64)")
        sizes = tuple(whole_number("hidden_sizes", n, 1) for n in self.hidden_sizes)
        object.__setattr__(self, "hidden_sizes", sizes)
        engine_config(self)


@dataclass(frozen=True)
class RunnerConfig(metaclass=Settings):
    """Settings of a run: its length, devices, environments, evaluations and checkpoints.

    Attributes:
        total_timesteps: environment steps of all devices together, rounded down to whole updates (default 100,000).
        num_devices: number of devices of all processes; None: all that JAX sees.
        num_envs: environments of *each device*: ``num_devices * num_envs`` in all. Runs on different numbers of devices
            are the same run if that product, the seed and the shards are the same.
        fsdp_devices: devices that parameters and moments are cut over; it divides ``num_devices``.
        seed: seed of every random number.
        num_shards: shards of the run, at least one per device (default: the largest power of two, at most 8, that
            divides the number of all environments; one per device if those can't be shared out).
        reduction: ``exact`` (bitwise equal on every number of devices) or ``fast`` (shards computed together). None:
            exact if possible, which it isn't with ``fsdp_devices`` or ``sync_period`` above 1; else fast.
        sync_period: optimiser steps that a device takes alone before parameters and moments are averaged.
        eval_every: steps between evaluations with the likeliest actions; None: no evaluations. Their means are in the
            history as ``eval_return`` and ``eval_length`` (NaN for updates without one).
        eval_episodes: episodes of an evaluation, the same ones each time.
        log_interval: steps between progress lines on standard error; None: no lines.
        checkpoint_dir: directory in which train states are saved as ``step_<steps>``; None: they aren't saved.
        checkpoint_interval: steps between checkpoints; the last is at the end.
        max_checkpoints: how many of the newest checkpoints to keep.
        keep_period: period in steps; one checkpoint of each is kept for good. None: none is.
        resume: go on from the newest checkpoint there, if there is one, to what an uninterrupted run gives.
        overwrite: remove the checkpoints that are there, and nothing else.
        plot: draw the history's ``episode_return`` into ``checkpoint_dir`` at the end; needs matplotlib.

    Raises:
        ValueError: a number is too small, or settings contradict one another; one line.
    """

    ELSEWHERE: ClassVar[dict[str, str]] = {
        **dict.fromkeys(OFF_POLICY, "belongs to algorithms with a replay buffer, and this trains PPO"),
        **dict.fromkeys(("n_steps", "num_steps"), "steps of an update are PPOConfig's; give n_steps there"),
        **{"num_updates": UPDATES, "num_seeds": SEEDS},
    }

    total_timesteps: int = 100_000
    num_devices: int | None = None
    num_envs: int = 1
    fsdp_devices: int = 1
    seed: int = 0
    num_shards: int | None = None
    reduction: str | None = None
    sync_period: int = 1
    eval_every: int | None = None
    eval_episodes: int = 10
    log_interval: int | None = None
    checkpoint_dir: str | Path | None = None
    checkpoint_interval: int = 5_000
    max_checkpoints: int = 5
    keep_period: int | None = None
    resume: bool = False
    overwrite: bool = False
    plot: bool = False

    def __post_init__(self) -> None:
        _set_switches(self, RunnerConfig)
        for name in COUNTS:
            if getattr(self, name) is not None:
                object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, 0))
        if self.reduction not in (None, "exact", "fast"):
            raise ValueError(f"reduction: {self.reduction!r} is neither 'exact' nor 'fast'")
        for name in ("fsdp_devices", "sync_period"):
            if self.reduction == "exact" and getattr(self, name) > 1:
                raise ValueError(f"{name}: {getattr(self, name)} is not possible with reduction exact; use fast")
        self._check_checkpoints()

    def _check_checkpoints(self) -> None:
        if self.checkpoint_dir is not None and not isinstance(self.checkpoint_dir, str | os.PathLike):
            raise ValueError(f"checkpoint_dir: {self.checkpoint_dir!r} must be the path of a directory")
        for name in ("resume", "overwrite", "plot"):
            if getattr(self, name) and self.checkpoint_dir is None:
                raise ValueError(f"{name}: it is about checkpoint_dir, which wasn't given; give the directory")
        if self.resume and self.overwrite:
            raise ValueError("resume: goes on from checkpoints that overwrite removes; leave one of them out")


def minibatches(batch_size: int | None, num_batches: int | None, num_envs: int, whose: str) -> int | None:
    """Returns the number of minibatches; None if neither their size in environments nor their number is given.

    Raises:
        ValueError: they are no whole numbers, or don't give ``num_envs``, the environments of ``whose``; one line.
    """
    size = None if batch_size is None else whole_number("batch_size", batch_size, 1)
    number = None if num_batches is None else whole_number("num_batches", num_batches, 1)
    if size is None:
        return number
    if number is None:
        if num_envs % size:
            raise ValueError(f"batch_size: {size} doesn't divide num_envs {num_envs}, those of {whose}")
        return num_envs // size
    if size * number != num_envs:
        raise ValueError(
            f"batch_size x num_batches: {size} x {number} = {size * number} must be num_envs {num_envs}, those of "
            f"{whose}"
        )
    return number


def whole_number(name: str, value: Any, least: int) -> int:
    """Returns a whole number as an int; accepts 1e6 too.

    Raises:
        ValueError: it isn't a whole number, or smaller than ``least``; one line.
    """
    if str(getattr(value, "dtype", "")).startswith("key<"):
        raise ValueError(f"{name}: a key of jax.random was given and must be a whole number, such as {least}")
    if isinstance(value, Tracer):
        raise ValueError(
            f"{name}: a value that JAX traces (vmap, jit, scan, …) and must be a whole number, such as {least}; call "
            "it outside, once for each"
        )
    number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if isinstance(number, bool) or not isinstance(number, int | float) or number % 1 or number < least:
        raise ValueError(f"{name}: {one_line(repr(value))} must be a whole number, at least {least}")
    return int(number)


def _set_switches(settings: Any, kind: type[PPOConfig] | type[RunnerConfig]) -> None:
    """Checks all settings of a class that are on or off, and makes each a bool; not those that a subclass adds."""
    for field in fields(kind):
        if isinstance(field.default, bool):
            object.__setattr__(settings, field.name, switch(field.name, getattr(settings, field.name)))


def engine_config(ppo: PPOConfig, settings: Mapping[str, Any] | None = None) -> Config:
    """Returns the engine's config for a :class:`PPOConfig` and further settings by dotted name; not resolved.

    Raises:
        ValueError: a value is out of its limits; one line in the user's names.
    """
    given = asdict(ppo)
    values = {PPO_NAMES[name]: given[name] for name in PPO_NAMES}
    values["ppo.schedule"] = "linear" if ppo.anneal_lr else "constant"
    values["ppo.advantage_normalization"] = "global" if ppo.normalize_advantage else "off"
    nested: dict[str, Any] = {"engine": "jax"}
    for name, value in (values | dict(settings or {})).items():
        section, _, key = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[key] = value
    try:
        check_no_booleans(nested)
        return validate(Config, nested, "lockstep.jax")
    except ValueError as error:
        raise ValueError(in_users_names(str(error).removeprefix("lockstep.jax: "))) from None


def in_users_names(message: str) -> str:
    """Translates a message about a config into the names of the library; translating twice changes nothing more."""
    return _NAMES.sub(lambda found: _USERS.get(found[0], found[0]), message)


def _default_shards(devices: int, num_envs: int, even: bool) -> int:
    """Returns the default number of shards of ``devices`` with ``num_envs`` environments each.

    It is that of one device with all environments, unless the devices can't share these shards; then it is one per
    device. ``even``: all devices must own equally many, because each computes with its own samples.
    """
    shards = default_num_shards(devices * num_envs)
    return shards if shards >= devices and (not even or shards % devices == 0) else devices


def run_config(ppo: PPOConfig, runner: RunnerConfig, name: str, devices: int, platform: str, reduced: bool) -> Config:
    """Returns the resolved config of a run on ``devices`` devices; ``reduced``: the user's own hook reduces gradients.

    Raises:
        ValueError: something doesn't divide, or there is no whole update; one line in the user's names.
    """
    num_envs = devices * runner.num_envs
    steps = num_envs * ppo.n_steps
    updates = runner.total_timesteps // steps
    if updates == 0:
        raise ValueError(
            f"total_timesteps: {runner.total_timesteps} are less than one update of {devices} devices x "
            f"{runner.num_envs} environments x {ppo.n_steps} steps = {steps}; use at least {steps}"
        )
    shards = runner.num_shards
    if shards is None:
        shards = _default_shards(devices, runner.num_envs, runner.sync_period > 1 or reduced)
    fast = reduced or runner.fsdp_devices > 1 or runner.sync_period > 1
    settings = {
        "env.id": name,
        "env.backend": "jax",
        "device": PLATFORMS.get(platform, "cuda"),
        "seed": runner.seed,
        "total_steps": updates * steps,
        "num_envs": num_envs,
        "num_shards": shards,
        "reduction": runner.reduction or ("fast" if fast else "exact"),
        "fsdp": runner.fsdp_devices > 1,
        "sync_period": runner.sync_period,
    }
    try:
        return resolve(engine_config(ppo, settings), devices)
    except ValueError as error:
        raise ValueError(in_users_names(str(error))) from None
