"""Fingerprints of every device's own copy of the training state: replicated arrays are believed of nobody."""

from __future__ import annotations

from typing import Any

import numpy as np

from lockstep.jax_engine.parameters import ParameterLayout
from lockstep.jax_engine.processes import gather_json
from lockstep.jax_engine.reductions import FSDP_AXIS
from lockstep.jax_engine.state import MOMENTS, NORMALIZERS, OPTIMIZER, POLICY, TrainState
from lockstep.proof.fingerprint import compare_ranks, fingerprints

HELD: dict[str, str | None] = {POLICY: None} | {f"{OPTIMIZER}{name}/": moment for name, moment in MOMENTS.items()}
"""What is held as parameters are, by prefix: parameters, and the optimiser's attributes."""


def fingerprint_rows(state: TrainState, layout: ParameterLayout) -> tuple[list[str], np.ndarray]:
    """Names of arrays, and each local device's fingerprints of what it holds, int64 ``[local devices, arrays]``.

    With FSDP and a batch axis of one device, what is cut has no second copy to compare with, and is left out.
    """
    copies = _copies(state, layout)
    rows = [fingerprints({name: arrays[device] for name, arrays in copies.items()}) for device in _devices(copies)]
    return list(copies), np.stack(rows)


def every_fingerprint(state: TrainState, layout: ParameterLayout) -> tuple[list[str], np.ndarray]:
    """Names of arrays, and the fingerprints of all processes' devices, int64 ``[devices, arrays]``; a collective.

    With FSDP, in the place of a cut array's fingerprint stands what it differs by from that of the first device with
    the same slice: equal copies are equal rows there too.
    """
    names, rows = fingerprint_rows(state, layout)
    gathered = [row for rows in gather_json(rows.tolist()) for row in rows]
    everyone = np.array(gathered, np.int64).reshape(-1, len(names))
    slices = fsdp_length(state, layout)
    cut = [n for n, name in enumerate(names) if _cut(name, layout)]
    everyone[:, cut] ^= everyone[np.arange(len(everyone)) % slices][:, cut]
    return names, everyone


def fsdp_length(state: TrainState, layout: ParameterLayout) -> int:
    """Devices that a cut array is cut over; 1 without FSDP."""
    if not layout.axes:
        return 1
    return next(iter(state.parameters.values())).sharding.mesh.shape[FSDP_AXIS]


def _cut(name: str, layout: ParameterLayout) -> bool:
    """Whether an array of the state is one that FSDP cuts, by its name in a checkpoint."""
    return any(layout.axes.get(name[len(prefix) :]) is not None for prefix in HELD if name.startswith(prefix))


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
    for prefix, attribute in HELD.items():
        tree = state.parameters if attribute is None else getattr(state.optimizer, attribute)
        if layout.axes:
            copied = next(iter(tree.values())).sharding.mesh.size > fsdp_length(state, layout)
            out |= {prefix + name: _of(x) for name, x in tree.items() if copied or layout.axes[name] is None}
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
