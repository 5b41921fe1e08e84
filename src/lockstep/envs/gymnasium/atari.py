"""Registers Atari games with Gymnasium, once one of them is asked for."""

from __future__ import annotations

import functools
import importlib.util

import gymnasium

from lockstep.config.presets import ATARI_ID


def register_atari(env_id: str) -> None:
    """Register the games if this id is one of them.

    Raises:
        ValueError: ale-py, which emulates them, isn't installed.
    """
    if ATARI_ID.fullmatch(env_id) is None:
        return
    if importlib.util.find_spec("ale_py") is None:
        raise ValueError(f"env.id: {env_id} needs ale-py, which isn't installed; pip install 'lockstep-rl[atari]'")
    _register()


@functools.cache
def _register() -> None:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)  # each emulator would greet otherwise
    gymnasium.register_envs(ale_py)
