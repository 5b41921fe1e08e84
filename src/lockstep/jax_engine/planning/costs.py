"""Counts what an iteration costs a device of the JAX engine, by reading the program that XLA compiles for it."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lockstep.config.run import Config
from lockstep.core.topology import Topology
from lockstep.envs.describe import describe
from lockstep.envs.description import EnvDescription
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, Mesh, Specs, mesh_of, named_sharding
from lockstep.jax_engine.distributed.processes import set_up_jax
from lockstep.jax_engine.envs.environments import is_jax_environment, make_environment
from lockstep.jax_engine.gradients import gradient_parts
from lockstep.jax_engine.host.compiled import compile_learn
from lockstep.jax_engine.nets import distributions, nets
from lockstep.jax_engine.planning.hlo import PARTS, Ran, Reader, collectives_of
from lockstep.jax_engine.planning.targets import OPTIONS, VARIABLES, described_devices
from lockstep.jax_engine.program.device_program import DeviceProgram
from lockstep.jax_engine.program.inference import Inference
from lockstep.jax_engine.program.iterations import Inputs
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.rollout import Rollout
from lockstep.jax_engine.session import parameter_layout
from lockstep.jax_engine.setup.set_up import GPU_FLAGS, add_xla_flags, settle_numbers
from lockstep.jax_engine.shards.normalizers import empty_moments, scale_of
from lockstep.jax_engine.start.own_loss import check_own_loss
from lockstep.jax_engine.state import TrainState, check_networks, state_of, state_specs
from lockstep.training.costs import FLOAT, Costs, Grows, Kernel, Part, merged
from lockstep.training.schedules import scheduled_coefficients


def can_compile(platform: str) -> bool:
    """Returns whether XLA's compiler for a platform is installed: libtpu, or JAX's plugin for CUDA."""
    if platform == "tpu":
        return importlib.util.find_spec("libtpu") is not None
    return any(importlib.util.find_spec(f"jax_cuda{version}_plugin") is not None for version in (12, 13))


def start_compiler(platform: str) -> None:
    """Starts JAX on this machine's CPU, together with the compiler for a platform."""
    os.environ.update(VARIABLES)
    if platform != "cuda":
        set_up_jax(1, "cpu", 1, Topology())
    else:
        add_xla_flags(GPU_FLAGS)
        jax.config.update("jax_platforms", "")  # else JAX doesn't load the plugin; it needs no devices
    settle_numbers(platform)


def costs(configs: Mapping[int, Config], platform: str, shape: str | None) -> Costs:
    """Compiles an iteration for the most devices, and reads what the first of them computes, moves and holds.

    Args:
        configs: of one run, resolved for each number of devices; only the most devices' is compiled.
        platform: ``cpu``, ``cuda`` or ``tpu``.
        shape: topology of the devices, as their compiler names it. None: a program for this machine's CPU stands in for
            the ``platform``'s; it is compiled for one device with as many shards as the first of all devices owns.

    Raises:
        ValueError: if the networks don't fit the environment, or there is no such compiler; the message is one line.
    """
    devices = max(configs)
    config = configs[devices]
    description = describe(config.env)
    if shape is None:
        config = _alone_config(config, devices)
        mesh, kind = mesh_of(jax.devices("cpu")[:1]), "the program of this machine's CPU"
    else:
        found = described_devices(platform, shape)
        used = found.devices[:devices] if devices in (1, len(found.devices)) else found.devices[:1]
        config = config if len(used) == devices else _alone_config(config, devices)
        mesh, kind = mesh_of(used, len(used) if config.fsdp else 1), f"compiled for {len(used)} x {found.kind}"
    program = _program(config, description, mesh, platform)
    options = OPTIONS.get(platform) if shape is not None else None
    try:
        compiled = [x.lower().compile(compiler_options=options) for x in _traced(program)]
    except jax.errors.JaxRuntimeError as error:
        used = needed_bytes(str(error), 3 * FLOAT * program.layout.size)
        if used is None or shape is None:
            raise
        return _too_large(costs(configs, platform, None), used, kind)
    ran = [list(Reader(x.as_text(), program.blocks.shards, config.precision == "bf16").run()) for x in compiled]
    if len(ran) > 1:  # the policy's own program, called at every step
        ran[1] = [x._replace(part="rollout", kernel=_times(x.kernel, config.num_steps)) for x in ran[1]]
    parts = _parts([x for one in ran for x in one], "count" if program.blocks.exact else "size")
    collectives = collectives_of([x for one in ran for x in one]) if mesh.size > 1 else ()
    memory = _memory(program, [x.memory_analysis() for x in compiled])
    if config.fsdp and mesh.size < devices:
        memory = _cut(memory, devices)
    return Costs(program.blocks.shards, parts, memory, {}, collectives, program.env is None, kind)


def _cut(memory: dict[str, float], devices: int) -> dict[str, float]:
    """Returns what each of ``devices`` devices holds with FSDP, from what one alone holds."""
    cut = {kind: memory[kind] / devices for kind in ("parameters", "moments")}
    return memory | cut | {"gathered": memory["parameters"]}


def needed_bytes(message: str, held: float) -> float | None:
    """Reads the bytes that a program needs on a device from XLA's out-of-memory message; None if it doesn't say.

    Some messages give the total, others what is needed beside the ``held`` bytes of parameters and moments.
    """
    everything = re.search(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm", message)
    beside = re.search(r"temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM", message)
    found = everything or beside
    if found is None:
        return None
    return float(found[1]) * 1024 ** " KMGT".index(found[2] or " ") + (0.0 if everything else held)


def _too_large(counted: Costs, used: float, kind: str) -> Costs:
    """Adds the bytes that a compiler says a program needs, and can't have, to costs that were counted without it."""
    rest = max(0.0, used - sum(counted.memory.values()))
    memory = counted.memory | {"activations": counted.memory["activations"] + rest}
    return replace(counted, memory=memory, source=f"{counted.source}; {kind} it needs {used / 1e9:.1f} GB")


def _alone_config(config: Config, devices: int) -> Config:
    """Returns the config of a run that has just the shards of the first of ``devices`` devices."""
    shards = -(-config.shards // devices)
    envs = config.envs // config.shards * shards
    return config.model_copy(update={"num_envs": envs, "num_shards": shards, "collectives": "auto"})


def _program(config: Config, description: EnvDescription, mesh: Mesh, platform: str) -> Program:
    net = check_networks(config, description)
    check_own_loss(config, net)
    layout = parameter_layout(config, net, mesh)
    env = make_environment(config.env) if is_jax_environment(config.env) else None
    return Program(config, description, net, layout, mesh, env, everywhere=False, planned_for=platform)


def _times(kernel: Kernel, count: int) -> Kernel:
    return kernel._replace(calls=kernel.calls * count)


def _parts(ran: list[Ran], grows: Grows) -> tuple[Part, ...]:
    """Sorts the kernels that ran into the engine's parts; the optimiser costs the same whatever a device owns."""
    kernels = {name: [x.kernel for x in ran if x.part == name and x.collective is None] for name in PARTS}
    return tuple(Part(name, merged(own), "not" if name == "optimizer" else grows) for name, own in kernels.items())


# --- what is compiled ----------------------------------------------------------------------------------------------


def _struct(mesh: Mesh, shape: tuple[int, ...], dtype: Any, spec: Specs = REPLICATED) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, spec))


def state_shapes(program: Program, envs: Any = None) -> tuple[TrainState, TrainState]:
    """Returns the shapes of a state on the mesh, and its specs; ``envs`` are one device's environments, or None."""
    layout = program.layout
    held: Any = np.broadcast_to(np.float32(0.0), (layout.size,))  # allocates no memory
    if layout.axes:
        held = {name: np.broadcast_to(np.float32(0.0), shape) for name, shape in layout.shapes.items()}
    state = state_of(program.config, program.net, held, held)
    specs = state_specs(state._replace(envs=envs), program.layout.specs)
    rows = program.rows.count
    whole = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), envs)
    shapes = jax.tree.map(
        lambda x, spec: _struct(program.mesh, np.shape(x), x.dtype, spec), state._replace(envs=whole), specs
    )
    return shapes, specs


def _inputs(program: Program, *shape: int) -> Inputs:
    rate = _struct(program.mesh, shape, np.float32)
    coefficients = dict.fromkeys(scheduled_coefficients(program.config, 0), rate) or None
    return Inputs(_struct(program.mesh, shape, np.int32), rate, coefficients)  # pyright: ignore[reportArgumentType]


def _traced(program: Program) -> list[Any]:
    """Traces what an iteration calls: the whole iteration, or the update and the policy that the host calls."""
    mesh, each = program.mesh, _struct(program.mesh, (program.mesh.size,), np.int32, SHARDED)
    if program.env is not None:
        compiled = DeviceProgram(program)
        shapes, specs = state_shapes(program, compiled.carry_shapes())
        inputs = _inputs(program, 1)
        return [compiled.compile_call(specs).trace(shapes, inputs, each, each, _struct(mesh, (), np.int32))]
    shapes, specs = state_shapes(program)
    rollout, discounted = _rollout_shapes(program)
    learn: Any = compile_learn(program, specs)
    return [learn.trace(shapes, rollout, discounted, _inputs(program), each, each), _traced_policy(program)]


def _rollout_shapes(program: Program) -> tuple[Rollout, jax.ShapeDtypeStruct]:
    """Returns the shapes of a rollout that was collected on the host, and of the discounted returns before it."""
    config, net, layout = program.config, program.net, program.net.observation
    rows, shards = config.envs // config.shards, program.rows.count

    def of(dtype: Any, *shape: int) -> Any:
        return _struct(program.mesh, (shards, *shape), dtype, SHARDED)

    def steps(dtype: Any, *more: int, extra: int = 0) -> Any:
        return of(dtype, config.num_steps + extra, rows, *more)

    width, dtype = layout.width, layout.dtype
    action, kind = _action_of(net)
    rollout = Rollout(
        observations=steps(dtype, width, extra=1),
        raw=steps(dtype, width) if config.normalize.observations else None,
        actions=steps(kind, *action),
        outputs=None,
        rewards=steps(np.float32),
        terminated=steps(np.bool_),
        truncated=steps(np.bool_),
        final=steps(dtype, width),
        recurrent_state=of(np.float32, rows, net.state_size),
        over=steps(np.bool_),
        returns=steps(np.float32),
        lengths=steps(np.int32),
        successes=steps(np.int8),
        terms={},
    )
    return rollout, of(np.float32, rows)


def _action_of(net: Any) -> tuple[tuple[int, ...], Any]:
    """Returns shape and dtype of an action as the policy takes it."""
    named = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in net.shapes().items()}
    outputs = jax.ShapeDtypeStruct((1, net.outputs), np.float32)
    noise = jax.ShapeDtypeStruct((1, net.action.outputs), np.float32)
    action = jax.eval_shape(lambda n, x, y: distributions.sample(net, n, x, y), named, outputs, noise)
    return action.shape[1:], action.dtype


def _traced_policy(program: Program) -> Any:
    """Traces the policy as the host calls it at each step, for the shards of one device."""
    config, net, shards = program.config, program.net, program.blocks.shards
    rows = config.envs // config.shards
    one = mesh_of([program.mesh.devices.flat[0]])

    def of(shape: tuple[int, ...], dtype: Any = np.float32) -> jax.ShapeDtypeStruct:
        return _struct(one, shape, dtype)

    named = {name: of(shape) for name, shape in program.layout.shapes.items()}
    size = net.observation.vector_size
    scale: Any = None
    if config.normalize.observations:
        scale = jax.tree.map(lambda x: of(x.shape, x.dtype), jax.eval_shape(scale_of, empty_moments(size)))
    noise = of((shards, config.num_steps, rows, net.action.outputs))
    seen = of((shards, rows, net.observation.width), net.observation.dtype)
    carried, ended = of((shards, rows, net.state_size)), of((shards, rows), np.bool_)
    act: Any = Inference(program).act
    return act.trace(named, scale, seen, carried, ended, noise, of((), np.int32), of((), np.int32))


# --- what a device holds -------------------------------------------------------------------------------------------


def _memory(program: Program, analyses: list[Any]) -> dict[str, float]:
    """Returns the bytes that a device holds, by kind.

    Memory that the compiled programs need beside the state is divided by shapes: first the rollout, then what the loss
    of a minibatch keeps until its gradient is taken. The rest is the shards' gradients and whatever else is as large as
    the parameters.
    """
    held = FLOAT * program.layout.size / (program.mesh.size if program.config.fsdp else 1)
    given = max(x.argument_size_in_bytes for x in analyses)
    output = max(x.output_size_in_bytes - x.alias_size_in_bytes for x in analyses)
    beside = float(analyses[0].temp_size_in_bytes + max(0, output))
    config, layout = program.config, program.net.observation
    row = 2 * layout.width * np.dtype(layout.dtype).itemsize + 10 * FLOAT
    samples = program.blocks.shards * program.blocks.rows * config.num_steps
    rollout = 0.0 if program.env is None else min(beside, float(samples * row))
    activations = min(beside - rollout, _activation_bytes(program))
    return {
        "parameters": held,
        "moments": 2 * held,
        "gradients": beside - rollout - activations,
        "rollout": max(0.0, given - 3 * held) + rollout,
        "activations": activations,
    }


def _activation_bytes(program: Program) -> float:
    """Returns the bytes of all results of one pass over a part of a minibatch, as far as they grow with its rows."""
    config, blocks = program.config, program.blocks
    samples = blocks.size * config.num_steps // config.ppo.num_minibatches
    rows = samples // gradient_parts(program.net, config, samples, program.platform)
    few, many = (_pass_bytes(program, count) for count in (1, 2))
    return (many - few) * float(rows)


def _pass_bytes(program: Program, rows: int) -> int:
    net, layout = program.net, program.net.observation
    named = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in program.layout.shapes.items()}
    seen = jax.ShapeDtypeStruct((rows, layout.width), layout.dtype)
    if net.core is None:
        traced = jax.make_jaxpr(lambda named, seen: nets.actor_critic(net, named, seen))(named, seen)
    else:
        carried = jax.ShapeDtypeStruct((rows, net.state_size), np.float32)
        resets = jax.ShapeDtypeStruct((1, rows), np.bool_)
        seen = jax.ShapeDtypeStruct((1, rows, layout.width), layout.dtype)
        traced = jax.make_jaxpr(lambda *given: nets.unroll(net, *given))(named, seen, carried, resets)
    return _result_bytes(traced.jaxpr)


def _result_bytes(jaxpr: Any) -> int:
    """Sums the bytes of all results in a program, including the programs inside it."""
    total = 0
    for equation in jaxpr.eqns:
        inner = [getattr(x, "jaxpr", x) for x in equation.params.values() if hasattr(getattr(x, "jaxpr", x), "eqns")]
        total += sum(map(_result_bytes, inner))
        if not inner:
            total += sum(int(np.prod(x.aval.shape)) * x.aval.dtype.itemsize for x in equation.outvars)
    return total
