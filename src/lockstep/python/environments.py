"""Explains why an argument can't be an environment, and what to give instead."""

from __future__ import annotations

import sys
from typing import Any

from lockstep.core.errors import one_line
from lockstep.core.user_code.handed import SCRIPTS
from lockstep.python.arguments import other_form


def refusal(env: Any) -> str:
    """Returns the message that says what to give in place of an object that makes no environment."""
    if hasattr(env, "num_envs"):
        return (
            f"env: {type(env).__name__} is many environments; give what makes one of them, and num_envs={env.num_envs}"
        )
    if isinstance(env, list | tuple):
        return f"env: a {type(env).__name__} of {len(env)}; give what makes one environment, and num_envs={len(env)}"
    if hasattr(env, "reset") and hasattr(env, "step"):
        spec = getattr(env, "spec", None)
        known = f"{spec.id!r}, or " if spec is not None else ""
        return (
            f"env: {type(env).__name__} is one environment, and a run makes several; give what makes one: {known}"
            "a class, a function, a lambda"
        )
    shown = one_line(repr(env))
    if hasattr(env, "entry_point") and isinstance(getattr(env, "id", None), str):  # a gymnasium.EnvSpec
        return f"env: {shown[:80]} is what an id stands for; give the id, {env.id!r}"
    if form := other_form(env):
        return f"env: {shown[:80]} is no config{form}"
    return f"env: {shown[:80]} is no id, config or callable; an environment is given by what makes it"


def registered_here_alone(env: Any, error: ValueError) -> ValueError | None:
    """Returns a clearer error if only this process has registered the id ``env``; None if ``error`` is another one."""
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    if not isinstance(env, str) or env not in registry or f"no environment {env!r} is registered" not in str(error):
        return None
    entry = registry[env].entry_point
    module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "") or ""
    package = module.partition(".")[0]
    way = f"'{package}:{env}' imports {package} first" if package not in ("", *SCRIPTS) else "'module:Id' imports one"
    return ValueError(
        f"env.id: {env!r} is registered in this process alone, and ranks are others; {way}, or give the class itself"
    )
