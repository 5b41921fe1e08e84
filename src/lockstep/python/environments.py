"""What a caller gives as an environment, in words that other processes understand."""

from __future__ import annotations

import contextlib
import importlib
import os
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
    module, name = getattr(env, "__module__", "") or "", getattr(env, "__qualname__", "") or ""
    if _found(module, name) is env:
        return Handed(f"{module}:{name}")
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
