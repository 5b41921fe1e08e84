"""Commands that run in the process of the tests, where what they call can be watched and replaced."""

from typing import Any

import pytest

from lockstep.cli import main


def printed(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """What a command prints that ends well."""
    assert main([*map(str, words)]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *words: Any, code: int = 2) -> str:
    """What a command that ends with ``code`` says on standard error."""
    assert main([*map(str, words)]) == code
    return capsys.readouterr().err
