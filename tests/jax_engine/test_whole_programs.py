"""Compiled programs are whole in JAX's cache, and torn ones are replaced."""

import errno
import os
import time
import warnings
from pathlib import Path

import jax
import pytest
from jax import numpy as jnp
from jax._src import compilation_cache
from jax._src.lru_cache import LRUCache

from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed import processes
from lockstep.jax_engine.setup import whole_programs

FOLDER = "jax_compilation_cache_dir"


@pytest.fixture
def compiled(tmp_path):
    """Compiles a program that may be in a cache of this test, and returns what the program gives."""
    processes.set_up_jax(threads=1, platform="cpu", simulate_devices=8, topology=Topology())
    before = jax.config.values[FOLDER]

    def again():
        compilation_cache.reset_cache()
        jax.clear_caches()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return jax.jit(lambda x: jnp.sin(x) @ x + 3)(jnp.ones(8)).item()

    jax.config.update(FOLDER, str(tmp_path))
    try:
        yield again
    finally:
        jax.config.update(FOLDER, before)
        compilation_cache.reset_cache()


@pytest.mark.parametrize("left", [0, 0.5, None], ids=["nothing", "half", "zeros"])
def test_a_torn_program_is_replaced_without_a_word(compiled, tmp_path, left):
    given, contents = compiled(), {file: file.read_bytes() for file in tmp_path.glob("*-cache")}
    assert contents
    for file, content in contents.items():
        file.write_bytes(bytes(len(content)) if left is None else content[: int(left * len(content))])
    assert compiled() == given
    decompress = compilation_cache.decompress_executable
    assert all(decompress(file.read_bytes()) for file in contents)
    written = {file: file.stat().st_mtime_ns for file in contents}
    assert compiled() == given
    assert {file: file.stat().st_mtime_ns for file in contents} == written  # read, not compiled


def test_a_program_that_cant_be_read_for_another_reason_stays(compiled, tmp_path):
    compiled()
    kept = next(tmp_path.glob("*-cache"))
    assert not whole_programs.remove_torn(kept, compilation_cache.decompress_executable)
    assert kept.exists()
    assert not whole_programs.remove_torn(tmp_path / "gone-cache", compilation_cache.decompress_executable)


def test_a_torn_program_that_cant_be_removed_is_warned_of(compiled, tmp_path, monkeypatch):
    compiled()
    for file in tmp_path.glob("*-cache"):
        file.write_bytes(b"torn")

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    with pytest.raises(UserWarning, match="Error reading persistent compilation cache entry"):
        compiled()


def test_nothing_is_left_of_a_program_for_which_there_is_no_room(compiled, tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache = LRUCache(str(tmp_path / "cache"), max_size=-1)
    with monkeypatch.context() as patch:
        patch.setattr(whole_programs, "sync_path", full)
        with pytest.raises(OSError, match="No space left"):
            cache.put("program", b"whole")
    assert list((tmp_path / "cache").iterdir()) == []
    cache.put("program", b"whole")
    cache.put("program", b"another")  # as in JAX, the first one stays
    assert cache.get("program") == b"whole"


def test_a_process_that_is_killed_while_it_writes_leaves_a_draft_that_later_ones_remove(
    compiled, tmp_path, monkeypatch
):
    class Killed(BaseException):
        pass

    def killed(*_, **__):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", killed)
        patch.setattr(Path, "replace", killed)
        with pytest.raises(Killed):
            LRUCache(str(tmp_path), max_size=-1).put("program", b"whole")
    (draft,) = tmp_path.iterdir()
    assert LRUCache(str(tmp_path), max_size=-1).get("program") is None
    whole_programs.sweep_drafts.cache_clear()
    LRUCache(str(tmp_path), max_size=-1).put("program", b"whole")
    assert draft.exists()  # its process may still write it
    long_ago = time.time() - 2 * whole_programs.DRAFT_SECONDS
    os.utime(draft, (long_ago, long_ago))
    whole_programs.sweep_drafts.cache_clear()
    LRUCache(str(tmp_path), max_size=-1).put("another", b"whole")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["another-cache", "program-cache"]
