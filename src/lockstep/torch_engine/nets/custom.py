"""Custom networks: a ``torch.nn.Module`` named by import path, called as a function of its parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from lockstep.core.spaces import Leaf, ObservationLayout
from lockstep.core.user_code.named import named_object
from lockstep.networks.checks import check_outputs, needed_instead, other_type, running_statistics
from lockstep.networks.returned import ReturnedError, outputs_and_values
from lockstep.torch_engine.nets import encoders
from lockstep.torch_engine.nets.shards import in_pairs


def _part(leaf: Leaf, rows: Tensor, floats: Tensor) -> Tensor:
    """Extracts one part of an observation ``[n, *shape]``: images uint8, indices int64, the rest float32."""
    source = rows if leaf.kind == "image" else floats
    part = source[..., leaf.start : leaf.start + leaf.size].reshape(rows.shape[0], *leaf.shape)
    dtype = {"image": torch.uint8, "one_hot": torch.int64}.get(leaf.kind)
    return part if dtype is None else part.to(dtype)


def observation_tensors(layout: ObservationLayout, rows: Tensor) -> Any:
    """Converts rows ``[n, width]`` to the environment's own structure: a tensor, or a flat dict of tensors by path.

    A mask that comes apart from the observation is left out.
    """
    floats = encoders.float_columns(layout, rows)
    parts = {leaf.name: _part(leaf, rows, floats) for leaf in layout.leaves if not leaf.apart}
    return parts[""] if list(parts) == [""] else parts


ONE_BY_ONE = (nn.modules.conv._ConvNd, nn.RNNBase, nn.modules.dropout._DropoutNd, nn.MultiheadAttention)
"""Modules whose kernels depend on the size of a batch, can't be mapped over shards, or draw a shard's own dropout."""


class CustomNet:
    """Calls a user's module as a function of parameters ``[k, …]``.

    Args:
        module: maps observations ``[n, …]`` to the actor's output ``[n, outputs]`` and values ``[n]`` or ``[n, 1]``.

    Attributes:
        batched: whether one call computes several shards, mapped over their axis; decided once, by the self-check.
        pairs: whether a single shard is computed as one of two, because alone it would have other bits.
        one_by_one: why shards can't share a call, in words; None unless a reason is known.
        frozen: names of parameters that the constructor excludes from training, by ``requires_grad_(False)``.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module.eval()
        self.batched = self.pairs = False
        parts = (part for part in module.modules() if isinstance(part, ONE_BY_ONE) and getattr(part, "p", None) != 0)
        kinds = sorted({type(part).__name__ for part in parts})
        self.one_by_one = f"has {', '.join(kinds)}" if kinds else None
        if any(hasattr(part, "_orig_mod") for part in module.modules()):  # of torch.compile
            self.one_by_one = "is compiled"
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        self.frozen = frozenset(name for name, p in module.named_parameters() if not p.requires_grad)
        self._buffers: dict[torch.device, dict[str, Tensor]] = {}

    def map_over_shards(self, batched: bool, pairs: bool = False) -> None:
        """Sets whether one call computes several shards, and whether a single shard is computed as one of two."""
        self.batched, self.pairs = batched, pairs
        for part in self.module.modules():
            if type(part) in (nn.Linear, _OneColumn) and part.out_features == 1:
                part.__class__ = _OneColumn if batched else nn.Linear

    def set_dropout(self, on: bool) -> None:
        """Turns dropout on or off."""
        self.module.train(on)

    @contextmanager
    def dropout(self, seed: int, device: torch.device) -> Iterator[None]:
        """Turns dropout on, keyed by a seed, for a pass on a device; then restores the global generators.

        Otherwise a user's environment that draws from them would show which shards the rank computed last.
        """
        there = [] if device.type in ("cpu", "meta") else [device]
        with torch.random.fork_rng(there, device_type=device.type if there else "cuda"):
            if there:
                torch.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)  # not those of devices, which aren't restored
            self.set_dropout(True)
            try:
                yield
            finally:
                self.set_dropout(False)

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """Returns copies of the parameters that the module was made with."""
        return {name: p.detach().numpy().astype(np.float32) for name, p in self.module.named_parameters()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name."""
        return dict(self._shapes)

    def forget_parameters(self) -> None:
        """Frees the memory of the module's own parameters, because every call is given others."""
        for parameter in self.module.parameters():
            parameter.data = torch.empty(0)

    def _buffers_on(self, device: torch.device) -> dict[str, Tensor]:
        """Copies the module's buffers to a device, once; returns those that aren't there anyway."""
        if device not in self._buffers:
            with torch.inference_mode(False):  # they may be used under autograd
                elsewhere = {name: x.to(device) for name, x in self.module.named_buffers() if x.device != device}
            self._buffers[device] = elsewhere
        return self._buffers[device]

    def _weights(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Picks the module's own parameters, frozen ones detached: their gradient is 0, so Adam doesn't change them."""
        names = self._shapes
        return {name: parameters[name].detach() if name in self.frozen else parameters[name] for name in names}

    def __call__(
        self, parameters: Mapping[str, Tensor], layout: ObservationLayout, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Computes the actor's output ``[k, n, outputs]`` and the values ``[k, n]`` of rows ``[k, n, width]``."""
        rows = rows.clone()  # the module may work in place on its observations, and these are a rollout's own
        if self.batched:
            return self._mapped(parameters, layout, rows)
        output, values = self.returned(parameters, layout, rows)
        shape = rows.shape[:2]
        if values is None:
            return output.unflatten(0, shape), torch.zeros(0)
        return output.unflatten(0, shape), values.reshape(shape) if values.numel() else values

    def returned(
        self, parameters: Mapping[str, Tensor], layout: ObservationLayout, rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Calls the module once; gives outputs and values of rows ``[k, n, width]`` in the shapes that it gives them.

        Raises:
            ReturnedError: it returned something else; the user's own code may raise anything.
        """
        weights = {name: w[0] for name, w in self._weights(parameters).items()}
        assert len(rows) == 1 or not any(w.requires_grad for w in weights.values()), "one shard at a time"
        flat = observation_tensors(layout, rows.flatten(0, 1))
        called = torch.func.functional_call(self.module, weights | self._buffers_on(rows.device), (flat,))
        return outputs_and_values(called)

    def _mapped(
        self, parameters: Mapping[str, Tensor], layout: ObservationLayout, rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Calls the module once for all shards."""
        shards, samples = rows.shape[:2]
        weights = self._weights(parameters)
        if shards == 1 and self.pairs:
            rows, weights = in_pairs(rows), {name: in_pairs(w) for name, w in weights.items()}
        buffers = self._buffers_on(rows.device)

        def one(weights: Mapping[str, Tensor], rows: Tensor) -> tuple[Tensor, Tensor]:
            called = torch.func.functional_call(
                self.module, {**weights, **buffers}, (observation_tensors(layout, rows),)
            )
            output, values = outputs_and_values(called)
            return output, rows.new_zeros(0, dtype=torch.float32) if values is None else values

        output, values = torch.func.vmap(one)(weights, rows)
        values = values.reshape(len(rows), samples) if values.numel() else values
        return output[:shards], values[:shards]


class _OneColumn(nn.Linear):
    """A layer with one output, computed as one of two: a product of one column rounds differently for a lone shard."""

    def forward(self, input: Tensor) -> Tensor:
        """Maps ``[…, in]`` to ``[…, 1]``."""
        weight = functional.pad(self.weight, (0, 0, 0, 1))
        bias = None if self.bias is None else functional.pad(self.bias, (0, 1))
        return functional.linear(input, weight, bias)[..., :1]


def load_custom(path: str, kwargs: dict[str, Any], net: Any, seed: int, kind: type | None = None) -> CustomNet:
    """Makes a user's module ``module:Class`` with PyTorch's generator seeded, and tries it on a batch of zeros.

    ``kind`` is the class, if the caller has it; None: it is found by its name.

    Raises:
        ValueError: if it can't be found or made, or returns anything but outputs and values; the message is one line.
    """
    kind = named_object("network.custom", path) if kind is None else kind
    if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
        raise ValueError(f"network.custom: {path} is no torch.nn.Module class, which the torch engine's networks are")
    sample, module = net.observation.zeros(2), None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not those of devices, which aren't restored
        try:
            shown, own = observation_tensors(net.observation, torch.from_numpy(sample)), copy.deepcopy(kwargs)
            module = kind(shown, net.outputs, **own)
            custom = CustomNet(module)
            changing = [name for name, _ in module.named_buffers()]
            parameters = {name: p.detach().unsqueeze(0) for name, p in module.named_parameters()}
            output, values = custom.returned(parameters, net.observation, torch.from_numpy(sample).unsqueeze(0))
        except ReturnedError as error:
            raise needed_instead(f"network.custom: {path}", net, error) from error
        except Exception as error:
            if module is not None:
                check_float32(f"network.custom: {path}", module)
            raise ValueError(f"network.custom: {path}: {type(error).__name__}: {error}") from error
    check_outputs_of(f"network.custom: {path}", net, output, values, len(sample))
    net.check_custom(f"network.custom: {path}", custom.shapes())
    if any(name.endswith(("running_mean", "running_var", "num_batches_tracked")) for name in changing):
        raise running_statistics(f"network.custom: {path}", changing[0], "ranks")
    return custom


def check_outputs_of(name: str, net: Any, output: Tensor, values: Tensor | None, rows: int) -> None:
    """Checks the shapes of what :meth:`CustomNet.returned` gave for ``rows`` rows of a shard.

    Raises:
        ValueError: they aren't those of outputs and values; the message is one line.
    """
    shape = None if values is None else (rows,) if values.numel() == rows else tuple(values.shape)
    check_outputs(name, net, tuple(output.shape), shape, rows)


def check_float32(name: str, module: nn.Module) -> None:
    """Refuses parameters that aren't float32, because all are kept and trained in one float32 vector.

    Policies trained before this check existed can still be loaded.

    Raises:
        ValueError: if a parameter has another type; the message is one line.
    """
    for parameter, p in module.named_parameters():
        if p.dtype != torch.float32:
            raise other_type(name, parameter, str(p.dtype), "torch.float32", "forward")
