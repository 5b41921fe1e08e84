"""Compiles whole iterations for accelerators that aren't there, and says what XLA made of them.

``python -m benchmarks.compiled tpu v5e:2x4`` needs libtpu of the version that JAX asks for (``make test-all`` puts it
into ``.venv/libtpu``; name that in PYTHONPATH), and ``cuda 1x8x1`` (hosts x GPUs x 1, H100s) what ``jax[cuda12]``
installs. Both work on a machine without any accelerator: the devices are described,
nothing is run. ``--cases`` and ``--reductions`` choose, ``--out FILE`` writes the table as Markdown.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # before JAX is imported, and not where a test imports this
    os.environ |= {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import numpy as np

from benchmarks.commit import short_commit
from lockstep import __version__
from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.envs.describe import describe
from lockstep.jax_engine.distributed.mesh import REPLICATED, SHARDED, mesh_of, named_sharding
from lockstep.jax_engine.envs.environments import make_environment
from lockstep.jax_engine.planning.costs import state_shapes
from lockstep.jax_engine.planning.targets import OPTIONS, described_devices
from lockstep.jax_engine.program.calls import iterations_per_call
from lockstep.jax_engine.program.device_program import DeviceProgram
from lockstep.jax_engine.program.iterations import Inputs
from lockstep.jax_engine.program.program import Program
from lockstep.jax_engine.session import parameter_layout
from lockstep.jax_engine.state import check_networks
from lockstep.launch.request import described_run

DEVICES = {"tpu": "tpu", "cuda": "cuda"}
REDUCTIONS = ("exact", "fast")
SMALL = ("--num-steps", "16", "--ppo.num-minibatches", "2", "--total-steps", "1e6")
CASES: dict[str, tuple[str, ...]] = {
    "cartpole": ("CartPole-v1", *SMALL),
    "wide": ("CartPole-v1", *SMALL, "--network.hidden-sizes", "1024", "1024"),
    "pixels": ("lockstep/GridWorldPixels-v0", *SMALL, "--network.image.kind", "simple"),
    "lstm": ("CartPole-v1", *SMALL, "--network.recurrent", "lstm", "--network.sequence-length", "8"),
    "fsdp": ("CartPole-v1", *SMALL, "--network.hidden-sizes", "1024", "1024", "--fsdp"),
}
"""Words of ``lockstep train``; each device has one shard of two environments."""
COLLECTIVES = ("all-gather", "all-reduce", "all-to-all", "reduce-scatter", "collective-permute")
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
WIDTHS |= {"s64": 8, "u64": 8, "f64": 8}


@dataclass
class Compiled:
    """What XLA made of an iteration for one topology.

    Attributes:
        devices: of the mesh; ``parameters`` of the policy.
        collectives: by kind: how many stand in the program, and bytes that a device gets from them, each counted once.
        in_step: the same of those inside of the loop over minibatches.
        callbacks: operations that call the host, or move something to or from it within an iteration.
        doubles: operations in float64 inside of a loop over time or minibatches.
        donated: bytes of the state whose memory the results take over; ``state`` all bytes of it.
        temporaries: bytes of a device's memory beside arguments and results.
    """

    case: str
    reduction: str
    devices: int
    parameters: int
    sums: str
    seconds: float = 0.0
    collectives: dict[str, tuple[int, int]] = field(default_factory=dict)
    in_step: dict[str, tuple[int, int]] = field(default_factory=dict)
    callbacks: int = 0
    doubles: int = 0
    donated: int = 0
    state: int = 0
    temporaries: int = 0


def program_of(case: str, reduction: str, platform: str, devices: list[Any]) -> Program:
    """The engine's program of a case on a mesh of described devices, two environments each."""
    words = [*CASES[case], "--engine", "jax", "--device", DEVICES[platform], "--reduction", reduction]
    words += ["--num-envs", str(2 * len(devices)), "--num-shards", str(len(devices))]
    config: Config = resolve(described_run("verify", words[0], words[1:]), len(devices))
    mesh = mesh_of(devices, len(devices) if config.fsdp else 1)
    description = describe(config.env)
    net = check_networks(config, description)
    layout = parameter_layout(config, net, mesh)
    return Program(config, description, net, layout, mesh, make_environment(config.env), everywhere=True)


def lowered_call(program: Program) -> tuple[Any, int]:
    """A call of the program as it would be compiled, and the bytes of one device's state."""
    config, mesh, compiled = program.config, program.mesh, DeviceProgram(program)
    shapes, specs = state_shapes(program, compiled.carry_shapes())

    def array(shape: tuple[int, ...], dtype: Any, spec: Any = REPLICATED) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(mesh, spec))

    calls, devices = iterations_per_call(config), mesh.size
    inputs = Inputs(array((calls,), np.int32), array((calls,), np.float32))  # pyright: ignore[reportArgumentType]
    each = array((devices,), np.int32, SHARDED)
    size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    return compiled.compile_call(specs).trace(shapes, inputs, each, each, array((), np.int32)), size


def doubles_in_loops(jaxpr: Any, inside: bool = False) -> int:
    """Counts operations in float64 inside of scans: loops over time and over minibatches. Loops over shards are none.

    Nor are those that merge the moments of many shards, and carry nothing else.
    """
    found = 0
    for equation in jaxpr.eqns:
        kinds = {getattr(v.aval, "dtype", None) for v in equation.outvars}
        if equation.primitive.name == "scan" and kinds == {np.dtype(np.float64)}:
            continue
        if inside and any(getattr(v.aval, "dtype", None) == np.float64 for v in equation.outvars):
            found += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += doubles_in_loops(inner, inside or equation.primitive.name == "scan")
    return found


def collectives_in(text: str) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """Counts the collectives of a compiled program and their results' bytes: all, and those of an optimiser step.

    The step is the body of the loop over minibatches, by the name that the program gives its operations.
    """
    every: dict[str, tuple[int, int]] = {}
    step: dict[str, tuple[int, int]] = {}
    chains: set[str] = set()
    for line in text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(?:-start)?\(", line)
        chain = re.search(r'chain_id="(\d+)"', line)
        if match is None or (chain is not None and chain[1] in chains):  # a TPU's compiler spreads one over fusions
            continue
        chains |= {chain[1]} if chain is not None else set()
        shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
        if f"{match[2]}-start(" in line and len(shapes) > 1:  # its operands stand before its results
            shapes = shapes[len(shapes) // 2 :]
        size = sum(WIDTHS.get(kind, 4) * math.prod(map(int, filter(None, dims.split(",")))) for kind, dims in shapes)
        name = re.search(r'op_name="([^"]*)"', line)
        bodies = len(re.findall(r"closed_call", name[1])) if name else 0
        for table in (every, step) if bodies else (every,):
            count, total = table.get(match[2], (0, 0))
            table[match[2]] = count + 1, total + size
    return every, step


def compile_case(case: str, reduction: str, platform: str, devices: list[Any]) -> tuple[Compiled, str]:
    """Compiles one case; what XLA made of it, and its text."""
    program = program_of(case, reduction, platform, devices)
    found = Compiled(case, reduction, len(devices), program.layout.size, program.sums)
    traced, found.state = lowered_call(program)
    found.doubles = doubles_in_loops(traced.jaxpr.jaxpr)
    started = time.perf_counter()
    executable = traced.lower().compile(compiler_options=OPTIONS[platform])
    found.seconds = time.perf_counter() - started
    text = executable.as_text()
    found.collectives, found.in_step = collectives_in(text)
    found.callbacks = len(re.findall(r"callback|outfeed|infeed|send\(|recv\(", text))
    memory = executable.memory_analysis()
    found.donated, found.temporaries = memory.alias_size_in_bytes, memory.temp_size_in_bytes
    return found, text


def _sizes(table: dict[str, tuple[int, int]]) -> str:
    return ", ".join(f"{count} {kind} {total / 1000:,.1f}" for kind, (count, total) in table.items()) or "none"


def report(platform: str, shape: str, rows: list[Compiled], kind: str, commit: str) -> str:
    """The table as Markdown."""
    package = "libtpu" if platform == "tpu" else "jax-cuda12-plugin"
    lines = [
        f"## {rows[0].devices} × {kind} ({shape})",
        "",
        f"{datetime.date.today()}, Lockstep {__version__} ({commit}), JAX {jax.__version__}, {package} "
        f"{_version(package)}. `{_command(platform, shape, rows)}`. Bytes of collectives are of their "
        "results on a device, in kB.",
        "",
        "| case | reduction | parameters | an optimiser step's collectives (kB) | all others (kB) | "
        "calls of the host | float64 in loops | state kept in place | temporaries, MB | compiled in |",
        "|---" * 10 + "|",
    ]
    for row in rows:
        rest = Counter({k: n for k, (n, _) in row.collectives.items()})
        rest.subtract({k: n for k, (n, _) in row.in_step.items()})
        others = {k: (n, row.collectives[k][1] - row.in_step.get(k, (0, 0))[1]) for k, n in rest.items() if n}
        lines.append(
            f"| {row.case} | {row.reduction} | {row.parameters:,} ({row.sums}) | {_sizes(row.in_step)} | "
            f"{_sizes(others)} | {row.callbacks} | {row.doubles} | {row.donated / max(1, row.state):.0%} | "
            f"{row.temporaries / 1e6:.1f} | {row.seconds:.0f} s |"
        )
    return "\n".join(lines) + "\n"


def _command(platform: str, shape: str, rows: list[Compiled]) -> str:
    """The command line that compiles these rows."""
    words = f"python -m benchmarks.compiled {platform} {shape}"
    chosen = {"cases": list(dict.fromkeys(row.case for row in rows))}
    chosen["reductions"] = list(dict.fromkeys(row.reduction for row in rows))
    for name, every in (("cases", list(CASES)), ("reductions", list(REDUCTIONS))):
        words += "" if chosen[name] == every else f" --{name} {','.join(chosen[name])}"
    return words


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def main() -> None:
    """Compiles as the command line says, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("platform", choices=sorted(DEVICES))
    parser.add_argument("topology", help="v5e:2x4, v5e:16x16; 1x8x1 (hosts x GPUs x 1)")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--reductions", default=",".join(REDUCTIONS))
    parser.add_argument("--out", type=Path, help="append the table to this file")
    parser.add_argument("--json", action="store_true", help="print an object a case, and no table")
    parser.add_argument("--texts", type=Path, help="write the compiled programs into this directory")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu" if options.platform == "tpu" else "")
    devices = described_devices(options.platform, options.topology).devices
    rows = []
    for case in options.cases.split(","):
        for reduction in options.reductions.split(","):
            if case == "fsdp" and reduction == "exact":
                continue
            found, text = compile_case(case, reduction, options.platform, devices)
            rows.append(found)
            print(
                json.dumps(asdict(found)) if options.json else found,
                file=None if options.json else sys.stderr,
                flush=True,
            )
            if options.texts is not None:
                options.texts.mkdir(parents=True, exist_ok=True)
                (options.texts / f"{case}-{reduction}.txt").write_text(text)
    if options.json:
        return
    table = report(options.platform, options.topology, rows, devices[0].device_kind, short_commit())
    print(table)
    if options.out is not None:
        before = options.out.read_text() + "\n" if options.out.exists() else "# Compiled for accelerators\n\n"
        options.out.write_text(before + table)


if __name__ == "__main__":
    main()
