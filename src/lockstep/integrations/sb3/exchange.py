"""Exchanges, at the end of a rollout, episodes, statistics, the decision to stop, and failures between ranks."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

from lockstep.core.errors import PeerFailureError, RunError
from lockstep.integrations.sb3.normalize import MergedStatistics
from lockstep.torch_engine.distributed.communicator import Communicator

if TYPE_CHECKING:
    from lockstep.integrations.sb3.callbacks import SynchronizedCallback


class RolloutExchange:
    """Exchanges episodes, statistics and decisions between ranks, once per rollout.

    A rank that fails, or whose callback says stop, meets the others at once; they come when their rollout is over. All
    ranks learn which rank it was before any of them goes on.
    """

    def __init__(
        self,
        model: OnPolicyAlgorithm,
        callback: SynchronizedCallback,
        communicator: Communicator,
        statistics: MergedStatistics,
    ) -> None:
        self.stopped = False
        self._model, self._callback, self._communicator = model, callback, communicator
        self._statistics = statistics
        self._rank = communicator.topology.rank
        self._met, self._step = False, 0
        self._episodes: list[tuple[int, int, Any, Any]] = []
        assert model.ep_info_buffer is not None
        assert model.ep_success_buffer is not None
        self._before = [list(model.ep_info_buffer), list(model.ep_success_buffer)]

    def record(self, infos: list[dict[str, Any]], dones: Any) -> None:
        """Records the episodes that ended in one step of this rank's environments."""
        for number, (info, done) in enumerate(zip(infos, dones, strict=True)):
            episode, success = info.get("episode"), info.get("is_success") if done else None
            if episode is not None or success is not None:
                self._episodes.append((self._step, self._rank * len(infos) + number, episode, success))
        self._step += 1

    def fail(self, error: Exception) -> None:
        """Tells the other ranks that this one failed, unless they have met already in this rollout."""
        if not self._met:
            with contextlib.suppress(RunError):
                self._meet({"error": f"{type(error).__name__}: {error}"})

    def meet(self, stop: bool = False) -> None:
        """Exchanges everything, including whether this rank's callbacks say stop; only a rollout's first call does so.

        Raises:
            PeerFailureError: another rank failed, or has ended.
        """
        if self._met:
            return
        said = self._meet({"stop": stop, "steps": self._model.num_timesteps, "episodes": self._episodes})
        for rank, theirs in enumerate(said):
            if "error" in theirs:
                raise PeerFailureError(f"rank {rank} failed, so rank {self._rank} ends too: {theirs['error']}")
        self.stopped = any(theirs["stop"] for theirs in said)
        # After a stop, the other ranks' remaining steps aren't trained on, so they don't count.
        self._model.num_timesteps = min(theirs["steps"] for theirs in said)
        self._merge_episodes(episode for theirs in said for episode in theirs["episodes"])
        self._callback.evaluations = said[0]["evaluations"]
        self._statistics.merge()

    def _meet(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        self._met = True
        mine["evaluations"] = self._callback.evaluations
        said = self._communicator.gather_bytes(json.dumps(mine, default=_plain).encode())
        self._communicator.take_durations()  # nobody reads them, and the list would grow
        return [json.loads(theirs) for theirs in said]

    def _merge_episodes(self, episodes: Any) -> None:
        """Appends all ranks' episodes to those before this rollout, ordered by step and global environment id."""
        buffers = [self._model.ep_info_buffer, self._model.ep_success_buffer]
        ordered = sorted(episodes, key=lambda episode: episode[:2])
        for buffer, before, column in zip(buffers, self._before, (2, 3), strict=True):
            assert buffer is not None
            buffer.clear()
            buffer.extend(before + [episode[column] for episode in ordered if episode[column] is not None])


def _plain(value: Any) -> Any:
    """Converts an entry of an episode's ``info`` that JSON can't hold: arrays to lists, others to text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
