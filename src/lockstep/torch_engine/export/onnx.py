"""Writes a policy as an ONNX model, and runs it in ONNX Runtime."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lockstep.policies.exported import Runner, inputs_of
from lockstep.torch_engine.export.module import PolicyModule
from lockstep.torch_engine.export.program import Positional, example, program_of, quiet

PACKAGES = ("onnx", "onnxscript", "onnxruntime")


def write_onnx(policy: PolicyModule, path: Path, metadata: Mapping[str, Any]) -> Runner:
    """Writes a policy's model; ``metadata`` are its ``metadata_props``, as JSON unless they are text.

    Returns:
        A function that runs the file.

    Raises:
        ValueError: if a package is missing; the message is one line.
    """
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--onnx needs {package}, which isn't installed: pip install 'lockstep-rl[onnx]'")
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # read on import: nothing is kept at home or sent unasked
    import onnx

    inputs = inputs_of(policy.observation, policy.state_size)
    with torch.no_grad():
        outputs = list(Positional(policy)(*example(policy, 1)))
    with quiet():
        written = torch.onnx.export(
            program_of(policy, in_float32=True),  # ONNX Runtime has no products of bfloat16 on CPUs
            dynamo=True,
            input_names=[each.name for each in inputs],
            output_names=outputs,
            verbose=False,
        )
    assert written is not None
    model = written.model_proto
    _name_batch_axis(model)
    facts = dict(metadata) | {"outputs": outputs}
    onnx.helper.set_model_props(model, {k: v if isinstance(v, str) else json.dumps(v) for k, v in facts.items()})
    onnx.save(model, str(path))
    return runner(path)


def _name_batch_axis(model: Any) -> None:
    """Renames the first axis of inputs and outputs to ``batch``; the exporter only numbers it."""
    given = model.graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param == given:
                axis.dim_param = "batch"


def runner(path: Path) -> Runner:
    """Loads a model into ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = session.run(None, dict(inputs))
        return {name: np.asarray(x) for name, x in zip(names, found, strict=True)}

    return run
