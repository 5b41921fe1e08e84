"""What ranks of the PyTorch engine compare of themselves."""

import re
from importlib import metadata
from pathlib import Path

import pytest
import torch

from lockstep.core import machine
from lockstep.core.machine import KERNEL_VARIABLES, MACHINE_FACTS, TORCH_PACKAGES, device_facts
from lockstep.torch_engine.setup.devices import _compiler_cache, machine_facts
from lockstep.torch_engine.state import _check_compiler


def test_verifications_look_at_every_fact_that_ranks_compare():
    facts = machine_facts(torch.device("cpu")) | device_facts("cuda", "13.0", TORCH_PACKAGES)
    assert set(facts) <= set(MACHINE_FACTS)


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


def test_compiled_kernels_are_kept_apart_by_processor_and_by_the_width_of_vectors(monkeypatch, tmp_path):
    """PyTorch's own keys don't tell them apart, and a kernel for wider vectors leaves some of its numbers unwritten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = set()
    for features in (("avx2",), ("avx2", "avx512f")):
        for capability in ("AVX2", "AVX512"):
            monkeypatch.setattr(machine, "cpu_features", lambda features=features: features)
            monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda capability=capability: capability)
            assert _compiler_cache() == _compiler_cache()
            found.add(_compiler_cache())
    assert len(found) == 4
    assert all(Path(directory).parent == tmp_path / "lockstep" / "inductor" for directory in found)


@pytest.mark.parametrize(
    ("device", "set_to", "here", "refused"),
    [
        ("cpu", None, ("g++",), None),
        ("cpu", None, ("clang++",), "C++ compiler, and PyTorch looks for g++, which isn't here; install one, name a"),
        ("cpu", "clang++", ("clang++",), None),
        ("cpu", "ccache g++", ("g++", "ccache"), "C++ compiler, and PyTorch looks for ccache g++, which isn't here"),
        ("cuda", None, ("clang",), None),
        ("cuda", None, ("g++",), "C compiler, and PyTorch looks for gcc or clang, which isn't here"),
    ],
)
def test_compile_needs_the_compiler_that_pytorch_calls(device, set_to, here, refused, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr("shutil.which", lambda name: name if name in here else None)
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    if set_to is not None:
        monkeypatch.setenv("CXX", set_to)
    if refused is None:
        _check_compiler(device)
        return
    with pytest.raises(ValueError, match="^" + re.escape(f"compile: needs a {refused}")):
        _check_compiler(device)


def test_installed_packages_of_environments_are_a_fact():
    pytest.importorskip("scipy")
    assert f"scipy {metadata.version('scipy')}" in machine_facts(torch.device("cpu"))["packages of environments"]
