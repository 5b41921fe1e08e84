"""Reads an environment's default parameters, which are an attribute in some libraries and a method in others."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import jax


def default_params(env: Any) -> Any:
    """Reads ``env.default_params`` or calls ``env.default_params()``, whichever it is; None if it has neither."""
    found = getattr(env, "default_params", None)
    return found() if inspect.isroutine(found) or isinstance(found, functools.partial) else found


def that_may_be_called(params: Any) -> Any:
    """Makes another library's parameters callable: returns an instance of a subclass that returns itself when called.

    It is the same pytree. Parameters that aren't a dataclass, have slots, or are callable already, are returned as they
    are.
    """
    if callable(params) or not hasattr(params, "__dataclass_fields__") or not hasattr(params, "__dict__"):
        return params
    out = object.__new__(_callable_class(type(params)))
    out.__dict__.update(params.__dict__)
    return out


@functools.cache
def _callable_class(kind: type) -> type:
    """Makes a subclass with ``__call__``, registered as a pytree like the class itself."""
    sub = type(kind.__name__, (kind,), {"__call__": lambda self: self, "__module__": kind.__module__})

    def plain(params: Any) -> Any:
        out = object.__new__(kind)
        out.__dict__.update(params.__dict__)
        return out

    def made(structure: Any, leaves: Any) -> Any:
        out = object.__new__(sub)
        out.__dict__.update(jax.tree.unflatten(structure, leaves).__dict__)
        return out

    jax.tree_util.register_pytree_node(sub, lambda params: jax.tree.flatten(plain(params)), made)
    return sub
