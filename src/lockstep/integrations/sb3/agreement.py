"""Checks before ``learn`` that ranks have the same settings, and gives them different environments and draws."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.vec_env import VecEnv

from lockstep.core.errors import RankMismatchError
from lockstep.core.machine import first_difference
from lockstep.core.shards import keyed_seed

SETTINGS = (
    *("n_envs", "n_steps", "batch_size", "n_epochs", "gamma", "gae_lambda", "ent_coef", "vf_coef", "max_grad_norm"),
    *("normalize_advantage", "normalize_advantage_locally", "target_kl", "use_sde", "sde_sample_freq"),
    *("num_timesteps", "_n_updates", "_stats_window_size"),
)
SCHEDULES = ("lr_schedule", "clip_range", "clip_range_vf")


def agree(model: OnPolicyAlgorithm, learning: dict[str, Any], rank: int, gather_json: Callable[[Any], list]) -> None:
    """Checks that ranks have the same settings, then makes their environments' seeds and random numbers differ.

    ``learning`` holds the arguments of ``learn`` that decide how often ranks meet. A collective.

    Raises:
        RankMismatchError: on every rank, if a setting differs.
    """
    assert model.env is not None
    everyone = gather_json([{**learning, **_settings(model)}, _pending_seeds(model.env), _generators()])
    settings, seeds, generators = zip(*everyone, strict=True)
    _check_settings(settings)
    _shift_seeds(model.env, seeds, rank)
    _separate_generators(generators, rank)


def _settings(model: OnPolicyAlgorithm) -> dict[str, Any]:
    settings: dict[str, Any] = {name: _plain(getattr(model, name, None)) for name in SETTINGS}
    for name in SCHEDULES:
        schedule: Any = getattr(model, name, None)
        settings[name] = None if schedule is None else float(schedule(1.0))
    settings["parameters"] = sum(p.numel() for p in model.policy.parameters())
    return settings


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _check_settings(everyone: Sequence[dict[str, Any]]) -> None:
    if (found := first_difference(everyone)) is not None:
        rank, name = found
        raise RankMismatchError(
            f"{name.lstrip('_')}: rank {rank} has {everyone[rank][name]} and rank 0 has {everyone[0][name]}; every "
            "rank must make the same model and call learn with the same arguments"
        )


def _pending_seeds(env: VecEnv) -> list[int | None]:
    """Returns the seeds that a vector environment's next reset will use."""
    return [_plain(seed) for seed in getattr(env.unwrapped, "_seeds", [])]


def _shift_seeds(env: VecEnv, everyone: Sequence[list[int | None]], rank: int) -> None:
    """Reseeds this rank's environments by their global ids if a lower rank has the same seeds."""
    mine = everyone[rank]
    if mine and mine[0] is not None and mine in everyone[:rank]:
        env.seed(mine[0] + rank * env.num_envs)


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
