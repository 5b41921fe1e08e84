"""Fingerprints of every device's own copy of the training state: replicated arrays are believed of nobody."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.jax_engine.parameters import ParameterLayout
from lockstep.jax_engine.processes import gather_json
from lockstep.jax_engine.state import MOMENTS, NORMALIZERS, OPTIMIZER, POLICY, TrainState
from lockstep.proof.fingerprint import compare_ranks, fingerprints


def fingerprint_rows(state: TrainState, layout: ParameterLayout) -> tuple[list[str], np.ndarray]:
    """Names of arrays, and each local device's fingerprints of them, int64 ``[local devices, arrays]``.

    With FSDP arrays that are cut over devices have no second copy to compare with, and are left out.
    """
    copies = _copies(state, layout)
    rows = [fingerprints({name: arrays[device] for name, arrays in copies.items()}) for device in _devices(copies)]
    return list(copies), np.stack(rows)


def every_fingerprint(state: TrainState, layout: ParameterLayout) -> tuple[list[str], np.ndarray]:
    """Names of arrays, and the fingerprints of all processes' devices, int64 ``[devices, arrays]``; a collective."""
    names, rows = fingerprint_rows(state, layout)
    everyone = [row for rows in gather_json(rows.tolist()) for row in rows]
    return names, np.array(everyone, np.int64).reshape(-1, len(names))


def check_copies(state: TrainState, layout: ParameterLayout, when: str) -> None:
    """Compare every array of the training state over all devices; a collective.

    Raises:
        DesyncError: in every process, naming the tensor, the devices and ``when``.
    """
    names, rows = every_fingerprint(state, layout)
    compare_ranks(names, rows, when)


def _devices(copies: dict[str, dict[int, np.ndarray]]) -> list[int]:
    return sorted(next(iter(copies.values())))


def _copies(state: TrainState, layout: ParameterLayout) -> dict[str, dict[int, np.ndarray]]:
    out: dict[str, dict[int, np.ndarray]] = {}
    held = {POLICY: state.parameters}
    held |= {f"{OPTIMIZER}{name}/": getattr(state.optimizer, attribute) for name, attribute in MOMENTS.items()}
    for prefix, tree in held.items():
        if layout.axes:
            out |= {prefix + name: _of(x) for name, x in tree.items() if layout.axes[name] is None}
            continue
        by_device = {device: layout.split(vector) for device, vector in _of(tree).items()}
        for name in layout.shapes:
            out[prefix + name] = {device: arrays[name] for device, arrays in by_device.items()}
    out[OPTIMIZER + "step"] = _of(state.optimizer.count)
    out["learning_rate"] = _of(state.learning_rate)
    for name, moments in (("observations", state.observations), ("returns", state.returns)):
        if moments is not None:
            out |= {f"{NORMALIZERS}{name}.{k}": _of(x) for k, x in moments._asdict().items()}
    return out


def _of(array: Any) -> dict[int, np.ndarray]:
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}
