"""Examines an environment as a run would use it: by Gymnasium's checker, and by what resuming and proving need."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from lockstep.config.presets import defaults_for, has_preset
from lockstep.config.run import EnvConfig
from lockstep.core.errors import RunError
from lockstep.core.machine import one_blas_thread, one_torch_thread
from lockstep.core.process import fail_now
from lockstep.core.shards import keyed_generator
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.finding import Finding
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions
from lockstep.envs.gymnasium.rules import by_gymnasium
from lockstep.envs.gymnasium.watched import GlobalGenerators
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.numbers import check_numbers
from lockstep.envs.registry import make_envs
from lockstep.envs.restore.replay import row_hashes

NUM_ENVS = 2
BY_STATE = "by its own state"
MOST_IN_A_WORKER = 100
"""Steps that a worker process is tried with, each of which waits for it."""


class Begun(NamedTuple):
    """Holds an episode of the first environment: its first step, its number, its first observation ``[width]``."""

    step: int
    episode: int
    observation: np.ndarray


class Played(NamedTuple):
    """Holds what random actions led to.

    Hashes of each step uint64 ``[T, E]``, seconds, episodes that ended, and the first environment's later episodes.
    """

    hashes: np.ndarray
    seconds: float
    episodes: int
    begun: list[Begun]


Make = Callable[[EnvConfig], HostEnvs]


def examine(config: EnvConfig, steps: int, seed: int) -> Iterator[Finding]:
    """Examines an environment with ``steps`` random actions in each of two; yields what is found, as it is found.

    Raises:
        ValueError: it can't be made, or a space isn't supported; one line.
    """
    one_blas_thread()
    description = describe(config)
    one_torch_thread()
    yield Finding("ok", f"spaces: {in_words(description)}")
    yield _settings(description)
    if _one_by_one(config, description):
        yield from by_gymnasium(config, steps, seed)

    def make(wanted: EnvConfig) -> HostEnvs:
        return make_envs(wanted, description, seed, range(NUM_ENVS), fail, purpose="check")

    try:
        yield from _played(config, description, make, steps, seed)
    except (RunError, ValueError) as error:
        yield Finding("problem", str(error))


def fail(message: str) -> None:
    """Ends the examination from the thread that watches an environment which hangs."""
    fail_now(message)


def _one_by_one(config: EnvConfig, description: EnvDescription) -> bool:
    return not (config.jax_only or config.backend in ("tensor", "envpool") or description.is_array)


def in_words(description: EnvDescription) -> str:
    """Says what a policy sees and does."""
    parts = []
    for leaf in description.observation.leaves:
        shape = "×".join(map(str, leaf.shape)) or "1"
        parts.append(f"{leaf.kind.replace('_', '-')} {shape}{f' ({leaf.name})' if leaf.name else ''}")
    parts += [f"not the text {name!r}" for name in description.texts]
    action = description.action
    does = f"one of {action.choices[0]}" if action.kind == "discrete" else f"{len(action.low)} numbers"
    if action.kind == "multi_discrete":
        does = f"indices of {', '.join(map(str, action.choices))}"
    limit = description.max_episode_steps
    return f"sees {', '.join(parts)}; does {does}; {f'at most {limit} steps' if limit else 'no time limit'}"


def _settings(description: EnvDescription) -> Finding:
    if has_preset(description.id):
        return Finding("ok", f"settings: lockstep train {description.id} has a preset")
    images = bool(description.observation.image_bytes)
    _, kind = defaults_for(continuous=not description.action.discrete, images=images)
    return Finding("note", f"settings: no preset; lockstep train begins with the defaults for {kind}")


# --- what a run needs -------------------------------------------------------------------------------------------------


def _played(config: EnvConfig, description: EnvDescription, make: Make, steps: int, seed: int) -> Iterator[Finding]:
    first, restored = play(make(config), description, steps, seed, lambda: make(config))
    yield Finding("ok", f"{NUM_ENVS * steps:,} rewards and observations are finite; {first.episodes} episodes ended")
    if not first.episodes and description.max_episode_steps is None:
        text = f"no episode ended in {steps:,} steps, and there is no time limit: --env.max-episode-steps N sets one"
        yield Finding("note", text)
    yield Finding("ok", f"speed: {NUM_ENVS * steps / first.seconds:,.0f} steps a second in one process")
    one_by_one, generators = _one_by_one(config, description), GlobalGenerators()
    again, _ = play(make(config), description, steps, seed, generators=generators)
    if one_by_one and config.workers not in (0, "auto"):  # where they are stepped, they can't be looked at from here
        here = make(config.model_copy(update={"workers": 0}))
        play(here, description, steps, seed, most=MOST_IN_A_WORKER, generators=generators)
    same = np.array_equal(first.hashes, again.hashes)
    if not same:
        step = int(np.argwhere((first.hashes != again.hashes).any(1))[0, 0]) + 1
        yield Finding(
            "problem",
            f"the same seed and actions gave something else in step {step}: runs can't be repeated, and a rank that "
            "resumes begins new episodes; draw every random number from self.np_random, and read no clock",
        )
    else:
        yield Finding("ok", "the same seeds and actions give the same bytes")
    if one_by_one and (shared := generators.said()) is not None:
        yield Finding("problem", shared)
    if restored:
        yield Finding("ok", f"resumes exactly in the middle of an episode, {restored}")
    elif same:
        yield Finding("note", "resumes with a new episode: what it returns depends on more than seed and actions")
    if one_by_one:
        if same and restored != BY_STATE and first.begun:
            yield _of_its_own(make(config), description, first, steps, seed)
        worker = make(config.model_copy(update={"workers": 1}))
        apart, _ = play(worker, description, steps, seed, most=MOST_IN_A_WORKER)
        if np.array_equal(apart.hashes, again.hashes[: len(apart.hashes)]):
            yield Finding("ok", "steps in a worker process (env.workers) with the same bytes")
        elif same:
            yield Finding(
                "problem", "a worker process (env.workers) gives other bytes: something is kept in the process"
            )


def _of_its_own(envs: HostEnvs, description: EnvDescription, played: Played, steps: int, seed: int) -> Finding:
    """Begins with an episode from the middle of what was played: it, and those after it, must come out the same."""
    begun = played.begun[len(played.begun) // 2]
    actions = draw_actions(keyed_generator(seed, "check"), description.action, (steps, envs.num_envs))
    differs = None
    try:
        b = envs.buffers
        b.episodes[...] = begun.episode
        envs.reset()
        if not np.array_equal(b.observations[0], begun.observation, equal_nan=True):
            differs = 0
        for t in range(begun.step, steps) if differs is None else ():
            b.actions[...] = allowed_actions(description.observation, description.action, b.observations, actions[t])
            envs.step()
            if row_hashes(b.observations, b.rewards)[0] != played.hashes[t, 0]:
                differs = t + 1 - begun.step
                break
    finally:
        envs.close()
    if differs is None:
        return Finding("ok", "an episode depends on none before it")
    where = f"in its step {differs}" if differs else "at its reset"
    return Finding(
        "problem",
        f"episode {begun.episode + 1} gave something else {where} where those before it weren't played: "
        "a resumed run goes on otherwise, and nothing tells; keep nothing from one episode to the next, or offer "
        "get_env_state() and set_env_state() that hold it",
    )


def play(
    envs: HostEnvs,
    description: EnvDescription,
    steps: int,
    seed: int,
    others: Callable[[], HostEnvs] | None = None,
    most: int | None = None,
    generators: GlobalGenerators | None = None,
) -> tuple[Played, str]:
    """Takes keyed random actions, and closes the environments; of ``most`` steps those are the first of as many.

    ``others`` makes environments into which a live episode is brought then, as a run does that is resumed; how that
    went comes second, in a few words, "" if it failed. ``generators`` looks at every reset and step.
    """
    looked_at = generators or contextlib.nullcontext()
    try:
        actions = draw_actions(keyed_generator(seed, "check"), description.action, (steps, envs.num_envs))[:most]
        steps = len(actions)
        with looked_at:
            envs.reset()
        b = envs.buffers
        rows, rewards = np.zeros((steps, *b.observations.shape), b.observations.dtype), np.zeros((steps, envs.num_envs))
        episodes, live, begun = 0, 0, list[Begun]()
        taken: list[np.ndarray] = []
        started = time.perf_counter()
        for t in range(steps):
            b.actions[...] = allowed_actions(description.observation, description.action, b.observations, actions[t])
            taken.append(b.actions[0].copy())
            with looked_at:
                envs.step()
            rows[t], rewards[t] = b.observations, b.rewards
            ended = b.terminated | b.truncated
            episodes += int(ended.sum())
            if ended[0]:
                live = t + 1
                begun.append(Begun(live, int(b.episodes[0]), b.observations[0].copy()))
        seconds = time.perf_counter() - started
        check_numbers(description, envs.env_ids, rows, rewards, None)
        hashes = row_hashes(rows, rewards)
        restored = "" if others is None else _restored(envs, others(), np.array(taken[live:]), hashes[live:, 0])
        return Played(hashes, seconds, episodes, begun), restored
    finally:
        envs.close()


def _restored(envs: HostEnvs, others: HostEnvs, actions: np.ndarray, hashes: np.ndarray) -> str:
    try:
        state, b = envs.save_states()[0], others.buffers
        b.episodes[...], b.observations[...] = envs.buffers.episodes, envs.buffers.observations
        if state:
            actions, hashes = np.zeros((len(actions), *b.actions.shape[1:]), b.actions.dtype), hashes[:0]
        if not others.restore(0, actions.reshape(-1, *b.actions.shape[1:]), hashes, state or {}):
            return ""
        return BY_STATE if state else "by replaying its actions"
    finally:
        others.close()
