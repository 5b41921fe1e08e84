"""Makes the outlook of each target: counts costs, measures if the target is this machine, and predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

from lockstep.config.run import Config
from lockstep.core.host.cgroups import memory_limit
from lockstep.core.machine import system_fact
from lockstep.core.topology import available_cores
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.launch.jax_start import look_with_cpu
from lockstep.launch.sizing import MEMINFO
from lockstep.planning import accelerators, this_machine
from lockstep.planning.counting import can_compile, count_costs
from lockstep.planning.hardware import Target
from lockstep.planning.host_steps import HostSteps, measure_host_steps
from lockstep.planning.measure import copy_rate
from lockstep.planning.prediction import Outlook, Prediction
from lockstep.planning.request import PlanRequest
from lockstep.training.costs import Costs

WARMUP_ITERS = 3
"""First iterations on this machine, which don't count."""
Say = Callable[[str], None]


def outlooks(request: PlanRequest, say: Say) -> Iterator[Outlook]:
    """Yields the outlook of the run on each target, in order; calls ``say`` with what is in progress.

    Steps of environments on the host are timed once for all targets.

    Raises:
        ValueError: one line, if an environment can't be made or an engine can't do what the config asks for.
        RunError: a compiler or a measured run failed.
    """
    envs = {env.id: env for env in (request.run_on(target).env for target in request.targets)}
    look_with_cpu(request.config)
    descriptions = {name: describe(env) for name, env in envs.items()}  # engine jax may step a twin of the environment

    @cache
    def host(name: str) -> HostSteps:
        say(f"timing steps of {name}")
        return measure_host_steps(envs[name], descriptions[name])

    for target in request.targets:
        name = request.run_on(target).env.id
        yield _outlook_on(target, request, descriptions[name], partial(host, name), say)


Host = Callable[[], HostSteps]


def _outlook_on(target: Target, request: PlanRequest, description: EnvDescription, host: Host, say: Say) -> Outlook:
    run = request.run_on(target)
    configs = {size: request.sized(run, size) for size in request.sizes_on(target)}
    most = max(configs)
    costs = _costs(target, configs, say)
    if target.chip is None:
        predicted = _on_this_machine(target, request, description, configs, costs, say)
    else:
        predicted = _on_chips(target, request, description, configs, costs, host if costs.host_steps else None)
    largest = predicted[1]
    parts, notes = costs.of_shards(costs.shards), request.notes_on(target)
    if target.chip is not None:
        notes += [f"{target.text}: {note}" for note in costs.notes]
    return Outlook(
        target=target.text,
        chip=f"{available_cores()} cores of this machine" if target.chip is None else target.chip.name,
        engine=run.engine,
        source=costs.source,
        devices=target.devices,
        capacity=_host_memory() if target.chip is None else target.chip.memory,
        sharing=target.per_host if target.chip is None else 1,
        predictions=predicted[0],
        flops=sum(part.flops for part in parts),
        bytes=sum(part.bytes for part in parts),
        kernels=sum(part.calls for part in parts),
        largest_num_envs=largest,
        price=request.prices.get(target.text),
        total_steps=configs[most].total_steps,
        notes=tuple(notes),
    )


def _costs(target: Target, configs: Mapping[int, Config], say: Say) -> Costs:
    """Counts the costs of each of the most devices; compiles for them if their compiler is installed."""
    most = max(configs)
    shape = target.shape_of(most) or target.shape_of(1)
    if shape is not None and not can_compile(configs[most].engine, target.platform):
        shape = None
    say(f"{target.text}: counting" if shape is None else f"{target.text}: compiling for {shape}")
    return count_costs(configs, target.platform, shape)


Predicted = tuple[tuple[Prediction, ...], int | None]


def _on_chips(
    target: Target,
    request: PlanRequest,
    description: EnvDescription,
    configs: dict[int, Config],
    costs: Costs,
    host: Host | None,
) -> Predicted:
    steps = None if host is None else host()
    most = max(configs)
    works = [
        accelerators.Workload(config, description, target, size, costs, most, steps, request.network)
        for size, config in configs.items()
    ]
    return tuple(accelerators.predict(work) for work in works), accelerators.largest_num_envs(works[-1])


def _on_this_machine(
    target: Target,
    request: PlanRequest,
    description: EnvDescription,
    configs: dict[int, Config],
    costs: Costs,
    say: Say,
) -> Predicted:
    most = max(configs)
    machine = this_machine.Machine(target.per_host, request.network or this_machine.ETHERNET, copy_rate())
    out = []
    for size, config in configs.items():

        def tell(what: str, size: int = size) -> None:
            say(f"{target.text}: measuring {what} for {size} rank{'s' if size > 1 else ''}")

        here = min(size, target.per_host)
        measured = this_machine.measure(config, size, here, WARMUP_ITERS, request.iters, tell)
        whole = most if config.fsdp else 1
        kept = {kind: costs.memory[kind] * whole for kind in ("parameters", "moments")}
        out.append(this_machine.predict(config, description, measured, machine, kept))
    return tuple(out), None


def _host_memory() -> float:
    """Returns this machine's memory in bytes, within the limits of this process's cgroups; 0 if unknown."""
    total, limit = system_fact(MEMINFO, "MemTotal"), memory_limit()
    bytes_here = float(total.split()[0]) * 1024 if total else 0.0
    return bytes_here if limit is None else min(bytes_here, limit)
