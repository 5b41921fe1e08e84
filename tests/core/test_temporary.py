"""Temporary directories of killed makers: removed by the next one, whatever the kill left of them."""

import fcntl
import os
import platform
import tempfile
import time

import pytest

from lockstep.core.temporary import hold, temporary_directory


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def begun(base, name, seconds, held=False):
    """A directory that a killed maker had begun so long ago."""
    directory = base / f".lockstep-new-{name}"
    directory.mkdir()
    if held:
        (directory / ".held").touch()
    age(directory, seconds)
    return directory


def test_what_was_only_begun_is_removed_after_an_hour(base):
    gone = [begun(base, "empty", 3700.0), begun(base, "held-once", 3700.0, held=True)]
    young, alive = begun(base, "young", 60.0), begun(base, "alive", 3700.0, held=True)
    with (alive / ".held").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        age(alive, 3700.0)
        with temporary_directory():
            pass
    assert not any(directory.exists() for directory in gone)
    assert {path.name for path in base.iterdir()} == {young.name, alive.name}


def test_a_file_or_a_link_of_such_a_name_is_left_alone(base, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (base / ".lockstep-new-link").symlink_to(elsewhere)
    (base / ".lockstep-new-file").touch()
    os.utime(base / ".lockstep-new-file", (0.0, 0.0))
    os.utime(elsewhere, (0.0, 0.0))
    with temporary_directory():
        pass
    assert {path.name for path in base.iterdir()} == {"elsewhere", ".lockstep-new-link", ".lockstep-new-file"}


def test_within_a_directory_that_hosts_share_only_ones_of_this_host_are_removed(base, tmp_path):
    shared = tmp_path / "shared"
    names = {name: shared / f"lockstep-{name}-stale" for name in (platform.node(), "another-host")}
    for directory in names.values():
        directory.mkdir(parents=True)
        (directory / ".held").touch()
    with temporary_directory(within=shared) as made:
        assert made.parent == shared
    assert list(shared.iterdir()) == [names["another-host"]]


def test_what_is_held_stays_and_goes_when_its_holder_has_gone(base):
    directory = base / "lockstep-of-several-processes"
    directory.mkdir()
    with hold(directory):
        with temporary_directory():
            pass
        assert directory.exists()
    with temporary_directory():
        pass
    assert not directory.exists()
