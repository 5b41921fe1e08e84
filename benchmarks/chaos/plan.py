"""What is trained and what is done to it: cases, and faults drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SMALL = ("--num-envs", "8", "--num-steps", "16", "--ppo.num-epochs", "2", "--ppo.num-minibatches", "2")
WORKERS = "--env.workers"
STEPS = 128
"""Environment steps of an iteration."""


@dataclass(frozen=True)
class Case:
    """Something to train, short enough to be trained again and again.

    Attributes:
        name: in the table.
        words: of the command line, but for ranks and devices.
        iterations: of the whole run.
        eval_interval: iterations between evaluations.
        worlds: ranks or devices that a session may have, as words of the command line.
        workers: whether environments are stepped by processes of their own.
    """

    name: str
    words: tuple[str, ...]
    iterations: int
    eval_interval: int
    worlds: tuple[tuple[str, ...], ...]
    workers: bool = False

    @property
    def steps(self) -> int:
        """Environment steps of an iteration."""
        return STEPS

    @property
    def workers_of_a_rank(self) -> int | None:
        """How many step its environments, and as many those of evaluations; None: a session's own words say it."""
        return int(self.words[self.words.index(WORKERS) + 1]) if WORKERS in self.words else None

    def command(self) -> list[str]:
        """The words of ``lockstep train`` that every session of the case shares."""
        steps = ("--total-steps", str(STEPS * self.iterations))
        often = ("--checkpoint.interval", "5", "--eval.interval", str(self.eval_interval), "--eval.episodes", "2")
        return [*self.words, *SMALL, *steps, *often, "--log.no-tensorboard"]


_TORCH = (("--nproc", "1"), ("--nproc", "2"), ("--nproc", "4"))
_JAX = (
    *(("--simulate-devices", number, "--devices", number) for number in ("1", "2", "4")),
    ("--nproc", "2", "--simulate-devices", "1"),
)
_CARTPOLE = ("lockstep/CartPole-v1",)
_WITH_WORKERS = ("Pendulum-v1", "--normalize.observations", "--normalize.returns", WORKERS, "2")
_WITH_JAX = ("--engine", "jax")
CASES = (
    Case("torch", _CARTPOLE, 400, 50, _TORCH),
    Case("torch, workers", _WITH_WORKERS, 250, 50, _TORCH, workers=True),
    Case("torch, LSTM", (*_CARTPOLE, "--network.recurrent", "lstm", "--network.sequence-length", "8"), 200, 50, _TORCH),
    Case("jax", (*_CARTPOLE, *_WITH_JAX), 400, 50, _JAX),
    Case("jax, workers", (*_WITH_WORKERS, *_WITH_JAX), 200, 50, _JAX, workers=True),
)


@dataclass(frozen=True)
class Fault:
    """One thing that is done to a run.

    Attributes:
        kind: ``kill`` (SIGKILL), ``stop`` (a signal that asks), ``pause`` (SIGSTOP, then SIGCONT), ``disk`` (is full).
        target: ``rank``, ``launcher``, ``server``, ``worker``, ``everything``; of ``disk``: ``disk``.
        moment: ``start-up``, ``training``, ``commit`` of a checkpoint, ``evaluation``.
        after: seconds from the start (start-up), else iterations of the session that pass before.
        delay: from the moment to the deed, from 0 to 1: a share of the longest that the moment allows.
        lasts: seconds of a pause.
    """

    kind: str
    target: str
    moment: str
    after: float
    delay: float
    lasts: float = 0.0

    @property
    def is_final(self) -> bool:
        """Whether nothing of the run goes on after it, so that what it struck can still be seen in the end."""
        return self.kind == "kill" and self.target != "worker"

    def one_of(self, pids: Sequence[int]) -> list[int]:
        """The processes that get its signal, of those that it is aimed at: one rank or worker, else all."""
        if self.target in ("rank", "worker") and pids:
            return [pids[int(self.delay * 1e6) % len(pids)]]
        return list(pids)

    @property
    def ends(self) -> bool:
        """Whether the session is over after it."""
        return self.kind != "pause"

    @property
    def label(self) -> str:
        """What the table calls it."""
        if self.kind == "disk":
            return "disk full"
        return {"kill": f"{self.target} killed", "stop": "asked to stop", "pause": f"{self.target} paused"}[self.kind]


KINDS: dict[tuple[str, str], int] = {
    ("kill", "rank"): 6,
    ("kill", "launcher"): 5,
    ("kill", "server"): 3,
    ("kill", "worker"): 3,
    ("kill", "everything"): 4,
    ("stop", "launcher"): 2,
    ("pause", "rank"): 1,
    ("pause", "everything"): 1,
    ("disk", "disk"): 1,
}
"""Kinds of faults, and how often each is drawn."""
LATEST = 60
"""Most iterations of a session before a fault, where a run is that long."""
MOMENTS = {"start-up": 3, "training": 4, "commit": 4, "evaluation": 2}


def drawn(source: random.Random, case: Case, with_disk: bool, begun: bool = False) -> Fault:
    """Draws a fault that a case can have.

    Args:
        source: of the choices.
        case: that it will meet.
        with_disk: whether the disk can be filled here.
        begun: whether the session trains already, so that it has no start-up any more.
    """
    kinds = dict(KINDS)
    if not case.workers:
        del kinds["kill", "worker"]
    if not with_disk:
        del kinds["disk", "disk"]
    if not any(has_server(words) for words in case.worlds):
        del kinds["kill", "server"]
    kind, target = source.choices(list(kinds), list(kinds.values()))[0]
    moments = dict(MOMENTS)
    if not case.eval_interval:
        del moments["evaluation"]
    if begun or target in ("server", "worker", "disk") or kind in ("stop", "pause"):
        del moments["start-up"]  # they aren't there yet, or nothing has begun that could go on
    moment = source.choices(list(moments), list(moments.values()))[0]
    latest = min(LATEST, max(1, case.iterations // 3))
    after = source.uniform(0.0, 2.5) if moment == "start-up" else source.randint(1, latest)
    return Fault(kind, target, moment, after, source.random(), source.uniform(0.2, 2.0))


def world_of(source: random.Random, case: Case, fault: Fault | None) -> tuple[str, ...]:
    """Draws ranks or devices for a session; a server is there only where several processes are."""
    worlds: list[tuple[str, ...]] = list(case.worlds)
    if fault is not None and fault.target == "server":
        worlds = [words for words in worlds if has_server(words)]
    return source.choice(worlds)


def has_server(words: Sequence[str]) -> bool:
    """Tells whether a session of these words starts several processes, which a server forks."""
    return words[0] == "--nproc" and words[1] != "1"


def as_row(fault: Fault) -> dict[str, Any]:
    """A fault as it is kept."""
    return {"fault": fault.label, "moment": fault.moment}
