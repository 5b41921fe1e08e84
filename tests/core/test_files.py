"""Files that are there whole or not at all, and JSON that any reader takes."""

import contextlib
import errno
import json
import math
import os

import numpy as np
import pytest

from lockstep.core.files import UnwrittenError, as_json, draft_of, sync_path, write_json


def strictly(text):
    """Reads JSON as other programs do, for which NaN and Infinity are no words."""

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_a_number_that_is_not_finite_is_null(tmp_path):
    value = {"a": math.nan, "b": [math.inf, {"c": -math.inf}, 1.5], "d": (2, np.float64("nan")), "e": None, "f": "NaN"}
    plain = {"a": None, "b": [None, {"c": None}, 1.5], "d": [2, None], "e": None, "f": "NaN"}
    write_json(tmp_path / "a.json", value)
    assert strictly((tmp_path / "a.json").read_text()) == strictly(as_json(value)) == plain


def test_finite_numbers_are_written_as_they_always_were(tmp_path):
    value = {"a": [0.1, 1e300, -3], "b": {"c": True, "d": "ä"}, "e": ()}
    write_json(tmp_path / "a.json", value)
    assert (tmp_path / "a.json").read_text() == json.dumps(value, indent=2) + "\n"
    assert as_json(value) == json.dumps(value)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO])
@pytest.mark.parametrize("folder", [True, False])
def test_only_a_directory_that_cannot_be_synced_at_all_is_let_be(tmp_path, monkeypatch, code, folder):
    """Of a file, and of a disk that fails, it is an error: what was written may be lost."""
    path = tmp_path if folder else tmp_path / "a.txt"
    (tmp_path / "a.txt").touch()
    fails, synced = True, []

    def fsync(descriptor):
        synced.append(os.path.samestat(os.fstat(descriptor), path.stat()))
        if fails:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    with contextlib.nullcontext() if folder and code != errno.EIO else pytest.raises(OSError, match=os.strerror(code)):
        sync_path(path)
    fails = False
    sync_path(path)
    assert synced == [True, True]


def test_a_draft_takes_the_files_place_when_it_is_whole(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("before")

    def fail():
        with draft_of(file) as draft:
            draft.write_text("half")
            raise RuntimeError("the disk is full")

    with pytest.raises(RuntimeError, match="full"):
        fail()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "before")]
    with draft_of(file) as draft:
        assert draft.suffix == ".txt"
        draft.write_text("whole")
        assert file.read_text() == "before"
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "whole")]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "{file} can't be written: the disk is full"),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "{file} can't be written: " + os.strerror(errno.EDQUOT)),
        (OSError("encoder error -2"), "encoder error -2"),
        (FileNotFoundError(errno.ENOENT, "Gone", "font.ttf"), "[Errno 2] Gone: 'font.ttf'"),
    ],
)
def test_an_error_of_a_draft_names_the_file_and_that_of_another_file_is_as_it_was(tmp_path, error, said):
    def fail():
        with draft_of(tmp_path / "a.txt"):
            raise error

    with pytest.raises(OSError, match=r".") as caught:
        fail()
    assert str(caught.value) == said.format(file=tmp_path / "a.txt")
    assert isinstance(caught.value, UnwrittenError) == ("{file}" in said)


def test_a_draft_that_cannot_be_made_names_the_file(tmp_path):
    def fail():
        with draft_of(tmp_path / "none" / "a.txt") as draft:
            draft.write_text("whole")

    with pytest.raises(UnwrittenError) as caught:
        fail()
    assert str(caught.value) == f"{tmp_path / 'none' / 'a.txt'} can't be written: {os.strerror(errno.ENOENT)}"
