"""Chooses the libraries that environments draw with."""

from __future__ import annotations

import ctypes.util
import os
import sys

PACKAGES = {"egl": "libegl1", "osmesa": "libosmesa6"}
"""Debian's packages of the libraries that MuJoCo draws with where there is no screen."""


def has_screen() -> bool:
    """Returns whether windows can be opened here."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def prepare_rendering(screen: bool) -> None:
    """Chooses the graphics libraries' back ends; to be called before an environment that uses them is imported."""
    os.environ.setdefault("SDL_NO_SIGNAL_HANDLERS", "1")  # pygame would swallow SIGTERM
    os.environ.setdefault("SDL_AUDIODRIVER", "dummy")  # Gymnasium before 1.4 opens the sound card for nothing
    if not screen:
        choose_mujoco_graphics()
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def choose_mujoco_graphics() -> None:
    """Chooses what MuJoCo draws with where there is no screen, if ``MUJOCO_GL`` doesn't: OSMesa if EGL isn't there."""
    if "MUJOCO_GL" not in os.environ:
        installed = {name: ctypes.util.find_library(name) is not None for name in ("EGL", "OSMesa")}
        os.environ["MUJOCO_GL"] = "osmesa" if installed["OSMesa"] and not installed["EGL"] else "egl"


def graphics_hint() -> str:
    """Says which of MuJoCo's graphics libraries may be missing, after the error of an import; often nothing."""
    chosen = os.environ.get("MUJOCO_GL")
    if chosen is None:
        return ""
    package = PACKAGES.get(chosen)
    missing = "" if package is None else f", whose library may be missing (apt-get install {package})"
    return f"; MUJOCO_GL is {chosen}{missing}"
