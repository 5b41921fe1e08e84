"""Temporary directories of killed makers: removed by the next one, whatever the kill left of them."""

import fcntl
import os
import platform
import tempfile
import time

import pytest

from lockstep.core.temporary import hold, of_this_host, temporary_directory
from lockstep.launch.ray import cluster

NEW = f".lockstep-new-{of_this_host()}"


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def age(path, seconds):
    then = time.time() - seconds
    os.utime(path, (then, then))


def begun(base, name, seconds, held=False):
    """A directory that a killed maker had begun so long ago."""
    directory = base / f"{NEW}{name}"
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
    elsewhere, link, file = (base / name for name in ("elsewhere", *(f"{NEW}{what}" for what in ("link", "file"))))
    elsewhere.mkdir()
    link.symlink_to(elsewhere)
    file.touch()
    os.utime(file, (0.0, 0.0))
    os.utime(elsewhere, (0.0, 0.0))
    with temporary_directory():
        pass
    assert set(base.iterdir()) == {elsewhere, link, file}


def test_what_another_user_made_is_left_alone(base, monkeypatch):
    """Also where this one could remove it."""
    stale, young = base / f"lockstep-{of_this_host()}stale", begun(base, "begun", 3700.0)
    stale.mkdir()
    (stale / ".held").touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: os.stat(base).st_uid + 1)
        with temporary_directory():
            pass
    assert set(base.iterdir()) == {stale, young}
    with temporary_directory():
        pass
    assert not list(base.iterdir())


@pytest.mark.parametrize("within", [True, False])
def test_where_hosts_share_a_directory_only_ones_of_this_host_are_removed(base, tmp_path, monkeypatch, within):
    """Of temporary files as well, and where one host doesn't see the other's locks."""
    shared = tmp_path / "shared"
    if not within:
        monkeypatch.setattr(tempfile, "tempdir", str(shared))
    names = [f"lockstep-{of_this_host()}stale", "lockstep-another-host-stale", "lockstep-another-host-2.it-stale"]
    for directory in (shared / name for name in names):
        directory.mkdir(parents=True)
        (directory / ".held").touch()
    with temporary_directory(within=shared if within else None) as made:
        assert made.parent == shared
        assert made.name.startswith(f"lockstep-{of_this_host()}")
    assert {path.name for path in shared.iterdir()} == set(names[1:])


@pytest.mark.parametrize(
    ("others", "ours"),
    [
        ("a-1", "a"),
        ("hpc-001.cluster", "hpc"),
        ("node-7.east", "node-7.west"),
        ("first-cluster-of-many-hosts-0017", "second-cluster-of-many-hosts-0017"),
    ],
)
def test_hosts_whose_names_begin_or_end_alike_leave_each_others_alone(base, monkeypatch, others, ours):
    """What one holds may look free to the other, where locks are each host's own."""
    monkeypatch.setattr(platform, "node", lambda: others)
    directory = base / f"lockstep-{of_this_host()}stale"
    directory.mkdir()
    (directory / ".held").touch()
    monkeypatch.setattr(platform, "node", lambda: ours)
    with temporary_directory():
        assert directory.exists()
    monkeypatch.setattr(platform, "node", lambda: others)
    with temporary_directory():
        assert not directory.exists()


@pytest.mark.parametrize("host", ["node-7", "a-cluster-of-many-hosts-with-long-names-0017.it", "x" * 64])
def test_a_directory_of_a_host_with_a_long_name_has_room_for_rays_sockets(monkeypatch, host):
    monkeypatch.setattr(platform, "node", lambda: host)
    assert len(f"/tmp/lockstep-{of_this_host()}{'x' * 8}") <= cluster._LONGEST_PATH


def test_what_is_held_stays_and_goes_when_its_holder_has_gone(base):
    directory = base / f"lockstep-{of_this_host()}of-several-processes"
    directory.mkdir()
    with hold(directory):
        with temporary_directory():
            pass
        assert directory.exists()
    with temporary_directory():
        pass
    assert not directory.exists()
