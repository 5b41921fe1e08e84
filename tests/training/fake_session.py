"""A session without an engine, as far as the recorder asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from lockstep.config.run import Config
from lockstep.core.episodes import RecentEpisodes
from lockstep.core.errors import DesyncError
from lockstep.envs.describe import describe
from lockstep.runs.checkpoint import to_files
from lockstep.training.own_loss.fingerprint import Fingerprint


class FakeSession:
    """Trains nothing; ``calls`` are the collectives in order, ``desync`` makes the comparison fail."""

    def __init__(self, **config: Any) -> None:
        values: dict[str, Any] = {"env": {"id": "lockstep/CartPole-v1"}, "num_envs": 8, "num_steps": 16}
        values |= {"num_shards": 4, "total_steps": 1280, "eval": {"interval": 0}, "log": {"tensorboard": False}}
        self.config = Config.model_validate(values | config)
        self.description = describe(self.config.env)
        self.iteration, self.global_step, self.optimizer_steps, self.learning_rate = 0, 0, 0, 1e-3
        self.recent = RecentEpisodes()
        self.restarted: list[int] = []
        self.restarted_before: list[int] = []
        self.wall_time_before = 0.0
        self.own_loss: Fingerprint | None = None
        self.remembered: Mapping[str, Any] | None = None
        self.workers_note: str | None = None
        self.weights = np.zeros(3, np.float32)
        self.calls: list[str] = []
        self.desync = False

    @property
    def counted(self) -> FakeSession:
        return self

    def advance(self, returns: float = 1.0) -> dict[str, Any]:
        """One iteration with one episode; its record."""
        self.iteration, self.global_step = self.iteration + 1, self.global_step + 128
        self.weights = self.weights + 1
        self.recent.extend_newest([(returns, 5, 0)], 1)
        return {"iteration": self.iteration, "global_step": self.global_step, **self.recent.metrics()}

    def arrays(self) -> dict[str, np.ndarray]:
        self.calls.append("arrays")
        return {"policy/w": self.weights, "optimizer/step": np.array([self.iteration], np.float32)}

    def check_in_sync(self, when: str) -> None:
        self.calls.append(when)
        if self.desync:
            raise DesyncError(f"ranks are out of sync {when}")

    def checkpoint_files(self, recorded: Mapping[str, Any]) -> dict[str, bytes]:
        self.calls.append("files")
        return to_files(self.arrays(), {}, {**recorded, "iteration": self.iteration})

    def close(self) -> None:
        self.calls.append("close")

    def facts(self) -> dict[str, Any]:
        return {"engine": "none", "world_size": 1}
