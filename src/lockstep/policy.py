"""A trained policy for one's own code: ``lockstep.load_policy(run)``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from lockstep.config import Config
from lockstep.config_sources import read_file, validate
from lockstep.normalizers import ObservationNormalizer, RunningMoments
from lockstep.runs.checkpoint import Checkpoint, find_checkpoint
from lockstep.runs.directory import CHECKPOINTS, CONFIG, find_run
from lockstep.shards import keyed_generator

NORMALIZER_PREFIX = "normalizers/observations."


class ActorFunction(Protocol):
    """An engine's actor: normalised float32 ``[rows, size]`` to logits or means, and the standard deviations."""

    def __call__(self, observations: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """Logits or means ``[rows, num_actions]``, standard deviations ``[num_actions]`` or None if discrete."""
        ...


class Policy:
    """A callable from observations to actions, normalisation included.

    Args:
        config: the run's.
        checkpoint: parameters, normalisers and the environment's description.

    Attributes:
        config: the run's.
        environment: the environment's spaces, as a dict.
        global_step: environment steps that it was trained for.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint) -> None:
        self.config = config
        self.environment: dict[str, Any] = checkpoint.state["environment"]
        self.global_step = int(checkpoint.state["global_step"])
        engine = importlib.import_module(f"lockstep.{config.engine}_engine.policy")
        self._actor: ActorFunction = engine.actor_function(config, self.environment, checkpoint.arrays)
        self._low = np.asarray(self.environment["action_low"])
        self._high = np.asarray(self.environment["action_high"])
        self._noise = keyed_generator(config.seed, "policy")
        self._normalizer: ObservationNormalizer | None = None
        if config.normalize.observations:
            names = ("count", "mean", "m2")
            moments = RunningMoments.from_arrays({n: checkpoint.arrays[NORMALIZER_PREFIX + n] for n in names})
            self._normalizer = ObservationNormalizer(moments, config.normalize.clip_observations)

    def __call__(self, observation: Any, deterministic: bool = True) -> Any:
        """The action for one observation, or the actions for a batch of them.

        Args:
            observation: of the environment's shape, or with one leading batch axis.
            deterministic: the most likely action, else a sample.

        Returns:
            What ``env.step`` takes: an int, or float32 of the action's shape within its bounds; for a batch an array
            of them.

        Raises:
            ValueError: the observation has another shape than the environment's.
        """
        shape = tuple(self.environment["observation_shape"])
        array = np.asarray(observation, np.float32)
        single = array.shape == shape
        if not single and array.shape[1:] != shape:
            raise ValueError(f"observation of shape {array.shape}; this policy takes {shape} or a batch (n, {shape})")
        actions = self._act(array.reshape(-1, int(np.prod(shape, dtype=int))), deterministic)
        if self.environment["discrete"]:
            actions = actions + self.environment["action_start"]
            return int(actions[0]) if single else actions
        actions = np.clip(actions, self._low, self._high).astype(np.float32)
        actions = actions.reshape(-1, *self.environment["action_shape"])
        return actions[0] if single else actions

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Actions as :class:`lockstep.envs.vector.Buffers` takes them, of flat observations ``[rows, size]``."""
        return self._act(observations, deterministic)

    def _act(self, rows: np.ndarray, deterministic: bool) -> np.ndarray:
        if self._normalizer is not None:
            rows = self._normalizer(rows)
        output, std = self._actor(rows)
        if std is None:
            return (output if deterministic else output + self._noise.gumbel(size=output.shape)).argmax(-1)
        return output if deterministic else output + std * self._noise.standard_normal(output.shape, np.float32)


def load_policy(run: str | Path, checkpoint: str = "latest", runs_dir: str = "runs") -> Policy:
    """Load the policy of a run.

    Args:
        run: name, run directory, or checkpoint directory.
        checkpoint: ``latest``, ``best`` or a step number.
        runs_dir: where runs given by name lie.

    Raises:
        ValueError: there is no such run or checkpoint, or it is damaged; one line.
    """
    path, which = find_run(str(run), runs_dir)
    config: Config = validate(Config, read_file(path / CONFIG), str(path / CONFIG))
    return Policy(config, find_checkpoint(path / CHECKPOINTS, checkpoint if which == "latest" else which))
