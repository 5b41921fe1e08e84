"""Compares every device's own copy of the training state, because arrays marked as replicated may still differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import numpy as np
from jax import Array

from lockstep.core.fingerprint import compare_ranks, fingerprints
from lockstep.jax_engine.distributed.processes import gather_json
from lockstep.jax_engine.distributed.reductions import FSDP_AXIS
from lockstep.jax_engine.nets.parameters import ParameterLayout
from lockstep.jax_engine.state import MOMENTS, TrainState, normalizer_moments
from lockstep.runs.checkpoint import OPTIMIZER, POLICY

HELD: dict[str, str | None] = {POLICY: None} | {f"{OPTIMIZER}{name}/": moment for name, moment in MOMENTS.items()}
"""Arrays that are held as parameters are, by prefix: None for parameters, else the optimiser's attribute."""


@dataclass(frozen=True)
class Copies:
    """Holds the copies of a training state on this process's devices, on the host.

    Attributes:
        arrays: by name, each device's copy by its id; parameters and moments as they are held.
        slices: number of devices that an array is cut over; 1 without FSDP.
    """

    layout: ParameterLayout
    arrays: dict[str, dict[int, np.ndarray]]
    slices: int

    @classmethod
    def of(cls, state: TrainState, layout: ParameterLayout, keep: bool = False) -> Copies:
        """Takes the copies of a state.

        They are valid until a program takes the state over; ``keep`` copies them, so that they stay valid. With FSDP
        and a batch axis of one device, cut arrays have no second copy to compare with, and are left out.
        """
        found: dict[str, Array] = {}
        slices = 1
        for prefix, attribute in HELD.items():
            held = state.parameters if attribute is None else getattr(state.optimizer, attribute)
            if not layout.axes:
                found[prefix] = held
                continue
            mesh = next(iter(held.values())).sharding.mesh
            slices = mesh.shape[FSDP_AXIS]
            copied = mesh.size > slices
            found |= {prefix + name: x for name, x in held.items() if copied or layout.axes[name] is None}
        found[OPTIMIZER + "step"] = cast(Array, state.optimizer.count)
        found["learning_rate"] = state.learning_rate
        found |= normalizer_moments(state)
        return cls(layout, {name: _by_device(x, keep) for name, x in found.items()}, slices)

    def alike(self) -> bool:
        """Returns whether all of this process's devices hold the same bytes; always False if arrays are cut."""
        return self.slices == 1 and all(_alike(list(copies.values())) for copies in self.arrays.values())

    def named(self) -> dict[str, dict[int, np.ndarray]]:
        """Returns the arrays by their names in a checkpoint."""
        if self.layout.axes:
            return self.arrays
        out: dict[str, dict[int, np.ndarray]] = {}
        for name, copies in self.arrays.items():
            if name not in HELD:
                out[name] = copies
                continue
            cut = {device: self.layout.on_host(vector) for device, vector in copies.items()}
            out |= {name + part: {d: arrays[part] for d, arrays in cut.items()} for part in self.layout.shapes}
        return out

    def fingerprints(self) -> tuple[list[str], np.ndarray]:
        """Gathers the arrays' names and the fingerprints on all devices, int64 ``[devices, arrays]``; a collective.

        With FSDP, a cut array's fingerprint is XORed with that of the first device that holds the same slice, so that
        equal copies give equal rows there too.
        """
        copies = self.named()
        devices = sorted(next(iter(copies.values())))
        rows = [fingerprints({name: arrays[device] for name, arrays in copies.items()}) for device in devices]
        gathered = [row for rows in gather_json(np.stack(rows).tolist()) for row in rows]
        everyone = np.array(gathered, np.int64).reshape(-1, len(copies))
        cut = [n for n, name in enumerate(copies) if _cut(name, self.layout)]
        everyone[:, cut] ^= everyone[np.arange(len(everyone)) % self.slices][:, cut]
        return list(copies), everyone


def check_copies(copies: Copies, when: str) -> None:
    """Compares every array of the training state over all devices; with several processes a collective.

    Raises:
        DesyncError: if copies differ, in every process; it names the tensor, the devices and ``when``.
    """
    if jax.process_count() > 1 or not copies.alike():
        compare_ranks(*copies.fingerprints(), when)


def _cut(name: str, layout: ParameterLayout) -> bool:
    """Returns whether FSDP cuts the array with this name in a checkpoint."""
    return any(layout.axes.get(name[len(prefix) :]) is not None for prefix in HELD if name.startswith(prefix))


def _by_device(array: Array, keep: bool) -> dict[int, np.ndarray]:
    found = {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}
    return {device: x.copy() for device, x in found.items()} if keep else found


def _alike(copies: list[np.ndarray]) -> bool:
    first, *others = (x.tobytes() for x in copies)
    return all(first == other for other in others)
