"""What a mirror shows is whole at every moment, whatever fails; and what fails is tried again, and said."""

import errno
import itertools
import json
import shutil
import threading
from types import SimpleNamespace

import pytest
from command_line import wait_until
from mirror_places import MemoryPlace, add_step, content_of, files_of, make_run, mirror_of, problem_on

from lockstep.runs.checkpoint_writer import write_directory
from lockstep.runs.mirror import copier, held
from lockstep.runs.mirror.copier import LeaseLostError
from lockstep.runs.mirror.lease import Lease, LeaseGoneError
from lockstep.runs.mirror.place import MirrorError


@pytest.fixture
def place():
    return MemoryPlace()


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path, 1, 2).path


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(copier, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(copier, "BACKOFF", (0.02, 0.05))
    monkeypatch.setattr(copier, "SHARE", 0.9)


# ---- one copy


def test_a_copy_holds_what_is_committed_in_the_order_that_whoever_reads_it_needs(run, place):
    (run / "notes.txt").write_text("mine")
    (run / ".lock").touch()
    (run / "wandb").mkdir()
    (run / "wandb" / "secret").write_text("its own")
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events").write_bytes(b"e")
    (run / "checkpoints" / ".step_3.1.tmp").mkdir()
    (run / "checkpoints" / ".step_3.1.tmp" / "state.json").write_text("{")
    mirror_of(run, place).copy()
    names = [name for kind, name in place.changes() if kind == "write"]
    assert names[0] == "config.json"
    assert set(names[1:3]) == {"metrics.jsonl", "tensorboard/events"}
    for step, files in ((2, names[3:9]), (1, names[9:])):
        wanted = {f"checkpoints/step_{step}/{name}" for name in [*files_of(step), "manifest.json"]}
        assert len(wanted) == 6
        assert set(files) == wanted
        assert files[-1].endswith("/manifest.json")
    assert problem_on(place) is None
    left_out = {"notes.txt", ".lock", "wandb/secret", "checkpoints/.step_3.1.tmp/state.json"}
    there = {name: content for name, content in place.files.items() if name != "writer.json"}
    assert there == {name: content for name, content in content_of(run).items() if name not in left_out}


def test_what_is_there_is_not_copied_again(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    before = len(place.changes())
    mirror.copy()
    assert place.changes()[before:] == []
    add_step(run, 3)
    mirror.copy()
    written = {name for _, name in place.changes()[before:]}
    assert written == {"metrics.jsonl", *(f"checkpoints/step_3/{name}" for name in [*files_of(3), "manifest.json"])}
    before = len(place.changes())
    another = copier.Mirror(run, place, mirror._lease)  # as another process: it compares what it finds
    another.copy()
    assert {name for _, name in place.changes()[before:]} == {"config.json", "metrics.jsonl"}
    assert another.step == 3


def test_half_a_row_is_not_copied(run, place):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "glo')
    mirror_of(run, place).copy()
    assert place.files["metrics.jsonl"].decode().splitlines()[-1] == '{"iteration": 2, "global_step": 2}'
    assert place.files["metrics.jsonl"].endswith(b"\n")


def test_a_checkpoint_that_is_committed_meanwhile_waits_for_its_rows(run, place):
    def commit_another(kind, name):
        if name == "metrics.jsonl" and place.steps() == []:
            add_step(run, 3)

    place.after = commit_another
    mirror = mirror_of(run, place)
    mirror.copy()
    assert place.steps() == [1, 2]
    assert problem_on(place) is None
    mirror.copy()
    assert place.steps() == [1, 2, 3]
    assert problem_on(place) is None


def test_a_checkpoint_that_is_removed_or_replaced_meanwhile_is_not_mixed_up(run, place):
    def replace(kind, name):
        if kind == "write" and name == "checkpoints/step_2/policy.safetensors":
            write_directory(run / "checkpoints" / "step_2", files_of(2, 0.5), {"step": 2})
        if kind == "write" and name == "checkpoints/step_1/policy.safetensors":
            shutil.rmtree(run / "checkpoints" / "step_1")

    place.after = replace
    mirror = mirror_of(run, place)
    mirror.copy()
    assert problem_on(place) is None
    place.after = lambda kind, name: None
    mirror.copy()
    assert place.steps() == [2]
    assert [name for name in place.files if "step_1" in name] == []
    assert problem_on(place) is None


def test_a_damaged_checkpoint_is_not_copied(run, place):
    (run / "checkpoints" / "step_2" / "policy.safetensors").write_bytes(b"noise")
    mirror_of(run, place).copy()
    assert place.steps() == [1]


def test_what_is_pruned_goes_its_manifest_first(run, place):
    mirror = mirror_of(run, place)
    (run / "videos").mkdir()
    (run / "videos" / "step_1.mp4").write_bytes(b"film")
    mirror.copy()
    shutil.rmtree(run / "checkpoints" / "step_1")
    (run / "videos" / "step_1.mp4").unlink()
    before = len(place.changes())
    mirror.copy()
    changes = place.changes()[before:]
    assert changes[0] == ("remove", "checkpoints/step_1/manifest.json")
    assert ("remove", "videos/step_1.mp4") in changes
    assert not [name for name in place.files if "step_1" in name]
    assert mirror.step == 2


def test_a_stranger_file_beside_the_run_is_left_alone(run, place):
    place.files |= {"notes.txt": b"mine", "": b"", "wandb/x": b"w"}
    mirror_of(run, place).copy()
    assert {"notes.txt", "", "wandb/x"} <= set(place.files)


def test_the_last_checkpoint_stays_until_there_is_another(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    for step in (1, 2):
        shutil.rmtree(run / "checkpoints" / f"step_{step}")
    mirror.copy()
    assert place.steps() == [1, 2]
    add_step(run, 3)
    mirror.copy()
    assert place.steps() == [3]


@pytest.mark.parametrize("most_bytes", [held.MOST_BYTES, 0], ids=["in memory", "by links"])
def test_a_run_that_commits_and_prunes_faster_than_it_is_copied_is_mirrored_on(run, place, monkeypatch, most_bytes):
    """Each write takes longer than the run does for its next checkpoint; the best one is an older one."""
    monkeypatch.setattr(held, "MOST_BYTES", most_bytes)
    steps = itertools.count(3)

    def train(kind, name):
        assert problem_on(place) is None
        if kind == "write":
            newest = next(steps)
            add_step(run, newest)
            shutil.rmtree(run / "checkpoints" / f"step_{newest - 1}")

    place.after = train
    mirror, newest = mirror_of(run, place), 0
    for _ in range(4):
        mirror.copy()
        assert place.steps()[0] == 1
        assert place.steps()[-1] > newest
        newest = place.steps()[-1]
        assert mirror.step == newest
    place.after = lambda kind, name: None
    mirror.copy()
    assert place.steps() == [1, next(steps) - 1]
    assert {name: c for name, c in place.files.items() if name != "writer.json"} == content_of(run)


def test_one_that_is_gone_before_it_is_held_has_a_newer_one_after_it(run, place, monkeypatch):
    looked = []

    def found(path):
        if not looked:
            add_step(run, 3)
            shutil.rmtree(run / "checkpoints" / "step_2")
        looked.append(path.name)
        return find(path)

    find = held.found
    monkeypatch.setattr(held, "found", found)
    mirror_of(run, place).copy()
    assert looked[0] == "step_2"
    assert place.steps() == [1, 3]


@pytest.mark.parametrize("gone", ["links", "one of them"])
def test_what_is_held_by_links_is_read_where_it_was_if_somebody_tidies_up(run, place, monkeypatch, gone):
    monkeypatch.setattr(held, "MOST_BYTES", 0)

    def tidy(kind, name):
        for links in (run / "checkpoints").glob(".step_*.tmp"):
            shutil.rmtree(links) if gone == "links" else (links / "policy.safetensors").unlink(missing_ok=True)

    place.after = tidy
    mirror_of(run, place).copy()
    assert place.steps() == [1, 2]
    assert [path.name for path in (run / "checkpoints").glob(".*")] == []


def test_where_no_file_has_two_names_what_is_held_is_in_memory(run, place, monkeypatch):
    monkeypatch.setattr(held, "MOST_BYTES", 0)

    def refuse(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    def train(kind, name):
        if name == "config.json":
            add_step(run, 3)
            shutil.rmtree(run / "checkpoints" / "step_2")

    monkeypatch.setattr(held.os, "link", refuse)
    place.after = train
    mirror_of(run, place).copy()
    assert place.steps() == [1, 2]
    assert [path.name for path in (run / "checkpoints").glob(".*")] == []


def test_a_checkpoint_after_what_the_run_has_gone_on_from_goes(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    shutil.rmtree(run / "checkpoints" / "step_2")
    (run / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 1}\n')
    mirror.copy()
    assert place.steps() == [1]


@pytest.mark.parametrize("kept_there", [(1, 2), (2,)])
def test_on_the_way_back_to_an_earlier_checkpoint_no_later_one_is_without_its_rows(run, place, kept_there):
    mirror = mirror_of(run, place)
    mirror.copy()
    if kept_there == (2,):
        place.files = {name: x for name, x in place.files.items() if not name.startswith("checkpoints/step_1/")}
        mirror = copier.Mirror(run, place, mirror._lease)
    shutil.rmtree(run / "checkpoints" / "step_2")
    (run / "metrics.jsonl").write_text('{"iteration": 1, "global_step": 1}\n')
    seen = []
    place.after = lambda *_: seen.append((problem_on(place), bool(place.steps())))
    mirror.copy()
    assert place.steps() == [1]
    assert set(seen) == {(None, True)}


@pytest.mark.parametrize("after", ["config.json", "checkpoints/step_2/manifest.json"])
def test_a_process_that_stood_still_in_a_copy_writes_nothing_over_the_next_ones(run, place, monkeypatch, after):
    """Another takes the lease meanwhile, trains on and is done."""
    now = [100.0]
    monkeypatch.setattr(copier, "_seconds", lambda: now[0])
    mirror = mirror_of(run, place)
    theirs = {}

    def stand_still(kind, name):
        if (kind, name) == ("write", after) and not theirs:
            now[0] += 60
            theirs.update({"writer.json": Lease(place)._content(), "metrics.jsonl": b"theirs", "summary.json": b"{}"})
            place.files.update(theirs)

    place.after = stand_still
    with pytest.raises(LeaseLostError):
        mirror.copy()
    assert {name: place.files[name] for name in theirs} == theirs


def test_a_stranger_directory_with_a_checkpoints_name_holds_nothing_up(run, place):
    (run / "checkpoints" / "step_9").mkdir()
    mirror_of(run, place).copy()
    assert place.steps() == [1, 2]


# ---- failures


@pytest.fixture
def behind(run, place):
    """Makes a copy that has to write, replace and remove."""
    mirror_of(run, place).copy()
    before = dict(place.files)
    add_step(run, 3)
    write_directory(run / "checkpoints" / "step_2", files_of(2, 0.5), {"step": 2})
    shutil.rmtree(run / "checkpoints" / "step_1")

    def make():
        place = MemoryPlace()
        place.files = {**before, "writer.json": (lease := Lease(place))._content()}
        return place, copier.Mirror(run, place, lease)

    return make


def test_the_check_of_what_is_visible_sees_each_thing_that_may_be_wrong(run, place):
    mirror_of(run, place).copy()
    assert problem_on(place) is None
    whole = dict(place.files)
    for name, content in whole.items():
        if name not in ("writer.json",) and not name.endswith("manifest.json"):
            place.files = {key: value for key, value in whole.items() if key != name}
            assert problem_on(place) is not None, name
            place.files = {**whole, name: content[:-1]}
            assert problem_on(place) is not None or name == "config.json", name


@pytest.mark.parametrize("answers", [True, False])
def test_nothing_is_ever_half_visible_whichever_operation_fails(run, behind, answers):
    clean, mirror = behind()
    mirror.copy()
    assert len(clean.calls) > 20
    assert {kind for kind, _ in clean.calls} == {"read", "write", "remove", "list"}
    for number in range(1, len(clean.calls) + 1):
        place, mirror = behind()
        seen = []
        place.after = lambda kind, name, place=place, seen=seen: seen.append(problem_on(place))
        place.fails, place.answers = lambda n, kind, number=number: n == number, answers
        with pytest.raises(MirrorError, match="the cable is cut"):
            mirror.copy()
        assert len(seen) == number
        mirror.copy()
        assert set(seen) == {None}, (number, clean.calls[number - 1])
        assert place.steps() == [2, 3]
        assert {n: c for n, c in place.files.items() if n != "writer.json"} == content_of(run), number


def test_what_is_there_stays_known_through_failures(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    add_step(run, 3)
    place.fails = lambda number, kind: kind == "write"
    for _ in range(2):
        with pytest.raises(MirrorError):
            mirror.copy()
        assert mirror.step == 2


def test_what_arrived_without_an_answer_is_known_at_the_next_copy(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    add_step(run, 3)
    place.answers = False
    place.fails = lambda number, kind: place.calls[-1] == ("write", "checkpoints/step_3/manifest.json")
    with pytest.raises(MirrorError):
        mirror.copy()
    assert place.steps() == [1, 2, 3]
    shutil.rmtree(run / "checkpoints" / "step_3")
    mirror.copy()
    assert [name for name in place.files if "step_3" in name] == []


def test_a_copy_with_the_manifest_first_would_be_noticed(tmp_path, monkeypatch):
    """The negative of the test above."""
    place = MemoryPlace()
    run = make_run(tmp_path, 1).path
    written = place.write
    held = []

    def manifest_first(name, content):
        if name.endswith("policy.safetensors"):
            written("checkpoints/step_1/manifest.json", (run / "checkpoints/step_1/manifest.json").read_bytes())
        written(name, content)

    monkeypatch.setattr(place, "write", manifest_first)
    place.after = lambda kind, name: held.append(problem_on(place))
    mirror_of(run, place).copy()
    assert "checkpoints/step_1/policy.safetensors is missing" in held


# ---- in the background


def test_commits_are_copied_while_it_runs_and_the_summary_last(run, place, at_once, capfd):
    mirror = mirror_of(run, place)
    mirror.start()
    wait_until(lambda: place.steps() == [1, 2], "nothing is copied")
    add_step(run, 3)
    wait_until(lambda: place.steps() == [1, 2, 3], "the next commit is not copied")
    (run / "summary.json").write_text('{"status": "finished"}')
    mirror.finish()
    told = {"url": "memory://runs/run", "step": 3, "failures": 0, "error": None}
    assert json.loads((run / "summary.json").read_text()) == {"status": "finished", "mirror": told}
    assert place.changes()[-1] == ("write", "summary.json")
    assert {name: content for name, content in place.files.items() if name != "writer.json"} == content_of(run)
    assert "writer.json" not in place.files
    assert capfd.readouterr().err == ""
    assert not mirror._thread.is_alive()


def test_a_mirror_that_fails_for_a_while_warns_once_and_catches_up(run, place, at_once, capfd):
    place.fails = lambda number, kind: kind == "write"
    place.files["writer.json"] = (lease := Lease(place))._content()
    mirror = copier.Mirror(run, place, lease)
    mirror.start()
    wait_until(lambda: mirror.failures > 3, "it isn't tried again")
    assert mirror.state()["error"] == "can't write memory://runs/run: the cable is cut"
    assert mirror.step is None
    place.fails = lambda number, kind: False
    wait_until(lambda: mirror.error is None, "it doesn't catch up")
    assert place.steps() == [1, 2]
    (run / "summary.json").write_text("{}")
    mirror.finish()
    warning, well = capfd.readouterr().err.splitlines()
    assert warning == (
        "lockstep: warning: can't write memory://runs/run: the cable is cut; training goes on, and copying is tried "
        "again"
    )
    assert well == "lockstep: memory://runs/run is up to date again"
    told = json.loads((run / "summary.json").read_text())["mirror"]
    assert told == {"url": "memory://runs/run", "step": 2, "failures": mirror.failures, "error": None}


def test_copies_take_a_tenth_of_the_time(run, place, monkeypatch):
    """The next commit waits for nine times as long as the last copy took; the end waits for nothing."""
    monkeypatch.setattr(copier, "LOOK_SECONDS", 0.001)
    now, looked, copied = [1000.0], itertools.count(), []
    monkeypatch.setattr(copier, "time", SimpleNamespace(monotonic=lambda: now[0]))
    mirror = mirror_of(run, place)

    def copy():
        copied.append(now[0])
        now[0] += 2.0

    def stamp():
        if copied:
            now[0] += 1.0  # a look each second
        return [f"step_{next(looked)}"]  # there is always a new one

    monkeypatch.setattr(mirror, "copy", copy)
    monkeypatch.setattr(mirror, "_stamp", stamp)
    mirror.start()
    wait_until(lambda: len(copied) > 3, "nothing is copied")
    mirror.finish()
    waits = [b - a for a, b in itertools.pairwise(copied[:4])]
    assert waits == [20.0] * 3


def test_failures_are_tried_again_ever_less_often(run, place, monkeypatch):
    monkeypatch.setattr(copier, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(copier, "BACKOFF", (0.05, 100.0))
    place.files["writer.json"] = (lease := Lease(place))._content()
    times = []
    place.fails = lambda number, kind: kind == "list" and not times.append(copier.time.monotonic())
    mirror = copier.Mirror(run, place, lease)
    mirror.start()
    wait_until(lambda: len(times) > 4, "it isn't tried again")
    assert all(b - a >= 0.05 * 2**n for n, (a, b) in enumerate(itertools.pairwise(times)))
    place.files["writer.json"] = Lease(place)._content()
    place.fails = lambda number, kind: False
    wait_until(lambda: not mirror._thread.is_alive(), "it goes on without a lease")


def test_one_that_fails_to_the_end_says_what_is_there(run, place, at_once, capfd):
    mirror = mirror_of(run, place)
    mirror.start()
    wait_until(lambda: place.steps() == [1, 2], "nothing is copied")
    place.fails = lambda number, kind: True
    add_step(run, 3)
    wait_until(lambda: mirror.error is not None, "the failure isn't noticed")
    (run / "summary.json").write_text("{}")
    mirror.finish(0.2)
    assert capfd.readouterr().err.splitlines()[1:] == [
        "lockstep: warning: memory://runs/run is behind at the end, step 2 is the newest there (can't read "
        "memory://runs/run: the cable is cut); the run's directory has all"
    ]
    told = json.loads((run / "summary.json").read_text())["mirror"]
    assert (told["step"], told["error"]) == (2, "can't read memory://runs/run: the cable is cut")
    assert told["failures"] >= 1
    place.fails = lambda number, kind: False  # it tries on
    wait_until(lambda: not mirror._thread.is_alive(), "it doesn't catch up")


def test_one_that_hangs_ends_when_its_time_is_over(run, place, at_once, capfd):
    mirror = mirror_of(run, place)
    hangs = threading.Event()
    place.after = lambda kind, name: (hangs.wait(), None)[1]
    mirror.start()
    (run / "summary.json").write_text("{}")
    mirror.finish(0.3)
    assert "(not done after 0 s)" in capfd.readouterr().err
    assert json.loads((run / "summary.json").read_text())["mirror"]["error"] == "not done after 0 s"
    place.files["writer.json"] = Lease(place)._content()
    hangs.set()
    wait_until(lambda: not mirror._thread.is_alive(), "it goes on without a lease")


def test_a_lost_lease_ends_the_copying(run, place, at_once, capfd):
    mirror = mirror_of(run, place)
    mirror.start()
    wait_until(lambda: place.steps() == [1, 2], "nothing is copied")
    theirs = place.files["writer.json"] = Lease(place)._content()
    before = dict(place.files)
    add_step(run, 3)
    wait_until(lambda: mirror.failures, "the loss isn't noticed")
    (run / "summary.json").write_text("{}")
    mirror.finish()
    assert place.files == before
    assert place.files["writer.json"] == theirs
    first, last = capfd.readouterr().err.splitlines()
    lost = "memory://runs/run is written by another process now"
    assert first == f"lockstep: warning: {lost}; nothing more is copied"
    assert f"step 2 is the newest there ({lost})" in last
    with pytest.raises(LeaseLostError):
        mirror.copy()


# ---- places that are emptied, or away for a while


def test_a_mirror_that_was_emptied_gets_everything_again(run, place, at_once, capfd):
    mirror = mirror_of(run, place)
    mirror.start()
    wait_until(lambda: place.steps() == [1, 2], "nothing is copied")
    place.files.clear()
    add_step(run, 3)
    wait_until(lambda: mirror.failures, "the loss isn't noticed")
    wait_until(lambda: mirror.step == 3, "it isn't copied again")
    (run / "summary.json").write_text("{}")
    mirror.finish()
    assert {name: content for name, content in place.files.items() if name != "writer.json"} == content_of(run)
    assert capfd.readouterr().err.splitlines() == [
        "lockstep: warning: memory://runs/run has lost its writer.json, and perhaps all else; training goes on, and "
        "copying is tried again",
        "lockstep: memory://runs/run is up to date again",
    ]
    told = {"url": "memory://runs/run", "step": 3, "failures": 1, "error": None}
    assert json.loads((run / "summary.json").read_text())["mirror"] == told


def test_one_that_is_empty_at_the_end_is_not_said_to_have_anything(run, place, at_once, capfd):
    mirror = mirror_of(run, place)
    mirror.start()
    wait_until(lambda: place.steps() == [1, 2], "nothing is copied")
    place.files.clear()
    place.fails = lambda number, kind: kind == "write"
    add_step(run, 3)
    wait_until(lambda: mirror.failures > 1, "the loss isn't noticed")
    (run / "summary.json").write_text("{}")
    mirror.finish(0.2)
    assert "is behind at the end, nothing is there" in capfd.readouterr().err
    assert json.loads((run / "summary.json").read_text())["mirror"]["step"] is None
    place.fails = lambda number, kind: False  # it tries on
    wait_until(lambda: not mirror._thread.is_alive(), "it doesn't catch up")


def test_a_share_that_is_mounted_again_has_all_at_the_next_copy(run, place):
    """What was written meanwhile, where it is mounted, doesn't count."""
    mirror = mirror_of(run, place)
    mirror.copy()
    share, place.files = place.files, {}
    add_step(run, 3)
    with pytest.raises(LeaseGoneError):
        mirror.copy()
    assert place.files == {}
    mirror.copy()
    assert place.steps() == [1, 2, 3]
    below, place.files = place.files, share
    add_step(run, 4)
    mirror.copy()
    assert problem_on(place) is None
    assert place.steps() == [1, 2, 3, 4]
    assert {name: content for name, content in place.files.items() if name != "writer.json"} == content_of(run)
    place.files = below
    mirror.copy()
    assert place.steps() == [1, 2, 3, 4]


def test_a_share_that_is_back_at_once_is_not_written_to_elsewhere(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    share, place.files = place.files, {}
    with pytest.raises(LeaseGoneError):
        mirror.copy()
    assert place.files == {}
    place.files = share
    add_step(run, 3)
    mirror.copy()
    assert place.steps() == [1, 2, 3]


def test_a_checkpoint_that_lost_a_file_is_copied_again(run, place):
    mirror = mirror_of(run, place)
    mirror.copy()
    for name in ("writer.json", "checkpoints/step_2/policy.safetensors"):
        del place.files[name]
    with pytest.raises(LeaseGoneError):
        mirror.copy()
    mirror.copy()
    assert problem_on(place) is None
    assert place.steps() == [1, 2]


def test_what_another_process_wrote_before_it_gave_its_lease_back_is_left_alone(run, place):
    """This one was asleep for so long that another took the lease, trained and ended."""
    mirror = mirror_of(run, place)
    mirror.copy()
    theirs = files_of(7)
    write = {f"checkpoints/step_7/{name}": content for name, content in theirs.items()}
    place.files |= write | {"checkpoints/step_7/manifest.json": json.dumps({"format": 1, "files": {}}).encode()}
    del place.files["writer.json"]
    before = dict(place.files)
    with pytest.raises(LeaseGoneError):
        mirror.copy()
    with pytest.raises(LeaseLostError, match="was written by another process meanwhile"):
        mirror.copy()
    assert place.files == before
