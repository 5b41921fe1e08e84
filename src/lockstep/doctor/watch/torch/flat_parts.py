"""Finds models of which each rank's optimiser updates another part, laid end to end, as DeepSpeed's ZeRO does it."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor, nn
from torch.optim import Optimizer


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimiser updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def updated_by_parts(
    optimizer: Optimizer, roots: Iterable[nn.Module], owned: Container[int], optimized: Container[int], ranks: int
) -> list[Tensor]:
    """Gives the trained parameters of models of which this optimiser holds no more than one rank's part.

    Then it holds vectors alone, which are no module's, and which are together smaller than the model and, on so many
    ``ranks``, as large at least. ``owned`` are ids of all modules' tensors, ``optimized`` those of all optimisers'.
    """
    mine = tensors_of(optimizer)
    if any(vector.dim() != 1 or id(vector) in owned for vector in mine):
        return []
    held = sum(vector.numel() for vector in mine)
    trained = ([p for p in root.parameters() if p.requires_grad and id(p) not in optimized] for root in roots)
    return [p for model in trained if held < sum(map(_elements, model)) <= ranks * held for p in model]


def is_whole(parameter: Tensor) -> bool:
    """Whether a rank holds all of a parameter now: ZeRO-3 leaves an empty one between its uses."""
    return parameter.numel() == _elements(parameter)


def _elements(parameter: Tensor) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
