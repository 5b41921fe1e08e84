"""A run whose directory is gone goes on from its mirror, on another host, as the one that never stopped."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from command_line import (
    CARTPOLE,
    GATED,
    NEEDS_PROC,
    Run,
    copy_of,
    ending,
    error_line,
    lockstep,
    metrics_of,
    running,
    same,
    wait_until,
)
from free_ports import free_port
from variants import variants


def ended_well(path, ended):
    assert ended.code == 0, ended.stderr
    return Run(path, ended)


def host(tmp_path, name):
    """A directory that nobody else has."""
    (tmp_path / name).mkdir()
    return tmp_path / name


def mirrored(s3, cwd, *words, account=None, **more):
    """``lockstep train`` of the run that all tests here know, with its mirror."""
    variables = s3.variables() | ({"XDG_CONFIG_HOME": str(account)} if account else {}) | more
    return lockstep("train", *words, "--name", "run", "--checkpoint.mirror", s3.mirror, cwd=cwd, **variables)


def stopped_and_lost(s3, cwd, *words, nproc=1):
    """A run that stopped in the middle, and whose directory is gone."""
    run = Run(cwd / "runs" / "run", mirrored(s3, cwd, *words, "--stop-at-step", 512, "--nproc", nproc))
    assert run.ended.code == 0, run.ended.stderr
    told = {"url": f"{s3.mirror}/run", "step": 512, "failures": 0, "error": None}
    assert run.summary["mirror"] == told
    assert json.loads(s3.read("summary.json"))["mirror"] == told
    assert "writer.json" not in s3.names()
    shutil.rmtree(cwd / "runs")


def on_mirror(s3, run):
    """What the mirror has of a run is what its directory has."""
    for file in run.path.rglob("*"):
        name = file.relative_to(run.path).as_posix()
        if file.is_file() and name != ".lock":
            assert s3.read(name) == file.read_bytes(), name
    assert len(s3.names()) == len([p for p in run.path.rglob("*") if p.is_file() and p.name != ".lock"])


@NEEDS_PROC
def test_killed_with_its_directory_deleted_it_goes_on_elsewhere(trained, s3, tmp_path):
    first, second = host(tmp_path, "first"), host(tmp_path, "second")
    gate = tmp_path / "gate"
    gate.touch()
    words = ("--name", "run", "--checkpoint.mirror", s3.mirror, "--resume", "auto")
    with running("train", *GATED, *words, cwd=first, GATE=str(gate), **s3.variables()) as (process, _):
        wait_until(lambda: "checkpoints/step_384/manifest.json" in s3.names(), "no checkpoint comes to the mirror")
        process.send_signal(9)
    shutil.rmtree(first)
    assert "writer.json" in s3.names()
    ended = lockstep("train", *GATED, *words, "--nproc", 2, cwd=second, **s3.variables())
    run = ended_well(second / "runs" / "run", ended)
    assert f"brought {s3.mirror}/run here, at step 384: runs/run" in ended.stderr
    same(trained(*CARTPOLE), run)
    assert run.summary["mirror"] == {"url": f"{s3.mirror}/run", "step": 1024, "failures": 0, "error": None}
    on_mirror(s3, run)


@pytest.mark.long
@pytest.mark.parametrize("engine", ["torch", "jax"])
@pytest.mark.parametrize("by", ["auto", "place"])
def test_stopped_and_lost_it_goes_on_elsewhere(trained, s3, tmp_path, engine, by):
    cartpole = (*CARTPOLE, "--engine", engine)
    stopped_and_lost(s3, host(tmp_path, "first"), *cartpole, nproc=2)
    cwd, account = host(tmp_path, "second"), host(tmp_path, "account")
    if by == "auto":
        ended = mirrored(s3, cwd, *cartpole, "--resume", "auto", "--nproc", 2, account=account)
    else:  # nobody on this account has trained with the mirror, but it is named
        words = ("train", "--resume", f"{s3.mirror}/run", "--nproc", 2)
        ended = lockstep(*words, cwd=cwd, **s3.variables(), XDG_CONFIG_HOME=str(account))
    run = ended_well(cwd / "runs" / "run", ended)
    assert f"brought {s3.mirror}/run here, at step 512: runs/run" in ended.stderr
    same(trained(*cartpole), run)
    on_mirror(s3, run)
    assert f"mirror:    {s3.mirror}/run" in ended.stdout


@pytest.mark.long
def test_a_directory_that_is_newer_goes_on_and_one_that_is_older_is_refused_by_name(trained, s3, tmp_path):
    cwd = host(tmp_path, "first")
    assert mirrored(s3, cwd, *CARTPOLE, "--stop-at-step", 512).code == 0
    older = copy_of(Run(cwd / "runs" / "run", None), host(tmp_path, "second") / "runs" / "run")  # pyright: ignore[reportArgumentType]
    run = ended_well(cwd / "runs" / "run", lockstep("train", "--resume", "run", cwd=cwd, **s3.variables()))
    same(trained(*CARTPOLE), run)
    before = {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}
    message = error_line(lockstep("train", "--resume", "run", cwd=tmp_path / "second", **s3.variables()))
    assert f"resume: runs/run has step 512 and {s3.mirror}/run has 1,024; --resume {s3.mirror}/run goes on" in message
    assert {path: path.read_bytes() for path in older.rglob("*") if path.is_file()} == before
    same(run, ended_well(older, mirrored(s3, tmp_path / "second", *CARTPOLE, "--resume", "auto")))


@NEEDS_PROC
@pytest.mark.parametrize("how", variants(["new", "auto", "place"], ["place"]))
def test_a_second_writer_is_refused_and_the_first_goes_on(trained, s3, tmp_path, how):
    first, second = host(tmp_path, "first"), host(tmp_path, "second")
    gate = tmp_path / "gate"
    gate.touch()
    words = ("--name", "run", "--checkpoint.mirror", s3.mirror)
    with running("train", *GATED, *words, cwd=first, GATE=str(gate), **s3.variables()) as (process, mark):
        wait_until(lambda: "checkpoints/step_384/manifest.json" in s3.names(), "no checkpoint comes to the mirror")
        named = f"{s3.mirror}/run is being written by process {process.pid} on {socket.gethostname()}; "
        more = {"new": (*CARTPOLE, *words), "auto": (*GATED, *words, "--resume", "auto")}
        ended = lockstep("train", *more.get(how, ("--resume", f"{s3.mirror}/run")), cwd=second, **s3.variables())
        assert named in error_line(ended)
        assert ended.code == 2
        assert not (second / "runs" / "run").exists()
        gate.unlink()
        run = ended_well(first / "runs" / "run", ending(process, mark))
    same(trained(*CARTPOLE), run)
    on_mirror(s3, run)
    if how == "new":
        taken = error_line(lockstep("train", *CARTPOLE, *words, cwd=second, **s3.variables()))
        assert f"name: {s3.mirror}/run exists already; --resume {s3.mirror}/run continues it" in taken
        assert not (second / "runs" / "run").exists()


# ---- several hosts


def two_hosts(s3, hosts, *words, accounts=({}, {})):
    """``lockstep train WORDS`` as two launchers would start it, each host's rank in a directory of its own."""
    places = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    places |= {"MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"} | s3.variables()
    with (
        running("train", *words, cwd=hosts[0], **places, **accounts[0], RANK="0") as first,
        running("train", *words, cwd=hosts[1], **places, **accounts[1], RANK="1") as second,
    ):
        return ending(*first), ending(*second)


@pytest.mark.parametrize(
    ("engine", "where"),
    variants(
        [(engine, where) for engine in ("torch", "jax") for where in ("rank 0", "mirror", "place")],
        [("torch", "rank 0"), ("torch", "place")],
    ),
)
def test_hosts_without_the_directory_get_it_from_rank_0_or_the_mirror(trained, s3, tmp_path, engine, where):
    devices = ("--devices", 1) if engine == "jax" else ()
    cartpole = (*CARTPOLE, "--engine", engine, *devices)
    hosts = [host(tmp_path, "first"), host(tmp_path, "second")]
    mirror = () if where == "rank 0" else ("--checkpoint.mirror", s3.mirror)
    ended = lockstep(
        "train", *cartpole, *mirror, "--name", "run", "--stop-at-step", 512, cwd=hosts[0], **s3.variables()
    )
    assert ended.code == 0, ended.stderr
    if where == "place":
        shutil.rmtree(hosts[0] / "runs")
        words = ("--resume", f"{s3.mirror}/run", *devices)
    else:
        words = (*cartpole, *mirror, "--name", "run", "--resume", "auto")
        if where == "mirror":
            shutil.rmtree(hosts[0] / "runs")
    first, second = two_hosts(s3, hosts, *words)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    run = Run(hosts[0] / "runs" / "run", first)
    same(trained(*CARTPOLE, "--engine", engine), run)
    assert run.summary["world_size"] == 2
    assert not list(hosts[1].rglob("checkpoints"))
    if where == "rank 0":
        assert s3.names() == []
    else:
        on_mirror(s3, run)


@pytest.mark.long
def test_hosts_with_homes_of_their_own_go_on_with_what_they_have_trained_with(trained, s3, tmp_path):
    accounts = [{"XDG_CONFIG_HOME": str(host(tmp_path, name))} for name in ("home_0", "home_1")]
    shared = [host(tmp_path, "shared")] * 2
    for words in ((*GATED, "--name", "run", "--stop-at-step", 512), ("--resume", "run", "--collective-timeout", 30)):
        first, second = two_hosts(s3, shared, *words, accounts=accounts)
        assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    same(trained(*CARTPOLE), Run(shared[0] / "runs" / "run", first))


def test_where_rank_1_alone_has_the_run_both_say_so(s3, tmp_path):
    """The negative of the test above: it is looked at what the hosts have."""
    hosts = [host(tmp_path, "first"), host(tmp_path, "second")]
    assert lockstep("train", *CARTPOLE, "--name", "run", "--stop-at-step", 512, cwd=hosts[1]).code == 0
    ended = two_hosts(s3, hosts, *CARTPOLE, "--name", "run", "--resume", "auto")
    assert all(each.code for each in ended)
    assert any("rank 1 has a checkpoint of step 512 on its host, and rank 0 has none" in e.stderr for e in ended)


# ---- trust


def test_a_stranger_mirror_is_neither_asked_nor_written_to(trained, s3, tmp_path):
    theirs = copy_of(trained(*CARTPOLE), tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    config["checkpoint"]["mirror"] = s3.mirror
    (theirs / "config.json").write_text(json.dumps(config))
    account = {"XDG_CONFIG_HOME": str(tmp_path / "account")}
    for words in (["--resume", theirs], [theirs, "--name", "run"], [theirs, "--name", "run", "--resume", "auto"]):
        message = error_line(lockstep("train", *words, cwd=tmp_path, **s3.variables(), **account))
        assert f"checkpoint.mirror: {theirs / 'config.json'} names {s3.mirror}, to which the run would be c" in message
        assert message.endswith("give --trust")
    assert s3.proxy.requests == []
    words = ("--resume", theirs, "--trust")
    ended = lockstep("train", *words, cwd=tmp_path, **s3.variables(), **account)
    assert ended.code == 0, ended.stderr
    assert "checkpoints/step_1024/manifest.json" in s3.names("theirs")
    assert metrics_of(theirs) == trained(*CARTPOLE).metrics
    assert not Path(tmp_path / "account").exists()
