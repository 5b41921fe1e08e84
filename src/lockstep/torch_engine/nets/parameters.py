"""Holds all parameters in one vector, and applies gradients to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.optim.adam import adam

from lockstep.torch_engine.nets.nets import expand

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's moments of every parameter, by PyTorch's names."""

Arrays = Mapping[str, np.ndarray]
"""Arrays by parameter name."""


class Rule(Protocol):
    """Applies a gradient ``[P]``, which it may overwrite, at a learning rate; see :meth:`Optimizer.step`."""

    def __call__(self, gradient: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None, /) -> None:
        """Applies it."""


class FlatParameters:
    """Holds all parameters in one float32 vector ``[P]``, in the order of ``shapes``, with views of it by name."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
        self.shapes = shapes
        self.sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
        self.flat = torch.zeros(sum(self.sizes.values()), device=device)
        self.views = self.split(self.flat)
        self._expanded: dict[int, dict[str, Tensor]] = {}

    def expanded(self, num_shards: int) -> dict[str, Tensor]:
        """Returns the views with a leading shard axis (:func:`.nets.nets.expand`), made once per number."""
        if num_shards not in self._expanded:
            self._expanded[num_shards] = expand(self.views, num_shards)
        return self._expanded[num_shards]

    def split(self, flat: Tensor) -> dict[str, Tensor]:
        """Returns views of a vector ``[P]`` by parameter name."""
        parts = torch.split(flat, list(self.sizes.values()))
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}

    def arrays(self, flat: Tensor) -> dict[str, np.ndarray]:
        """Copies a vector's parts to the host."""
        host = flat.detach().cpu()
        return {name: part.numpy().copy() for name, part in self.split(host).items()}

    def load(self, flat: Tensor, arrays: Arrays) -> None:
        """Copies arrays into a vector's parts; names and shapes must be those of the parameters."""
        for name, view in self.split(flat).items():
            array = torch.from_numpy(np.ascontiguousarray(arrays[name]))
            view.copy_(array.view(view.shape))  # NumPy made a scalar one-dimensional


class Optimizer(Protocol):
    """Holds the parameters and Adam's moments, whole or this rank's slices, and applies reduced gradients to them."""

    def step(self, gradient: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None) -> None:
        """Applies a gradient, ``[P]`` or this rank's part of it, and may overwrite it.

        On an accelerator the rate may be a float32 scalar there, and ``skipped`` a scalar that is 1 if nothing is to be
        changed; the host reads neither.
        """

    def parameters(self) -> Tensor:
        """Returns the whole parameters ``[P]``; a collective and a copy if they are sliced."""
        ...

    def moments(self) -> dict[str, Tensor]:
        """Returns ``step``, a scalar, and the whole moments ``[P]``; a collective and copies if they are sliced."""
        ...

    def load(self, parameters: Arrays, moments: Mapping[str, Arrays], step: float) -> None:
        """Copies whole arrays in: parameters, each of :data:`MOMENTS`, and the number of steps done."""

    def gather(self) -> None:
        """Makes the whole parameters readable by name; a collective if they are sliced."""

    def release(self) -> None:
        """Frees what :meth:`gather` made."""


class WholeAdam(Optimizer):
    """Holds whole moments beside whole parameters: the :class:`Optimizer` of most runs.

    ``make_rule`` makes the rule from parameters ``[P]`` and moments by name, which the rule changes in place.
    """

    def __init__(self, parameters: FlatParameters, make_rule: Callable[[Tensor, dict[str, Tensor]], Rule]) -> None:
        flat = parameters.flat
        self._parameters = parameters
        self._moments = {"step": torch.zeros((), device=flat.device)} | {m: torch.zeros_like(flat) for m in MOMENTS}
        self._rule = make_rule(flat, self._moments)

    def step(self, gradient: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None) -> None:
        """See :meth:`Optimizer.step`."""
        self._rule(gradient, learning_rate, skipped)

    def parameters(self) -> Tensor:
        """See :meth:`Optimizer.parameters`; the memory itself."""
        return self._parameters.flat

    def moments(self) -> dict[str, Tensor]:
        """See :meth:`Optimizer.moments`; the memory itself."""
        return self._moments

    def load(self, parameters: Arrays, moments: Mapping[str, Arrays], step: float) -> None:
        """See :meth:`Optimizer.load`."""
        self._parameters.load(self._parameters.flat, parameters)
        for name in MOMENTS:
            self._parameters.load(self._moments[name], moments[name])
        self._moments["step"].fill_(step)


def fused_adam(flat: Tensor, moments: dict[str, Tensor], options: dict[str, Any]) -> Rule:
    """Returns a rule that applies PyTorch's fused Adam; ``moments`` are its state, ``options`` its settings."""
    gradients = torch.zeros_like(flat)

    def step(gradient: Tensor, learning_rate: float | Tensor, skipped: Tensor | None = None) -> None:
        gradients.copy_(gradient)
        fused_adam_step([flat], [gradients], [moments], learning_rate, skipped, **options)

    return step


def fused_adam_step(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Mapping[str, Tensor]],
    learning_rate: float | Tensor,
    skipped: Tensor | None = None,
    *,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Applies PyTorch's fused Adam to tensors by its function, because ``torch.optim.Adam`` loads ``torch.compile``.

    ``found_inf`` makes Adam skip a step without a wait; PyTorch's ``GradScaler`` uses it so too.
    """
    with torch.no_grad():
        adam(
            list(parameters),
            list(gradients),
            [of["exp_avg"] for of in moments],
            [of["exp_avg_sq"] for of in moments],
            [],
            [of["step"] for of in moments],
            fused=True,
            found_inf=skipped,
            amsgrad=False,
            beta1=betas[0],
            beta2=betas[1],
            lr=learning_rate,
            weight_decay=0.0,
            eps=eps,
            maximize=False,
        )
