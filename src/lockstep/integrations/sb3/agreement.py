"""Checks before ``learn`` that ranks have the same settings, and gives them different environments and draws."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from lockstep.core.errors import RankMismatchError
from lockstep.core.machine import first_difference
from lockstep.core.shards import keyed_seed
from lockstep.integrations.attach.process_group import is_writer
from lockstep.integrations.sb3.environments import KnownEnvironments, Seed, in_use_alike, seeds, tell_apart

SETTINGS = (
    *("n_envs", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"),
    *("normalize_advantage", "normalize_advantage_locally", "target_kl", "use_sde", "sde_sample_freq"),
    *("num_timesteps", "_n_updates", "_stats_window_size"),
)
SCHEDULES = ("lr_schedule", "clip_range", "clip_range_vf")
TOLD_APART = KnownEnvironments()
WARNED = KnownEnvironments()
ALIKE_AGAIN = (
    "lockstep: warning: environments of rank {rank} have a lower rank's random numbers again after an earlier learn, "
    "as those do that seed themselves; they are left so, and ranks see alike episodes unless they are seeded by rank"
)


def agree(model: OnPolicyAlgorithm, learning: dict[str, Any], rank: int, gather_json: Callable[[Any], list]) -> None:
    """Checks that ranks have the same settings, then makes their environments' seeds and random numbers differ.

    ``learning`` holds the arguments of ``learn`` that decide how often ranks meet. A collective.

    Raises:
        RankMismatchError: on every rank, if a setting differs.
    """
    assert model.env is not None
    mine = [{**learning, **_settings(model)}, seeds(model.env), model.env in TOLD_APART, _generators()]
    settings, of_envs, known, generators = zip(*gather_json(mine), strict=True)
    _check_settings(settings)
    resets = learning["reset_num_timesteps"] or model._last_obs is None  # as the library decides it
    _separate_environments(model.env, [[Seed(*seed) for seed in theirs] for theirs in of_envs], known, rank, resets)
    _separate_generators(generators, rank)


def _settings(model: OnPolicyAlgorithm) -> dict[str, Any]:
    settings: dict[str, Any] = {name: _plain(getattr(model, name, None)) for name in SETTINGS}
    for name in SCHEDULES:
        schedule: Any = getattr(model, name, None)
        settings[name] = None if schedule is None else float(schedule(1.0))
    settings["parameters"] = sum(p.numel() for p in model.policy.parameters())
    return settings


def _separate_environments(
    env: VecEnv, everyone: Sequence[Sequence[Seed]], known: Sequence[bool], rank: int, resets: bool
) -> None:
    """Tells environments in use apart before the first ``learn`` that resets them; it resets none by itself.

    One that seeds itself would be alike again each time, and a Monitor may forbid resets before an episode's end.
    """
    tell_apart(env, everyone, rank, resets and not known[rank])
    if resets:
        TOLD_APART.add(env)
    again = [one for one in range(len(everyone)) if known[one] and in_use_alike(everyone, one)]
    if again and is_writer() and env not in WARNED:
        WARNED.add(env)
        print(ALIKE_AGAIN.format(rank=again[0]), file=sys.stderr, flush=True)


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check_settings(everyone: Sequence[dict[str, Any]]) -> None:
    if (found := first_difference(everyone)) is not None:
        rank, name = found
        raise RankMismatchError(
            f"{name.lstrip('_')}: rank {rank} has {everyone[rank][name]} and rank 0 has {everyone[0][name]}; every "
            "rank must make the same model and call learn with the same arguments"
        )


def _generators() -> dict[str, str]:
    """Returns fingerprints of the global generators, which draw actions, dropout and the order of samples."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    states = {
        "python": repr(random.getstate()).encode(),
        "numpy": numpy["state"]["key"].tobytes() + bytes(str(numpy["state"]["pos"]), "ascii"),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _separate_generators(everyone: Sequence[dict[str, str]], rank: int) -> None:
    """Reseeds each global generator whose state equals that of a lower rank."""
    seeds: dict[str, Callable[[int], Any]] = {"python": random.seed, "numpy": np.random.seed}
    for name, seed in (seeds | {"torch": torch.manual_seed}).items():
        states = [one[name] for one in everyone]
        if states[rank] in states[:rank]:
            seed(keyed_seed(int(states[rank], 16), f"sb3 {name}", rank))
