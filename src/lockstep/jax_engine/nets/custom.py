"""Custom networks: an ``equinox.Module`` named by import path, called as a function of its parameters."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax import Array
from jax import numpy as jnp

from lockstep.core.spaces import Leaf, ObservationLayout
from lockstep.core.user_code.named import named_object
from lockstep.jax_engine.nets import encoders
from lockstep.jax_engine.shards.keys import seed_key
from lockstep.networks.checks import check_outputs, needed_instead, running_statistics
from lockstep.networks.draws import host_generators
from lockstep.networks.returned import ReturnedError, outputs_and_values


def _part(leaf: Leaf, rows: Array, floats: Array) -> Array:
    """Extracts one part of an observation ``[n, *shape]``: images uint8, indices int32, the rest float32."""
    source = rows if leaf.kind == "image" else floats
    part = source[..., leaf.start : leaf.start + leaf.size].reshape(len(rows), *leaf.shape)
    return part.astype(jnp.int32) if leaf.kind == "one_hot" else part


def observation_arrays(layout: ObservationLayout, rows: Array) -> Any:
    """Converts rows ``[n, width]`` to the environment's own structure: an array, or a flat dict of arrays by path.

    A mask that comes separately from the observation isn't included.
    """
    floats = encoders.float_columns(layout, rows)
    parts = {leaf.name: _part(leaf, rows, floats) for leaf in layout.leaves if not leaf.apart}
    return parts[""] if list(parts) == [""] else parts


def _is_parameter(x: Any) -> bool:
    return eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)


def _name(path: tuple[Any, ...]) -> str:
    """Returns a parameter's name, such as ``layers.0.weight``."""
    return ".".join(str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", key)))) for key in path)


def host_array(x: Any) -> np.ndarray:
    """Copies an array to the host; of random keys, their bits."""
    keys = eqx.is_array(x) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if keys else x)


def _same(a: Any, b: Any) -> bool:
    """Returns whether two parts of modules are the same: arrays by content, functions by their code and what it sees.

    A constructor that sets a lambda makes another function each time.
    """
    if eqx.is_array(a) and eqx.is_array(b):
        return bool(np.array_equal(host_array(a), host_array(b)))
    if isinstance(a, partial) and isinstance(b, partial):
        return _same(a.func, b.func) and _all_same(a.args, b.args) and _all_same(a.keywords, b.keywords)
    if isinstance(a, FunctionType) and isinstance(b, FunctionType):
        seen = [
            (x.__defaults__, x.__kwdefaults__, [cell.cell_contents for cell in x.__closure__ or ()]) for x in (a, b)
        ]
        return a.__code__ == b.__code__ and a.__globals__ is b.__globals__ and _all_same(*seen)
    return bool(a == b)


def _all_same(a: Any, b: Any) -> bool:
    (mine, my_tree), (theirs, their_tree) = jax.tree.flatten(a), jax.tree.flatten(b)
    return my_tree == their_tree and all(_same(x, y) for x, y in zip(mine, theirs, strict=True))


class CustomNet:
    """Calls a user's module as a function of its parameters by name, which are its floating-point arrays.

    Args:
        module: is called with observations ``[n, …]`` and a keyword ``key``; returns the actor's output
            ``[n, outputs]`` and values ``[n]`` or ``[n, 1]``.

    Attributes:
        dtypes: of its parameters as it was made, by name; all are kept in float32.
        drew: whether it drew from Python's ``random`` or ``numpy.random`` when it was tried.
    """

    def __init__(self, module: eqx.Module) -> None:
        self.drew = False
        arrays, self._rest = eqx.partition(module, _is_parameter)
        self._names = jax.tree_util.tree_map_with_path(lambda path, _: _name(path), arrays)
        found = dict(zip(jax.tree.leaves(self._names), jax.tree.leaves(arrays), strict=True))
        self.dtypes = {name: x.dtype for name, x in found.items()}
        self._initial = {name: np.asarray(x, np.float32) for name, x in found.items()}

    def initial_parameters(self) -> dict[str, np.ndarray]:
        """Returns the parameters that the module was made with."""
        return dict(self._initial)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every parameter by name."""
        return {name: x.shape for name, x in self._initial.items()}

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns copies of all arrays that the module was made with: parameters, and constants by their paths."""
        paths = jax.tree_util.tree_flatten_with_path(self._rest)[0]
        return self._initial | {_name(path): host_array(x) for path, x in paths if eqx.is_array_like(x)}

    def alike(self, other: CustomNet | None) -> bool:
        """Returns whether two modules differ at most in the values of their parameters."""
        if other is None:
            return False
        (mine, my_tree), (theirs, their_tree) = jax.tree.flatten(self._rest), jax.tree.flatten(other._rest)
        if self.shapes() != other.shapes() or my_tree != their_tree:
            return False
        try:
            return all(_same(a, b) for a, b in zip(mine, theirs, strict=True))
        except (RecursionError, ValueError):  # a function that sees itself, or something that isn't set
            return False

    def __eq__(self, other: object) -> bool:
        """Compares what modules compute, so that train states of equal networks are one kind of pytree."""
        return self is other or (isinstance(other, CustomNet) and self.alike(other))

    def __hash__(self) -> int:
        """Hashes names and shapes of the parameters."""
        return hash(tuple(self.shapes().items()))

    def __call__(
        self,
        parameters: Mapping[str, Array],
        layout: ObservationLayout,
        rows: Array,
        key: Array | None = None,
        bf16: bool = False,
    ) -> tuple[Array, Array | None]:
        """Computes the actor's output ``[n, outputs]`` and values ``[n]`` (or None) of rows ``[n, width]``, float32.

        ``key`` is for dropout; None sets ``equinox.nn.inference_mode``. With ``bf16``, parameters and floating-point
        observations are bfloat16.
        """

        def cast(x: Array) -> Array:
            return x.astype(jnp.bfloat16) if bf16 and jnp.issubdtype(x.dtype, jnp.floating) else x

        module = eqx.combine(jax.tree.map(lambda name: cast(parameters[name]), self._names), self._rest)
        module = eqx.nn.inference_mode(module, value=key is None)
        result = module(jax.tree.map(cast, observation_arrays(layout, rows)), key=key)
        output, values = outputs_and_values(result)
        if values is not None:
            values = (values.reshape(len(rows)) if values.size == len(rows) else values).astype(jnp.float32)
        return output.astype(jnp.float32), values


def load_custom(path: str, kwargs: dict[str, Any], net: Any, seed: int, kind: type | None = None) -> CustomNet:
    """Makes a user's module ``module:Class`` and tries it; see :func:`custom_net`.

    ``kind`` is the class if the caller has it; None: it is imported by name.

    Raises:
        ValueError: if it can't be found, or :func:`custom_net` raises; the message is one line.
    """
    make = _checked(path, named_object("network.custom", path) if kind is None else kind)

    def made(*given: Any, key: Any) -> Any:
        return make(*given, key=key, **copy.deepcopy(kwargs))

    return custom_net(f"network.custom: {path}", made, net, seed)


def custom_net(name: str, make: Callable[..., Any], net: Any, seed: int) -> CustomNet:
    """Makes a user's module and tries it on a batch of zeros; errors begin with ``name``.

    ``make`` is called with a batch of two observations, the number of outputs, and a keyword ``key`` made from the
    seed.

    Raises:
        ValueError: if it can't be made, or returns anything but outputs and values; the message is one line.
    """
    rows = jnp.asarray(net.observation.zeros(2))
    try:
        sample = observation_arrays(net.observation, rows)
        module = make(sample, net.outputs, key=seed_key(seed))
        _check_state(name, module)
        _check_call(name, module, sample)
        custom, before = CustomNet(module), host_generators()
        output, values = jax.eval_shape(
            lambda parameters, x: custom(parameters, net.observation, x), custom.initial_parameters(), rows
        )
        custom.drew = host_generators() != before
    except ReturnedError as error:
        raise needed_instead(name, net, error) from error
    except Exception as error:
        if str(error).startswith(name):
            raise
        text = (str(error).splitlines() or [""])[0]
        raise ValueError(f"{name}: {type(error).__name__}: {text}") from error
    check_outputs(name, net, output.shape, None if values is None else values.shape, len(rows))
    net.check_custom(name, custom.shapes())
    return custom


def _checked(path: str, kind: Any) -> Callable[..., eqx.Module]:
    if not (inspect.isclass(kind) and issubclass(kind, eqx.Module)):
        raise ValueError(f"network.custom: {path} is no equinox.Module class, which the JAX engine's networks are")
    return kind


def _check_call(name: str, module: Callable[..., Any], sample: Any) -> None:
    """Refuses a module that can't be called with a batch of observations and a key."""
    try:
        called = inspect.signature(module, follow_wrapped=False)  # a decorator may take the key
    except (TypeError, ValueError):  # what isn't written in Python has none
        return
    try:
        called.bind(sample, key=None)
    except TypeError as error:
        raise ValueError(
            f"{name} is called with observations and a keyword key, which is None outside of training; its __call__ "
            f"takes {called} ({error}); write def __call__(self, observation, *, key)"
        ) from error


def _check_state(name: str, module: eqx.Module) -> None:
    """Refuses layers with running statistics, which Equinox keeps outside the module."""

    def is_state(x: Any) -> bool:
        return isinstance(x, eqx.nn.StateIndex)

    for where, leaf in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_state)[0]:
        if is_state(leaf):
            raise running_statistics(name, _name(where), "devices")
