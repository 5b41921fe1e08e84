"""Policies in bfloat16 as ONNX models, which compute in float32 and round where PyTorch does."""

import json

import numpy as np
import pytest
from golden_cases import IMAGES, JAX, LSTM, SHORT
from variants import variants

from lockstep import load_policy
from lockstep.cli import main
from lockstep.core.shards import keyed_generator
from lockstep.policies.exported import ExportError, compare, input_arrays
from lockstep.torch_engine.export.onnx import write_onnx

BF16_RUN = ("--precision", "bf16")
KINDS = {
    "plain": ("lockstep/CartPole-v1", *SHORT, *BF16_RUN),
    "image": ("lockstep/GridWorldPixels-v0", *SHORT, *IMAGES, *BF16_RUN),
    "LSTM": ("lockstep/CartPole-v1", *SHORT, *LSTM, *BF16_RUN),
    "Gaussian": ("Pendulum-v1", *SHORT, "--network.activation", "gelu", "--normalize.observations", *BF16_RUN),
}
OFF = 0.05
"""Share of numbers that may be rounded to a neighbour, and then differ by more than those of float32 would."""


def off(policy, run):
    """The greatest share of an output's numbers that lie apart by more than a file of float32's may."""
    state = np.zeros((125, policy.recurrent_state(1).shape[1]), np.float32)
    generator, shares = keyed_generator(1, "test"), []
    for _ in range(4):
        rows = policy.random_rows(125, generator)
        found, wanted = run(input_arrays(policy.observation, rows, state)), policy.outputs(rows, state)
        apart = {name: np.abs(found[name] - x) > 1e-5 + 1e-4 * np.abs(x) for name, x in wanted.items()}
        shares.append(max(x.mean() for x in apart.values()))
        state = wanted.get("next_state", state)
    return max(shares)


def full(policy):
    """The same policy, as it would compute in float32."""
    policy.config = policy.config.model_copy(update={"precision": "fp32"})
    return policy.to_torch()


@pytest.mark.parametrize("kind", variants(KINDS, ["plain", "image", "LSTM"]))
def test_a_model_rounds_where_the_policy_does(trained, tmp_path, capsys, kind):
    onnxruntime = pytest.importorskip("onnxruntime")
    run, path = trained(*KINDS[kind]), tmp_path / "policy.onnx"
    assert main(["export", str(run.path), "--onnx", str(path)]) == 0
    assert "on 1,000 random observations, differs from the policy by " in capsys.readouterr().out
    session = onnxruntime.InferenceSession(str(path))
    names = [output.name for output in session.get_outputs()]
    assert {x["name"] for x in json.loads(session.get_modelmeta().custom_metadata_map["inputs"])} == {
        x.name for x in session.get_inputs()
    }

    def model(inputs):
        return dict(zip(names, session.run(None, inputs), strict=True))

    policy = load_policy(run.path)
    assert off(policy, model) < OFF
    in_float32 = write_onnx(full(load_policy(run.path)), tmp_path / "full.onnx", {})
    assert off(policy, in_float32) > 10 * OFF


def test_a_changed_weight_is_found_in_bfloat16_too(trained, tmp_path):
    pytest.importorskip("onnxruntime")
    policy = load_policy(trained(*KINDS["plain"]).path)
    module = policy.to_torch()
    assert compare(policy, write_onnx(module, tmp_path / "same.onnx", {})) < 0.01
    module.policy.get_parameter("actor.0.weight").data[0] += 1.0
    with pytest.raises(ExportError, match=r"logits differs from the policy's by up to 0\.\d+"):
        compare(policy, write_onnx(module, tmp_path / "other.onnx", {}))


@pytest.mark.long
@pytest.mark.parametrize("kind", ["plain", "image", "LSTM"])
def test_policies_of_engine_jax_are_exported_from_bfloat16(trained, tmp_path, capsys, kind):
    pytest.importorskip("onnxruntime")
    run = trained(*KINDS[kind], *JAX)
    assert main(["export", str(run.path), "--onnx", str(tmp_path / "policy.onnx")]) == 0, capsys.readouterr().err
