"""Writes what a run says before it trains: its set-up in one line, and what leaves the promise of equal bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from lockstep.config.presets import defaults_for, for_grpo, preset_for
from lockstep.config.run import Config, RunOptions
from lockstep.core.fingerprint import sha256_of
from lockstep.core.shards import uneven
from lockstep.core.tree import Tree
from lockstep.envs.description import EnvDescription
from lockstep.networks.spec import ImageEncoder
from lockstep.runs.checkpoint import POLICY
from lockstep.training.session import TrainingSession, episodes_of_evaluation

DEFAULTS = Config()
FAST = "reduction fast: repeatable at this number of {unit}; others agree up to summation order only"
APART = "sync_period {period}: {unit} train apart between synchronisations; the agent depends on their number"


def quantity(number: int, noun: str) -> str:
    """Returns ``1 shard``, ``2 shards``."""
    return f"{number} {noun}{'s' if number > 1 else ''}"


def shards_each(tree: Tree) -> str:
    """Returns how many shards a rank owns: ``2 shards``, ``3 or 2 shards``."""
    most, least = len(tree.owned[0]), len(tree.owned[-1])
    return quantity(most, "shard") if most == least else f"{most} or {least} shards"


def start_lines(
    session: TrainingSession, options: RunOptions, unit: str, set_up: Sequence[str], own: Sequence[str]
) -> list[str]:
    """Returns a line with the set-up, once parameters are known to be in sync, and lines on what leaves the promise.

    ``unit`` is what the run is spread over, ``ranks`` or ``devices``; ``set_up`` is the engine's part of the first
    line, ``own`` are the engine's lines on what leaves the promise.

    Raises:
        DesyncError: ranks hold different bytes; on all ranks.
    """
    config = session.config
    session.check_in_sync("at the start")
    digest = sha256_of({k: v for k, v in session.arrays().items() if k.startswith(POLICY)})[:8]
    out = [" · ".join([config.env.id, *set_up, f"parameters in sync ({digest})"])]
    out += [f"observation {name!r} is text, which the policy doesn't see" for name in session.description.texts]
    ranks = session.facts()["world_size"]
    if (how := uneven(ranks, config.shards, config.envs, unit)) is not None:
        out.append(how)
    if config.reduction == "fast":
        out.append(FAST.format(unit=unit))
    out += loss_notes(session)
    out += grpo_notes(config, session.description.max_episode_steps)
    out += own if session.workers_note is None else [session.workers_note, *own]
    if config.eval.interval and config.eval.episodes % config.shards:
        out.append(
            f"eval.episodes {config.eval.episodes}: {episodes_of_evaluation(config)} are played, equally many by each "
            f"of {config.shards} shards"
        )
    if config.sync_period > 1:
        out.append(APART.format(unit=unit, period=config.sync_period))
    if options.max_hours is not None:
        out.append("max-hours: where the run ends depends on the speed of this machine")
    return out


def loss_notes(session: TrainingSession) -> list[str]:
    """Returns notes on a user's own loss: that it was edited, or doesn't train the policy."""
    found = session.own_loss
    if found is None:
        return []
    notes = [] if found.note is None else [found.note]
    if not found.trains_the_policy:
        notes.append(
            f"ppo.loss: {session.config.ppo.loss} has no gradient by log_prob or actor_output: only its entropy, and "
            "what it shares with the critic, trains the policy"
        )
    return notes


def grpo_notes(config: Config, limit: int | None) -> list[str]:
    """Says that GRPO counts episodes within one iteration, if the environment lets them last longer."""
    if config.algorithm != "grpo" or (limit is not None and limit <= config.num_steps):
        return []
    longest = "has no time limit" if limit is None else f"lets them last {limit}"
    return [f"grpo: episodes count for num_steps ({config.num_steps}) at most; the environment {longest}"]


def unread_in(config: Config, description: EnvDescription) -> list[str]:
    """Returns the lines of :func:`unread_settings` for an environment."""
    seen, image = description.observation, config.network.image
    encoder = ImageEncoder(image.kind, image.width, image.depth)
    deep = any(leaf.kind == "image" and encoder.resolved(leaf) != "nature" for leaf in seen.leaves)
    return unread_settings(config, description.action.discrete, seen.image_bytes > 0, deep)


def unread_settings(config: Config, discrete: bool, images: bool = True, deep: bool = True) -> list[str]:
    """Returns a line for each setting that has no effect given the others.

    ``discrete`` says whether actions are, ``images`` whether observations have some, and ``deep`` whether any of these
    has an encoder with a depth.
    """
    ppo, network, found = config.ppo, config.network, list[str]()

    def tell(key: str, value: Any, why: str) -> None:
        found.append(_unread(key, value, why))

    if config.algorithm == "ppo" and config.grpo.kl_coef:
        tell("grpo.kl_coef", config.grpo.kl_coef, "algorithm ppo has no reference policy; algorithm grpo has")
    if config.algorithm == "grpo" and network.shared and not any(c.network.shared for c in _given_by_nobody(config)):
        tell("network.shared", True, "algorithm grpo has no critic to share layers with")
    if ppo.schedule != "adaptive" and ppo.desired_kl != DEFAULTS.ppo.desired_kl:
        tell("ppo.desired_kl", ppo.desired_kl, f"ppo.schedule is {ppo.schedule}; adaptive follows it")
    found += _sizes_of_nothing(config)
    found += _parts_of_nothing(config, images, deep)
    if discrete and network.state_dependent_std:
        tell("network.state_dependent_std", True, "actions are discrete")
    if network.log_std_init != DEFAULTS.network.log_std_init:
        if discrete:
            tell("network.log_std_init", network.log_std_init, "actions are discrete")
        elif network.custom and network.state_dependent_std:
            tell("network.log_std_init", network.log_std_init, "network.custom itself gives the standard deviations")
    return found


def _sizes_of_nothing(config: Config) -> list[str]:
    """Returns lines for sizes and limits of parts that the run doesn't have."""
    memory = None if config.network.recurrent else _without_memory(config)
    groups = None if config.algorithm == "grpo" else "algorithm ppo has no groups; algorithm grpo has"
    normalize = config.normalize
    critic = "algorithm grpo has no critic" if config.algorithm == "grpo" else None
    whole = None if critic is None else "algorithm grpo compares whole returns, which aren't discounted"
    absent = {
        "network.recurrent_size": memory,
        "network.sequence_length": memory,
        "normalize.clip_observations": None if normalize.observations else "normalize.observations is off",
        "normalize.clip_rewards": None if normalize.returns else "normalize.returns is off",
        "grpo.group_size": groups,
        "grpo.normalize_std": groups,
        "ppo.gamma": whole,
        "ppo.gae_lambda": critic,
        "ppo.value_coef": None if config.ppo.loss else critic,  # a user's own loss may read it
    }
    found = []
    for key, why in absent.items():
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        if why is not None and value != getattr(getattr(DEFAULTS, section), name):
            found.append(_unread(key, value, why))
    return found


def _parts_of_nothing(config: Config, images: bool, deep: bool) -> list[str]:
    """Returns lines for settings, other than those of a preset, of parts that the run doesn't have."""
    network, given = config.network, _given_by_nobody(config)
    layers = None
    if network.custom is not None:
        layers = f"network.custom {network.custom} stands in place of all networks"
    absent = {"network.hidden_sizes": layers, "network.activation": layers}
    absent["network.shared"] = layers if config.algorithm == "ppo" else None  # else GRPO is the reason
    encoder = layers or (None if images else "observations have no images")
    absent |= {f"network.image.{name}": encoder for name in type(network.image).model_fields}
    if not deep:
        absent["network.image.depth"] = encoder or "an encoder of the kind nature always has three layers"
    games = None if config.env.atari.enabled else "env.atari is off"
    absent |= {f"env.atari.{name}": games for name in type(config.env.atari).model_fields if name != "enabled"}
    absent["eval.episodes"] = None if config.eval.interval else "eval.interval is 0; evaluations are off"
    return [
        _unread(key, value, why)
        for key, why in absent.items()
        if why is not None and (value := _value_of(config, key)) not in [_value_of(each, key) for each in given]
    ]


def _given_by_nobody(config: Config) -> list[Config]:
    """Returns the configs from which this one may have begun: the defaults, and the environment's presets."""
    preset = preset_for(config.env.id)
    begun = [preset, for_grpo(config.env.id, preset)]
    begun += [defaults_for(continuous, images)[0] for continuous, images in ((True, False), (False, True))]
    return [DEFAULTS, *map(Config.model_validate, begun)]


def _value_of(config: Config, key: str) -> Any:
    return functools.reduce(getattr, key.split("."), config)


def _without_memory(config: Config) -> str:
    if config.network.custom is not None:
        return f"network.custom {config.network.custom} stands in place of all networks and has no memory"
    return "networks have no memory; network.recurrent lstm or gru gives them one"


def _unread(key: str, value: Any, why: str) -> str:
    shown = list(value) if isinstance(value, tuple) else str(value).lower() if isinstance(value, bool) else value
    return f"{key}: {shown} changes nothing: {why}"
