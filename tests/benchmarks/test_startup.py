"""What the measurement of start-up writes down, and that it doesn't outlast its limit."""

import signal
import subprocess
import sys

import pytest

from benchmarks import startup

TREE = startup.ROOT


def section(seconds, commit):
    return startup.report({(TREE, startup.of_ranks(1)): [seconds]}, [TREE], [1], commit)


def test_a_run_that_logs_nothing_is_ended(tmp_path, monkeypatch):
    started = []

    class Silent(subprocess.Popen):
        def __init__(self, *_, **__):
            super().__init__([sys.executable, "-c", "import time; time.sleep(20)"])
            started.append(self)

    monkeypatch.setattr(startup.subprocess, "Popen", Silent)
    monkeypatch.setattr(startup, "LIMIT", 0.0)
    with pytest.raises(RuntimeError, match="no iteration was logged"):
        startup.seconds_to_first_iteration(TREE, "X-v0", tmp_path)
    assert [process.returncode for process in started] == [-signal.SIGKILL]


def test_each_measurement_is_a_section_of_its_own_and_what_is_there_stays(tmp_path):
    file = tmp_path / "startup.md"
    startup.append(file, section(2.0, "aaa"))
    file.write_text(file.read_text() + "\n2026-11-26, by hand.\n")
    before = file.read_text()
    startup.append(file, startup.report_of_runs({(TREE, "X-v0"): [1.0]}, [TREE], ["X-v0"], "bbb"))
    startup.append(file, section(3.0, "ccc"))
    text = file.read_text()
    assert text.startswith(before)
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert headings[0] == "# Start-up"
    assert [line.split(",")[0] for line in headings[1:]] == ["## Ranks", "## Other runs", "## Ranks"]
    assert [line.split(", ")[-1] for line in headings[1:]] == ["aaa", "bbb", "ccc"]
    assert "| `X-v0` | 1.00 (1.00 to 1.00) |" in text


def test_the_kept_file_would_stay_as_it_is(tmp_path):
    file = tmp_path / "startup.md"
    kept = (TREE / "benchmarks/results/startup.md").read_text()
    file.write_text(kept)
    startup.append(file, section(2.0, "aaa"))
    assert file.read_text().startswith(kept.rstrip())
