"""Finds models of which each rank's optimiser updates another part, laid end to end, as DeepSpeed's ZeRO does it."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """All that an optimiser updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def updated_by_parts(
    optimizer: Optimizer, roots: Iterable[nn.Module], owned: Container[int], optimized: Container[int], ranks: int
) -> Sequence[Tensor]:
    """Gives the trained parameters of models of which this optimiser holds no more than one rank's part.

    Then it holds vectors alone, and DeepSpeed has marked the parameters; or these vectors are together smaller than
    the model and, on so many ``ranks``, as large at least but for one number of each, which another rank's may have in
    addition. ``owned`` are ids of all modules' tensors, ``optimized`` those of all optimisers'.
    """
    if not holds_vectors(optimizer, owned):
        return []
    trained = [[p for p in root.parameters() if p.requires_grad and id(p) not in optimized] for root in roots]
    if marked := [p for model in trained for p in model if _is_marked(p)]:
        return marked
    mine = tensors_of(optimizer)
    held = sum(vector.numel() for vector in mine)
    most = ranks * (held + len(mine))
    return [p for model in trained if held < sum(map(_elements, model)) <= most for p in model]


def holds_vectors(optimizer: Optimizer, owned: Container[int]) -> bool:
    """Whether all that an optimiser updates now are vectors, which are no module's."""
    return all(vector.dim() == 1 and id(vector) not in owned for vector in tensors_of(optimizer))


def parts_of(optimizer: Optimizer, parameters: Collection[Tensor]) -> list[Tensor]:
    """The vectors of an optimiser that are parts of parameters: all, or those of which ZeRO says so."""
    mappings = [p._hp_mapping for p in parameters if hasattr(p, "_hp_mapping")]  # pyright: ignore[reportAttributeAccessIssue]
    if not mappings:
        zero_3 = any(hasattr(p, "ds_numel") for p in parameters)
        return [vector for vector in tensors_of(optimizer) if not zero_3 or hasattr(vector, "ds_id")]
    places = {_memory(mapping.hp_fragment) for mapping in mappings if mapping is not None}
    return [vector for vector in tensors_of(optimizer) if _memory(vector) in places]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_marked(parameter: Tensor) -> bool:
    """Whether DeepSpeed updates a parameter by parts, and every rank is to have the same: not of one rank's experts."""
    marked = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_numel")
    return marked and getattr(parameter, "allreduce", True)


def is_whole(parameter: Tensor) -> bool:
    """Whether a rank holds all of a parameter now: ZeRO-3 leaves an empty one between its uses."""
    return parameter.numel() == _elements(parameter)


def _elements(parameter: Tensor) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
