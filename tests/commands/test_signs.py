"""Terminals that lack a sign which a command prints."""

import os
import subprocess
import sys

import pytest


def printed(*words: str, encoding: str) -> bytes:
    """Standard output of a command that ends well."""
    command = [sys.executable, "-m", "lockstep", *words]
    given = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(command, env=given, check=True, capture_output=True, timeout=300).stdout


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_sign_that_a_terminal_lacks_is_shown_by_its_number(encoding):
    whole = printed("doctor", "--help", encoding="utf-8").decode()
    assert "…" in whole
    shown = printed("doctor", "--help", encoding=encoding)
    assert b"\\u2026" in shown
    assert shown.decode(encoding) == whole.encode(encoding, "backslashreplace").decode(encoding)


def test_who_asks_for_another_way_gets_it():
    assert b"?" in printed("doctor", "--help", encoding="ascii:replace")


def test_a_terminal_that_has_all_signs_shows_them():
    assert b"\\u2026" not in printed("doctor", "--help", encoding="utf-8")
