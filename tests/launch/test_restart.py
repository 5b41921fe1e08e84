"""What decides whether and how ranks are started again; ``tests/distributed/test_restarts.py`` kills some."""

import contextlib
import io
import json
import shutil
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from lockstep.config.engines import check_engine_options
from lockstep.config.run import Config, RunOptions
from lockstep.core.done import Mark
from lockstep.core.errors import KilledError, RunError
from lockstep.core.temporary import _sweep
from lockstep.core.topology import Topology
from lockstep.launch import restart, world
from lockstep.launch.rank import Assignment
from lockstep.launch.restart import Failures, Restarts, State, newest_state, prepared, signature
from lockstep.launch.serving import kills
from lockstep.launch.serving.kills import EarlyKills, killed_for_memory
from lockstep.launch.supervise import Outcome
from lockstep.launch.world import number_of_processes
from lockstep.runs import checkpoint_writer
from lockstep.runs.checkpoint import REQUIRED, STATE, CheckpointError
from lockstep.runs.checkpoint_writer import commit
from lockstep.runs.directory import RunDirectory


def state(directory, step):
    directory.mkdir(exist_ok=True)
    return commit(directory, step, dict.fromkeys(REQUIRED, b"{}"), None)


def test_the_newest_valid_state_is_gone_on_from(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "checkpoints"
    assert newest_state([memory, disk]) == State()
    old = state(disk, 128)
    assert newest_state([memory, disk]) == State(128, old)
    new = state(memory, 512)
    assert newest_state([memory, disk]) == State(512, new)
    assert newest_state([memory, disk], at_most=256) == State(128, old)
    (new / REQUIRED[0]).write_bytes(b"damaged")
    assert newest_state([memory, disk]) == State(128, old)
    assert [s.where for s in (State(), State(128, old), State(512, new))] == ["beginning", "disk", "memory"]


def test_the_same_failure_twice_without_a_newer_state_is_the_programs_own():
    failures = Failures()
    assert not failures.again("rank 1: environment 3 raised ValueError in step 17", 128)
    assert failures.again("rank 0: environment 5 raised ValueError in step 18", 128)
    assert not failures.again("rank 0: environment 5 raised ValueError in step 18", 256)
    assert not failures.again("rank 1 was killed by SIGKILL", 256)
    assert not failures.again("rank 1 was killed by SIGSEGV", 256)
    assert failures.again("rank 0 was killed by SIGKILL", 256)


KILLED = Outcome("rank 1 was killed by SIGKILL", killed=True)
DONE = Outcome()


class FakeServer:
    """Ranks that end as they are told to; each outcome comes with the steps of the rows that they log before."""

    def __init__(self, path, monkeypatch, outcomes):
        self.closed, self.outcomes, self.metrics = False, list(outcomes), path / "metrics.jsonl"
        monkeypatch.setattr(restart, "watch", lambda ranks, *_, **__: ranks.outcome)

    def start(self, nproc, log_dir, *, assignment, environment):
        outcome, rows = self.outcomes.pop(0)
        if isinstance(outcome, RunError):
            raise outcome
        if rows is not None:
            self.metrics.write_text("".join(json.dumps({"iteration": n, "global_step": n}) + "\n" for n in rows))
            Mark(Assignment.from_json(assignment).begun).tell()
        return SimpleNamespace(outcome=outcome, end=lambda: None)

    def close(self):
        self.closed = True


def train(path, monkeypatch, outcomes, max_restarts, hold_on=lambda: None, early=(), nproc: Any = 1, places=1):
    """The exit code of ranks that end so, and the rows of their restarts."""
    server = FakeServer(path, monkeypatch, outcomes)
    assignment = Assignment(Config(num_envs=1, num_steps=1), path, RunOptions(nproc=nproc, max_restarts=max_restarts))
    restarts = Restarts(assignment, cast("Any", server), lambda: cast("Any", server), lambda: places, hold_on, early)
    return restarts.train(places), restarts._rows


def test_ranks_of_a_run_that_another_process_has_taken_are_not_started_again(tmp_path, monkeypatch, capsys):
    """Nor is anything of theirs written to it."""
    free, memory, disk = iter([True, True, False, False]), tmp_path / "memory", tmp_path / "checkpoints"

    def hold_on():
        if not next(free):
            raise RunError("another process has taken the run")

    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (KILLED, [1]), (KILLED, [1])], 9, hold_on)
    assert (code, len(rows)) == (1, 2)
    assert capsys.readouterr().err.endswith("lockstep: error: another process has taken the run\n")
    disk.mkdir()
    (tmp_path / "metrics.jsonl").touch()
    restarts_of(tmp_path, hold_on=hold_on)._save(State(256, state(memory, 256)))
    assert list(disk.iterdir()) == []
    assert "the state in memory is lost: another process has taken the run" in capsys.readouterr().err


def test_kills_from_outside_are_never_the_programs_own(tmp_path, monkeypatch, capsys):
    server = KilledError("the process that starts the ranks was killed by SIGKILL")
    killed = [(KILLED, [1, 2, 3]), (server, None), (server, None), (KILLED, [1, 2, 3]), (KILLED, [])]
    code, rows = train(tmp_path, monkeypatch, [*killed, (DONE, [1])], max_restarts=5)
    assert code == 0, capsys.readouterr().err
    assert [row["iterations_again"] for row in rows] == [3, 0, 0, 3, 0]  # while ranks start nothing is done
    code, rows = train(tmp_path, monkeypatch, killed, max_restarts=4)
    assert (code, len(rows)) == (1, 4)
    assert capsys.readouterr().err.endswith("killed by SIGKILL (after 4 restarts, as many as were allowed)\n")


def test_kills_for_memory_and_errors_are_the_programs_own_the_second_time(tmp_path, monkeypatch, capsys):
    error, counts = Outcome("rank 0: environment 3 raised ValueError in step 17"), iter(range(100))
    code, rows = train(tmp_path, monkeypatch, [(error, [1]), (KILLED, [1]), (error, [1])], max_restarts=9)
    assert (code, len(rows)) == (1, 2)
    monkeypatch.setattr(restart, "killed_for_memory", lambda: next(counts))
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (KILLED, [1])], max_restarts=9)
    assert (code, len(rows)) == (1, 1)
    assert capsys.readouterr().err.count("twice without a newer state in between") == 2


def test_after_each_kill_for_memory_one_rank_less_is_started(tmp_path, monkeypatch, capsys):
    """So the same kill again isn't the program's own, until there is no rank less to try."""
    counts = iter([0, 0, 0, 1, 1, 2, 2, 3])  # before and after each attempt; the first kill comes from outside
    monkeypatch.setattr(restart, "killed_for_memory", lambda: next(counts))
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1])] * 4, max_restarts=9, nproc="1:3", places=3)
    assert [(row["ranks_before"], row["ranks_after"]) for row in rows] == [(3, 3), (3, 2), (2, 1)]
    assert code == 1
    assert "twice without a newer state in between" in capsys.readouterr().err


GONE = KilledError("the process that starts the ranks was killed by SIGKILL")


class CheckingServers:
    """Makes servers of which the first so many are killed while they check."""

    def __init__(self, killed):
        self.left, self.made, self.closed = killed, 0, 0

    def __call__(self):
        self.made += 1
        return self

    def check(self, module, function, **arguments):
        if self.left:
            self.left -= 1
            raise GONE
        return (module, function, arguments) == ("checks", "fine", {"value": 3})

    def close(self):
        self.closed += 1


def test_servers_that_are_killed_while_they_check_count_as_restarts(tmp_path, monkeypatch, capsys):
    early, servers = EarlyKills(most=3), CheckingServers(killed=2)
    assert early.check(servers(), servers, "checks", "fine", value=3) == (servers, True)
    assert (servers.made, servers.closed) == (3, 2)
    line = f"lockstep: restart 2 of 3: {GONE}; another takes its place, before any rank"
    assert capsys.readouterr().err.splitlines()[1:] == [line]
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (DONE, [1])], 3, early=early.found)
    assert (code, len(rows)) == (0, 3)
    assert [(row["why"], row["from"], row["iterations_again"]) for row in rows[:2]] == [(str(GONE), "beginning", 0)] * 2
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (KILLED, [1])], 3, early=early.found)
    assert (code, len(rows)) == (1, 3)
    assert capsys.readouterr().err.endswith("(after 3 restarts, as many as were allowed)\n")


@pytest.mark.parametrize(
    ("most", "said"), [(0, f"{GONE}$"), (2, rf"{GONE} \(after 2 restarts, as many as were allowed\)$")]
)
def test_no_more_servers_are_made_than_restarts_are_allowed(most, said, capsys):
    servers = CheckingServers(killed=9)
    with pytest.raises(RunError, match=said):
        EarlyKills(most).check(servers(), servers, "checks", "fine", value=3)
    assert servers.made == most + 1
    assert len(capsys.readouterr().err.splitlines()) == most


def test_nor_are_they_if_the_kernel_kills_two_for_memory(monkeypatch):
    counts, servers = iter(range(9)), CheckingServers(killed=9)
    monkeypatch.setattr(kills, "killed_for_memory", lambda: next(counts))
    with pytest.raises(RunError, match="twice before any rank was started"):
        EarlyKills(9, _counted=0).check(servers(), servers, "checks", "fine", value=3)
    assert servers.made == 3


REFUSED = Outcome("rank 1: device: cuda, but there is no GPU", bad_input=True)


def test_what_is_refused_after_training_is_a_failure_like_others(tmp_path, monkeypatch, capsys):
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (REFUSED, None), (DONE, [1])], max_restarts=9)
    assert (code, [row["why"] for row in rows]) == (0, [KILLED.message, REFUSED.message])
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (REFUSED, None), (REFUSED, None)], max_restarts=9)
    assert (code, len(rows)) == (1, 2)
    assert capsys.readouterr().err.endswith("(twice without a newer state in between, so it isn't started again)\n")


@pytest.mark.parametrize("outcomes", [[(REFUSED, None)], [(REFUSED, [])], [(KILLED, []), (REFUSED, None)]])
def test_what_is_refused_before_anything_was_trained_ends_at_once(tmp_path, monkeypatch, capsys, outcomes):
    code, rows = train(tmp_path, monkeypatch, outcomes, max_restarts=9)
    assert (code, len(rows)) == (2, len(outcomes) - 1)
    assert capsys.readouterr().err.endswith("lockstep: error: rank 1: device: cuda, but there is no GPU\n")


def test_what_a_resumed_run_had_trained_before_is_not_of_this_command(tmp_path, monkeypatch):
    (tmp_path / "checkpoints").mkdir()
    state(tmp_path / "checkpoints", 3)
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"iteration": {n}, "global_step": {n}}}\n' for n in (1, 2, 3)))
    assert train(tmp_path, monkeypatch, [(REFUSED, [1, 2, 3])], max_restarts=9)[0] == 2
    assert train(tmp_path, monkeypatch, [(KILLED, [1, 2, 3, 4]), (REFUSED, None), (DONE, [])], max_restarts=9)[0] == 0


class Holding(FakeServer):
    """Ranks that leave a state in memory and are killed; ``following`` happens to the next ones."""

    def __init__(self, path, monkeypatch, following):
        super().__init__(path, monkeypatch, [(KILLED, [1])])
        self.following = following

    def start(self, nproc, log_dir, *, assignment, environment):
        if not self.outcomes:
            self.following()
        state(Assignment.from_json(assignment).memory, 256)
        return super().start(nproc, log_dir, assignment=assignment, environment=environment)


def twice_interrupted():
    for _ in range(2):
        signal.raise_signal(signal.SIGINT)
    pytest.fail("nothing was interrupted")


def fails():
    raise OSError("the disk of temporary files is full")


def holding(path, monkeypatch, following, places=lambda: 1, **options):
    """Restarts of ranks that leave a state in memory, which is nowhere else."""
    (path / "checkpoints").mkdir()
    server = cast("Any", Holding(path, monkeypatch, following))
    assignment = Assignment(Config(num_envs=1, num_steps=1), path, RunOptions(**{"max_restarts": 5, **options}))
    return Restarts(assignment, server, lambda: server, places), server


@pytest.mark.parametrize(("following", "error"), [(twice_interrupted, KeyboardInterrupt), (fails, OSError)])
def test_states_in_memory_are_saved_whatever_ends_the_restarts(tmp_path, monkeypatch, following, error):
    restarts, server = holding(tmp_path, monkeypatch, following)
    with pytest.raises(error):
        restarts.train(1)
    assert newest_state([tmp_path / "checkpoints"]) == State(256, tmp_path / "checkpoints" / "step_256")
    assert server.closed


def test_states_in_memory_are_saved_where_places_cannot_be_counted(tmp_path, monkeypatch):
    restarts, _ = holding(tmp_path, monkeypatch, fails, places=fails, nproc="1:2")
    with pytest.raises(OSError, match="full"):
        restarts.train(1)
    assert newest_state([tmp_path / "checkpoints"]).step == 256


def test_nothing_interrupts_the_saving(tmp_path, monkeypatch):
    write = restart.write_directory

    def write_interrupted(*arguments):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        write(*arguments)

    monkeypatch.setattr(restart, "write_directory", write_interrupted)
    restarts, _ = holding(tmp_path, monkeypatch, fails, max_restarts=1)
    restarts._rows.append({})  # as many as are allowed
    assert restarts.train(1) == 1
    assert newest_state([tmp_path / "checkpoints"]).step == 256


class Unread(io.StringIO):
    """A pipe whose reader has left."""

    def write(self, text):
        raise BrokenPipeError


def test_ranks_are_started_again_though_nobody_reads_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", Unread())
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (DONE, [1])], max_restarts=5)
    assert (code, len(rows)) == (0, 1)
    code, rows = train(tmp_path, monkeypatch, [(KILLED, [1]), (KILLED, [1])], max_restarts=1)
    assert (code, len(rows)) == (1, 1)


def test_what_failures_have_in_common():
    assert signature("rank 12 was killed by SIGKILL") == signature("rank 3 was killed by SIGKILL")
    assert signature("rank 0: a.py, line 3: KeyError") == signature("rank 1: a.py, line 3: KeyError")
    assert signature("rank 0: a.py: KeyError") != signature("rank 0: a.py: ValueError")


def test_the_kernel_is_asked_for_processes_killed_for_memory(tmp_path, monkeypatch):
    counts = tmp_path / "memory.events"
    monkeypatch.setattr(kills, "OOM_KILLS", (tmp_path / "missing", counts))
    assert killed_for_memory() == 0
    counts.write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    assert killed_for_memory() == 3


@pytest.mark.parametrize(("nproc", "there_are", "ranks"), [("2:8", 4, 4), ("2:8", 1, 2), ("2:3", 4, 3), ("auto", 4, 4)])
def test_a_range_is_what_there_is_within_it(monkeypatch, nproc, there_are, ranks):
    monkeypatch.setattr(world, "available_cores", lambda: there_are)
    config = Config(num_envs=32, num_shards=8)
    assert number_of_processes(RunOptions(nproc=nproc), config, Topology()) == ranks


@pytest.mark.parametrize("nproc", ["8:2", "0:3"])
def test_a_range_must_be_one(nproc):
    with pytest.raises(ValueError, match=f"nproc: {nproc}: the first number is at least 1 and at most the second"):
        RunOptions(nproc=nproc)


def test_numbers_stay_numbers():
    assert RunOptions.model_validate({"nproc": "4"}).nproc == 4
    assert RunOptions.model_validate({"nproc": "2:4"}).nproc_range == (2, 4)
    assert RunOptions(nproc="auto").nproc_range is None


def test_restarts_are_for_our_launcher():
    launched = Topology(rank=0, world_size=2, launched=True)
    with pytest.raises(ValueError, match="max_restarts: 3, but another launcher started this rank"):
        number_of_processes(RunOptions(max_restarts=3), Config(), launched)


def test_ranks_fall_and_rise_with_the_places_there_are(tmp_path):
    there_are = [4]
    options = RunOptions(nproc="1:4", max_restarts=9)
    restarts = Restarts(
        Assignment(Config(), tmp_path, options), cast("Any", None), cast("Any", None), lambda: there_are[0]
    )
    assert restarts.ranks(4) == 4
    there_are[0] = 0
    assert restarts.ranks(4) == 1
    there_are[0] = 3
    assert restarts.ranks(1) == 3
    restarts.fewer += 1  # one was killed for memory
    assert restarts.ranks(4) == 2
    fixed = Restarts(
        Assignment(Config(), tmp_path, RunOptions(nproc=4)), cast("Any", None), cast("Any", None), lambda: 1
    )
    assert fixed.ranks(4) == 4


def test_a_limit_in_hours_is_of_all_attempts_together(tmp_path, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(restart.time, "monotonic", lambda: now[0])
    options = RunOptions(max_hours=2.0, max_restarts=3)
    restarts = Restarts(Assignment(Config(), tmp_path, options), cast("Any", None), cast("Any", None), lambda: 1)
    assert restarts.options_left().max_hours == 2.0
    now[0] += 5400
    assert restarts.options_left().max_hours == pytest.approx(0.5)
    now[0] += 5400
    assert restarts.options_left().max_hours == restart.LEAST_HOURS


def restarts_of(path, resume_from=None, hold_on=lambda: None):
    assignment = Assignment(Config(), path, RunOptions(max_restarts=3), resume_from)
    return Restarts(assignment, cast("Any", None), cast("Any", None), lambda: 1, hold_on)


def test_what_is_in_memory_alone_is_saved_when_ranks_arent_started_again(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "checkpoints"
    disk.mkdir()
    (tmp_path / "metrics.jsonl").touch()
    restarts_of(tmp_path)._save(State())
    assert newest_state([disk]) == State()
    restarts_of(tmp_path)._save(State(256, state(memory, 256)))
    assert newest_state([disk]) == State(256, disk / "step_256")
    (memory / "step_512").mkdir()
    restarts_of(tmp_path)._save(State(512, memory / "step_512"))  # one without a manifest: nothing to save
    assert newest_state([disk]) == State(256, disk / "step_256")


def test_all_rows_are_on_the_disk_before_a_state_that_counts_on_them(tmp_path, monkeypatch):
    order, synced = [], checkpoint_writer.sync_path
    names = ("metrics.jsonl", "metrics.csv", "fingerprints.jsonl")
    for name in names:
        (tmp_path / name).touch()
    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(checkpoint_writer, "sync_path", lambda path: (order.append(path.name), synced(path)))
    saved = state(tmp_path / "memory", 256)
    order.clear()
    restarts_of(tmp_path)._save(State(256, saved))
    assert order[: len(names)] == list(names)
    assert (tmp_path / "checkpoints" / "step_256").is_dir()


def test_restarts_since_a_state_in_memory_are_saved_with_it(tmp_path):
    """The next session knows them by it: no summary tells of a launcher that gave up."""
    memory, disk = tmp_path / "memory", tmp_path / "checkpoints"
    disk.mkdir()
    (tmp_path / "metrics.jsonl").touch()
    rows = [{"why": why, "iteration": 3} for why in ("killed", "lost")]
    files = dict.fromkeys(REQUIRED, b"{}") | {STATE: json.dumps({"iteration": 2, "restarts": rows[:1]}).encode()}
    restarts = restarts_of(tmp_path)
    restarts._rows.extend(rows)
    restarts._save(State(256, commit(memory, 256, files, None)))
    assert newest_state([disk]) == State(256, disk / "step_256")
    assert json.loads((disk / "step_256" / STATE).read_text()) == {"iteration": 2, "restarts": rows}


def test_until_ranks_begin_later_checkpoints_dont_count(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "checkpoints"
    memory.mkdir()
    for step in (128, 256):
        state(disk, step)
    assert restarts_of(tmp_path, "step_128")._newest(memory).step == 128
    assert restarts_of(tmp_path, "latest")._newest(memory).step == 256
    restarts = restarts_of(tmp_path, "step_128")
    restarts._has_cut = True
    assert restarts._newest(memory).step == 256


@pytest.mark.parametrize("logged", [None, [1, 2]])
def test_ranks_that_began_have_cut_even_if_what_was_in_memory_is_gone(tmp_path, monkeypatch, logged):
    """As at a logout, which removes a user's files in memory; checkpoints after the one asked for are theirs then."""
    seen, disk = list[Assignment](), tmp_path / "checkpoints"

    class Forgetful(FakeServer):
        def start(self, nproc, log_dir, *, assignment, environment):
            seen.append(Assignment.from_json(assignment))
            if seen[-1].memory is not None and len(seen) == 1:
                shutil.rmtree(seen[-1].memory)
            return super().start(nproc, log_dir, assignment=assignment, environment=environment)

    for step in (128, 256):
        state(disk, step)
    server = Forgetful(tmp_path, monkeypatch, [(KILLED, logged), (DONE, [])])
    assignment = Assignment(Config(num_envs=1, num_steps=1), tmp_path, RunOptions(max_restarts=9), "step_128")
    restarts = Restarts(assignment, cast("Any", server), lambda: cast("Any", server), lambda: 1)
    assert restarts.train(1) == 0
    assert seen[1].resume_from == ("step_128" if logged is None else "step_256")
    assert [row["iterations_again"] for row in restarts._rows] == [0]
    again = seen[1].memory
    assert again is not None
    assert not again.exists()  # it was made once more, and removed at the end


def test_of_a_state_on_disk_and_in_memory_that_on_disk_is_taken(tmp_path):
    """It may be scored, and the other one is never written over it."""
    memory, disk = tmp_path / "memory", tmp_path / "checkpoints"
    for directory in (memory, disk):
        state(directory, 256)
    memory.chmod(0o700)
    assert restarts_of(tmp_path)._newest(memory).where == "disk"
    state(memory, 384)
    assert restarts_of(tmp_path)._newest(memory).where == "memory"


def test_states_leave_room_in_memory(tmp_path, monkeypatch):
    memory, nobodys = (RunDirectory(tmp_path, writes, memory=tmp_path).open_memory() for writes in (True, False))
    assert memory is not None
    assert nobodys is not None
    memory.check_room(1)
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=599))
    with pytest.raises(CheckpointError, match=r"100 bytes each, and .* has 599 free, of 600 wanted"):
        memory.check_room(100)
    nobodys.check_room(100)


@pytest.mark.parametrize(
    ("settings", "nproc", "said"),
    [
        ({"engine": "jax"}, "1:2", "nproc: 1:2 is for engine torch"),
        ({"reduction": "fast"}, "1:2", "another number of ranks is another run"),
        ({"reduction": "fast", "sync_period": 2}, "1:2", "sync_period 2 another number of ranks is another run"),
    ],
)
def test_ranges_are_for_runs_that_are_the_same_on_any_number(settings, nproc, said):
    with pytest.raises(ValueError, match=said):
        check_engine_options(RunOptions(nproc=nproc), Config(**settings))


def test_states_are_kept_where_nobody_else_writes(tmp_path):
    """The directory in memory may be gone, and another's may have taken its place."""
    memory = tmp_path / "lockstep-memory"
    with contextlib.ExitStack() as holds:
        assert prepared(memory, holds) == memory
        assert memory.stat().st_mode & 0o777 == 0o700
        _sweep(memory)  # as any process does that makes a temporary directory
        assert prepared(memory, holds) == memory
        memory.chmod(0o777)
        assert prepared(memory, holds) is None
        assert prepared(tmp_path / "no" / "such", holds) is None
        assert memory.exists()
    _sweep(memory)
    assert not memory.exists()
