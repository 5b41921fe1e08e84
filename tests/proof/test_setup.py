"""How the process that describes a set-up is told the config, and what it may print."""

import sys
from types import SimpleNamespace

import pytest

from lockstep.config.run import Config
from lockstep.proof import setup
from lockstep.proof.setup import setup_of


@pytest.fixture
def config():
    """A config with a secret, which is larger than an argument may be."""
    kwargs = {"token": "hunter2", "path": "caf\xe9", "table": list(range(50_000))}
    return Config.model_validate({"env": {"id": "CartPole-v1", "kwargs": kwargs}, "num_envs": 8, "num_shards": 8})


def test_the_config_is_no_argument_of_the_process(config, monkeypatch, capsys):
    asked = []

    def run(command, **options):
        asked.append((command, options["input"]))
        return SimpleNamespace(returncode=0, stdout="said\n", stderr="")

    monkeypatch.setattr(setup.subprocess, "run", run)
    assert setup_of(config, 2, 1) == "said"
    command, text = asked[0]
    assert sum(map(len, command)) < 500
    assert "hunter2" not in " ".join(command)
    monkeypatch.setattr(setup, "setup_lines", lambda config, *sizes: [f"{config.env.kwargs['path']} {sizes}"])
    assert setup._main(text, 2, 1) == 0
    assert capsys.readouterr().out == "caf\xe9 (2, 1)\n"


def test_what_the_process_prints_may_be_any_bytes(config, tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\ncat > /dev/null\nprintf 'libworld \\377\\nrank 0\\n'\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    assert setup_of(config, 2, 1) == "libworld \N{REPLACEMENT CHARACTER}\nrank 0"
