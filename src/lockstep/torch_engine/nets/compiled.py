"""Compiles the loss of one shard with ``torch.compile``: one kernel for what autograd does operation by operation.

Only the loss of one shard is compiled, at the one shape that a run has, because over several shards at once a shard's
bits would depend on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lockstep.config.run import Config
from lockstep.training.losses import LossSettings

LossFunction = Callable[..., tuple[Tensor, Tensor]]
"""Computes the loss ``[k]`` and its terms ``[k, T]`` from networks, expanded parameters, a minibatch and settings."""


def compiled(loss: LossFunction, config: Config) -> LossFunction:
    """Returns the loss, compiled if the config says so; the compiled one takes one shard at a time.

    It divides by the global count outside, because the count would be compiled in, and with GRPO it changes from
    minibatch to minibatch.
    """
    if not config.compile:
        return loss
    import torch._inductor.config as inductor  # slow, and only needed here

    # kernels are never chosen by timing, which could choose others on other ranks
    inductor.deterministic = True
    functions: dict[LossSettings, Callable[..., tuple[Tensor, Tensor]]] = {}

    def run(
        net: Any, weights: Mapping[str, Tensor], columns: Mapping[str, Tensor], settings: LossSettings
    ) -> tuple[Tensor, Tensor]:
        assert len(columns["actions"]) == 1, "one shard at a time"
        whole = replace(settings, count=1)
        if whole not in functions:

            def of_tensors(weights: Mapping[str, Tensor], columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
                return loss(net, weights, columns, whole)

            functions[whole] = torch.compile(of_tensors, dynamic=False, fullgraph=True)
        total, terms = functions[whole](dict(weights), dict(columns))
        return total / settings.count, terms / settings.count

    return run
