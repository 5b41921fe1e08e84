"""The doctor's two doors and its options, on scripts that end in every way."""

import json
import os
import py_compile
import signal
import sys
import zipfile
from pathlib import Path

import pytest
from command_line import NEEDS_PROC, assert_no_orphans, error_line, lockstep, run_words, running, wait_until
from doctored import doctor

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn

def wait_for_the_other():
    dist.recv(torch.zeros(1), 1 - rank)

wish, alone = sys.argv[1:], "alone" in sys.argv
rank = int(os.environ["RANK"])
if not alone:
    dist.init_process_group("gloo")
torch.manual_seed(0)
net = nn.Linear(3, 3)
model = net if {"alone", "plain", "attach"} & set(wish) else nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
if "attach" in wish:
    import lockstep
    lockstep.attach(net, optimizer)
torch.manual_seed(rank)
for step in range(5):
    optimizer.zero_grad()
    model(torch.randn(4, 3)).pow(2).mean().backward()
    optimizer.step()
Path(f"{rank}.told").write_text(f"{__name__} {sys.argv} {sys.path[0]} {__file__}")
if "raise" in wish and rank == 1:
    raise KeyError("nothing")
if "deadlock" in wish:
    wait_for_the_other()
if "own line" in wish:
    dist.irecv(torch.zeros(3), src=1 - rank).wait()
if "stay" in wish:
    time.sleep(3600)
if "leave" in wish:
    os._exit(0)
if "status" in wish:
    sys.exit(5)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    return tmp_path


@pytest.mark.long
def test_the_script_runs_as_python_would_run_it(script):
    found = doctor("script.py", "--nproc", "x", "leave", cwd=script)
    assert found.json["verdict"] == "IN SYNC"
    assert found.json["coverage"]["optimizer_steps"] == {"0": {"0": 5, "1": 5}}  # also of ranks that left abruptly
    for rank in range(2):
        expected = f"__main__ {['script.py', '--nproc', 'x', 'leave']} {script} {script / 'script.py'}"
        assert (script / f"{rank}.told").read_text() == expected


@pytest.mark.long
def test_under_torchrun_every_rank_is_watched_and_one_reports(script):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    torchrun += ["--nproc-per-node", "2"]
    more = {"TMPDIR": str(script), "GLOO_SOCKET_IFNAME": "lo"}
    words = ["-m", "lockstep", "doctor", "--json", "-", "-m", "script", "alone"]
    ended = run_words([*torchrun, *words], script, **more)
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    report = json.loads(line)
    assert (report["verdict"], report["coverage"]["ranks"]) == ("NOT IN SYNC", 2)
    assert [finding["kind"] for finding in report["findings"]] == ["independent"]
    assert ended.code == 1
    assert not list(script.glob("*lockstep-*"))
    assert (script / "1.told").read_text().endswith(f"{script} {script / 'script.py'}")


def test_a_process_group_alone_reduces_nothing_and_attach_does(script):
    plain = doctor("script.py", "plain", cwd=script)
    assert (plain.json["verdict"], plain.kinds) == ("NOT IN SYNC", ["gradients"])
    assert plain.json["findings"][0]["details"]["why"] == "unreduced"
    assert "lockstep.attach" in plain.json["findings"][0]["fix"]
    assert doctor("script.py", "attach", cwd=script).json["verdict"] == "IN SYNC"


@NEEDS_PROC
@pytest.mark.long
def test_ranks_that_wait_for_one_another_are_ended_with_their_stacks(script):
    found = doctor("--time-limit", 2, "script.py", "deadlock", cwd=script)
    assert (found.json["verdict"], found.kinds) == ("NOT IN SYNC", ["waiting"])
    stacks = found.json["findings"][0]["details"]["stacks"]
    assert set(stacks) == {"0", "1"}
    assert all("script.py" in " ".join(stack) and "wait_for_the_other" in " ".join(stack) for stack in stacks.values())
    assert "wait_for_the_other (script.py:" in found.ended.stdout
    assert_no_orphans(found.ended)


@pytest.mark.long
@NEEDS_PROC
def test_ranks_that_wait_in_a_line_of_the_script_itself_are_seen_too(script):
    found = doctor("--time-limit", 0.5, "script.py", "own line", cwd=script)
    assert (found.json["verdict"], found.kinds) == ("NOT IN SYNC", ["waiting"])
    assert "(script.py:" in found.ended.stdout


@pytest.mark.long
def test_a_script_that_fails_is_reported_by_rank_and_line(script):
    found = doctor("script.py", "raise", cwd=script)
    assert (found.json["verdict"], found.kinds) == ("UNDETERMINED", ["failure"])
    assert "rank 1 raised KeyError: 'nothing' — at script.py:28" in found.json["reason"]
    assert "KeyError: 'nothing'" in found.ended.stderr
    assert "lockstep/doctor" not in found.ended.stderr  # the traceback is the script's


@pytest.mark.long
@NEEDS_PROC
def test_ctrl_c_ends_the_ranks_and_reports_what_was_seen(script):
    with running("doctor", "--json", "report.json", "script.py", "stay", cwd=script) as (process, _):
        wait_until(lambda: (script / "1.told").is_file() and (script / "0.told").is_file(), "the ranks don't train")
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=600)
    report = json.loads((script / "report.json").read_text())
    assert process.returncode == 2, stderr
    assert report["findings"][0]["kind"] == "interrupted"
    assert report["coverage"]["compared_steps"] == 5
    assert "UNDETERMINED" in stdout


@pytest.mark.long
def test_an_exit_status_of_the_scripts_own_is_told(script):
    found = doctor("--nproc", 1, "--first", 2, "--interval", 4, "script.py", "alone", "status", cwd=script)
    assert (found.json["verdict"], found.kinds) == ("UNDETERMINED", ["one_rank", "failure"])
    assert "exit status 5" in found.json["findings"][1]["text"]
    assert found.json["coverage"]["compared_steps"] == 3  # 1, 2 and 4


def test_a_script_is_run_by_what_it_is_and_not_by_its_name(tmp_path):
    told = "import os, sys; open(os.environ['RANK'] + '.told', 'w').write(f'{__name__} {sys.argv} {__file__}')"
    (tmp_path / "train").write_text(told)
    doctor("--", "./train", "x", cwd=tmp_path)
    assert (tmp_path / "1.told").read_text() == f"__main__ {['./train', 'x']} {tmp_path / 'train'}"
    (tmp_path / "source.py").write_text(told)
    py_compile.compile(str(tmp_path / "source.py"), str(tmp_path / "compiled"), doraise=True)
    with zipfile.ZipFile(tmp_path / "archive", "w") as archive:
        archive.writestr("__main__.py", told)
    for name in ("compiled", "archive"):
        doctor("--", name, name, cwd=tmp_path)
        assert (tmp_path / "1.told").read_text().startswith(f"__main__ {[name, name]} ")


def test_a_script_without_pytorch_has_no_steps(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys\nos.write(1, f'{\"torch\" in sys.modules}\\n'.encode())\n")
    found = doctor("script.py", cwd=tmp_path)
    assert (found.json["verdict"], found.kinds) == ("UNDETERMINED", ["no_steps"])
    assert found.ended.stdout.splitlines().count("False") == 2
    assert found.json["coverage"]["torch"] is False


@NEEDS_PROC
@pytest.mark.parametrize("given", [False, True])
def test_what_a_killed_doctor_left_is_removed_by_the_next(tmp_path, given):
    (tmp_path / "stays.py").write_text("import time\nopen('began', 'w').close()\ntime.sleep(3600)\n")
    (tmp_path / "script.py").write_text("")
    place = tmp_path / "place"
    place.mkdir()
    words, more = (("--directory", place), {}) if given else ((), {"TMPDIR": str(place)})
    with running("doctor", *words, "--nproc", 1, "stays.py", cwd=tmp_path, **more) as (process, _):
        wait_until((tmp_path / "began").is_file, "the script doesn't begin")
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert list(place.glob("lockstep-*/store"))
    assert doctor(*words, "--nproc", 1, "script.py", cwd=tmp_path, **more).json["verdict"] == "UNDETERMINED"
    assert not list(place.glob("*lockstep-*"))


def test_steps_are_seen_though_pytorch_was_loaded_before_the_script(script):
    (script / "sitecustomize.py").write_text("import torch")
    paths = os.pathsep.join(filter(None, [str(script), os.environ.get("PYTHONPATH")]))
    found = doctor("script.py", "plain", cwd=script, PYTHONPATH=paths)
    assert (found.json["verdict"], found.kinds) == ("NOT IN SYNC", ["gradients"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "no script given"),
        (("absent.py",), "there is no file 'absent.py'"),
        (("--first", "0", "script.py"), "first: 0 is below 1"),
        (("--interval", "0", "script.py"), "interval: 0 is below 1"),
        (("--time-limit", "0", "script.py"), "time-limit: 0 is not above 0"),
        (("--nproc", "0", "script.py"), "nproc: 0 is below 1"),
        (("--json", "absent/report.json", "script.py"), "there is no directory"),
        (("--json", "script.py", "config.json"), "json: script.py doesn't end in .json"),
        (("--json", "config.json", "script.py"), "json: config.json exists and is no report of the doctor's"),
        (("--directory", "absent", "script.py"), "there is no directory"),
        (("--wrong", "script.py"), "--wrong"),
    ],
)
def test_bad_options_are_said_before_anything_starts(script, words, message):
    (script / "config.json").write_text('{"lr": 0.1}')
    ended = lockstep("doctor", *words, cwd=script)
    assert ended.code == 2
    assert message in error_line(ended)
    assert (script / "script.py").read_text() == SCRIPT
    assert (script / "config.json").read_text() == '{"lr": 0.1}'


def test_a_report_takes_the_place_of_an_earlier_one(tmp_path):
    (tmp_path / "script.py").write_text("")
    (tmp_path / "report.json").touch()
    for _ in range(2):
        assert doctor("--nproc", 1, "script.py", cwd=tmp_path).json["verdict"] == "UNDETERMINED"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory where nobody can write")
def test_a_report_that_can_not_be_written_is_said_before_anything_starts(script):
    (script / "place").symlink_to("/proc/self")
    ended = lockstep("doctor", "--json", "place/report.json", "script.py", "alone", cwd=script)
    assert (ended.code, ended.stdout) == (2, "")
    assert "json: place/report.json can't be written: " in error_line(ended)
    assert not list(script.glob("*.told"))


def test_a_verdict_whose_report_can_not_be_written_in_the_end_is_printed(script):
    place = script / "place"
    place.mkdir()
    (script / "removing.py").write_text("import shutil; shutil.rmtree('place')")
    ended = lockstep("doctor", "--nproc", 1, "--json", place / "report.json", "removing.py", cwd=script)
    assert ended.code == 3
    assert "UNDETERMINED: there is one rank" in ended.stdout
    assert f"json: {place / 'report.json'} can't be written: No such file or directory" in error_line(ended)


def test_ranks_of_several_hosts_need_a_directory_they_share(script):
    place = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    ended = lockstep("doctor", "script.py", cwd=script, **place)
    assert (ended.code, "give --directory DIR" in error_line(ended)) == (2, True)
    ended = lockstep("doctor", "--nproc", 2, "script.py", cwd=script, **place)
    assert "the launcher started 4 ranks" in error_line(ended)


def test_the_command_loads_no_framework():
    code = "import sys, lockstep.doctor, lockstep.commands.doctor; print({'torch', 'jax'} & set(sys.modules))"
    ended = run_words([sys.executable, "-c", code], Path.cwd())
    assert ended.stdout == "set()\n"
