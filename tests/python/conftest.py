"""Processes that ``lockstep.train`` starts are forked here from one that has imported everything, for they are many."""

import subprocess
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest
from command_server import from_the_beginning
from forked_command import FORKS, ForkedCall, Server

from lockstep.core.topology import without_launcher
from lockstep.python import command

THEIR_OWN = "from lockstep.cli import main; "
"""Stands in the code of a process that ``lockstep.train`` starts; its words follow."""


_servers: dict[tuple[tuple[str, str], ...], Server] = {}


def _server(variables: Mapping[str, str]) -> Server:
    """The server of processes with such variables: Python's path, which they have of this process, may change."""
    beginning = tuple(sorted(from_the_beginning(variables).items()))
    if beginning not in _servers:
        _servers[beginning] = Server({**without_launcher(), **dict(beginning)})
    return _servers[beginning]


@pytest.fixture(autouse=True)
def forked_calls(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks what is as good as started; ``@pytest.mark.started`` starts it, as it is for users."""
    if not FORKS or request.node.get_closest_marker("started"):
        return

    def forked(args: Any, env: Any = None, stdout: Any = None, **options: Any) -> Any:
        ours = isinstance(args, list) and args[:3] == [sys.executable, "-P", "-c"] and THEIR_OWN in args[3]
        if ours and stdout in (subprocess.PIPE, subprocess.DEVNULL):
            return ForkedCall(_server(env), args[4:], env, stdout, options["pass_fds"][0])
        return subprocess.Popen(args, env=env, stdout=stdout, **options)

    names = types.SimpleNamespace(Popen=forked, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(command, "subprocess", names)
