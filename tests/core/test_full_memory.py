"""Errors by which memory is full are told in a line, with what takes less, and so are a device's own; others aren't."""

import numpy as np
import pytest
import torch
from jax.errors import JaxRuntimeError

from lockstep.core.errors import device_failed, memory_full

TORCH = (
    "CUDA out of memory. Tried to allocate 18.00 GiB. GPU 0 has a total capacity of 15.77 GiB of which 7.62 GiB is "
    "free. Of the allocated memory 7.25 GiB is allocated by PyTorch, and 31.44 MiB is reserved but unallocated."
)
JAX = "RESOURCE_EXHAUSTED: : CUDA_ERROR_OUT_OF_MEMORY: out of memory [executable_name='jit_part']"
CUDA = "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation' in https://docs.nvidia.com"


def numpys():
    """NumPy's error."""
    with pytest.raises(MemoryError) as caught:
        np.empty((1 << 50, 1 << 8))
    return caught.value


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError(TORCH), "which 7.62 GiB is free; "),
        (RuntimeError(CUDA), "too little memory: CUDA error: out of memory; "),
        (JaxRuntimeError(JAX), "[executable_name='jit_part']; "),
        (numpys(), "too little memory: Unable to allocate "),
        (MemoryError(), "too little memory: MemoryError; "),
    ],
    ids=["torch", "cuda", "jax", "numpy", "python"],
)
def test_full_memory_is_told_in_a_line_with_what_takes_less(error, said):
    line = memory_full(error, "cuda")
    assert line is not None
    assert line.startswith("device cuda: too little memory: ")
    assert said in line
    assert "\n" not in line
    assert "more ranks" in line
    assert "num_envs" in line


def test_other_programs_are_named_where_they_can_hold_the_memory():
    error = RuntimeError(CUDA)
    assert "another program" in (memory_full(error, "cuda") or "")
    assert "another program" not in (memory_full(error, "cpu") or "another program")


@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), RuntimeError(), JaxRuntimeError("INTERNAL: x")]
)
def test_other_errors_are_not_taken_for_it(error):
    assert memory_full(error, "cuda") is None


def test_what_a_device_reports_is_one_line():
    error = torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be …")
    line = "the device reported an error, its own or of a kernel that ran there: CUDA error: uncorrectable ECC error "
    assert device_failed(error) == f"{line}encountered"
    assert memory_full(error, "cuda") is None
    assert device_failed(RuntimeError("CUDA error: of nobody knows whom")) is None
    assert memory_full(torch.AcceleratorError(CUDA), "cuda") is not None
