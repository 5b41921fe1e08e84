"""Predicts a run on GPUs or TPUs from an iteration's costs on a device, the chip's data sheet and assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from lockstep.config.checks import ungraphed
from lockstep.config.run import Config
from lockstep.core.tree import tree_of
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.description import EnvDescription
from lockstep.envs.gymnasium.choose_workers import Measured, chosen_workers
from lockstep.planning.collectives import Link, collectives
from lockstep.planning.hardware import CASES, Assumptions, Case, Chip, Target, assumptions, runtime_bytes
from lockstep.planning.host_steps import HostSteps
from lockstep.planning.prediction import PARTS, Prediction
from lockstep.planning.roofline import LIMITS, Roofline
from lockstep.training.costs import FLOAT, Collective, Costs, Part

LATENCY_OF = 8
"""The assumed latency of a collective is for this many devices; it grows with the logarithm of their number."""
STEP, SAMPLING, STEPPING = ("gradients", "optimizer"), ("rollout",), ("rollout", "environments")
"""Parts that engine torch replays as graphs: an optimiser step, sampling actions, a step of array environments."""
COPIES = {SAMPLING: 3, STEPPING: 6}
"""Copy launches per environment step, to and from the tensors that the graph reads and writes."""
BESIDE_DRAWING = ("collectives", "environments", "rollout")
"""Parts of an iteration during which engine torch's host draws minibatch indices. It also draws during optimiser steps
that are queued on the device, but not while kernels wait for launches: all of them are launched before it draws."""
GROWING = ("rollout", "activations")
"""Kinds of memory that grow with the environments of a shard."""
BY_SHARDS = {"exact": ("rollout",), "fast": ("rollout", "activations")}
"""Kinds that grow with a device's shards in engine jax, which computes them one by one in ``exact``."""
CUT = ("parameters", "moments")
"""Kinds of memory that FSDP shards over devices. Gradients are whole until they are scattered."""


@dataclass(frozen=True)
class Times:
    """Seconds of an iteration: by part, by what limits them, and by both."""

    parts: dict[str, float]
    limits: dict[str, float]
    limits_of: dict[str, dict[str, float]]

    @classmethod
    def none(cls) -> Times:
        """Returns times that are all 0."""
        limits: dict[str, float] = dict.fromkeys((*LIMITS, "links", "latency", "host", "waiting"), 0.0)
        return cls(dict.fromkeys(PARTS, 0.0), limits, {part: {} for part in PARTS})

    def add(self, part: str, limit: str, seconds: float) -> None:
        """Adds seconds of a part that are limited by ``limit``."""
        self.parts[part] += seconds
        self.limits[limit] += seconds
        self.limits_of[part][limit] = self.limits_of[part].get(limit, 0.0) + seconds

    @property
    def total(self) -> float:
        """The seconds of the iteration."""
        return sum(self.parts.values())


@dataclass(frozen=True)
class Workload:
    """A run on some number of a target's devices, and what is known of it.

    Attributes:
        config: the config, resolved for ``devices``.
        costs: an iteration's costs on one device of ``counted`` devices.
        counted: the number of devices that costs were counted for: the most that are planned.
        host: times of steps of environments on the host; None if the devices step them.
        network: bytes per second out of a host, which replaces the table's; or None.
    """

    config: Config
    description: EnvDescription
    target: Target
    devices: int
    costs: Costs
    counted: int
    host: HostSteps | None
    network: float | None = None

    @property
    def chip(self) -> Chip:
        """The target's chip."""
        assert self.target.chip is not None, "the target is this machine"
        return self.target.chip

    @property
    def shards(self) -> int:
        """The number of shards of the device that owns most."""
        return tree_of(self.config.shards, self.devices).most_shards

    @property
    def parameters(self) -> int:
        """The number of the policy's parameters."""
        cut = self.counted if self.config.fsdp else 1
        return round(self.costs.memory["parameters"] * cut / FLOAT)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of an iteration on the device with most shards."""
        return self.costs.of_shards(self.shards)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """An iteration's collectives: as compiled, if that was for this many devices, else by the engine's rules."""
        if self.devices == self.counted and self.costs.collectives:
            return self.costs.collectives
        return collectives(self.config, self.description, self.parameters, self.devices)

    def memory(self) -> dict[str, float]:
        """Returns a device's memory in bytes, by kind."""
        counted = self.costs.fewer.get(self.devices)
        if counted is not None:
            return counted | {"runtime": runtime_bytes(self.target.platform)}
        ratio, growing = self.shards / self.costs.shards, BY_SHARDS[self.config.reduction]
        cut = self.counted / self.devices if self.config.fsdp else 1.0
        grown = {
            kind: size * (ratio if kind in growing else cut if kind in CUT else 1.0)
            for kind, size in self.costs.memory.items()
        }
        if self.config.reduction == "exact":  # each further shard has a gradient of its own
            grown["gradients"] += FLOAT * self.parameters * (self.shards - self.costs.shards)
        if self.devices == 1:
            grown.pop("gathered", None)
        return grown | {"runtime": runtime_bytes(self.target.platform)}

    def link(self, assumed: Assumptions) -> Link:
        """Returns the link that joins the devices."""
        return link_of(self.chip, self.devices, self.chip.devices_per_host, assumed, self.network)


def link_of(chip: Chip, devices: int, per_host: int, assumed: Assumptions, network: float | None = None) -> Link:
    """Returns the link that joins devices: of their host or slice, and the network if they need several hosts.

    ``network`` is bytes per second out of a host; without it the table's rate for all of the host's network cards.
    """
    growth = max(1.0, math.log2(devices)) / math.log2(LATENCY_OF)
    rate, latency = chip.link_rate * assumed.link, assumed.latency[chip.platform]
    if chip.platform == "tpu" or devices <= per_host:
        return Link(rate, latency * growth)
    network = network or chip.network_rate * per_host
    return Link(rate, (latency + assumed.latency["network"]) * growth, network * assumed.link, per_host)


def predict(work: Workload) -> Prediction:
    """Predicts speed, limits and memory of a run."""
    times: dict[Case, Times] = {case: _times(work, assumptions(case)) for case in CASES}
    likely, config = times["likely"], work.config
    memory = work.memory()
    flops = sum(part.flops for part in work.parts)
    return Prediction(
        devices=work.devices,
        num_envs=config.envs,
        steps=config.steps_per_iteration,
        seconds={case: times[case].total for case in CASES},
        parts=likely.parts,
        limits=likely.limits,
        limits_of=likely.limits_of,
        collectives=work.collectives,
        memory=memory,
        utilization=flops / likely.total / work.chip.peaks[config.precision],
    )


def _times(work: Workload, assumed: Assumptions) -> Times:
    config, times = work.config, Times.none()
    roofline = Roofline.of(work.chip, config.engine, assumed)
    replayed = replace(roofline, launch=assumed.kernel[f"jax:{work.target.platform}"])
    graphed = _graphed(config, work.devices)
    together, queued = _devices_of_a_process(work), 0.0
    for part in work.parts:
        one = part
        if part.name == "rollout" and together > 1:  # a process infers for the environments of all of its devices
            one = part.of_shards(together, 1)
        if part.name == "optimizer" and config.fsdp:
            one = Part(part.name, tuple(k._replace(bytes=k.bytes / work.devices) for k in part.kernels), "not")
        by_graph = part.name in graphed and (part.sampling or "environments" in graphed)
        beside = min(part.beside, work.shards) if by_graph and part.grows == "count" else 1
        for limit, seconds in (replayed if by_graph else roofline).part(one, beside).items():
            times.add(part.name, limit, seconds)
            queued += seconds if part.name in STEP and (by_graph or limit != "launches") else 0.0
    if "rollout" in graphed:
        copies = COPIES[STEPPING if "environments" in graphed else SAMPLING]
        times.add("rollout", "launches", copies * config.num_steps * roofline.launch)
    if work.host is not None:
        times.add("environments", "host", _host_seconds(work, assumed, together))
    if config.engine == "torch" and (config.fsdp or config.sync_period > 1):  # the host takes part in each step
        times.add("gradients", "host", config.ppo.num_epochs * config.ppo.num_minibatches * assumed.host_step)
    link = work.link(assumed)
    for one in work.collectives:
        times.add("collectives", "links", one.count * link.transfer(one, work.devices))
        times.add("collectives", "latency", one.count * link.latency)
    times.add("other", "host", assumed.iteration[config.engine] + _drawing_seconds(work, assumed, times, queued))
    return times


def _drawing_seconds(work: Workload, assumed: Assumptions, times: Times, queued: float) -> float:
    """Returns the seconds that an iteration of engine torch waits for its host to count episodes and draw minibatches.

    The host draws the indices while the device works on the ``queued`` seconds of the last iteration's optimiser steps
    and on the rollout, and counts episodes at the rollout's end. If the host takes part in each step, nothing overlaps.
    """
    config = work.config
    if config.engine != "torch":  # the compiled program draws the indices
        return 0.0
    samples = work.shards * (config.envs // config.shards) * config.num_steps
    counting = samples * assumed.counted_step
    drawing = config.ppo.num_epochs * samples // config.sequence_length * assumed.drawn_index
    if config.fsdp or config.sync_period > 1:
        return counting + drawing
    return max(counting, drawing - queued - sum(times.parts[name] for name in BESIDE_DRAWING))


def _graphed(config: Config, devices: int) -> tuple[str, ...]:
    """Returns the parts that engine torch replays as CUDA graphs, so that Python doesn't launch their kernels."""
    allowed = config.cuda_graphs is not False and ungraphed(config) is None
    if config.engine != "torch" or config.device != "cuda" or not allowed:
        return ()
    step = STEP if devices == 1 else ()
    if config.env.backend != "tensor":
        return SAMPLING + step
    return (STEPPING if config.env.id in ARRAY_ENVIRONMENTS else ()) + step


def _devices_of_a_process(work: Workload) -> int:
    """Returns for how many devices one process steps environments: with engine jax, all of its host's."""
    if work.host is None or work.config.engine == "torch":
        return 1
    return min(work.devices, work.chip.devices_per_host)


def _host_seconds(work: Workload, assumed: Assumptions, together: int) -> float:
    """Returns the seconds that the host needs for a rollout: stepping environments and transfers at each step."""
    config, host = work.config, work.host
    assert host is not None
    envs = work.shards * (config.envs // config.shards) * together
    processes = max(1, work.devices // together)
    here = max(1, min(work.devices, work.chip.devices_per_host) // together)
    workers = config.env.workers
    if workers == "auto":  # as the run itself chooses, by the cores of the target's hosts
        rank = Measured(host.mean / assumed.processor, envs, work.chip.host_cores // here)
        workers = 0 if host.each is not None else chosen_workers([rank])
    stepping = host.rollout(envs, config.num_steps, workers, processes) / assumed.processor
    busy = here * max(1, workers)
    row = work.description.observation.width * np.dtype(work.description.observation.dtype).itemsize
    handed = config.num_steps * (assumed.host_step + envs * row / (work.chip.host_link_rate * assumed.link))
    return stepping * max(1.0, busy / work.chip.host_cores) + handed


def largest_num_envs(work: Workload) -> int:
    """Returns the largest ``num_envs`` that fits the devices' memory and that shards divide; 0 if none fits."""
    memory = work.memory()
    growing = sum(memory[kind] for kind in GROWING)
    free = work.chip.memory - sum(memory.values()) + growing
    config = work.config
    step = config.shards * config.group_size
    return max(0, math.floor(config.envs * free / growing / step) * step) if growing else 0
