"""``lockstep record``: the episodes of any policy in a file, to learn from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from lockstep.commands.eval import actor_of, add_policy_options, facts_of, in_words, play_batch, start_of
from lockstep.commands.parser import CommandParser, at_least_one
from lockstep.envs.describe import describe
from lockstep.policies.baselines import BASELINES, Actor
from lockstep.policies.recordings import Recording, check_suffix, write_recording

BATCH = 64


def record_command(argv: Sequence[str]) -> int:
    """``lockstep record RUN --out FILE``: observations and actions of whole episodes."""
    parser = CommandParser(prog="lockstep record", description="Record a policy's episodes.")
    parser.add_argument("run", help="name, run directory or checkpoint directory; with --policy also an environment id")
    add_policy_options(parser)
    parser.add_argument("--policy", choices=BASELINES, help="a baseline in place of the run's policy")
    parser.add_argument("--episodes", type=at_least_one, default=100, help="how many (default: 100)")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .npz or .safetensors")
    options = parser.parse_args(argv)
    check_suffix(options.out)
    actor = actor_of(options)
    name = options.policy or options.run
    recording = record(actor, name, options.episodes, options.seed, not options.stochastic)
    write_recording(options.out, recording)
    print(in_words(actor, facts_of(actor, recording.table, not options.stochastic)))
    print(f"{len(recording.actions):,} steps → {options.out}")
    return 0


class Recorder:
    """An actor that keeps what another one sees and does; see :class:`lockstep.policies.baselines.Actor`."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self.config, self.global_step = actor.config, actor.global_step
        self.observation, self.action = actor.observation, actor.action
        self.seen: list[np.ndarray] = []
        self.done: list[np.ndarray] = []

    def reset(self, seed: int | None = None) -> None:
        """Begin episodes, and forget those before."""
        self._actor.reset(seed)
        self.seen, self.done = [], []

    def forget(self, rows: np.ndarray) -> None:
        """See :meth:`Actor.forget`."""
        self._actor.forget(rows)

    def native(self, observations: np.ndarray, deterministic: bool = True) -> np.ndarray:
        """See :meth:`Actor.native`."""
        actions = self._actor.native(observations, deterministic)
        self.seen.append(observations.copy())
        self.done.append(np.array(actions, self.action.row_dtype))
        return actions


def record(actor: Actor, name: str, episodes: int, seed: int | None = None, deterministic: bool = True) -> Recording:
    """Play whole episodes with the starts of an evaluation, and keep what was seen and done.

    Args:
        actor: that plays.
        name: what it is called in the file.
        episodes: how many.
        seed: of their starts; None: the actor's own.
        deterministic: the most likely actions, else samples.
    """
    recorder, start = Recorder(actor), start_of(actor, seed)
    recorder.reset(start)
    tables, seen, done = [], [], []
    for first in range(0, episodes, BATCH):
        table = play_batch(recorder, start, range(first, min(first + BATCH, episodes)), deterministic)
        for row, length in enumerate(table[:, 1].astype(int).tolist()):
            seen.append(np.stack([rows[row] for rows in recorder.seen[:length]]))
            done.append(np.stack([rows[row] for rows in recorder.done[:length]]))
        tables.append(table)
    whole = np.concatenate(tables)
    config = actor.config
    return Recording(
        observations=np.concatenate(seen),
        actions=np.concatenate(done),
        episodes=np.repeat(np.arange(episodes), whole[:, 1].astype(int)),
        table=whole,
        facts={
            "policy": name,
            "config": config.model_dump(mode="json"),
            "environment": asdict(describe(config.env)),
            "seed": start,
            "stochastic": not deterministic,
        },
    )
