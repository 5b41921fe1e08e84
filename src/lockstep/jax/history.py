"""Defines ``PPOMetricsHistory``, the metrics of all updates as a named tuple and as a mapping."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import jax
import numpy as np

FIELDS = ("total_loss", "actor_loss", "critic_loss", "entropy", "approx_kl")
"""Metrics that come first, in this order."""


class PPOMetricsHistory(tuple):
    """The metrics of a training, arrays ``[n_updates]`` by name.

    ``history.total_loss``, ``history["total_loss"]`` and ``history[0]`` are the same array. A history is a tuple of its
    arrays with ``_fields``, ``_asdict``, ``_replace`` and ``_make``, and a pytree of them. As a mapping it has
    ``keys``, ``values``, ``items``, ``get`` and ``in``. A loop over it gives names; ``values()`` gives the arrays.
    Names that aren't identifiers, such as ``reward/height``, are items only.
    """

    _fields: tuple[str, ...]

    def __new__(cls, *values: Any, **metrics: Any) -> PPOMetricsHistory:
        """Makes a history of arrays by name; arrays without a name are the first of ``FIELDS``.

        Raises:
            ValueError: there are more of them than names, or one was given twice; one line.
        """
        if len(values) > len(FIELDS) or set(FIELDS[: len(values)]) & set(metrics):
            raise ValueError(
                f"PPOMetricsHistory: {len(values)} arrays were given without a name, which are the first of "
                f"{', '.join(FIELDS)}; give each once, and others by name"
            )
        named = dict(zip(FIELDS, values, strict=False)) | metrics
        names = (*(name for name in FIELDS if name in named), *(name for name in named if name not in FIELDS))
        made = super().__new__(cls, (named[name] for name in names))
        made._fields = names
        return made

    # --- the named tuple ----------------------------------------------------------------------------------------------

    @classmethod
    def _make(cls, values: Iterable[Any]) -> PPOMetricsHistory:
        return cls(*values)

    def _asdict(self) -> dict[str, Any]:
        return {name: self[name] for name in self._fields}

    def _replace(self, **metrics: Any) -> PPOMetricsHistory:
        unknown = [name for name in metrics if name not in self._fields]
        if unknown:
            raise ValueError(f"PPOMetricsHistory: there is no {unknown[0]!r}; there are {', '.join(self._fields)}")
        return type(self)(**self._asdict() | metrics)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_fields" or name not in self._fields:
            raise AttributeError(self._missing(name))
        return self[name]

    def _missing(self, name: str) -> str:
        return f"the history has no {name!r}; it has {', '.join(self.__dict__.get('_fields', ()))}"

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, str):
            return super().__getitem__(index)
        if index not in self._fields:
            raise KeyError(self._missing(index))
        return super().__getitem__(self._fields.index(index))

    def __reduce__(self) -> Any:
        return _remade, (self._asdict(),)

    def __repr__(self) -> str:
        return f"PPOMetricsHistory({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    # --- the mapping --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __contains__(self, name: object) -> bool:
        return name in self._fields

    def keys(self) -> KeysView[str]:
        """Returns the names."""
        return self._asdict().keys()

    def values(self) -> ValuesView[Any]:
        """Returns the arrays."""
        return self._asdict().values()

    def items(self) -> ItemsView[str, Any]:
        """Returns names and arrays."""
        return self._asdict().items()

    def get(self, name: str, default: Any = None) -> Any:
        """Returns the array of a name, or the default."""
        return self[name] if name in self._fields else default

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PPOMetricsHistory | Mapping):
            return NotImplemented
        same = set(self.keys()) == set(other.keys())
        return same and all(np.array_equal(self[name], other[name], equal_nan=True) for name in self._fields)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def _remade(named: dict[str, Any]) -> PPOMetricsHistory:
    return PPOMetricsHistory(**named)


def _flatten(history: PPOMetricsHistory) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(jax.tree_util.DictKey(name), history[name]) for name in history._fields], history._fields


def _unflatten(names: tuple[str, ...], values: Iterable[Any]) -> PPOMetricsHistory:
    return PPOMetricsHistory(**dict(zip(names, values, strict=True)))


jax.tree_util.register_pytree_with_keys(PPOMetricsHistory, _flatten, _unflatten)
