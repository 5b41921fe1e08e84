"""Initial parameters, drawn on the host from keyed generators: the same bytes for both engines and every rank."""

from __future__ import annotations

import itertools

import numpy as np
from threadpoolctl import threadpool_limits

from lockstep.shards import keyed_generator


def orthogonal(generator: np.random.Generator, shape: tuple[int, int], gain: float) -> np.ndarray:
    """A (semi-)orthogonal matrix times ``gain`` (Saxe et al. 2014), float32 ``[out, in]``.

    One BLAS thread: the last bits of a factorisation depend on their number.
    """
    rows, cols = shape
    normal = generator.standard_normal((max(rows, cols), min(rows, cols)))
    with threadpool_limits(1):
        q, r = np.linalg.qr(normal)
    q *= np.where(np.diag(r) < 0, -1.0, 1.0)
    return np.ascontiguousarray(gain * (q if rows >= cols else q.T), np.float32)


def mlp_parameters(seed: int, name: str, sizes: tuple[int, ...], output_gain: float) -> dict[str, np.ndarray]:
    """Weights ``{name}.{layer}.weight`` ``[out, in]`` and zero biases ``{name}.{layer}.bias`` ``[out]``.

    Hidden layers have gain sqrt(2), the last one ``output_gain``, as PPO implementations do (Huang et al. 2022,
    "The 37 implementation details", detail 2).
    """
    generator = keyed_generator(seed, f"init/{name}")
    parameters: dict[str, np.ndarray] = {}
    last = len(sizes) - 2
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(sizes)):
        gain = output_gain if layer == last else float(np.sqrt(2.0))
        parameters[f"{name}.{layer}.weight"] = orthogonal(generator, (outputs, inputs), gain)
        parameters[f"{name}.{layer}.bias"] = np.zeros(outputs, np.float32)
    return parameters
