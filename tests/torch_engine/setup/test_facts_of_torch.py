"""What ranks of the PyTorch engine compare of themselves."""

from importlib import metadata

import pytest
import torch

from lockstep.core.machine import KERNEL_VARIABLES
from lockstep.torch_engine.setup.devices import machine_facts


@pytest.mark.parametrize("name", KERNEL_VARIABLES)
def test_a_variable_that_chooses_kernels_is_the_only_fact_that_differs(name, monkeypatch):
    monkeypatch.delenv(name, raising=False)
    before = machine_facts(torch.device("cpu"))
    monkeypatch.setenv(name, "other")
    after = machine_facts(torch.device("cpu"))
    assert f"{name}=other" in after["kernel variables"].split()
    assert {key for key in before if before[key] != after[key]} == {"kernel variables"}


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "PYTORCH_TUNABLEOP_ENABLED", "TORCHINDUCTOR_MAX_AUTOTUNE"),
        *("TORCH_BLAS_PREFER_CUBLASLT", "LIBTPU_INIT_ARGS", "NCCL_ALGO", "NCCL_NVLS_ENABLE"),
    ],
)
def test_what_chooses_kernels_on_accelerators_is_among_them(name):
    assert name in KERNEL_VARIABLES


def test_installed_packages_of_environments_are_a_fact():
    pytest.importorskip("scipy")
    assert f"scipy {metadata.version('scipy')}" in machine_facts(torch.device("cpu"))["packages of environments"]
