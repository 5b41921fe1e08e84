"""Steps environments with keyed random actions, and resumes their live episodes in others as a run would."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from lockstep.core.errors import EnvironmentFailureError
from lockstep.core.shards import keyed_generator
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.random_policy import allowed_actions, draw_actions, draw_replacements
from lockstep.envs.gymnasium.watched import GlobalGenerators
from lockstep.envs.host_envs import HostEnvs
from lockstep.envs.numbers import check_acted, check_numbers, check_rows
from lockstep.envs.restore.replay import row_hashes


class Begun(NamedTuple):
    """The beginning of an episode: the step, the episode's number, its first observation ``[width]``."""

    step: int
    episode: int
    observation: np.ndarray


class Left(NamedTuple):
    """The live episodes of environments, from which others go on.

    Attributes:
        steps: steps taken so far.
        after: steps of the first environment's live episode.
        states: each environment's own state, None if it has none.
        episodes: numbers of the live episodes ``[E]``.
        observations: rows ``[E, width]``.
        began_at: steps that had been taken when each live episode began ``[E]``.
    """

    steps: int
    after: int
    states: list[dict[str, np.ndarray] | None]
    episodes: np.ndarray
    observations: np.ndarray
    began_at: np.ndarray


class Resumed(NamedTuple):
    """The result of resuming live episodes in other environments.

    Attributes:
        by_state: whether episodes were restored by the environments' own state, rather than by replaying actions.
        after: steps of the first environment's episode when it was resumed.
        back: whether every environment was restored.
        differs: the first further step whose result differed; None: none did.
    """

    by_state: bool
    after: int
    back: bool
    differs: int | None

    @property
    def exactly(self) -> bool:
        """Whether everything was restored and nothing differed."""
        return self.back and self.differs is None


Finals = tuple[np.ndarray, np.ndarray]
"""The environments that a step truncated ``[n]``, and their episodes' last observations ``[n, width]``."""


def _finals(envs: HostEnvs) -> Finals:
    """Returns what the last step truncated; where resets come late, rows are last observations already."""
    b = envs.buffers
    ends = np.flatnonzero(b.truncated & ~b.terminated) if not envs.late_reset else np.zeros(0, int)
    return ends, b.final_observations[ends]


def _step_hashes(observations: np.ndarray, rewards: np.ndarray, finals: Finals) -> np.ndarray:
    """Returns the hashes of a step, uint64 ``[E]``: :func:`row_hashes`, and with them truncated episodes' ends."""
    hashes, (ends, last) = row_hashes(observations, rewards), finals
    hashes[ends] += row_hashes(last, np.zeros(len(ends))) * np.uint64(3)  # else two swapped rows would hash alike
    return hashes


class Trial:
    """Takes keyed random actions in environments, at most twice ``steps``, and keeps the results.

    Attributes:
        episodes: number of episodes that have ended.
        begun: each environment's episodes after the first.
    """

    def __init__(self, envs: HostEnvs, description: EnvDescription, seed: int, steps: int) -> None:
        self._envs, self._description, self._steps = envs, description, steps
        shape, draws = (steps, envs.num_envs), [keyed_generator(seed, "check", *key) for key in ((), (1,))]
        self._drawn = np.concatenate([draw_actions(draw, description.action, shape) for draw in draws])
        draws = [keyed_generator(seed, "check/allowed", *key) for key in ((), (1,))]
        self._replacements = np.concatenate([draw_replacements(draw, description.action, shape) for draw in draws])
        self._taken: list[np.ndarray] = []
        self._hashes: list[np.ndarray] = []
        self._ends: list[np.ndarray] = []
        self._began_at = np.zeros(envs.num_envs, int)
        self._last_length = 0
        self.episodes = 0
        self.begun: list[list[Begun]] = [[] for _ in range(envs.num_envs)]

    @property
    def hashes(self) -> np.ndarray:
        """Hashes of each step's observations and rewards (:func:`_step_hashes`), uint64 ``[T, E]``."""
        return np.array(self._hashes)

    @property
    def newest(self) -> np.ndarray:
        """Hashes of the last step, uint64 ``[E]``."""
        return self._hashes[-1]

    @property
    def _age(self) -> int:
        return len(self._taken) - int(self._began_at[0])

    def begin(self, generators: GlobalGenerators | None = None) -> None:
        """Resets the environments while ``generators`` watches."""
        with generators or contextlib.nullcontext():
            self._envs.reset()

    def in_the_middle(self) -> dict[int, Begun]:
        """Returns the middle one of each environment's later episodes, if it has any before the last step."""
        last = len(self._taken)
        later = {env: [one for one in begun if one.step < last] for env, begun in enumerate(self.begun)}
        return {env: begun[len(begun) // 2] for env, begun in later.items() if begun}

    def begin_with(self, begun: Mapping[int, Begun]) -> list[int]:
        """Begins environments with a later episode and its actions; returns those whose first observation differs."""
        b = self._envs.buffers
        for env, (step, episode, _) in begun.items():
            b.episodes[env] = episode
            for numbers in (self._drawn, self._replacements):
                numbers[: len(numbers) - step, env] = numbers[step:, env].copy()
        self._envs.reset()
        return [e for e, (*_, seen) in begun.items() if not np.array_equal(b.observations[e], seen, equal_nan=True)]

    def take(self, count: int, generators: GlobalGenerators | None = None) -> None:
        """Takes ``count`` more steps, each watched by ``generators``.

        Raises:
            EnvironmentFailureError: an environment raised, or returned a number that isn't finite, an index outside its
                choices, or a mask that allows nothing.
        """
        b, first = self._envs.buffers, len(self._taken)
        observation, action = self._description.observation, self._description.action
        rows, rewards = (
            np.zeros((count + 1, *b.observations.shape), b.observations.dtype),
            np.zeros((count, len(b.rewards))),
        )
        rows[0], dead, finals = b.observations, np.zeros(rewards.shape, np.bool_), list[Finals]()
        for t in range(count):
            drawn, replacements = self._drawn[first + t], self._replacements[first + t]
            b.actions[...] = allowed_actions(observation, action, rows[t], drawn, replacements)
            try:
                with generators or contextlib.nullcontext():
                    self._envs.step()
            except EnvironmentFailureError:
                check_acted(self._description, self._envs.env_ids, rows[: t + 1], None, first, dead)
                raise
            rows[t + 1], rewards[t], dead[t] = b.observations, b.rewards, b.dead
            self._taken.append(b.actions.copy())
            self._ends.append(np.array([b.terminated, b.truncated]))
            self._note_ends(b.terminated | b.truncated)
            finals.append(_finals(self._envs))
        check_numbers(self._description, self._envs.env_ids, rows, rewards, None, first, dead)
        for t, (ends, last) in enumerate(finals):
            check_rows(self._description, [self._envs.env_ids[env] for env in ends], last, None, first + t + 1)
            self._hashes.append(_step_hashes(rows[t + 1], rewards[t], (ends, last)))

    def _note_ends(self, ended: np.ndarray) -> None:
        b, now = self._envs.buffers, len(self._taken)
        self.episodes += int(ended.sum())
        if ended[0]:
            self._last_length = now - int(self._began_at[0])
        for env in ended.nonzero()[0]:
            self.begun[env].append(Begun(now, int(b.episodes[env]), b.observations[env].copy()))
        self._began_at[ended] = now

    def go_inside(self) -> None:
        """Takes steps until the first environment is about half through an episode as long as its last one.

        A reset alone would restore an episode that has just begun. It gives up after half of the trial's steps.
        """
        for _ in range(self._steps // 2):
            if self._age >= self._last_length // 2:
                return
            self.take(1)

    def leave(self) -> Left:
        """Saves the live episodes as a checkpoint does, then takes the further steps that :meth:`resume` repeats."""
        states, b = self._envs.save_states(), self._envs.buffers
        kept = [state and {name: np.array(value) for name, value in state.items()} for state in states]
        began_at, observations = self._began_at.copy(), b.observations.copy()
        left = Left(len(self._taken), self._age, kept, b.episodes.copy(), observations, began_at)
        self.take(min(max(self._steps // 2, 1), len(self._drawn) - len(self._taken)))
        return left

    def resume(self, left: Left, others: HostEnvs) -> Resumed:
        """Restores every saved episode in ``others``, takes the same further steps there and compares the results."""
        into, by_state = others.buffers, bool(left.states[0])
        into.episodes[...], into.observations[...] = left.episodes, left.observations
        taken, hashes = np.array(self._taken), self.hashes
        for env, state in enumerate(left.states):
            live = slice(left.began_at[env], left.steps)
            actions, expected = taken[live, env], hashes[live, env]
            if state:  # a checkpoint with a state holds no actions
                actions, expected = np.zeros_like(actions), expected[:0]
            if not others.restore(env, actions, expected, state or {}):
                return Resumed(by_state, left.after, False, None)
        for t in range(left.steps, len(taken)):
            into.actions[...] = taken[t]
            others.step()
            ends = np.array_equal([into.terminated, into.truncated], self._ends[t])
            if not ends or not np.array_equal(
                _step_hashes(into.observations, into.rewards, _finals(others)), hashes[t]
            ):
                return Resumed(by_state, left.after, True, t + 1 - left.steps)
        return Resumed(by_state, left.after, True, None)
