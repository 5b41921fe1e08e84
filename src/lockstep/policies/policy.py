"""Loads a trained policy of a run, and computes with it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.engines import MissingPackageError, engine_module
from lockstep.config.on_off import switch
from lockstep.config.run import Config
from lockstep.core.files import path_of
from lockstep.core.fingerprint import sha256_of
from lockstep.core.normalizers import ObservationNormalizer, RunningMoments
from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.core.user_code.handed import is_wanted_again
from lockstep.networks.spec import core_state_size
from lockstep.policies.rows import action_rows, carried, density_of_fixed, native_batch, observation_rows, random_rows
from lockstep.runs.checkpoint import POLICY, Checkpoint, CheckpointError, find_training_state
from lockstep.runs.directory import CHECKPOINTS
from lockstep.runs.finding import find_run
from lockstep.runs.stored import check_same_policy
from lockstep.runs.trust import OF_TRAINING, trusted_config

ENGINES = ("torch", "jax")
NORMALIZER_PREFIX = "normalizers/observations."


class Policy:
    """Maps observations to actions, with a trained policy and its normalisation.

    A recurrent policy remembers what it saw: call :meth:`reset` when an episode begins.

    Args:
        config: the run's config.
        checkpoint: parameters, normalisers and the environment's description.
        engine: the engine that computes: ``torch`` or ``jax``; None: the run's own. Both read the same arrays.
        network: the class that ``network.custom`` names; None: it is imported by that name.

    Raises:
        ValueError: the engine can't compute this policy; one line.

    Attributes:
        config: the run's config.
        environment: the environment's description, as a dict.
        observation: layout of observations in rows.
        action: description of actions.
        global_step: environment steps that the policy was trained for.
        cloned: whether it imitates recorded episodes instead; ``recorded_seed`` is that of their starts, if known.
    """

    def __init__(
        self, config: Config, checkpoint: Checkpoint, engine: str | None = None, network: type | None = None
    ) -> None:
        self.config, self._network = config, network
        self.environment: dict[str, Any] = checkpoint.state["environment"]
        self.global_step = int(checkpoint.state["global_step"])
        self.cloned = bool(checkpoint.state.get("cloned"))
        self.recorded_seed = checkpoint.state.get("recorded_seed")
        module = _engine_of(config, engine or config.engine)
        kept = (POLICY, NORMALIZER_PREFIX)
        self._arrays = {name: array for name, array in checkpoint.arrays.items() if name.startswith(kept)}
        self._function = module.PolicyFunction(config, self.environment, self._arrays, network)
        self.observation: ObservationLayout = self._function.observation
        self.action: ActionLayout = self._function.action
        self._normalizer: ObservationNormalizer | None = None
        if config.normalize.observations:
            names = ("count", "mean", "m2")
            moments = RunningMoments.from_arrays({n: checkpoint.arrays[NORMALIZER_PREFIX + n] for n in names})
            self._normalizer = ObservationNormalizer(moments, config.normalize.clip_observations)
        self.reset(config.seed)

    def reset(self, seed: int | None = None) -> None:
        """Begins an episode: clears the recurrent state; with a seed also restarts the noise of sampled actions."""
        self._recurrent_state = self._zeros(0)
        if seed is not None:
            self._noise = keyed_generator(seed, "policy")

    def forget(self, rows: np.ndarray) -> None:
        """Clears the recurrent state of some rows of the last batch, bool ``[rows]``."""
        if len(self._recurrent_state) == len(rows):
            self._recurrent_state[rows] = 0.0

    def __call__(self, observation: Any, deterministic: bool = True, action_mask: Any = None) -> Any:
        """Returns the action for one observation, or the actions for a batch of observations.

        Args:
            observation: an observation of the environment's space, or a batch with one leading axis (in every part of a
                Dict).
            deterministic: whether to take the most likely action; otherwise it is sampled.
            action_mask: which actions are allowed, if the environment gives that separately from its observations: one
                mask for all observations or one for each; with several indices, their masks concatenated or a tuple of
                arrays; None: all are allowed.

        Returns:
            What ``env.step`` takes: an int, or an array of the action's shape within its bounds; for a batch an array
            of actions.

        Raises:
            ValueError: the observation isn't one that the environment could give, the parts or masks of a batch differ
                in number, there is a mask and the policy was trained without one apart from its observations, or
                ``deterministic`` is neither True nor False.
        """
        return self._acted(*self._rows(observation, action_mask), deterministic)

    def act(self, rows: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Returns the actions of observation rows as :meth:`native` does; a critic's own memory is updated too."""
        before = self.recurrent_state(len(rows))
        actions = self.native(rows, deterministic)
        own = core_state_size(self.config.network.recurrent, self.config.network.recurrent_size)
        if own and before.shape[1] > own:  # the critic's memory, which the actor alone doesn't update
            self._recurrent_state[:, own:] = self.outputs(rows, before)["next_state"][:, own:]
        return actions

    def predict(
        self,
        observation: Any,
        state: np.ndarray | None = None,
        episode_start: Any = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Acts as a model of Stable-Baselines3 does, for code that expects one, such as its ``evaluate_policy``.

        Args:
            observation: one, or a batch, as :meth:`__call__` takes it.
            state: the state that the previous call returned, if the policy is recurrent; None: episodes begin.
            episode_start: which episodes of the batch begin with this observation, bool ``[n]``.
            deterministic: whether to take the most likely action; by default it is sampled, as in Stable-Baselines3.
            action_masks: which actions are allowed, as ``action_mask`` of :meth:`__call__`.

        Returns:
            The actions as an array, and the state for the next call, float32 ``[n, size]``, or None without memory.

        Raises:
            ValueError: see :meth:`__call__`; or ``state`` or ``episode_start`` isn't of this batch.
        """
        deterministic = switch("deterministic", deterministic)
        (rows, single), size = self._rows(observation, action_masks), self._function.state_size
        if size:
            self._recurrent_state = carried(state, episode_start, len(rows), size)
        actions = np.asarray(self._acted(rows, single, deterministic))
        return actions, self._recurrent_state.copy() if size else None

    def value(self, observation: Any, action_mask: Any = None) -> Any:
        """Returns the critic's estimate of the return from here, with rewards scaled as in training.

        A recurrent policy uses its state, and doesn't update it.

        Args:
            observation: one, or a batch, as :meth:`__call__` takes it.
            action_mask: which actions are allowed, as for :meth:`__call__`.

        Returns:
            A float, or for a batch float32 ``[n]``.

        Raises:
            ValueError: there is no critic (GRPO).
        """
        found, single = self._found(observation, action_mask)
        if "value" not in found:
            raise ValueError(f"value: a policy of algorithm {self.config.algorithm} has no critic")
        return float(found["value"][0]) if single else found["value"]

    def log_prob(self, observation: Any, action: Any, action_mask: Any = None) -> Any:
        """Returns the log-probability of an action, or the log-density of a continuous one; memory as in :meth:`value`.

        The density is that of the Gaussian before actions are clipped to their bounds. For a squashed Gaussian it is
        the density within the bounds, in the environment's units, over the components whose bounds differ; it doesn't
        exist at a bound, so an action there is moved slightly inside.

        Args:
            observation: one, or a batch, as :meth:`__call__` takes it.
            action: one action, or one for each observation, as :meth:`__call__` returns them.
            action_mask: which actions are allowed; a forbidden one has about -1e8.

        Returns:
            A float, or for a batch float32 ``[n]``.

        Raises:
            ValueError: the action isn't made of numbers, its shape isn't the environment's, or an index isn't one of
                its choices.
        """
        rows, single = self._rows(observation, action_mask)
        acted, slope = action_rows(self.action, action, len(rows), self.config.network.squash)
        outputs = self.outputs(rows, self.recurrent_state(len(rows)), acted)
        found = outputs["log_prob"] - np.float32(slope)
        if self.config.network.squash and self.action.fixed.any():
            found -= density_of_fixed(self.action, outputs["mean"], outputs["std"])
        return float(found[0]) if single else found

    def probabilities(self, observation: Any, action_mask: Any = None) -> Any:
        """Returns the probability of every choice, 0 if it is forbidden; memory as in :meth:`value`.

        Args:
            observation: one, or a batch, as :meth:`__call__` takes it.
            action_mask: which actions are allowed.

        Returns:
            float32 ``[choices]``, or for a batch ``[n, choices]``; for MultiDiscrete and MultiBinary a tuple of such
            arrays, one for each index.

        Raises:
            ValueError: actions are continuous.
        """
        if not self.action.discrete:
            raise ValueError("probabilities: actions are continuous and have densities; use log_prob")
        found, single = self._found(observation, action_mask)
        parts = np.split(found["logits"].astype(np.float64), np.cumsum(self.action.choices)[:-1], -1)
        raised = [np.exp(part - part.max(-1, keepdims=True)) for part in parts]
        shares = [(part / part.sum(-1, keepdims=True)).astype(np.float32) for part in raised]
        given = tuple(part[0] for part in shares) if single else tuple(shares)
        return given[0] if self.action.kind == "discrete" else given

    def to_torch(self) -> Any:
        """Returns the policy as a ``torch.nn.Module`` that needs nothing else, whichever engine trained it.

        Returns:
            A :class:`lockstep.torch_engine.export.module.PolicyModule` with copies of the parameters, on the CPU. It
            takes raw observations and returns actions for ``env.step``.

        Raises:
            ValueError: PyTorch isn't installed, or the network is a custom one of the JAX engine.
        """
        door = _engine_of(self.config, "torch")
        frozen = None if self._normalizer is None else self._normalizer.frozen
        return door.PolicyModule(self.config, self.environment, self._arrays, frozen, self._network)

    @property
    def params_sha256(self) -> str:
        """The sha256 of the parameters, as in ``summary.json``."""
        return sha256_of({name: array for name, array in self._arrays.items() if name.startswith(POLICY)})

    def recurrent_state(self, count: int) -> np.ndarray:
        """Returns the recurrent state, float32 ``[count, size]``; zeros unless the last batch had ``count`` rows."""
        return self._recurrent_state if len(self._recurrent_state) == count else self._zeros(count)

    def _zeros(self, count: int) -> np.ndarray:
        """Returns the recurrent state of a batch of ``count`` at the start of episodes."""
        return np.zeros((count, self._function.state_size), np.float32)

    def outputs(self, rows: np.ndarray, state: np.ndarray, actions: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Returns the engine's ``PolicyFunction.outputs``, of actor and critic, for observation rows ``[n, width]``."""
        if len(rows):
            return self._function.outputs(self._normalized(rows), state, actions)
        zeros = self.observation.zeros(1)
        acted = None if actions is None else np.zeros((1, *actions.shape[1:]), actions.dtype)
        return {name: x[:0] for name, x in self._function.outputs(zeros, self._zeros(1), acted).items()}

    def greedy(self, rows: np.ndarray, state: np.ndarray) -> np.ndarray:
        """Returns the most likely actions of observation rows ``[n, width]``, as rows; keeps no state."""
        return self._function(self._normalized(rows), None, state)[0]

    def random_rows(self, count: int, generator: np.random.Generator) -> np.ndarray:
        """Draws observation rows ``[count, width]``; numbers as the normaliser met them, else standard normal."""
        rows = random_rows(self.observation, self.action, count, generator)
        if self._normalizer is not None:
            mean, scale, _ = self._normalizer.frozen
            numbers = self.observation.floats(rows)[:, : self.observation.vector_size]
            numbers[...] = numbers * np.minimum(1.0 / scale, 1e4) + mean
        return rows

    def _found(self, observation: Any, action_mask: Any) -> tuple[dict[str, np.ndarray], bool]:
        """Returns the networks' outputs for observations, and whether there was a single observation."""
        rows, single = self._rows(observation, action_mask)
        return self.outputs(rows, self.recurrent_state(len(rows))), single

    def _rows(self, observation: Any, action_mask: Any) -> tuple[np.ndarray, bool]:
        """Returns observation rows ``[n, width]``, and whether there was a single observation."""
        return observation_rows(self.observation, self.action, observation, action_mask)

    def _acted(self, rows: np.ndarray, single: bool, deterministic: bool) -> Any:
        """Returns what ``env.step`` takes, for observation rows ``[n, width]``, or for a single observation."""
        actions = self.act(rows, deterministic)
        return self.action.native(actions[0]) if single else native_batch(self.action, actions)

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """Returns actions, as :class:`lockstep.envs.host_envs.Buffers` holds them, for rows ``[rows, width]``."""
        deterministic = switch("deterministic", deterministic)
        if not len(observations):
            self._recurrent_state = self._zeros(0)
            return self._function(self.observation.zeros(1), None, self._zeros(1))[0][:0]
        rows = self._normalized(observations)
        noise, shape = None, (len(rows), self.action.outputs)
        if not deterministic:
            drawn = self._noise.gumbel(size=shape) if self.action.discrete else self._noise.standard_normal(shape)
            noise = drawn.astype(np.float32)
        actions, self._recurrent_state = self._function(rows, noise, self.recurrent_state(len(rows)))
        return actions

    def _normalized(self, rows: np.ndarray) -> np.ndarray:
        """Returns observation rows ``[rows, width]`` as the networks take them."""
        if self._normalizer is None:
            return rows
        rows = rows.copy()
        vectors = self.observation.floats(rows)[..., : self.observation.vector_size]
        vectors[...] = self._normalizer(vectors)
        return rows


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
    run: str | PathLike[str],
    checkpoint: str | int = "latest",
    runs_dir: str | Path = "runs",
    engine: str | None = None,
    trust: bool = False,
    network: type | None = None,
) -> Policy:
    """Loads a run's policy as :func:`lockstep.load_policy` does, for commands: errors name their options.

    Raises:
        ValueError: see there.
    """
    path, which = find_run(path_of(run), str(runs_dir))
    config = trusted_config(path, trust, unused=OF_TRAINING)
    if network is not None and not is_wanted_again("network.custom", network, config.network.custom, path):
        network = None
    asked = str(checkpoint)
    if which != "latest" and asked not in ("latest", which.removeprefix("step_")):
        raise ValueError(f"checkpoint: {asked} is asked for, and {run} is a checkpoint itself; leave one of them out")
    found = find_training_state(path / CHECKPOINTS, asked if which == "latest" else which)
    if found.path is not None:
        check_same_policy(path, config, found.path)
    try:
        return Policy(config, found, engine, network)
    except KeyError as error:
        name = str(error.args[0]) if error.args else ""
        if name in found.arrays or not name.startswith((POLICY, NORMALIZER_PREFIX)):
            raise  # a custom network's own
        raise CheckpointError(f"{found.path} lacks {error}: it isn't a checkpoint of this run's networks") from None
