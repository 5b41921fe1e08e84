"""Training by a command line in this process, to see what was learnt."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lockstep import load_policy
from lockstep.cli import main
from lockstep.envs.gymnasium.make import make_environment
from lockstep.policies.policy import Policy

MODULES = Path(__file__).parents[1] / "modules"
SMALL = (
    *("--num-envs", 16, "--num-shards", 2, "--num-steps", 32, "--ppo.gamma", 0),
    *("--ppo.num-epochs", 4, "--ppo.num-minibatches", 4),
    *("--ppo.learning-rate", 5e-3, "--ppo.clip-range", 0.2, "--ppo.value-clip-range", "none", "--ppo.entropy-coef", 0),
    *("--network.hidden-sizes", 32, "--normalize.observations", "false", "--normalize.returns", "false"),
)
"""Iterations of 512 steps, for tasks in which an action is rewarded at once; nothing comes from defaults by spaces."""


@pytest.fixture
def learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """``lockstep train WORDS`` to its end, in a directory of its own; its ``summary.json``."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(MODULES)])
    monkeypatch.chdir(tmp_path)

    def train(*words: Any, name: str = "run") -> dict[str, Any]:
        assert main(["train", *map(str, words), "--name", name, "--quiet", "--log.no-tensorboard"]) == 0
        return json.loads((tmp_path / "runs" / name / "summary.json").read_text())

    return train


def hidden(part: Any = True) -> tuple[str, str]:
    """The options that hide something from the agent."""
    return "--env.kwargs", json.dumps({"hidden": part})


def played(run: str, masked: bool = False, episodes: int = 10) -> float:
    """Mean return of a stored policy that is asked for one action after another, as anybody's own code would."""
    policy = load_policy(run)
    env, returns = make_environment(policy.config.env), []
    for episode in range(episodes):
        policy.reset()
        observation, info = env.reset(seed=episode)
        score, over = 0.0, False
        while not over:
            action = policy(observation, action_mask=info["action_mask"] if masked else None)
            observation, reward, terminated, truncated, info = env.step(action)
            score, over = score + float(reward), terminated or truncated
        returns.append(score)
    return float(np.mean(returns))


def asked_at_once(policy: Policy, count: int = 7) -> tuple[Any, list[Any]]:
    """A policy's actions for a batch of observations of a Dict, and for each of them alone."""
    space = make_environment(policy.config.env).observation_space
    space.seed(0)
    singles = [space.sample() for _ in range(count)]

    def joined(parts: list[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {name: joined([part[name] for part in parts]) for name in parts[0]}
        return np.stack(parts)

    return policy(joined(singles)), [policy(one) for one in singles]
