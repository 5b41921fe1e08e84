"""Which processes keep the programs that they compile."""

import types

import jax
import pytest

from lockstep.core.topology import Topology
from lockstep.jax_engine.distributed import programs


class Store(dict):
    """The coordinator's store."""

    def key_value_set(self, name, text):
        self[name] = text

    def blocking_key_value_get(self, name, milliseconds):
        assert milliseconds == 5000
        if name not in self:
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED: nobody said")
        return self[name]


@pytest.fixture
def keeps(monkeypatch):
    """Whether each process of a run keeps programs, by the places of processes and of their caches."""
    written = []
    monkeypatch.setattr(programs, "_write_as_the_first", lambda: written.append(True))

    def of(platform, *found, size=4, here=2, store=None):
        store = Store() if store is None else store
        kept = []
        for rank, cache in found:
            settings = types.SimpleNamespace(
                values={"jax_compilation_cache_dir": None if cache is None else str(cache)}
            )
            monkeypatch.setattr(programs, "jax", types.SimpleNamespace(config=settings, errors=jax.errors))
            written.clear()
            programs.keep_programs(platform, Topology(rank, size, rank % here, here, launched=True), store, 5.0)
            kept.append(bool(written))
        return kept

    return of


def test_on_accelerators_the_first_process_of_a_host_with_a_cache_of_its_own_keeps_them(keeps, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    assert keeps("cuda", (0, first), (1, first), (2, second), (3, second)) == [False, False, True, False]
    assert keeps("tpu", (0, first), (1, second), size=2, here=1) == [False, True]


def test_a_cache_that_hosts_share_is_written_by_the_first_process_alone(keeps, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "mounted").symlink_to(tmp_path / "cache")
    assert keeps("cuda", (0, tmp_path / "cache"), (2, tmp_path / "mounted")) == [False, False]


def test_on_cpus_every_process_keeps_them_and_on_one_host_of_gpus_the_first(keeps, tmp_path):
    assert keeps("cpu", (0, tmp_path), (1, tmp_path), size=2) == [True, True]
    assert keeps("cuda", (0, tmp_path / "one"), (1, tmp_path / "other"), size=2, store=None) == [False, False]


def test_where_no_cache_can_be_named_or_nobody_says_the_first_ones_none_is_written(keeps, tmp_path):
    (tmp_path / "file").write_text("")
    for cache in (None, "gs://bucket/cache", tmp_path / "file"):
        assert keeps("cuda", (0, tmp_path / "first"), (2, cache)) == [False, False]
    assert keeps("cuda", (2, tmp_path / "second")) == [False]
    assert keeps("cuda", (0, None), (2, tmp_path / "second")) == [False, True]


def test_two_processes_that_name_a_cache_at_a_time_call_it_the_same(keeps, tmp_path, monkeypatch):
    found = {"jax_compilation_cache_dir": str(tmp_path)}
    monkeypatch.setattr(programs, "jax", types.SimpleNamespace(config=types.SimpleNamespace(values=found)))
    link = programs.os.link

    def later(source, target):
        (tmp_path / "lockstep-name").write_text("the other's")
        link(source, target)

    monkeypatch.setattr(programs.os, "link", later)
    assert programs.name_of_cache() == "the other's"
    assert [file.name for file in tmp_path.iterdir()] == ["lockstep-name"]
