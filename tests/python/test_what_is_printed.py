"""Of what a command prints to standard error its caller keeps what says why it fails, and no more."""

import sys
import tracemalloc

import pytest

from lockstep.core.errors import RunError
from lockstep.core.process import ERROR_PREFIX
from lockstep.python import command

PRINTS = "import sys\nfor n in range(40_000): print(f'{n:0100}', file=sys.stderr)\n"


@pytest.fixture
def ended(monkeypatch):
    """Why a command failed that is a Python program, and how many bytes its caller took for that at most."""
    shown = []
    monkeypatch.setattr(command, "say", lambda line, *_: shown.append(len(line)) if "last" in line else None)

    def end(code):
        words = [sys.executable, "-c", code]
        monkeypatch.setattr(command, "command_that_ends_with_us", lambda *_, **__: words)
        tracemalloc.start()
        try:
            with pytest.raises(RunError) as failure:
                command.run_command([], {}, quiet=True)
            return str(failure.value), tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return end


def test_a_command_that_prints_much_fills_no_memory(ended):
    why, most = ended(PRINTS + "print('the last word', file=sys.stderr); sys.exit(1)")
    assert why.endswith("39999\nthe last word")
    assert len(why) == 500
    assert most < 2_000_000


def test_its_error_is_kept_whatever_follows(ended):
    lines = f"print('{ERROR_PREFIX}first', file=sys.stderr); print('{ERROR_PREFIX}second', file=sys.stderr)\n"
    why, _ = ended(f"import sys\n{lines}{PRINTS}sys.exit(1)")
    assert why == "second"
