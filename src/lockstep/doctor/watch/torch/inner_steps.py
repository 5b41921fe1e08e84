"""Tells steps of the script's optimisers from steps that these consist of."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from lockstep.doctor.watch.torch.flat_parts import tensors_of


def is_inner_step(optimizer: Optimizer, frame: types.FrameType) -> bool:
    """Returns whether an optimiser's step is part of another step, or of its own override; ``frame`` calls the hook.

    ZeRO's step consists of such inner steps, which differ between ranks.
    """
    step, outer = frame.f_code, frame.f_back
    while outer is not None:
        if outer.f_code is step and _consists_of(outer.f_locals, optimizer):
            return True
        outer = outer.f_back
    return False


def _consists_of(call: Mapping[str, Any], inner: Optimizer) -> bool:
    """Returns whether a call of PyTorch's wrapper of ``step`` makes an inner step itself.

    It doesn't if its closure makes the step, of other parameters: then another model is trained there.
    """
    outer, args, kwargs = call.get("self"), call.get("args", ()), call.get("kwargs", {})
    if outer is None or outer is inner or (len(args) < 2 and kwargs.get("closure") is None):
        return True
    try:
        return not {id(tensor) for tensor in tensors_of(outer)}.isdisjoint(map(id, tensors_of(inner)))
    except Exception:  # it isn't PyTorch's optimiser, and the script must go on
        return True
