"""Places of this user alone, and users of whom nobody knows a home."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import NoReturn

import pytest

from lockstep.core.private import home_place, user_cache


def nobody(_uid: int) -> NoReturn:
    raise KeyError("getpwuid(): uid not found")


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A container of a user that it doesn't list, without ``HOME``, in a directory of that user's."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_user_without_a_home_has_no_cache(no_home):
    _, usable = user_cache("jax/programs")
    assert not usable
    assert not list(no_home.iterdir())


def test_a_variable_gives_that_user_one(no_home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(no_home / "cache"))
    assert user_cache("jax/programs") == (no_home / "cache/lockstep/jax/programs", True)


def test_at_home_it_lies_in_the_folder_of_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache("jax") == (tmp_path / ".cache/lockstep/jax", True)
    assert home_place("XDG_CACHE_HOME", ".cache") == tmp_path / ".cache"


@pytest.mark.parametrize("home", ["", "home", "./home"])
def test_a_home_that_is_no_absolute_path_is_none(no_home, monkeypatch, home):
    monkeypatch.setenv("HOME", home)
    assert home_place("XDG_CACHE_HOME", ".cache") is None
    _, usable = user_cache("jax")
    assert not usable
    assert not list(no_home.iterdir())


def test_a_variable_that_is_no_absolute_path_is_passed_over(no_home, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert home_place("XDG_CACHE_HOME", ".cache") is None
    monkeypatch.setenv("HOME", str(no_home))
    assert home_place("XDG_CACHE_HOME", ".cache") == no_home / ".cache"
