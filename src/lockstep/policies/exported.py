"""Exports a policy to a file for other programs, and checks the file against the policy before it gets its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.config.engines import engine_module
from lockstep.core.errors import RunError, one_line
from lockstep.core.files import draft_of
from lockstep.core.shards import keyed_generator
from lockstep.core.spaces import MASK, ActionLayout, ObservationLayout
from lockstep.policies.policy import Policy

OBSERVATIONS = 1000
"""Number of observations that a file is checked on."""
STEPS = 8
"""Number of steps into which they are divided for a recurrent policy."""
RELATIVE, ABSOLUTE = 1e-4, 1e-5
"""Tolerances between a file's numbers and the policy's."""
CLEAR = 1e-4
"""Lead of the most likely action from which on the file must choose the same one."""
BF16 = {"torch": 0.01, "jax": 0.05}
"""Tolerance for a policy in bfloat16 and its ``CLEAR``, relative to an output's largest number; by engine.

A sum in another order may round to the next bfloat16 number, which shows in the output. Files round where PyTorch does;
XLA fuses operations and rounds elsewhere.
"""
FORBIDDEN = -1e7
"""Only logits of forbidden actions are below this."""
DTYPES = {"vector": "float32", "one_hot": "int64", "mask": "bool", "image": "uint8"}
"""Dtypes of a file's inputs, by kind of the observation's part."""

Runner = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""Runs a file: maps inputs to outputs, both by name."""


class ExportError(RunError):
    """A policy can't be exported, or the file gives other numbers; the message is one line."""


@dataclass(frozen=True)
class Input:
    """An input of a file: its name, dtype, and shape without the leading batch axis."""

    name: str
    dtype: str
    shape: tuple[int, ...]


def inputs_of(observation: ObservationLayout, state_size: int) -> list[Input]:
    """Returns a file's inputs, in order: ``observation``, or one per part; ``action_mask`` and ``state``, if any."""
    found = [Input(_name(leaf.name, leaf.apart), DTYPES[leaf.kind], leaf.shape) for leaf in observation.leaves]
    return found + ([Input("state", "float32", (state_size,))] if state_size else [])


def _name(leaf: str, apart: bool) -> str:
    if apart:
        return MASK
    return f"observation/{leaf}" if leaf else "observation"


def input_arrays(layout: ObservationLayout, rows: np.ndarray, state: np.ndarray) -> dict[str, np.ndarray]:
    """Splits observation rows ``[n, width]`` and a state ``[n, size]`` into a file's inputs."""
    floats, arrays = layout.floats(rows), {}
    for leaf, each in zip(layout.leaves, inputs_of(layout, 0), strict=True):
        source = rows if leaf.kind == "image" else floats
        part = source[:, leaf.start : leaf.start + leaf.size]
        if leaf.first:
            part = part.astype(np.int64) + np.asarray(leaf.first)  # float32 would round large ones
        arrays[each.name] = np.ascontiguousarray(part.reshape(len(rows), *leaf.shape)).astype(each.dtype)
    return arrays | ({"state": state} if state.shape[1] else {})


def metadata_of(policy: Policy, run: str) -> dict[str, Any]:
    """Returns the metadata of a file: environment, run, step, parameters and inputs."""
    state_size = policy.recurrent_state(1).shape[1]
    return {
        "environment": policy.environment["id"],
        "run": run,
        "step": policy.global_step,
        "params_sha256": policy.params_sha256,
        "inputs": [
            {"name": x.name, "dtype": x.dtype, "shape": ["batch", *x.shape]}
            for x in inputs_of(policy.observation, state_size)
        ],
    }


def export_policy(policy: Policy, path: Path, door: str, run: str) -> float:
    """Writes a file, runs it on random observations, and gives it its name if its numbers are the policy's.

    Args:
        policy: the policy to export.
        path: the file; its folder is made.
        door: the PyTorch engine's function that writes it: ``write_onnx`` or ``write_program``.
        run: the run's name, for the file's metadata.

    Returns:
        The largest difference between the file's numbers and the policy's.

    Raises:
        ValueError: a package is missing, or the network is a custom one of the JAX engine; one line.
        ExportError: the network can't be traced, or the file gives other numbers.
    """
    module = policy.to_torch()
    write = getattr(engine_module("torch"), door)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with draft_of(path) as draft:
            draft.touch()  # raises an OSError with a short reason, unlike PyTorch
            try:
                run_file: Runner = write(module, draft, metadata_of(policy, run))
            except (ValueError, OSError):
                raise
            except Exception as error:
                what = policy.config.network.custom or "the policy"
                line = one_line(error)[:200]
                raise ExportError(f"{path}: {what} can't be traced: {type(error).__name__}: {line}") from error
            return compare(policy, run_file)
    except ExportError as error:
        raise ExportError(str(error) if str(path) in str(error) else f"{path}: {error}; not written") from error


def compare(policy: Policy, run_file: Runner) -> float:
    """Runs a file and the policy on the same random observations; returns the largest difference of a number.

    Raises:
        ExportError: they differ by more than ``RELATIVE`` and ``ABSOLUTE``, or ``BF16``, allow, or in a clear action.
    """
    generator = keyed_generator(policy.config.seed, "export")
    steps = STEPS if policy.recurrent_state(1).shape[1] else 1
    state = policy_state = policy.recurrent_state(0)[:0]
    greatest = 0.0
    for step in range(steps):
        rows = policy.random_rows(OBSERVATIONS // steps, generator)
        if step == 0:
            state = policy_state = np.zeros((len(rows), policy.recurrent_state(1).shape[1]), np.float32)
        found = run_file(input_arrays(policy.observation, rows, state))
        wanted = policy.outputs(rows, policy_state)
        greatest = max(greatest, *(_difference(policy, name, wanted[name], found[name]) for name in wanted))
        greatest = max(greatest, _difference_of_actions(policy, rows, policy_state, wanted, found["action"]))
        state, policy_state = found.get("next_state", state), wanted.get("next_state", policy_state)
    return greatest


def _bf16_rounding(policy: Policy, name: str, wanted: np.ndarray) -> float | None:
    """Returns the tolerance for an output of a policy that computes in bfloat16; None if it computes in float32."""
    if policy.config.precision != "bf16":
        return None
    allowed = wanted[wanted > FORBIDDEN] if name == "logits" else wanted
    return BF16[policy.config.engine] * float(np.abs(allowed).max(initial=0.0))


def _unit(policy: Policy) -> np.ndarray | float:
    """Returns the unit of ``ABSOLUTE`` for actions: squashed ones, low + half · (tanh + 1), round as half the span."""
    if not policy.config.network.squash:
        return 1.0
    half = 0.5 * (np.asarray(policy.action.high) - np.asarray(policy.action.low))
    return np.maximum(half, 1.0).reshape(policy.action.shape)


def _difference(
    policy: Policy, name: str, wanted: np.ndarray, found: np.ndarray, unit: np.ndarray | float = 1.0
) -> float:
    """Returns an output's largest difference; raises if it is too large. ``ABSOLUTE`` is multiplied by ``unit``."""
    if found.shape != wanted.shape:
        raise ExportError(f"{name} is of shape {found.shape} and the policy's of {wanted.shape}")
    difference, rounding = np.abs(found.astype(np.float64) - wanted), _bf16_rounding(policy, name, wanted)
    if not (difference <= (ABSOLUTE * unit + RELATIVE * np.abs(wanted) if rounding is None else rounding)).all():
        raise ExportError(f"{name} differs from the policy's by up to {difference.max():.2g}")
    return float(difference.max())


def _difference_of_actions(
    policy: Policy, rows: np.ndarray, state: np.ndarray, wanted: Mapping[str, np.ndarray], found: np.ndarray
) -> float:
    """Returns the largest difference of continuous actions; 0 for indices, which must agree where one leads."""
    actions = policy.action.natives(policy.greedy(rows, state))
    if not policy.action.discrete:
        return _difference(policy, "action", actions, found, _unit(policy))
    if found.shape != actions.shape:
        raise ExportError(f"action is of shape {found.shape} and the policy's of {actions.shape}")
    lead = _bf16_rounding(policy, "logits", wanted["logits"]) or CLEAR
    clear = clear_choices(policy.action, wanted["logits"], lead).reshape(actions.shape)
    different = (found != actions) & clear
    if different.any():
        raise ExportError(f"{int(different.sum())} of {clear.sum()} clear actions are others than the policy's")
    return 0.0


def clear_choices(action: ActionLayout, logits: np.ndarray, lead: float = CLEAR) -> np.ndarray:
    """Says for each index whether its best choice leads the second by more than ``lead``, bool ``[n, indices]``."""
    parts = np.split(logits, np.cumsum(action.choices)[:-1], -1)
    best = [np.sort(part, -1)[:, -2:] for part in parts]
    return np.stack([two[:, -1] - two[:, 0] > lead if two.shape[1] > 1 else np.ones(len(two), bool) for two in best], 1)
