"""The user's code has a working directory of its own."""

import os
from pathlib import Path

import pytest

from lockstep.core.user_code.working_directory import keep_working_directory


def test_the_users_code_goes_on_where_it_was_and_we_stay(tmp_path, monkeypatch):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(here)
    with keep_working_directory():
        with keep_working_directory():
            os.chdir(there)
        assert Path.cwd() == there
    assert Path.cwd() == here
    with pytest.raises(FileNotFoundError), keep_working_directory():
        os.chdir("nowhere")
    assert Path.cwd() == here
    with keep_working_directory():
        assert Path.cwd() == there
    with keep_working_directory():
        there.rmdir()
    assert Path.cwd() == here
    with keep_working_directory():
        assert Path.cwd() == here
