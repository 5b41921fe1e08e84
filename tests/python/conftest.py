"""Processes that ``lockstep.train`` starts are forked here from one that has imported everything, for they are many."""

import os
import subprocess
import sys
import types
from typing import Any

import pytest
from forked_command import FORKS, ForkedCall, Server

from lockstep.core.topology import without_launcher
from lockstep.python import command

THEIR_OWN = "from lockstep.cli import main; sys.exit(main())"
"""The end of the code of a process that ``lockstep.train`` starts; its words follow."""


@pytest.fixture(scope="session")
def call_server() -> Server:
    """Has the modules where a process that ``lockstep.train`` starts finds them."""
    return Server({**without_launcher(), "PYTHONPATH": os.pathsep.join(command._path())})


@pytest.fixture(autouse=True)
def forked_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks what is as good as started; ``@pytest.mark.started`` starts it, as it is for users."""
    if not FORKS or request.node.get_closest_marker("started"):
        return
    server = request.getfixturevalue("call_server")

    def forked(args: Any, env: Any = None, stdout: Any = None, **options: Any) -> Any:
        ours = isinstance(args, list) and args[:3] == [sys.executable, "-P", "-c"] and args[3].endswith(THEIR_OWN)
        if ours and stdout in (subprocess.PIPE, subprocess.DEVNULL) and server.can_fork(env):
            return ForkedCall(server, args[4:], env, stdout)
        return subprocess.Popen(args, env=env, stdout=stdout, **options)

    names = types.SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(command, "subprocess", names)
