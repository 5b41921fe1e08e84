"""The compiled file of collectives in memory: how it is kept, what it says where something is missing or goes wrong."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from variants import variants

from lockstep.core.temporary import sweep_temporary

ROOT = Path(__file__).parents[3]
CHECKS = "tests/jax_engine/distributed/impatient_devices.py"

COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")


def python(*words, **environment):
    known = os.environ | {"XLA_FLAGS": "", "PYTHONPATH": str(ROOT / "src")} | environment
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=known, capture_output=True, text=True)


@needs_compiler
def test_what_goes_wrong_is_said_after_a_second():
    done = python("-m", "pytest", "-p", "no:xdist", CHECKS)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "5 passed" in done.stdout


WHY = "from lockstep.jax_engine.distributed import shared_memory; print(shared_memory.missing())"


@needs_compiler
def test_it_is_compiled_once_and_kept_in_the_cache(tmp_path):
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n"
    (kept,) = tmp_path.rglob("collectives-*")
    assert kept.suffix == ".so"
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="/no/such/compiler").stdout == "None\n"


def test_what_a_kill_leaves_of_the_compilation_is_swept(tmp_path, monkeypatch):
    compiler, base = tmp_path / "cc", tmp_path / "base"
    compiler.write_text("#!/bin/sh\nkill -9 $PPID\n")
    compiler.chmod(0o700)
    base.mkdir()
    done = python("-c", WHY, XDG_CACHE_HOME=str(tmp_path / "cache"), CC=str(compiler), TMPDIR=str(base))
    assert done.returncode == -signal.SIGKILL
    assert len(list(base.iterdir())) == 1
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    sweep_temporary()
    assert not list(base.iterdir())


@needs_compiler
@pytest.mark.parametrize("left", [0.5, 0], ids=["half", "nothing"])
def test_a_damaged_kept_file_is_made_again(tmp_path, left):
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n"
    (kept,) = tmp_path.rglob("collectives-*")
    whole = kept.read_bytes()
    kept.write_bytes(whole[: int(left * len(whole))])
    assert "can't compile" in python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="false").stdout
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="  ").stdout == "None\n"
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="/no/such/compiler").stdout == "None\n"


@pytest.mark.long
@needs_compiler
def test_a_kept_file_of_another_machine_is_made_again(tmp_path):
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n"
    (kept,) = tmp_path.rglob("collectives-*")
    kept.write_bytes(b"\x7fELF of another machine")
    kept = named_by_content(kept)
    assert "can't compile" in python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="false").stdout
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="  ").stdout == "None\n"
    assert len(set(tmp_path.rglob("collectives-*")) - {kept}) == 1


def named_by_content(library):
    """Rename a library as if it had been kept as it is now."""
    start = library.name.rpartition("-")[0]
    return library.rename(library.with_name(f"{start}-{hashlib.sha256(library.read_bytes()).hexdigest()[:16]}.so"))


AN_INTRUDERS = """
#include <stdio.h>
#include <stdlib.h>
__attribute__((constructor)) static void intrude(void) { puts("an intruder's code runs"); exit(0); }
"""


def give_away(path):
    """Make a file or directory another user's, or at least one that others may write."""
    try:
        os.chown(path, 65534, 65534)
    except PermissionError:
        path.chmod(0o777)


@needs_compiler
@pytest.mark.parametrize(
    "others", variants(["nothing", "the file", "its directory", "the cache"], ["nothing", "the file"])
)
def test_what_others_may_have_written_is_not_executed(tmp_path, others):
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n"
    (kept,) = tmp_path.rglob("collectives-*")
    (tmp_path / "intruder.c").write_text(AN_INTRUDERS)
    subprocess.run([COMPILER, "-shared", "-fPIC", str(tmp_path / "intruder.c"), "-o", str(kept)], check=True)
    kept = named_by_content(kept)
    places = {"nothing": None, "the file": kept, "its directory": kept.parent, "the cache": tmp_path / "lockstep"}
    if places[others] is not None:
        give_away(places[others])
    ended = python("-c", WHY, XDG_CACHE_HOME=str(tmp_path))
    assert ended.stdout == ("an intruder's code runs\n" if others == "nothing" else "None\n")
    assert ("isn't used, for others may write there" in ended.stderr) == (others in ("its directory", "the cache"))


@needs_compiler
def test_a_cache_behind_a_link_of_ones_own_is_used(tmp_path):
    (tmp_path / "scratch").mkdir(mode=0o700)
    (tmp_path / "lockstep").symlink_to(tmp_path / "scratch")
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n"
    assert list((tmp_path / "scratch").rglob("collectives-*.so"))


@needs_compiler
def test_without_a_place_to_keep_it_it_is_compiled_every_time(tmp_path):
    (tmp_path / "lockstep").write_text("a file where a directory should be")
    assert python("-c", WHY, XDG_CACHE_HOME=str(tmp_path)).stdout == "None\n"


NO_EXECUTION = """
import ctypes, sys
real = ctypes.CDLL
def load(name, *more, **others):
    if name and name.startswith(sys.argv[1]):
        raise OSError(f"{name}: failed to map segment from shared object")
    return real(name, *more, **others)
ctypes.CDLL = load
"""
"""Plays a file system mounted noexec, in the directory that is the argument."""


@needs_compiler
@pytest.mark.parametrize(("noexec", "usable"), [("scratch", True), ("cache", True), ("", False)])
def test_it_is_loaded_from_where_files_may_be_executed(tmp_path, noexec, usable):
    (tmp_path / "scratch").mkdir()
    places = {"TMPDIR": str(tmp_path / "scratch"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = python("-c", NO_EXECUTION + WHY, str(tmp_path / noexec), **places).stdout
    assert (said == "None\n") is usable
    assert usable or "failed to map segment" in said


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("/no/such/compiler", "/no/such/compiler"),
        ("false", "false can't compile shared_memory.c: no reason given"),
        ("true", "true can't compile shared_memory.c: no reason given"),
        ('cc "', "No closing quotation"),
    ],
)
def test_why_it_is_missing_is_said_in_one_line(tmp_path, compiler, reason):
    said = python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC=compiler).stdout
    assert reason in said
    assert said.count("\n") == 1


def test_a_machine_without_a_compiler(tmp_path):
    said = python("-c", WHY, XDG_CACHE_HOME=str(tmp_path), CC="", PATH=str(tmp_path)).stdout
    assert said == "there is no C compiler (cc, gcc, clang; CC isn't set)\n"
