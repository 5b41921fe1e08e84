"""Checks as the server of ranks runs them in a child: each fails in its way."""

import os
import signal
import time

from lockstep.core.errors import RunError


def fine(value):
    assert value == 3


def user_error(value):
    raise ValueError(f"value: {value} is above 3; use 3")


def run_error(value):
    raise RunError("the environment hung")


def os_error(value):
    raise OSError("no such thing")


def bug(value):
    return 1 / value


def crash(value):
    os.kill(os.getpid(), signal.SIGSEGV)


def leaves(value):
    os._exit(value)


def leaves_a_child(value):
    if os.fork() == 0:
        time.sleep(3600)
