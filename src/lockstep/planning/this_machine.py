"""Predicts a run on several ranks of this machine, or of hosts like it, from separate one-rank runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lockstep.config.run import Config
from lockstep.core.temporary import temporary_directory
from lockstep.core.topology import available_cores
from lockstep.envs.description import EnvDescription
from lockstep.planning.accelerators import Times
from lockstep.planning.collectives import Link, collectives
from lockstep.planning.hardware import CASES, Case
from lockstep.planning.measure import RankTimes, measure_ranks
from lockstep.planning.prediction import Prediction
from lockstep.planning.waiting import expected_max
from lockstep.training.costs import FLOAT, Collective

MEMORY_LATENCY, SHARED_CORE_LATENCY = 25e-6, 75e-6
"""Seconds of a collective in memory per additional rank; and if ranks share cores (docs/plan.md)."""
TCP_LATENCY, TCP_GOODPUT = 650e-6, 0.94
"""Seconds of a gloo collective per additional rank; share of a network's rate that its data gets."""
ETHERNET = 25e9 / 8
"""Bytes per second between hosts, unless ``--link`` is given."""
COMMUNICATION: dict[Case, float] = {"best": 0.7, "likely": 1.0, "worst": 1.5}
"""Time of collectives relative to the likely case."""
COPIES_A_CORE = 2


@dataclass(frozen=True)
class Machine:
    """This machine, and what joins its ranks.

    Attributes:
        per_host: ranks per host.
        network: bytes per second out of a host, by one network card.
        copy: bytes per second that a process copies in memory.
    """

    per_host: int
    network: float = ETHERNET
    copy: float = 1e10

    def link(self, ranks: int, cores: int) -> Link:
        """Returns the link that joins ``ranks``: one host's memory, or gloo over a network."""
        if ranks > self.per_host:
            return Link(math.inf, TCP_LATENCY * (ranks - 1), self.network * TCP_GOODPUT, self.per_host)
        latency = MEMORY_LATENCY if ranks <= cores else SHARED_CORE_LATENCY
        return Link(self.copy, latency * (ranks - 1))


@dataclass(frozen=True)
class Measured:
    """Times of the one-rank runs that were measured at once, for ``ranks`` ranks in all, ``here`` of them per host.

    ``process`` is a run of one rank with all environments of a host, which one process steps for all of its ranks
    (engine jax); None: each rank steps its own.
    """

    ranks: int
    here: int
    times: tuple[RankTimes, ...]
    process: RankTimes | None = None

    @property
    def hosts(self) -> int:
        """The number of hosts."""
        return -(-self.ranks // self.here)


def measure(
    config: Config, ranks: int, here: int, warmup_iters: int, iters: int, say: Callable[[str], None]
) -> Measured:
    """Measures ranks' parts of a run, as many at once as share a machine (``here``), at most two per core.

    With engine jax, whose ranks of a host are devices of one process, it also measures such a process's rollouts, if
    the host steps the environments.
    The first ``warmup_iters`` iterations don't count; ``say`` is called with what is measured.
    """
    copies = min(here, COPIES_A_CORE * available_cores())
    say(f"{copies} run{'s' if copies > 1 else ''} of one rank")
    with temporary_directory() as directory:
        found = measure_ranks(config, range(copies), ranks, directory / "runs", warmup_iters, iters)
        measured = Measured(ranks, here, tuple(found))
        if config.engine == "torch" or here == 1 or not found[0].rollout.size:
            return measured
        say("the rollouts of one process")
        process = measure_ranks(config, range(1), measured.hosts, directory / "runs", warmup_iters, iters)[0]
    return replace(measured, process=process)


def predict(
    config: Config, description: EnvDescription, measured: Measured, machine: Machine, memory: dict[str, float]
) -> Prediction:
    """Predicts a run on ``measured.ranks`` ranks.

    ``memory`` is the known memory of a rank without FSDP, in bytes by kind.
    """
    times: dict[Case, Times] = {case: _times(config, description, measured, machine, memory, case) for case in CASES}
    likely = times["likely"]
    known = sum(memory.values())
    peak = max(x.memory for x in measured.times)
    cut = measured.ranks if config.fsdp else 1
    held = {kind: size / cut for kind, size in memory.items()} | {"process": max(0.0, peak - known)}
    return Prediction(
        devices=measured.ranks,
        num_envs=config.envs,
        steps=config.steps_per_iteration,
        seconds={case: times[case].total for case in CASES},
        parts=likely.parts,
        limits=likely.limits,
        limits_of=likely.limits_of,
        collectives=collectives(config, description, parameters_of(memory), measured.ranks),
        memory=held,
    )


def parameters_of(memory: dict[str, float]) -> int:
    """Returns the number of parameters, from the bytes that they take."""
    return round(memory.get("parameters", 0.0) / FLOAT)


def _times(
    config: Config,
    description: EnvDescription,
    measured: Measured,
    machine: Machine,
    memory: dict[str, float],
    case: Case,
) -> Times:
    times, ranks, own = Times.none(), measured.ranks, measured.times
    cores = available_cores()
    crowd = max(1.0, measured.here / max(len(own), cores))  # ranks per host that couldn't be measured at once
    told = all(len(x.rollout) for x in own)
    for name, attribute in (("rollout", "rollout"), ("gradients", "learn")) if told else (("other", "total"),):
        together = measured.process if attribute == "rollout" else None
        samples = [getattr(x, attribute) for x in ((together,) if together else own)]
        slowest, turns = max(float(x.mean()) for x in samples), 1.0 if together else crowd
        times.add(name, "host", slowest * turns)
        apart = measured.hosts if together else ranks
        times.add("waiting", "waiting", _wait(samples, slowest, apart, case, config, attribute) * turns)
    if told:
        times.add("other", "host", max(float(x.other.mean()) for x in own) * crowd)
    link = machine.link(ranks, cores)
    found = collectives(config, description, parameters_of(memory), ranks)
    for one in found:
        factor = one.count * COMMUNICATION[case]
        times.add("collectives", "links", factor * link.transfer(one, ranks, _is_direct(config, one, found)))
        times.add("collectives", "latency", factor * link.latency)
    return times


def _is_direct(config: Config, one: Collective, found: Sequence[Collective]) -> bool:
    """Returns whether each rank sends to every other one: engine torch does, over gloo, if a sum travels by slices."""
    sliced = any(x.kind == "all-to-all" and x.purpose == one.purpose for x in found)
    return config.engine == "torch" and sliced


def _wait(samples: list[np.ndarray], slowest: float, ranks: int, case: Case, config: Config, attribute: str) -> float:
    """Returns the expected seconds that ranks wait for the slowest one, beyond that one's own mean.

    In the ``best`` case nobody waits. In the ``likely`` case ranks' times are independent, and the steps of an update,
    after each of which ranks meet, vary together. In the ``worst`` case each step varies independently.
    """
    if ranks == 1 or case == "best":
        return 0.0
    everyone = [samples[rank % len(samples)] for rank in range(min(ranks, 512))]
    excess = max(0.0, expected_max(everyone) - slowest)
    steps = config.ppo.num_epochs * config.ppo.num_minibatches
    return excess * (math.sqrt(steps) if case == "worst" and attribute != "rollout" else 1.0)
