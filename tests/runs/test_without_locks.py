"""A file system that keeps no locks is said to be one: a run there could have two writers."""

import errno
import fcntl
import os

import pytest

from lockstep.config.run import Config
from lockstep.runs.directory import RunDirectory
from lockstep.runs.making import create_run


@pytest.fixture
def refuse(monkeypatch):
    def with_number(number):
        def lockf(*_):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "lockf", lockf)

    return with_number


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_place_without_locks_is_named(tmp_path, refuse, number):
    refuse(number)
    where = f"run {tmp_path / 'run'} lies where there are no file locks ({os.strerror(number)}); "
    with pytest.raises(ValueError) as caught:
        create_run(str(tmp_path), "run", Config())
    assert str(caught.value) == where + "mount Lustre with flock, or use another --runs-dir"
    assert not (tmp_path / "run" / "config.json").exists()
    with pytest.raises(ValueError, match="mount Lustre with flock"):
        RunDirectory(tmp_path / "run").lock()


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_what_else_goes_wrong_is_not_called_so(tmp_path, refuse, number):
    refuse(number)
    with pytest.raises(ValueError, match=r"^run \S+ can't be written \(.*\); copy it to where you may write"):
        RunDirectory(tmp_path).lock()


def test_a_lock_that_another_has_is_none_of_these(tmp_path, refuse):
    first = RunDirectory(tmp_path)
    first.lock()
    with pytest.raises(ValueError, match="is being written by another process"):
        RunDirectory(tmp_path).lock()
    first.unlock()
