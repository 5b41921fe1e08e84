"""Training by a command line in this process, to see what was learnt."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main

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
