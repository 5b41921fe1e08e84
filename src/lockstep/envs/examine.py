"""Examines an environment before a run: applies Gymnasium's checker, then tests speed, repeatability and resuming."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing

import numpy as np

from lockstep.config.presets import defaults_for, has_preset
from lockstep.config.run import EnvConfig
from lockstep.core.errors import RunError
from lockstep.core.machine import one_blas_thread, one_torch_thread
from lockstep.core.process import fail_now
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.envs.finding import Finding
from lockstep.envs.gymnasium.rules import by_gymnasium
from lockstep.envs.gymnasium.watched import GlobalGenerators
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.registry import make_envs
from lockstep.envs.trial import Resumed, Trial

NUM_ENVS = 2
MOST_IN_A_WORKER = 100
"""Most steps that are tried in a worker process, each of which waits for messages."""


Make = Callable[[EnvConfig], HostEnvs]


def examine(config: EnvConfig, steps: int, seed: int, device: str) -> Iterator[Finding]:
    """Examines an environment with ``steps`` random actions in each of two copies; yields each finding as it is made.

    Simulators, and environments that JAX steps, are made on ``device``.

    Raises:
        ValueError: the environment can't be made, or a space isn't supported; one line.
    """
    one_blas_thread()
    description = describe(config)
    one_torch_thread()
    yield Finding("ok", f"spaces: {in_words(description)}")
    yield _settings(description)
    if _one_by_one(config, description):
        yield from by_gymnasium(config, steps, seed, fail)

    def make(wanted: EnvConfig) -> HostEnvs:
        return make_envs(wanted, description, seed, range(NUM_ENVS), fail, purpose="check", device=device)

    try:
        yield from _played(config, description, make, steps, seed)
    except (RunError, ValueError) as error:
        yield Finding("problem", str(error))


def fail(message: str) -> None:
    """Ends the process with a message, called by the thread that watches for an environment that hangs."""
    fail_now(message)


def _one_by_one(config: EnvConfig, description: EnvDescription) -> bool:
    return not (config.jax_only or config.backend in ("tensor", "envpool") or description.is_array)


def in_words(description: EnvDescription) -> str:
    """Describes what a policy observes, which actions it takes, and the time limit."""
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
    def trial(envs: HostEnvs) -> Trial:
        return Trial(envs, description, seed, steps)

    with closing(make(config)) as envs:
        first = trial(envs)
        first.begin()
        started = time.perf_counter()
        first.take(steps)
        seconds, episodes = time.perf_counter() - started, first.episodes
        first.go_inside()
        left = first.leave()
    with closing(make(config)) as others:  # made only now: a process may hold just one simulator
        resumed = first.resume(left, others)
    yield Finding(
        "ok",
        f"{NUM_ENVS * steps:,} rewards and observations are finite; {episodes} episode{'s' * (episodes != 1)} ended",
    )
    if not episodes and description.max_episode_steps is None:
        text = f"no episode ended in {steps:,} steps, and there is no time limit: --env.max-episode-steps N sets one"
        yield Finding("note", text)
    yield Finding("ok", f"speed: {NUM_ENVS * steps / seconds:,.0f} steps a second in one process")
    one_by_one, generators = _one_by_one(config, description), GlobalGenerators()
    with closing(make(config)) as envs:
        again = played(trial(envs), steps, generators)
    if one_by_one and config.workers not in (0, "auto"):  # generators of a worker can't be watched from here
        with closing(make(config.model_copy(update={"workers": 0}))) as envs:
            played(trial(envs), min(steps, MOST_IN_A_WORKER), generators)
    hashes = first.hashes[:steps]
    same = np.array_equal(hashes, again)
    if not same:
        step = int(np.argwhere((hashes != again).any(1))[0, 0]) + 1
        yield Finding(
            "problem",
            f"the same seed and actions gave something else in step {step}: runs can't be repeated, and a rank that "
            "resumes begins new episodes; draw every random number from self.np_random, and read no clock",
        )
    else:
        yield Finding("ok", "the same seeds and actions give the same bytes")
    if one_by_one and (shared := generators.said()) is not None:
        yield Finding("problem", shared)
    its_own = None
    if one_by_one and same and not resumed.by_state:
        with closing(make(config)) as envs:
            its_own = _of_its_own(trial(envs), first)
    yield from _resumed(resumed, same, one_by_one, its_own)
    if one_by_one:
        yield from _in_a_worker(config, make, trial, again[: min(steps, MOST_IN_A_WORKER)], same)


def _in_a_worker(
    config: EnvConfig, make: Make, trial: Callable[[HostEnvs], Trial], hashes: np.ndarray, same: bool
) -> Iterator[Finding]:
    """Yields whether a worker process gives the same steps; one that can't is a problem only if workers are wanted."""
    try:
        with closing(make(config.model_copy(update={"workers": 1}))) as envs:
            apart = played(trial(envs), len(hashes))
    except (RunError, ValueError) as error:
        if config.workers:
            raise
        yield Finding("note", f"can't be stepped in worker processes, so leave env.workers at 0: {error}")
        return
    if np.array_equal(apart, hashes):
        yield Finding("ok", "steps in a worker process (env.workers) with the same bytes")
    elif same:
        yield Finding("problem", "a worker process (env.workers) gives other bytes: something is kept in the process")


def played(trial: Trial, steps: int, generators: GlobalGenerators | None = None) -> np.ndarray:
    """Resets and takes ``steps`` steps; returns the hashes of each, uint64 ``[steps, E]``."""
    trial.begin(generators)
    trial.take(steps, generators)
    return trial.hashes


def _resumed(resumed: Resumed, same: bool, one_by_one: bool, its_own: Finding | None) -> Iterator[Finding]:
    """Yields how episodes are resumed, and whether an episode depends on earlier ones or on environments beside it."""
    if resumed.exactly:
        where = "in the middle of an episode" if resumed.after else "where an episode begins"
        actions = f"its {resumed.after:,} actions" if resumed.after > 1 else "its action"
        how = "its own state" if resumed.by_state else f"replaying {actions if resumed.after else 'its reset'}"
        yield Finding("ok", f"resumes exactly {where}, by {how}")
    elif resumed.by_state:
        without = (
            "; around one that isn't yours, a wrapper class of your own that has neither has its actions replayed"
            if one_by_one
            else ""
        )
        yield Finding(
            "problem",
            f"what get_env_state() gave and set_env_state() took went on otherwise in step {resumed.differs} after it: "
            "a resumed run does, and nothing tells; let them hold all that steps and later episodes depend on, the "
            f"state of self.np_random too{without}",
        )
    elif same:
        why = ": what it returns depends on more than seed and actions"
        if not one_by_one:
            why = ", as EnvPool and simulators without get_env_state() and set_env_state() do"
        yield Finding("note", f"resumes with a new episode{why}")
    if its_own is not None and (its_own.level == "problem" or resumed.exactly):
        yield its_own
    elif one_by_one and same and not resumed.exactly and not resumed.by_state:
        yield Finding(
            "problem",
            "an episode that was replayed by itself gave something else: it depends on more than its seed and actions, "
            "as on the environments beside it, and so on the number of ranks; keep nothing in the class or the module",
        )


def _of_its_own(trial: Trial, first: Trial) -> Finding | None:
    """Checks that an episode doesn't depend on those before it.

    Each environment begins with an episode from the middle of the first trial, and must give the same from there on.
    Returns None if no episode ended before the last step.
    """
    hashes, begun = first.hashes, first.in_the_middle()
    if not begun:
        return None
    step, others = 0, trial.begin_with(begun)
    while not others and step < len(hashes) - min(one.step for one in begun.values()):
        trial.take(1)
        here = {env: one.step + step for env, one in begun.items() if one.step + step < len(hashes)}
        others = [env for env, t in here.items() if trial.newest[env] != hashes[t, env]]
        step += 1
    if not others:
        return Finding("ok", "an episode depends on none before it")
    where = f"in its step {step}" if step else "at its reset"
    return Finding(
        "problem",
        f"episode {begun[others[0]].episode + 1} gave something else {where} where those before it weren't played: "
        "a resumed run goes on otherwise, and nothing tells; keep nothing from one episode to the next, or offer "
        "get_env_state() and set_env_state() that hold it",
    )
