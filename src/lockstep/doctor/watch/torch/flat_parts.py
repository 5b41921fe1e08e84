"""Finds models of which each rank's optimiser updates a different part, flattened into vectors as by DeepSpeed ZeRO."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer


def tensors_of(optimizer: Optimizer) -> list[Tensor]:
    """Returns all tensors that an optimiser updates."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def updated_by_parts(
    optimizer: Optimizer, roots: Iterable[nn.Module], owned: Container[int], optimized: Container[int], ranks: int
) -> Sequence[Tensor]:
    """Returns the trained parameters of models of which this optimiser holds only one rank's part; empty if none.

    Such an optimiser holds only vectors. Either DeepSpeed has marked the parameters, or the vectors are smaller than
    the model but, times ``ranks``, at least as large; each vector may be one number shorter than another rank's.

    Args:
        optimizer: the optimiser to look at.
        roots: the outermost modules.
        owned: ids of all modules' tensors.
        optimized: ids of all optimisers' tensors.
        ranks: size of the process group.
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
    """Returns whether all tensors that an optimiser updates now are vectors that belong to no module."""
    return all(vector.dim() == 1 and id(vector) not in owned for vector in tensors_of(optimizer))


def parts_of(optimizer: Optimizer, parameters: Collection[Tensor]) -> list[Tensor]:
    """Returns the vectors of an optimiser that are parts of parameters: those that ZeRO marks, else all."""
    mappings = [p._hp_mapping for p in parameters if hasattr(p, "_hp_mapping")]  # pyright: ignore[reportAttributeAccessIssue]
    if not mappings:
        zero_3 = any(hasattr(p, "ds_numel") for p in parameters)
        return [vector for vector in tensors_of(optimizer) if not zero_3 or hasattr(vector, "ds_id")]
    places = {_memory(mapping.hp_fragment) for mapping in mappings if mapping is not None}
    return [vector for vector in tensors_of(optimizer) if _memory(vector) in places]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_marked(parameter: Tensor) -> bool:
    """Returns whether DeepSpeed updates a parameter by parts and all ranks share it (one rank's experts aren't)."""
    marked = hasattr(parameter, "_hp_mapping") or hasattr(parameter, "ds_numel")
    return marked and getattr(parameter, "allreduce", True)


def is_whole(parameter: Tensor) -> bool:
    """Returns whether a rank holds all of a parameter now: ZeRO-3 leaves it empty between uses."""
    return parameter.numel() == _elements(parameter)


def _elements(parameter: Tensor) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
