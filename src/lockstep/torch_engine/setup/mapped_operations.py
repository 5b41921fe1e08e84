"""Operations that a custom network may use if it is called for several shards at once: a shard keeps its bits in them.

A self-check on random data finds what depends on the size of a batch. It may miss effects on few numbers: on a CPU the
last elements of a tensor that don't fill a vector take another path, on which some functions round some numbers
differently (GELU, SiLU, ELU, sigmoid, softplus, mish, powers, sinh). So only two kinds of operations are allowed: those
whose paths round alike, which the tests measure, and those that work on rows, move numbers, or multiply matrices, for
which the self-check is enough.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOVES = """
    alias arange as_strided cat clone constant_pad_nd copy detach embedding embedding_dense_backward empty empty_like
    expand fill flip full full_like gather index index_select lift_fresh masked_fill new_empty new_full new_ones
    new_zeros ones ones_like permute repeat scalar_tensor scatter scatter_add select select_backward slice
    slice_backward split split_with_sizes squeeze stack t transpose tril triu unbind unsafe_split unsqueeze view
    zero zeros zeros_like _reshape_alias _to_copy _unsafe_view unfold
"""
PRODUCTS = "addmm baddbmm bmm mm mv dot"
ROWS = """
    all amax amin any argmax argmin cumsum linalg_vector_norm max mean min native_group_norm
    native_group_norm_backward native_layer_norm native_layer_norm_backward norm prod sort std sum topk var var_mean
    _fused_rms_norm _fused_rms_norm_backward _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data
"""
ELEMENTS = """
    abs add addcmul atan bitwise_and bitwise_not bitwise_or ceil clamp clamp_max clamp_min cos div eq equal erf exp
    expm1 floor ge gt hardsigmoid hardsigmoid_backward hardswish hardswish_backward hardtanh hardtanh_backward
    isfinite isinf isnan le leaky_relu leaky_relu_backward lerp log log1p log_sigmoid_backward log_sigmoid_forward
    logical_and logical_not logical_or lt maximum minimum mul ne neg reciprocal relu remainder round rsqrt rsub sgn
    sign sin sqrt sub tanh tanh_backward threshold threshold_backward trunc where _local_scalar_dense
    _prelu_kernel _prelu_kernel_backward
"""
KNOWN = frozenset((MOVES + PRODUCTS + ROWS + ELEMENTS).split())
"""Names of PyTorch's operations without their namespace; in-place ones (``…_``) count as the same."""
POWERS = (-2, -1, -0.5, 0.5, 1, 2, 3)
"""Exponents whose powers are computed from roots and products."""


HALVES = (torch.bfloat16, torch.float16)
"""Types that were not measured here; in them some operations round by place that don't in float32."""


def leave_out_compiler(method: Callable[..., Any]) -> None:
    """Lets a method that PyTorch excludes from compilation run without loading the compiler, unless it is loaded.

    PyTorch would load it at the first call of such a method, which takes a second.
    """
    inner, mark = getattr(method, "__wrapped__", None), "__dynamo_disable"
    if inner is None:
        return
    if "torch._dynamo" not in sys.modules:
        setattr(inner, mark, inner)
    elif getattr(inner, mark, None) is inner:
        delattr(inner, mark)


class OtherOperations(TorchDispatchMode):
    """Collects the operations that run and aren't among the known ones.

    Attributes:
        names: of those operations.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        leave_out_compiler(type(self).__torch_dispatch__)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs an operation, and adds its name unless it is known."""
        space, _, name = func._schema.name.partition("::")
        if any(isinstance(x, Tensor) and x.dtype in HALVES for x in args):
            self.names.add(f"{name} of half precision")
        power = name == "pow" and len(args) > 1 and isinstance(args[1], int | float) and args[1] in POWERS
        if space != "aten" or not (power or name.removesuffix("_") in KNOWN):
            self.names.add(name if space == "aten" else func._schema.name)
        return func(*args, **(kwargs or {}))
