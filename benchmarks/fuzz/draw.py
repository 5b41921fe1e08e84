"""Draws a config, and the numbers of ranks that its run is held to, from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.fuzz.environments import drawn_environment
from benchmarks.fuzz.options import OF_A_SESSION, OPTIONS, Draw, Setting
from lockstep.config.checks import resolve
from lockstep.config.files import nested
from lockstep.config.run import Config
from lockstep.training.limits import LEARNING_RATE_LIMITS

MOST_RANKS = 8
SESSIONS = 8
"""Sets of words of which each session of a run takes one."""


@dataclass(frozen=True)
class Drawn:
    """A config, and what its sessions may change.

    Attributes:
        engine: ``torch`` or ``jax``.
        values: the config's settings by their dotted names.
        iterations: of the whole run.
        steps: of an iteration.
        sessions: words of ``lockstep train`` that change no agent: ranks or devices first, one rank in the first.
    """

    engine: str
    values: Mapping[str, Any]
    iterations: int
    steps: int
    sessions: tuple[tuple[str, ...], ...]

    @property
    def config(self) -> dict[str, Any]:
        """The config as a file has it."""
        return nested(self.values)

    @property
    def eval_interval(self) -> int:
        """Iterations between evaluations; 0: none."""
        return self.values.get("eval.interval", 0)


def drawn_config(seed: int, engine: str) -> Drawn:
    """Draws until the settings fit together; the same seed and engine always draw the same."""
    source = random.Random(f"{engine} {seed}")
    while True:
        drawn = _draw(source, engine)
        try:
            resolve(Config.model_validate(drawn.config))
        except ValueError:
            continue
        return drawn


def _draw(source: random.Random, engine: str) -> Drawn:
    environment = drawn_environment(source, engine)
    grpo = source.random() < 0.15
    recurrent = source.random() < (0.15 if environment.images else 0.3)
    own = environment.vector and not (environment.masks or recurrent or grpo) and source.random() < 0.2
    setting = Setting(engine, environment, grpo, own, recurrent)
    values: dict[str, Any] = {"engine": engine, **_flat(environment.settings, "env.")}
    values |= dict(_chosen(source, OPTIONS, setting))
    if environment.forever and "env.max_episode_steps" not in values:
        values["env.max_episode_steps"] = source.choice([5, 20])
    if own:
        values["network.custom"] = f"benchmarks.fuzz.{engine}_network:Own"
    if "ppo.entropy_coef" in values and source.random() < 0.4:
        values["ppo.entropy_schedule"] = "linear"
    if "ppo.loss" in values:
        values["ppo.loss_kwargs"] = {"weight": 0.01}
    shards = source.choice([2, 3, 4, 5, 8] if engine == "jax" else [1, 2, 3, 3, 4, 5, 5, 6, 7, 8, 8])
    iterations = source.randint(4, 12)
    values |= _sizes(source, setting, shards, iterations)
    _normalise_several(values, setting)
    _adapt_within_limits(values)
    fast = shards > 1 and source.random() < 0.08
    if fast:
        values |= _fast(source, engine)
    steps = values["num_envs"] * values["num_steps"]
    ranks = [n for n in range(1, MOST_RANKS + 1) if n <= shards]
    if fast:  # the agent of so many ranks, which are the same in every session
        ranks = [source.choice(ranks[1:])]
    sessions = [_session(source, setting, source.choice(ranks), fast) for _ in range(SESSIONS)]
    sessions[0] = _session(source, setting, ranks[0], fast)
    return Drawn(engine, values, iterations, steps, tuple(sessions))


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """The settings of an environment by dotted names; ``kwargs`` are one setting."""
    out: dict[str, Any] = {}
    for name, value in values.items():
        out |= _flat(value, f"{prefix}{name}.") if name == "atari" else {prefix + name: value}
    return out


def _chosen(source: random.Random, table: Mapping[str, Draw], setting: Setting) -> Iterator[tuple[str, Any]]:
    for name, draw in table.items():
        if draw.where(setting) and source.random() < draw.share:
            yield name, source.choice(draw.values)


def _sizes(source: random.Random, setting: Setting, shards: int, iterations: int) -> dict[str, Any]:
    """Numbers that divide each other."""
    values: dict[str, Any] = {}
    group = 1
    if setting.grpo:
        group = source.choice([2, 3])
        values |= {"algorithm": "grpo", "grpo.group_size": group}
    envs = group * source.choice([1, 1, 2, 3])
    steps, length = source.choice([1, 2, 4, 5, 6, 8, 8, 12, 16, 16, 30]), 1
    if setting.recurrent:
        length = source.choice(_divisors(steps))
        values |= {"network.recurrent": source.choice(["lstm", "gru"]), "network.sequence_length": length}
    units = envs * steps // length
    minibatches = source.choice(_divisors(units)[:6])
    values |= {"num_envs": shards * envs, "num_shards": shards, "num_steps": steps}
    values["ppo.num_minibatches"] = minibatches
    if source.random() < 0.2:
        values["ppo.gradient_accumulation"] = source.choice(_divisors(units // minibatches)[:3])
    samples = shards * envs * steps
    values["total_steps"] = max(1, iterations * samples - source.choice([0, 0, samples // 2, samples - 1]))
    return values


def _normalise_several(values: dict[str, Any], setting: Setting) -> None:
    """Leaves advantages as they are where there is one to normalise, which is refused."""
    key, shards = "ppo.advantage_normalization", values["num_shards"]
    part = values["num_envs"] // shards * values["num_steps"] // values["ppo.num_minibatches"]
    if not setting.grpo and part * (1 if values.get(key) == "local" else shards) == 1:
        values[key] = "off"


def _adapt_within_limits(values: dict[str, Any]) -> None:
    """Leaves learning rates constant that are beyond the limits of the adaptive schedule, which are refused."""
    low, high = LEARNING_RATE_LIMITS
    if values["ppo.schedule"] == "adaptive" and not low <= values["ppo.learning_rate"] <= high:
        values["ppo.schedule"] = "constant"


def _divisors(number: int) -> Sequence[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _fast(source: random.Random, engine: str) -> dict[str, Any]:
    kinds = [{}, {"sync_period": 2}, *([{"fsdp": True}] if engine == "torch" else [])]
    return {"reduction": "fast", **source.choice(kinds)}


def _session(source: random.Random, setting: Setting, ranks: int, fast: bool) -> tuple[str, ...]:
    words = ["--nproc", str(ranks)]
    if setting.engine == "jax":
        words = ["--simulate-devices", str(ranks), "--devices", str(ranks)]
        if ranks == 2 and source.random() < 0.25:
            words = ["--nproc", "2", "--simulate-devices", "1"]
    chosen = dict(_chosen(source, OF_A_SESSION, setting))
    if fast:  # its sums depend on how they travel
        chosen.pop("collectives", None)
    elif setting.engine == "jax" and words[0] == "--nproc":  # a run that goes on here may have been "shared" before
        chosen["collectives"] = "backend"
    for name, value in chosen.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return tuple(words)
