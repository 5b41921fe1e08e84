"""Full disks and damaged files: one line, nothing lost that was there before."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import (
    CARTPOLE,
    SMALL,
    Run,
    assert_no_orphans,
    copy_of,
    error_line,
    lockstep,
    metrics_of,
    resume,
    same,
)

from lockstep.cli import main
from lockstep.runs.checkpoint import checkpoints_in, problem_with

KIB = 1024


@pytest.fixture
def small_disk(tmp_path):
    """Makes a file system of so many KiB."""
    mounted = []

    def mount(kib):
        path = tmp_path / "disk"
        path.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", path], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
        mounted.append(path)
        return path

    if shutil.which("mount") is None:
        pytest.skip("there is no mount command here")
    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)


@pytest.fixture
def finished(trained, tmp_path):
    """A copy of a finished run with the checkpoints of steps 1,024, 768 and 384."""
    path = copy_of(trained(*CARTPOLE), tmp_path / "runs" / "run")
    assert [p.name for p in checkpoints_in(path / "checkpoints")] == ["step_1024", "step_768", "step_384"]
    return path


def flip_a_bit(checkpoint):
    file = checkpoint / "policy.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def remove_a_file(checkpoint):
    (checkpoint / "policy.safetensors").unlink()


def cut_a_file(checkpoint):
    file = checkpoint / "policy.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


DAMAGE = [flip_a_bit, remove_a_file, cut_a_file]


def test_a_run_directory_below_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("mine")
    assert main(["train", "CartPole-v1", "--runs-dir", "notes/runs"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: error: runs_dir: notes/runs/")
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("notes/new/a.jsonl", "{0}/notes/new/a.jsonl can't be written: {0}/notes is no directory"),
        ("folder", "{0}/folder can't be written: it is a directory"),
        (
            "runs/a/metrics.jsonl",
            "{0}/runs/a/metrics.jsonl is the name of one of the run's own files; name another file",
        ),
        ("runs/a/config.json", "{0}/runs/a/config.json is the name of one of the run's own files; name another file"),
    ],
)
def test_a_bad_place_of_a_second_record_is_refused_before_the_run_is_made(tmp_path, monkeypatch, capsys, place, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "folder").mkdir()
    assert main(["train", "CartPole-v1", "--name", "a", "--log.jsonl", place]) == 2
    assert capsys.readouterr().err == f"lockstep: error: log.jsonl: {said.format(tmp_path)}\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("folder", "locale", "said"),
    [
        (b"wd\xff", {}, "wd\\udcff/log.jsonl' isn't text in utf-8, as a config has to be; give another directory"),
        (
            "wd é".encode(),
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "wd \\udcc3\\udca9/log.jsonl' isn't text in ascii, as a config has to be; give another directory, or set "
            "PYTHONUTF8=1",
        ),
    ],
    ids=["Latin-1", "ASCII"],
)
def test_a_second_record_in_a_directory_that_no_text_names_is_refused_before_the_run_is_made(
    tmp_path, folder, locale, said
):
    """Without it, training works there."""
    place = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + folder))
    place.mkdir()
    line = error_line(lockstep("train", *CARTPOLE, "--log.jsonl", "log.jsonl", "--name", "x", cwd=place, **locale))
    assert "log.jsonl: '" in line
    assert line.endswith(said)
    assert not any(place.iterdir())


def test_a_resumed_run_has_no_second_record_among_its_own_files_either(trained, tmp_path):
    run = trained(*CARTPOLE)
    path = copy_of(run, tmp_path / "run")
    words = ("train", "--resume", path, "--total-steps", 2048, "--log.jsonl", path / "metrics.jsonl")
    line = error_line(lockstep(*words, cwd=tmp_path))
    assert line.endswith("metrics.jsonl is the name of one of the run's own files; name another file")
    assert metrics_of(path) == run.metrics


def test_the_record_of_another_run_is_not_written_over(trained, tmp_path):
    other = trained(*CARTPOLE)
    record, rows = other.path / "metrics.jsonl", other.metrics
    words = ("train", *CARTPOLE, "--name", "run", "--log-jsonl", record)
    line = error_line(lockstep(*words, cwd=tmp_path))
    assert line.endswith(f"log.jsonl: {record} already holds another run's records; give another path or remove it")
    assert Run(other.path, other.ended).metrics == rows
    assert not (tmp_path / "runs").exists()


def test_a_run_that_cannot_be_written_is_not_resumed(trained, tmp_path):
    path = copy_of(trained(*CARTPOLE), tmp_path / "run")
    (path / ".lock").mkdir()  # what a file system that is read only does to anybody, this does to root
    line = error_line(lockstep("train", "--resume", path, cwd=tmp_path))
    assert line.endswith(f"run {path} can't be written (Is a directory); copy it to where you may write")


def test_a_finished_run_that_cannot_be_written_has_nothing_left_to_do_under_auto(trained, tmp_path):
    """As a supervisor meets it that repeats its command over an archive; whether it has ended is what its files say."""
    path = copy_of(trained(*CARTPOLE), tmp_path / "runs" / "run")
    (path / ".lock").mkdir()
    words = ("train", *CARTPOLE, "--name", "run", "--resume", "auto")
    ended = lockstep(*words, cwd=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "has done 1,024 of 1,024 steps; --total-steps N trains it further" in ended.stdout
    assert ended.stderr == ""
    (path / "summary.json").rename(tmp_path / "summary.json")
    assert "can't be written (Is a directory)" in error_line(lockstep(*words, cwd=tmp_path))
    (tmp_path / "summary.json").rename(path / "summary.json")
    ended = lockstep(*words, "--total-steps", 2048, cwd=tmp_path)
    assert ended.code == 2
    assert "can't be written (Is a directory)" in ended.stderr


def test_a_disk_that_is_full_at_a_checkpoint(small_disk, tmp_path):
    disk = small_disk(240)
    words = ("--runs-dir", disk, "--name", "run", "--log.no-tensorboard", "--checkpoint.keep-last", 1, "--nproc", 2)
    ended = lockstep("train", *CARTPOLE, *words, cwd=tmp_path)
    line = error_line(ended)
    assert_no_orphans(ended)
    assert f"checkpoint {disk / 'run' / 'checkpoints'}/step_768 can't be written: the disk is full" in line
    (left,) = (disk / "run" / "checkpoints").iterdir()
    assert left.name == "step_384"
    assert problem_with(left) is None


def run_on_a_disk_with(free, disk, cwd):
    """A run that was stopped after its first checkpoint, on a disk with so much room left."""
    words = ("--runs-dir", disk, "--name", "run", "--log.no-tensorboard", "--stop-at-step", 384)
    ended = lockstep("train", *CARTPOLE, *words, cwd=cwd)
    assert ended.code == 0, ended.stderr
    room = os.statvfs(disk)
    (disk / "filler").write_bytes(bytes(room.f_bavail * room.f_bsize - free))
    return disk / "run"


def go_on_without_room(path, file):
    """Resume a run on a full disk; the line says why it can't go on, and what there was is there."""
    ended = lockstep("train", "--resume", path, "--total-steps", 10_240, "--checkpoint.interval", 0, cwd=path.parent)
    warning, line = ended.stderr.splitlines()  # the first says that total_steps is another from here on
    assert warning.startswith("lockstep: warning: total_steps was 1024 and is 10240")
    assert ended.code != 0
    assert line.startswith("lockstep: error: ")
    assert "No space left" in line or "the disk is full" in line
    assert str(path) in line
    assert file in line
    assert problem_with(path / "checkpoints" / "step_384") is None
    assert len(metrics_of(path)) >= 3


def test_a_disk_that_is_full_when_a_run_is_resumed(small_disk, tmp_path):
    path = run_on_a_disk_with(0, small_disk(240), tmp_path)
    before = (path / "config.json").read_bytes()
    go_on_without_room(path, "config.json")
    assert (path / "config.json").read_bytes() == before


def test_a_disk_that_is_full_at_a_line_of_metrics(small_disk, tmp_path, trained):
    path = run_on_a_disk_with(24 * KIB, small_disk(600), tmp_path)
    go_on_without_room(path, "metrics.")
    (path.parent / "filler").unlink()
    same(trained(*CARTPOLE), resume(path, "--total-steps", 1024))


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_a_disk_that_is_full_at_a_recording(small_disk, tmp_path, name):
    file = small_disk(8) / name
    words = ("CartPole-v1", "--policy", "random", "--episodes", 60, "--out", file)
    line = error_line(lockstep("record", *words, cwd=tmp_path))
    assert line == f"lockstep: error: {file} can't be written: the disk is full"
    assert not any(file.parent.iterdir())


@pytest.mark.parametrize(("option", "name"), [("--torch", "a.pt2"), ("--onnx", "a.onnx")])
def test_a_disk_that_is_full_at_an_exported_policy(small_disk, tmp_path, trained, option, name):
    """PyTorch's own writer of programs would end the process by SIGABRT."""
    if option == "--onnx":
        pytest.importorskip("onnxruntime")
    file = small_disk(8) / name
    ended = lockstep("export", trained(*CARTPOLE).path, option, file, cwd=tmp_path)
    assert error_line(ended) == f"lockstep: error: {file} can't be written: the disk is full"
    assert ended.code == 1
    assert not any(file.parent.iterdir())


def test_a_disk_that_is_full_at_a_cloned_run(small_disk, tmp_path, trained):
    disk = small_disk(8)
    assert lockstep("record", trained(*CARTPOLE).path, "--out", tmp_path / "a.npz", cwd=tmp_path).code == 0
    ended = lockstep("clone", tmp_path / "a.npz", "--out", disk / "run", "--epochs", 1, cwd=tmp_path)
    line = error_line(ended)
    assert line.startswith(f"lockstep: error: {disk / 'run'}")
    assert line.endswith("can't be written: the disk is full")
    assert not any(disk.iterdir())


@pytest.mark.parametrize("damage", DAMAGE)
def test_evaluation_passes_over_a_damaged_checkpoint(finished, damage, capsys):
    damage(finished / "checkpoints" / "step_1024")
    assert main(["eval", str(finished), "--episodes", "2", "--json"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith(f"lockstep: warning: {finished / 'checkpoints' / 'step_1024' / 'policy.safetensors'}")
    assert line.endswith("passed over for step_768")
    assert json.loads(captured.out)["global_step"] == 768


def test_evaluation_of_whole_checkpoints_warns_of_nothing(finished, capsys):
    assert main(["eval", str(finished), "--episodes", "2", "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert json.loads(captured.out)["global_step"] == 1024


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(finished, trained):
    flip_a_bit(finished / "checkpoints" / "step_1024")
    resumed = resume(finished)
    (line,) = resumed.ended.stderr.splitlines()
    assert line.startswith(f"lockstep: warning: {finished / 'checkpoints' / 'step_1024' / 'policy.safetensors'}")
    assert line.endswith("passed over for step_768")
    same(trained(*CARTPOLE), resumed)
    assert problem_with(finished / "checkpoints" / "step_1024") is None


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("words", [["eval"], ["train", "--resume"]], ids=" ".join)
def test_a_damaged_checkpoint_that_is_the_only_one_is_named(finished, damage, words, capsys):
    for step in (768, 384):
        shutil.rmtree(finished / "checkpoints" / f"step_{step}")
    only = finished / "checkpoints" / "step_1024"
    damage(only)
    assert main([*words, str(finished)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"lockstep: error: {only / 'policy.safetensors'} is ")


def test_a_directory_without_a_manifest_is_no_checkpoint(finished, capsys):
    for path in checkpoints_in(finished / "checkpoints"):
        (path / "manifest.json").write_text("{}")
    assert main(["eval", str(finished)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: error: ")
    assert "step_1024 has no valid manifest.json" in line


def test_the_last_comparison_comes_before_the_last_checkpoint(tmp_path):
    words = ("unreduced:CartPole-v1", *SMALL, "--nproc", 2, "--proof.interval", 0, "--checkpoint.interval", 0)
    line = error_line(lockstep("train", *words, "--name", "run", cwd=tmp_path))
    assert "ranks are out of sync at the end: rank 1 of 2" in line
    assert checkpoints_in(tmp_path / "runs" / "run" / "checkpoints") == []
    assert len(metrics_of(tmp_path / "runs" / "run")) == 8


def test_no_checkpoint_holds_what_ranks_do_not_share(tmp_path):
    """Whoever went on from it would have one rank's mistake on all of them, and nothing would show it."""
    words = ("unreduced:CartPole-v1", *SMALL, "--nproc", 2, "--proof.interval", 0, "--checkpoint.interval", 2)
    line = error_line(lockstep("train", *words, "--name", "run", cwd=tmp_path))
    assert "ranks are out of sync after iteration 2: rank 1 of 2" in line
    assert list((tmp_path / "runs" / "run" / "checkpoints").iterdir()) == []
