"""Loads a trained policy for one's own code: ``lockstep.load_policy(run)``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.engines import MissingPackageError, engine_module
from lockstep.config.run import Config
from lockstep.core.normalizers import ObservationNormalizer, RunningMoments
from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.runs.checkpoint import POLICY, Checkpoint, CheckpointError, find_training_state
from lockstep.runs.directory import CHECKPOINTS, find_run
from lockstep.runs.trust import trusted_config

ENGINES = ("torch", "jax")
NORMALIZER_PREFIX = "normalizers/observations."


class Policy:
    """A callable from observations to actions, normalisation included.

    A recurrent policy remembers what it saw: call :meth:`reset` when an episode begins.

    Args:
        config: the run's.
        checkpoint: parameters, normalisers and the environment's description.
        engine: what computes: ``torch`` or ``jax``; None: the run's own. Both read the same arrays.

    Raises:
        ValueError: the engine can't compute this policy; one line.

    Attributes:
        config: the run's.
        environment: the environment's description, as a dict.
        observation: how observations lie in rows.
        action: what actions are.
        global_step: environment steps that it was trained for.
        cloned: whether it has learnt recorded episodes instead.
    """

    def __init__(self, config: Config, checkpoint: Checkpoint, engine: str | None = None) -> None:
        self.config = config
        self.environment: dict[str, Any] = checkpoint.state["environment"]
        self.global_step = int(checkpoint.state["global_step"])
        self.cloned = bool(checkpoint.state.get("cloned"))
        module = _engine_of(config, engine or config.engine)
        self._function = module.PolicyFunction(config, self.environment, checkpoint.arrays)
        self.observation: ObservationLayout = self._function.observation
        self.action: ActionLayout = self._function.action
        self._normalizer: ObservationNormalizer | None = None
        if config.normalize.observations:
            names = ("count", "mean", "m2")
            moments = RunningMoments.from_arrays({n: checkpoint.arrays[NORMALIZER_PREFIX + n] for n in names})
            self._normalizer = ObservationNormalizer(moments, config.normalize.clip_observations)
        self.reset(config.seed)

    def reset(self, seed: int | None = None) -> None:
        """Begin an episode: forget what was seen; with a seed also draw the noise of sampled actions anew."""
        self._carry = np.zeros((0, self._function.carry_size), np.float32)
        if seed is not None:
            self._noise = keyed_generator(seed, "policy")

    def forget(self, rows: np.ndarray) -> None:
        """Forget what was seen in some of the rows of the last batch, bool ``[rows]``."""
        if len(self._carry) == len(rows):
            self._carry[rows] = 0.0

    def __call__(self, observation: Any, deterministic: bool = True, action_mask: Any = None) -> Any:
        """The action for one observation, or the actions for a batch of them.

        Args:
            observation: of the environment's space, or with one leading batch axis (of every part of a Dict).
            deterministic: the most likely action, else a sample.
            action_mask: which actions are allowed, where the environment gives that apart from its observations;
                None: all.

        Returns:
            What ``env.step`` takes: an int, or an array of the action's shape within its bounds; for a batch an array
            of them.

        Raises:
            ValueError: the observation has another shape than the environment's.
        """
        rows, single = self._rows(observation, action_mask)
        actions = self.native(rows, deterministic)
        return self.action.native(actions[0]) if single else self.action.natives(actions)

    def _rows(self, observation: Any, action_mask: Any) -> tuple[np.ndarray, bool]:
        """Observation rows ``[n, width]``, and whether there was a single observation."""
        leaf = next(x for x in self.observation.leaves if x.kind != "mask")
        part: Any = observation
        for key in leaf.name.split("/") if leaf.name else ():
            part = part[key] if isinstance(part, Mapping) else part[int(key)]
        shape = np.shape(part)
        if shape != leaf.shape and shape[1:] != leaf.shape:
            raise ValueError(
                f"observation of shape {shape}; this policy takes {leaf.shape} or a batch (n, {leaf.shape})"
            )
        masks = np.ones(self.action.outputs) if action_mask is None else np.asarray(action_mask)
        if shape == leaf.shape:
            return self.observation.encode(observation, masks)[None], True
        encoded = [
            self.observation.encode(_item(observation, n), masks if masks.ndim == 1 else masks[n])
            for n in range(shape[0])
        ]
        return np.stack(encoded), False

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Actions as :class:`lockstep.envs.host_envs.Buffers` takes them, of observation rows ``[rows, width]``."""
        rows = observations
        if self._normalizer is not None:
            rows = rows.copy()
            vectors = self.observation.floats(rows)[..., : self.observation.vector_size]
            vectors[...] = self._normalizer(vectors)
        noise, shape = None, (len(rows), self.action.outputs)
        if not deterministic:
            drawn = self._noise.gumbel(size=shape) if self.action.discrete else self._noise.standard_normal(shape)
            noise = drawn.astype(np.float32)
        if len(self._carry) != len(rows):
            self._carry = np.zeros((len(rows), self._function.carry_size), np.float32)
        actions, self._carry = self._function(rows, noise, self._carry)
        return actions


def _item(observation: Any, index: int) -> Any:
    """One observation of a batch of them."""
    if isinstance(observation, Mapping):
        return {key: _item(value, index) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return tuple(_item(value, index) for value in observation)
    return observation[index]


def _engine_of(config: Config, engine: str) -> Any:
    """Loads the engine that computes a policy."""
    if engine not in ENGINES:
        raise ValueError(f"engine: {engine!r} is none of {', '.join(ENGINES)}")
    if config.network.custom is not None and engine != config.engine:
        raise ValueError(
            f"engine: {config.network.custom} is a network of the {config.engine} engine; {engine} can't compute it"
        )
    try:
        return engine_module(engine)
    except MissingPackageError as error:
        raise ValueError(
            f"engine: {engine} needs {error.package}, which isn't installed: pip install 'lockstep-rl[{engine}]'"
        ) from None


def load_policy(
    run: str | Path,
    checkpoint: str = "latest",
    runs_dir: str = "runs",
    engine: str | None = None,
    trust: bool = False,
) -> Policy:
    """Load the policy of a run.

    Args:
        run: name, run directory, or checkpoint directory.
        checkpoint: ``latest``, ``best`` or a step number.
        runs_dir: where runs given by name lie.
        engine: ``torch`` or ``jax``, whichever trained it; None: the one that did.
        trust: whether to import what the run names (``module:attribute``), though this user hasn't trained with it.

    Raises:
        ValueError: there is no such run or checkpoint, or it is damaged, names code that this user hasn't trained
            with, or the engine can't compute it; one line.
    """
    path, which = find_run(str(run), runs_dir)
    config = trusted_config(path, trust)
    found = find_training_state(path / CHECKPOINTS, checkpoint if which == "latest" else which)
    try:
        return Policy(config, found, engine)
    except KeyError as error:
        name = str(error.args[0]) if error.args else ""
        if name in found.arrays or not name.startswith((POLICY, NORMALIZER_PREFIX)):
            raise  # a custom network's own
        raise CheckpointError(f"{found.path} lacks {error}: it isn't a checkpoint of this run's networks") from None
