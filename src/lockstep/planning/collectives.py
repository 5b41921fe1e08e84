"""Lists an iteration's collectives on any number of devices, by the rules of both engines, and how long they take."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.config.run import Config
from lockstep.core.tree import tree_of
from lockstep.envs.description import EnvDescription
from lockstep.training.costs import FLOAT, Collective
from lockstep.training.losses import loss_settings

STATISTIC = 8
"""Bytes of a number in the statistics, float64."""
RINGS = ("all-gather", "all-reduce", "reduce-scatter")
"""Collectives in which a device sends only to its neighbour."""
TIMES = 10
"""Numbers that a PyTorch rank sends about an iteration's times, besides one for each collective."""


def collectives(config: Config, description: EnvDescription, parameters: int, devices: int) -> tuple[Collective, ...]:
    """Lists an iteration's collectives; their bytes are those of the result on one device.

    There is one sum per optimiser step, of ``parameters`` and the loss terms, by the tree of the run's shards
    (``exact``) or by the framework (``fast``), and one gather of statistics. PyTorch adds a gather of episodes and
    times, and every ``proof.interval`` iterations one of fingerprints.
    """
    if devices == 1:
        return ()
    found = [*_of_steps(config, parameters, devices), _statistics(config, description, devices)]
    if config.engine == "torch":
        count = sum(x.count for x in found) + 1
        found.append(Collective("all-gather", "episodes", 1.0, 8.0 * devices * (TIMES + count)))
        if config.proof.interval:
            found.append(Collective("all-gather", "proof", 1.0 / config.proof.interval, 8.0 * devices * 32))
    return tuple(found)


def _of_steps(config: Config, parameters: int, devices: int) -> list[Collective]:
    steps = float(config.ppo.num_epochs * config.ppo.num_minibatches)
    terms = len(loss_settings(config).terms)
    size = float(FLOAT * (parameters + terms))
    if config.fsdp:
        each = FLOAT * float(parameters)
        return [
            Collective("all-gather", "parameters", 2 * steps, each),
            Collective("reduce-scatter", "gradients", steps, each / devices),
            Collective("all-reduce", "gradients", steps, FLOAT * float(terms)),
        ]
    if config.sync_period > 1:
        whole = FLOAT * float(3 * parameters + terms + 2)
        return [Collective("all-reduce", "parameters", float(-(-steps // config.sync_period)), whole)]
    if config.reduction == "fast":
        return [Collective("all-reduce", "gradients", steps, size)]
    tree = tree_of(config.shards, devices)
    if tree.sliced(int(size)):
        return [
            Collective("all-to-all", "gradients", steps, tree.all_nodes * size / devices),
            Collective("all-gather", "gradients", steps, size),
        ]
    return [Collective("all-gather", "gradients", steps, tree.most_nodes * devices * size)]


def _statistics(config: Config, description: EnvDescription, devices: int) -> Collective:
    """Returns the gather of every shard's moments: of minibatches, of returns, and of what is normalised.

    Engine jax sends count, mean and M2 of each, and a stop code per device (less in ``fast``, which combines shards
    first). Engine torch sends a shard's sample count once, with its episodes, its stop code, and whether it stated
    anything.
    """
    of_minibatches = 3 * config.ppo.num_epochs * config.ppo.num_minibatches
    normalized = description.observation.vector_size if config.normalize.observations else 0
    normalized += 1 if config.normalize.returns else 0
    held = tree_of(config.shards, devices).most_shards * devices
    if config.engine == "torch":
        numbers = held * (of_minibatches + 2 * (2 + normalized) + 4)
    else:
        fitted = 0 if config.algorithm == "grpo" else 2
        numbers = held * (of_minibatches + 3 * (fitted + normalized)) + devices
    return Collective("all-gather", "statistics", 1.0, float(STATISTIC * numbers))


@dataclass(frozen=True)
class Link:
    """The links that join devices.

    Attributes:
        rate: bytes per second of one device in one direction, to the others of its host.
        latency: seconds of an empty collective.
        network: bytes per second out of a host in one direction, by all of its network cards; None if no bytes leave
            a host.
        per_host: devices per host.
    """

    rate: float
    latency: float
    network: float | None = None
    per_host: int = 1

    def transfer(self, one: Collective, devices: int, direct: bool = False) -> float:
        """Returns the seconds that the bytes of one collective take.

        A ring leaves each host by one edge, or by one for each of its network cards, which share the bytes. If every
        device sends to every other one (``direct``, or a kind that isn't a ring), all devices of a host send to other
        hosts at the same time, ``(n - per_host) / n`` of the bytes each.
        """
        if self.network is None:
            return sent_bytes(one, devices) / self.rate
        if one.kind in RINGS and not direct:
            return sent_bytes(one, devices) / min(self.rate, self.network)
        outside = one.bytes * (devices - self.per_host) / devices
        return outside / min(self.rate, self.network / self.per_host)


def sent_bytes(one: Collective, devices: int) -> float:
    """Returns the bytes that a device sends in one collective by the best algorithm, a ring or a pairwise exchange.

    With a result of ``b`` bytes, an all-gather and an all-to-all send ``b (n - 1) / n``, an all-reduce twice that, and
    a reduce-scatter ``b (n - 1)`` (Thakur et al. 2005).
    """
    share = (devices - 1) / devices
    if one.kind == "all-reduce":
        return 2 * one.bytes * share
    return one.bytes * (devices - 1) if one.kind == "reduce-scatter" else one.bytes * share
