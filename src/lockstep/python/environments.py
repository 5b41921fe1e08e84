"""What a caller gives as an environment, in words that other processes understand."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.temporary import temporary_directory
from lockstep.envs.gymnasium.handed import HANDED, VARIABLE


@dataclass(frozen=True)
class Handed:
    """An environment that was given as an object.

    Attributes:
        id: by which a config names it: ``module:name``, or ``python:name`` of one that can't be imported.
        pickled: the latter, as bytes.
    """

    id: str
    pickled: bytes | None = None


def handed(env: Callable[..., Any]) -> Handed:
    """Names a callable that makes an environment: a class, a function, a lambda.

    Raises:
        ValueError: it can neither be imported by others nor pickled; one line.
    """
    name = getattr(env, "__qualname__", "") or ""
    if importable(env):
        return Handed(f"{env.__module__}:{name}")
    short = "".join(c if c.isalnum() else "_" for c in name.rpartition(".")[2] or type(env).__name__).strip("_")
    try:
        import cloudpickle  # comes with gymnasium

        return Handed(f"{HANDED}:{short or 'environment'}", cloudpickle.dumps(env))
    except Exception as error:  # of the object's own
        reason = " ".join(str(error).split())
        raise ValueError(
            f"env: {name or env!r} can't be taken to another process ({reason}); put it into a module, and give it "
            "from there or as 'module:name'"
        ) from None


def importable(given: Any) -> bool:
    """Whether other processes find a class or function by its module and name."""
    module, name = getattr(given, "__module__", "") or "", getattr(given, "__qualname__", "") or ""
    return _found(module, name) is given


def refusal(env: Any) -> str:
    """Says what to give in place of an object that makes no environment."""
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
    shown = " ".join(repr(env).split())
    return f"env: {shown[:80]} is no id, config or callable; an environment is given by what makes it"


def registered_here_alone(env: Any, error: ValueError) -> ValueError | None:
    """Says of an id that is unknown to the processes of a run, but not to this one, how they find it."""
    registry = getattr(sys.modules.get("gymnasium"), "registry", {})
    if not isinstance(env, str) or env not in registry or f"no environment {env!r} is registered" not in str(error):
        return None
    entry = registry[env].entry_point
    module = entry.partition(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "") or ""
    package = module.partition(".")[0]
    way = f"'{package}:{env}' imports {package} first" if package not in ("", "__main__") else "'module:Id' imports one"
    return ValueError(
        f"env.id: {env!r} is registered in this process alone, and ranks are others; {way}, or give the class itself"
    )


def _found(module: str, name: str) -> Any:
    """What other processes find by a module's name; None where that is the caller's script, or inside a function."""
    if not name.isidentifier() or module in ("", "__main__"):
        return None
    with contextlib.suppress(ImportError):
        return getattr(importlib.import_module(module), name, None)
    return None


@contextlib.contextmanager
def variables_for(env: Handed | None) -> Iterator[dict[str, str]]:
    """The environment variables by which processes find what was handed over, for as long as the block runs."""
    if env is None or env.pickled is None:
        yield {}
        return
    with temporary_directory() as directory:
        file = Path(directory, "environment.pickle")
        file.write_bytes(env.pickled)
        os.chmod(file, 0o600)
        yield {VARIABLE: str(file)}
