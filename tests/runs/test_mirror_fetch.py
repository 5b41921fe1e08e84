"""A run comes from its mirror whole, into its own directory, and never over what is newer or another's."""

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
from mirror_places import CONFIG, MemoryPlace, add_step, content_of, make_run, mirror_of

from lockstep.config.run import Config, RunOptions
from lockstep.launch.mirrored import Mirrors, _check_same, bring, mirrors, newest_here
from lockstep.runs.checkpoint import find_checkpoint, problem_with
from lockstep.runs.directory import RunDirectory
from lockstep.runs.mirror.fetch import fetch_config, fetch_run, has_run, steps_on
from lockstep.runs.mirror.lease import LEASE, Lease, LeaseGoneError
from lockstep.runs.mirror.place import MirrorError, Place


@pytest.fixture
def place(tmp_path):
    """A mirror of a run with three checkpoints, whose directory is gone."""
    run = make_run(tmp_path / "first", 1, 2, 3).path
    (run / "tensorboard").mkdir()
    (run / "tensorboard" / "events.out").write_bytes(b"curves")
    place = MemoryPlace()
    mirror = mirror_of(run, place)
    mirror.copy()
    place.expected = content_of(run)  # pyright: ignore[reportAttributeAccessIssue]
    shutil.rmtree(run)
    place.calls.clear()
    return place


def message_of(action, *arguments, **more):
    with pytest.raises(ValueError) as caught:
        action(*arguments, **more)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_copy_that_a_newer_version_has_written_is_neither_brought_nor_removed(place, tmp_path):
    """What isn't brought would be removed there by the next copy."""
    name = "checkpoints/step_3/manifest.json"
    place.files[name] = place.files[name].replace(b'"format": 1', b'"format": 2')
    before, run = dict(place.files), tmp_path / "other" / "run"
    assert message_of(bring, place, run, quiet=True) == (
        f"resume: {place.url}/checkpoints/step_3 was written by a newer lockstep (format 2; this one reads up to 1); "
        "resume with that lockstep, which reads it"
    )
    assert not run.exists()
    assert place.files == before
    behind = "checkpoints/step_1/manifest.json"  # nothing is lost by one behind what is read
    place.files[name] = before[name].replace(b'"format": 2', b'"format": 1')
    place.files[behind] = before[behind].replace(b'"format": 1', b'"format": 2')
    bring(place, run, quiet=True)
    assert find_checkpoint(run / "checkpoints").state["iteration"] == 3


def test_nor_is_one_between_a_damaged_copy_and_the_one_that_is_brought(place, tmp_path):
    newer, damaged = "checkpoints/step_2/manifest.json", "checkpoints/step_3/policy.safetensors"
    place.files[newer] = place.files[newer].replace(b'"format": 1', b'"format": 2')
    place.files[damaged] = place.files[damaged][:-1]
    with pytest.raises(MirrorError, match="checkpoints/step_2 was written by a newer lockstep"):
        bring(place, tmp_path / "other" / "run", quiet=True)
    del place.files[newer]
    bring(place, tmp_path / "other" / "run", quiet=True)
    assert find_checkpoint(tmp_path / "other" / "run" / "checkpoints").state["iteration"] == 1


def test_a_run_comes_as_it_was(place, tmp_path):
    run = tmp_path / "other" / "run"
    assert fetch_run(place, run) == 3
    assert content_of(run) == place.expected
    assert find_checkpoint(run / "checkpoints").state["iteration"] == 3
    reads = [name for _, name in place.calls if name]
    assert reads[-1] == "config.json"
    assert reads.index("metrics.jsonl") < reads.index("checkpoints/step_1/policy.safetensors")


def test_the_summary_of_a_run_that_has_ended_comes_too(place, tmp_path):
    place.files["summary.json"] = b'{"steps_per_second": 833.6}'
    fetch_run(place, tmp_path / "other")
    assert (tmp_path / "other" / "summary.json").read_bytes() == b'{"steps_per_second": 833.6}'
    assert place.calls[-1] == ("read", "summary.json")


@pytest.mark.parametrize("name", ["tensorboard", "checkpoints", ".lock"])
def test_nothing_is_brought_through_a_link(place, tmp_path, name):
    run, mine = tmp_path / "other" / "run", tmp_path / "mine"
    bring(place, run, quiet=True)
    step = run / "checkpoints" / "step_3"
    shutil.rmtree(step)
    if name == ".lock":
        mine.write_text("precious")
    else:
        (run / name).rename(mine)
    (run / name).symlink_to(mine)
    before = content_of(mine) if mine.is_dir() else mine.read_text()
    place.files["tensorboard/authorized_keys"] = b"theirs"
    message = message_of(bring, place, run, quiet=True)
    assert message == f"run {run}: {name} is a link to {mine}, which would be written; if that is yours, give --trust"
    assert before == (content_of(mine) if mine.is_dir() else mine.read_text())
    bring(place, run, quiet=True, trust=True)
    assert find_checkpoint(run / "checkpoints").state["iteration"] == 3


def test_what_is_here_already_is_not_brought_again(place, tmp_path):
    run = tmp_path / "run"
    fetch_run(place, run)
    shutil.rmtree(run / "checkpoints" / "step_2")
    (run / "checkpoints" / "step_1" / "state.json").write_text("{}")
    place.calls.clear()
    fetch_run(place, run)
    read = {name.split("/")[1] for _, name in place.calls if name.endswith(".safetensors")}
    assert read == {"step_1", "step_2"}
    assert content_of(run) == place.expected


@pytest.mark.parametrize("damage", ["flipped", "missing", "manifest", "empty", "format", "list"])
def test_a_damaged_checkpoint_is_passed_over_with_a_warning(place, tmp_path, capsys, damage):
    manifest, file = "checkpoints/step_3/manifest.json", "checkpoints/step_3/policy.safetensors"
    if damage == "flipped":
        place.files[file] = place.files[file][:-1] + b"?"
    elif damage == "missing":
        del place.files[file]
    else:
        spoilt = {"manifest": b"{", "empty": b"", "list": b"[]"}
        spoilt["format"] = json.dumps({**json.loads(place.files[manifest]), "format": 0}).encode()
        place.files[manifest] = spoilt[damage]
    assert fetch_run(place, tmp_path / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: warning: {place.url}/checkpoints/step_3: ")
    assert line.endswith("; passed over")
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == ["step_1", "step_2"]


def test_a_run_without_a_whole_checkpoint_is_refused(place, tmp_path, capsys):
    for step in (1, 2, 3):
        place.files[f"checkpoints/step_{step}/state.json"] = b"{}"
    assert message_of(fetch_run, place, tmp_path / "run") == f"resume: no checkpoint at {place.url} is whole"
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_run_that_has_only_begun_comes_too(place, tmp_path):
    place.files = {"config.json": place.files["config.json"]}
    assert fetch_run(place, tmp_path / "run") is None
    assert list(content_of(tmp_path / "run")) == ["config.json"]


def test_where_there_is_none_nothing_is_made(tmp_path):
    place = MemoryPlace()
    place.files["writer.json"] = b"{}"
    assert message_of(fetch_run, place, tmp_path / "run") == f"resume: there is no run at {place.url}"
    assert message_of(fetch_config, place, tmp_path / "run") == f"resume: there is no run at {place.url}"
    assert list(tmp_path.iterdir()) == []
    assert not has_run(place.names())
    assert steps_on(["checkpoints/step_1/state.json", "checkpoints/step_x/manifest.json", "x/manifest.json"]) == []


# ---- names that lead elsewhere

EVIL = (
    "../evil",
    "/evil",
    "//evil",
    "videos/../../evil",
    "videos/..",
    "videos//evil",
    "./../evil",
    "",
    ".lock",
    ".ssh/evil",
    "videos/.evil",
    "evil",
    "evil/config.json",
    "videos/evil\0.mp4",
)


@pytest.mark.parametrize("name", EVIL)
def test_no_name_on_a_mirror_leads_out_of_the_run(place, tmp_path, name):
    place.files[name] = b"evil"
    fetch_run(place, tmp_path / "deep" / "run")
    assert content_of(tmp_path / "deep" / "run") == place.expected
    assert [p for p in tmp_path.rglob("*") if "evil" in p.name] == []


@pytest.mark.parametrize(
    "name", ["../../../evil", "/{0}/evil", "../step_1/state.json", "envs/../../evil", "evil.sh", "envs/x/evil.json"]
)
def test_no_name_in_a_manifest_leads_out_of_its_checkpoint(place, tmp_path, name, capsys):
    name = name.format(tmp_path)
    key = "checkpoints/step_3/manifest.json"
    manifest = json.loads(place.files[key])
    digest = hashlib.sha256(b"evil").hexdigest()
    manifest["files"][name] = digest
    place.files[key] = json.dumps(manifest).encode()
    place.files[f"checkpoints/step_3/{name}"] = b"evil"
    assert fetch_run(place, tmp_path / "deep" / "run") == 2
    assert f"names {name!r}, which is no file of a checkpoint; passed over" in capsys.readouterr().err
    assert [p for p in tmp_path.rglob("*") if "evil" in p.name] == []
    assert problem_with(tmp_path / "deep" / "run" / "checkpoints" / "step_1") is None


def test_a_checkpoint_folder_of_such_a_name_is_none(place, tmp_path):
    place.files["checkpoints/step_4/../../evil/manifest.json"] = b"{}"
    place.files["checkpoints/../step_9/manifest.json"] = b"{}"
    place.files["checkpoints/step_7x/manifest.json"] = b"{}"
    assert fetch_run(place, tmp_path / "deep" / "run") == 3
    assert content_of(tmp_path / "deep" / "run") == place.expected
    assert [p for p in tmp_path.rglob("*") if p.name in ("evil", "step_9", "step_7x")] == []


# ---- interrupted


def test_whoever_is_interrupted_begins_again(place, tmp_path):
    fetch_run(place, tmp_path / "clean")
    reads = len(place.calls)
    for number in range(1, reads + 1):
        run = tmp_path / f"{number}"
        place.calls.clear()
        place.fails = lambda n, kind, number=number: n == number
        with pytest.raises(MirrorError):
            fetch_run(place, run)
        place.fails = lambda n, kind: False
        whole = content_of(run) == place.expected
        here = max(steps_on(place.names())) <= newest_here(run) and (run / "config.json").is_file()
        assert not here or whole, number  # else nobody would bring the rest
        assert fetch_run(place, run) == 3
        assert content_of(run) == place.expected, number


# ---- which of both goes on


@pytest.fixture
def mirror(tmp_path):
    """The URL of a mirror in a directory."""
    return f"file://{tmp_path}/mirror"


@pytest.fixture
def held():
    with contextlib.ExitStack() as stack:
        yield Mirrors(stack)


def mirrored(tmp_path, mirror, *steps, **settings):
    """A run that was mirrored, as it lies in its directory."""
    config = CONFIG.model_copy(
        update={"checkpoint": CONFIG.checkpoint.model_copy(update={"mirror": mirror}), **settings}
    )
    run = make_run(tmp_path / "runs", *steps, config=config)
    one = mirror_of(run.path, Place(f"{mirror}/run"))
    one.start()
    one.finish()
    assert one.error is None
    return run, config


def goes_on(held, config, run, which):
    """Mirrors a run that is resumed."""
    mirror = held.open(config, run, which, is_new=False)
    assert mirror is not None
    held.stack.callback(mirror.finish)


def options_of(tmp_path, resume="auto", name: str | None = "run"):
    return RunOptions(resume=resume, name=name, runs_dir=str(tmp_path / "runs"), quiet=True)


def test_auto_brings_a_mirror_that_is_newer_than_the_directory(tmp_path, mirror, held):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    expected = content_of(run.path)
    shutil.rmtree(run.path / "checkpoints" / "step_2")
    held.resolved(options_of(tmp_path), mirror, True)
    assert content_of(run.path) == expected
    assert not (run.path / ".lock").exists()
    goes_on(held, config, run, "latest")


@pytest.mark.parametrize("slash", ["", "/"])
def test_auto_brings_a_run_that_is_not_here_and_holds_it_once(tmp_path, mirror, held, slash):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    expected = content_of(run.path)
    shutil.rmtree(tmp_path / "runs")
    given = config.checkpoint.model_copy(update={"mirror": mirror + slash})
    config = config.model_copy(update={"checkpoint": given})
    assert held.resolved(options_of(tmp_path), mirror + slash, True).resume == "auto"
    assert content_of(run.path) == expected
    goes_on(held, config, run, "latest")
    assert Place(f"{mirror}/run").read(LEASE) is not None
    held.stack.close()
    assert Place(f"{mirror}/run").read(LEASE) is None


def test_auto_keeps_a_directory_that_is_newer_than_the_mirror(tmp_path, mirror, held):
    run, _ = mirrored(tmp_path, mirror, 1, 2)
    add_step(run.path, 3)
    expected = content_of(run.path)
    for options in (options_of(tmp_path), options_of(tmp_path, f"{mirror}/run", None)):
        held.resolved(options, mirror, True)
        assert content_of(run.path) == expected


def test_what_an_earlier_process_left_there_is_no_stranger_s_when_the_lease_vanishes(tmp_path, mirror, held):
    """Before the first copy, with a checkpoint on the mirror alone, because it was pruned here."""
    run, config = mirrored(tmp_path, mirror, 1, 2)
    add_step(run.path, 3)
    shutil.rmtree(run.path / "checkpoints" / "step_1")
    made = held._made(config, mirror, run, "latest", False)
    place = Place(f"{mirror}/run")
    place.remove([LEASE])
    with pytest.raises(LeaseGoneError):
        made.copy()
    made.copy()
    assert steps_on(place.names()) == [3, 2]
    assert place.read(LEASE) is not None


def test_auto_without_a_run_on_the_mirror_begins_one(tmp_path, mirror, held):
    assert held.resolved(options_of(tmp_path), mirror, True) == options_of(tmp_path)
    assert not (tmp_path / "runs").exists()
    message = message_of(held.resolved, options_of(tmp_path, f"{mirror}/other", None), None, True)
    assert message == f"resume: there is no run at {mirror}/other"


def test_a_name_is_refused_where_the_mirror_has_more_of_it(tmp_path, mirror, held):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    shutil.rmtree(run.path / "checkpoints" / "step_2")
    before = content_of(run.path)
    assert message_of(held.open, config, run, "latest", is_new=False) == (
        f"resume: {run.path} has step 1 and {mirror}/run has 2; --resume {mirror}/run goes on from there, --resume "
        f"{run.path}/checkpoints/step_1 from here"
    )
    assert content_of(run.path) == before
    goes_on(held, config, run, "step_1")


def test_a_directory_without_a_checkpoint_isnt_gone_on_from(tmp_path, mirror, held):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    shutil.rmtree(run.path / "checkpoints")
    assert message_of(held.open, config, run, None, is_new=False) == (
        f"resume: {run.path} has no checkpoint and {mirror}/run has 2; --resume {mirror}/run goes on from there, "
        "or give another name"
    )


def test_a_place_on_a_mirror_is_the_directory_that_it_was_brought_to(tmp_path, mirror, held):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    shutil.rmtree(run.path)
    options = held.resolved(options_of(tmp_path, f"{mirror}/run", None), None, True)
    assert (options.resume, options.name) == (str(run.path), None)
    assert held.named == {mirror}
    assert newest_here(run.path) == 2
    goes_on(held, config, run, "latest")


def test_a_mirror_whose_newest_checkpoint_is_damaged_can_be_gone_on_from(tmp_path, mirror, held, capsys):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    shutil.rmtree(run.path)
    (tmp_path / "mirror" / "run" / "checkpoints" / "step_2" / "state.json").write_text("{}")
    held.resolved(options_of(tmp_path), mirror, True)
    assert "checkpoints/step_2: state.json is damaged; passed over" in capsys.readouterr().err
    assert newest_here(run.path) == 1
    goes_on(held, config, run, "latest")


def test_another_spelling_of_a_reference_is_no_other_run_on_a_mirror(tmp_path):
    relative = "runs/base/checkpoints/step_128"

    def against(reference):
        return Config.model_validate({"algorithm": "grpo", "grpo": {"reference": reference}})

    _check_same(tmp_path, against(f"/abs/{relative}"), against(relative), "file:///mirror/run")
    with pytest.raises(MirrorError, match=r"is another run than file:///mirror/run: grpo\.reference is "):
        _check_same(tmp_path, against("/abs/runs/base/checkpoints/step_256"), against(relative), "file:///mirror/run")


def test_a_directory_of_another_run_is_left_as_it_is(tmp_path, mirror, held):
    run, config = mirrored(tmp_path, mirror, 1, 2)
    shutil.rmtree(run.path)
    make_run(tmp_path / "runs", 1, config=config.model_copy(update={"seed": 4}))
    before = content_of(run.path)
    for options in (options_of(tmp_path), options_of(tmp_path, f"{mirror}/run", None)):
        assert message_of(held.resolved, options, mirror, True) == (
            f"resume: {run.path} is another run than {mirror}/run: seed is 4 here and 3 there; give another "
            "--runs-dir, --name or --checkpoint.mirror"
        )
        assert content_of(run.path) == before


@pytest.mark.parametrize("steps", [(1, 2), (1, 2, 3)])
def test_a_place_means_no_other_run_that_is_here_and_as_far(tmp_path, mirror, held, steps):
    """Nothing is brought then, and the run here has no mirror by which it would be compared when it goes on."""
    run, _ = mirrored(tmp_path, mirror, 1, 2)
    shutil.rmtree(run.path)
    make_run(tmp_path / "runs", *steps, config=CONFIG.model_copy(update={"seed": 4}))
    before = content_of(run.path)
    assert message_of(held.resolved, options_of(tmp_path, f"{mirror}/run", None), None, True) == (
        f"resume: {run.path} is another run than {mirror}/run: seed is 4 here and 3 there; give another "
        "--runs-dir, --name or --checkpoint.mirror"
    )
    assert content_of(run.path) == before


def test_a_resumed_run_takes_no_other_runs_place_on_a_mirror(tmp_path, mirror, held):
    """It had none before: what lies there by its name is another's."""
    run, config = mirrored(tmp_path, mirror, 1, 2)
    there = content_of(tmp_path / "mirror")
    shutil.rmtree(run.path)
    other = config.model_copy(update={"seed": 4})
    ours = make_run(tmp_path / "runs", 1, 2, 3, config=other)
    assert message_of(held.open, other, ours, "latest", is_new=False).startswith(
        f"resume: {run.path} is another run than {mirror}/run: seed is 4 here and 3 there; give another --runs-dir"
    )
    held.stack.close()
    assert content_of(tmp_path / "mirror") == there


@pytest.mark.parametrize("spelled", ["link", "."])
def test_however_a_run_is_spelled_its_place_has_its_name(tmp_path, mirror, held, monkeypatch, spelled):
    run, config = mirrored(tmp_path, mirror, 1)
    (tmp_path / "link").symlink_to(run.path)
    monkeypatch.chdir(run.path if spelled == "." else tmp_path)
    goes_on(held, config, RunDirectory(Path(spelled)), "latest")
    assert {path.name for path in (tmp_path / "mirror").iterdir()} == {"run"}


def test_a_run_whose_directory_is_a_link_is_copied_to_where_other_hosts_look_for_it(tmp_path, mirror):
    (tmp_path / "runs").mkdir()
    (tmp_path / "scratch").mkdir()
    (tmp_path / "runs" / "run").symlink_to(tmp_path / "scratch")
    config = CONFIG.model_copy(update={"checkpoint": CONFIG.checkpoint.model_copy(update={"mirror": mirror})})
    with mirrors() as held:
        assert held.resolved(options_of(tmp_path), mirror, True) == options_of(tmp_path)
        run = make_run(tmp_path / "runs", 1, config=config)
        new = held.open(config, run, None, is_new=True)
        assert new is not None
        new.finish()
    for step, options in enumerate((options_of(tmp_path), options_of(tmp_path, f"{mirror}/run", None)), 2):
        add_step(run.path, step)
        with mirrors() as held:
            held.resolved(options, mirror, True)
            goes_on(held, config, run, "latest")
    assert {path.name for path in (tmp_path / "mirror").iterdir()} == {"run"}
    with mirrors() as held:
        held.resolved(options_of(tmp_path).model_copy(update={"runs_dir": str(tmp_path / "other")}), mirror, True)
    assert newest_here(tmp_path / "other" / "run") == 3


def test_a_name_that_a_mirror_has_is_no_new_run(tmp_path, mirror, held):
    run, config = mirrored(tmp_path, mirror, 1)
    shutil.rmtree(run.path)
    new = make_run(tmp_path / "runs", config=config)
    assert message_of(held.open, config, new, None, is_new=True) == (
        f"name: {mirror}/run exists already; --resume {mirror}/run continues it, another --name starts a new one"
    )
    assert not run.path.exists()


def test_only_the_process_that_writes_the_run_touches_the_mirror(tmp_path, mirror, held):
    _, config = mirrored(tmp_path, mirror, 1)
    run = RunDirectory(tmp_path / "other", is_writer=False)
    assert held.open(config, run, None, is_new=True) is None
    assert held.resolved(options_of(tmp_path), mirror, False) == options_of(tmp_path)
    options = held.resolved(options_of(tmp_path, f"{mirror}/run", None), None, False)
    assert json.loads(Path(str(options.resume), "config.json").read_text())["seed"] == 3
    assert Place(f"{mirror}/run").read(LEASE) is None
    held.stack.close()
    assert not Path(str(options.resume)).exists()


def test_a_run_that_is_written_elsewhere_is_refused_and_nothing_comes(tmp_path, mirror, held, monkeypatch):
    run, config = mirrored(tmp_path, mirror, 1)
    shutil.rmtree(run.path)
    monkeypatch.setattr("lockstep.runs.mirror.lease.RENEW_SECONDS", 0.1)
    theirs = Lease(Place(f"{mirror}/run"))
    theirs.take()
    theirs.keep()
    try:
        for options in (options_of(tmp_path), options_of(tmp_path, f"{mirror}/run", None)):
            message = message_of(held.resolved, options, mirror, True)
            assert message.startswith(f"{mirror}/run is being written by process {os.getpid()} on ")
        assert not run.path.exists()
        new = make_run(tmp_path / "runs", config=config)
        assert "is being written by process" in message_of(held.open, config, new, None, is_new=True)
        assert not run.path.exists()
    finally:
        theirs.give_back()
