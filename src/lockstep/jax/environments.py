"""Checks that what a library user gave is an environment that JAX can step."""

from __future__ import annotations

from typing import Any

import gymnasium

from lockstep.jax.settings import SettingError
from lockstep.jax.wrappers.single import innermost

HOST = (gymnasium.Env, gymnasium.vector.VectorEnv)


def check_environment(env: Any, name: str = "env", how: str = "given") -> None:
    """Raises a one-line error if ``env`` is no environment of the functional API.

    Args:
        env: what was given, in our wrappers or not.
        name: name of the argument, or of the hook that returned it.
        how: ``given`` or ``returned``.

    Raises:
        SettingError: it is a class, an environment of Gymnasium, or something without ``reset`` and ``step``.
    """
    give = "give" if how == "given" else "return"
    env = innermost(env)
    kind = type(env).__name__
    if isinstance(env, type):
        raise SettingError(f"{name}: the class {env.__name__} was {how}; {give} an instance, {env.__name__}(…)")
    if isinstance(env, HOST):
        spec = getattr(env, "spec", None)
        env_id = "module:Class" if spec is None else spec.id
        raise SettingError(
            f"{name}: {kind} is an environment of Gymnasium, which steps on the host: train it with lockstep train "
            f"{env_id}; here {give} one that JAX steps, of lockstep.jax.make, of gymnax or a class with reset(key, "
            "params)"
        )
    if isinstance(env, str):
        raise SettingError(
            f"{name}: str was {how}, which has no reset and step; {give} one of make, as in env, params = "
            f"lockstep.jax.make({env!r})"
        )
    if not (hasattr(env, "reset") and hasattr(env, "step")):
        raise SettingError(f"{name}: {kind} was {how}, which has no reset and step; {give} one of make")
