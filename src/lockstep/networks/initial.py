"""Initial parameters, drawn on the host from keyed generators: the same bytes for both engines and every rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from lockstep.config.run import Config
from lockstep.core.shards import keyed_generator
from lockstep.networks.spec import PolicyNet

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

DUPLICATES_VARIABLE = "KMP_DUPLICATE_LIB_OK"
"""threadpoolctl sets it when it is imported; it switches off OpenMP's check that a process has one runtime."""


@cache
def _thread_pools() -> ThreadpoolController:
    """Returns the thread pools of loaded libraries, NumPy's among them; cached, because the search is slow.

    The caller's environment variables stay as they are.
    """
    unset = DUPLICATES_VARIABLE not in os.environ
    from threadpoolctl import ThreadpoolController

    if unset:
        os.environ.pop(DUPLICATES_VARIABLE, None)
    return ThreadpoolController()


def orthogonal(generator: np.random.Generator, shape: tuple[int, int], gain: float) -> np.ndarray:
    """Returns a (semi-)orthogonal matrix times ``gain`` (Saxe et al. 2014), float32 ``[out, in]``.

    It uses one BLAS thread, because the last bits of a factorisation depend on the number of threads.
    """
    rows, cols = shape
    normal = generator.standard_normal((max(rows, cols), min(rows, cols)))
    with _thread_pools().limit(limits=1):
        q, r = np.linalg.qr(normal)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return np.ascontiguousarray(gain * (q if rows >= cols else q.T), np.float32)


def orthogonal_parameters(
    seed: int, shapes: Mapping[str, tuple[int, ...]], output_gains: Mapping[str, float]
) -> dict[str, np.ndarray]:
    """Returns orthogonal weights and zero biases, keyed by ``(seed, "init/" + first part of the name)``.

    The gain is 1 in recurrent cores, else sqrt(2), unless ``output_gains`` gives another, as in PPO implementations
    (Huang et al. 2022, "The 37 implementation details", detail 2). A convolution ``[out, in, h, w]`` is one matrix
    ``[out, in·h·w]``.
    """
    generators: dict[str, np.random.Generator] = {}
    out: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            out[name] = np.zeros(shape, np.float32)
            continue
        network = name.partition(".")[0]
        generator = generators.setdefault(network, keyed_generator(seed, f"init/{network}"))
        gain = output_gains.get(name, 1.0 if name.split(".")[1:2] == ["core"] else float(np.sqrt(2.0)))
        matrix = (shape[0], int(np.prod(shape[1:], dtype=int)))
        out[name] = orthogonal(generator, matrix, gain).reshape(shape)
    return out


def initial_parameters(config: Config, net: PolicyNet) -> dict[str, np.ndarray]:
    """Returns the initial parameters: orthogonal, with gain 0.01 for the actor's output and 1 for the critic's.

    A user's own network draws its parameters itself.
    """
    if net.custom is not None:
        arrays = dict(net.custom.initial_parameters())
    else:
        last = {name: f"{name}.{len(net.sizes(name)) - 2}.weight" for name in ("actor", "critic")}
        arrays = orthogonal_parameters(config.seed, net.shapes(), {last["actor"]: 0.01, last["critic"]: 1.0})
        if net.state_dependent_std:
            bias = last["actor"].replace("weight", "bias")
            arrays[bias][net.action.outputs :] = config.network.log_std_init
    for name, shape in net.log_std_shape.items():
        arrays[name] = np.full(shape, config.network.log_std_init, np.float32)
    return arrays
