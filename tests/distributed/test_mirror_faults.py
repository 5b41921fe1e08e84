"""A mirror that fails costs a run nothing: it warns, trains on to the same agent, and brings the mirror up to date."""

import json
import shutil
import time

import pytest
import s3_server
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    Run,
    ending,
    error_line,
    lockstep,
    running,
    same,
    wait_until,
)
from mirror_places import content_of
from variants import variants

FAULTS = (*s3_server.FAULTS, s3_server.HANG)
WARNS = "; training goes on, and copying is tried again"


def started(s3, tmp_path, gate):
    """A run that stands still in its fifth iteration, with the third one's checkpoint on its mirror."""
    gate.touch()
    words = ("train", *GATED, "--name", "run", "--checkpoint.mirror", s3.mirror)
    return running(*words, cwd=tmp_path, GATE=str(gate), **s3.variables())


def is_up_to_date(s3, run):
    for file in run.path.rglob("*"):
        if file.is_file() and file.name not in (".lock", "summary.json"):
            name = file.relative_to(run.path).as_posix()
            assert s3.read(name) == file.read_bytes(), name


def warnings_of(s3, ended):
    """Those of the mirror, of a run whose environment stands in its steps meanwhile.

    The mirror's client draws how long it waits from the generator that a step isn't to move, and that is warned of too.
    """
    lines = [line for line in ended.stderr.splitlines() if line.startswith("lockstep: warning: ")]
    return [line for line in lines if s3.mirror in line]


def reached(s3):
    """Waits until the third iteration's checkpoint is on the mirror, and whoever copied it has been told so."""
    wait_until(lambda: "checkpoints/step_384/manifest.json" in s3.names(), "no checkpoint comes to the mirror")

    def rests():
        before = len(s3.proxy.requests)
        time.sleep(0.5)
        return len(s3.proxy.requests) == before

    wait_until(rests, "the mirror is asked again and again")


@NEEDS_PROC
@pytest.mark.long
@pytest.mark.parametrize("fault", FAULTS)
def test_a_mirror_that_fails_for_a_while_catches_up(trained, s3, tmp_path, fault):
    gate = tmp_path / "gate"
    with started(s3, tmp_path, gate) as (process, mark):
        reached(s3)
        s3.proxy.set(fault)
        gate.unlink()
        path = tmp_path / "runs" / "run"
        wait_until((path / "checkpoints" / "step_768").exists, "no checkpoint of the sixth iteration")
        wait_until(lambda: s3.proxy.hit or fault == s3_server.REFUSE, "the mirror isn't asked")
        time.sleep(0.5)  # in which it is tried to copy it
        if fault != s3_server.SLOW:
            assert "checkpoints/step_768/manifest.json" not in s3.names()
        s3.proxy.set(None)
        ended = ending(process, mark)
    assert ended.code == 0, ended.stderr
    run = Run(path, ended)
    same(trained(*CARTPOLE), run)
    told = run.summary["mirror"]
    assert (told["url"], told["step"], told["error"]) == (f"{s3.mirror}/run", 1024, None)
    is_up_to_date(s3, run)
    assert json.loads(s3.read("summary.json"))["mirror"] == told
    assert "writer.json" not in s3.names()
    warnings = warnings_of(s3, ended)
    if told["failures"]:
        (warning,) = warnings
        assert s3.mirror in warning
        assert warning.endswith(WARNS)
        assert f"lockstep: {s3.mirror}/run is up to date again" in ended.stderr
    else:
        assert warnings == []
    if fault == s3_server.DENY:  # others last shorter than the client's own patience
        assert told["failures"] > 0


@pytest.mark.long
@NEEDS_PROC
@pytest.mark.parametrize("fault", ["cut", "deny"])
def test_a_mirror_that_fails_to_the_end_is_told_and_brought_up_to_date_later(trained, s3, tmp_path, fault):
    gate = tmp_path / "gate"
    with started(s3, tmp_path, gate) as (process, mark):
        reached(s3)
        s3.proxy.set(fault)
        gate.unlink()
        began = time.monotonic()
        ended = ending(process, mark)
    assert ended.code == 0, ended.stderr
    assert time.monotonic() - began < 120
    run = Run(tmp_path / "runs" / "run", ended)
    same(trained(*CARTPOLE), run)
    told = run.summary["mirror"]
    assert (told["url"], told["step"]) == (f"{s3.mirror}/run", 384)
    assert told["error"]
    warnings = warnings_of(s3, ended)
    assert "run is behind at the end, step 384 is the newest there (" in warnings[-1]
    assert told["error"] in warnings[-1]
    assert told["failures"] > 0
    assert len(warnings) == 2
    assert warnings[0].endswith(WARNS)
    assert "checkpoints/step_384/manifest.json" in s3.names()
    assert "checkpoints/step_1024/manifest.json" not in s3.names()
    s3.proxy.set(None)
    words = ("train", *GATED, "--name", "run", "--checkpoint.mirror", s3.mirror, "--resume", "auto")
    again = lockstep(*words, cwd=tmp_path, **s3.variables())
    assert again.code == 0, again.stderr
    assert "warning" not in again.stderr
    same(trained(*CARTPOLE), run)
    assert run.summary["mirror"] == {"url": f"{s3.mirror}/run", "step": 1024, "failures": 0, "error": None}
    is_up_to_date(s3, run)


def refused(s3, tmp_path, *words, key=s3_server.KEY):
    """The line of a command that fails before a run is made."""
    ended = lockstep("train", *words, cwd=tmp_path, **s3.variables(key))
    assert ended.code == 2
    assert not list(tmp_path.rglob("config.json"))
    assert s3.names() == []
    return error_line(ended)


NONE = "s3://no-such-bucket/runs"
UNKNOWN_KEY = "The AWS Access Key Id you provided does not exist in our records."
NO_BUCKET = f"can't write {NONE}/run: The specified bucket does not exist"
WORDS = {"new": ("--name", "run"), "auto": ("--name", "run", "--resume", "auto")}


@pytest.mark.parametrize("how", variants(WORDS, ["new"]))
def test_a_mirror_that_cannot_be_had_at_the_start_is_one_line_and_no_run(s3, tmp_path, how):
    new = (*CARTPOLE, *WORDS[how], "--checkpoint.mirror")
    assert UNKNOWN_KEY in refused(s3, tmp_path, *new, s3.mirror, key="wrong")
    assert NO_BUCKET in refused(s3, tmp_path, *new, NONE)
    s3.proxy.set(s3_server.DENY)
    assert f"can't write {s3.mirror}/run: Access Denied" in refused(s3, tmp_path, *new, s3.mirror)
    assert "nosuch://place/run" in refused(s3, tmp_path, *new, "nosuch://place")
    wanted = "a place that fsspec knows is wanted, e.g. s3://bucket/runs"
    assert f"checkpoint.mirror: 'bucket/runs': {wanted}" in refused(s3, tmp_path, *new, "bucket/runs")


@pytest.mark.long
def test_a_run_on_a_mirror_that_cannot_be_had_is_one_line_and_no_run(s3, tmp_path):
    assert UNKNOWN_KEY in refused(s3, tmp_path, "--resume", f"{s3.mirror}/run", key="wrong")
    assert NO_BUCKET in refused(s3, tmp_path, "--resume", f"{NONE}/run")
    assert f"resume: there is no run at {s3.mirror}/typo" in refused(s3, tmp_path, "--resume", f"{s3.mirror}/typo")


@pytest.mark.long
def test_a_mirror_that_refuses_connections_at_the_start_is_one_line_and_no_run(s3, tmp_path):
    s3.proxy.set(s3_server.REFUSE)
    new = (*CARTPOLE, "--name", "run", "--checkpoint.mirror", s3.mirror)
    assert "Could not connect to the endpoint URL" in refused(s3, tmp_path, *new)
    assert "Could not connect to the endpoint URL" in refused(s3, tmp_path, "--resume", f"{s3.mirror}/run")


OWN = {"new": (), "auto": ("--resume", "auto"), "group": ("--seeds", "0-1", "--quiet")}


@pytest.mark.parametrize("how", OWN)
@pytest.mark.parametrize("scheme", variants(["file", "local"], ["file"]))
def test_a_mirror_that_is_the_runs_own_directory_is_refused_before_there_is_a_run(tmp_path, how, scheme):
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    words = (*CARTPOLE, "--name", "run", *OWN[how], "--checkpoint.mirror", f"{scheme}://{tmp_path}/link/")
    line = error_line(lockstep("train", *words, cwd=tmp_path))
    assert "is the run's own directory, and no copy of it; give a place elsewhere, or null" in line
    assert {path.name for path in tmp_path.rglob("*")} <= {"link", "runs"}


def test_a_run_is_not_resumed_with_its_own_directory_as_its_mirror(trained, tmp_path):
    run = tmp_path / "runs" / "run"
    shutil.copytree(trained(*CARTPOLE).path, run)
    before = content_of(run)
    for words in (
        ("--resume", "runs/run", "--checkpoint.mirror", f"file://{run.parent}"),
        ("--resume", f"file://{run}"),
    ):
        ended = lockstep("train", *words, "--total-steps", 2048, cwd=tmp_path)
        assert ended.code == 2
        assert ended.stderr.splitlines()[-1].startswith(
            f"lockstep: error: checkpoint.mirror: file://{run} is the run's"
        )
        assert content_of(run) == before
