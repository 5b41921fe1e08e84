"""Which environments are drawn, and what each allows to be asked for."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz import environment, functional

OURS = ("CartPole", "Pendulum", "Acrobot", "MountainCar", "MountainCarContinuous", "PushCube", "GridWorld")
OURS_OF_BYTES = ("GridWorldPixels", "Snake")
CONTINUOUS = ("Pendulum", "MountainCarContinuous", "PushCube")
GYMNASIUM = {
    "CartPole-v1": "discrete",
    "Acrobot-v1": "discrete",
    "Pendulum-v1": "continuous",
    "MountainCarContinuous-v0": "continuous",
    "FrozenLake-v1": "index",
    "Blackjack-v1": "index",
    "Taxi-v4": "index",
    "CliffWalking-v1": "index",
    "HalfCheetah-v5": "continuous",
    "Hopper-v5": "continuous",
    "InvertedPendulum-v5": "continuous",
    "LunarLander-v3": "discrete",
    "BipedalWalker-v3": "continuous",
}
FOR_TORCH = {"drawn": 9, "gymnasium": 6, "arrays": 4, "tensor": 1, "game": 1}
FOR_JAX = {"drawn": 3, "gymnasium": 2, "arrays": 1, "compiled": 4, "functional": 4}
"""Kinds of environments, and how often each is drawn."""


@dataclass(frozen=True)
class Environment:
    """What is trained on.

    Attributes:
        settings: of the section ``env``.
        continuous: whether actions are.
        bounded: whether they are and have bounds.
        images: whether observations have pictures among them.
        vector: whether an observation is one vector of numbers.
        numbers: whether there is anything to normalise.
        host: whether it is stepped by Python, so that worker processes can.
        wraps: whether wrappers can be asked for.
        forever: whether episodes may not end by themselves.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    continuous: bool = False
    bounded: bool = False
    images: bool = False
    vector: bool = False
    numbers: bool = True
    host: bool = True
    wraps: bool = True
    forever: bool = False

    @property
    def masks(self) -> bool:
        """Whether actions are masked."""
        return "action_mask" in self.settings


def drawn_environment(source: random.Random, engine: str) -> Environment:
    """Draws an environment that an engine can be trained on."""
    kinds = FOR_JAX if engine == "jax" else FOR_TORCH
    kind = source.choices(list(kinds), list(kinds.values()))[0]
    if kind == "drawn":
        return _own(source)
    if kind == "functional":
        return _functional(source)
    if kind == "gymnasium":
        return _gymnasium(source)
    if kind == "game":
        game = {"id": "ALE/Breakout-v5", "atari": {"enabled": True, "screen_size": 20}}
        return Environment(game, images=True, numbers=False, wraps=False, forever=True)
    return _ours(source, kind)


def _own(source: random.Random) -> Environment:
    shown, action = source.choice(list(environment.OBSERVATIONS)), source.choice(list(environment.ACTIONS))
    length = source.choice(list(environment.LENGTHS))
    continuous = action in ("box", "uneven", "grid", "unbounded")
    kwargs: dict[str, Any] = {"observation": shown, "action": action, "length": length}
    kwargs |= {"truncates": source.random() < 0.5, "own_state": source.random() < 0.2}
    kwargs |= {"noise": source.choice([0.0, 0.05]), "tells": source.choice([None, None, "metrics", "score"])}
    kwargs |= {"scale": 1e6} if source.random() < 0.1 else {}
    settings: dict[str, Any] = {"id": "benchmarks.fuzz.environment:Drawn-v0", "kwargs": kwargs}
    if action in ("two", "from-two") and source.random() < 0.4:
        kwargs["masks"] = True
        settings["action_mask"] = "info"
    return Environment(
        settings,
        continuous=continuous,
        bounded=continuous and action != "unbounded",
        images=shown in ("image", "channels-first", "gray", "dict", "pictures"),
        vector=shown in ("vector", "one", "whole", "unbounded"),
        numbers=shown not in ("image", "channels-first", "gray", "index", "indices"),
        wraps=shown not in ("dict", "pictures", "tuple", "nested")
        and not kwargs["own_state"],  # hooks aren't asked then
        forever=length == "endless",
    )


def _functional(source: random.Random) -> Environment:
    shown, action = source.choice(list(functional.OBSERVATIONS)), source.choice(list(functional.ACTIONS))
    kwargs = {"observation": shown, "action": action, "truncates": source.random() < 0.5}
    return Environment(
        {"id": "benchmarks.fuzz.functional:Drawn", "backend": "jax", "kwargs": kwargs},
        continuous=action == "box",
        bounded=action == "box",
        images=shown == "image",
        vector=shown == "vector",
        numbers=shown in ("vector", "dict"),
        host=False,
        wraps=False,
    )


def _gymnasium(source: random.Random) -> Environment:
    name = source.choice(list(GYMNASIUM))
    continuous, numbers = GYMNASIUM[name] == "continuous", GYMNASIUM[name] != "index"
    settings = {"id": name, "backend": "gymnasium"}
    return Environment(
        settings,
        continuous=continuous,
        bounded=continuous,
        vector=numbers,
        numbers=numbers,
        forever=name == "CliffWalking-v1",
    )


def _ours(source: random.Random, kind: str) -> Environment:
    name = source.choice(OURS + OURS_OF_BYTES)
    continuous, pictures = name in CONTINUOUS, name in OURS_OF_BYTES
    backend = {"tensor": "tensor", "compiled": "jax"}.get(kind, "auto")
    version = "v1" if name in ("CartPole", "Pendulum", "Acrobot") else "v0"
    return Environment(
        {"id": f"lockstep/{name}-{version}", "backend": backend},
        continuous=continuous,
        bounded=continuous,
        images=pictures,
        vector=not pictures,
        numbers=not pictures,
        host=False,
        wraps=False,
    )
