"""Writes a policy as a program of ``torch.export``, which PyTorch loads and runs by itself."""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram, export

from lockstep.core.spaces import nested
from lockstep.policies.exported import Runner, inputs_of
from lockstep.torch_engine.export.module import PolicyModule
from lockstep.torch_engine.export.rounded import RoundedModule

METADATA = "metadata.json"
"""Name of the file in a program's archive that describes it."""


class Positional(nn.Module):
    """Takes a policy's inputs one after the other, as :func:`inputs_of` lists them; in dicts the order would matter."""

    def __init__(self, policy: PolicyModule) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """See :meth:`PolicyModule.forward`."""
        names = [each.name for each in inputs_of(self.policy.observation, self.policy.state_size)]
        given = dict(zip(names, tensors, strict=True))
        mask, state = given.pop("action_mask", None), given.pop("state", None)
        observation = nested({name.partition("/")[2]: tensor for name, tensor in given.items()})
        return self.policy(observation, mask, state)


def example(policy: PolicyModule, count: int) -> tuple[Tensor, ...]:
    """Makes inputs for a batch of ``count``: first values for indices, because others needn't be valid, else ones."""
    inputs = inputs_of(policy.observation, policy.state_size)
    made = [torch.ones((count, *x.shape), dtype=getattr(torch, x.dtype)) for x in inputs]
    for n, leaf in enumerate(policy.observation.leaves):
        if leaf.kind == "one_hot":
            first = torch.tensor(leaf.first or (0,) * leaf.size).reshape(leaf.shape)
            made[n] = first.expand_as(made[n]).clone()
    return tuple(made)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what PyTorch's exporters warn, log and print about their own insides."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def program_of(policy: PolicyModule, in_float32: bool = False) -> ExportedProgram:
    """Traces a policy for batches of any size; ``in_float32``: computes bfloat16 as :class:`RoundedModule` does."""
    program = _traced(Positional(policy), policy)
    if not (in_float32 and policy.bf16):
        return program
    with quiet():
        rounded = RoundedModule(program)
    return _traced(rounded, policy)


def _traced(module: nn.Module, policy: PolicyModule) -> ExportedProgram:
    """Traces a module that takes a policy's inputs."""
    inputs = inputs_of(policy.observation, policy.state_size)
    batch = {0: Dim("batch")}
    with quiet(), torch.enable_grad():  # the file is the same whatever the caller's mode is
        return export(module, example(policy, 3), dynamic_shapes=(tuple(batch for _ in inputs),))


def write_program(policy: PolicyModule, path: Path, metadata: Mapping[str, Any]) -> Runner:
    """Writes a policy's program, with ``metadata`` as ``metadata.json`` in it; returns a function that runs it."""
    program, content = program_of(policy), io.BytesIO()
    with quiet():
        torch.export.save(program, content, extra_files={METADATA: json.dumps(dict(metadata))})
    path.write_bytes(content.getbuffer())  # PyTorch's own writer ends the process if the disk is full
    with quiet():
        loaded = torch.export.load(str(path)).module()

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        names = [each.name for each in inputs_of(policy.observation, policy.state_size)]
        with torch.no_grad():
            found = loaded(*(torch.from_numpy(inputs[name]) for name in names))
        return {name: x.numpy() for name, x in found.items()}

    return run
