"""Terminals that lack a sign which a command prints."""

import io
import os
import subprocess
import sys

import pytest

from lockstep import cli


def printed(*words: str, encoding: str = "", **variables: str) -> bytes:
    """Standard output of a command that ends well."""
    command = [sys.executable, "-m", "lockstep", *words]
    given = {**os.environ, **variables, "PYTHONIOENCODING": encoding}  # an empty one is none
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


def test_the_plain_c_locale_is_such_a_terminal():
    shown = printed("doctor", "--help", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert b"\\u2026" in shown


@pytest.mark.parametrize("errors", ["strict", "replace"])
def test_a_caller_keeps_its_own_standard_output(monkeypatch, errors):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors=errors)
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert out.errors == errors
    out.flush()
    assert (b"\\u2026" in out.buffer.getvalue()) == (errors == "strict")


def test_what_is_closed_is_left_alone(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    out.detach()
    monkeypatch.setattr(sys, "stdout", out)
    assert cli.main(["nothing"]) == 2
