"""Convolutions of engine jax on this CPU: do their bits depend on XLA's pool, and how many images pay at a time?

``python -m benchmarks.convolutions bits`` writes ``benchmarks/results/convolution-bits.md``, and ``times`` writes
``benchmarks/results/convolution-times.md``, each in some five minutes. Each pool has a process of its own, for its size
is settled when JAX starts.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from benchmarks.commit import commit_of
from lockstep.config.checks import resolve
from lockstep.config.run import Config
from lockstep.core.machine import instruction_set, processor
from lockstep.core.spaces import action_layout, observation_layout
from lockstep.jax_engine.gradients import part_gradient
from lockstep.jax_engine.nets import nets
from lockstep.jax_engine.nets.convolution import convolve
from lockstep.jax_engine.setup.set_up import configure
from lockstep.jax_engine.state import make_net
from lockstep.training.losses import loss_settings

ROOT = Path(__file__).parents[1]
DECISION = "077-images-in-chunks.md"
ALL_EIGENS = "--xla_cpu_experimental_ynn_fusion_type="
POOLS = (2, 3, 16, 64)
LAYERS = (
    *((84, 4, 32, 8, 4, 0), (20, 32, 64, 4, 2, 0), (9, 64, 64, 3, 1, 0)),  # Nature
    *((64, 3, 16, 3, 1, 1), (32, 16, 16, 3, 1, 1), (32, 16, 32, 3, 1, 1), (16, 32, 32, 3, 1, 1)),  # IMPALA
    *((7, 3, 16, 2, 1, 0), (6, 16, 32, 2, 1, 0), (5, 32, 64, 2, 1, 0), (8, 3, 16, 3, 1, 1), (8, 16, 16, 3, 1, 1)),
    *((2, 16, 16, 3, 1, 1), (5, 256, 256, 3, 1, 1), (10, 3, 16, 3, 1, 0), (23, 5, 7, 5, 3, 2), (20, 4, 8, 4, 2, 0)),
)
"""Height and width, channels in and out, size of the window, stride, padding."""

IMAGES = (1, 2, 5, 7, 8, 16, 27, 32)
NETWORKS = (("nature", 84, 4), ("impala", 64, 3), ("residual", 10, 3), ("simple", 7, 3))
TOGETHER = (1, 8, 16, 32, 64, 128, 256)
FEW_CHANNELS = 4
"""With fewer a layer is a network's first, and nobody asks for the gradient by its images."""


def in_a_loop(function: Callable[..., Any], *stacked: Any) -> Any:
    """Results of a function of each row of the arguments, in a loop as the engine's whose length isn't known."""

    def run(count: Any, *stacked: Any) -> Any:
        shape = jax.eval_shape(function, *(x[0] for x in stacked))
        out = jnp.zeros((len(stacked[0]), *shape.shape), shape.dtype)
        return lax.fori_loop(0, count, lambda i, out: out.at[i].set(function(*(x[i] for x in stacked))), out)

    return jax.jit(run)(len(stacked[0]), *stacked)


def hashes() -> Iterator[tuple[str, str]]:
    """Names of operations and hashes of their results: values, and gradients by images and weights."""
    for size, seen, out, window, stride, padding in LAYERS:
        run = partial(convolve, stride=stride, padding=padding)
        for images in IMAGES:
            rng = np.random.default_rng(0)
            x = rng.standard_normal((2, images, size, size, seen), np.float32)
            weight = rng.standard_normal((2, out, seen, window, window), np.float32)
            after = (size + 2 * padding - window) // stride + 1
            gradient = rng.standard_normal((2, images, after, after, out), np.float32)
            by = partial(_gradient, run)
            results = {"value": in_a_loop(run, x, weight), "by weight": in_a_loop(partial(by, 1), x, weight, gradient)}
            if seen >= FEW_CHANNELS:
                results["by image"] = in_a_loop(partial(by, 0), x, weight, gradient)
            for name, result in results.items():
                digest = hashlib.sha256(np.asarray(result).tobytes()).hexdigest()
                yield f"{images} x {size} x {size} x {seen} to {out}, {window}/{stride}/{padding}, {name}", digest


def _gradient(run: Callable[..., Any], which: int, x: Any, weight: Any, gradient: Any) -> Any:
    return jax.vjp(run, x, weight)[1](gradient)[which]


def milliseconds(kind: str, size: int, channels: int, images: int) -> tuple[float, float]:
    """Time an image, forward and with a gradient, of so many at a time."""
    config = resolve(
        Config.model_validate(
            {
                "engine": "jax",
                "env": {"id": "lockstep/GridWorldPixels-v0"},
                "network": {"shared": True, "image": {"kind": kind}},
            }
        ),
        1,
    )
    observation = observation_layout(gymnasium.spaces.Box(0, 255, (size, size, channels), np.uint8))
    net = make_net(config, observation, action_layout(gymnasium.spaces.Discrete(4)))
    rng, rows = np.random.default_rng(0), max(2, min(8, 512 // images))
    weights = {name: 0.03 * rng.standard_normal(shape, np.float32) for name, shape in net.shapes().items()}
    shape, settings = (rows, images), loss_settings(config, jnp.float32(images))
    columns = {
        "observations": rng.integers(0, 255, (*shape, observation.width), np.uint8),
        "actions": rng.integers(0, 4, shape, np.int32),
        "log_probs": np.full(shape, -1.4, np.float32),
        "values": np.zeros(shape, np.float32),
        "advantages": rng.standard_normal(shape, np.float32),
        "returns": np.zeros(shape, np.float32),
    }

    def forward(i: Any, weights: Any, columns: Any) -> Any:
        return nets.actor_critic(net, weights, columns["observations"][i])

    def gradient(i: Any, weights: Any, columns: Any) -> Any:
        part = {name: x[i] for name, x in columns.items()}
        return part_gradient(net, weights, part, settings, None, "cpu")

    return _timed(forward, weights, columns) / images, _timed(gradient, weights, columns) / images


def _timed(function: Callable[..., Any], weights: Any, columns: Any) -> float:
    """Milliseconds of a call of a function, in a loop over rows; the least of five."""
    rows = len(columns["actions"])

    def run(count: Any, weights: Any, columns: Any) -> Any:
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(function, 0, weights, columns))
        return lax.fori_loop(
            0, count, lambda i, sums: jax.tree.map(jnp.add, sums, function(i, weights, columns)), zeros
        )

    compiled, best = jax.jit(run), float("inf")
    jax.block_until_ready(compiled(rows, weights, columns))
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(compiled(rows, weights, columns))
        best = min(best, 1e3 * (time.perf_counter() - started) / rows)
    return best


def child(*arguments: object, flags: str = "") -> Any:
    """What this module prints as a process of its own, with flags of XLA's."""
    command = [sys.executable, "-m", "benchmarks.convolutions", *map(str, arguments)]
    environment = os.environ | {"XLA_FLAGS": flags}
    done = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def facts() -> Iterator[str]:
    """What a reader has to know to judge the figures."""
    cores = len(os.sched_getaffinity(0))
    yield f"- date: {datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC"
    yield f"- commit: {commit_of(ROOT) or 'unknown'}"
    yield f"- machine: {processor()}, {instruction_set()}, {cores} cores, {platform.system()} {platform.machine()}"
    yield f"- Python {platform.python_version()}, jax {jax.__version__}, numpy {np.__version__}\n"


def bits() -> Iterator[str]:
    """The report of bits."""
    yield "# Convolutions of engine jax, and the size of the pool\n"
    yield "By `python -m benchmarks.convolutions bits`: values and gradients by weights and images, of"
    yield f"{len(LAYERS)} layers and {len(IMAGES)} numbers of images from 1 to {max(IMAGES)}, in a loop, with pools of"
    yield f"{', '.join(map(str, POOLS))} threads. What is made of it is in [077](../../docs/decisions/{DECISION}).\n"
    yield from facts()
    yield "| whose they are | operations | whose bits depend on the pool |\n| --- | --- | --- |"
    for name, flags in (("as XLA decides", ""), (f"all Eigen's, by `{ALL_EIGENS}`", ALL_EIGENS)):
        found = [dict(child("bits", pool, flags=flags)) for pool in POOLS]
        differing = sum(len({each[operation] for each in found}) > 1 for operation in found[0])
        yield f"| {name} | {len(found[0])} | {differing} |"


def times() -> Iterator[str]:
    """The report of times."""
    yield "# Images at a time in engine jax\n"
    yield "By `python -m benchmarks.convolutions times`: ms an image, forward / gradient, of so many at a time, on"
    yield "one thread, in a loop as the engine has it; the least of five loops.\n"
    yield from facts()
    yield f"| network | {' | '.join(map(str, TOGETHER))} |\n| --- |{' --- |' * len(TOGETHER)}"
    for kind, size, channels in NETWORKS:
        found = child("times", kind, size, channels)
        yield f"| {kind}, {size} × {size} × {channels} | " + " | ".join(f"{a:.3f} / {b:.3f}" for a, b in found) + " |"


def main() -> None:
    """Write a report; with more arguments be one of its processes."""
    match sys.argv[1:]:
        case ["bits" | "times" as what]:
            text = "\n".join(bits() if what == "bits" else times()) + "\n"
            (ROOT / f"benchmarks/results/convolution-{what}.md").write_text(text)
        case ["bits", pool]:
            configure(1, "cpu", 1, int(pool))
            print(json.dumps(list(hashes())))
        case ["times", kind, size, channels]:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
            configure(1, "cpu", 1, 2)
            print(json.dumps([milliseconds(kind, int(size), int(channels), images) for images in TOGETHER]))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
