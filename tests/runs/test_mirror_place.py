"""A run's place on a mirror, and the right to write there: on an S3 server, in a directory, and with nobody's clock."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from typing import ClassVar

import fsspec
import pytest
import s3_server
from command_line import wait_until
from frameworks import installed
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from mirror_places import MemoryPlace
from pydantic import ValidationError

from lockstep.config.sections import CheckpointConfig, is_url
from lockstep.runs.mirror import lease as lease_module
from lockstep.runs.mirror.lease import LEASE, PATIENCE_SECONDS, RENEW_SECONDS, Lease, LeaseGoneError, LeaseLostError
from lockstep.runs.mirror.place import MirrorError, Place, _is_unknown, split_url


@pytest.fixture
def ours(s3, monkeypatch):
    """A bucket that this process is told of."""
    for name, value in s3.variables().items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture(params=["s3", "file", "memory"])
def place(request, tmp_path):
    if request.param == "s3":
        return Place(f"{request.getfixturevalue('ours').mirror}/run")
    return Place(f"file://{tmp_path}/mirror/run" if request.param == "file" else f"memory://{tmp_path.name}/run")


# ---- places


def test_a_place_has_files_and_nothing_else(place):
    assert place.names() == []
    assert place.read("config.json") is None
    place.write("config.json", b"{}")
    place.write("checkpoints/step_1/envs/shard_0.safetensors", b"x" * 100_000)
    place.write("empty", b"")
    place.write("config.json", b"{ }")
    assert place.names() == ["checkpoints/step_1/envs/shard_0.safetensors", "config.json", "empty"]
    assert place.read("config.json") == b"{ }"
    assert place.read("empty") == b""
    assert place.read("checkpoints/step_1/envs/shard_0.safetensors") == b"x" * 100_000
    place.remove(["config.json", "nothing", "empty"])
    assert place.names() == ["checkpoints/step_1/envs/shard_0.safetensors"]
    assert place.read("config.json") is None


def test_a_file_is_created_once(place):
    assert place.create(LEASE, b"mine")
    assert not place.create(LEASE, b"theirs")
    assert place.read(LEASE) == b"mine"


class Answering:
    """A store whose ways of saying that a file is there differ; ``writes`` whether it wrote what it was given."""

    def __init__(self, error, writes=False):
        self.files, self.error, self.writes = {}, error, writes

    def invalidate_cache(self):
        return

    def cat_file(self, path):
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def pipe_file(self, path, content, mode="overwrite"):
        if mode == "create" and self.error is not None:
            if self.writes:
                self.files[path] = content
            raise self.error
        self.files[path] = content


@pytest.mark.parametrize(
    "error",
    [
        None,  # an older package, or a server, that passes over the condition
        FileExistsError("there"),
        OSError(errno.EINVAL, "At least one of the pre-conditions you specified did not hold"),
        OSError(errno.EBUSY, "a conflicting operation is in progress"),
        OSError(errno.ENOSYS, "not implemented"),
        NotImplementedError(),
    ],
)
def test_a_lease_that_is_there_is_seen_however_the_store_says_so(monkeypatch, error):
    place = Place("s3://bucket/runs/run")
    store = Answering(None)
    monkeypatch.setattr(place, "_file_system", lambda: store)
    assert place.create(LEASE, b"mine")
    store.error = error
    assert not place.create(LEASE, b"theirs")
    if error is not None and not _is_unknown(error):  # it came between the look and the writing
        looks = iter([None])
        monkeypatch.setattr(place, "_glimpse", lambda name: next(looks, b"mine"))
        assert not place.create(LEASE, b"theirs")
    assert place.read(LEASE) == b"mine"


def test_a_lease_whose_answer_was_lost_is_ours(monkeypatch):
    place, store = Place("s3://bucket/runs/run"), Answering(OSError(errno.EIO, "the connection was reset"), writes=True)
    monkeypatch.setattr(place, "_file_system", lambda: store)
    assert place.create(LEASE, b"mine")
    store.files.clear()
    store.writes = False
    with pytest.raises(MirrorError, match=r"can't write s3://bucket/runs/run: .*the connection was reset$"):
        place.create(LEASE, b"mine")
    store.error = OSError(errno.ENOSYS, "not implemented")
    assert place.create(LEASE, b"mine")


def test_a_neighbour_whose_name_begins_alike_is_another(place):
    place.write("config.json", b"{}")
    another = Place(place.url + "-2")
    another.write("config.json", b"[]")
    assert (place.names(), another.names()) == (["config.json"], ["config.json"])
    assert place.read("config.json") == b"{}"


def test_in_a_directory_a_file_appears_once_it_is_whole(tmp_path, monkeypatch):
    place = Place(f"file://{tmp_path}/mirror/run")
    place.write("state.json", b"before")
    monkeypatch.setattr(LocalFileSystem, "mv", lambda *_: (_ for _ in ()).throw(OSError("the disk is gone")))
    with pytest.raises(MirrorError, match=r"can't write file://.*/run: the disk is gone"):
        place.write("state.json", b"after")
    assert (tmp_path / "mirror" / "run" / "state.json.part").read_bytes() == b"after"
    assert place.names() == ["state.json"]
    assert place.read("state.json") == b"before"
    monkeypatch.undo()
    place.write("state.json", b"after")
    assert [p.name for p in (tmp_path / "mirror" / "run").iterdir()] == ["state.json"]


def test_what_is_removed_leaves_no_empty_directory(tmp_path):
    place = Place(f"file://{tmp_path}/mirror/run")
    for name in (
        "config.json",
        "checkpoints/step_1/envs/shard_0",
        "checkpoints/step_1/state",
        "checkpoints/step_2/state",
    ):
        place.write(name, b"")
    place.remove(["checkpoints/step_1/state"])
    assert (tmp_path / "mirror" / "run" / "checkpoints" / "step_1" / "envs").is_dir()
    place.remove(["checkpoints/step_1/envs/shard_0", "checkpoints/step_0/state"])
    assert [p.name for p in (tmp_path / "mirror" / "run" / "checkpoints").iterdir()] == ["step_2"]
    place.remove(["checkpoints/step_2/state", "config.json"])
    assert list((tmp_path / "mirror" / "run").iterdir()) == []


def test_a_directory_that_holds_something_is_never_removed(tmp_path, monkeypatch):
    """There are file systems whose rmdir removes what is in it."""
    monkeypatch.setattr(LocalFileSystem, "rmdir", lambda self, path: shutil.rmtree(path))
    place = Place(f"file://{tmp_path}/mirror/run")
    for name in ("videos/a", "videos/b"):
        place.write(name, b"")
    place.remove(["videos/a"])
    assert place.names() == ["videos/b"]


class Connection(LocalFileSystem):
    """A connection to a directory, as paramiko's: for one thread at a time, dead after an error, without options."""

    protocol = "wire"
    made: ClassVar[list[Connection]] = []
    together: ClassVar[threading.Barrier | None] = None

    def __init__(self, **options):
        if options:
            raise TypeError(f"an unexpected option: {', '.join(options)}")
        super().__init__()
        self.inside, self.dead = threading.Lock(), False
        self.made.append(self)

    @classmethod
    def _strip_protocol(cls, path):
        return path.removeprefix("wire://")

    def find(self, path, **kwargs):
        if self.dead:
            raise EOFError("the connection is closed")
        return super().find(path, **kwargs)

    def pipe_file(self, path, value, **kwargs):
        if self.dead:
            raise EOFError("the connection is closed")
        return super().pipe_file(path, value, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        if self.dead or not self.inside.acquire(blocking=False):
            raise EOFError("the connection is closed" if self.dead else "another thread's answer was lost")
        try:
            if self.together is not None:
                self.together.wait(60)
            return super().cat_file(path, start, end, **kwargs)
        finally:
            self.inside.release()


@pytest.fixture
def wire(tmp_path, monkeypatch):
    monkeypatch.setattr(Connection, "made", [])
    fsspec.register_implementation("wire", Connection, clobber=True)
    return Place(f"wire://{tmp_path}/run")


def test_a_connection_is_of_one_thread(wire, monkeypatch):
    """A lease is renewed while a file is copied."""
    wire.write("config.json", b"{}")
    monkeypatch.setattr(Connection, "together", threading.Barrier(2))
    found = []
    other = threading.Thread(target=lambda: found.append(wire.read("config.json")))
    other.start()
    assert wire.read("config.json") == b"{}"
    other.join()
    assert found == [b"{}"]
    assert len(Connection.made) == 2


def test_after_a_failure_a_place_is_connected_anew(wire):
    wire.write("config.json", b"{}")
    assert wire.read("config.json") == b"{}"
    assert wire.read("nothing") is None
    assert len(Connection.made) == 1
    Connection.made[0].dead = True
    assert fault_of(wire.write, "config.json", b"[]") == f"can't write {wire.url}: the connection is closed"
    assert wire.read("config.json") == b"{}"
    assert len(Connection.made) == 2


def test_a_connection_that_was_cut_while_it_was_idle_is_no_failure_to_read(wire):
    wire.write("config.json", b"{}")
    Connection.made[0].dead = True
    assert wire.read("config.json") == b"{}"
    Connection.made[1].dead = True
    assert wire.names() == ["config.json"]
    assert len(Connection.made) == 3


def test_what_a_new_connection_fails_to_read_is_a_failure(wire, monkeypatch):
    wire.write("config.json", b"{}")
    monkeypatch.setattr(Connection, "dead", property(lambda self: True, lambda self, dead: None), raising=False)
    for failures in (1, 2):
        assert fault_of(wire.read, "config.json") == f"can't read {wire.url}: the connection is closed"
        assert len(Connection.made) == 1 + failures  # one call more where there was a connection, else none


class Remembering(MemoryFileSystem):
    """Lists as ossfs does: what it has listed is put into its cache of listings, and read there."""

    protocol = "remembering"
    store: ClassVar[dict] = {}

    def find(self, path, *args, **kwargs):
        if path not in self.dircache:
            self.dircache[path] = super().find(path, *args, **kwargs)
        return self.dircache[path]

    def invalidate_cache(self, path=None):
        self.dircache.clear()


def test_what_others_write_is_seen_where_listings_are_remembered():
    fsspec.register_implementation("remembering", Remembering, clobber=True)
    place, theirs = (Place("remembering://bucket/run") for _ in range(2))
    place.write("config.json", b"{}")
    assert place.names() == ["config.json"]
    theirs.write("writer.json", b"{}")
    assert place.names() == ["config.json", "writer.json"]


def fault_of(action, *arguments):
    with pytest.raises(MirrorError) as caught:
        action(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_server_denies_is_one_line_that_names_the_mirror(ours, monkeypatch):
    place = Place(f"{ours.mirror}/run")
    place.write("a", b"a")
    ours.proxy.set(s3_server.DENY)
    assert fault_of(place.write, "a", b"b") == f"can't write {place.url}: Access Denied"
    assert fault_of(place.create, "b", b"b") == f"can't write {place.url}: Access Denied"
    assert fault_of(place.names) == f"can't list {place.url}: Access Denied"
    assert fault_of(place.read, "a") == f"can't read {place.url}: Forbidden"
    assert fault_of(place.remove, ["a"]) == f"can't remove from {place.url}: Access Denied"
    ours.proxy.set(None)
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ACCESS_KEY_ID", "wrong")
        assert "The AWS Access Key Id you provided does not exist" in fault_of(Place(place.url).create, "b", b"")
    assert place.names() == ["a"]
    assert place.read("a") == b"a"


def test_a_bucket_that_is_not_there_is_no_empty_one(ours):
    place = Place("s3://no-such-bucket/runs/run")
    assert "The specified bucket does not exist" in fault_of(place.create, LEASE, b"")
    assert "The specified bucket does not exist" in fault_of(place.write, "a", b"")


def test_what_is_cut_or_slow_is_whole_or_not_there(ours, monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")
    place = Place(f"{ours.mirror}/run")
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)  # else it takes half a minute to give up
    place.write("a", b"before")
    ours.proxy.set(s3_server.CUT)
    assert f"can't write {place.url}: " in fault_of(place.write, "a", b"after" * 1000)
    assert ours.proxy.hit > 1  # its own retries
    assert ours.read("a") == b"before"
    ours.proxy.set(s3_server.SLOW)
    began = time.monotonic()
    place.write("a", b"after" * 1000)
    assert time.monotonic() - began > s3_server.SLOW_SECONDS
    assert ours.read("a") == b"after" * 1000


def needing(url, package, install=None):
    """A place, and what is said of it where its package isn't there."""
    without = pytest.mark.skipif(installed(package), reason="shows what is said without it")
    return pytest.param(url, f"; pip install {install or repr(package)}", marks=without)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nosuch://bucket/runs", "nosuch"),
        needing("gs://bucket/runs", "gcsfs"),
        needing("abfs://bucket/runs", "adlfs"),
        needing("abfss://bucket/runs", "adlfs"),
        needing("oss://bucket/runs", "ossfs"),
        needing("sftp://host/runs", "paramiko", "'fsspec' 'paramiko'"),
        needing("ssh://host/runs", "paramiko", "'fsspec' 'paramiko'"),
    ],
)
def test_a_scheme_that_nobody_knows_is_one_line(url, why):
    message = fault_of(Place, url)
    assert message.startswith(f"{url}: ")
    assert why in message


def test_a_password_in_a_place_is_used_and_never_said(monkeypatch):
    """Libraries quote in their errors what they were asked for."""
    place, asked = Place("memory://me:geheim@host/runs/a/"), []
    assert place.url == "memory://***@host/runs/a"
    place.write("config.json", b"{}")
    assert Place("memory://me:geheim@host/runs/a").read("config.json") == b"{}"
    assert Place("memory://me:another@host/runs/a").read("config.json") is None

    def fail(path, *_, **__):
        asked.append(path)
        raise OSError(f"no such user: me:geheim, geheim; {path}")

    for call in ("cat_file", "pipe_file", "find", "rm_file"):
        monkeypatch.setattr(MemoryFileSystem, call, staticmethod(fail))
    actions = (lambda: place.read("b"), lambda: place.write("b", b""), lambda: place.create("b", b""), place.names)
    for message in (fault_of(action) for action in (*actions, lambda: place.remove(["b"]))):
        assert "geheim" not in message
        assert "memory://***@host/runs/a: no such user: ***, ***; /***@host/runs/a" in message
    assert all("me:geheim@host" in path for path in asked)


@pytest.mark.parametrize(
    ("user", "quotes"), [("me:geheim", ""), ("me:e", " by ftp://me:e@127.0.0.1/runs")], ids=["long", "short"]
)
def test_a_place_that_does_not_answer_is_one_line(monkeypatch, user, quotes):
    """FTP connects as soon as it is named; a password of one letter is no part of every word that is said."""

    def refuse(*_, **__):
        raise ConnectionRefusedError(111, f"Connection refused{quotes}")

    monkeypatch.setattr("fsspec.url_to_fs", refuse)
    said = f"can't reach ftp://***@127.0.0.1/runs: [Errno 111] Connection refused{quotes.replace(user, '***')}"
    assert fault_of(Place, f"ftp://{user}@127.0.0.1/runs") == said


def test_a_run_is_meant_by_its_place_or_by_its_name():
    assert is_url("s3://bucket/runs/a")
    assert is_url("file:///tmp/a")
    assert not any(map(is_url, ["a", "runs/a", "/runs/a", "auto", "C:/runs", "s3:/a"]))
    assert split_url("s3://bucket/runs/a/") == ("s3://bucket/runs", "a")


# ---- leases


class Clock:
    """Goes on when somebody waits, and lets others do something then."""

    def __init__(self):
        self.now, self.meanwhile = 0.0, lambda: None

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock():
    return Clock()


def lease_of(place, clock):
    return Lease(place, clock=clock, sleep=clock.sleep)


def elsewhere(content):
    """The lease of a process of another machine."""
    return json.dumps({**json.loads(content), "machine": ["tower", "boot", "pid:[1]"], "host": "tower"}).encode()


def test_a_second_writer_is_refused_while_the_first_renews(clock):
    place = MemoryPlace()
    first, second = lease_of(place, clock), lease_of(place, clock)
    first.take()
    clock.meanwhile = first.renew
    message = fault_of(second.take)
    assert message == (
        f"{place.url} is being written by process {os.getpid()} on {lease_module.socket.gethostname()}; wait for it or "
        "stop it, or give another --name"
    )
    assert clock.now <= 2 * RENEW_SECONDS
    assert first.is_ours()
    assert not second.is_ours()
    second.give_back()
    assert first.is_ours()
    first.give_back()
    second.take()
    assert second.is_ours()


def test_a_writer_elsewhere_that_says_nothing_for_long_is_gone(clock):
    place = MemoryPlace()
    first, second = lease_of(place, clock), lease_of(place, clock)
    first.take()
    place.files[LEASE] = elsewhere(place.files[LEASE])
    second.take()
    assert PATIENCE_SECONDS <= clock.now < PATIENCE_SECONDS + 1
    assert second.is_ours()
    assert not first.is_ours()


def test_a_lease_that_nobody_can_have_written_is_taken_once_it_is_old(clock):
    place = MemoryPlace()
    place.files[LEASE] = b"[" * 100_000
    lease = lease_of(place, clock)
    lease.take()
    assert PATIENCE_SECONDS <= clock.now < PATIENCE_SECONDS + 1
    assert lease.is_ours()


def test_of_two_that_have_waited_for_the_same_writer_one_has_the_lease(clock):
    """Both see the same last sign of life, and write at the same moment."""
    place = MemoryPlace()
    lease_of(place, clock).take()
    place.files[LEASE] = elsewhere(place.files[LEASE])
    one, two = lease_of(place, clock), lease_of(place, clock)

    def two_writes_as_well():
        if clock.now > PATIENCE_SECONDS:
            place.write(LEASE, two._content())

    clock.meanwhile = two_writes_as_well
    assert fault_of(one.take) == f"{place.url} is being written by another process, which came first"
    assert two.is_ours()


def test_one_that_comes_back_does_not_take_the_lease_back(clock):
    place = MemoryPlace()
    first, second = lease_of(place, clock), lease_of(place, clock)
    first.take()
    place.files[LEASE] = elsewhere(place.files[LEASE])
    second.take()
    theirs = place.files[LEASE]
    clock.now += 100
    first.renew()
    first.give_back()
    assert place.files[LEASE] == theirs
    second.renew()
    assert place.files[LEASE] != theirs


def test_a_lease_that_is_gone_is_taken_again_unless_another_process_has_done_so(clock):
    place = MemoryPlace()
    first, second = lease_of(place, clock), lease_of(place, clock)
    first.take()
    assert first.check()
    place.files.clear()
    with pytest.raises(LeaseGoneError, match=r"has lost its writer\.json"):
        first.check()
    first.renew()
    assert place.files == {}
    first.take_again()
    assert first.check()
    place.files.clear()
    second.take()
    first.take_again()
    with pytest.raises(LeaseLostError, match="is written by another process now"):
        first.check()
    second.give_back()
    second.take_again()
    assert place.files == {}


def test_a_place_that_comes_back_with_a_lease_of_before_is_kept_and_said_to_be_another(clock):
    place = MemoryPlace()
    lease = lease_of(place, clock)
    lease.take()
    share, place.files = place.files, {}
    lease.take_again()
    assert lease.check()
    place.files = share
    before = share[LEASE]
    clock.now += 2 * RENEW_SECONDS
    lease.renew()
    assert share[LEASE] != before
    assert not lease.check()
    assert lease.check()
    assert lease.is_ours()
    lease.give_back()
    assert place.files == {}


def test_a_lease_is_its_holders_for_other_threads_while_it_is_checked(clock):
    place = MemoryPlace()
    lease = lease_of(place, clock)
    lease.take()
    seen = []

    class Looking(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            seen.append(len(lease._tokens))
            return str(self) == other

    lease._tokens = ["of before", Looking(lease._tokens[0])]
    assert lease.check()
    assert lease.is_ours()
    assert seen
    assert set(seen) == {2}


@pytest.mark.skipif(not lease_module._machine(), reason="asks the kernel which processes there are")
def test_a_writer_of_this_machine_that_was_killed_is_gone_at_once(tmp_path, clock):
    url = f"file://{tmp_path}/run"
    code = (
        "import sys; from lockstep.runs.mirror.lease import Lease; from lockstep.runs.mirror.place import Place\n"
        f"Lease(Place({url!r})).take(); print('taken', flush=True); sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        held = Place(url).read(LEASE)
        assert held is not None
        assert not lease_module._is_gone(held)
        assert not lease_module._is_gone(elsewhere(held))
    finally:
        process.kill()
        process.communicate()
    assert lease_module._is_gone(held)
    assert not lease_module._is_gone(elsewhere(held))
    lease = lease_of(Place(url), clock)
    lease.take()
    assert clock.now < 1
    assert lease.is_ours()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": "x", "machine": []}'])
def test_a_lease_that_says_nothing_is_waited_for_and_taken(clock, content):
    place = MemoryPlace()
    place.files[LEASE] = content
    lease = lease_of(place, clock)
    lease.take()
    assert clock.now >= PATIENCE_SECONDS
    assert lease.is_ours()


def test_one_that_is_given_back_meanwhile_is_taken_soon(clock):
    place = MemoryPlace()
    first, second = lease_of(place, clock), lease_of(place, clock)
    first.take()
    clock.meanwhile = first.give_back
    second.take()
    assert clock.now < 1
    assert second.is_ours()


def test_a_lease_is_renewed_in_the_background_until_it_is_given_back(monkeypatch):
    monkeypatch.setattr(lease_module, "RENEW_SECONDS", 0.02)
    monkeypatch.setattr(lease_module, "_GIVE_BACK_SECONDS", 600.0)
    others = set(threading.enumerate())
    place = MemoryPlace()
    lease = Lease(place)
    lease.take()
    seen = set()
    place.after = lambda kind, name: seen.add(place.files.get(LEASE))
    place.fails = lambda number, kind: number % 3 == 0  # it goes on after a failure
    lease.keep()
    (keeper,) = {thread for thread in threading.enumerate() if thread.name == "mirror-lease"} - others
    wait_until(lambda: len(seen) >= 4, "it isn't renewed")
    place.fails = lambda number, kind: False
    lease.give_back()
    wait_until(lambda: not keeper.is_alive(), "it is renewed on")
    assert LEASE not in place.files


def test_nobody_waits_long_for_a_mirror_that_hangs_to_give_a_lease_back(monkeypatch):
    monkeypatch.setattr(lease_module, "_GIVE_BACK_SECONDS", 0.1)
    place, hangs = MemoryPlace(), threading.Event()
    lease = Lease(place)
    lease.take()
    place.after = lambda kind, name: (hangs.wait(), None)[1]
    lease.give_back()  # comes back
    assert LEASE in place.files
    hangs.set()


def test_a_place_as_it_was_shown_is_refused():
    said = fault_of(Place, "sftp://***@host/runs")
    assert said == "sftp://***@host/runs: *** stands for what is secret; write that in its place"
    assert "geheim" not in fault_of(Place, "https://***@host/a?sig=geheim")
    assert fault_of(Place, "https://host/a?***").startswith("https://host/a?***: *** stands for")
    with pytest.raises(ValidationError) as caught:
        CheckpointConfig(mirror="sftp:/me:geheim@host")
    assert "geheim" not in str(caught.value.errors()[0]["msg"])
    assert "a place that fsspec knows is wanted" in str(caught.value)


def test_a_lease_that_came_back_before_it_was_taken_again_is_the_one_that_was_known(clock):
    """So what is there is what was written, and needn't be sent again."""
    place = MemoryPlace()
    lease = lease_of(place, clock)
    lease.take()
    lease.take_again()
    assert lease.check()
    del place.files[LEASE]
    lease.take_again()
    assert lease.check()


def test_a_lease_is_renewed_only_when_that_is_due(clock):
    place = MemoryPlace()
    lease = lease_of(place, clock)
    lease.take()
    taken = place.files[LEASE]
    clock.now += 0.9 * RENEW_SECONDS
    lease.renew()
    assert place.files[LEASE] == taken
    clock.now += 0.2 * RENEW_SECONDS
    lease.renew()
    assert place.files[LEASE] != taken
