"""What the sessions of both engines do on the host: counters, evaluation environments, resuming, policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from lockstep.config.run import Config, EnvConfig
from lockstep.core.episodes import RecentEpisodes
from lockstep.core.files import is_finite
from lockstep.core.process import fail_now
from lockstep.core.shards import ShardPlan
from lockstep.envs.description import EnvDescription
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.policies.policy import Policy
from lockstep.runs.checkpoint import Checkpoint, pack, unpack
from lockstep.training.own_loss.fingerprint import KEY, Fingerprint, same_loss
from lockstep.training.reference_policy import check_same_reference


class Counted(Protocol):
    """The counters of a run, the last optimiser step's learning rate, and the last hundred episodes."""

    iteration: int
    global_step: int
    optimizer_steps: int
    learning_rate: float
    recent: RecentEpisodes


class TrainingSession(Protocol):
    """The interface of an engine's session that recording needs; the same on every rank.

    Attributes:
        restarted: environments that this resume couldn't restore exactly; ``restarted_before``: those of earlier ones.
        wall_time_before: seconds of training in earlier sessions.
        own_loss: fingerprint of a user's own loss, if there is one.
        remembered: the ``state.json`` of the checkpoint that all ranks resume from; None if they start anew.
        workers_note: a line on the number of worker processes of environments, if it was chosen automatically.
    """

    config: Config
    description: EnvDescription
    restarted: list[int]
    restarted_before: list[int]
    wall_time_before: float
    own_loss: Fingerprint | None
    remembered: Mapping[str, Any] | None
    workers_note: str | None

    @property
    def counted(self) -> Counted:
        """Returns the counters."""
        ...

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns every array of the training state by name; may be a collective."""
        ...

    def check_in_sync(self, when: str) -> None:
        """Compares the arrays across ranks; a collective that raises ``DesyncError`` on all of them if they differ."""
        ...

    def checkpoint_files(self, recorded: Mapping[str, Any]) -> dict[str, bytes]:
        """Returns the files of a checkpoint, see :func:`checkpoint_facts`; a collective."""
        ...

    def facts(self) -> dict[str, Any]:
        """Returns the facts on engine, devices and machine for ``summary.json``."""
        ...

    def close(self) -> None:
        """Closes the environments and leaves the other ranks."""
        ...


def counters(counted: Counted) -> dict[str, Any]:
    """Returns the counters as ``state.json`` stores them."""
    return {
        "iteration": counted.iteration,
        "global_step": counted.global_step,
        "optimizer_steps": counted.optimizer_steps,
        "learning_rate": counted.learning_rate,
        "recent_episodes": counted.recent.to_json(),
    }


def load_counters(counted: Counted, values: Mapping[str, Any]) -> None:
    """Restores the counters from a ``state.json``."""
    counted.iteration = int(values["iteration"])
    counted.global_step = int(values["global_step"])
    counted.optimizer_steps = int(values["optimizer_steps"])
    counted.learning_rate = float(values["learning_rate"])
    counted.recent = RecentEpisodes.from_json(values["recent_episodes"])


def checkpoint_facts(session: TrainingSession, recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the content of a checkpoint's ``state.json``.

    Args:
        session: the session to save.
        recorded: the recorder's part: ``wall_time`` in seconds, including earlier sessions, and the run's
            :class:`~lockstep.training.run_history.RunHistory`.
    """
    own_loss = {} if session.own_loss is None else {KEY: session.own_loss.to_json()}
    return counters(session.counted) | {
        **recorded,
        **own_loss,
        "restarted_environments": session.restarted_before + session.restarted,
        "environment": asdict(session.description),
    }


def load_facts(session: TrainingSession, facts: Mapping[str, Any]) -> None:
    """Restores counters and history from what :func:`checkpoint_facts` returned.

    Raises:
        ValueError: the checkpoint was trained with another loss of the user, or another reference policy; one line.
    """
    session.own_loss = same_loss(session.config.ppo.loss, session.own_loss, facts)
    check_same_reference(session.config, facts)
    load_counters(session.counted, facts)
    session.remembered = facts
    wall_time = facts.get("wall_time")
    session.wall_time_before = float(wall_time) if is_finite(wall_time) else 0.0
    session.restarted_before = list(facts.get("restarted_environments", []))


def gather_shards(
    local: Mapping[int, Mapping[str, np.ndarray]], gather_bytes: Callable[[bytes], Sequence[bytes]]
) -> dict[int, dict[str, np.ndarray]]:
    """Gathers every rank's arrays, by shard and name, through a collective for byte strings."""
    merged = {f"{shard}/{name}": array for shard, arrays in local.items() for name, array in arrays.items()}
    gathered: dict[int, dict[str, np.ndarray]] = {}
    for content in gather_bytes(pack(merged)):
        for key, array in unpack(content).items():
            shard, _, name = key.partition("/")
            gathered.setdefault(int(shard), {})[name] = array
    return gathered


def episodes_of_evaluation(config: Config) -> int:
    """Returns how many episodes an evaluation plays: ``eval.episodes``, rounded up to a multiple of the shards."""
    return -(-config.eval.episodes // config.shards) * config.shards


def make_eval_envs(
    config: Config, description: EnvDescription, plan: ShardPlan, env_config: EnvConfig | None = None
) -> HostEnvs:
    """Makes the environments of evaluations, equally many for each local shard, so that all batches have one shape.

    ``env_config`` replaces the config's ``env``, with a settled number of workers; None: the config's.
    """
    each = episodes_of_evaluation(config) // config.shards
    ids = [env_id for shard in plan.shards for env_id in range(shard * each, (shard + 1) * each)]
    where = {"device": config.device, "shard_size": each}
    return make_envs(env_config or config.env, description, config.seed, ids, fail_now, "eval", **where)


class EvalEnvs:
    """Environments of evaluations, made at the first one.

    The state of those with hooks for it is restored before each evaluation, so that evaluations don't depend on one
    another: a resumed run couldn't repeat them otherwise.

    Args:
        make: makes the environments.
    """

    def __init__(self, make: Callable[[], HostEnvs]) -> None:
        self._make = make
        self._envs: HostEnvs | None = None
        self._states: list[dict[str, np.ndarray] | None] = []

    def begin(self) -> HostEnvs:
        """Returns the environments for an evaluation, which resets them."""
        if self._envs is None:
            self._envs = self._make()
            if self._envs.has_hooks():
                self._envs.reset()
                self._states = self._envs.save_states()
            return self._envs
        nothing = self._envs.buffers.actions[:0]
        for env, state in enumerate(self._states):
            if state is not None:
                self._envs.restore(env, nothing, np.zeros(0, np.uint64), state)
        return self._envs

    def close(self) -> None:
        """Closes the environments, if they were made."""
        if self._envs is not None:
            self._envs.close()


def policy_of(config: Config, description: EnvDescription, arrays: dict[str, np.ndarray], global_step: int) -> Policy:
    """Makes a policy from parameters and normalisers by name, as ``load_policy`` does from a checkpoint."""
    return Policy(config, Checkpoint(arrays, {}, {"environment": asdict(description), "global_step": global_step}))
