"""Captures work that is launched again and again as a graph; warns if it can't be captured, and so must be launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.core.errors import UnavailableError
from lockstep.core.process import say
from lockstep.torch_engine.setup.accelerator import CaptureError, capture


def captured(
    device: torch.device, work: Callable[[], None], kept: Sequence[Tensor], what: str, asked: bool
) -> Callable[[], None] | None:
    """Captures what ``work()`` launches as one graph; returns a function that replays it, or None if it can't.

    ``kept`` is the memory that the work changes and others read: warm-up and capture leave no trace there. ``what``
    names the work in messages.

    Raises:
        ValueError: if it can't be captured and graphs were ``asked`` for; the message is one line.
    """
    before = [x.clone() for x in kept]
    replay, failed = None, None
    try:
        replay = capture(device, work)
    except CaptureError as error:
        failed = error
    for x, value in zip(kept, before, strict=True):
        x.copy_(value)
    if failed is not None:
        if asked:
            raise UnavailableError(
                f"cuda_graphs: true, but {what} can't be captured here ({failed}); use cuda_graphs false"
            ) from failed
        say(
            f"lockstep: warning: {what} can't be captured as a graph here, and is launched ({failed}); "
            "--no-cuda-graphs leaves this out"
        )
    return replay
