"""Plays whole episodes with keyed starts, which are the same every time, and summarises them."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable

import numpy as np

from lockstep.config.engines import engine_module
from lockstep.config.run import Config
from lockstep.core.episodes import success_rate
from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.life import life
from lockstep.core.process import fail_now
from lockstep.core.spaces import ActionLayout, ObservationLayout
from lockstep.core.user_code.handed import is_handed
from lockstep.core.user_code.working_directory import keep_working_directory
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription, stepped_as_arrays
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.numbers import infinite, unusable
from lockstep.envs.registry import make_envs
from lockstep.policies.baselines import Actor
from lockstep.policies.policy import Policy

BEST = "best"
"""The checkpoint of the best evaluation."""
COLUMNS = 4
"""Columns of an evaluation's table: return, length, success, score."""
BATCH = 256
"""Environments of one batch; more episodes than these are played in several batches."""


def run_episodes(
    envs: HostEnvs, act: Callable[[np.ndarray], np.ndarray], max_steps: int, finite: bool = False
) -> np.ndarray:
    """Plays one episode of at most ``max_steps`` in each environment, stepped together in a batch of fixed shape.

    Args:
        envs: the environments.
        act: maps observation rows ``[E, width]`` to rows of actions.
        max_steps: number of steps after which an episode is cut.
        finite: whether a return or an observation that isn't finite is an error.

    Returns:
        float64 ``[E, 4]``: return, length, success (1 task solved, -1 not solved, 0 not reported), and score (points of
        the game at its end, NaN if it has none).

    Raises:
        EnvironmentFailureError: an environment failed, gave an index out of range or a mask that allows nothing, or
            ``finite`` and a return or an observation isn't; one line.
    """
    b = envs.buffers
    envs.reset()
    out, live = np.zeros((envs.num_envs, COLUMNS)), np.ones(envs.num_envs, np.bool_)
    for step in range(max_steps):
        if not envs.description.observation.plain:
            _check_observations(envs, live, step)
        if finite and (found := infinite(envs.description, b.observations, live)) is not None:
            raise _failure(envs, *found, _when(step))
        b.actions[:] = act(b.observations)
        envs.step()
        life.progressed()
        out[live, 0] += b.rewards[live]
        if finite and not math.isfinite(out[:, 0].sum()):
            _check_returns(envs, out[:, 0], step + 1)
        out[live, 1] += 1
        out[live, 2] = b.successes[live]
        out[live, 3] = b.scores[live]
        live &= ~(b.terminated | b.truncated)
        if not live.any():
            break
    return out


def _check_observations(envs: HostEnvs, live: np.ndarray, step: int) -> None:
    """Raises an error for the first live environment that gave an index out of range, or a mask that allows nothing.

    Environments whose episode is over may give anything; invalid rows of theirs are zeroed, so the policy never sees
    them.
    """
    layout, rows = envs.description.observation, envs.buffers.observations
    if not live.all():
        rows[~live & layout.misfits(rows).any(-1)] = layout.zeros(1)[0]
    found = unusable(envs.description, rows[None], (1, envs.num_envs), ~live[None])
    for _, row, what in found[:1]:
        raise _failure(envs, row, what, _when(step))


def _when(step: int) -> str:
    return f"in step {step} of" if step else "before the first step of"


def _failure(envs: HostEnvs, row: int, what: str, when: str) -> EnvironmentFailureError:
    """Returns the error of an environment that gave something invalid."""
    name = envs.description.id
    hint = "" if is_handed(name) else f"; lockstep check {name} looks for such numbers"
    return EnvironmentFailureError(f"environment {name} gave {what} {when} episode {envs.env_ids[row]}{hint}")


def _check_returns(envs: HostEnvs, returns: np.ndarray, step: int) -> None:
    """Raises an error for the first environment whose reward, or sum of rewards, isn't finite after ``step`` steps."""
    for row in np.flatnonzero(~np.isfinite(returns))[:1]:
        reward = float(envs.buffers.rewards[row])
        what = f"rewards that add up to {returns[row]:g}" if math.isfinite(reward) else f"reward {reward:g}"
        raise _failure(envs, row, what, f"in step {step} of")


def success_of(value: float) -> bool | None:
    """Returns a success of a table: True, False, or None if it wasn't reported."""
    return None if value == 0 else value > 0


def summarize(episodes: np.ndarray) -> dict[str, float | int]:
    """Summarises episodes ``[n, 4]``: mean, standard deviation, minimum and maximum of the return, and mean length.

    ``success_rate`` is included if an episode reports success or failure, ``score_mean`` and the like if all have a
    score.
    """
    returns, lengths = episodes[:, 0], episodes[:, 1]
    out: dict[str, float | int] = {
        "episodes": len(episodes),
        "return_mean": float(returns.mean()),
        "return_std": float(returns.std()),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "length_mean": float(lengths.mean()),
    }
    rate = success_rate(episodes[:, 2].tolist())
    if rate is not None:
        out["success_rate"] = rate
    scores = episodes[:, 3]
    if not np.isnan(scores).any():
        out |= {"score_mean": float(scores.mean()), "score_std": float(scores.std())}
        out |= {"score_min": float(scores.min()), "score_max": float(scores.max())}
    return out


def start_of(actor: Actor, seed: int | None) -> int:
    """Returns the seed of the episodes' starts: the given one, else the actor's own."""
    return actor.config.seed if seed is None else seed


def flattered(policy: Policy, checkpoint: str, seed: int, deterministic: bool) -> str | None:
    """Says why the episodes of a seed flatter a policy, None if they don't.

    A best checkpoint was chosen by evaluations of training, which begin as the episodes of the run's own seed do: of 50
    that are equally good, the mean over these is about two standard errors too high. A clone knows the episodes that it
    learnt from by heart.
    """
    if policy.cloned and seed == policy.recorded_seed:
        return f"it learnt from recorded episodes of seed {seed}, which flatter it; --seed N plays others"
    config = policy.config
    if checkpoint != BEST or not config.eval.interval or seed != config.seed or not deterministic:
        return None
    return f"checkpoint: best was chosen by episodes of seed {seed}, so their mean flatters it; --seed N plays others"


def evaluate(
    actor: Actor, episodes: int, seed: int | None = None, deterministic: bool = True, batch: int = BATCH
) -> np.ndarray:
    """Plays whole episodes in batches; the start of the k-th one doesn't depend on the batches.

    Returns:
        float64 ``[episodes, 4]``, see :func:`run_episodes`.

    Raises:
        EnvironmentFailureError: an environment raised, died or hung, or gave a number that isn't finite.
        ValueError: its observations or actions aren't those of the policy; one line.
    """
    start = start_of(actor, seed)
    actor.reset(start)
    bounds = [*range(0, episodes, batch), episodes]
    parts = [play_batch(actor, start, range(first, last), deterministic) for first, last in itertools.pairwise(bounds)]
    return np.concatenate(parts)


def check_device(config: Config) -> None:
    """Raises a one-line ``ValueError`` if simulators are stepped on a device that this machine lacks.

    A policy plays on the CPU wherever it was trained, and so do all other environments.
    """
    if config.device == "cpu" or config.env.backend != "tensor" or stepped_as_arrays(config.env):
        return
    if not engine_module("torch").count_accelerators(config.device):
        raise ValueError(
            f"device: {config.env.id} was stepped on {config.device} when this policy was trained, and PyTorch sees no "
            f"such device here; play it where there is one"
        )


def _check_spaces(actor: Actor, description: EnvDescription) -> None:
    """Raises a one-line ``ValueError`` if the environment isn't one that the policy can read or act in."""

    def told(observation: ObservationLayout, action: ActionLayout) -> str:
        parts = ", ".join(f"{leaf.kind} {leaf.shape} {leaf.choices or ''}".strip() for leaf in observation.leaves)
        return f"{parts}; actions {action.kind} {action.shape} {action.choices or ''}".strip()

    now, then = told(description.observation, description.action), told(actor.observation, actor.action)
    if now != then:
        raise ValueError(
            f"env.id: {description.id} has observations {now}, and the policy was trained with {then}; give the "
            "environment, and the env.kwargs, that it was trained with"
        )


def play_batch(actor: Actor, start: int, numbers: range, deterministic: bool) -> np.ndarray:
    """Plays one episode in each of as many environments as there are ``numbers``, which key the starts; ``[n, 4]``."""
    config = actor.config
    check_device(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(keep_working_directory())
        description = describe(config.env, trains=False)
        _check_spaces(actor, description)
        envs = make_envs(config.env, description, start, numbers, fail_now, "eval", device=config.device)
        stack.callback(envs.close)
        actor.reset()

        def act(rows: np.ndarray) -> np.ndarray:
            actor.forget(envs.buffers.lost)  # a lost life ended an episode in training
            return actor.native(rows, deterministic)

        return run_episodes(envs, act, config.eval.max_steps, finite=True)
