"""Runs a rank of the script with the doctor inside: ``python -m lockstep.doctor.watch.watched ASSIGNMENT SCRIPT ARGS``.

The assignment is a list in JSON: the side store's directory, how many of the first steps are compared, and the interval
of the steps compared later.

The script runs as ``__main__``, as ``python`` would run it. PyTorch isn't imported before the script imports it, so
that environment variables which the script sets first take effect.
"""

from __future__ import annotations

import atexit
import builtins
import importlib.machinery
import importlib.util
import json
import os
import pkgutil
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from lockstep.core.process import EXIT_INTERRUPTED, end_with_parent
from lockstep.core.topology import from_environment
from lockstep.doctor.watch.schedule import Schedule
from lockstep.doctor.watch.side_store import SideWriter
from lockstep.doctor.watch.watcher import Watcher

MODULE = "lockstep.doctor.watch.watched"


class AfterImport:
    """An import finder that finds one module as Python does, and calls back once it is imported."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._looking = False

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the module's spec, whose loader calls back; None for every other module.

        Libraries that only want to know whether the module is installed ask for its spec, too.
        """
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_tell(module: ModuleType) -> None:
                execute(module)
                if self in sys.meta_path:
                    sys.meta_path.remove(self)
                    self._then()

            spec.loader.exec_module = execute_and_tell
        return spec


class MainLoader(importlib.machinery.SourceFileLoader):
    """Loads a script as ``python`` does, without a bytecode cache."""

    def get_code(self, fullname: str) -> CodeType:
        """Compiles the script's source."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _own_part(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback from the script's first frame on, without the doctor's frames before it."""
    ours = (__file__, runpy.__file__, "<frozen ")
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return trace


def run_as_main(words: Sequence[str]) -> dict[str, Any]:
    """Runs a program in this process as ``python WORDS`` would.

    Returns:
        The ``__main__`` namespace, which keeps the script's objects alive for a last look.
    """
    takes_place = not sys.flags.safe_path  # else nothing comes before the user's own places
    if words[0] == "-m":
        sys.argv = list(words[1:])
        if takes_place:
            sys.path[0] = os.getcwd()
        return runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    sys.argv = list(words)
    if takes_place and not Path(words[0]).is_dir():
        sys.path[0] = str(Path(words[0]).resolve().parent)
    if _is_text(words[0]):
        return _run_file(os.path.abspath(words[0]))
    return runpy.run_path(words[0], run_name="__main__")


def _is_text(path: str) -> bool:
    """Returns whether a path is Python source, whatever its name: not a directory, an archive or compiled code."""
    if pkgutil.get_importer(path) is not None or path.endswith(".pyc"):
        return False
    if not os.path.isfile(path):  # a pipe can be read only once
        return True
    with open(path, "rb") as file:
        return file.read(len(importlib.util.MAGIC_NUMBER)) != importlib.util.MAGIC_NUMBER


def _run_file(path: str) -> dict[str, Any]:
    """Runs a source file as ``__main__``; as in ``python``, ``__file__`` is absolute even if ``sys.argv[0]`` isn't."""
    loader = MainLoader("__main__", path)
    module = ModuleType("__main__")
    vars(module).update(__file__=path, __cached__=None, __loader__=loader, __builtins__=builtins)
    ours, sys.modules["__main__"] = sys.modules["__main__"], module
    try:
        loader.exec_module(module)
    finally:
        sys.modules["__main__"] = ours
    return vars(module)


def _run(watcher: Watcher, words: Sequence[str]) -> int:
    """Runs the script and returns its exit status; prints its traceback if it raised.

    Unless it did, its end is noted once Python has told executors to stop and has waited for the threads that are left,
    before the functions that the script has registered at :mod:`atexit`.
    """
    try:
        kept = run_as_main(words)
    except SystemExit as error:
        atexit.register(watcher.end, None)
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        error.__traceback__ = _own_part(error.__traceback__)
        watcher.end(error)
        sys.excepthook(type(error), error, error.__traceback__)  # PyTorch's hook names the rank
        return EXIT_INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
    atexit.register(_end, watcher, kept)
    return 0


def _end(watcher: Watcher, kept: dict[str, Any]) -> None:
    """Takes the last look, for which the script's objects were ``kept`` alive."""
    watcher.end(None)


def main() -> None:
    """Runs a watched rank; the entry point of this module."""
    directory, first, interval = json.loads(sys.argv[1])
    end_with_parent()
    rank = from_environment(met=True).rank  # the script itself meets; only its rank is needed
    watcher = Watcher(SideWriter(Path(directory), rank), Schedule(first, interval))
    watcher.start()
    if "torch" in sys.modules:  # by sitecustomize, a .pth file, a coverage tool
        watcher.watch_torch()
    else:
        sys.meta_path.insert(0, AfterImport("torch", watcher.watch_torch))
    sys.exit(_run(watcher, sys.argv[2:]))


if __name__ == "__main__":
    main()
