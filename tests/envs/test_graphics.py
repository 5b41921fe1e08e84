"""What MuJoCo draws with where there is no screen, and what is said if that isn't there."""

import ctypes.util

import pytest
from command_line import lockstep

from lockstep.envs.graphics import choose_mujoco_graphics, graphics_hint, has_screen, prepare_rendering


@pytest.fixture
def libraries(monkeypatch):
    """The graphics libraries of this machine."""
    found = set()
    monkeypatch.setattr(ctypes.util, "find_library", lambda name: f"lib{name}.so" if name in found else None)
    monkeypatch.setenv("MUJOCO_GL", "")  # which restores it after the test
    monkeypatch.delenv("MUJOCO_GL")
    return found


@pytest.mark.parametrize(
    ("installed", "chosen"), [((), "egl"), (("EGL",), "egl"), (("OSMesa",), "osmesa"), (("EGL", "OSMesa"), "egl")]
)
def test_mujoco_draws_with_what_is_installed(libraries, monkeypatch, installed, chosen):
    libraries.update(installed)
    choose_mujoco_graphics()
    assert graphics_hint().startswith(f"; MUJOCO_GL is {chosen}, whose library may be missing (apt-get install lib")
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    choose_mujoco_graphics()
    assert graphics_hint() == "; MUJOCO_GL is glfw"


def test_with_a_screen_nothing_is_chosen(libraries, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":0")
    prepare_rendering(has_screen())
    assert graphics_hint() == ""
    prepare_rendering(screen=False)
    assert "egl" in graphics_hint()


def test_a_library_that_is_missing_is_one_line(tmp_path):
    """As PyOpenGL's error is, in an image without EGL, when a video is wanted."""
    ended = lockstep("train", "HalfCheetah-v5", cwd=tmp_path, MUJOCO_GL="none of these")
    assert ended.code == 2
    assert ended.stderr.splitlines() == [
        "lockstep: error: env.id: HalfCheetah-v5: MuJoCo can't be imported: RuntimeError: invalid value for "
        "environment variable MUJOCO_GL: none of these; MUJOCO_GL is none of these"
    ]
    assert not (tmp_path / "runs").exists()
