"""Counts what an iteration costs a device of the PyTorch engine, by running its functions on shapes alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.config.run import Config
from lockstep.core.shards import ShardPlan
from lockstep.envs.arrays import ARRAY_ENVIRONMENTS
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.torch_engine.planning.ranks import TracedRank
from lockstep.torch_engine.planning.traced import in_bf16
from lockstep.torch_engine.start.own_loss import check_own_loss
from lockstep.torch_engine.state import make_net
from lockstep.training.costs import Costs, Part


def can_compile(platform: str) -> bool:
    """Returns whether programs can be compiled for a platform that isn't here; always False in this engine."""
    return False


def start_compiler(platform: str) -> None:
    """Does nothing: this engine has no compiler to start."""


def costs(configs: Mapping[int, Config], platform: str, shape: str | None) -> Costs:
    """Runs an iteration's functions on tensors without memory, and counts what a device would launch.

    Args:
        configs: of one run, resolved for each number of ranks; the costs are those of the first of the most ranks, and
            the memory is that of the first of each number.
        platform: ``cpu`` or ``cuda``.
        shape: unused; the JAX engine needs it.

    Raises:
        ValueError: if the networks don't fit the environment or can't be counted; the message is one line.
    """
    devices = max(configs)
    config = configs[devices]
    description = describe(config.env)
    net = make_net(config, description.observation, description.action)
    low = net.bf16 and net.custom is not None  # counted in float32, then converted: what it calls isn't known
    net = replace(net, bf16=net.bf16 and not low)
    check_own_loss(config, net)
    traced = TracedRank(config, net, ShardPlan(config.envs, config.shards, devices), platform)
    stepped, notes = _environments(traced, description) if config.env.backend == "tensor" else ((), ())
    try:
        parts, held = traced.parts(), traced.memory(devices)
        fewer = {
            n: TracedRank(one, net, ShardPlan(one.envs, one.shards, n), platform).memory(n)
            for n, one in configs.items()
            if n < devices
        }
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        what = f"network.custom: {config.network.custom}"
        if config.ppo.loss is not None:
            what = f"ppo.loss: {config.ppo.loss}" if config.network.custom is None else f"{what}, or {config.ppo.loss},"
        raise ValueError(f"{what} can't be counted on shapes alone ({reason})") from None
    return Costs(
        traced.plan.local_num_shards,
        (*stepped, *(map(in_bf16, parts) if low else parts)),
        held,
        fewer,
        host_steps=config.env.backend != "tensor",
        source="shapes of PyTorch's operations",
        notes=notes,
    )


def _environments(traced: TracedRank, description: EnvDescription) -> tuple[tuple[Part, ...], tuple[str, ...]]:
    """Counts what steps of environments on the device launch; returns a note instead where that can't be counted."""
    config = traced.config
    left_out = f"{config.env.id}: what its own steps launch on the device can't be counted, and isn't in the times"
    if config.env.id not in ARRAY_ENVIRONMENTS:
        return (), (left_out,)
    try:
        kernels = traced.environments(description)
    except (RuntimeError, NotImplementedError):
        return (), (left_out,)
    return (Part("environments", kernels, "size"),), ()
